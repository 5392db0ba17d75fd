"""`moe_tail`: refusals, compilation, and ranks against each other on a machine in software; numbers, poisoned outputs and graph
replay on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bulk_machine import run as run_ptx
from bulk_machine import run_ranks
from yardstick import boxes, check_error, mailbox_parameters, played, replay_with, scratch_of

from vllm.model_executor.models.kimi_k3_fast.comm import Box, Mailbox
from vllm.model_executor.models.kimi_k3_fast.comm.layout import Layout
from vllm.model_executor.models.kimi_k3_fast.ops import build, single
from vllm.model_executor.models.kimi_k3_fast.ops import moe_tail as op
from vllm.model_executor.models.kimi_k3_fast.ops.library import LIBRARY
from vllm.model_executor.models.kimi_k3_fast.ops.moe_tail import reference
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic, ring_tactic
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

BOUND_NS = 300_000_000
SMALL = [
    op.Config(3, 80, 256, 64),
    op.Config(10, 96, 192, 128, r_dtype="f32", tactic=Tactic(groups=2, splits=2, row_warps=1, k_warps=2, tiles=3)),
    op.Config(3, 96, 1024, 256, tactic=Tactic(groups=6, k_warps=2, tiles=1, depth=2, resident=2)),
    op.Config(17, 96, 256, 64, tactic=Tactic(groups=2, splits=2, row_warps=3, k_warps=1, tiles=1)),
    op.Config(3, 90, 1024, 192, tactic=Tactic(groups=2, k_warps=4, tiles=3, stages=2, chunk=256, fetchers=2, height=45)),
    op.Config(17, 96, 448, 192, tactic=Tactic(groups=2, row_warps=2, k_warps=2, tiles=2, stages=2, chunk=128, fetchers=1)),
]
SMALL += [replace(SMALL[-1], tactic=replace(SMALL[-1].tactic, passing=True, pace=20))]
SMALL += [replace(SMALL[-1], tactic=replace(SMALL[-1].tactic, by_lanes=True))]
LIBRARYS = [
    op.Config(5, 80, 320, 64, tactic=LIBRARY),  # a warp of the norm in part
    op.Config(64, 80, 64, 128),
    op.Config(2, 32, 4160, 64, tactic=LIBRARY),  # more columns than the norm's threads take at once
]
PRODUCTS = [op.Config(5, 80, 320, 64, normed=True, pitch=648, tactic=LIBRARY), op.Config(64, 80, 64, 128, normed=True)]
NORMED = [  # r comes normalised; rows of the up-projection lie further apart than they are long
    op.Config(3, 80, 256, 64, normed=True, pitch=320),
    op.Config(9, 96, 192, 128, normed=True, pitch=392, tactic=Tactic(groups=2, splits=2, k_warps=2, tiles=3)),
    *(replace(c, normed=True, pitch=c.latent + 72) for c in (SMALL[3], *SMALL[-3:])),
    op.Config(17, 96, 192, 128, normed=True, pitch=256, tactic=Tactic(2, splits=2, k_warps=2, tiles=3, stages=3)),
]
RANKS = [  # small blocks, a cluster, a ring, one that is filled at a pace by lanes, and stages, in one shot and two
    replace(c, pitch=2 * c.latent + 64, world=2, shots=shots, bound_ns=BOUND_NS)
    for c in (NORMED[0], NORMED[1], replace(NORMED[3], rows=89), NORMED[-2], NORMED[-1])
    for shots in (1, 2)
]
RANKS += [op.Config(1, 80, 64, 64, normed=True, pitch=256, world=4, shots=shots, bound_ns=BOUND_NS) for shots in (1, 2)]


def test_reference_agrees_with_the_plain_form() -> None:
    case = _case(SMALL[0], 0, "cpu")
    exact, plain = reference.tail(**case, eps=1e-5), reference.torch_form(**case, eps=1e-5)
    torch.testing.assert_close(plain.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("shared", [768, 384])
def test_the_served_shapes_are_covered(shared: int, tokens: int) -> None:
    assert op.unavailable_reason(op.Config(tokens, 7168, 3584, shared), "sm_90a") is None


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_served_shares_are_covered(world: int, tokens: int) -> None:
    config = op.Config(tokens, 7168, 3584 // world, 6144 // world, normed=True, pitch=3584, world=world)
    plan = op.plan(config, "sm_90a")
    assert plan.words == config.words >= tokens * 7168 / (world if config.two_shot else 2) and not plan.scratch_shapes()
    assert op.plan(replace(config, world=1), "sm_90a").words == 0


def test_refuses_what_it_cannot_compute() -> None:
    assert op.unavailable_reason(SMALL[0], "sm_80").reason is Reason.OP_ARCH
    by_library = op.Config(65, 80, 256, 64, tactic=LIBRARY)
    for config in (
        op.Config(1, 80, 256, 40),
        op.Config(0, 80, 256, 64),
        op.Config(1, 80, 256, 64, r_dtype="f16"),
        by_library,
        replace(by_library, tokens=64, r_dtype="f32"),
        replace(SMALL[0], world=2),  # not normalised
        replace(NORMED[0], r_dtype="f32"),
        replace(NORMED[0], pitch=255),
        replace(NORMED[0], pitch=260),
        replace(RANKS[0], world=3),
        replace(RANKS[0], shots=3),
        replace(RANKS[0], tactic=LIBRARY),
        replace(RANKS[0], rows=7168, tactic=Tactic(groups=133, tiles=4)),
    ):
        assert op.unavailable_reason(config, "sm_90a").reason is Reason.OP_SHAPE


@pytest.mark.parametrize("config", LIBRARYS, ids=str)
def test_the_librarys_products_and_the_norm(
    config: op.Config, monkeypatch: pytest.MonkeyPatch, shared_store: build.Store
) -> None:
    plan, case = op.plan(config, "sm_90a"), _case(config, 7, "cpu")
    monkeypatch.setattr(single, "get", played((config.tokens,)))
    delta = torch.full((config.tokens, config.rows), float("nan"), dtype=torch.bfloat16)
    op.run(plan, **case, delta=delta, scratch=scratch_of(plan, "cpu"))
    check_error(delta, reference.tail(**case, eps=config.eps), reference.torch_form(**case, eps=config.eps))
    with pytest.raises(ValueError, match="expected a buffer normed"):
        op.run(plan, **case, delta=delta)


@pytest.mark.parametrize("config", PRODUCTS, ids=str)
def test_the_librarys_products_of_a_normalised_share(config: op.Config) -> None:
    plan, (case,) = op.plan(config, "sm_90a"), _shares(config, 7, "cpu")
    assert plan.spec is None and plan.words == 0 and "library" in str(plan)
    delta = torch.full((config.tokens, config.rows), float("nan"), dtype=torch.bfloat16)
    op.run(plan, **case, delta=delta)
    check_error(delta, *_expected([case]))


def test_a_mailbox_that_does_not_fit_is_refused() -> None:
    plan, (case, _) = op.plan(RANKS[0], "sm_90a"), _shares(RANKS[0], 0, "cpu")
    for box in (None, Box(0, Layout(2, plan.words - 1), torch.zeros(1), torch.zeros(2), torch.zeros(2))):
        with pytest.raises(ValueError, match=f"2 ranks and {plan.words} words"):
            op.run(plan, **case, delta=torch.zeros(1), mailbox=box)


@pytest.mark.parametrize("config", [*SMALL, LIBRARYS[0], *NORMED, *RANKS], ids=str)
def test_compiles_without_spilling(config: op.Config, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]) -> None:
    assert not findings(op.spec(config), arch)


def _ring(tokens: int) -> op.Config:
    """The tail of a TP8 rank through a ring."""
    return op.Config(tokens, 7168, 3584, 768, tactic=ring_tactic(7168, (3584, 768), tokens, chunk=512 if tokens <= 16 else 256))


def _case(config: op.Config, seed: int, device: str = "cuda", scale: float = 1.0) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    r = (
        draw(config.tokens, config.latent) * scale * torch.logspace(-2, 1, config.tokens, device=device)[:, None]
    )  # tokens differ in size
    return {
        "r": r.to(build.DTYPES[config.r_dtype][1]),
        "hidden": draw(config.tokens, config.shared).bfloat16(),
        "norm": None if config.normed else (1 + 0.3 * draw(config.latent)).bfloat16(),
        "up": (draw(config.rows, config.latent) / config.latent**0.5).bfloat16(),
        "down": (draw(config.rows, config.shared) / config.shared**0.5).bfloat16(),
    }


def _shares(config: op.Config, seed: int, device: str = "cuda") -> list[dict[str, torch.Tensor | None]]:
    """What each rank has of a layer with a normalised r. Its columns of the up-projection stand last in memory, and behind them
    those of the ranks after it; the others are NaN.
    """
    world, latent, shared = config.world, config.latent, config.shared
    whole = _case(replace(config, latent=world * latent, shared=world * shared, world=1), seed, device)
    found = []
    for rank in range(world):
        of_latent, of_shared = (slice(rank * size, (rank + 1) * size) for size in (latent, shared))
        first = (config.pitch or latent) - (world - rank) * latent
        up = torch.full((config.rows, config.pitch or latent), float("nan"), device=device, dtype=torch.bfloat16)
        up[:, first : first + latent] = whole["up"][:, of_latent]
        own = {"r": whole["r"][:, of_latent].contiguous(), "up": up[:, first : first + latent], "norm": None}
        found.append(own | {name: whole[name][:, of_shared].contiguous() for name in ("hidden", "down")})
    return found


def _expected(shares: list[dict[str, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole layer in float64, its shares put together; and its plain form, the shares' in bf16 summed in bf16."""
    whole = {name: torch.cat([own[name] for own in shares], 1) for name in ("r", "hidden", "up", "down")}
    parts = [reference.torch_form(**own, eps=0.0) for own in shares]
    return reference.tail(**whole, norm=None, eps=0.0), sum(parts[1:], parts[0])


