"""The choice of experts as compiled, on the PTX machine of the tests: ids, ties, weights, padded rows, pairs by expert; and of
several ranks at once, each with a share of the logits and of z, which on a GPU run as its streams.
"""

from __future__ import annotations

import time
from dataclasses import astuple, replace
from typing import Any

import bulk_machine
import pytest
import torch
from yardstick import boxes

from vllm.model_executor.models.kimi_k3_fast.comm.layout import Layout
from vllm.model_executor.models.kimi_k3_fast.ops import build, single
from vllm.model_executor.models.kimi_k3_fast.ops import moe_front as op
from vllm.model_executor.models.kimi_k3_fast.ops.moe_front.torch_form import route
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

SMALL = op.TopkConfig(3, 48, 4, scaling=2.4, grouped=True)
RANKS = [
    op.TopkConfig(3, 48, 4, scaling=2.4, grouped=True, world=2, latent=28),
    op.TopkConfig(3, 48, 4, grouped=True, world=4, latent=80),
    op.TopkConfig(2, 130, 3, renormalise=False, world=2, latent=700),  # more words of z from a rank than threads
    op.TopkConfig(1, 896, 16, world=4, latent=3584),
]


class Ranks:
    """All ranks of one problem, or the only one, on one device."""

    def __init__(self, config: op.TopkConfig, arch: str = "sm_90a", device: str = "cpu") -> None:
        self.config, self.plan, self.device = config, op.topk_plan(config, arch), device
        self.boxes = boxes(Layout(config.world, self.plan.words), device) if config.world > 1 else [None]
        self.ids = [torch.empty(config.tokens, config.top_k, device=device, dtype=torch.int32) for _ in self.boxes]
        self.weights = [torch.empty(config.tokens, config.top_k, device=device) for _ in self.boxes]
        self.zs = [torch.empty(config.tokens, config.latent, device=device, dtype=torch.bfloat16) for _ in self.boxes]
        sizes = (config.experts + 1, config.tokens * config.top_k, config.experts, 1)
        self.groups = [op.Groups(*map(self._poisoned, sizes), self._poisoned(1).zero_()) for _ in self.boxes]
        self.streams = [torch.cuda.Stream() for _ in self.boxes] if device == "cuda" else []
        self.logits = torch.empty(config.tokens, config.experts, device=device)
        self.bias = torch.empty(config.experts, device=device)
        self.z = torch.empty(config.tokens, config.latent, device=device, dtype=torch.bfloat16)
        self.live = self._poisoned(1)
        shares = [tensor.chunk(config.world, dim=1) for tensor in (self.logits, self.z)]
        self.shares = [[part.clone() for part in parts] for parts in zip(*shares, strict=True)]

    def _poisoned(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int32, device=self.device)

    def renew(self, seed: int, live: int, ties: bool = False) -> None:
        """New inputs, the same on every call with this seed; outputs poisoned."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(self.logits.shape, generator=generator) * 2
        self.logits.copy_(logits.round() if ties else logits)
        self.bias.copy_(torch.randn(self.bias.shape, generator=generator) * (0.0 if ties else 0.1))
        self.z.copy_(torch.randn(self.z.shape, generator=generator))
        self.live.fill_(live)
        for rank, parts in enumerate(self.shares):
            for part, whole in zip(parts, (self.logits, self.z), strict=True):
                part.copy_(whole.chunk(self.config.world, dim=1)[rank])
        for output in (*self.ids, *self.weights, *self.zs):
            output.fill_(-7)

    def call(self, rank: int) -> None:
        logits, z_own = self.shares[rank]
        box = self.boxes[rank]
        gather = op.Gather(z_own, self.zs[rank], box) if box else None
        groups = self.groups[rank] if self.config.grouped else None
        op.run_topk(self.plan, logits, self.bias, self.live, self.ids[rank], self.weights[rank], groups, gather)

    def play(self, seed: int, missing: int | None = None) -> None:
        """A launch of every rank on the PTX machine."""
        launches: list[dict[str, Any]] = []

        def get(spec: build.KernelSpec, arch: str) -> Any:
            names = [param.name for param in spec.params]
            return lambda *values, stream: launches.append(dict(zip(names, values, strict=True)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(single, "get", get)
            for rank in range(len(self.boxes)):
                self.call(rank)
        if self.config.world == 1:
            bulk_machine.run(self.plan.spec, launches[0], (self.config.tokens,), seed=seed)
        else:
            bulk_machine.run_ranks(self.plan.spec, launches, (self.config.tokens,), seed=seed, missing=missing)

    def launch(self, late: int | None = None, missing: int | None = None) -> None:
        """A launch of every rank on the GPU."""
        torch.cuda.synchronize()  # the inputs are there
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                if rank == late:
                    torch.cuda._sleep(200_000)  # cycles: about 100 us
                if rank != missing:
                    self.call(rank)
        torch.cuda.synchronize()

    def check_as(self, one: Ranks) -> None:
        """All ranks hold, bit for bit, the choice of one that has all the logits, and the whole z."""
        for rank, box in enumerate(self.boxes):
            assert box.health().well
            assert torch.equal(self.zs[rank], self.z)
            assert torch.equal(self.ids[rank], one.ids[0]) and torch.equal(self.weights[rank], one.weights[0])
            for found, expected in zip(astuple(self.groups[rank]), astuple(one.groups[0]), strict=True):
                assert torch.equal(found, expected)


def _alone(config: op.TopkConfig) -> op.TopkConfig:
    """The same choice by one rank."""
    return replace(config, world=1, latent=0)


def test_few_experts_reach_the_bound() -> None:
    """What the kernel counts: experts no less than the 16th largest of the warps' maxima, in one pass of 56."""
    scores = torch.randn(2000, 896, generator=torch.Generator().manual_seed(0))
    bound = scores.view(-1, 28, 32).amax(2).topk(16).values[:, -1:]
    candidates = (scores >= bound).sum(1)
    assert candidates.min() >= 16 and candidates.max() <= 56
    assert 22 < candidates.double().mean() < 24


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("config", "live"),
    [
        (op.TopkConfig(1), 1),
        (SMALL, 2),  # fewer warps than choices: every expert is a candidate
        (op.TopkConfig(2, 130, 3, renormalise=False, grouped=True), 2),
        (op.TopkConfig(1, 30, 4, grouped=True), 0),
    ],
    ids=lambda value: f"{value.tokens}x{value.experts}" if isinstance(value, op.TopkConfig) else f"live{value}",
)
def test_the_compiled_choice_is_the_plain_one(config: op.TopkConfig, live: int, ties: bool, shared_store: build.Store) -> None:
    one = Ranks(config)
    one.renew(live, live, ties)
    one.play(live)
    ids, weights, groups = one.ids[0], one.weights[0], one.groups[0]
    wanted, wanted_weights = route(one.logits, one.bias, config.top_k, config.renormalise, config.scaling)
    assert torch.equal(ids[:live].long(), wanted[:live])
    torch.testing.assert_close(weights[:live], wanted_weights[:live], rtol=2e-6, atol=1e-7)
    assert (ids[live:] == 0).all() and (weights[live:] == 0).all()
    if config.grouped:
        chosen = ids[:live].flatten().long()
        counts = torch.bincount(chosen, minlength=config.experts)
        active = torch.nonzero(counts).flatten()
        assert groups.offsets.tolist() == [0, *counts.cumsum(0).tolist()]
        assert groups.pairs[: chosen.numel()].tolist() == torch.argsort(chosen, stable=True).tolist()
        assert groups.num_active.item() == active.numel()
        assert groups.active[: active.numel()].tolist() == active.tolist()
        assert groups.arrived.item() == 0


