"""Checked graphs on the CPU: the caches of two kinds of layers in one pool, and functions in the place of graphs; and the small
K3 of `cuda_fakes`, whose standard side is the same chain with the experts that stock's routers say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import cuda_fakes
import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.fast import cuda_shadow
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_choices import Choices
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_executor import Caches, Executor
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_views import Moe, view_model
from vllm.model_executor.models.kimi_k3_fast.guard import GraphKey, Guard, Policy
from vllm.model_executor.models.kimi_k3_fast.ops import moe_front
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

SLOTS, BLOCK, PAGE = 6, 16, 8192  # bytes of a page: a state [2, 16, 16] fp32 and a conv state [3, 64] bf16, or 16 latent rows
STATE_SLOTS, LATENT_PAGES = (1, 2), (3, 4)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong here is so with any number of them, and each takes its time."""
    monkeypatch.setattr(cuda_shadow, "DRAWS", 16)


class Pool:
    """Four real rows of a graph for six: two requests, each with a state slot and a latent page, run twice side by side."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        raw = torch.zeros(SLOTS * PAGE, dtype=torch.uint8)
        floats, halves = raw.view(torch.float32), raw.view(torch.bfloat16)
        self.state = floats.as_strided((SLOTS, 2, 16, 16), (PAGE // 4, 256, 16, 1))
        self.conv = halves.as_strided((SLOTS, 3, 64), (PAGE // 2, 64, 1), 2048 // 2)
        self.latent = halves.as_strided((SLOTS, BLOCK, 128), (PAGE // 2, 128, 1))
        for slot in STATE_SLOTS:
            self.state[slot].normal_()
            self.conv[slot].normal_()
        for page in LATENT_PAGES:
            self.latent[page].normal_()
        self.hidden = torch.zeros(8, 32, dtype=torch.bfloat16)
        self.row = torch.randn(2, 128).bfloat16()

    def step(self, factor: float = 1.0) -> None:
        """What a decode step does: new states, one row of each page, hidden states of all rows; reads what it writes."""
        for slot in STATE_SLOTS:
            self.state[slot] = self.state[slot] * 0.9 * factor
            self.conv[slot] = self.conv[slot].roll(-1, 0) * factor
        for i, page in enumerate(LATENT_PAGES):
            self.latent[page, 5] = self.row[i] * factor
        self.hidden[:6] = (self.state[1].flatten()[:32] * factor).bfloat16()

    def padded_step(self) -> None:
        """As stock's, whose padded rows leave a convolution state of anything in the null block."""
        self.step()
        self.conv[0] = float("nan")

    def watch(
        self, fast: Callable[[], None], stock: Callable[[], None] | None = None, **every: int
    ) -> tuple[cuda_shadow.Checked, Guard]:
        guard = Guard(Policy(policy="report", **every))
        caches = Caches({"k": self.conv}, {"k": self.state}, {"m": self.latent})
        padding = torch.tensor([False] * 4 + [True] * 2)
        watch = cuda_shadow.Watch(guard, caches, lambda: self.hidden, padding)
        graphs = (SimpleNamespace(replay=fast), SimpleNamespace(replay=stock or self.step))
        return cuda_shadow.Checked(watch, 6, "decode/6/cute", *graphs), guard


def found(guard: Guard) -> dict[str, int]:
    return guard.report()["violations"]["by_reason"]


def test_a_sound_step_passes_and_leaves_the_caches_of_one_step() -> None:
    pool, once = Pool(), Pool()
    graph, guard = pool.watch(pool.step, audit_every=1, shadow_every=1)
    graph.replay()
    once.step()
    assert found(guard) == {}
    assert torch.equal(pool.state, once.state) and torch.equal(pool.latent[3], once.latent[3])
    counters = guard.report()["counters"]
    assert (counters["audited_steps"], counters["shadow_steps"]) == (1, 1)
    assert 0 <= guard.report()["gauges"]["shadow_worst_ratio"] < 1


def test_only_every_nth_replay_is_checked() -> None:
    pool, calls = Pool(), []
    graph, guard = pool.watch(lambda: calls.append(pool.step()), audit_every=3)
    for _ in range(7):
        graph.replay()
    assert len(calls) == 7 and guard.report()["counters"]["audited_steps"] == 2