@pytest.mark.parametrize("config", NORMED, ids=str)
def test_a_normalised_share_in_any_order_of_warps(config: op.Config, shared_store: build.Store) -> None:
    (case,), tactic = _shares(config, 6, "cpu"), config.shape.tactic
    delta = torch.full((config.tokens, config.rows), float("nan")).bfloat16()
    grid = (tactic.groups * tactic.splits,)
    run_ptx(op.spec(config), {**case, "delta": delta}, grid, seed=config.tokens, cluster=tactic.splits)
    check_error(delta, *_expected([case]))


def _on_machine(config: op.Config) -> list[dict[str, torch.Tensor | int | None]]:
    """What each rank has by name besides its share, the mailboxes before their first epoch."""
    return [
        {"delta": torch.empty(config.tokens, config.rows, dtype=torch.bfloat16)} | mailbox_parameters(box)
        for box in boxes(Layout(config.world, config.words), "cpu")
    ]


@pytest.mark.parametrize("config", RANKS, ids=str)
def test_ranks_sum_in_any_order_of_warps(config: op.Config, shared_store: build.Store) -> None:
    """Two calls over the same mailboxes: each must see its own epoch's words."""
    tactic, ranks = config.shape.tactic, _on_machine(config)
    for call in range(2):
        shares = _shares(config, call, "cpu")
        for own, fresh in zip(ranks, shares, strict=True):
            own |= fresh
            own["delta"].fill_(float("nan"))
        run_ranks(op.spec(config), ranks, (tactic.groups * tactic.splits,), cluster=tactic.splits, seed=call)
        check_error(ranks[0]["delta"], *_expected(shares))
        for own in ranks:
            assert torch.equal(own["delta"], ranks[0]["delta"]), "ranks hold different bits"
            assert own["epoch"].tolist() == [call + 1, 0] and own["box"][0] == 0


