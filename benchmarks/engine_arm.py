"""One vLLM engine in a process of its own, driven step by step over a pipe: an arm of an interleaved benchmark.

`Arm` starts the process and calls the methods of `Engine` in it. The engine core lives in the arm's process, so that it takes a
step exactly when it is told to: between its turns an arm holds its requests and caches and leaves the GPU alone. With
asynchronous scheduling, vLLM's default, one step is always on its way; a turn therefore drops its first steps and ends by waiting
for the GPU. Tensor-parallel workers are processes below the arm's, as in a server.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DROPPED = 3  # first steps of a turn: one was on its way before, and the pipeline of two fills again
COMMUNICATION = ("all_reduce", "allreduce", "nccl", "cross_device", "multimem", "all_gather", "reduce_scatter")


class ArmFailed(RuntimeError):
    """The engine's process raised or ended; the message carries the end of its log."""


@dataclass(frozen=True)
class Spec:
    """What an arm is started with. `environment` and `path` (folders of modules and plug-ins) hold for its process and workers;
    `options` go to `vllm.LLM`; `log` gets everything that it prints."""

    name: str
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    path: Sequence[str]
    log: Path
    device: str = "cuda"


class Arm:
    """The near end. `call(method, *args)` runs `Engine.method(*args)` and gives what it returned; `begin` and `wait` are its two
    halves, so that two arms can start at a time. Raises ArmFailed."""

    def __init__(self, spec: Spec) -> None:
        self.name, self.spec = spec.name, spec
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=serve, args=(spec, far), name=f"arm-{spec.name}")
        self._process.start()
        far.close()

    def begin(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def wait(self, seconds: float = 600.0) -> Any:
        if not self._pipe.poll(seconds):
            raise ArmFailed(f"{self.name}: no answer within {seconds:.0f} s; its log ends:\n{self.tail()}")
        try:
            good, found = self._pipe.recv()
        except EOFError:
            raise ArmFailed(f"{self.name}: its process ended; its log ends:\n{self.tail()}") from None
        if not good:
            raise ArmFailed(f"{self.name}: {found}\nits log ends:\n{self.tail()}")
        return found

    def call(self, method: str, *args: Any, seconds: float = 600.0) -> Any:
        self.begin(method, *args)
        return self.wait(seconds)

    def tail(self, lines: int = 40) -> str:
        if not self.spec.log.exists():
            return "(no log)"
        return "\n".join(self.spec.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the process and everything below it."""
        with contextlib.suppress(OSError):
            self._pipe.send(("stop", ()))
        self._process.join(30)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if self._process.pid is not None:
                try:
                    os.killpg(self._process.pid, signum)
                except (ProcessLookupError, PermissionError):
                    break
                self._process.join(5)


class Half:
    """One of the two arms that a single engine is: every call first puts this arm's decode graphs in force."""

    def __init__(self, name: str, arm: Arm) -> None:
        self.name, self._arm = name, arm

    def call(self, method: str, *args: Any, seconds: float = 600.0) -> Any:
        self._arm.call("take", self.name)
        return self._arm.call(method, *args, seconds=seconds)


def serve(spec: Spec, pipe: Any) -> None:
    """The far end: obey until told to stop."""
    os.setsid()
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(spec.environment)
    paths = [p for p in spec.path if p not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.extend(p for p in paths if p not in sys.path)
    engine: Engine | None = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        if method == "stop":
            if engine is not None:
                engine.llm.llm_engine.engine_core.shutdown()
            return
        try:
            if method == "start":
                engine = Engine(spec)
                pipe.send((True, engine.facts()))
            else:
                assert engine is not None
                pipe.send((True, getattr(engine, method)(*args)))
        except Exception as error:
            traceback.print_exc()
            sys.stdout.flush()
            pipe.send((False, f"{type(error).__name__}: {error}"))


@dataclass
class Engine:
    """In the arm's process: the engine and the requests that it holds."""

    spec: Spec
    llm: Any = None
    running: list[str] = field(default_factory=list)
    made: int = 0
    started_seconds: float = 0.0

    def __post_init__(self) -> None:
        began = time.perf_counter()
        from vllm import LLM

        self.llm = LLM(**self.spec.options)
        self.started_seconds = time.perf_counter() - began

    # -- what it is --------------------------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, Any]:
        """Where and with what the arm runs, for the record."""
        config = self.llm.llm_engine.vllm_config
        graphs = config.compilation_config
        return {
            "start_seconds": round(self.started_seconds, 1),
            "plugins": os.environ.get("VLLM_PLUGINS"),
            "settings": (config.additional_config or {}).get("kimi_k3_fast"),
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "cudagraph_mode": str(graphs.cudagraph_mode),
            "capture_sizes": list(graphs.cudagraph_capture_sizes or ()),
            "asynchronous": bool(config.scheduler_config.async_scheduling),
            "v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
            "token_budget": config.scheduler_config.max_num_batched_tokens,
            "cache_blocks": self._cache().num_blocks,
            "ranks": self.llm.collective_rpc(describe),
        }

    def _cache(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config

    def room(self, context: int) -> int:
        """How many requests of `context` tokens the caches hold at once."""
        needed = 0
        for group in self._cache().kv_cache_groups:
            grows = "Mamba" not in type(group.kv_cache_spec).__name__
            needed += -(-context // group.kv_cache_spec.block_size) if grows else 2
        return (self._cache().num_blocks - 1) // needed

    def report(self) -> list[dict[str, Any]] | None:
        """The guard's report of every rank; None without the fork."""
        if "kimi_k3_fast" not in (os.environ.get("VLLM_PLUGINS") or "kimi_k3_fast").split(","):
            return None
        return [json.loads(text) for text in self.llm.collective_rpc("k3fast_report")]

    def twin(self) -> int:
        """Let this engine be both arms: see `twin_graphs`. The number of graphs that stock got."""
        import twin_graphs

        return self.llm.collective_rpc(twin_graphs.make)[0]

    def take(self, path: str) -> None:
        """Decode steps are those of "stock" or "fast" from now on."""
        import twin_graphs

        self.llm.collective_rpc(twin_graphs.take, args=(path,))

    # -- requests ----------------------------------------------------------------------------------------------------------------
    def fill(self, batch: int, context: int) -> dict[str, float]:
        """Bring the number of running requests up to `batch`, each new one with a prompt of `context` tokens, and step until a
        step decodes all of them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        began, missing = time.perf_counter(), batch - len(self.running)
        config = self.llm.llm_engine.vllm_config.model_config
        vocabulary = config.get_vocab_size()
        params = SamplingParams(
            max_tokens=config.max_model_len - context,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for _ in range(missing):
            name = f"request-{self.made}"
            draw = random.Random(self.made)
            prompt = [draw.randrange(3, vocabulary) for _ in range(context)]
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
            self.running.append(name)
            self.made += 1
        most = 64 + 4 * batch * context // self.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        steps = 0
        while self._step() < batch:
            steps += 1
            if steps > most + batch:
                raise RuntimeError(f"after {steps} steps not all {batch} requests decode: the caches are too small for them")
        for _ in range(4):
            self._step()
        self._settle()
        return {"seconds": time.perf_counter() - began, "prompt_tokens": missing * context, "steps": steps}

    def _step(self) -> int:
        """One step of the engine; the number of requests that gave a token."""
        return sum(bool(out.outputs[0].token_ids) for out in self.llm.llm_engine.step())

    def _settle(self) -> None:
        self.llm.collective_rpc(synchronise)

    def steps(self, count: int) -> dict[str, float]:
        """`count` decode steps: their seconds from outside, and the tokens they gave."""
        for _ in range(DROPPED):
            self._step()
        tokens, began = 0, time.perf_counter()
        for _ in range(count):
            tokens += self._step()
        seconds = time.perf_counter() - began
        self._settle()
        return {"seconds": seconds, "tokens": tokens}

    def drop(self) -> None:
        """End all requests."""
        self.llm.llm_engine.abort_request(self.running)
        self.running.clear()
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        self._settle()

    def trace(self, count: int) -> list[dict[str, Any]]:
        """What the profiler saw of `count` decode steps, on every rank."""
        for _ in range(DROPPED):
            self._step()
        self._settle()
        self.llm.collective_rpc(begin_trace)
        for _ in range(count):
            self._step()
        self._settle()
        return self.llm.collective_rpc(end_trace, args=(count,))  # a step leaves one behind on its way: as many ran as were taken

    def complete(self, prompts: Sequence[Sequence[int]], count: int, top: int, prompt_top: int | None = None) -> list[dict]:
        """Greedy tokens of each prompt with the log-probabilities of the `top` most likely ones at each position, and those of
        the prompt's positions if asked: {"tokens": [...], "top": [{token: logprob}, ...], "prompt": [...]}."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, logprobs=top, prompt_logprobs=prompt_top
        )
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)

        def plain(rows: Any) -> list[dict[int, float]]:
            return [{token: value.logprob for token, value in (row or {}).items()} for row in rows or ()]

        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "top": plain(out.outputs[0].logprobs),
                "prompt": plain(out.prompt_logprobs),
            }
            for out in outputs
        ]


# -- in the workers --------------------------------------------------------------------------------------------------------------
def synchronise(worker: Any) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe(worker: Any) -> dict[str, Any]:
    """One rank: device, library versions, the classes that serve, memory."""
    import importlib.metadata
    import platform

    import torch

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    runner = getattr(worker, "worker", worker).model_runner
    model = runner.get_model() if hasattr(runner, "get_model") else runner.model
    methods = [m.quant_method for m in model.modules() if getattr(m, "quant_method", None) is not None]
    groups = [group for groups in getattr(runner, "attn_groups", ()) for group in groups]
    found = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "vllm", "nvidia-cutlass-dsl", "flashinfer-python")},
        "model_class": f"{type(model).__module__}.{type(model).__name__}",
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "quant_methods": sorted({type(method).__name__ for method in methods}),
        "expert_backends": sorted({str(m.mxfp4_backend) for m in methods if hasattr(m, "mxfp4_backend")}),
        "attention_backends": sorted({group.backend.__name__ for group in groups if hasattr(group, "backend")}),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "free_bytes": free,
            "total_bytes": total,
        }
    return found


