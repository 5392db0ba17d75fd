"""The detector of races on shared memory bites: every synchronisation of a sound kernel is left out in turn, and missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import bulk_machine
import numpy as np
import pytest
import torch
from bulk_machine import BulkLaunch
from ptx_machine import LANES, Deadlock, Step
from races import Clocks, Race, Shared
from test_experts import make_input, make_routing, make_weights

from vllm.model_executor.models.kimi_k3_fast.ops import attn_res, build, experts, moe_front, projection
from vllm.model_executor.models.kimi_k3_fast.ops.experts import humming
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic

RING = Tactic(groups=2, row_warps=2, k_warps=2, tiles=2, stages=2, chunk=128, fetchers=1, height=45)
PLAIN = Tactic(groups=2, splits=2, k_warps=4, tiles=3)
STREAMED = Tactic(groups=2, splits=2, row_warps=2, k_warps=2, tiles=2, stages=3)
PAIRS = experts.PackedTactic(grouped=False, strip=4, split=2, flight=2, ahead=0)
GROUPS = experts.PackedTactic(grouped=True, strip=4, split=4, flight=2, spread=False)
SYNCHRONISES = ("bar.", "barrier.", "mbarrier.try_wait", "mbarrier.arrive", "cp.async.wait_group", "cp.async.mbarrier.arrive")


def mixed() -> tuple[build.KernelSpec, dict[str, Any]]:
    c = attn_res.Config(3, 256, 2, True, 2, closed=3, rows=4, blocks=2)
    shapes = {"norm": (256,), "delta": (3, 256), "blocks": (3, 4, 256), "prefix": (4, 256), "out": (3, 256)}
    return attn_res.spec(c), {"score": torch.randn(256)} | {name: torch.randn(s).bfloat16() for name, s in shapes.items()}


def multiplied(tactic: Tactic, tokens: int) -> tuple[build.KernelSpec, dict[str, Any]]:
    found = projection.spec(projection.Config(tokens, 90, 1344, tactic=tactic))
    shapes = {"w": (90, 1344), "x": (tokens, 1344), "y": (tokens, 90)}
    assert found is not None
    return found, {name: torch.randn(s).bfloat16() for name, s in shapes.items()}


def first_product(tactic: experts.PackedTactic, tokens: int, meet: int) -> tuple[build.KernelSpec, dict[str, Any]]:
    """w13 from stock's layout, all in one block, so that its sets of sums come around."""
    c = experts.Config(tokens, hidden=512, width=128, experts=6, top_k=2, layout=experts.HUMMING)
    weights, routing = make_weights(c), make_routing(c, experts=meet)
    found = experts.specs_for(c, experts.fitted(c, tactic))[0]
    hidden = torch.full((c.pairs, c.width), torch.nan).bfloat16()
    tensors = {**vars(humming.pack(weights)), **vars(routing), "z": make_input(c), "hidden": hidden}
    small = replace(found, config=replace(found.config, grid=1))
    return small, {p.name: tensors[p.name] for p in found.params}


def chosen() -> tuple[build.KernelSpec, dict[str, Any]]:
    c = moe_front.TopkConfig(2, 130, 3, grouped=True)
    sizes = {"num_tokens": 1, "offsets": 131, "pairs": 6, "active": 130, "num_active": 1, "arrived": 1}
    integers = {name: torch.full((n,), 2 if name == "num_tokens" else 0, dtype=torch.int32) for name, n in sizes.items()}
    floats = {"bias": torch.randn(130), "logits": torch.randn(2, 130), "weights": torch.empty(2, 3)}
    return moe_front.topk_spec(c), floats | integers | {"ids": torch.empty(2, 3, dtype=torch.int32)}


# A case, its grid and clusters, and how often what may be left out: behind the tensor core a warp's lanes have met anyway, lanes
# that copy need not know that the first of them has said how much will come, and nobody waits for the last sums to be added up.
LAST_SUMS = {"bar.warp.sync": 1, "mbarrier.arrive.shared.b64": 1}
CASES: dict[str, tuple[Callable[[], Any], int, int, dict[str, int]]] = {
    "attn_res": (mixed, 6, 2, {}),
    "ring": (lambda: multiplied(RING, 9), 2, 1, {"bar.warp.sync": 3}),
    "ring, tokens by lanes": (lambda: multiplied(replace(RING, by_lanes=True), 9), 2, 1, {"bar.warp.sync": 3}),
    "top-k": (chosen, 2, 1, {}),
    "plain": (lambda: multiplied(PLAIN, 9), 4, 2, {}),
    "streamed": (lambda: multiplied(STREAMED, 17), 4, 2, {}),
    "experts": (lambda: first_product(PAIRS, 2, 6), 1, 1, LAST_SUMS),
    "grouped experts": (lambda: first_product(GROUPS, 5, 2), 1, 1, LAST_SUMS | {"cp.async.wait_group": 1}),
}


