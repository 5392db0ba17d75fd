"""o_proj and the MoE tail that only post their part of a sum, and AttnRes that adds it up: as launches of several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import bulk_machine
import pytest
import torch
from ptx_machine import Call
from yardstick import boxes, check_error, mailbox_parameters

from vllm.model_executor.models.kimi_k3_fast.comm import Box
from vllm.model_executor.models.kimi_k3_fast.comm.layout import HEADER, Layout, first_word
from vllm.model_executor.models.kimi_k3_fast.ops import all_reduce, attn_res, build, moe_tail, oproj
from vllm.model_executor.models.kimi_k3_fast.ops.all_reduce.reference import in_order
from vllm.model_executor.models.kimi_k3_fast.ops.attn_res import reference
from vllm.model_executor.models.kimi_k3_fast.ops.pairs import posted_word
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

WIDE, BOUND_NS = 320, 300_000_000
RING = Tactic(groups=7, k_warps=2, tiles=3, stages=2, chunk=64, fetchers=2, height=47)  # 320 rows: shares of 44 and 46, not 45
SPLIT = Tactic(groups=8, splits=2, k_warps=4)


def projection(tokens: int, world: int, tactic: Tactic) -> oproj.Config:
    return oproj.Config(tokens, WIDE, 256, world, "post", tactic=tactic, bound_ns=BOUND_NS)


def tail(tokens: int, world: int, tactic: Tactic) -> moe_tail.Config:
    return moe_tail.Config(
        tokens, WIDE, 256, 64, tactic=tactic, normed=True, pitch=512, world=world, bound_ns=BOUND_NS, posts=True
    )


def adding(tokens: int, world: int, prev: int, **more: Any) -> attn_res.Config:
    sizes = {"closed": 4, "rows": tokens + 1, "blocks": 2, "world": world, "bound_ns": BOUND_NS}
    return attn_res.Config(tokens, WIDE, prev, True, **sizes, **more)


CHAINS = [
    (projection(1, 2, RING), adding(1, 2, 0)),
    (projection(3, 2, RING), adding(3, 2, 2, replaces=True)),
    (projection(9, 2, SPLIT), replace(adding(9, 2, 3, write=3), blocks=1)),
    (tail(3, 4, RING), adding(3, 4, 1, write=2)),
    (tail(2, 8, RING), adding(2, 8, 4, normalise=False)),
]


class Chain:
    """The ranks of one poster and one receiver, over the same mailboxes. launch: of one kernel, on all ranks at once."""

    def __init__(self, post: Any, add: attn_res.Config, device: str, launch: Callable[[Any, list[dict[str, Any]]], None]) -> None:
        self.post, self.add, self.device, self.launch = post, add, device, launch
        self.boxes = boxes(Layout(post.world, post.words + 5), device)  # of more words than these need
        self.generator = torch.Generator(device).manual_seed(11)
        draw, wide = self.draw, post.rows
        self.score, self.norm = draw(wide) * 2 * wide**-0.5, (1 + 0.3 * draw(wide)).bfloat16()
        blocks, prefix = draw(add.closed, add.rows, wide).bfloat16(), draw(add.rows, wide).bfloat16()
        self.blocks, self.prefixes = ([x.clone() for _ in self.boxes] for x in (blocks, prefix))  # alike on all ranks

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator)

    def step(self) -> None:
        """New inputs, both launches, and every number of them judged."""
        posted, exact, plain = self.posters()
        self.launch(self.post, posted)
        epoch = int(self.boxes[0].epoch[0])
        parts = [self._parts(box, epoch) for box in self.boxes]
        for sender in range(self.post.world):
            for found in parts:
                assert torch.equal(found[sender], parts[0][sender]), "every rank was sent the same"
            check_error(parts[0][sender], exact[sender], plain[sender])
        self._add_up(in_order(parts[0]))
        assert all(box.epoch.tolist() == [epoch, 0] for box in self.boxes)

    def posters(self, config: Any = None) -> tuple[list[dict[str, Any]], list[torch.Tensor], list[torch.Tensor]]:
        """New inputs, the same on every rank only in shape: what a launch takes, and each rank's product, exact and plain."""
        c, ranks, exact, plain = config or self.post, [], [], []
        for box in self.boxes:
            if isinstance(c, oproj.Config):
                x, w = self.draw(c.tokens, c.columns).bfloat16(), (self.draw(c.rows, c.columns) / c.columns**0.5).bfloat16()
                given, products = {"w": w, "x": x}, [(x, w)]
            else:
                r, hidden = self.draw(c.tokens, c.latent).bfloat16(), self.draw(c.tokens, c.shared).bfloat16()
                up = (self.draw(c.rows, c.pitch) / 16).bfloat16()[:, : c.latent]
                down = (self.draw(c.rows, c.shared) / 8).bfloat16()
                given, products = {"up": up, "down": down, "r": r, "hidden": hidden}, [(r, up), (hidden, down)]
            ranks.append(given | mailbox_parameters(box))
            exact.append(sum(a.double() @ b.double().T for a, b in products))
            plain.append(sum(a @ b.T for a, b in products))
        return ranks, exact, plain

    def _parts(self, box: Box, epoch: int) -> list[torch.Tensor]:
        """What each rank sent into this box: [T, D] bf16."""
        t, wide = self.post.tokens, self.post.rows
        words = box.memory[HEADER // 4 :].view(-1, 2)
        found = []
        for sender in range(self.post.world):
            first = first_word(self.post.world, box.layout.words, epoch & 1, sender)
            where = [first + posted_word(wide, token, row) for token in range(t) for row in range(0, wide, 2)]
            assert len(set(where)) == t * wide // 2 and (words[where, 1] == epoch).all(), (
                "a pair was not sent, or two into one word"
            )
            found.append(words[where, 0].contiguous().view(torch.bfloat16).view(t, wide))
        return found

    def receive(self) -> list[torch.Tensor]:
        """The receiving launch; what it returns, rank by rank."""
        c = self.add
        outs = [torch.full((c.tokens, c.columns), float("nan"), device=self.device, dtype=torch.bfloat16) for _ in self.boxes]
        self.launch(c, self.adding(outs))
        return outs

    def adding(self, outs: list[torch.Tensor]) -> list[dict[str, Any]]:
        fixed = {"score": self.score, "norm": self.norm}
        given = zip(self.boxes, self.blocks, self.prefixes, outs, strict=True)
        return [fixed | {"blocks": b, "prefix": p, "out": out} | mailbox_parameters(box) for box, b, p, out in given]

    def _add_up(self, delta: torch.Tensor) -> None:
        c = self.add
        before = [(blocks.clone(), prefix.clone()) for blocks, prefix in zip(self.blocks, self.prefixes, strict=True)]
        outs = self.receive()
        for rank, (blocks, prefix) in enumerate(before):
            if c.replaces:
                prefix[: c.tokens] = 0
            blocks, prefix = reference.updated(c, delta, blocks, prefix)
            assert torch.equal(self.prefixes[rank], prefix) and torch.equal(self.blocks[rank], blocks), rank
            exact, plain = (reference.mix(c, self.score, self.norm, blocks, prefix, d) for d in (torch.float64, torch.float32))
            check_error(outs[rank], exact, plain.bfloat16())


