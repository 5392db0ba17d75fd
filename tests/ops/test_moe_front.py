"""`moe_front` and `topk`: dealing, refusals and compilation anywhere; numbers, ties, poisoned outputs and replay on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bulk_machine import run as run_ptx
from yardstick import check_error, replay_with

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import moe_front as op
from vllm.model_executor.models.kimi_k3_fast.ops.moe_front import reference
from vllm.model_executor.models.kimi_k3_fast.ops.moe_front.torch_form import route
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import TILE, Tactic, ring_tactic
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

SMALL = [
    op.Config(3, 256, 48, 80, 32),
    op.Config(12, 256, 40, 72, 40, linear_beta=None, tactic=Tactic(groups=5, splits=2, row_warps=2, k_warps=2, tiles=2)),
    op.Config(3, 512, 48, 80, 37, tactic=Tactic(groups=6, k_warps=2, tiles=3, stages=2, chunk=128, fetchers=1)),
    op.Config(
        12,
        448,
        40,
        72,
        40,
        linear_beta=None,
        tactic=Tactic(groups=5, k_warps=2, tiles=3, stages=3, chunk=64, fetchers=2),
    ),
]
SMALL += [replace(SMALL[-1], tactic=replace(SMALL[-1].tactic, by_lanes=True))]


def test_groups_are_dealt_by_rows() -> None:
    assert op.deal((896, 3584, 1536), 132) == (20, 78, 34)
    assert op.deal((10, 10, 10), 3) == (1, 1, 1)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("rows", [(896, 3584, 768), (896, 3584, 384), (112, 448, 768), (56, 224, 384)])
def test_the_served_shapes_are_covered(rows: tuple[int, int, int], tokens: int) -> None:
    assert op.unavailable_reason(op.Config(tokens, 7168, *rows), "sm_90a") is None


def test_refuses_what_it_cannot_compute() -> None:
    assert op.unavailable_reason(SMALL[0], "sm_80").reason is Reason.OP_ARCH
    for config in (op.Config(1, 200, 48, 80, 32), op.Config(65, 256, 48, 80, 32)):
        assert op.unavailable_reason(config, "sm_90a").reason is Reason.OP_SHAPE
    assert op.topk_unavailable_reason(op.TopkConfig(1, 2000, 16), "sm_90a").reason is Reason.OP_SHAPE


@pytest.mark.parametrize(
    "spec",
    [
        *map(op.spec, SMALL),
        *map(
            op.topk_spec,
            (
                op.TopkConfig(1),
                op.TopkConfig(3, 48, 4),
                op.TopkConfig(3, 48, 4, grouped=True),
            ),
        ),
    ],
    ids=lambda s: s.name,
)
def test_compiles_without_spilling(
    spec: build.KernelSpec, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]
) -> None:
    assert not findings(spec, arch)


def _ring(tokens: int) -> op.Config:
    """The front of a TP8 rank through a ring."""
    tactic = ring_tactic(6016, (7168,), tokens, chunk=512 if tokens <= 16 else 256, whole=TILE)
    return op.Config(tokens, 7168, 896, 3584, 768, tactic=tactic)


def _case(config: op.Config, seed: int, scale: float = 1.0, device: str = "cuda") -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, size: float) -> torch.Tensor:
        return (torch.randn(*shape, device=device, generator=generator) * size).bfloat16()

    size = config.columns**-0.5
    return {
        "m": draw(config.tokens, config.columns, size=scale),
        "router": draw(config.experts, config.columns, size=size),
        "down": draw(config.latent, config.columns, size=size),
        "gate_up": draw(2 * config.shared, config.columns, size=size),
    }


def _outputs(config: op.Config, device: str = "cuda") -> dict[str, torch.Tensor]:
    shapes = {
        "logits": (config.experts, torch.float32),
        "z": (config.latent, torch.bfloat16),
        "hidden": (config.shared, torch.bfloat16),
    }
    return {name: torch.full((config.tokens, n), float("nan"), device=device, dtype=dtype) for name, (n, dtype) in shapes.items()}


def _check(config: op.Config, case: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
    betas = {"beta": config.beta, "linear_beta": config.linear_beta}
    for found, exact, plain in zip(
        out.values(), reference.front(**case, **betas), reference.torch_form(**case, **betas), strict=True
    ):
        check_error(found, exact, plain)


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_right_numbers_in_any_order_of_warps(config: op.Config, shared_store: build.Store) -> None:
    """The first saturates SiTU."""
    case, out = _case(config, 4, 40.0 if config is SMALL[0] else 1.0, device="cpu"), _outputs(config, device="cpu")
    spec, splits = op.spec(config), config.shape.tactic.splits
    tensors = dict(zip([param.name for param in spec.params], [*list(case.values())[1:], case["m"], *out.values()], strict=True))
    run_ptx(spec, tensors, (sum(config.groups) * splits,), splits)
    _check(config, case, out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        *SMALL,
        *(op.Config(t, 7168, 896, 3584, 768) for t in (1, 16, 64)),
        *(op.Config(t, 7168, 448, 1792, 768) for t in (1, 32, 64)),
        op.Config(32, 7168, 896, 3584, 384),
        *map(_ring, (1, 8, 16, 64)),
    ],
    ids=str,
)
def test_error_is_within_twice_pytorchs(config: op.Config) -> None:
    plan = op.plan(config, build.device_arch())
    for seed, scale in ((0, 1.0), (1, 40.0)):  # the second saturates SiTU
        case, out = _case(config, seed, scale), _outputs(config)
        op.run(plan, **case, **out)
        _check(config, case, out)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*(op.Config(t, 7168, 896, 3584, 768) for t in (1, 64)), _ring(1)], ids=str)
def test_replay_sees_changed_inputs(config: op.Config) -> None:
    plan, case, out = op.plan(config, build.device_arch()), _case(config, 2), _outputs(config)
    replay_with(lambda: op.run(plan, **case, **out), case, {"m": _case(config, 3)["m"]}, list(out.values()))
    _check(config, case, out)


def _choose(
    config: op.TopkConfig, logits: torch.Tensor, bias: torch.Tensor, live: int | None = None, groups: op.Groups | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((config.tokens, config.top_k), -7, device="cuda", dtype=torch.int32)
    weights = torch.full((config.tokens, config.top_k), float("nan"), device="cuda")
    count = torch.tensor([config.tokens if live is None else live], device="cuda", dtype=torch.int32)
    op.run_topk(op.topk_plan(config, build.device_arch()), logits, bias, count, ids, weights, groups)
    return ids, weights


def _logits(kind: str, tokens: int, experts: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = torch.randn(tokens, experts, device="cuda", generator=generator)
    if kind == "random":
        return 3 * draw
    if kind == "equal":
        return torch.zeros_like(draw)
    if kind == "many ties":
        return (draw * 2).round()
    if kind == "one warp":  # all the large ones sit in neighbouring experts, so most warps' maxima are small
        draw[:, 32:64] += 10
        return draw
    return torch.full_like(draw, 200.0) if kind == "saturated" else -300 * draw.abs()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "equal", "many ties", "one warp", "saturated", "underflow"])
@pytest.mark.parametrize(
    "config",
    [
        op.TopkConfig(1),
        op.TopkConfig(64),
        op.TopkConfig(3, 48, 4, scaling=2.4),
        op.TopkConfig(2, 1000, 20, False),
    ],
    ids=str,
)
def test_topk_chooses_as_the_plain_form(config: op.TopkConfig, kind: str) -> None:
    logits = _logits(kind, config.tokens, config.experts, 0)
    bias = torch.zeros(config.experts, device="cuda") if kind != "random" else torch.randn(config.experts, device="cuda") * 0.1
    ids, weights = _choose(config, logits, bias)
    assert ids.min() >= 0 and ids.max() < config.experts
    assert all(len(set(row)) == config.top_k for row in ids.tolist())
    # The device's exp may differ from PyTorch's in the last bit, and so may the order of scores that close: compare the chosen
    # scores.
    wanted, wanted_weights = route(logits, bias, config.top_k, config.renormalise, config.scaling)
    ranked = torch.sigmoid(logits.double()) + bias.double()
    torch.testing.assert_close(ranked.gather(1, ids.long()), ranked.gather(1, wanted), rtol=0, atol=3e-7)
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-6, atol=1e-7)
    if kind in ("equal", "saturated"):  # exact ties: the lower id wins
        assert torch.equal(ids.long(), wanted)


@pytest.mark.gpu
def test_topk_replay_sees_changed_logits() -> None:
    config = op.TopkConfig(4)
    plan, bias = op.topk_plan(config, build.device_arch()), torch.zeros(config.experts, device="cuda")
    case, fresh = {"logits": _logits("random", 4, 896, 1)}, _logits("random", 4, 896, 2)
    ids, weights = torch.empty(4, 16, device="cuda", dtype=torch.int32), torch.empty(4, 16, device="cuda")
    count = torch.tensor([4], device="cuda", dtype=torch.int32)
    replay_with(lambda: op.run_topk(plan, case["logits"], bias, count, ids, weights), case, {"logits": fresh}, [ids, weights])
    wanted, wanted_weights = route(fresh, bias, 16, True, 1.0)
    assert torch.equal(ids.long(), wanted)
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-6, atol=1e-7)


def _groups(config: op.TopkConfig) -> op.Groups:
    sizes = (config.experts + 1, config.tokens * config.top_k, config.experts, 1)
    poisoned = [torch.full((n,), -7, device="cuda", dtype=torch.int32) for n in sizes]
    return op.Groups(*poisoned, torch.zeros(1, device="cuda", dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(
    ("config", "live"),
    [
        (op.TopkConfig(8, grouped=True), 5),
        (op.TopkConfig(33, grouped=True), 33),
        (op.TopkConfig(64, grouped=True), 64),
        (op.TopkConfig(64, grouped=True), 0),
        (op.TopkConfig(7, 48, 4, grouped=True), 6),
    ],
    ids=str,
)
def test_pairs_are_grouped_by_expert(config: op.TopkConfig, live: int, skewed: bool) -> None:
    groups, bias = _groups(config), torch.zeros(config.experts, device="cuda")
    if skewed:  # nearly all tokens choose the same experts
        bias[-config.top_k :] = 2.0
    for seed in (0, 1):  # the second launch finds the arrival counter as the first left it
        ids, weights = _choose(config, _logits("random", config.tokens, config.experts, seed), bias, live, groups)
        assert (ids[live:] == 0).all() and (weights[live:] == 0).all()
        chosen = ids[:live].flatten().long()
        counts = torch.bincount(chosen, minlength=config.experts)
        active = torch.nonzero(counts).flatten()
        assert groups.offsets.tolist() == [0, *counts.cumsum(0).tolist()]
        assert groups.pairs[: chosen.numel()].tolist() == torch.argsort(chosen, stable=True).tolist()
        assert groups.num_active.item() == active.numel()
        assert groups.active[: active.numel()].tolist() == active.tolist()
        assert groups.arrived.item() == 0