@pytest.mark.parametrize("config", RANKS[:2], ids=str)
def test_a_rank_that_never_comes_is_named_to_all(config: op.Config, shared_store: build.Store) -> None:
    config = replace(config, bound_ns=2000)
    tactic = config.shape.tactic
    ranks = [own | share for own, share in zip(_on_machine(config), _shares(config, 0, "cpu"), strict=True)]
    run_ranks(op.spec(config), ranks, (tactic.groups * tactic.splits,), cluster=tactic.splits, missing=1)
    assert [int(own["box"][0]) for own in ranks] == [2, 2], "1 + the rank that is lost"
    assert ranks[0]["delta"].isnan().all()


@pytest.mark.parametrize("config", SMALL[-3:], ids=str)
def test_a_ring_gives_the_right_numbers_in_any_order_of_warps(config: op.Config, shared_store: build.Store) -> None:
    case, tactic = _case(config, 5, "cpu"), config.shape.tactic
    delta = torch.full((config.tokens, config.rows), float("nan")).bfloat16()
    grid = (tactic.groups * tactic.splits,)
    run_ptx(op.spec(config), {**case, "delta": delta}, grid, seed=config.tokens, cluster=tactic.splits)
    check_error(delta, reference.tail(**case, eps=config.eps), reference.torch_form(**case, eps=config.eps))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [*SMALL, *(op.Config(t, 7168, 3584, 768) for t in (1, 8, 16, 64)), *map(_ring, (1, 8, 16, 64))], ids=str
)
def test_error_is_within_twice_pytorchs(config: op.Config) -> None:
    plan = op.plan(config, build.device_arch())
    for seed, scale in ((0, 1.0), (1, 1e-4), (2, 1e3)):
        case = _case(config, seed, scale=scale)
        delta = torch.full((config.tokens, config.rows), float("nan"), device="cuda", dtype=torch.bfloat16)
        op.run(plan, **case, delta=delta, scratch=scratch_of(plan))
        check_error(delta, reference.tail(**case, eps=config.eps), reference.torch_form(**case, eps=config.eps))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*(op.Config(t, 7168, 3584, 768) for t in (1, 64)), SMALL[1], _ring(1), SMALL[-1]], ids=str)
