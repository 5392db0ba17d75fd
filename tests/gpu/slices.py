"""Servers of rank slices on GPUs, for the tests of this folder: a few layers of each kind, random weights, a tokenizer.

    python tests/gpu/slices.py COMMIT "test_engine_cuda.py: 16 passed" ...

Sizes of a layer are those of a rank at TP8; the vocabulary is the tokenizer's. The fork serves with `allow_unvalidated`: these
tests are what validates it. Several engines share a GPU, so each has a cache of given size.

When tests have passed on a GPU, the command above records which, and with which machine code, as digests of the PTX of all
kernels that one rank takes (`SERVED`; needs no GPU). `tests/scope/test_evidence.py` holds the kernels of later commits to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]
import rank_slice

from vllm.model_executor.models.kimi_k3_fast.cli.server import Server

ROOT = Path(__file__).resolve().parents[2]
NAME = "slice"
LAYERS = 5
BUDGET = 2048  # tokens of a step: a longer prompt comes in chunks
LENGTH = 8192
CACHE = 1 << 30  # bytes: 1213 blocks of 768 tokens
TRAINED = ROOT / "checkpoints/k3-tiny"
SERVED = ROOT / "benchmarks/results/h200/served_kernels.json"
LOGS = ROOT / ".demo"  # stay after the run, for whoever asks why a test failed
captured: dict[int, Any] = {}  # by tokens, the index tensors of each size's graph in this process; see `remember_steps`


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def sizes(requests: int) -> list[int]:
    """The decode batches that are captured."""
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= requests]


def config(tp: int, full_tp: int = 8) -> dict[str, Any]:
    """config.json of the slice, with the trained checkpoint's vocabulary."""
    theirs = json.loads((TRAINED / "config.json").read_text())
    vocabulary = {key: theirs[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    return rank_slice.config(full_tp, tp, LAYERS) | vocabulary


def write_model(folder: Path, tp: int) -> Path:
    """The slice's config and the trained checkpoint's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(tp)))
    for file in TRAINED.glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    return folder


def compile_kernels(wanted: Iterable[tuple[int, Sequence[int], bool]]) -> None:
    """Those of several engines at once, which would otherwise compile against each other. wanted: (ranks, sizes, mailbox)."""
    from vllm.model_executor.models.kimi_k3_fast.fast.compile_kernels import compile_missing
    from vllm.model_executor.models.kimi_k3_fast.ops import build

    arch = build.device_arch()
    found = [spec for tp, tokens, mailbox in wanted for spec in kernels(arch, tp, tokens, mailbox)]
    compile_missing(found, arch, print)


def kernels(arch: str, tp: int, tokens: Iterable[int], mailbox: bool = False) -> list[Any]:
    """Specs of all that the slice's decode batches take."""
    from vllm.model_executor.models.kimi_k3_fast.fast import cuda_ahead

    return cuda_ahead.specs(config(tp), arch, tp, LENGTH, tokens, mailbox)


def digests(arch: str = "sm_90a") -> dict[str, list[str]]:
    """Of the PTX of every kernel of one rank's decode batches to 64, by the kernel's name. Compiles what is missing."""
    from vllm.model_executor.models.kimi_k3_fast.fast.compile_kernels import compile_missing
    from vllm.model_executor.models.kimi_k3_fast.ops import build

    specs = kernels(arch, 1, sizes(64))
    compile_missing(specs, arch, print)
    found: dict[str, list[str]] = {}
    for spec in specs:
        ptx = build.artefact(spec, arch, "ptx").read_bytes()
        found.setdefault(spec.name, []).append(hashlib.sha256(ptx).hexdigest()[:16])
    return {name: sorted(found[name]) for name in sorted(found)}


def environment(folder: Path) -> dict[str, str]:
    """What a process needs to know the plug-ins: the weights', the fork's, and the tests' own."""
    path = [*rank_slice.entry_points(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    info = folder / "k3_sabotage-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: k3-sabotage\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nk3_sabotage = sabotage:register\n")
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_PLUGINS": f"{rank_slice.WEIGHTS_PLUGIN},{rank_slice.FORK_PLUGIN},k3_sabotage",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache and /collective_rpc
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "K3FAST_JOBS": os.environ.get("K3FAST_JOBS", "4"),  # should a kernel be missing: engines start side by side
        **rank_slice.NO_MULTICAST,
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
    }


def options(tp: int, requests: int) -> dict[str, Any]:
    """Engine options, as `vllm.LLM` takes them."""
    return {
        "load_format": rank_slice.LOAD_FORMAT,
        "tensor_parallel_size": tp,
        "dtype": "bfloat16",
        "max_model_len": LENGTH,
        "max_num_seqs": requests,
        "max_num_batched_tokens": BUDGET,
        "kv_cache_memory_bytes": CACHE,
        "gpu_memory_utilization": 0.05,  # of no effect beside the line above, but checked against what is free
        "compilation_config": {"cudagraph_capture_sizes": sizes(requests), "cudagraph_mode": "FULL_AND_PIECEWISE"},
    }


def fork(**settings: Any) -> dict[str, Any]:
    return {"kimi_k3_fast": {"mode": "require", "allow_unvalidated": True, **settings}}


def serve(folder: Path, tp: int, settings: Mapping[str, Any], log: str, requests: int, **more: Any) -> Server:
    """A server of the slice, not yet started. more: further options of `vllm serve`, as `options` names them."""
    args = ["--served-model-name", NAME]
    for name, value in {**options(tp, requests), "additional_config": settings, **more}.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            args.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            args += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return Server(write_model(folder / "model", tp), args, log=LOGS / log, environ=environment(folder / "entry"))


def rpc(url: str, method: str, *args: str) -> list[Any]:
    """What `method` of the worker gave, rank by rank."""
    data = json.dumps({"method": method, "args": list(args)}).encode()
    asked = urllib.request.Request(f"{url}/collective_rpc", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)["results"]


def remember_steps() -> None:
    """From now on, keep what each size's graph is captured with."""
    from vllm.model_executor.models.kimi_k3_fast.fast.cuda_executor import Executor

    run = Executor.run

    def remembered(self: Any, tokens: int, embedded: Any, step: Any) -> Any:
        captured[tokens] = step
        return run(self, tokens, embedded, step)

    Executor.run = remembered  # type: ignore[method-assign]


def gpu_memory(url: str) -> list[int]:
    """MiB that the server's tensors hold, by rank."""
    return [int(mib) for mib in rpc(url, "k3_memory")]


def workers(url: str) -> list[int]:
    """Process ids of the server's tensor-parallel workers, by rank."""
    return [int(pid) for pid in rpc(url, "k3_pid")]


if __name__ == "__main__":
    served = {"arch": "sm_90a", "commit": sys.argv[1], "passed": sys.argv[2:]}
    served |= {"dsl": version("nvidia-cutlass-dsl"), "ptx": digests()}
    SERVED.write_text(json.dumps(served, indent=1) + "\n")
