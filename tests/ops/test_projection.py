"""`projection`: geometry, refusals and compilation anywhere; numbers, poisoned outputs and graph replay on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bulk_machine import run as run_ptx
from yardstick import check_error, replay_with

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import projection as op
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
RINGS = [  # stages used again and again; a last chunk in part; more fetching warps than rows to fetch
    op.Config(1, 80, 512, tactic=Tactic(groups=5, k_warps=2, tiles=1, stages=2, chunk=64, fetchers=1)),
    op.Config(3, 100, 1408, tactic=Tactic(groups=3, k_warps=4, tiles=3, stages=3, chunk=256, fetchers=2, height=34)),
    op.Config(
        9,
        90,
        1344,
        tactic=Tactic(groups=2, row_warps=2, k_warps=2, tiles=2, stages=2, chunk=128, fetchers=1, height=45),
    ),
    op.Config(20, 96, 448, out="f32", tactic=Tactic(groups=2, k_warps=1, tiles=3, stages=3, chunk=64, fetchers=4)),
]
RINGS += [replace(RINGS[1], tactic=replace(RINGS[1].tactic, k_warps=1, passing=True))]
RINGS += [replace(config, tactic=replace(config.tactic, pace=20)) for config in (RINGS[3], RINGS[1])]  # the first filling, slowly
RINGS += [replace(config, tactic=replace(config.tactic, by_lanes=True)) for config in (RINGS[2], RINGS[1])]


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


def test_many_tokens_are_the_librarys_and_few_are_a_rings() -> None:
    for tokens, rows in ((48, 6288), (64, 6288), (64, 3648), (64, 80)):
        config = op.Config(tokens, rows, 7168)
        assert config.chosen is LIBRARY and op.spec(config) is None
        assert "library" in str(op.plan(config, "sm_90a")) and op.plan(config, "sm_90a").scratch_shapes() == {}
    for tokens, rows, columns in ((1, 3648, 7168), (16, 2880, 7168), (8, 2304, 1536)):  # no row of the table has them
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


@pytest.mark.parametrize("config", [*SMALL[2:], *RINGS, NARROW], ids=str)
def test_compiles_without_spilling(config: op.Config, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]) -> None:
    assert not findings(op.spec(config), arch)


def _ring(tokens: int) -> op.Config:
    """The in-projection of a TP8 rank through a ring."""
    return op.Config(tokens, 6288, 7168, tactic=ring_tactic(6288, (7168,), tokens, chunk=512 if tokens <= 16 else 256))


def _case(config: op.Config, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(config.tokens, config.columns, device="cuda", generator=generator) * scale
    w = torch.randn(config.rows, config.columns, device="cuda", generator=generator) / config.columns**0.5
    return {"a": a.bfloat16(), "w": w.bfloat16()}


def _plain(case: dict[str, torch.Tensor], out: str) -> torch.Tensor:
    return case["a"] @ case["w"].T if out == "bf16" else case["a"].float() @ case["w"].float().T


@pytest.mark.parametrize("config", [RINGS[0], RINGS[2], RINGS[-3], RINGS[-1], NARROW], ids=str)
def test_stages_give_the_right_numbers_in_any_order_of_warps(config: op.Config, shared_store: build.Store) -> None:
    a, w = torch.randn(config.tokens, config.columns).bfloat16(), torch.randn(config.rows, config.columns).bfloat16()
    out = torch.full((config.tokens, config.rows), float("nan"), dtype=torch.bfloat16)
    tactic = config.shape.tactic
    grid = (tactic.groups * tactic.splits,)
    run_ptx(op.spec(config), {"w": w, "x": a, "y": out}, grid, seed=config.tokens, cluster=tactic.splits)
    check_error(out, projection(a, w), _plain({"a": a, "w": w}, config.out))


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
        check_error(out, projection(case["a"], case["w"]), _plain(case, config.out))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [op.Config(1, 6288, 7168), op.Config(64, 6288, 7168), SMALL[-1], _ring(1), RINGS[1]], ids=str)
def test_replay_sees_changed_inputs_and_no_row_is_left_out(config: op.Config) -> None:
    plan, case, fresh = op.plan(config, build.device_arch()), _case(config, 2), _case(config, 3)
    out = torch.empty(config.tokens, config.rows, device="cuda", dtype=build.DTYPES[config.out][1])
    replay_with(lambda: op.run(plan, case["a"], case["w"], out), case, {"a": fresh["a"]}, [out])
    check_error(out, projection(fresh["a"], case["w"]), _plain({"a": fresh["a"], "w": case["w"]}, config.out))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [op.Config(8, 6288, 7168), op.Config(8, 6288, 7168, tactic=LIBRARY), _ring(8)], ids=str)
def test_a_token_does_not_see_the_others(config: op.Config) -> None:
    plan, case = op.plan(config, build.device_arch()), _case(config, 4)
    out, again = (torch.empty(8, 6288, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    op.run(plan, case["a"], case["w"], out)
    case["a"][1:] = float("nan")
    op.run(plan, case["a"], case["w"], again)
    assert torch.equal(out[0], again[0]) and again[1:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_launches_behind_a_pause_leave_the_same_bits(tokens: int) -> None:
    """Weights cold, the GPU idle for a moment before each launch: in an engine a stage of the ring was once read too late so."""
    config = op.Config(tokens, 6288, 7168)
    plan, case = op.plan(config, build.device_arch()), _case(config, 5)
    out, cold = torch.empty(tokens, 6288, device="cuda", dtype=torch.bfloat16), torch.empty(1 << 28, device="cuda")
    op.run(plan, case["a"], case["w"], out)
    first, wrong = out.clone(), torch.zeros(tokens, 6288, dtype=torch.int64, device="cuda")
    for i in range(400):
        cold.fill_(i)
        torch.cuda.synchronize()
        time.sleep(0.002 * (i % 4))
        op.run(plan, case["a"], case["w"], out)
        wrong += out != first
    assert not wrong.any(), [(at, int(wrong[tuple(at)])) for at in wrong.nonzero().tolist()]