def test_replay_sees_changed_inputs(config: op.Config) -> None:
    plan, case, fresh = op.plan(config, build.device_arch()), _case(config, 3), _case(config, 4)
    delta = torch.empty(config.tokens, config.rows, device="cuda", dtype=torch.bfloat16)
    changed, scratch = {name: fresh[name] for name in ("r", "hidden")}, scratch_of(plan)
    replay_with(lambda: op.run(plan, **case, delta=delta, scratch=scratch), case, changed, [delta])
    check_error(delta, reference.tail(**case, eps=config.eps), reference.torch_form(**case, eps=config.eps))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [*NORMED, *PRODUCTS, *(op.Config(t, 7168, 448, 768, normed=True, pitch=3584) for t in (1, 8, 64))], ids=str
)
def test_a_normalised_share_allocates_nothing(config: op.Config) -> None:
    """Not for the library's product either: it takes rows that lie apart as they are."""
    plan = op.plan(config, build.device_arch())
    for seed in range(2):
        (case,) = _shares(config, seed)
        delta = torch.full((config.tokens, config.rows), float("nan"), device="cuda", dtype=torch.bfloat16)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        op.run(plan, **case, delta=delta)
        assert seed == 0 or torch.cuda.memory_stats()["allocation.all.allocated"] == before  # at first the library's workspace
        check_error(delta, *_expected([case]))


