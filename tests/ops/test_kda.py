"""KDA decode: the reference against a form that shares none of its code, every kernel's compilation, and the kernels on a
device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from late_kernel import settle, write_late
from ptx_machine import run as run_ptx
from torch import Tensor

from vllm.model_executor.models.kimi_k3_fast.ops import build, kda
from vllm.model_executor.models.kimi_k3_fast.ops.kda import reference

D = kda.D


def problem(config: kda.Config, device: str = "cpu", seed: int = 0, spread: float = 1.0) -> dict[str, Tensor]:
    """Inputs of one step with every request on slots of its own, slot 0 the null slot, and poison where nothing may be read."""
    g = torch.Generator().manual_seed(seed)
    h, width, slots_per_row = config.heads, config.heads * D, 1 + config.drafts
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    slot_count = 1 + config.requests * slots_per_row
    x = normal(config.tokens, config.columns) * spread
    x[:, 4 * width + D + h :] = float("nan")  # the padding columns
    # State tensors are views of pages: another tensor's bytes lie between the slots.
    conv_page = torch.full((slot_count, (2 + slots_per_row) * 3 * width + 64), float("nan"))
    conv = conv_page[:, : (2 + slots_per_row) * 3 * width].view(slot_count, 2 + slots_per_row, 3 * width)
    conv.copy_(normal(*conv.shape))
    state_page = torch.full((slot_count, h * D * D + 64), float("nan"))
    state = state_page[:, : h * D * D].view(slot_count, h, D, D)
    state.copy_(normal(*state.shape))
    made = {
        "x": x.bfloat16(),
        "conv_weight": normal(3 * width, 4) * 0.5,
        "f_b": (normal(width, D) * D**-0.5).bfloat16(),
        "a_log": torch.rand(h, generator=g) * 2.7,
        "dt_bias": normal(width),
        "norm_weight": (1 + 0.1 * normal(D)).bfloat16(),
        "slots": (1 + torch.randperm(slot_count - 1, generator=g)).view(config.requests, slots_per_row).int(),
        "conv_page": conv_page.bfloat16(),
        "state_page": state_page,
    }
    if config.drafts:
        made["accepted"] = torch.randint(1, 2 + config.drafts, (config.requests,), generator=g).int()
        made["starts"] = torch.arange(0, config.tokens + 1, config.queries).int()
    made = {name: tensor.to(device) for name, tensor in made.items()}
    made["conv_state"] = made.pop("conv_page")[:, : conv[0].numel()].view(conv.shape)
    made["state"] = made.pop("state_page")[:, : state[0].numel()].view(state.shape)
    return made


def expected(config: kda.Config, inputs: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    cpu = {name: tensor.cpu() for name, tensor in inputs.items()}
    bound, eps = config.lower_bound, config.norm_eps
    return reference.decode(**cpu, queries=config.queries, lower_bound=bound, norm_eps=eps, dtype=dtype)


# -- the reference ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [-5.0, None])
def test_reference_against_the_delta_rule_as_matrices(bound: float | None) -> None:
    """S <- S diag(e^g) (I - beta k k^T) + beta v k^T, written as matrix products, with the convolution taken by torch."""
    config = kda.Config(heads=1, requests=1, columns=kda.columns(1), queries=6, drafts=5, lower_bound=bound)
    p = problem(config)
    p["accepted"][:] = 1
    y, _, states = expected(config, p)
    x = p["x"].double()
    slot = int(p["slots"][0, 0])
    raw = torch.cat([p["conv_state"][slot, :3].double(), x[:, : 3 * D]]).T[None]
    mixed = torch.nn.functional.conv1d(raw, p["conv_weight"].double()[:, None, :], groups=3 * D)[0].T
    q, k, v = torch.nn.functional.silu(mixed).split(D, dim=1)
    q = q / (q.square().sum(1, keepdim=True) + 1e-6).sqrt() / D**0.5
    k = k / (k.square().sum(1, keepdim=True) + 1e-6).sqrt()
    z = x[:, 4 * D : 5 * D] @ p["f_b"].double().T + p["dt_bias"].double()
    rate = p["a_log"].double().exp()
    log_decay = bound / (1 + torch.exp(-rate * z)) if bound is not None else -rate * torch.log1p(torch.exp(z))
    beta = x[:, 5 * D].sigmoid()
    s = p["state"][slot, 0].double()
    for t in range(config.queries):
        eye = torch.eye(D, dtype=torch.float64)
        s = s @ torch.diag(log_decay[t].exp()) @ (eye - beta[t] * torch.outer(k[t], k[t])) + beta[t] * torch.outer(v[t], k[t])
        o = s @ q[t]
        o = torch.nn.functional.rms_norm(o, (D,), p["norm_weight"].double(), config.norm_eps) * x[t, 3 * D : 4 * D].sigmoid()
        torch.testing.assert_close(y[t], o, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(states[int(p["slots"][0, t]), 0], s, rtol=1e-9, atol=1e-9)


def test_reference_verify_equals_single_steps() -> None:
    """Three tokens verified at once and two accepted, then the next step: the same as one token at a time."""
    several = kda.Config(heads=2, requests=1, columns=kda.columns(2), queries=3, drafts=2)
    p = problem(several)
    p["accepted"][:] = 1
    y, conv, states = expected(several, p)
    one = dataclasses.replace(several, queries=1, drafts=0)
    single = dict(p, slots=p["slots"][:, :1], conv_state=p["conv_state"][:, :3])
    del single["accepted"], single["starts"]
    for t in range(2):
        step = dict(single, x=p["x"][t : t + 1])
        y_one, conv_one, state_one = expected(one, step)
        torch.testing.assert_close(y_one[0], y[t])
        single = dict(single, conv_state=conv_one, state=state_one)
    p = dict(p, conv_state=conv, state=states, accepted=torch.tensor([2], dtype=torch.int32))
    y_next, _, _ = expected(several, p)
    y_one, _, _ = expected(one, dict(single, x=p["x"][:1]))
    torch.testing.assert_close(y_next[0], y_one[0])


# -- plan and compilation --------------------------------------------------------------------------------------------------------


def test_refusals_say_what_was_expected() -> None:
    good = kda.Config(12, 1, kda.columns(12))
    assert kda.unavailable_reason(good, "sm_90a") is None
    assert "sm_80" in kda.unavailable_reason(good, "sm_80").detail
    for change in ({"columns": 6280}, {"queries": 9}, {"queries": 2}, {"lower_bound": -6.0}, {"heads": 0}):
        refusal = kda.unavailable_reason(dataclasses.replace(good, **change), "sm_90a")
        assert refusal is not None and "expected" in refusal.detail, change
    with pytest.raises(ValueError, match="columns"):
        kda.plan(dataclasses.replace(good, columns=8), "sm_90a", load=False)


@pytest.mark.parametrize("heads", kda.HEADS)
@pytest.mark.parametrize("requests", [1, 3, 16, 64])
def test_every_tactic_covers_every_request(heads: int, requests: int) -> None:
    config = kda.Config(heads, requests, kda.columns(heads))
    for tactic in (kda.default_tactic(config), *kda.tactics(config)):
        kernel = kda.spec(config, tactic).config
        assert kernel.rows_per_cta * kernel.row_groups >= requests
        assert D // tactic.split * kda.LANES % tactic.threads == 0


SMALL = [
    kda.Config(2, 3, kda.columns(2)),
    kda.Config(2, 3, kda.columns(2), lower_bound=None),
    kda.Config(2, 3, kda.columns(2), queries=3, drafts=2),
]


@pytest.mark.parametrize("config", SMALL, ids=["bounded", "unbounded", "verify"])
def test_kernels_compile_without_spills(
    config: kda.Config, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]
) -> None:
    assert not findings(kda.spec(config, kda.default_tactic(config)), arch)


# -- the compiled kernel on a machine in software -----------------------------------------------------------------------------


def padded(inputs: dict[str, Tensor]) -> None:
    """Make the second of three requests a padded row, and the null slot one that nobody may read."""
    inputs["slots"][1, 0] = -1 if "starts" in inputs else 0
    inputs["conv_state"][0] = inputs["state"][0] = inputs["x"][1 if "starts" not in inputs else 2] = float("nan")
    if "starts" in inputs:  # two tokens, none, and one draft less than could be; the rest of the rows are padding
        inputs["starts"].copy_(torch.tensor([0, 2, 2, 3]))
        inputs["accepted"][1] = -(2**30)
        inputs["x"][3:] = float("nan")


@pytest.mark.parametrize(
    ("config", "tactic"),
    [
        (kda.Config(1, 3, kda.columns(1)), kda.Tactic(2, 128, 1, 2)),
        (kda.Config(1, 3, kda.columns(1), queries=2, drafts=1), kda.Tactic(4, 128, 3)),
        (kda.Config(1, 1, kda.columns(1), lower_bound=None), kda.Tactic(1, 256, 1)),
        (kda.Config(1, 3, kda.columns(1)), kda.Tactic(2, 128, 4)),  # of a table's row for more requests
        (kda.Config(1, 3, kda.columns(1), queries=2, drafts=1), kda.Tactic(4, 128, 4)),
    ],
    ids=["walk", "verify", "unbounded", "larger row", "larger row, verify"],
)
def test_ptx_against_float64(config: kda.Config, tactic: kda.Tactic) -> None:
    """Poisoned output, a padded row among others, a walk with states on their way, threads in an order of chance."""
    inputs = problem(config, spread=3.0)
    if config.requests > 1:
        inputs["x"].nan_to_num_()
        padded(inputs)
    exact, plain = expected(config, inputs), expected(config, inputs, torch.float32)
    y = torch.full((config.tokens, config.heads * D), float("nan"), dtype=torch.bfloat16)
    spec = kda.spec(config, tactic)
    run_ptx(spec, {**inputs, "y": y}, (config.heads * tactic.split, spec.config.row_groups), tactic.split)
    compare(inputs, y, exact, plain)


# -- on a device -----------------------------------------------------------------------------------------------------------------


def compare(inputs: dict[str, Tensor], y: Tensor, exact: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> None:
    """Output and both states, also where nothing was to be written, are no further from float64 than twice PyTorch's own form."""
    got: list[tuple[str, Any]] = [("y", y), ("conv_state", inputs["conv_state"]), ("state", inputs["state"])]
    for (name, tensor), want, yardstick in zip(got, exact, plain, strict=True):
        tensor = tensor.double().cpu()
        if name == "conv_state":
            assert torch.equal(tensor.nan_to_num(7e7), want.nan_to_num(7e7)), "the window holds copies of bf16 inputs"
            continue
        assert torch.equal(tensor.isnan(), want.isnan()), name
        error, allowed = (tensor - want).abs().nan_to_num(), (yardstick.double() - want).abs().nan_to_num()
        scale = want.abs().nan_to_num().max()
        assert error.max() <= 2 * allowed.max() + 2e-6 * scale, (name, float(error.max()), float(allowed.max()))
        assert error.mean() <= 2 * allowed.mean() + 2e-7 * scale, (name, float(error.mean()), float(allowed.mean()))


