"""`projection`: geometry, refusals and compilation anywhere; numbers, poisoned outputs and graph replay on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import asked
import pytest
import torch
from bulk_machine import run as run_ptx
from yardstick import check_error, replay_with

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import projection as op
from vllm.model_executor.models.kimi_k3_fast.ops.ahead import Ahead
from vllm.model_executor.models.kimi_k3_fast.ops.library import LIBRARY
from vllm.model_executor.models.kimi_k3_fast.ops.projection.reference import projection
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic, default_tactic, ring_tactic
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

SMALL = [
    op.Config(1, 64, 128),
    op.Config(3, 80, 256),
    op.Config(9, 100, 1408, tactic=Tactic(groups=3, splits=2, row_warps=1, k_warps=4, tiles=3, depth=3)),
    op.Config(2, 72, 2048, tactic=Tactic(groups=5, k_warps=4, tiles=1, depth=2, resident=2)),
    op.Config(20, 96, 448, out="f32", tactic=Tactic(groups=2, splits=4, row_warps=3, k_warps=1, tiles=1, depth=2)),
]
NARROW = op.Config(36, 190, 320, tactic=Tactic(groups=2, splits=2, row_warps=6, k_warps=2, tiles=1, stages=3))
RINGS = [  # stages used again and again; a last chunk in part; splits of unlike length; more fetching warps than rows to fetch
    op.Config(1, 80, 512, tactic=Tactic(groups=5, k_warps=2, tiles=1, stages=2, chunk=64, fetchers=1)),
    op.Config(3, 100, 1408, tactic=Tactic(groups=3, splits=2, k_warps=4, tiles=3, stages=3, chunk=256, fetchers=2, height=34)),
    op.Config(
        9,
        90,
        1344,
        tactic=Tactic(groups=2, splits=2, row_warps=2, k_warps=2, tiles=2, stages=2, chunk=128, fetchers=1, height=45),
    ),
    op.Config(20, 96, 448, out="f32", tactic=Tactic(groups=2, splits=4, k_warps=1, tiles=3, stages=3, chunk=64, fetchers=4)),
]
RINGS += [replace(RINGS[1], tactic=replace(RINGS[1].tactic, k_warps=1, passing=True, rehearse=True))]
AHEAD = Ahead(rows=(400, 24, 9), pitch=256, first=64, columns=136)  # more rows than lanes that ask
ASKING = [replace(config, ahead=AHEAD) for config in RINGS[1:3]]


STREAMED = default_tactic(6288, (7168,), 64)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("rows", [6288, 3216, 12544, 1536, 64])
def test_default_tactic_covers_the_served_shapes(rows: int, tokens: int) -> None:
    config = op.Config(tokens, rows, 7168)
    assert op.unavailable_reason(config, "sm_90a") is None
    tactic = default_tactic(rows, (7168,), tokens)
    assert tactic.groups * tactic.rows >= rows and tactic.threads <= 1024


def test_refuses_what_it_cannot_compute() -> None:
    assert op.unavailable_reason(op.Config(1, 64, 128), "sm_80").reason is Reason.OP_ARCH
    for config in (op.Config(65, 64, 128), op.Config(1, 64, 100), op.Config(1, 640, 128, tactic=Tactic(groups=1, tiles=3))):
        assert op.unavailable_reason(config, "sm_90a").reason is Reason.OP_SHAPE
        with pytest.raises(ValueError, match="expected"):
            op.plan(config, "sm_90a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": ()}, "1 to 3 following matrices"),
        ({"rows": (1, 1, 1, 1)}, "1 to 3 following matrices"),
        ({"rows": (8, 0)}, "with rows"),
        ({"columns": 132}, "whole 16 bytes"),
        ({"columns": 0}, "within the pitch"),
        ({"first": 128}, "within the pitch"),
        ({"rows": (1 << 20,)}, "which L2 can keep"),
    ],
)
def test_refuses_to_ask_for_what_it_cannot(change: dict[str, int], words: str) -> None:
    config = replace(RINGS[0], ahead=replace(AHEAD, **change))
    refusal = op.unavailable_reason(config, "sm_90a")
    assert refusal is not None and refusal.reason is Reason.OP_SHAPE and words in refusal.detail


def test_only_a_ring_asks_and_wants_as_many_matrices() -> None:
    assert op.unavailable_reason(ASKING[0], "sm_90a") is None
    for tactic in (SMALL[2].tactic, LIBRARY):
        assert "expected a ring" in str(op.unavailable_reason(replace(ASKING[0], tactic=tactic), "sm_90a"))
    tensor = torch.zeros(1)
    for config, count in ((ASKING[0], 0), (ASKING[0], 2), (RINGS[0], 1), (replace(RINGS[0], tactic=LIBRARY), 1)):
        with pytest.raises(ValueError, match=f"found {count}"):
            op.run(op.plan(config, "sm_90a"), tensor, tensor, tensor, following=[tensor] * count)


def test_many_tokens_are_the_librarys_and_few_are_a_rings() -> None:
    for tokens, rows in ((48, 6288), (64, 6288), (64, 3648), (64, 80)):
        config = op.Config(tokens, rows, 7168)
        assert config.chosen is LIBRARY and op.spec(config) is None
        assert "library" in str(op.plan(config, "sm_90a")) and op.plan(config, "sm_90a").scratch_shapes() == {}
    for tokens, rows, columns in ((1, 3648, 7168), (16, 3216, 7168), (8, 7168, 768)):  # no row of the table has them
        assert op.Config(tokens, rows, columns).shape.tactic.chunk == 512
        assert op.unavailable_reason(op.Config(tokens, rows, columns), "sm_100a") is None
    assert not op.Config(1, 49376, 7168).shape.tactic.chunk, "a group's rows do not fit a stage"
    for config in (op.Config(65, 6288, 7168, tactic=LIBRARY), op.Config(64, 6288, 7168, "f32", tactic=LIBRARY)):
        assert op.unavailable_reason(config, "sm_90a").reason is Reason.OP_SHAPE
    assert op.Config(64, 6288, 7168, "f32").chosen is not LIBRARY


@pytest.mark.parametrize("tokens", [1, 33, 64])
def test_the_librarys_product(tokens: int) -> None:
    config = op.Config(tokens, 160, 448, tactic=LIBRARY)
    a, w = torch.randn(tokens, config.columns).bfloat16(), torch.randn(config.rows, config.columns).bfloat16()
    found = torch.full((tokens, config.rows), float("nan"), dtype=torch.bfloat16)
    op.run(op.plan(config, "sm_90a"), a, w, found)
    check_error(found, projection(a, w), _plain({"a": a, "w": w}, "bf16"))
    with pytest.raises(ValueError, match="expected an output of"):
        op.run(op.plan(config, "sm_90a"), a, w, found[:, 1:])


@pytest.mark.parametrize("config", [*SMALL[2:], *RINGS, *ASKING, NARROW], ids=str)
def test_compiles_without_spilling(config: op.Config, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]) -> None:
    assert not findings(op.spec(config), arch)


def _ring(tokens: int) -> op.Config:
    """The in-projection of a TP8 rank through a ring."""
    splits, chunk = (1, 512) if tokens <= 16 else (2, 128)
    return op.Config(tokens, 6288, 7168, tactic=ring_tactic(6288, (7168,), tokens, splits=splits, chunk=chunk))


def _case(config: op.Config, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(config.tokens, config.columns, device="cuda", generator=generator) * scale
    w = torch.randn(config.rows, config.columns, device="cuda", generator=generator) / config.columns**0.5
    return {"a": a.bfloat16(), "w": w.bfloat16()}


def _plain(case: dict[str, torch.Tensor], out: str) -> torch.Tensor:
    return case["a"] @ case["w"].T if out == "bf16" else case["a"].float() @ case["w"].float().T


@pytest.mark.parametrize("config", [RINGS[0], RINGS[2], RINGS[-1], NARROW], ids=str)
def test_stages_give_the_right_numbers_in_any_order_of_warps(config: op.Config, shared_store: build.Store) -> None:
    a, w = torch.randn(config.tokens, config.columns).bfloat16(), torch.randn(config.rows, config.columns).bfloat16()
    out = torch.full((config.tokens, config.rows), float("nan"), dtype=torch.bfloat16)
    tactic = config.shape.tactic
    grid = (tactic.groups * tactic.splits,)
    run_ptx(op.spec(config), {"w": w, "x": a, "y": out}, grid, seed=config.tokens, cluster=tactic.splits)
    check_error(out, projection(a, w), _plain({"a": a, "w": w}, config.out))


@pytest.mark.parametrize("config", ASKING, ids=str)
def test_a_ring_asks_for_the_following_columns_behind_its_copies(config: op.Config, shared_store: build.Store) -> None:
    a, w = torch.randn(config.tokens, config.columns).bfloat16(), torch.randn(config.rows, config.columns).bfloat16()
    tactic, (matrices,), found = config.shape.tactic, asked.following(AHEAD), []
    outs = {ahead: torch.full((config.tokens, config.rows), float("nan")).bfloat16() for ahead in (None, AHEAD)}
    for ahead, out in outs.items():
        tensors = asked.as_parameters(AHEAD, matrices) if ahead else {}
        spec, grid = op.spec(replace(config, ahead=ahead)), (tactic.groups * tactic.splits,)
        run_ptx(spec, {**tensors, "w": w, "x": a, "y": out}, grid, cluster=tactic.splits, prefetched=found)
    asked.check(AHEAD, found)
    assert torch.equal(*outs.values())
    before, after = asked.around(op.spec(config))
    assert "cp.async.bulk.shared" in before and "cp.async.bulk.shared" not in after


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        *SMALL,
        *RINGS,
        *(op.Config(t, 6288, 7168) for t in (1, 8, 16, 64)),
        NARROW,
        *(op.Config(64, 6288, 7168, tactic=t) for t in (STREAMED, replace(STREAMED, row_warps=6, tiles=1))),
        *(op.Config(t, 3216, 7168, tactic=LIBRARY) for t in (1, 32, 64)),
        *map(_ring, (1, 8, 16, 32, 64)),
    ],
    ids=str,
)
def test_error_is_within_twice_pytorchs(config: op.Config) -> None:
    plan = op.plan(config, build.device_arch())
    for seed, scale in ((0, 1.0), (1, 300.0)):
        case = _case(config, seed, scale)
        out = torch.full((config.tokens, config.rows), float("nan"), device="cuda", dtype=build.DTYPES[config.out][1])
        op.run(plan, case["a"], case["w"], out)
        check_error(out, projection(case["a"], case["w"]), _plain(case, config.out), config.chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [op.Config(1, 6288, 7168), op.Config(64, 6288, 7168), SMALL[-1], _ring(1), RINGS[1]], ids=str)
def test_replay_sees_changed_inputs_and_no_row_is_left_out(config: op.Config) -> None:
    plan, case, fresh = op.plan(config, build.device_arch()), _case(config, 2), _case(config, 3)
    out = torch.empty(config.tokens, config.rows, device="cuda", dtype=build.DTYPES[config.out][1])
    replay_with(lambda: op.run(plan, case["a"], case["w"], out), case, {"a": fresh["a"]}, [out])
    check_error(out, projection(fresh["a"], case["w"]), _plain({"a": fresh["a"], "w": case["w"]}, config.out))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*ASKING, replace(_ring(1), ahead=Ahead((896, 3584, 1536), 7168, 1536, 512))], ids=str)
def test_asking_changes_no_number_and_no_matrix(config: op.Config) -> None:
    asking, silent = (op.plan(replace(config, ahead=ahead), build.device_arch()) for ahead in (config.ahead, None))
    case, fresh = _case(config, 2), _case(config, 3)
    matrices = [matrix.cuda() for matrix in asked.following(config.ahead)[0]]
    before = [matrix.clone() for matrix in matrices]
    out, wanted = (torch.empty(config.tokens, config.rows, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    replay_with(lambda: op.run(asking, case["a"], case["w"], out, following=matrices), case, {"a": fresh["a"]}, [out])
    op.run(silent, fresh["a"], case["w"], wanted)
    assert torch.equal(out, wanted) and all(map(torch.equal, matrices, before))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [op.Config(8, 6288, 7168), op.Config(8, 6288, 7168, tactic=LIBRARY), _ring(8)], ids=str)
def test_a_token_does_not_see_the_others(config: op.Config) -> None:
    plan, case = op.plan(config, build.device_arch()), _case(config, 4)
    out, again = (torch.empty(8, 6288, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    op.run(plan, case["a"], case["w"], out)
    case["a"][1:] = float("nan")
    op.run(plan, case["a"], case["w"], again)
    assert torch.equal(out[0], again[0]) and again[1:].isnan().all()
