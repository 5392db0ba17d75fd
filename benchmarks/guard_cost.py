"""What the always-on guard costs a decode step on the CPU, at batch 1 and 8.

Two measurements in one engine. `share`: every call from the step into the guard is timed where it happens, and their sum is
set against the step; the timers' own cost counts against the guard. `interleaved`: blocks of steps with the guard's calls in
place and replaced by nothing alternate, and the medians are compared; where other work runs beside it, its noise is larger than
the cost.

    python benchmarks/guard_cost.py --out benchmarks/results/guard_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

GUARD_CALLS = ("open_step", "close_step", "begin_writes", "slots_changed", "take_failing", "post")
HOOK_CALLS = ("batch_dispatched", "step_received", "begin_check", "end_check", "mark")
LIMIT = 0.01


def instrument(worker: Any, how: str) -> None:
    """In a worker: time the calls into the guard, replace them by nothing, or put them back."""
    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.patches import hooks

    now = guard.current()
    kept = worker.__dict__.setdefault("k3_kept", {name: getattr(hooks, name) for name in HOOK_CALLS})
    spent = worker.__dict__.setdefault("k3_spent", [0, 0])
    steps = worker.__dict__.setdefault("k3_steps", [])
    runner = worker.model_runner
    run = worker.__dict__.setdefault("k3_run", runner.execute_model)

    def timed(call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter_ns() - began

        return wrapper

    for name in GUARD_CALLS:
        now.__dict__.pop(name, None)
    for name, call in kept.items():
        setattr(hooks, name, call)
    if how == "timed":
        for name in ("close_step", "begin_writes"):  # the others are called by hooks
            setattr(now, name, timed(getattr(now, name)))
        for name, call in kept.items():
            setattr(hooks, name, timed(call))
    elif how == "nothing":
        now.open_step = lambda facts: None
        now.close_step = lambda *args, **kwargs: None
        now.begin_writes = lambda: False
        hooks.batch_dispatched = lambda *args: None
        hooks.step_received = lambda scheduler_output: None
        hooks.begin_check = lambda logits, ids, drafts, asynchronous, otherwise: otherwise
        hooks.end_check = lambda bad, ids, otherwise: otherwise
        hooks.mark = lambda *args: None

    def execute(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return run(*args, **kwargs)
        finally:
            steps.append(time.perf_counter_ns() - began)

    runner.execute_model = execute


def take(worker: Any) -> tuple[int, list[int]]:
    """Nanoseconds spent in the guard and of each step since the last call."""
    spent, steps = worker.k3_spent[0], list(worker.k3_steps)
    worker.k3_spent[0] = 0
    worker.k3_steps.clear()
    return spent, steps


def decode(llm: Any, batch: int, steps: int) -> tuple[int, list[int]]:
    """Decode `steps` tokens for `batch` requests; guard time, and the decode steps' times."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    llm.collective_rpc(take)
    llm.generate([{"prompt_token_ids": [30 + i, 40, 50]} for i in range(batch)], greedy, use_tqdm=False)
    spent, times = llm.collective_rpc(take)[0]
    return spent, times[2:]  # the first two hold the prompts


def measure(llm: Any, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    shares, with_guard, without = [], [], []
    for _ in range(rounds):
        llm.collective_rpc(instrument, args=("timed",))
        spent, times = decode(llm, batch, steps)
        shares.append(spent / (len(times) + 2) / statistics.median(times))
        for how, into in (("as it is", with_guard), ("nothing", without)):
            llm.collective_rpc(instrument, args=(how,))
            into.extend(decode(llm, batch, steps)[1])
    on, off = statistics.median(with_guard), statistics.median(without)
    return {
        "batch": batch,
        "step_us": round(on / 1e3, 1),
        "guard_us": round(statistics.median(shares) * on / 1e3, 2),
        "share": round(statistics.median(shares), 5),
        "interleaved": round(on / off - 1, 5),
        "steps": len(with_guard),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # sends functions to the worker
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_tiny(model)
        config = {"kimi_k3_fast": {"events": {"path": f"{folder}/events.jsonl"}}}
        llm = LLM(str(model), max_model_len=512, max_num_seqs=8, num_gpu_blocks_override=64, additional_config=config)
        results = [measure(llm, batch, args.steps, args.rounds) for batch in (1, 8)]
        llm.llm_engine.engine_core.shutdown()
    for row in results:
        print(
            f"batch {row['batch']}: step {row['step_us']} us, guard {row['guard_us']} us = {100 * row['share']:.2f} % "
            f"(interleaved {100 * row['interleaved']:+.2f} %)"
        )
    if args.out:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        args.out.write_text(
            json.dumps({"model": "k3fast checkpoint tiny", "machine": machine, "results": results}, indent=1) + "\n"
        )
    if any(row["share"] > LIMIT for row in results):
        raise SystemExit(f"expected the guard to take at most {100 * LIMIT:.0f} % of a decode step")


if __name__ == "__main__":
    main()
