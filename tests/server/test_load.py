"""The load of `load_clients.py` on a CPU: the trained tiny checkpoint, whose answers are known, audit and shadow on.

Some twenty seconds and a few clients here; the evidence is of ten minutes and 64 clients:

    K3FAST_LOAD_SECONDS=600 K3FAST_LOAD_RESULT=benchmarks/results/cpu_load_64_clients.json pytest tests/server/test_load.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cpu_decode import provenance
from load_clients import Load, judge, play

from vllm.model_executor.models.kimi_k3_fast.cli import demo
from vllm.model_executor.models.kimi_k3_fast.cli.server import Server

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine

SECONDS = float(os.environ.get("K3FAST_LOAD_SECONDS", "12"))
RESULT = os.environ.get("K3FAST_LOAD_RESULT", "")
LONG = SECONDS >= 60
CLIENTS, WARM, GROWN_MIB = (64, 60.0, 64) if LONG else (12, 5.0, 512)
BLOCKS = 110 if LONG else 28  # of the cache: so many requests need more
BUDGET = 256  # tokens of a step
SETTINGS = {"mode": "require", "policy": "report", "audit": {"every": 8}, "shadow": {"every": 16}}
RETRIEVAL = [
    {"role": role, "content": text} for pair in demo.pieces() for role, text in zip(("user", "assistant"), pair, strict=True)
]
KNOWN = (
    ([{"role": "user", "content": demo.CHAIN}], demo.CHAIN_ENDS),
    ([*RETRIEVAL, {"role": "user", "content": demo.RETRIEVAL}], demo.RETRIEVED),
)
LOAD = Load(demo.NAME, CLIENTS, BUDGET, prompt=200, answer=100, dropped=400, prefixes=(300, 450, 700), known=KNOWN)


@pytest.fixture
def load_server() -> Iterator[Server]:
    args = ["--served-model-name", demo.NAME, "--max-model-len", "1024", "--max-num-seqs", str(CLIENTS)]
    args += ["--max-num-batched-tokens", str(BUDGET), "--num-gpu-blocks-override", str(BLOCKS), "--enable-prefix-caching"]
    args += ["--dtype", "bfloat16"]
    args += ["--additional-config", json.dumps({"kimi_k3_fast": SETTINGS}), *demo.COMPACT_JSON]
    # For /reset_prefix_cache. And oneDNN would keep a kernel of each prompt's length, up to 1,024: for a minute that is a leak.
    environ = {"VLLM_SERVER_DEV_MODE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
    with Server(demo.TRAINED, args, log=ROOT / ".demo" / "load-tests.log", environ=environ) as running:
        yield running


def memory(server: Server) -> list[int]:
    """MiB of each of the server's processes, without pages of files, which are there or not as others use them."""
    assert server.process is not None
    parent = psutil.Process(server.process.pid)
    infos = [process.memory_info() for process in (parent, *parent.children(recursive=True))]
    return [(info.rss - info.shared) >> 20 for info in infos]


def test_clients_with_audit_and_shadow(load_server: Server) -> None:
    found = {
        "provenance": provenance(),
        "settings": SETTINGS,
        "model": "checkpoints/k3-tiny, bfloat16",
        "limits": {"max_num_seqs": CLIENTS, "max_num_batched_tokens": BUDGET, "blocks": BLOCKS},
        **play(load_server.url, LOAD, WARM, SECONDS, lambda: memory(load_server)),
    }
    if RESULT:
        Path(RESULT).write_text(json.dumps(found, indent=1) + "\n")
    judge(found, LOAD, GROWN_MIB)
