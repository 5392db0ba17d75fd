"""Audit and shadow on GPUs: a sampled decode step replays stock's graph beside the fast one.

A captured step cannot be looked into, so where the settings ask for checks, stock's model is captured a second time, over the
same weights, caches and input buffers; that takes the memory and the seconds of a second set of graphs. A sampled replay copies
the caches, runs the fast graph, puts the caches back and runs stock's.

audit: a state slot or cache row that the fast graph changed and stock's did not is written outside the step's write-set. A slot
that stock wrote is the step's as a whole, whichever of its numbers came out as they were: a token that repeats itself leaves a
convolution state, which is rows to a latent cache of the same pool, with the very bits that it had.
shadow: stock runs behind the fast side's choice of experts (see `cuda_choices`). Hidden states of the real rows, and every state
and row that stock wrote, are compared by relative distance; the bar is what stock itself moves by behind the same choices when
all its caches are changed by one BF16 rounding, and a multiple of it. One draw of that noise may miss what amplifies, so a step
past its bar gets up to `DRAWS` in all, on every rank, and each tensor the widest bar that one of them gave. The choices are
compared as on CPUs, by stock's scores of the experts that it was made to take and of those it would have taken. The shadowed
step's result is then stock's, behind these experts. Whole caches are copied: for tests and for hunting a fault, on servers with
small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..guard import Guard
from ..guard.shadow import DRAWS, Difference, compare
from ..model.moe import Judged
from ..reasons import Reason
from .cuda_choices import Choices
from .cuda_executor import Caches
from .cuda_path import CudaPath
from .watch import moved

TIMES = 8.0  # of what stock moves by
LEAST, MOST = TIMES * 2.0**-8, 0.7  # of the bar: BF16's own rounding; unrelated vectors are 1.4 apart
BITS = {2: torch.int16, 4: torch.int32}


def stock_graphs(manager: Any, fast: CudaPath, capture: Callable[[], Any], choices: Choices | None = None) -> dict[Any, Any]:
    """Stock's FULL graphs by vLLM's descriptor; those in `manager` stay. capture: fills an empty manager, on every rank. choices:
    imposed on the graphs; None: they choose for themselves."""
    kept, wanted, stage = manager.graphs, dict(manager._capture_descs), fast.stage
    for mode in wanted:
        if mode.name != "FULL":
            del manager._capture_descs[mode]  # they run stock's code already
    manager.graphs, fast.stage, fast.staged = {}, lambda *batch: None, None  # type: ignore[method-assign]
    try:
        with nullcontext() if choices is None else choices.imposed():
            capture()
        return manager.graphs
    finally:
        manager.graphs, manager._capture_descs, fast.stage = kept, wanted, stage  # type: ignore[method-assign]


def watch(manager: Any, fast: CudaPath, capture: Callable[[], Any], padding: torch.Tensor) -> Watch | None:
    """Put graphs that check themselves in the place of the fast ones, if the settings ask for it. padding: [tokens] bool, vLLM's
    own word of which rows of the current step are none. Raises ValueError where the copies of the caches would not fit, or where
    stock chooses experts in a place where nothing can be imposed."""
    policy = fast.guard.policy
    if not (policy.audit_every or policy.shadow_every) or fast.executor is None:
        return None
    _check_room(_memory(fast.executor.caches), copies=4 if policy.shadow_every else 3)
    choices = Choices(fast.executor.model, fast.executor.ids) if policy.shadow_every else None
    made = Watch(fast.guard, fast.executor.caches, lambda: manager.hidden_states, padding, choices)
    plans = {graph.padded_tokens: plan for graph, plan in fast.guard.planned_graphs.items()}
    found = {desc: graph for desc, graph in stock_graphs(manager, fast, capture, choices).items() if desc.num_tokens in plans}
    if found and choices is not None:
        choices.check_reached()
    for desc, graph in found.items():
        manager.graphs[desc] = Checked(made, desc.num_tokens, plans[desc.num_tokens], manager.graphs[desc], graph)
    return made


@dataclass
class Checked:
    """Two graphs of one batch size; vLLM replays it as if it were one."""

    watch: Watch
    tokens: int
    plan: str
    fast: Any
    stock: Any

    def replay(self) -> None:
        if not self.watch.due(self):
            self.fast.replay()


class Written(NamedTuple):
    """A cache, the slots or rows [places] of it that stock wrote, and their values [places, ...] on both sides."""

    name: str
    tensor: torch.Tensor
    places: tuple[torch.Tensor, ...]
    fast: torch.Tensor
    stock: torch.Tensor


class Watch:
    """The checks of one rank's decode graphs. hidden: the runner's output buffer [tokens, D]. choices: that stock's graphs were
    captured behind; None: behind their own, which the audit does not mind."""

    def __init__(
        self,
        guard: Guard,
        caches: Caches,
        hidden: Callable[[], torch.Tensor],
        padding: torch.Tensor,
        choices: Choices | None = None,
    ) -> None:
        self.guard, self.caches, self.hidden, self.padding, self.choices = guard, caches, hidden, padding, choices
        self.replays = 0

    def due(self, graph: Checked) -> bool:
        """Run the step with its checks, if it is one to be checked."""
        self.replays += 1
        audit, shadow = (
            bool(n) and self.replays % n == 0 for n in (self.guard.policy.audit_every, self.guard.policy.shadow_every)
        )
        if audit or shadow:
            self.check(graph, audit, shadow)
        return audit or shadow

    def check(self, graph: Checked, audit: bool, shadow: bool) -> None:
        memory = _memory(self.caches)
        before = [raw.clone() for raw in memory]
        rows = ~self.padding[: graph.tokens]

        def run(replay: Callable[[], None], nudge: bool = False) -> torch.Tensor:
            for raw, old in zip(memory, before, strict=True):
                raw.copy_(old)
                if nudge:
                    _nudge(raw)
            replay()
            return self.hidden()[: graph.tokens].clone()

        def copied(hidden: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            return hidden, [raw.clone() for raw in memory]

        def judged() -> Mapping[str, Judged]:
            return self.choices.judged(rows) if shadow and self.choices is not None else {}

        fast = copied(run(graph.fast.replay))
        hidden = run(graph.stock.replay)
        stock = copied(hidden) if shadow else (hidden, memory)
        if audit:
            self._audit(graph, memory, before, fast[1], stock[1])
        if shadow:
            sides = (before, fast, (*stock, judged()))
            self._shadow(graph, rows, memory, *sides, lambda: (run(graph.stock.replay, nudge=True), memory, judged()))
        hidden, left = stock if shadow else fast  # which of the two is the step
        self.hidden()[: graph.tokens] = hidden
        for raw, new in zip(memory, left, strict=True):
            raw.copy_(new)

    def _audit(self, graph: Checked, memory: Any, before: Any, fast: Any, stock: Any) -> None:
        self.guard.count("audited_steps")
        written = self._slots_written(memory, before, stock)
        for name, tensor, whole in self._views():
            old, mine, theirs = (_seen(memory, copy, tensor) for copy in (before, fast, stock))
            outside = _changed(old, theirs, whole).logical_not_()
            outside[written[_pool(tensor)]] = False
            outside[0] = True  # the null block is nobody's, whatever stock does for padded rows
            outside = (outside & _changed(old, mine, whole)).nonzero()
            for place in outside[:8].tolist():
                reason = Reason.WRITE_OUTSIDE if place[0] else Reason.NULL_BLOCK_WRITTEN
                where = {"plan_key": graph.plan, "tensor": name, "slot": place[0], "row": place[-1]}
                self.guard.violation(reason, where, f"{name}: not this step's to write ({len(outside)} such places)")

    def _slots_written(self, memory: Any, before: Any, stock: Any) -> dict[tuple[int, int], torch.Tensor]:
        """By pool: which pages [slots] stock has written as recurrent states of one of the layers that share them."""
        found: dict[tuple[int, int], torch.Tensor] = {}
        for _, tensor, whole in self._views():
            wrote = torch.zeros(tensor.shape[0], dtype=torch.bool, device=tensor.device)
            if whole:
                wrote = _own(_seen(memory, before, tensor), _seen(memory, stock, tensor), whole)
            at = _pool(tensor)
            found[at] = found[at] | wrote if at in found else wrote
        return found

    def _shadow(
        self, graph: Checked, rows: torch.Tensor, memory: Any, before: Any, fast: Any, stock: Any, draw: Callable[[], Any]
    ) -> None:
        """draw: stock's step once more, its caches changed by a rounding; what it gives is good until the next one."""
        self.guard.count("shadow_steps")
        written = list(self._written(memory, before, fast, stock))
        found: dict[str, Difference] = {}
        for drawn in range(DRAWS):
            for one in self._differences(rows, memory, written, fast, stock, draw()):
                found[one.name] = min(one, found.get(one.name, one), key=lambda d: d.ratio)
            past = [one for one in found.values() if not one.within]
            # A collective, as stock's step is one: ranks draw together.
            if not self.guard.agreement.any(bool(past)):
                break
            if not drawn:
                self.guard.count("shadow_drawn_steps")
        for one in past:
            self.guard.violation(one.reason, {"plan_key": graph.plan, "tensor": one.name, "row": one.row}, str(one))
        self.guard.peak("shadow_worst_ratio", max(one.ratio for one in found.values()))

    def _written(self, memory: Any, before: Any, fast: Any, stock: Any) -> Iterator[Written]:
        """What stock wrote, cache by cache. Found once: whole caches are looked through."""
        for name, tensor, whole in self._views():
            wrote = _own(_seen(memory, before, tensor), _seen(memory, stock[1], tensor), whole)
            if wrote.any():
                places = wrote.nonzero(as_tuple=True)
                values = (_seen(memory, side[1], tensor, bits=False)[places] for side in (fast, stock))
                yield Written(name, tensor, places, *values)

    def _differences(
        self, rows: torch.Tensor, memory: Any, written: list[Written], fast: Any, stock: Any, nudged: Any
    ) -> Iterator[Difference]:
        """Of all that a step gives, against one draw of noise."""
        sides = [side[0][rows] for side in (fast, stock, nudged)]
        yield _difference("hidden", *sides)
        yield from self._of_choices(sides, stock[2], nudged[2])
        for one in written:
            moved_to = _seen(memory, nudged[1], one.tensor, bits=False)[one.places]
            yield _difference(one.name, one.fast, one.stock, moved_to)

    def _of_choices(
        self, hidden: list[torch.Tensor], judged: Mapping[str, Judged], noisy: Mapping[str, Judged]
    ) -> Iterator[Difference]:
        """The choices of experts, by the guard's own judgement. It takes the step's dtype from all that it is shown, and scores
        are fp32 in a BF16 step: the hidden states go along, judged apart."""
        if self.choices is None:
            return
        taken, best = ({name: getattr(scores, kind) for name, scores in judged.items()} for kind in ("taken", "best"))
        sides = ({"hidden": states, **found} for states, found in zip(hidden, (taken, best, moved(judged, noisy)), strict=True))
        fast, standard, nudged = sides
        yield from (d for d in compare(fast, standard, self.choices.depth, nudged) if d.name != "hidden")

    def _views(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name, tensor, whether a slot is written as a whole) of every cache that a step writes."""
        for layer, state in self.caches.state.items():
            yield f"{layer}.state", state, True
            yield f"{layer}.conv", self.caches.conv[layer], True
        for layer, latent in self.caches.latent.items():
            yield f"{layer}.latent", latent, False


def _memory(caches: Caches) -> list[torch.Tensor]:
    """The caches' memory as bytes, every allocation once: layers of different kinds share them."""
    found = {}
    for tensor in (*caches.state.values(), *caches.conv.values(), *caches.latent.values()):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return list(found.values())


