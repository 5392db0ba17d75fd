"""compute-sanitizer over the operators' small GPU tests: memory errors, races in shared memory, misused barriers.

    python benchmarks/sanitize.py [--tool memcheck racecheck synccheck initcheck] [--ops kda mla] [--log FOLDER]

The tool comes from NVIDIA's package `nvidia-cuda-sanitizer-api` (13.0.x beside CUDA 13.0) or the PATH. The tests run once without
it, so that every kernel is compiled, then once for each tool, which looks at this project's kernels alone. For memcheck PyTorch's
caching allocator is off: each tensor is an allocation of its own, and one byte past its end is an error. Ends with the number of
operators in which something was found or failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from vllm.model_executor.models.kimi_k3_fast.ops.build import tool as find_tool  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SELECTIONS = {  # op -> pytest's -k: every kernel, at small shapes, without graphs (whose capture wants the caching allocator)
    "attn_res": "error_is_within and not 7168 or sources_that_cancel",
    "kda": "null_slots or denormal or state_keeps",
    "mla": "padded_rows or large_magnitude or (test_kernels_against_float64 and 65)",
    "projection": "error_is_within and not 7168",
    "moe_front": "error_is_within and not 7168 or ties",
    "moe_tail": "error_is_within and not 7168",
    "experts": "gpu_padded_rows or gpu_extreme_scales",
    "oproj": "numbers_over_many_epochs",
    "prefetch": "changes_no_byte and not 7168",
}


def command(op: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", f"tests/ops/test_{op}.py", "-k", SELECTIONS[op]]


def run(op: str, tool: str | None, log: Path | None) -> bool:
    """One op's tests, under a tool or plain. Says how it went; whether all is well."""
    line, environment = command(op), dict(os.environ)
    if tool:
        checker = [find_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        checker += ["--report-api-errors", "no"]  # the driver is asked for symbols of other releases, and says no
        line = [*checker, "--kernel-name", "kernel_substring=cutlass", *line]
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.monotonic()
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    verdict = [
        text for text in output.splitlines() if "ERROR SUMMARY" in text or "RACECHECK SUMMARY" in text or " passed" in text
    ]
    print(f"{op:<11} {tool or 'plain':<10} {done.returncode} {time.monotonic() - start:5.0f} s  {'; '.join(verdict)}", flush=True)
    if done.returncode:
        print(output[-3000:], flush=True)
    if log and tool:
        log.mkdir(parents=True, exist_ok=True)
        (log / f"{op}_{tool}.txt").write_text(output)
    return done.returncode == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="*", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--ops", nargs="*", choices=SELECTIONS, default=list(SELECTIONS))
    parser.add_argument("--log", type=Path, help="keep each tool's whole output in this folder")
    options = parser.parse_args()
    bad = {op for op in options.ops for tool in (None, *options.tool) if not run(op, tool, options.log)}
    print("found something in: " + (", ".join(sorted(bad)) or "nothing"))
    sys.exit(len(bad))