def test_an_audited_step_is_the_fast_one_and_a_shadowed_one_is_stock() -> None:
    for every, factor in ({"audit_every": 1}, 1.01), ({"shadow_every": 1}, 1.0):
        pool, wanted = Pool(), Pool()
        graph, _ = pool.watch(lambda pool=pool: pool.step(1.01), **every)
        graph.replay()
        wanted.step(factor)
        assert torch.equal(pool.state, wanted.state) and torch.equal(pool.hidden, wanted.hidden)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: p.state[5].fill_(1.0), "write_outside"),
        (lambda p: p.state[0].fill_(1.0), "null_block_written"),
        (lambda p: p.latent[3, 6].fill_(1.0), "write_outside"),
        (lambda p: p.conv[4, 0, 0].fill_(1.0), "write_outside"),
    ],
    ids=["a free slot", "the null block", "the next row", "another page"],
)
def test_a_write_that_stock_does_not_do_is_found(spoil: Callable, reason: str) -> None:
    pool = Pool()
    graph, guard = pool.watch(lambda: (pool.step(), spoil(pool)), audit_every=1)
    graph.replay()
    assert set(found(guard)) == {reason}
    assert guard.report()["violations"]["last"][-1]["where"]["plan_key"] == "decode/6/cute"


def test_a_convolution_state_that_stock_leaves_as_it_was_is_still_the_steps() -> None:
    """A token repeats itself: stock writes the very bits that lay there, the fast side rounds one of them another way. To the
    latent cache of the pool these are rows of a page. The same write is none of the step's in a slot that has no request."""
    pool = Pool()
    pool.conv[1] = pool.conv[1, 2]  # three times the same token
    graph, guard = pool.watch(lambda: (pool.step(), pool.conv[1, 2, 0].add_(0.5)), audit_every=1)
    graph.replay()
    assert found(guard) == {}
    pool = Pool()
    graph, guard = pool.watch(lambda: (pool.step(), pool.conv[5, 2, 0].add_(0.5)), audit_every=1)
    graph.replay()
    assert set(found(guard)) == {"write_outside"}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: p.hidden[:4].mul_(1.5), "shadow_logits"),
        (lambda p: p.hidden[2].fill_(float("nan")), "shadow_logits"),
        (lambda p: p.state[2].mul_(1.5), "shadow_state"),
        (lambda p: p.latent[4, 5].neg_(), "shadow_state"),
        (lambda p: p.conv[1].copy_(p.conv[1].roll(1, 0)), "shadow_state"),
    ],
    ids=["all rows", "one row NaN", "a state", "a latent row", "a convolution state"],
)
def test_another_result_than_stocks_is_found(spoil: Callable, reason: str) -> None:
    pool = Pool()
    graph, guard = pool.watch(lambda: (pool.step(), spoil(pool)), shadow_every=1)
    graph.replay()
    assert set(found(guard)) == {reason}


