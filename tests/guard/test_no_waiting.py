"""The guard never waits for the device: its calls in a decode step read no value of a tensor there and copy none to the host in a
way that blocks. On a CPU with tensors of the meta device, which hold no numbers at all; on a GPU with PyTorch's own check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.model_executor.models.kimi_k3_fast import guard
from vllm.model_executor.models.kimi_k3_fast.guard import Guard, Path, Policy, StateView, WriteSet
from vllm.model_executor.models.kimi_k3_fast.patches import hooks

REQUESTS = ["a", "b", "c"]
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")


class NoWaiting(TorchDispatchMode):
    """Raises where an operation would wait for the meta device, were it a GPU: a value read, a size that depends on values, a
    copy that blocks. Copies that do not block are let pass, without numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            source, target = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device") or args[0].device)
            across = source.device != torch.device(target)
            if across and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                raise AssertionError(f"{name} from {source.device} to {target} waits for the device")
            if across and source.device.type == "meta":
                return args[0] if name == "copy_" else torch.empty(source.shape, dtype=source.dtype)
        elif name.startswith(WAITS) and args[0].device.type == "meta":
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **kwargs)


@contextmanager
def pretended_gpu(patch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The meta device. Pinned memory, which needs a driver, is ordinary memory here."""
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    with NoWaiting():
        yield torch.device("meta")


@contextmanager
def real_gpu(patch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield torch.device("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setattr(guard, "_guard", Guard(Policy()))
    for name, value in (("ran", {}), ("_outbox", []), ("check", lambda: None), ("_unheard_steps", 0)):
        monkeypatch.setattr(hooks, name, value)
    guard.current().watching = True
    return guard.current()


def decode_steps(device: torch.device, drafts: dict[str, list[int]]) -> None:
    """What the guard is called for in steps on a device, eager and replayed, over both runners' ways of carrying the check."""
    now = guard.current()
    now.bind_state(1, [StateView("layers.0.state", "kda_recurrent", 0, 0, torch.empty(8, 4, device=device))])
    now.planned(guard.GraphKey("full", 4, 4, True), "decode/4/cute")
    hooks.owner("a")
    hooks.blocks_allocated([SimpleNamespace(block_id=i, is_null=False) for i in (1, 2, 3)])
    rows = len(REQUESTS) + sum(map(len, drafts.values()))
    for mode, uniform in (("NONE", False), ("FULL", True)):
        step = SimpleNamespace(total_num_scheduled_tokens=3)
        hooks.scheduled(step)
        hooks.step_received(step)
        hooks.batch_dispatched(mode, (3, 4), (3, 4), uniform, REQUESTS)
        if mode == "NONE":
            assert not now.begin_writes()
            slots = torch.empty(4, dtype=torch.long, device=device)
            writes = WriteSet(slots={0: slots}, rows={1: torch.empty(4, dtype=torch.long, device=device)})
            now.close_step(Path.FAST, (), "decode/4/cute", 3, 3, 3, 0, writes)
        logits = torch.empty(rows, 100, device=device)
        for asynchronous in (True, False):
            hooks.begin_check(logits, REQUESTS, drafts, asynchronous, None)
        ends = torch.zeros(4, dtype=torch.int32, device=device)  # indices: empty memory would be out of bounds
        hooks.per_request(hooks.rows_not_finite(logits), ends)
        hooks.mark(SimpleNamespace(num_nans_in_logits=None))


DRAFTS = [{}, {"a": [5, 6], "c": [7]}]


@pytest.mark.parametrize("drafts", DRAFTS, ids=["plain", "drafts"])
def test_no_call_of_a_step_waits_for_the_device(watching: Guard, monkeypatch: pytest.MonkeyPatch, drafts: dict) -> None:
    with monkeypatch.context() as patch, pretended_gpu(patch) as device:
        decode_steps(device, drafts)
    assert watching.report()["steps"]["fast"]["steps"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", DRAFTS, ids=["plain", "drafts"])
def test_no_call_of_a_step_waits_for_the_gpu(watching: Guard, monkeypatch: pytest.MonkeyPatch, drafts: dict) -> None:
    with real_gpu(monkeypatch) as device:
        decode_steps(device, drafts)
    assert watching.report()["steps"]["fast"]["steps"] == 2


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: torch.empty(3).copy_(x),
        lambda x: torch.tensor([1, 2]).to(x.device),
    ],
    ids=["tolist", "item", "bool", "nonzero", "cpu", "copy_", "to the device"],
)
def test_what_waits_is_seen(monkeypatch: pytest.MonkeyPatch, waiting: Any) -> None:
    with monkeypatch.context() as patch, pretended_gpu(patch) as device:
        x = torch.empty(3, device=device)
        with pytest.raises(AssertionError, match="waits for the device"):
            waiting(x)
