"""`oproj`: plans and refusals anywhere; on one GPU the ranks run as its streams; on two as processes, one of which dies."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bulk_machine import run_ranks
from yardstick import boxes, check_error, mailbox_parameters

from vllm.model_executor.models.kimi_k3_fast.comm import Box, Mailbox, PeerLost
from vllm.model_executor.models.kimi_k3_fast.comm.layout import Layout
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import oproj as op
from vllm.model_executor.models.kimi_k3_fast.ops.library import LIBRARY
from vllm.model_executor.models.kimi_k3_fast.ops.oproj.reference import oproj, torch_form
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

BOUND_NS = 300_000_000
SMALL = [
    op.Config(tokens, 160, 256, world=world, shots=shots, update=update, bound_ns=BOUND_NS)
    for tokens, (world, shots), update in itertools.product(
        (1, 3, 9), ((1, None), (2, 1), (2, 2), (4, 1), (4, 2)), ("write", "add")
    )
]
ODD = op.Config(5, 142, 256, world=2, shots=2, tactic=Tactic(groups=3, k_warps=4), bound_ns=BOUND_NS)  # shares of 47 and 48 rows
RING = replace(ODD, tactic=Tactic(groups=3, k_warps=2, tiles=3, stages=2, chunk=64, fetchers=2, height=48))
ON_MACHINE = [replace(RING, world=1, shots=None), replace(RING, shots=1, update="write"), RING]
LIBRARYS = [op.Config(t, 160, 256, update=u, tactic=LIBRARY) for t, u in ((3, "write"), (64, "add"))]
SPLIT = op.Config(9, 160, 512, world=2, shots=2, tactic=Tactic(groups=4, splits=2, k_warps=4), bound_ns=BOUND_NS)


# -- plans -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("world", "columns"), [(1, 12288), (2, 6144), (4, 3072), (8, 1536)])
def test_the_served_shapes_have_a_plan(world: int, columns: int, tokens: int) -> None:
    config = op.Config(tokens, 7168, columns, world=world)
    assert op.unavailable_reason(config, "sm_90a") is None
    plan = op.plan(config, "sm_90a")
    assert (
        plan.words == 0
        if world == 1
        else plan.words * 2 >= tokens * 7168 * (2 if config.two_shot else 1) / (world if config.two_shot else 1)
    )


def test_refuses_what_it_cannot_compute() -> None:
    assert op.unavailable_reason(op.Config(1, 64, 128), "sm_80").reason is Reason.OP_ARCH
    crowded = op.Config(1, 7168, 128, world=2, tactic=Tactic(groups=200, tiles=3))
    librarys = (op.Config(64, 64, 128, world=2, tactic=LIBRARY), op.Config(65, 64, 128, tactic=LIBRARY))
    for config in (
        *librarys,
        op.Config(1, 64, 128, world=3),
        op.Config(1, 64, 128, update="sub"),
        op.Config(65, 64, 128),
        crowded,
    ):
        assert op.unavailable_reason(config, "sm_90a").reason is Reason.OP_SHAPE
        with pytest.raises(ValueError, match="expected"):
            op.plan(config, "sm_90a")


@pytest.mark.parametrize("config", [*SMALL, ODD, SPLIT, RING, replace(RING, shots=1)], ids=str)
def test_every_pair_has_one_word_and_one_owner(config: op.Config) -> None:
    """The index arithmetic of the device half, in Python: what two senders could mix up, they would."""
    rows, world = config.shape.tactic.rows, config.world
    if world == 1:
        return
    seen: dict[tuple[int, int], tuple[int, int]] = {}  # (owner, word) -> (group, pair)
    for group in range(config.shape.tactic.groups):
        for pair in range(config.tokens * rows // 2):
            for second in (False, True) if config.two_shot else (False,):
                place = (config.owner(pair) if config.two_shot else 0, config.word(group, pair, second))
                assert place not in seen, f"{(group, pair)} and {seen[place]} share a word"
                seen[place] = (group, pair)
                assert 0 <= place[1] < config.words and 0 <= place[0] < world


@pytest.mark.parametrize("config", LIBRARYS, ids=str)
def test_the_librarys_product_of_one_rank(config: op.Config) -> None:
    y, weight = torch.randn(config.tokens, config.columns).bfloat16(), torch.randn(config.rows, config.columns).bfloat16()
    before = torch.randn(config.tokens, config.rows).bfloat16()
    prefix = before.clone() if config.update == "add" else torch.full_like(before, float("nan"))
    plan = op.plan(config, "sm_90a")
    assert plan.spec is None and plan.words == 0 and "library" in str(plan)
    op.run(plan, y, weight, prefix)
    case = ([y], [weight], before, config.update)
    check_error(prefix, oproj(*case), torch_form(*case))


def test_with_ranks_many_tokens_are_a_kernels() -> None:
    assert op.Config(64, 7168, 1536).chosen is LIBRARY
    assert op.plan(op.Config(64, 7168, 1536, world=8), "sm_90a").spec is not None


def test_a_mailbox_that_does_not_fit_is_refused() -> None:
    plan = op.plan(op.Config(1, 64, 128, world=2), "sm_90a")
    small = Box(0, Layout(2, plan.words - 1), torch.zeros(1), torch.zeros(2), torch.zeros(2))
    for box in (None, small):
        with pytest.raises(ValueError, match=f"2 ranks and {plan.words} words"):
            op.run(plan, torch.zeros(1), torch.zeros(1), torch.zeros(1), box)


@pytest.mark.parametrize("config", ON_MACHINE, ids=str)
def test_ranks_sum_in_any_order_of_warps(config: op.Config, shared_store: build.Store) -> None:
    """Two calls over the same mailboxes: each must see its own epoch's words."""
    held = boxes(Layout(config.world, config.words), "cpu")
    for call in range(2):
        ys = [torch.randn(config.tokens, config.columns).bfloat16() for _ in held]
        weights = [(torch.randn(config.rows, config.columns) / config.columns**0.5).bfloat16() for _ in held]
        before = torch.randn(config.tokens, config.rows).bfloat16()
        prefixes = [before.clone() if config.update == "add" else torch.full_like(before, float("nan")) for _ in held]
        ranks = [
            {"w": weights[box.rank], "x": ys[box.rank], "prefix": prefixes[box.rank]} | mailbox_parameters(box) for box in held
        ]
        run_ranks(op.spec(config), ranks, (config.shape.tactic.groups,), seed=call)
        case = (ys, weights, before, config.update)
        check_error(prefixes[0], oproj(*case), torch_form(*case))
        for prefix in prefixes:
            assert torch.equal(prefix, prefixes[0]), "ranks hold different bits"