@pytest.mark.parametrize("draws", [1, 3])
def test_what_one_draw_of_noise_misses_another_may_show(draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state hangs on which side of a threshold a number falls: stock's third draw falls on the fast side's. The step stays
    stock's, and a draw more is no leave for other rows."""
    monkeypatch.setattr(cuda_shadow, "DRAWS", draws)
    for factor, wanted in ((1.5, {} if draws == 3 else {"shadow_state": 1}), (2.5, {"shadow_state": 1})):
        pool, once, runs = Pool(), Pool(), []

        def stock(pool: Pool = pool, runs: list[int] = runs) -> None:
            runs.append(len(runs))
            pool.step()
            if len(runs) == 1 + 3:
                pool.state[2] *= 1.5

        graph, guard = pool.watch(
            lambda pool=pool, factor=factor: (pool.step(), pool.state[2].mul_(factor)), stock, shadow_every=1
        )
        graph.replay()
        once.step()
        assert found(guard) == wanted and len(runs) == 1 + draws
        assert guard.report()["counters"]["shadow_drawn_steps"] == 1
        assert torch.equal(pool.state, once.state) and torch.equal(pool.hidden, once.hidden)


def test_ranks_draw_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's graphs hold collectives: what one rank finds, all replay as often for. The fault is that rank's alone."""
    monkeypatch.setattr(cuda_shadow, "DRAWS", 3)
    meeting, runs, guards = cuda_fakes.Meeting(2), [0, 0], []

    def rank(r: int) -> None:
        pool = Pool()

        def stock() -> None:
            runs[r] += 1
            pool.step()

        graph, guard = pool.watch(lambda: (pool.step(), pool.state[2].mul_(1.5 if r else 1.0)), stock, shadow_every=1)
        together = meeting.reduce(r)  # how many found something
        guard.bind_ranks(r, 2, lambda mine: [[int(together(torch.tensor(float(mine[0]))))]])
        graph.replay()
        guards.append(guard)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == [1 + 3, 1 + 3] and sorted(map(len, map(found, guards))) == [0, 1]


def test_what_stocks_padded_rows_write_is_not_compared_and_no_leave_to_write() -> None:
    pool = Pool()
    graph, guard = pool.watch(pool.step, pool.padded_step, audit_every=1, shadow_every=1)
    graph.replay()
    assert found(guard) == {}
    pool = Pool()
    graph, guard = pool.watch(lambda: (pool.step(), pool.conv[0].fill_(1.0)), pool.padded_step, audit_every=1)
    graph.replay()
    assert set(found(guard)) == {"null_block_written"}


def test_padded_rows_are_not_compared() -> None:
    pool = Pool()
    graph, guard = pool.watch(lambda: (pool.step(), pool.hidden[4:].fill_(9.0)), shadow_every=1)
    graph.replay()
    assert found(guard) == {}


def test_a_graph_of_another_width_is_found() -> None:
    """It leaves the last rows and their states as they were."""
    pool = Pool()

    def narrow() -> None:
        pool.state[1] = pool.state[1] * 0.9
        pool.hidden[:2] = pool.state[1].flatten()[:32].bfloat16()

    graph, guard = pool.watch(narrow, shadow_every=1)
    graph.replay()
    assert {"shadow_logits", "shadow_state"} <= set(found(guard))


class Mode(Enum):
    FULL = 1
    PIECEWISE = 2


def test_stock_graphs_are_captured_with_the_fast_path_looking_away() -> None:
    fast = SimpleNamespace(stage=lambda *batch: pytest.fail("the fast path staged stock's capture"), staged="something")
    manager = SimpleNamespace(graphs={"4": "fast"}, _capture_descs={Mode.FULL: ["4"], Mode.PIECEWISE: ["8"]})
    stage, seen = fast.stage, []

    def capture() -> None:
        fast.stage(1, 2, True)
        seen.extend(manager._capture_descs)
        manager.graphs["4"] = "stock"

    assert cuda_shadow.stock_graphs(manager, fast, capture) == {"4": "stock"}
    assert seen == [Mode.FULL] and set(manager._capture_descs) == set(Mode)
    assert manager.graphs == {"4": "fast"} and fast.stage is stage and fast.staged is None


class Descriptor(NamedTuple):
    num_tokens: int


def test_only_graphs_with_a_plan_are_put_under_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shadow, "_check_room", lambda *memory, **copies: None)
    pool, guard = Pool(), Guard(Policy(policy="report", audit_every=1))
    guard.planned(GraphKey("full", 6, 6, True), "decode/6/cute")
    guard.planned(GraphKey("full", 8, 8, True), (Refusal(Reason.STEP_TOO_MANY_TOKENS, "8 rows"),))
    fast, stock = SimpleNamespace(replay=pool.step), SimpleNamespace(replay=pool.step)
    six, eight = Descriptor(6), Descriptor(8)
    manager = SimpleNamespace(graphs={six: fast, eight: fast}, _capture_descs={}, hidden_states=pool.hidden)
    caches = Caches({"k": pool.conv}, {"k": pool.state}, {"m": pool.latent})
    path = SimpleNamespace(guard=guard, executor=SimpleNamespace(caches=caches), stage=None, staged=None)
    capture = lambda: manager.graphs.update({six: stock, eight: stock})  # noqa: E731
    cuda_shadow.watch(manager, path, capture, torch.zeros(8, dtype=torch.bool))
    assert isinstance(manager.graphs[six], cuda_shadow.Checked) and manager.graphs[eight] is fast


# -- behind one choice of experts ----------------------------------------

SLOTS_OF_ROWS, TIED = [3, 1, 0, -1], 1  # two real rows; the layer in which two experts tie
Disturb = Callable[[torch.Tensor, torch.Tensor], None]


class Sides:
    """One rank's fast and stock graph of four rows over the same caches, and what a test does to the fast side's ids.

    `reduced`: the shapes that this rank summed with the others, in order. As in a captured graph, stock's chain calls what its
    routers held when it was captured.
    """

    def __init__(self, rank: int = 0, reduce: Callable | None = None, **every: int) -> None:
        self.reduced: list[tuple[int, ...]] = []
        world = 1 if reduce is None else 2

        def summed(x: torch.Tensor) -> torch.Tensor:
            assert reduce is not None
            self.reduced.append(tuple(x.shape))
            return reduce(x)

        model, kept = cuda_fakes.stock(cuda_fakes.weights(), rank, world, summed if reduce else lambda x: x)
        bound, view = cuda_fakes.caches(cuda_fakes.BF16, rank, world), view_model(model, kept)
        made = (Executor(view, lambda: bound, {"layers.2": 2}, "sm_90a", world, summed, None, "cpu") for _ in "12")
        self.fast, self.stock = made
        for executor in (self.fast, self.stock):
            executor.prepare([4])
        self.moe = {layer.index: layer.mlp for layer in view.layers if isinstance(layer.mlp, Moe)}
        self.step, self.embedded = cuda_fakes.step_tensors(SLOTS_OF_ROWS, 63), model.embed_input_ids(torch.arange(4))
        self.hidden = torch.zeros(8, cuda_fakes.D, dtype=cuda_fakes.BF16)
        self.guard = Guard(Policy(policy="report", **every))
        self.guard.planned(GraphKey("full", 4, 4, True), "decode/4/cute")
        self.disturb: dict[int, Disturb] = {}
        self.captured: dict[int, Callable] = {}
        self.manager = SimpleNamespace(
            graphs={Descriptor(4): self._graph(self.fast)}, _capture_descs={}, hidden_states=self.hidden
        )

    def _graph(self, executor: Executor) -> Any:
        return SimpleNamespace(replay=lambda: self.hidden[:4].copy_(executor.run(4, self.embedded, self.step)))

    def capture(self) -> None:
        self.captured = {w.bias.data_ptr(): w.stock_router._compute_routing for w in self.moe.values()}
        self.manager.graphs[Descriptor(4)] = self._graph(self.stock)
        self.manager.graphs[Descriptor(4)].replay()  # the warm-up

    def watch(self) -> None:
        path: Any = SimpleNamespace(guard=self.guard, executor=self.fast, stage=None, staged=None)
        before = {name: [t.clone() for t in kept.values()] for name, kept in vars(self.fast.caches).items()}
        cuda_shadow.watch(self.manager, path, self.capture, torch.tensor([False] * 2 + [True] * 6))
        for name, kept in vars(self.fast.caches).items():
            for tensor, old in zip(kept.values(), before[name], strict=True):
                tensor.copy_(old)

    def choose(self, launch: Callable, plan: Any, logits: torch.Tensor, bias: torch.Tensor, *rest: torch.Tensor) -> None:
        """In the place of the top-k kernel, on both sides."""
        ids, weights = rest[1:3]
        if any(ids.data_ptr() == held.data_ptr() for held in self.stock.ids.values()):
            router = next(w.stock_router for w in self.moe.values() if w.bias.data_ptr() == bias.data_ptr())
            with mock.patch.object(router, "_compute_routing", self.captured[bias.data_ptr()]):
                shares, chosen = router.select_experts(logits, logits)
            ids.copy_(chosen), weights.copy_(shares)
            return
        layer = next(i for i, w in self.moe.items() if w.bias.data_ptr() == bias.data_ptr())
        shift = torch.zeros_like(bias)
        if layer in self.disturb:
            self.disturb[layer](logits, shift)
        launch(plan, logits, bias + shift, *rest)

    def tie(self) -> None:
        """Let the second and third expert of row 0 be 1e-4 apart in layer TIED, on both sides."""
        w, seen = self.moe[TIED], []
        self.disturb[TIED] = lambda logits, shift: seen.append(logits.clone())
        kept = [t.clone() for held in vars(self.fast.caches).values() for t in held.values()]
        self._graph(self.fast).replay()
        for tensor, old in zip((t for held in vars(self.fast.caches).values() for t in held.values()), kept, strict=True):
            tensor.copy_(old)
        best = (torch.sigmoid(seen[0][0]) + w.bias).sort(descending=True)
        self.third = int(best.indices[2])
        w.bias[self.third] += best.values[1] - best.values[2] - 1e-4
        self.disturb = {TIED: self.lift(2e-4)}

    def lift(self, by: float) -> Disturb:
        """The fast side sees that expert's score higher: by a rounding, or by a fault."""
        return lambda logits, shift: shift.index_fill_(0, torch.tensor(self.third), by)

    def chosen(self, executor: Executor) -> set[int]:
        """By row 0 in layer TIED."""
        return set(executor.ids[id(self.moe[TIED])][0].tolist())

    def replay(self) -> dict[str, int]:
        self.manager.graphs[Descriptor(4)].replay()
        return found(self.guard)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sides]:
    """Makes the two sides of a rank, with a tie; any number of ranks."""
    cuda_fakes.replace_kernels(monkeypatch)
    launch, made = moe_front.run_topk, []

    def topk(plan: Any, logits: torch.Tensor, bias: torch.Tensor, *rest: Any, **more: Any) -> None:
        owner = next(s for s in made if any(w.bias.data_ptr() == bias.data_ptr() for w in s.moe.values()))
        owner.choose(launch, plan, logits, bias, *rest)

    def make(*args: Any, **every: int) -> Sides:
        both = Sides(*args, **(every or {"shadow_every": 1}))
        made.append(both)
        both.tie()
        return both

    monkeypatch.setattr(moe_front, "run_topk", topk)
    return make


