"""What the patched lines call. Each call is a few plain values in, and nothing at all when the guard does not watch.

Two kinds of process call in. The engine core knows who owns which slot; what it collects rides on the scheduler's own output
to every worker, so that ownership and the steps that use it arrive in order. The workers know what was dispatched and what
the logits look like; what ends a request rides on their output back to the scheduler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import guard
from ..reasons import Reason, Refusal

if TYPE_CHECKING:
    import torch

ran: dict[str, int] = {}
"""How often each hook was called in this process: what shows that a patch has run, not only that it is installed."""

check: Callable[[], None] = lambda: None  # noqa: E731  replaced by the package when patches are applied
decide: Callable[[Any], bool] = lambda vllm_config: False  # noqa: E731  does this engine serve a model the guard watches?

_SLOTS, _MARKS, _PROCESS = "k3fast_slots", "k3fast_marks", "k3fast_process"
_CHECK_EVERY = 1 << 14  # calls; a worker's reports check as well


def _ran(name: str) -> None:
    count = ran[name] = ran.get(name, 0) + 1
    if count & (count - 1) == 0 or count % _CHECK_EVERY == 0:  # at 1, 2, 4, ... too: soon after the start
        check()


def active() -> bool:
    """Whether this process' guard watches the model."""
    return guard.current().watching


# -- patch 1: input preparation (workers) ------------------------------------------------------------------------------


def batch_dispatched(
    mode: str, tokens: tuple[int, int], requests: tuple[int, int | None], uniform: bool, request_ids: Sequence[str]
) -> None:
    """A real batch was dispatched. `tokens` and `requests` are (real, padded); `requests` may be padded by None: not at all."""
    _ran("batch_dispatched")
    now = guard.current()
    if now.watching:
        padded = requests[0] if requests[1] is None else requests[1]
        now.open_step(guard.BatchFacts(mode.lower(), *tokens, requests[0], padded, uniform, tuple(request_ids)))


# -- patch 2: KV manager (engine core, and its receiving end in the workers) -------------------------------------------

_outbox: list[tuple] = []
process: dict[str, Any] = {}  # what this process has to say of its patches; rides with the next scheduled step
_owner = ""
_owner_of: dict[int, str] = {}  # block -> the request it was last allocated for
_null = 0
_unheard_steps = 0
UNHEARD = 32  # steps without a word of the engine core after which it is taken not to run patch 2


def engine_starts(vllm_config: Any) -> None:
    """The scheduler of this process begins: decide whether its blocks are followed."""
    global _owner
    _outbox.clear()
    _owner_of.clear()
    _owner = ""
    if decide(vllm_config):
        guard.current().watching = True


def null_block(block: int) -> None:
    """A block pool was made; `block` stands for no block at all."""
    global _null
    _null = block


def owner(request_id: str) -> None:
    """Blocks that change hands from here on do so for this request."""
    global _owner
    _owner = request_id


def blocks_allocated(blocks: Sequence[Any]) -> None:
    """The pool handed out blocks, to be written by the current owner."""
    _ran("blocks_allocated")
    if active() and blocks:
        ids = [block.block_id for block in blocks]
        _outbox.append(("allocated", _owner, ids))
        _owner_of.update(dict.fromkeys(ids, _owner))


def blocks_shared(blocks: Sequence[Any]) -> None:
    """A prefix-cache hit: the current owner may read these blocks."""
    if active() and blocks:
        ids = [block.block_id for block in blocks if not block.is_null]
        if ids:
            _outbox.append(("shared", _owner, ids))


def blocks_freed(*groups: Sequence[Any]) -> None:
    """Nobody holds these blocks any more."""
    if active():
        ids = [block.block_id for group in groups for block in group]
        if ids:
            _outbox.append(("freed", "", ids))


def scheduled(scheduler_output: Any) -> None:
    """A step was scheduled: hand everything collected to the workers on it."""
    global _outbox
    _ran("scheduled")
    if not active():
        return
    if _outbox:
        setattr(scheduler_output, _SLOTS, _outbox)
        _outbox = []
    if process:
        setattr(scheduler_output, _PROCESS, dict(process))
        process.clear()


def step_received(scheduler_output: Any) -> None:
    """A worker got a scheduled step: follow what happened to the slots before it runs."""
    _ran("step_received")
    now = guard.current()
    if not now.watching:
        return
    changes = getattr(scheduler_output, _SLOTS, None)
    if changes:
        now.slots_changed(changes)
    elif not now.ledger.followed and scheduler_output.total_num_scheduled_tokens:
        _unheard()
    said = getattr(scheduler_output, _PROCESS, None)
    if said:
        now.patches({f"engine core {name}": state for name, state in said["patches"].items()})
        for name, state in said["patches"].items():
            if state["refusal"]:
                _core_lacks(name, state["refusal"])
        for name, detail in said["silent"]:
            now.violation(Reason.PATCH_NOT_RUN, {"patch": name, "process": "engine core"}, detail)


def _unheard() -> None:
    """No token can be scheduled before blocks were allocated for it: an engine core that never tells does not run patch 2."""
    global _unheard_steps
    _unheard_steps += 1
    if _unheard_steps == UNHEARD:
        _core_lacks("2", f"the engine core scheduled {UNHEARD} steps and told of no block")


