"""Servers of rank slices on GPUs, for the tests of this folder: four layers of each kind of work, random weights, a tokenizer.

Sizes of a layer are those of a rank at TP8; the vocabulary is the tokenizer's. The fork serves with `allow_unvalidated`: these
tests are what validates it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rank_slice

from vllm.model_executor.models.kimi_k3_fast.cli.server import Server

ROOT = Path(__file__).resolve().parents[2]
NAME = "slice"
LAYERS = 8
BUDGET = 2048  # tokens of a step: a longer prompt comes in chunks
LENGTH = 8192
TRAINED = ROOT / "checkpoints/k3-tiny"
LOGS = ROOT / ".demo"  # stay after the run, for whoever asks why a test failed


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def write_model(folder: Path, tp: int, full_tp: int = 8) -> Path:
    """config.json of the slice, and the trained checkpoint's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = rank_slice.config(full_tp, tp, LAYERS)
    theirs = json.loads((TRAINED / "config.json").read_text())
    config |= {key: theirs[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(config))
    for file in TRAINED.glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """What a process needs to know the plug-ins: the weights' and the fork's."""
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), *rank_slice.entry_points(folder)]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_PLUGINS": f"{rank_slice.WEIGHTS_PLUGIN},{rank_slice.FORK_PLUGIN}",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **rank_slice.NO_MULTICAST,
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    }


def options(tp: int, blocks: int, requests: int = 64) -> dict[str, Any]:
    """Engine options, as `vllm.LLM` takes them."""
    return {
        "load_format": rank_slice.LOAD_FORMAT,
        "tensor_parallel_size": tp,
        "dtype": "bfloat16",
        "max_model_len": LENGTH,
        "max_num_seqs": requests,
        "max_num_batched_tokens": BUDGET,
        "num_gpu_blocks_override": blocks,
        "gpu_memory_utilization": 0.8,
        "compilation_config": {
            "cudagraph_capture_sizes": [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= requests],
            "cudagraph_mode": "FULL_AND_PIECEWISE",
        },
    }


def fork(**settings: Any) -> dict[str, Any]:
    return {"kimi_k3_fast": {"mode": "require", "allow_unvalidated": True, **settings}}


def serve(folder: Path, tp: int, blocks: int, settings: Mapping[str, Any], log: str, **more: Any) -> Server:
    """A server of the slice, not yet started. more: further options of `vllm serve`, as `options` names them."""
    args = ["--served-model-name", NAME]
    for name, value in {**options(tp, blocks), "additional_config": settings, **more}.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            args.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            args += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return Server(write_model(folder / "model", tp), args, log=LOGS / log, environ=environment(folder / "entry"))


def get(url: str, timeout: float = 30.0) -> tuple[int, str]:
    """Status and body of a GET; status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (urllib.error.URLError, OSError) as error:
        return 0, str(error)


def report(url: str) -> dict[str, Any]:
    status, body = get(f"{url}/k3fast/report")
    assert status == 200, body
    return json.loads(body)


def metric(url: str, name: str) -> float:
    """The sum of a series over its labels."""
    lines = get(f"{url}/metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ", name + "_total{")))


def gpu_memory() -> list[int]:
    """MiB in use on each GPU, by whoever."""
    text = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    ).stdout
    return [int(line) for line in text.splitlines()]


def workers(server: Server) -> list[int]:
    """Process ids of the server's tensor-parallel workers, by rank."""
    import psutil

    assert server.process is not None
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        title = re.search(r"Worker_TP(\d+)", " ".join(process.cmdline()))
        if title:
            found[int(title[1])] = process.pid
    assert len(found) > 1, "expected processes titled Worker_TP0, Worker_TP1, found none"
    return [found[rank] for rank in sorted(found)]


def wait_for(what: str, seconds: float, true: Any) -> float:
    """Seconds until `true()`. Fails after `seconds`."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.25)
    return time.monotonic() - began