def test_a_near_tie_that_falls_either_way_is_no_deviation(sides: Callable[..., Sides]) -> None:
    both = sides()
    both.watch()
    choices = both.manager.graphs[Descriptor(4)].watch.choices
    scores: list[Any] = []
    with mock.patch.object(choices, "judged", lambda rows: scores.append(Choices.judged(choices, rows)) or scores[-1]):
        assert both.replay() == {}
    assert both.third in both.chosen(both.fast) and both.chosen(both.fast) == both.chosen(both.stock)
    assert 0 < both.guard.report()["gauges"]["shadow_worst_ratio"] < 1
    of_step = scores[0][f"layers.{TIED}.choice"]  # the others are of draws
    lower, own = of_step.taken[0, 1], of_step.best[0, 1]
    assert own - lower == pytest.approx(1e-4, rel=0.2), "what stock would have taken itself is still known"


def test_that_tie_is_a_deviation_where_each_side_takes_its_own(sides: Callable[..., Sides], monkeypatch: Any) -> None:
    """Or the test above would show nothing. Nothing is nudged, so that no bar is raised by ties that the nudge decides."""
    monkeypatch.setattr(cuda_shadow, "_nudge", lambda raw: None)
    for impose in (True, False):
        both = sides()
        if not impose:
            monkeypatch.setattr(cuda_shadow, "Choices", lambda *model: None)
        both.watch()
        assert set(both.replay()) == (set() if impose else {"shadow_logits", "shadow_state"})
        assert (both.chosen(both.fast) == both.chosen(both.stock)) is impose