def _core_lacks(name: str, why: str) -> None:
    """Every rank gets the engine core's word with the same step, so all step aside alike."""
    if name not in guard.refused_patches and guard.current().once(f"engine core lacks patch {name}"):
        where = {"patch": name, "process": "engine core"}
        guard.current().step_aside(Refusal(Reason.PATCH_FAILED, f"engine core: {why}"))
        guard.current().violation(Reason.PATCH_NOT_RUN, where, why)


def state_copied(request_id: str, source: int, destination: int) -> None:
    """The worker is about to copy a request's recurrent state from one slot to the next."""
    if active():
        guard.current().slots_changed([("copied", request_id, [destination])])


# -- patch 3: sampler (workers), and ending requests (engine core) -----------------------------------------------------


def rows_not_finite(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] -> [rows] int32: 1 where the row holds NaN, +inf, or nothing above -inf.

    The maximum is finite exactly in the other cases: NaN passes through it, and rows that a grammar masks with -inf keep one.
    """
    _ran("logits_checked")
    return _not_finite(logits).int()


def _not_finite(logits: torch.Tensor) -> torch.Tensor:
    """The same as bool, in the fewest operations: x - x is 0 for finite x and NaN for the others."""
    largest = logits.amax(dim=-1)
    return largest.sub_(largest) != 0


def begin_check(
    logits: torch.Tensor | None,
    request_ids: Sequence[str],
    drafts: Mapping[str, Sequence[int]],
    asynchronous: bool,
    otherwise: torch.Tensor | None,
) -> torch.Tensor | list[bool] | None:
    """Start looking for rows that are not finite, by request; `otherwise` is what vLLM itself would carry.

    Under asynchronous scheduling the device tensor returned here rides vLLM's own output copy. Else it is copied to
    pinned memory without blocking, on the stream whose next transfer (the sampled tokens) vLLM waits for anyway. Where the
    logits are on the host the answer is there at once: None if all rows are finite.
    """
    _ran("logits_checked")
    if logits is None or not guard.current().watching:
        return otherwise
    if logits.is_cpu and not asynchronous:
        return _bad_on_host(logits, request_ids, drafts)
    import torch

    bad = _not_finite(logits)
    if bad.shape[0] != len(request_ids):
        rows = [1 + len(drafts.get(request, ())) for request in request_ids]
        ends = torch.tensor([0, *itertools.accumulate(rows)], pin_memory=bad.device.type == "cuda")
        bad = per_request(bad, ends.to(bad.device, non_blocking=True))
    if asynchronous:
        return bad
    return torch.empty(bad.shape, dtype=bad.dtype, pin_memory=True).copy_(bad, non_blocking=True)


def _bad_on_host(logits: torch.Tensor, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> list[bool] | None:
    """By request, whether a row is not finite; None if all are. One tensor operation, since each costs more than all the rest."""
    largest = logits.amax(-1).tolist()
    if math.isfinite(sum(largest)):  # not overflowing: Python adds in doubles
        return None
    bad = iter([not math.isfinite(value) for value in largest])
    return [any(list(itertools.islice(bad, 1 + len(drafts.get(request, ()))))) for request in request_ids]


def per_request(bad: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor | None:
    """Rows [rows] -> requests [requests], by the running number of rows `ends` [requests + 1] (first 0)."""
    import torch

    if bad is None or not active() or bad.shape[0] == ends.shape[0] - 1:
        return bad
    bad = bad.int()
    sums = torch.cat((bad.new_zeros(1), bad.cumsum(0, dtype=torch.int32)))
    return sums[ends[1:].long()] - sums[ends[:-1].long()]


def end_check(bad: torch.Tensor | list[bool] | None, request_ids: Sequence[str], otherwise: dict[str, int]) -> dict[str, int]:
    """After vLLM's transfer of the sampled tokens: what `begin_check` started, by request."""
    if bad is None or not active():
        return otherwise
    rows = bad if isinstance(bad, list) else bad.tolist()
    # vLLM's output protocol carries a count; a bool does not decode on the other side of the socket.
    return {request: int(row) for request, row in zip(request_ids, rows, strict=True)}


def mark(output: Any, asynchronous: bool = True) -> None:
    """Attach to a worker's output the requests that mode `require` ends. Its presence says that this worker's guard watches, and
    that the rows counted in the output are bad ones; where it is known already that there is nothing to end, nothing travels."""
    _ran("mark")
    now = guard.current()
    if now.watching:
        failing = now.take_failing()
        if failing or asynchronous or output.num_nans_in_logits:
            setattr(output, _MARKS, {request: reason.code for request, reason in failing.items()})
            if not asynchronous:
                output_ready(output)


def output_ready(output: Any) -> None:
    """The worker's output is complete on the host: count the requests whose logits were not finite."""
    if output.num_nans_in_logits and active():
        for request, bad in output.num_nans_in_logits.items():
            if bad:
                guard.current().post(Reason.NON_FINITE, {"request": request})


def must_end(output: Any, request_id: str) -> str | None:
    """The reason code for which the scheduler has to end this request with an error, if any."""
    _ran("must_end")
    marks = getattr(output, _MARKS, None)
    if marks is None:
        return None
    if output.num_nans_in_logits and output.num_nans_in_logits.get(request_id):
        return Reason.NON_FINITE.code
    return marks.get(request_id)


def forget_blocks(manager: Any, request_id: str) -> None:
    """Take every block that this request filled, freed ones too, out of the prefix cache."""
    held = {block for blocks in manager.get_block_ids(request_id) for block in blocks}
    filled = {block for block, request in _owner_of.items() if request == request_id}
    manager.evict_blocks((held | filled) - {_null})