def leaving_out(which: int) -> type[BulkLaunch]:
    """A machine that skips the synchronisation of that number; a wait is over at once. `left_out` is its name."""

    class Without(BulkLaunch):
        left_out, seen = "", 0

        def _decode(self, text: str, scopes: Any) -> tuple[str | None, bool, Step, bool]:
            guard, wanted, step, straight = super()._decode(text, scopes)
            kind, (name, *rest) = type(self), text.split(None, 2)[text.startswith("@") :]
            if not name.startswith(SYNCHRONISES):
                return guard, wanted, step, straight
            kind.seen += 1
            if kind.seen - 1 != which:
                return guard, wanted, step, straight
            kind.left_out = name
            if "try_wait" in name:
                over = self._named(rest[0].split(",")[0], scopes)
                return guard, wanted, lambda warp, mask: warp.write(over, np.ones(LANES, dtype=bool), mask), straight
            return guard, wanted, lambda warp, mask: None, straight

    return Without


@pytest.mark.parametrize("name", CASES)
def test_no_synchronisation_can_be_left_out(name: str, shared_store: build.Store) -> None:
    make, blocks, cluster, needless = CASES[name]
    which, found = 0, []
    while True:
        machine = leaving_out(which)
        spec, tensors = make()
        try:
            bulk_machine.run(spec, tensors, (blocks,), cluster, machine=machine)
            outcome = "nothing"
        except (AssertionError, Deadlock) as error:  # a race, or an address made of what was not there
            outcome = type(error).__name__
        if not machine.left_out:
            assert outcome == "nothing", "the kernel as it is"
            break
        found.append((machine.left_out, outcome))
        which += 1
    missed = Counter(left_out for left_out, outcome in found if outcome == "nothing")
    assert missed == needless, found
    assert sum(outcome == "Race" for _, outcome in found) >= 5, found


def places(*bytes_: int) -> np.ndarray:
    return np.array([[b // 2] for b in bytes_])


def who(*threads: int) -> np.ndarray:
    return np.array(threads)


@pytest.fixture
def shared() -> Shared:
    return Shared(Clocks(4))


def test_accesses_of_different_bytes_and_reads_need_no_order(shared: Shared) -> None:
    shared.write(who(0, 1), places(0, 2), "")
    shared.clocks.meet(who(0, 1, 2, 3))
    shared.read(who(2, 3), places(0, 0), "")


@pytest.mark.parametrize("second", ["read", "write"])
def test_a_write_is_found_whoever_comes_second(shared: Shared, second: str) -> None:
    shared.write(who(0), places(8), "")
    with pytest.raises(Race, match=r"thread 1 .* byte 8 .* which thread 0 wrote"):
        getattr(shared, second)(who(1), places(8), "")


def test_every_reader_counts_not_the_last_alone(shared: Shared) -> None:
    shared.read(who(1, 2), places(8, 8), "")
    shared.clocks.meet(who(0, 2))
    with pytest.raises(Race, match="which thread 1 read"):
        shared.write(who(0), places(8), "")


def test_a_copy_is_there_for_who_has_waited_for_it(shared: Shared) -> None:
    clocks = shared.clocks
    number = clocks.copy(who(0))
    shared.write(who(0), places(8), "", copies=number)
    clocks.meet(who(0, 1))
    with pytest.raises(Race, match="which a copy of thread 0 wrote"):
        shared.read(who(0), places(8), "")
    clocks.landed(0, int(number[0]))
    shared.read(who(0), places(8), "")
    with pytest.raises(Race):
        shared.read(who(1), places(8), "")
    clocks.acquire(who(1), clocks.copied(0, int(number[0])))
    shared.read(who(1), places(8), "")


def test_what_came_behind_a_release_is_not_told_by_it(shared: Shared) -> None:
    told = shared.clocks.release(who(0))
    shared.write(who(0), places(8), "")
    shared.clocks.acquire(who(1), told)
    with pytest.raises(Race):
        shared.read(who(1), places(8), "")