@pytest.mark.parametrize(
    "wrong",
    [
        lambda both: both.disturb.update({2: both.lift(20.0)}),
        lambda both: both.disturb.update({2: lambda logits, shift: shift.sub_(2 * both.moe[2].bias)}),
    ],
    ids=["one expert always", "the bias subtracted"],
)
def test_a_wrong_choice_is_found_behind_the_imposition(sides: Callable[..., Sides], wrong: Callable[[Sides], None]) -> None:
    both = sides()
    both.watch()
    wrong(both)
    assert both.replay() == {"shadow_choice": 1}, "stock takes the same experts: nothing else deviates"
    last = both.guard.report()["violations"]["last"][-1]["where"]
    assert last["tensor"] == "layers.2.choice" and last["plan_key"] == "decode/4/cute"


@pytest.mark.parametrize("ids", [[3, 3], [3, 8], [-1, 3], [2**30, 2**30 + 1]], ids=str)
def test_what_is_no_set_of_experts_is_not_imposed_and_is_found(sides: Callable[..., Sides], ids: list[int]) -> None:
    """Stock would read beyond its weights; twice the same expert could tie with itself."""
    both = sides()
    both.watch()
    fast = both.manager.graphs[Descriptor(4)].fast
    both.manager.graphs[Descriptor(4)].fast = SimpleNamespace(
        replay=lambda: (fast.replay(), both.fast.ids[id(both.moe[3])][1].copy_(torch.tensor(ids)))
    )
    assert both.replay() == {"shadow_choice": 1}
    where = both.guard.report()["violations"]["last"][-1]["where"]
    assert (where["tensor"], where["row"]) == ("layers.3.choice", 1)
    theirs = both.stock.ids[id(both.moe[3])][1]
    assert theirs.min() >= 0 and theirs.max() < cuda_fakes.EXPERTS and len(set(theirs.tolist())) == 2


