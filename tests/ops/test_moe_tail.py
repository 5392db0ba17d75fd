"""`moe_tail`: refusals and compilation anywhere; numbers, poisoned outputs and graph replay on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bulk_machine import run as run_ptx
from yardstick import check_error, played, replay_with, scratch_of

from vllm.model_executor.models.kimi_k3_fast.ops import build, single
from vllm.model_executor.models.kimi_k3_fast.ops import moe_tail as op
from vllm.model_executor.models.kimi_k3_fast.ops.library import LIBRARY
from vllm.model_executor.models.kimi_k3_fast.ops.moe_tail import reference
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic, ring_tactic
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

SMALL = [
    op.Config(3, 80, 256, 64),
    op.Config(10, 96, 192, 128, r_dtype="f32", tactic=Tactic(groups=2, splits=2, row_warps=1, k_warps=2, tiles=3)),
    op.Config(3, 96, 1024, 256, tactic=Tactic(groups=6, k_warps=2, tiles=1, depth=2, resident=2)),
    op.Config(17, 96, 256, 64, tactic=Tactic(groups=2, splits=2, row_warps=3, k_warps=1, tiles=1)),
    op.Config(3, 90, 1024, 192, tactic=Tactic(groups=2, k_warps=4, tiles=3, stages=2, chunk=256, fetchers=2, height=45)),
    op.Config(
        17, 96, 448, 192, tactic=Tactic(groups=2, splits=2, row_warps=2, k_warps=2, tiles=2, stages=2, chunk=128, fetchers=1)
    ),
]
SMALL += [replace(SMALL[-1], tactic=replace(SMALL[-1].tactic, passing=True, rehearse=True))]
LIBRARYS = [
    op.Config(5, 80, 320, 64, tactic=LIBRARY),  # a warp of the norm in part
    op.Config(64, 80, 64, 128),
    op.Config(2, 32, 4160, 64, tactic=LIBRARY),  # more columns than the norm's threads take at once
]


def test_reference_agrees_with_the_plain_form() -> None:
    case = _case(SMALL[0], 0, "cpu")
    exact, plain = reference.tail(**case, eps=1e-5), reference.torch_form(**case, eps=1e-5)
    torch.testing.assert_close(plain.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("shared", [768, 384])
def test_the_served_shapes_are_covered(shared: int, tokens: int) -> None:
    assert op.unavailable_reason(op.Config(tokens, 7168, 3584, shared), "sm_90a") is None


def test_refuses_what_it_cannot_compute() -> None:
    assert op.unavailable_reason(SMALL[0], "sm_80").reason is Reason.OP_ARCH
    by_library = op.Config(65, 80, 256, 64, tactic=LIBRARY)
    for config in (
        op.Config(1, 80, 256, 40),
        op.Config(0, 80, 256, 64),
        op.Config(1, 80, 256, 64, r_dtype="f16"),
        by_library,
        replace(by_library, tokens=64, r_dtype="f32"),
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


@pytest.mark.parametrize("config", [*SMALL, LIBRARYS[0]], ids=str)
def test_compiles_without_spilling(config: op.Config, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]) -> None:
    assert not findings(op.spec(config), arch)


def _ring(tokens: int) -> op.Config:
    """The tail of a TP8 rank through a ring."""
    splits, chunk = (1, 512) if tokens <= 16 else (2, 128)
    return op.Config(tokens, 7168, 3584, 768, tactic=ring_tactic(7168, (3584, 768), tokens, splits=splits, chunk=chunk))


def _case(config: op.Config, seed: int, device: str = "cuda", scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    r = (
        draw(config.tokens, config.latent) * scale * torch.logspace(-2, 1, config.tokens, device=device)[:, None]
    )  # tokens differ in size
    return {
        "r": r.to(build.DTYPES[config.r_dtype][1]),
        "hidden": draw(config.tokens, config.shared).bfloat16(),
        "norm": (1 + 0.3 * draw(config.latent)).bfloat16(),
        "up": (draw(config.rows, config.latent) / config.latent**0.5).bfloat16(),
        "down": (draw(config.rows, config.shared) / config.shared**0.5).bfloat16(),
    }


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