def spec_of(config: Any) -> build.KernelSpec:
    ops = {attn_res.Config: attn_res, oproj.Config: oproj, moe_tail.Config: moe_tail, all_reduce.Config: all_reduce}
    return ops[type(config)].spec(config)


def size_of(config: Any) -> tuple[tuple[int, ...], int]:
    """Grid and cluster."""
    if isinstance(config, attn_res.Config):
        assert config.blocks is not None
        return (config.tokens * config.blocks,), config.blocks
    if isinstance(config, all_reduce.Config):
        return (config.blocks,), 1
    tactic = config.shape.tactic
    return (tactic.groups * tactic.splits,), tactic.splits


def on_machine(seed: itertools.count, missing: int | None = None) -> Callable[[Any, list[dict[str, Any]]], None]:
    def launch(config: Any, ranks: list[dict[str, Any]]) -> None:
        bulk_machine.run_ranks(spec_of(config), ranks, *size_of(config), seed=next(seed), missing=missing)

    return launch


class OnGpu:
    """Ranks as streams of one GPU. late: the rank that comes 100 us behind the others."""

    def __init__(self, world: int) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        self.late = -1

    def __call__(self, config: Any, ranks: list[dict[str, Any]]) -> None:
        torch.cuda.synchronize()
        spec = spec_of(config)
        for rank, (stream, given) in enumerate(zip(self.streams, ranks, strict=True)):
            with torch.cuda.stream(stream):
                if rank == self.late:
                    torch.cuda._sleep(200_000)
                build.get(spec)(*(given[param.name] for param in spec.params))
        torch.cuda.synchronize()


@pytest.mark.parametrize(("post", "add"), CHAINS, ids=str)
def test_the_next_launch_adds_up_what_was_posted(post: Any, add: attn_res.Config, shared_store: build.Store) -> None:
    """Twice over the same mailboxes, in another order of warps: each call must see its own epoch's words."""
    chain = Chain(post, add, "cpu", on_machine(itertools.count()))
    for _ in range(2):
        chain.step()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("post", "add"),
    [
        *CHAINS,
        *(
            (oproj.Config(t, 7168, 1536, 2, "post"), attn_res.Config(t, 7168, 8, True, world=2, replaces=first))
            for t, first in ((1, True), (8, False), (64, False))
        ),
        (
            moe_tail.Config(1, 7168, 448, 768, normed=True, pitch=3584, world=8, posts=True),
            attn_res.Config(1, 7168, 7, True, 7, world=8),
        ),
    ],
    ids=str,
)
def test_numbers_over_many_epochs(post: Any, add: attn_res.Config) -> None:
    launch = OnGpu(post.world)
    chain = Chain(post, add, "cuda", launch)
    for call in range(5):
        launch.late = call % post.world
        chain.step()