def _pool(tensor: torch.Tensor) -> tuple[int, int]:
    """Caches of one pool have their pages at the same places: memory, and bytes of a page."""
    return tensor.untyped_storage().data_ptr(), tensor.stride(0) * tensor.element_size()


def _check_room(memory: list[torch.Tensor], copies: int) -> None:
    """One of the copies stands for what comparing takes."""
    needed = copies * sum(raw.numel() for raw in memory)
    device = memory[0].device
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < needed:
        raise ValueError(
            f"audit and shadow copy the caches: expected {needed / 2**30:.1f} GiB free on {device}, found {free / 2**30:.1f}. "
            "Serve with a smaller cache (`--kv-cache-memory-bytes`), or set both to 0."
        )


def _seen(memory: list[torch.Tensor], copies: list[torch.Tensor], like: torch.Tensor, bits: bool = True) -> torch.Tensor:
    """The view `like` of a copy of the memory; as integers, so that a NaN equals itself."""
    at = next(i for i, raw in enumerate(memory) if raw.data_ptr() == like.untyped_storage().data_ptr())
    dtype = BITS[like.element_size()] if bits else like.dtype
    return copies[at].view(dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def _changed(old: torch.Tensor, new: torch.Tensor, whole: bool) -> torch.Tensor:
    """Which slots [slots], or which rows [pages, block], differ."""
    return (old != new).flatten(1 if whole else 2).any(-1)


def _own(old: torch.Tensor, new: torch.Tensor, whole: bool) -> torch.Tensor:
    """Where a step wrote values of this kind of layer: pages are of one pool, and a state's page is seen as rows as well. A
    decode step changes one row of a page of rows, and most of a state. Not the null block: stock's padded rows write to it."""
    different = old != new
    if whole:
        wrote = different.flatten(1).float().mean(1) > 0.5
    else:
        rows = different.flatten(2).any(-1)
        wrote = rows & (rows.sum(1, keepdim=True) == 1)
    wrote[0] = False
    return wrote


def _nudge(raw: torch.Tensor, piece: int = 1 << 26) -> None:
    """Change every number by up to one BF16 rounding. FP32 is read as pairs: its upper half moves so, its lower half is noise."""
    for values in raw.view(torch.bfloat16).split(piece):
        sign = torch.randint(-1, 2, values.shape, dtype=torch.int8, device=raw.device).to(torch.bfloat16)
        values.addcmul_(values, sign, value=2.0**-8)


def _difference(name: str, fast: torch.Tensor, stock: torch.Tensor, nudged: torch.Tensor) -> Difference:
    bar = min(MOST, max(LEAST, TIMES * float(_distance(nudged, stock).nan_to_num(0.0).max())))
    found = _distance(fast, stock)
    row = int(found.argmax())
    return Difference(name, float(found[row]), bar, row)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Relative distance of each row: [rows, ...] -> [rows]. NaN on one side is infinitely far."""
    a, b = found.float().flatten(1), wanted.float().flatten(1)
    apart = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-12)
    return torch.where(apart.isnan(), torch.full_like(apart, torch.inf), apart)