class Ranks:
    """All ranks of one problem on one device, each on a stream of its own."""

    def __init__(self, config: op.Config) -> None:
        self.plan, self.shares = op.plan(config, build.device_arch()), _shares(config, 0)
        self.boxes = boxes(Layout(config.world, config.words))
        self.streams = [torch.cuda.Stream() for _ in self.boxes]
        shape = config.tokens, config.rows
        self.deltas = [torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16) for _ in self.boxes]

    def renew(self, seed: int) -> None:
        for own, fresh in zip(self.shares, _shares(self.plan.config, seed), strict=True):
            for name in ("r", "hidden"):
                own[name].copy_(fresh[name])
        for delta in self.deltas:
            delta.fill_(float("nan"))
        torch.cuda.synchronize()

    def run(self, rank: int) -> None:
        op.run(self.plan, **self.shares[rank], delta=self.deltas[rank], mailbox=self.boxes[rank])

    def launch(self, ranks: list[int], late: int | None = None) -> None:
        for rank in ranks:
            with torch.cuda.stream(self.streams[rank]):
                if rank == late:
                    torch.cuda._sleep(200_000)  # cycles: about 100 us
                self.run(rank)

    def check(self) -> None:
        torch.cuda.synchronize()
        check_error(self.deltas[0], *_expected(self.shares))
        assert all(torch.equal(delta, self.deltas[0]) for delta in self.deltas), "ranks hold different bits"
        assert all(box.health().well for box in self.boxes)


@pytest.mark.gpu
@pytest.mark.parametrize("config", RANKS, ids=str)
def test_ranks_agree_over_many_epochs_and_in_graphs(config: op.Config) -> None:
    ranks, everybody = Ranks(config), list(range(config.world))
    for seed in range(4):
        ranks.renew(seed)
        ranks.launch(everybody, late=seed % config.world)
        ranks.check()
    graphs = [torch.cuda.CUDAGraph() for _ in everybody]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            ranks.run(rank)
    for seed in (7, 8, 9):
        ranks.renew(seed)
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(ranks.streams[rank]):
                graph.replay()
        ranks.check()
    assert all(box.epoch.tolist() == [7, 0] for box in ranks.boxes)


@pytest.mark.gpu
@pytest.mark.parametrize("config", RANKS[-2:], ids=str)
def test_a_missing_rank_is_named_to_everybody(config: op.Config) -> None:
    ranks = Ranks(replace(config, bound_ns=50_000_000))
    ranks.launch([0, 1, 3])  # rank 2 never comes
    torch.cuda.synchronize()
    assert [box.health().lost for box in ranks.boxes] == [2, 2, 2, 2]
    assert all(ranks.deltas[rank].isnan().any() for rank in (0, 1, 3))


# -- on two GPUs ----------------------------------------


def _rank(rank: int, folder: str, configs: list[op.Config]) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    box = Mailbox(dist.group.WORLD, max(c.words for c in configs), torch.device("cuda", rank))
    for config in configs:
        plan, case = op.plan(config, build.device_arch()), _shares(config, 0)[rank]
        delta = torch.empty(config.tokens, config.rows, device="cuda", dtype=torch.bfloat16)
        op.run(plan, **case, delta=delta, mailbox=box)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.run(plan, **case, delta=delta, mailbox=box)
        for seed in range(4):
            shares = _shares(config, seed)
            for name, fresh in shares[rank].items():
                if fresh is not None:
                    case[name].copy_(fresh)
            delta.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            check_error(delta, *_expected(shares))
            both = [torch.empty_like(delta, device="cpu") for _ in range(2)]
            dist.all_gather(both, delta.cpu())
            assert torch.equal(*both), (config, seed)
    box.health().check()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_agree_in_graphs(tmp_path: Path) -> None:
    sizes = [(t, shots) for t in (1, 8, 64) for shots in (1, 2)]
    configs = [op.Config(t, 7168, 448, 768, normed=True, pitch=3584, world=2, shots=shots) for t, shots in sizes]
    for config in configs:
        build.ensure(op.spec(config), build.device_arch())
    torch.multiprocessing.spawn(_rank, (os.fspath(tmp_path), configs), nprocs=2)