@pytest.mark.parametrize("bits", [0x7FFF7FFF, 0xFFC00000 - (1 << 32)])
def test_an_expert_whose_logit_is_nan_is_chosen(bits: int, shared_store: build.Store) -> None:
    """Of either sign, which a GPU's division may turn: so a lost rank's words reach the weights, and the check of the logits."""
    one = Ranks(op.TopkConfig(1))
    one.renew(1, 1)
    one.shares[0][0][0, 700] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    one.play(1)
    assert 700 in one.ids[0].tolist()[0] and one.weights[0].isnan().all()
    assert len(set(one.ids[0].tolist()[0])) == 16


# -- several ranks ---------------------------------------------------------------------------------------------------------------


def test_refuses_ranks_without_equal_shares() -> None:
    assert op.topk_plan(op.TopkConfig(64, world=8, latent=3584), "sm_90a").words == 64 * (112 + 224)
    assert op.topk_plan(op.TopkConfig(64), "sm_90a").words == 0
    for change in ({"world": 3}, {"world": 0}, {"latent": 0}, {"latent": 82}, {"experts": 50}):
        config = replace(RANKS[1], **change)
        assert op.topk_unavailable_reason(config, "sm_90a").reason is Reason.OP_SHAPE, change
        with pytest.raises(ValueError, match="topk: expected"):
            op.topk_plan(config, "sm_90a")