# -- one GPU, ranks as streams ---------------------------------------------------------------------------------------------------


class Ranks:
    """All ranks of one problem on one device."""

    def __init__(self, config: op.Config) -> None:
        self.config = config
        self.plan = op.plan(config, build.device_arch())
        self.boxes = boxes(Layout(config.world, config.words)) if config.world > 1 else [None]
        self.streams = [torch.cuda.Stream() for _ in self.boxes]
        self.renew(0)

    def renew(self, seed: int) -> None:
        """New inputs, the same on every call with this seed; prefixes are equal on all ranks, as in the model."""
        c, generator = self.config, torch.Generator("cuda").manual_seed(seed)
        shapes = ((c.tokens, c.columns), (c.rows, c.columns))
        draw = [[torch.randn(s, device="cuda", generator=generator) for s in shapes] for _ in self.boxes]
        prefix = torch.randn(c.tokens, c.rows, device="cuda", generator=generator).bfloat16()
        if not hasattr(self, "ys"):
            self.ys = [y.bfloat16() for y, _ in draw]
            self.weights = [(w / c.columns**0.5).bfloat16() for _, w in draw]
            self.prefixes = [prefix.clone() for _ in self.boxes]
        for rank, (y, _) in enumerate(draw):
            self.ys[rank].copy_(y)
            self.prefixes[rank].copy_(prefix)
        self.before = prefix
        torch.cuda.synchronize()

    def launch(self, ranks: list[int] | None = None, late: int | None = None) -> None:
        for rank in range(len(self.boxes)) if ranks is None else ranks:
            with torch.cuda.stream(self.streams[rank]):
                if rank == late:
                    torch.cuda._sleep(200_000)  # cycles: about 100 us
                op.run(self.plan, self.ys[rank], self.weights[rank], self.prefixes[rank], self.boxes[rank])

    def check(self) -> None:
        torch.cuda.synchronize()
        case = (self.ys, self.weights, self.before, self.config.update)
        check_error(self.prefixes[0], oproj(*case), torch_form(*case))
        for other in self.prefixes[1:]:
            assert torch.equal(other, self.prefixes[0]), "ranks hold different bits"
        assert all(box is None or box.health().well for box in self.boxes)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*SMALL, ODD, SPLIT, RING, replace(RING, shots=1), *LIBRARYS], ids=str)
def test_numbers_over_many_epochs(config: op.Config) -> None:
    ranks = Ranks(config)
    for seed in range(5):
        ranks.renew(seed)
        if config.update == "write":
            for prefix in ranks.prefixes:
                prefix.fill_(float("nan"))
        ranks.launch(late=seed % config.world)
        ranks.check()
    assert all(box is None or box.epoch.tolist() == [5, 0] for box in ranks.boxes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [SMALL[0], ODD, RING, LIBRARYS[1], op.Config(2, 160, 256, world=4, shots=1, bound_ns=BOUND_NS)], ids=str
)
def test_replays_in_a_graph_with_other_inputs(config: op.Config) -> None:
    ranks = Ranks(config)
    ranks.launch()
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in ranks.boxes]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            op.run(ranks.plan, ranks.ys[rank], ranks.weights[rank], ranks.prefixes[rank], ranks.boxes[rank])
    for seed in (7, 8, 9):
        ranks.renew(seed)
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(ranks.streams[rank]):
                graph.replay()
        ranks.check()