def test_stocks_routers_are_as_before(sides: Callable[..., Sides]) -> None:
    both = sides()
    routers = [w.stock_router for w in both.moe.values()]
    before = [dict(vars(router)) for router in routers]
    both.watch()
    assert [vars(router) for router in routers] == before
    both.manager.graphs = {}

    def fails() -> None:
        assert all("_compute_routing" in vars(router) for router in routers)
        raise RuntimeError("out of memory")

    path: Any = SimpleNamespace(guard=both.guard, executor=both.fast, stage=None, staged=None)
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda_shadow.watch(both.manager, path, fails, torch.zeros(8, dtype=torch.bool))
    assert [vars(router) for router in routers] == before


def test_audit_alone_leaves_stock_its_own_choice(sides: Callable[..., Sides]) -> None:
    both = sides(audit_every=1)
    both.watch()
    assert both.replay() == {}
    assert both.third in both.chosen(both.fast) - both.chosen(both.stock)


def test_experts_chosen_without_a_router_are_named(sides: Callable[..., Sides]) -> None:
    both = sides()
    both.capture = lambda: both.manager.graphs.update({Descriptor(4): "stock's"})  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"found 3 that did not \(layers.1.choice\)"):
        both.watch()


def test_ranks_meet_in_the_same_order_with_and_without_an_imposed_choice(sides: Callable[..., Sides]) -> None:
    runs = []
    for every in ({"audit_every": 1}, {"shadow_every": 1}):
        meeting = cuda_fakes.Meeting(2)
        ranks: list[Any] = [None, None]

        def rank(r: int, meeting: Any = meeting, every: Any = every, ranks: Any = ranks) -> None:
            both = ranks[r] = sides(r, meeting.reduce(r), **every)
            both.watch()
            both.reduced.clear()
            both.replay()

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found(both.guard) for both in ranks] == [{}, {}]
        runs.append([both.reduced for both in ranks])
    audit, shadow = runs
    once = len(audit[0]) // 2  # the fast chain's sums, then as many of the standard side's
    assert audit[0] == audit[1] and shadow[0] == shadow[1]
    assert audit[0][:once] == audit[0][once:] and shadow[0] == 3 * audit[0][:once]


@pytest.mark.gpu
def test_a_captured_router_of_stocks_follows_the_ids_in_the_buffer() -> None:
    """Stock's own router and kernel in a CUDA graph: its own choice imposed gives its own weights, another gives another's."""
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

    torch.manual_seed(0)
    rows, experts, k = 4, 896, 16
    bias, logits = torch.randn(experts, device="cuda") * 0.01, torch.randn(rows, experts, device="cuda")
    grouping = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "scoring_func": "sigmoid"}
    router = create_fused_moe_router(
        k, experts, routed_scaling_factor=2.5, e_score_correction_bias=torch.nn.Parameter(bias), **grouping
    )
    ids = torch.zeros(64, k, dtype=torch.int32, device="cuda")
    mlp = Moe(logits.T, bias, *[logits] * 6, k, True, 2.5, router)  # type: ignore[arg-type]
    choices = Choices(SimpleNamespace(layers=[SimpleNamespace(index=7, mlp=mlp)]), {id(mlp): ids})  # type: ignore[arg-type]
    with torch.inference_mode():
        weights, own = router.select_experts(logits, logits)
        graph = torch.cuda.CUDAGraph()
        with choices.imposed():
            router.select_experts(logits, logits)
            with torch.cuda.graph(graph):
                found = router.select_experts(logits, logits)
        choices.check_reached()
        best = own.sort(dim=-1)
        ids[:rows] = best.values
        ids[1] = 0  # as a padded row
        graph.replay()
        assert torch.equal(found[1].sort(dim=-1).values, best.values)
        torch.testing.assert_close(found[0][0], weights[0].gather(-1, best.indices[0]), rtol=1e-4, atol=0)
        torch.testing.assert_close(found[0][1], weights[1])
        others = torch.arange(k, device="cuda", dtype=torch.int32) * 7
        ids[:rows] = others
        graph.replay()
        assert (found[1] == others).all()
        score = torch.sigmoid(logits)[:, others.long()]
        torch.testing.assert_close(found[0], 2.5 * score / score.sum(-1, keepdim=True), rtol=1e-4, atol=0)
        scores = choices.judged(torch.tensor([True, True, False, True], device="cuda"))["layers.7.choice"]
    assert scores.imposed.shape == (3, k)
    assert (scores.imposed.sum(-1) < scores.best.sum(-1)).all()
    assert "_compute_routing" not in vars(router)