def test_gathers_only_as_planned() -> None:
    some, words = torch.zeros(1), op.topk_plan(RANKS[1], "sm_90a").words
    gather, small = (op.Gather(some, some, boxes(Layout(4, n), "cpu")[0]) for n in (words, words - 1))
    groups = op.Groups(*[some] * 5)
    for config, given, expected in (
        (SMALL, gather, "gather only"),
        (RANKS[1], None, "gather and found none"),
        (RANKS[1], small, f"4 ranks and {words} words"),
    ):
        with pytest.raises(ValueError, match=expected):
            op.run_topk(op.topk_plan(config, "sm_90a"), *[some] * 5, groups, given)


@pytest.mark.parametrize("config", RANKS, ids=str)
def test_ranks_choose_as_one_over_epochs(config: op.TopkConfig, shared_store: build.Store) -> None:
    """Calls in a row over the same mailboxes, with fewer live tokens each time and ties in the end."""
    one, ranks = Ranks(_alone(config)), Ranks(config)
    calls = range(3 if config.experts < 896 else 1)
    for call in calls:
        for each in (one, ranks):
            each.renew(call, max(config.tokens - call, 0), ties=call == 2)
            each.play(call)
        ranks.check_as(one)
    assert all(box.epoch.tolist() == [len(calls), 0] for box in ranks.boxes)


def _check_lost(ranks: Ranks, missing: int, left: list[int]) -> None:
    """Everybody is told who is lost; who is left has made a choice among the experts that there are, and gives it no weight."""
    config = ranks.config
    assert [box.health().lost for box in ranks.boxes] == [missing] * config.world
    for rank in left:
        assert ((ranks.ids[rank] >= 0) & (ranks.ids[rank] < config.experts)).all()
        assert all(len(set(row)) == config.top_k for row in ranks.ids[rank].tolist())
        assert ranks.weights[rank].isnan().any(dim=1).all()
        z_of_missing = ranks.zs[rank].chunk(config.world, dim=1)[missing]
        assert z_of_missing.isnan().all()


@pytest.mark.parametrize("config", RANKS[1:3], ids=str)
def test_the_choice_ends_without_a_rank(config: op.TopkConfig, shared_store: build.Store) -> None:
    ranks = Ranks(replace(config, bound_ns=10_000))
    left = [rank for rank in range(config.world) if rank != 1]
    ranks.renew(0, config.tokens)
    ranks.play(0, missing=1)
    _check_lost(ranks, 1, left)
    ranks.renew(1, config.tokens)
    ranks.play(1, missing=1)  # from now on nobody waits
    _check_lost(ranks, 1, left)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [*RANKS, *(op.TopkConfig(t, world=w, latent=3584, grouped=t > 8) for t, w in ((1, 8), (8, 8), (32, 4)))], ids=str
)
def test_ranks_choose_as_one_on_a_gpu(config: op.TopkConfig) -> None:
    one, ranks = (Ranks(c, build.device_arch(), "cuda") for c in (_alone(config), config))
    for call in range(5):
        for each in (one, ranks):
            each.renew(call, max(config.tokens - call, 0), ties=call == 2)
            each.launch(late=call % config.world)
        ranks.check_as(one)
    assert all(box.epoch.tolist() == [5, 0] for box in ranks.boxes)


@pytest.mark.gpu
def test_ranks_replay_in_a_graph_with_other_inputs() -> None:
    config = op.TopkConfig(4, world=4, latent=3584)
    one, ranks = (Ranks(c, build.device_arch(), "cuda") for c in (_alone(config), config))
    graphs = [torch.cuda.CUDAGraph() for _ in ranks.boxes]
    ranks.renew(0, 4)
    ranks.launch()
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            ranks.call(rank)
    for seed in (7, 8, 9):
        for each in (one, ranks):
            each.renew(seed, 4)
        one.launch()
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(ranks.streams[rank]):
                graph.replay()
        torch.cuda.synchronize()
        ranks.check_as(one)


@pytest.mark.gpu
def test_a_missing_rank_is_named_to_everybody() -> None:
    ranks = Ranks(op.TopkConfig(4, world=4, latent=3584, bound_ns=50_000_000), build.device_arch(), "cuda")
    for most in (5.0, 0.04):  # seconds; the second time nobody waits
        ranks.renew(0, 4)
        start = time.monotonic()
        ranks.launch(missing=2)
        assert time.monotonic() - start < most
        _check_lost(ranks, 2, [0, 1, 3])
