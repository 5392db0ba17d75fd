"""compute-sanitizer over the operators' small GPU tests: memory errors, and races in shared memory.

    python benchmarks/sanitize.py [--ops kda mla] [--jobs 4] [--json OUT] [--log FOLDER]

The program comes from NVIDIA's package `nvidia-cuda-sanitizer-api` or from the PATH: 13.4 or later, as 13.0 to 13.3 lack the part
that starts the tests. The tests run once without it, so that every kernel is compiled (`--compiled`: they are), then once for
each tool, which looks at this project's kernels alone. Beside them each tool must find the fault of a kernel that has it
(`careless`). Ends with the number of runs in which something was found, failed or did not end in time.

memcheck: PyTorch's caching allocator is off, so that each tensor is an allocation of its own, and one byte past its end an error.
`--unoptimised`: kernels as the assembler writes them without optimisation, in which every warp's barrier is an instruction.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.timing import provenance  # noqa: E402
from vllm.model_executor.models.kimi_k3_fast.ops.build import tool as find_tool  # noqa: E402

TOOLS = ("memcheck", "racecheck")
KERNELS = ROOT / "build" / "unoptimised_kernels"
FOUND = 9  # exit status of the tool when it has found something
SAID = r"(ERROR|RACECHECK) SUMMARY|Internal Sanitizer Error|\d+ (passed|failed)"
SELECTIONS = {  # op -> pytest's -k: every kernel, at small shapes, without graphs (whose capture wants the caching allocator)
    "attn_res": "error_is_within and not 7168 or sources_that_cancel",
    "kda": "null_slots or denormal or state_keeps",
    "mla": "padded_rows or large_magnitude or (test_kernels_against_float64 and 65)",
    "projection": "error_is_within and not 7168",
    "moe_front": "error_is_within and not 7168 or ties",
    "moe_tail": "error_is_within and not 7168",
    "experts": "gpu_padded_rows or gpu_extreme_scales",
    "prefetch": "changes_no_byte and not 7168",
    "oproj": "numbers_over_many_epochs",  # here and below ranks run as streams of one GPU
    "posted": "numbers_over_many_epochs",
    "topk": "ranks_choose_as_one",
}


@cute.kernel
def _kernel(out: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    shared = SmemAllocator().allocate_tensor(Int32, cute.make_layout(64), byte_alignment=16)
    shared[thread] = Int32(thread)
    out[thread + 64] = shared[(thread + 32) % 64]


@cute.jit
def _launch(out: cute.Tensor) -> None:
    _kernel(out).launch(grid=[1, 1, 1], block=[64, 1, 1])


def careless() -> None:
    """The control: a kernel that reads what another warp writes behind no barrier, and writes past the end of its tensor."""
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    _launch(from_dlpack(out))
    torch.cuda.synchronize()


def pytest_configure() -> None:
    """As a plug-in of pytest: kernels are assembled without optimisation."""
    compile_as_served = cute.compile

    def compile_plainly(*args: Any, options: str, **rest: Any) -> Any:
        return compile_as_served(*args, options=f"{options} --ptxas-options=-O0", **rest)

    cute.compile = compile_plainly


def command(op: str, optimised: bool) -> list[str]:
    if op == "careless":
        return [sys.executable, __file__, "--careless"]
    plug_in = [] if optimised else ["-p", "benchmarks.sanitize"]
    return [sys.executable, "-m", "pytest", *plug_in, "-q", "-x", "-m", "gpu", f"tests/ops/test_{op}.py", "-k", SELECTIONS[op]]


def run(op: str, tool: str | None, optimised: bool, limit: float, log: Path | None) -> dict[str, Any]:
    """One op's tests, under a tool or plain: how it ended (`exit` is null where `limit` seconds were not enough), what was said,
    and whether all is well."""
    line, environment = command(op, optimised), dict(os.environ)
    if not optimised:
        environment["K3FAST_KERNELS"] = str(KERNELS)
    if tool:
        checker = [find_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
        checker += ["--report-api-errors", "no"]  # the driver is asked for symbols of other releases, and says no
        line = [*checker, "--kernel-name", "kernel_substring=cutlass", *line]
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.monotonic()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True, **streams)
    killer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    killer.start()
    output, _ = process.communicate()
    status = process.returncode if killer.is_alive() else None
    killer.cancel()
    if log:
        log.mkdir(parents=True, exist_ok=True)
        (log / f"{op}_{tool or 'plain'}{'' if optimised else '_unoptimised'}.txt").write_text(output)
    said = "; ".join([text for text in output.splitlines() if re.search(SAID, text)][-4:])
    well = status == (FOUND if tool and op == "careless" else 0)
    seconds = round(time.monotonic() - start)
    print(f"{op:<11} {tool or 'plain':<10} {'well' if well else 'NOT WELL'} {status} {seconds:5} s  {said}", flush=True)
    if not well:
        print(output[-3000:], flush=True)
    return {"op": op, "tool": tool, "optimised": optimised, "well": well, "exit": status, "seconds": seconds, "said": said}


def write(path: Path, commit: str | None, results: list[dict[str, Any]]) -> None:
    version = subprocess.run([find_tool("compute-sanitizer"), "--version"], capture_output=True, text=True).stdout
    head = {"benchmark": "sanitize", "tool": version.strip().splitlines()[-1], "provenance": provenance(commit), "results": []}
    rows = ",\n".join(f"  {json.dumps(result)}" for result in results)
    path.write_text(json.dumps(head, indent=1).replace('"results": []', f'"results": [\n{rows}\n ]') + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="*", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--ops", nargs="*", choices=SELECTIONS, default=list(SELECTIONS))
    parser.add_argument("--compiled", action="store_true", help="every kernel is in its store: no runs without a tool")
    parser.add_argument("--unoptimised", action="store_true", help="kernels that are assembled without optimisation")
    parser.add_argument("--jobs", type=int, default=1, help="operators at a time")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one operator under one tool")
    parser.add_argument("--json", type=Path, help="write how each run ended to this file")
    parser.add_argument("--commit", help="the commit measured, where the tree is not a git checkout")
    parser.add_argument("--log", type=Path, help="keep each run's whole output in this folder")
    parser.add_argument("--careless", action="store_true", help="run the kernel with faults, and nothing else")
    options = parser.parse_args()
    if options.careless:
        careless()
        sys.exit()
    results: list[dict[str, Any]] = []
    one_writes = threading.Lock()

    def every_tool(op: str) -> None:
        for tool in options.tool if options.compiled else [None, *options.tool]:
            result = run(op, tool, not options.unoptimised, options.limit, options.log)
            with one_writes:
                results.append(result)
                if options.json:
                    write(options.json, options.commit, results)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(every_tool, ["careless", *options.ops]))
    bad = [f"{result['op']} {result['tool'] or 'plain'}" for result in results if not result["well"]]
    print("not well: " + (", ".join(bad) or "nothing"))
    sys.exit(len(bad))
