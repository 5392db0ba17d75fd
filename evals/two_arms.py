"""`make eval`: the tiny suite on the standard path and on the fast one, one server after the other, then the gate on both.

    python evals/two_arms.py checkpoints/k3-tiny [--record]

Exit status: 0 passed, 1 failed, 2 could not tell. Files: OUT/standard, OUT/fast (gate.json, gate.md), a server log in each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.model_executor.models.kimi_k3_fast.cli.server import Server, ServerFailed
from vllm.model_executor.models.kimi_k3_fast.evaluation import run, suites

# A wave's prompts fit one step: its replies then decode in steps without prompt tokens, which is what the fast path serves.
SERVE = (
    "--served-model-name",
    "k3-tiny",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "32768",
    "--no-enable-prefix-caching",
)


def fast_mode(mode: str, settings: Mapping[str, Any] | None = None) -> list[str]:
    """`vllm serve` arguments that set the fork's mode (auto, require or off) and, if given, further settings."""
    return ["--additional-config", json.dumps({"kimi_k3_fast": {"mode": mode, **(settings or {})}})]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--suite", default="tiny")
    parser.add_argument("--require-fast", type=float, default=0.99)
    parser.add_argument("--record", action="store_true", help="store the standard arm's scores as the suite's baseline")
    parser.add_argument("--out", type=Path, default=Path(".eval"))
    parser.add_argument("--settings", default="{}", help="more settings of the fork for the fast arm, as JSON")
    args = parser.parse_args()
    begun = time.monotonic()
    standard, fast = args.out / "standard", args.out / "fast"
    try:
        with Server(args.checkpoint, [*SERVE, *fast_mode("off")], log=standard / "server.log") as server:
            run.gate(server.url, args.suite, standard, require_fast=None, record=args.record)
        print(f"standard arm done after {time.monotonic() - begun:.0f} s", flush=True)
        with Server(args.checkpoint, [*SERVE, *fast_mode("auto", json.loads(args.settings))], log=fast / "server.log") as server:
            status, table = run.gate(server.url, args.suite, fast, require_fast=args.require_fast, against=standard)
    except (run.CouldNotTell, ServerFailed) as error:
        print(error, file=sys.stderr)
        return run.COULD_NOT_TELL
    print(table)
    print(f"both arms of suite {suites.load(args.suite).name} in {time.monotonic() - begun:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