def begin_trace(worker: Any) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    wanted = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    worker.k3_trace = profile(activities=[wanted])
    worker.k3_trace.start()


def end_trace(worker: Any, steps: int) -> dict[str, Any]:
    import torch

    worker.k3_trace.stop()
    rows = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in worker.k3_trace.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    del worker.k3_trace
    return summarise(rows, steps)


def summarise(rows: Sequence[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Launches and times of one decode step from (start us, end us, name) of all that ran on one GPU in `steps` of them.

    span: first start to last end; busy: at least one kernel ran; communication: the sum of the kernels that wait for peers. Of
    each kernel `us` is how long it ran, which under early launches is mostly waiting, and `later_us` how much later than all
    before it it ended: what it costs the step, gaps in front of it included.
    """
    kernels = sorted(r for r in rows if not r[2].startswith(("Memcpy", "Memset")))
    if not kernels:
        return {"steps": steps, "launches": 0}
    by_name: dict[str, list[float]] = {}
    later: dict[str, float] = {}
    last = kernels[0][0]
    for start, end, name in kernels:
        by_name.setdefault(name, []).append(end - start)
        later[name] = later.get(name, 0.0) + max(end - last, 0.0)
        last = max(last, end)
    costs = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "steps": steps,
        "launches": len(kernels) / steps,
        "copies": (len(rows) - len(kernels)) / steps,
        "span_us": (max(end for _, end, _ in kernels) - kernels[0][0]) / steps,
        "busy_us": busy(kernels) / steps,
        "communication_us": sum(sum(us) for name, us in costs if any(c in name.lower() for c in COMMUNICATION)) / steps,
        "kernels": [
            {"name": name[:160], "launches": len(us) / steps, "us": sum(us) / steps, "later_us": later[name] / steps}
            for name, us in costs[:40]
        ],
    }


def busy(group: Sequence[tuple[float, float, str]]) -> float:
    """Microseconds in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for start, end, _ in sorted(group):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
