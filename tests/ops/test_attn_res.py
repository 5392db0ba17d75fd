"""`attn_res`: the reference against the plain form, refusals and compilation anywhere; numbers, updates and replay on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from late_kernel import settle, write_late
from ptx_machine import run as run_ptx
from yardstick import check_error, replay_with

from vllm.model_executor.models.kimi_k3_fast.ops import attn_res as op
from vllm.model_executor.models.kimi_k3_fast.ops import build, moe_tail, oproj, projection
from vllm.model_executor.models.kimi_k3_fast.ops.attn_res import reference, torch_form
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

SMALL = [
    op.Config(3, 256, 2, True, 2, closed=3, rows=4, blocks=2),
    op.Config(2, 320, 3, True, closed=3, rows=2, blocks=1),
    op.Config(2, 448, 0, False, 0, closed=2, rows=4, blocks=7),
    op.Config(4, 256, 3, True, normalise=False, closed=4, rows=4, blocks=4),
]
FORMS = [
    (0, False, 0, True),
    (1, True, -1, True),
    (4, True, -1, True),
    (7, True, 7, True),
    (8, True, -1, True),
    (8, True, -1, False),
    (3, False, -1, True),
]


def _case(config: op.Config, seed: int, device: str = "cuda", scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    sizes = torch.logspace(-1, 1, config.closed, device=device)[:, None, None]  # sources differ in size
    return {
        "score": draw(config.columns) * 2 * config.columns**-0.5,
        "norm": (1 + 0.3 * draw(config.columns)).bfloat16(),
        "delta": (draw(config.tokens, config.columns) * scale).bfloat16(),
        "blocks": (draw(config.closed, config.rows, config.columns) * sizes * scale).bfloat16(),
        "prefix": (draw(config.rows, config.columns) * scale).bfloat16(),
    }


def test_reference_agrees_with_the_models_form() -> None:
    config = SMALL[0]
    case = _case(config, 0, "cpu")
    blocks, prefix = reference.updated(config, case["delta"], case["blocks"], case["prefix"])
    sources = torch.cat([blocks[:2, :3], prefix[None, :3]]).float()
    mixed = torch_form.mix(sources, case["score"], config.eps)
    plain = torch_form.rms_norm(mixed, case["norm"].float(), config.eps, torch.float32)
    exact = reference.mix(config, case["score"], case["norm"], blocks, prefix, torch.float64)
    torch.testing.assert_close(plain.double(), exact, rtol=1e-5, atol=1e-5)


def test_refuses_what_it_cannot_compute() -> None:
    assert op.unavailable_reason(SMALL[0], "sm_80").reason is Reason.OP_ARCH
    for change in ({"columns": 100}, {"tokens": 9}, {"prev": 4}, {"write": 1}, {"write": 3}, {"blocks": 16}):
        assert op.unavailable_reason(replace(SMALL[0], **change), "sm_90a").reason is Reason.OP_SHAPE


def test_what_is_read_early_is_settled() -> None:
    """Closed blocks, and the prefix where delta is still to be added, were written in front of o_proj or the tail. Whichever of
    our kernels takes their place settles; the library's product is an ordinary launch, which does so, too."""
    tails = [made for made in moe_tail.specs() if made.name != "bf16_rms_norm"]
    assert tails and all(made.settles for made in [*oproj.specs(), *projection.specs(), *tails])
    for made in op.specs():
        early = {p.name for p in made.params if p.access is build.SETTLED}
        assert early == ({"blocks", "prefix"} if made.config.has_delta and made.config.world == 1 else {"blocks"})


@pytest.mark.parametrize("config", [*SMALL[:2], op.Config(1, 7168, 8, True)], ids=str)
def test_compiles_without_spilling(config: op.Config, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]) -> None:
    assert not findings(op.spec(config), arch)