def poisoned(config: kda.Config) -> Tensor:
    return torch.full((config.tokens, config.heads * D), float("nan"), dtype=torch.bfloat16, device="cuda")


def check(config: kda.Config, inputs: dict[str, Tensor], tactic: kda.Tactic | None = None) -> None:
    """Run the kernel in place on `inputs` and compare."""
    exact, plain = expected(config, inputs), expected(config, inputs, torch.float32)
    y = poisoned(config)
    kda.run(kda.plan(config, build.device_arch(), tactic), **inputs, y=y)
    torch.cuda.synchronize()
    compare(inputs, y, exact, plain)


def gpu_configs() -> list[kda.Config]:
    plain = [kda.Config(h, r, kda.columns(h)) for h, r in ((6, 1), (12, 1), (12, 5), (6, 64), (24, 3), (48, 2), (96, 2))]
    verify = [kda.Config(h, r, kda.columns(h), queries=q, drafts=q - 1) for h, r, q in ((6, 3, 2), (12, 2, 4), (12, 1, 8))]
    return [
        *plain,
        kda.Config(6, 4, kda.columns(6), lower_bound=None),
        *verify,
        kda.Config(6, 3, kda.columns(6), queries=1, drafts=3),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("config", gpu_configs(), ids=str)
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_kernel_against_float64(config: kda.Config, spread: float) -> None:
    """`spread` 20 drives the decay to its bound, beta and the gates to 0 and 1."""
    check(config, problem(config, "cuda", spread=spread))


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_state_keeps_float32_accuracy(drafts: int) -> None:
    """Without f_b's rounding to bf16 the state is a pure float32 computation, and is held to that."""
    config = kda.Config(6, 3, kda.columns(6), queries=1 + drafts, drafts=drafts)
    inputs = problem(config, "cuda")
    inputs["f_b"].zero_()
    check(config, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", kda.tactics(kda.Config(6, 16, kda.columns(6))), ids=str)
def test_every_tactic(tactic: kda.Tactic) -> None:
    config = kda.Config(6, 16, kda.columns(6))
    check(config, problem(config, "cuda"), tactic)


@pytest.mark.gpu
def test_null_slots_write_nothing_and_give_zeros() -> None:
    for drafts in (0, 2):
        config = kda.Config(6, 5, kda.columns(6), queries=1 + drafts, drafts=drafts)
        inputs = problem(config, "cuda")
        inputs["slots"][1], inputs["slots"][4, 0] = 0, -1
        if drafts:  # a request with one draft less, and the padded rows' tokens at the end
            inputs["starts"].copy_(torch.tensor([0, 3, 3, 5, 8, 8]))
            inputs["accepted"][4] = -(2**30)  # of a padded row: means nothing
        for name in ("conv_state", "state"):
            inputs[name][0] = float("nan")  # the null slot is never read
        if drafts:
            inputs["x"][8:] = float("nan")
        else:
            inputs["x"][1] = float("nan")
        check(config, inputs)


@pytest.mark.gpu
def test_denormal_and_zero_inputs() -> None:
    config = kda.Config(6, 2, kda.columns(6))
    inputs = problem(config, "cuda")
    inputs["state"].mul_(1e-38)
    inputs["x"].nan_to_num_().mul_(1e-30)
    inputs["conv_state"].zero_()
    check(config, inputs)


@pytest.mark.gpu
def test_replay_with_other_slots_and_inputs() -> None:
    """A captured step reads slots and inputs at replay; two captured widths over the same buffers do not disturb one another;
    and a replay from the same state gives the same bits."""
    wide, narrow = kda.Config(6, 4, kda.columns(6)), kda.Config(6, 2, kda.columns(6))
    plans = {c: kda.plan(c, build.device_arch()) for c in (wide, narrow)}
    buffers, y = problem(wide, "cuda", seed=1), poisoned(wide)
    views = {c: dict(buffers, x=buffers["x"][: c.tokens], slots=buffers["slots"][: c.requests]) for c in (wide, narrow)}
    graphs = {}
    for c in (wide, narrow):
        kda.run(plans[c], **views[c], y=y[: c.tokens])
        torch.cuda.synchronize()
        graphs[c] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[c]):
            kda.run(plans[c], **views[c], y=y[: c.tokens])
    for seed, c in enumerate((wide, narrow, wide, narrow)):
        fresh = problem(wide, "cuda", seed=10 + seed)
        bits = []
        for _ in range(2):
            for name in ("x", "slots", "conv_state", "state"):
                buffers[name].copy_(fresh[name])
            want, plain = expected(c, views[c]), expected(c, views[c], torch.float32)
            y.fill_(float("nan"))
            graphs[c].replay()
            torch.cuda.synchronize()
            compare(buffers, y[: c.tokens], want, plain)
            assert y[c.tokens :].isnan().all(), "the narrow graph wrote rows of the wide one"
            bits.append(
                [t.clone().view(torch.int16) for t in (y, buffers["conv_state"].contiguous(), buffers["state"].contiguous())]
            )
        assert all(torch.equal(first, second) for first, second in zip(*bits, strict=True)), "a race: two replays differ"


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", ["x", "slots", "state"])
def test_producer_that_writes_100_us_late(name: str, drafts: int) -> None:
    """The kernel before lets this one start at once and writes an input 100 us later, over poison: NaN, or the null slot. Slots
    and states are of the step before: one kernel that settles them is between, and runs on while they are read."""
    config = kda.Config(6, 3, kda.columns(6), queries=1 + drafts, drafts=drafts)
    inputs, y = problem(config, "cuda", seed=3), poisoned(config)
    plan = kda.plan(config, build.device_arch())
    if name == "state":  # one piece, for the producer
        inputs["state"] = inputs["state"].contiguous()
    exact, plain = expected(config, inputs), expected(config, inputs, torch.float32)
    late = inputs[name].clone()
    kda.run(plan, **{key: tensor.clone() for key, tensor in inputs.items()}, y=y.clone())  # loads the code
    write_late(late, late.clone())
    settle(other := torch.zeros(1, dtype=torch.int32, device="cuda"))
    inputs[name].fill_(0 if name == "slots" else float("nan"))
    torch.cuda.synchronize()
    write_late(late, inputs[name])
    if name != "x":
        settle(other)
    kda.run(plan, **inputs, y=y)
    torch.cuda.synchronize()
    compare(inputs, y, exact, plain)