def test_a_missing_rank_is_named_to_everybody(shared_store: build.Store) -> None:
    """What only posts does not wait: the launch behind it finds that rank 1 has sent nothing but words of an earlier call."""
    post, add = projection(3, 2, RING), replace(adding(3, 2, 2), bound_ns=2000)
    chain = Chain(post, add, "cpu", on_machine(itertools.count()))
    for _ in range(2):
        chain.step()
    chain.launch = on_machine(itertools.count(), missing=1)
    posted, _, _ = chain.posters()
    chain.launch(post, posted)
    outs = chain.receive()
    assert [box.health().lost for box in chain.boxes] == [1, 1]
    assert outs[0].isnan().all() and chain.prefixes[0][:3].isnan().all() and not chain.prefixes[0][3:].isnan().any()


@pytest.mark.parametrize(("world", "seed"), [(2, 0), (4, 2)])
def test_ranks_at_their_own_pace_never_read_another_exchange(world: int, seed: int, shared_store: build.Store) -> None:
    """Two layers' worth of exchanges over one mailbox: posted and added up by the next launch, summed in one launch, posted
    again. A rank that is ahead sends into the parity that the one behind has left, and into no other."""
    post, add, last = projection(2, world, RING), adding(2, world, 2), tail(2, world, RING)
    alone = all_reduce.Config(2, WIDE, world, 1, threads=128, bound_ns=BOUND_NS)
    chain = Chain(post, add, "cpu", lambda config, ranks: None)
    prefix = chain.prefixes[0][:2].double()
    calls: list[list[Call]] = [[] for _ in chain.boxes]
    sums: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for _ in range(2):
        for config in (post, add, alone, last, add):
            outs = [torch.full((2, WIDE), float("nan"), dtype=torch.bfloat16) for _ in chain.boxes]
            if config is add:
                ranks = chain.adding(outs)
            elif config is alone:
                parts = [chain.draw(2, WIDE).bfloat16() for _ in chain.boxes]
                ranks = [{"x": parts[box.rank], "out": outs[box.rank]} | mailbox_parameters(box) for box in chain.boxes]
                sums.append((in_order(parts), outs))
            else:
                ranks, exact, _ = chain.posters(config)
                prefix = prefix + sum(exact)
            for own, given in zip(calls, ranks, strict=True):
                own.append(Call(spec_of(config), given, *size_of(config)))
    bulk_machine.run_streams(calls, seed=seed, most=120_000)
    for wanted, outs in sums:
        assert all(torch.equal(out, wanted) for out in outs)
    for found in chain.prefixes:
        assert torch.equal(found, chain.prefixes[0])
        torch.testing.assert_close(found[:2].double(), prefix, rtol=0.02, atol=0.1)
    assert all(box.epoch.tolist() == [6, 0] for box in chain.boxes)


def test_posting_needs_ranks_one_trip_and_whole_pairs() -> None:
    sound = projection(1, 2, RING)
    assert oproj.unavailable_reason(sound, "sm_90a") is None and sound.words == WIDE // 2
    for changed in (replace(sound, world=1), replace(sound, shots=2), replace(sound, rows=321), replace(sound, world=3)):
        assert oproj.unavailable_reason(changed, "sm_90a").reason is Reason.OP_SHAPE
    wide = tail(1, 2, RING)
    assert moe_tail.unavailable_reason(wide, "sm_90a") is None
    assert moe_tail.unavailable_reason(replace(wide, shots=2), "sm_90a").reason is Reason.OP_SHAPE
    low = replace(RING, height=45)  # seven groups of 320 rows hold 46 where pairs stay together
    assert oproj.unavailable_reason(replace(sound, tactic=low), "sm_90a") is None, "rounded up to whole pairs"
    assert oproj.unavailable_reason(replace(sound, tactic=replace(RING, height=44)), "sm_90a").reason is Reason.OP_SHAPE
    added = adding(1, 2, 1)
    for changed in (replace(added, world=3), replace(added, has_delta=False), replace(added, world=1, replaces=True)):
        assert attn_res.unavailable_reason(changed, "sm_90a").reason is Reason.OP_SHAPE


def test_a_mailbox_that_does_not_fit_is_refused() -> None:
    add, post = attn_res.plan(adding(2, 2, 1), "sm_90a"), oproj.plan(projection(2, 2, RING), "sm_90a")
    assert add.words == post.words == WIDE
    small, none = Box(0, Layout(2, WIDE - 1), *(torch.zeros(1) for _ in range(3))), torch.zeros(1)
    for box in (None, small):
        with pytest.raises(ValueError, match=f"2 ranks and {WIDE} words"):
            attn_res.run(add, none, none, None, none, none, none, box)
        with pytest.raises(ValueError, match=f"2 ranks and {WIDE} words"):
            oproj.run(post, none, none, None, box)


@pytest.mark.parametrize(
    "spec",
    [
        attn_res.spec(attn_res.Config(t, 7168, prev, True, write, world=world, replaces=first))
        for t, world, prev, write, first in ((1, 2, 8, -1, False), (8, 8, 7, 7, False), (4, 4, 1, -1, True))
    ],
    ids=str,
)
def test_compiles_without_spilling(spec: build.KernelSpec, arch: str, findings: Callable[..., list[str]]) -> None:
    assert not findings(spec, arch)