def _check(config: op.Config, case: dict[str, torch.Tensor], before: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    blocks, prefix = reference.updated(config, before["delta"], before["blocks"], before["prefix"])
    assert torch.equal(case["blocks"], blocks) and torch.equal(case["prefix"], prefix)  # rows past the batch too: untouched
    exact = reference.mix(config, case["score"], case["norm"], blocks, prefix, torch.float64)
    check_error(out, exact, reference.mix(config, case["score"], case["norm"], blocks, prefix, torch.float32).bfloat16())


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_ptx_against_float64(config: op.Config) -> None:
    """The compiled kernel on a machine in software: poisoned output, threads in an order of chance."""
    case = _case(config, 3, "cpu")
    before = {name: tensor.clone() for name, tensor in case.items()}
    out = torch.full((config.tokens, config.columns), float("nan"), dtype=torch.bfloat16)
    run_ptx(op.spec(config), {**case, "out": out}, (config.tokens * config.blocks,), config.blocks)
    _check(config, case, before, out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        *SMALL,
        *(op.Config(t, 7168, *form[:3], normalise=form[3]) for form, t in zip(FORMS, (1, 5, 64, 5, 1, 64, 5), strict=True)),
        *(op.Config(2, 7168, 8, True, blocks=b) for b in (2, 7, 8)),
        op.Config(2, 7168, 1, True, blocks=1),
    ],
    ids=str,
)
def test_error_is_within_twice_pytorchs_and_updates_are_exact(config: op.Config) -> None:
    plan = op.plan(config, build.device_arch())
    for seed, scale in ((0, 1.0), (1, 1e-3), (2, 200.0)):
        case = _case(config, seed, scale=scale)
        before = {name: tensor.clone() for name, tensor in case.items()}
        out = torch.full((config.tokens, config.columns), float("nan"), device="cuda", dtype=torch.bfloat16)
        op.run(plan, **case, out=out)
        _check(config, case, before, out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delta", "blocks", "prefix"])
def test_producer_that_writes_100_us_late(name: str) -> None:
    """The kernel in front lets this one start at once and writes an input 100 us later, over poison. Blocks and prefix are older:
    one kernel that settles them is between, and runs on while they are read."""
    config = op.Config(3, 7168, 5, True)
    plan, case = op.plan(config, build.device_arch()), _case(config, 8)
    before = {key: tensor.clone() for key, tensor in case.items()}
    out = torch.full((config.tokens, config.columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    op.run(plan, **{key: tensor.clone() for key, tensor in case.items()}, out=out.clone())  # loads the code
    write_late(before[name], before[name].clone())
    settle(other := torch.zeros(1, dtype=torch.int32, device="cuda"))
    case[name].fill_(float("nan"))
    torch.cuda.synchronize()
    write_late(before[name], case[name])
    if name != "delta":
        settle(other)
    op.run(plan, **case, out=out)
    torch.cuda.synchronize()
    _check(config, case, before, out)


@pytest.mark.gpu
def test_sources_that_cancel_keep_their_digits() -> None:
    config = op.Config(2, 7168, 1, False)
    case = _case(config, 5)
    case["blocks"][0, :2] = -case["prefix"][:2]
    case["score"].zero_()  # equal weights: the mixture is exactly zero, and RMSNorm of zero is zero
    out = torch.full((2, 7168), float("nan"), device="cuda", dtype=torch.bfloat16)
    op.run(op.plan(config, build.device_arch()), **case, out=out)
    assert (out == 0).all()


@pytest.mark.gpu
def test_replay_sees_changed_inputs() -> None:
    config = op.Config(4, 7168, 8, True)
    plan, case, fresh = op.plan(config, build.device_arch()), _case(config, 6), _case(config, 7)
    out = torch.empty(4, 7168, device="cuda", dtype=torch.bfloat16)
    before = {**case, **{name: fresh[name] for name in ("delta", "blocks", "prefix")}}
    replay_with(lambda: op.run(plan, **case, out=out), case, {name: fresh[name] for name in ("delta", "blocks", "prefix")}, [out])
    _check(config, case, before, out)
