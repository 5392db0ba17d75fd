"""Faults on purpose: what breaks in a decode step when one thing is wrong. A vLLM plug-in that only this experiment loads.

`PYTHONPATH=evals/faults` makes vLLM find it, in every process; the package knows nothing of it. The file named by K3_FAULT_FILE
holds the name of the fault that is on, so that one server serves the whole table. Every fault breaks the fast path alone: the
prompt's steps run on the standard path, as they would with a broken decode kernel.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROL = "K3_FAULT_FILE"
PREEMPT_EVERY = 16  # decode steps between forced preemptions, for the faults that need one

FAULTS = {
    "none": "nothing is broken",
    "preemption": "nothing is broken, but one running request is preempted every 16 steps and resumed",
    "stale_conv_state": "the convolution's last inputs are not written back: every step sees those of the prompt's end",
    "lost_decay": "the recurrent state is not decayed in decode steps",
    "wrong_slot_after_preemption": "as preemption, and the resumed request keeps using the state slot it had before",
    "fp8_scale_one": "MLA cache rows are stored as E4M3 divided by a calibrated scale, and read as if the scale were 1",
    "expert_swapped": "in each MoE layer the weights of experts 0 and 1 are exchanged",
    "padded_row_leak": "the MLP output of the last row takes in what stands in the row after it, left there by an earlier step",
}


def install() -> None:
    """vLLM's entry point. Wraps the executor and the scheduler; each wrapper asks which fault is on."""
    from vllm.model_executor.models import kimi_k3_fast
    from vllm.v1.core.sched.scheduler import Scheduler

    kimi_k3_fast.register()  # its patches come first: vLLM's scheduler, imported below, must be the patched one
    from vllm.model_executor.models.kimi_k3_fast.fast import executor

    if getattr(executor.Executor, "_k3_faults", False):
        return
    executor.Executor._k3_faults = True  # type: ignore[attr-defined]
    executor.Executor.__init__ = _init(executor.Executor.__init__)
    executor.Executor._mlp = _mlp(executor.Executor._mlp)
    executor.Executor.run = _run(executor.Executor.run)
    Scheduler.schedule = _schedule(Scheduler.schedule)


def current() -> str:
    """The fault that is on now. Raises ValueError for a name that is none."""
    path = os.environ.get(CONTROL)
    name = Path(path).read_text().strip() if path else "none"
    if name not in FAULTS:
        raise ValueError(f"{path}: expected one of {', '.join(FAULTS)}, found {name!r}")
    return name


class _Forms:
    """The operators of a step, whichever they are, with the fault that is on in those that have one."""

    def __init__(self, forms: Any) -> None:
        self._forms = forms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forms, name)

    def kda_step(self, packed: Any, conv_state: Any, state: Any, slots: Any, w: Any, dtype: Any) -> Any:
        fault = current()
        if fault == "lost_decay":
            w = dataclasses.replace(w, lower_bound=0.0)  # e^0: nothing is forgotten
        kept = conv_state[slots].clone()
        out = self._forms.kda_step(packed, conv_state, state, slots, w, dtype)
        if fault == "stale_conv_state":
            conv_state[slots] = kept
        return out

    def mla_rows(self, packed: Any, q_norm: Any, kv_norm: Any, eps: float, cache: Any, slot_mapping: Any) -> Any:
        import torch

        out = self._forms.mla_rows(packed, q_norm, kv_norm, eps, cache, slot_mapping)
        if current() == "fp8_scale_one":
            slots = slot_mapping[slot_mapping >= 0]
            where = slots // cache.shape[1], slots % cache.shape[1]
            rows = cache[where].float()
            scale = rows.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
            cache[where] = (rows / scale).to(torch.float8_e4m3fn).to(cache.dtype)
        return out

    def experts(self, x: Any, ids: Any, weights: Any, w: Any, beta: float, linear_beta: float | None) -> Any:
        if current() == "expert_swapped":  # whoever is sent to one of the two meets the other
            ids = ids.where((ids != 0) & (ids != 1), 1 - ids)
        return self._forms.experts(x, ids, weights, w, beta, linear_beta)


def _init(init: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.forms = _Forms(self.forms)

    return wrapped


def _mlp(mlp: Callable[..., Any]) -> Callable[..., Any]:
    left: dict[int, Any] = {}  # by view: the outputs that the rows of earlier steps left behind

    def broken(self: Any, view: Any, x: Any) -> Any:
        fault = current()
        out = mlp(self, view, x)
        if fault == "padded_row_leak":
            rows = out.shape[0]
            buffer = left.setdefault(id(view), out.new_zeros(self.sources.shape[1] + 1, out.shape[1]))
            out[-1] += buffer[rows]
            buffer[:rows] = out
        return out

    return broken


_preempted: dict[str, list[list[int]]] = {}  # request -> its blocks, by cache group, before it was preempted
_moved: dict[str, int] = {}  # block it has now -> block it had
_steps = 0


def _moved_file() -> Path:
    """The scheduler and the worker are two processes: one writes here what the other reads."""
    return Path(os.environ[CONTROL] + ".moved")


def _run(run: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Any, plan: Any, input_ids: Any, step: Any) -> Any:
        if current() == "wrong_slot_after_preemption" and _moved_file().exists():
            moved = json.loads(_moved_file().read_text())
            step = {name: _with_old_slots(where, moved) for name, where in step.items()}
        return run(self, plan, input_ids, step)

    return broken


def _with_old_slots(where: Any, moved: dict[str, int]) -> Any:
    if not hasattr(where, "slots"):
        return where
    slots = where.slots.clone()
    for i, slot in enumerate(slots.tolist()):
        slots[i] = moved.get(str(slot), slot)
    return dataclasses.replace(where, slots=slots)


def _schedule(schedule: Callable[..., Any]) -> Callable[..., Any]:
    def preempting(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _steps
        if "preemption" not in current():
            return schedule(self, *args, **kwargs)
        decoding = [r for r in self.running if r.num_output_tokens > 2]
        _steps += bool(decoding)
        if decoding and _steps % PREEMPT_EVERY == 0:
            _preempt(self, decoding[-1])
        output = schedule(self, *args, **kwargs)
        moved: dict[str, int] = {}
        alive = {r.request_id for r in self.running}
        for request, old in list(_preempted.items()):
            if request not in self.requests:
                del _preempted[request]
            elif request in alive:
                new = self.kv_cache_manager.get_block_ids(request)
                for was, now in zip(old, new, strict=True):
                    moved.update(zip(map(str, now), was, strict=False))
        if moved != _moved:
            _moved.clear()
            _moved.update(moved)
            partial = _moved_file().with_suffix(".part")
            partial.write_text(json.dumps(moved))
            partial.replace(_moved_file())
        return output

    return preempting


def _preempt(scheduler: Any, request: Any) -> None:
    """What the scheduler does when blocks run out, for one request."""
    _preempted.setdefault(request.request_id, [list(ids) for ids in scheduler.kv_cache_manager.get_block_ids(request.request_id)])
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
