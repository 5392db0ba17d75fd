"""The CPU operators under the address and undefined-behaviour sanitizers, shapes and indices drawn at random, a minute each.

    python benchmarks/cpu_fuzz.py --out benchmarks/results/cpu_fuzz.json [--seconds 300] [--seed 1]

The operators of a group take turns: five minutes for a group are a minute for each of the five that the largest has.

Every case runs on every instruction set of the machine. A valid one must give finite numbers that agree between them; one with
a bad index or size must be refused and write nothing; a sanitizer's report ends the run and nothing is recorded. CI plays five
seconds of the same program (`tests/ops_cpu/driver.cpp`, in `tests/ops_cpu/test_library.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu_decode import provenance

from vllm.model_executor.models.kimi_k3_fast.ops.cpu import available

ROOT = Path(__file__).parents[1]
GROUPS = ("dense", "kda", "mla", "moe")  # of operators, as the driver names them


def play(program: Path, seconds: float, seed: int, group: str) -> dict[str, dict[str, int]]:
    """Valid and refused cases of each operator of a group. Raises SystemExit with the sanitizer's report."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([program, str(seconds), str(seed), group], capture_output=True, text=True, env=clean)
    if done.returncode:
        raise SystemExit(f"{group}, seed {seed}: {done.stderr}")
    rows = (line.split() for line in done.stdout.splitlines())
    return {op: {"valid": int(valid), "refused": int(refused)} for op, valid, refused in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300, help="for each group of operators")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    compiler = os.environ.get("CXX", "g++").split()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    report: dict[str, Any] = {"benchmark": "cpu_fuzz", "compiler": version, "sanitizers": ["address", "undefined"]}
    report |= {"instruction_sets": available(), "seconds_of_a_group": options.seconds, "provenance": provenance(), "groups": {}}
    with tempfile.TemporaryDirectory() as folder:
        program, build = Path(folder) / "driver", ROOT / "csrc/kimi_k3_fast/cpu/build.py"
        source = ROOT / "tests/ops_cpu/driver.cpp"
        subprocess.run([sys.executable, build, program, "--driver", source, "--sanitize"], check=True)
        for seed, group in enumerate(GROUPS, options.seed):
            report["groups"][group] = {"seed": seed, "cases": play(program, options.seconds, seed, group)}
            print(group, report["groups"][group], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