@pytest.mark.gpu
@pytest.mark.parametrize("shots", [1, 2])
def test_a_missing_rank_is_named_to_everybody(shots: int) -> None:
    ranks = Ranks(op.Config(3, 160, 256, world=4, shots=shots, bound_ns=50_000_000))
    start = time.monotonic()
    ranks.launch(ranks=[0, 1, 3])  # rank 2 never comes
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5
    assert [box.health().lost for box in ranks.boxes] == [2, 2, 2, 2], "the lost rank itself is told, too"
    assert ranks.prefixes[0].isnan().any()

    start = time.monotonic()
    ranks.launch()  # from now on nobody waits, and nobody delivers
    torch.cuda.synchronize()
    assert time.monotonic() - start < 0.04
    assert all(prefix.isnan().all() for prefix in ranks.prefixes)
    with pytest.raises(PeerLost, match="Rank 2"):
        ranks.boxes[0].health().check()


# -- two GPUs, ranks as processes ------------------------------------------------------------------------------------------------


def _serve(rank: int, world: int, folder: str, body: Callable[[int, torch.device], None]) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    body(rank, torch.device("cuda", rank))


def _spawn(body: Callable[[int, torch.device], None], folder: Path, world: int = 2) -> list[int | None]:
    """Run `body` in one process for each GPU; their exit codes."""
    context = torch.multiprocessing.get_context("spawn")
    workers = [context.Process(target=_serve, args=(rank, world, str(folder), body)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        if worker.is_alive():
            worker.kill()
    return [worker.exitcode for worker in workers]


def _problem(config: op.Config, device: torch.device, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Inputs of all ranks, equal in every process."""
    generator = torch.Generator().manual_seed(seed)
    ys = [torch.randn(config.tokens, config.columns, generator=generator).bfloat16().to(device) for _ in range(config.world)]
    weights = [
        (torch.randn(config.rows, config.columns, generator=generator) / config.columns**0.5).bfloat16().to(device) for _ in ys
    ]
    return ys, weights, torch.randn(config.tokens, config.rows, generator=generator).bfloat16().to(device)


def _agree(rank: int, device: torch.device) -> None:
    """Both ranks get the right numbers and the same bits, in one shot and in two, eagerly and from a graph."""
    import torch.distributed as dist

    configs = [op.Config(tokens, 1024, 1536, world=2, update=update) for tokens in (1, 4, 8, 33) for update in ("write", "add")]
    box = Mailbox(dist.group.WORLD, max(c.words for c in configs), device)
    for config in configs:
        ys, weights, prefix = _problem(config, device, seed=config.tokens)
        plan, before, input_ = op.plan(config, build.device_arch()), prefix.clone(), ys[rank].clone()
        op.run(plan, input_, weights[rank], prefix, box)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.run(plan, input_, weights[rank], prefix, box)
        for turn in range(4):
            ys, _, _ = _problem(config, device, seed=100 + turn)
            input_.copy_(ys[rank])
            prefix.copy_(before)
            graph.replay()
            torch.cuda.synchronize()
            case = (ys, weights, before, config.update)
            check_error(prefix, oproj(*case), torch_form(*case))
            both = [torch.empty_like(prefix, device="cpu") for _ in range(2)]
            dist.all_gather(both, prefix.cpu())
            assert torch.equal(*both)
    box.health().check()
    dist.barrier()
    box.recycle()
    assert box.epoch.tolist() == [0, 0]


def _lose(how: str, rank: int, device: torch.device) -> None:
    """Rank 1 dies or stalls between two steps; whoever is left names rank 1, within the bound."""
    import torch.distributed as dist

    config = op.Config(2, 1024, 1536, world=2, bound_ns=500_000_000)
    box = Mailbox(dist.group.WORLD, config.words, device)
    ys, weights, prefix = _problem(config, device, seed=1)
    plan = op.plan(config, build.device_arch())
    op.run(plan, ys[rank], weights[rank], prefix, box)
    torch.cuda.synchronize()
    box.health().check()
    dist.barrier()
    if rank == 1 and how == "killed":
        os._exit(17)
    if rank == 1:
        time.sleep(3)
    start = time.monotonic()
    op.run(plan, ys[rank], weights[rank], prefix, box)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 2
    with pytest.raises(PeerLost, match="Rank 1"):
        box.health().check()
    assert prefix.isnan().any()
    if how == "stalled":
        dist.barrier()  # the boxes live until both have looked


def _killed(rank: int, device: torch.device) -> None:
    _lose("killed", rank, device)


def _stalled(rank: int, device: torch.device) -> None:
    _lose("stalled", rank, device)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@needs_two
def test_two_ranks_agree(tmp_path: Path) -> None:
    assert _spawn(_agree, tmp_path) == [0, 0]


@pytest.mark.gpu
@needs_two
def test_a_stalled_rank_is_named_on_both(tmp_path: Path) -> None:
    assert _spawn(_stalled, tmp_path) == [0, 0]


@pytest.mark.gpu
@needs_two
def test_a_killed_rank_is_named_by_the_other(tmp_path: Path) -> None:
    assert _spawn(_killed, tmp_path) == [0, 17]
