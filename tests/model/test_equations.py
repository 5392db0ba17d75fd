"""K3's own parts against float64 written from the equations, each with values that stress it."""

from __future__ import annotations

import pytest
import reference
import torch

from vllm.model_executor.models.kimi_k3_fast.model import moe, mxfp4
from vllm.model_executor.models.kimi_k3_fast.model.activation import situ
from vllm.model_executor.models.kimi_k3_fast.model.attn_res import mix
from vllm.model_executor.models.kimi_k3_fast.model.kda import chunked, log_decay, normalise, recurrent, short_conv
from vllm.model_executor.models.kimi_k3_fast.model.mla import absorbed, expanded
from vllm.model_executor.models.kimi_k3_fast.model.moe import route


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("linear_beta", [None, 25.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0])
def test_situ(scale: float, linear_beta: float | None) -> None:
    gate, up = scale * randn(64, 48, seed=1), scale * randn(64, 48, seed=2)
    exact = reference.situ(gate.double(), up.double(), 4.0, linear_beta)
    assert error(situ(gate, up, 4.0, linear_beta), exact) < 1e-6
    rounded = situ(gate.bfloat16(), up.bfloat16(), 4.0, linear_beta)
    exact = reference.situ(gate.bfloat16().double(), up.bfloat16().double(), 4.0, linear_beta)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.bfloat16()) or error(rounded, exact) < 2**-8


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_attn_res_mixture(count: int, scale: float) -> None:
    sources, norm, proj = scale * randn(5, count, 128, seed=3), randn(128, seed=4), randn(1, 128, seed=5)
    exact = reference.mixture([s.double() for s in sources.unbind(1)], norm.double(), proj[0].double(), 1e-5)
    assert error(mix(sources, norm, proj, 1e-5), exact) < 1e-6
    if count == 1:
        assert torch.equal(mix(sources, norm, proj, 1e-5), sources[:, 0])


def test_attn_res_mixes_the_raw_sources() -> None:
    """Equal scores give the plain mean, whatever the sources' norms: normalisation belongs to the scores alone."""
    sources = torch.stack((torch.ones(2, 8), 3 * torch.ones(2, 8)), dim=1)
    assert torch.allclose(mix(sources, torch.ones(8), torch.zeros(1, 8), 1e-5), 2 * torch.ones(2, 8))


@pytest.mark.parametrize("bound", [-5.0, -0.5, None])
def test_log_decay(bound: float | None) -> None:
    raw, a_log, bias = 20 * randn(30, 4, 16, seed=6), randn(4, seed=7), randn(4, 16, seed=8)
    found = log_decay(raw, a_log, bias, bound)
    z, rate = raw.double() + bias.double(), a_log.double().exp().unsqueeze(-1)
    exact = -rate * torch.logaddexp(z, torch.zeros_like(z)) if bound is None else bound / (1 + (-rate * z).exp())
    assert error(found, exact) < 1e-6
    assert bool((found <= 0).all()) and (bound is None or bool((found >= bound).all()))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("decay", [0.0, -1e-3, -5.0, "mixed"])
def test_kda_forms_at_the_ends_of_the_decay(length: int, decay: float | str) -> None:
    """At the bound of -5 a chunk's factors span e^-160: neither form may overflow, and both must agree with float64."""
    q, k, v = (randn(length, 2, 16, seed=s) for s in (9, 10, 11))
    g = torch.where(randn(length, 2, 16, seed=12) > 0, 0.0, -5.0) if decay == "mixed" else torch.full((length, 2, 16), decay)
    beta, state = torch.sigmoid(randn(length, 2, seed=13)), randn(2, 16, 16, seed=14)
    q, k = normalise(q, k)
    exact, last = recurrent(*(x.double() for x in (q, k, v, g, beta, state)))
    for form in (recurrent, chunked):
        out, new = form(q, k, v, g, beta, state)
        assert error(out, exact) < 2e-6 and error(new, last) < 2e-6, form.__name__


def test_the_float64_recurrence_is_the_delta_rule() -> None:
    """One key, no decay, beta = 1: the state returns exactly the last value stored under that key."""
    k = torch.zeros(3, 1, 4, dtype=torch.float64)
    k[:, 0, 2] = 1
    v = randn(3, 1, 4).double()
    out, _ = recurrent(
        k, k, v, torch.zeros_like(k), torch.ones(3, 1, dtype=torch.float64), torch.zeros(1, 4, 4, dtype=torch.float64)
    )
    assert torch.allclose(out, v)


def test_short_conv_continues_where_it_stopped() -> None:
    x, weight = randn(11, 6), randn(6, 4, seed=1)
    whole, last = short_conv(x, torch.zeros(3, 6), weight)
    padded = torch.cat((torch.zeros(3, 6), x)).double()
    exact = sum(padded[j : j + 11] * weight[:, j].double() for j in range(4))
    assert error(whole, exact * torch.sigmoid(exact)) < 1e-6
    state, pieces = torch.zeros(3, 6), []
    for piece in x.split([1, 2, 1, 7]):
        y, state = short_conv(piece, state, weight)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces), whole, atol=1e-6) and torch.equal(state, last) and torch.equal(last, x[-3:])


def test_absorbed_and_expanded_attention_agree_and_ignore_unused_rows() -> None:
    rank, nope, rope, value, heads, length = 24, 12, 4, 10, 3, 37
    q, rows, w = (
        randn(length, heads, nope + rope).double(),
        randn(length, rank + rope, seed=1).double(),
        randn(heads, nope + value, rank, seed=2),
    )
    prefill = expanded(q, rows, w.double(), rank, nope, 0.2)
    gathered = torch.full((length, length + 5, rank + rope), float("nan"), dtype=torch.float64)
    for t in range(length):
        gathered[t, : t + 1] = rows[: t + 1]
    decode = absorbed(q, gathered, torch.arange(1, length + 1), w.double(), rank, nope, 0.2)
    assert torch.allclose(prefill, decode, atol=1e-12)


def test_route_takes_the_lower_expert_of_equals_and_weighs_without_the_bias() -> None:
    logits = torch.tensor([[0.0, 2.0, 0.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, -0.5, 0.0, 0.0, 0.5])
    experts, weights = route(logits, bias, 3, False, 2.0)
    assert experts.tolist() == [[4, 0, 2]]
    assert torch.allclose(weights, 2 * torch.sigmoid(torch.tensor([[-1.0, 0.0, 0.0]])))
    _, normal = route(logits, bias, 3, True, 1.0)
    assert torch.allclose(normal.sum(), torch.tensor(1.0))


def test_mxfp4_decodes_every_code_and_scale() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(253, 1)
    scale = torch.arange(253, dtype=torch.uint8)[:, None].repeat(1, 16)
    exact = reference.decode_mxfp4(packed, scale)
    assert torch.equal(mxfp4.decode(packed, scale, torch.float64), exact)
    assert torch.equal(mxfp4.decode(packed, scale, torch.bfloat16)[2:].double(), exact[2:])
    assert mxfp4.decode(packed[:1], torch.full((1, 16), mxfp4.SCALE_NAN, dtype=torch.uint8), torch.float32).isnan().all()


def test_mxfp4_encoding_is_the_nearest_code() -> None:
    """What is representable comes back exactly; anything else within half a step of the group's largest magnitude."""
    values = torch.tensor(mxfp4.MAGNITUDES)
    exact = torch.cat((values, -values, values.flip(0), -values.flip(0)))[None] * torch.tensor([[2.0**-130], [1.0], [2.0**100]])
    packed, scale = mxfp4.encode(exact[1:])
    assert torch.equal(mxfp4.decode(packed, scale, torch.float32), exact[1:])
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4)
    packed, scale = mxfp4.encode(ties[None])
    assert mxfp4.decode(packed, scale, torch.float32)[0, :8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    weight = randn(40, 96, seed=15)
    packed, scale = mxfp4.encode(weight)
    largest = weight.view(40, 3, 32).abs().amax(-1, keepdim=True)
    difference = (mxfp4.decode(packed, scale, torch.float32) - weight).view(40, 3, 32).abs()
    assert bool((difference <= largest / 4).all()), (
        "a step in the top binade is a third of its values; saturation adds at most a quarter"
    )
    assert (difference.square().mean() / weight.square().mean()).sqrt() < 0.12


def test_mxfp4_refuses_a_ragged_row() -> None:
    with pytest.raises(ValueError, match=r"multiple of 32; found shape \(2, 40\)"):
        mxfp4.encode(torch.zeros(2, 40))


def test_experts_that_another_path_chose_are_taken_and_judged_by_their_scores() -> None:
    """Imposing a layer's own choice changes nothing; a near-tie taken the other way costs nearly no score, a bad choice much."""
    logits = torch.tensor([[3.0, 1.0, 0.5, 0.5 - 1e-6, -2.0, -3.0]])
    bias = torch.zeros(6)

    class Layer(torch.nn.Module):
        imposed = judged = None

    def judge(choice: list[int]) -> float:
        layer = Layer()
        with moe.imposed({"layers.1.choice": layer}, [torch.tensor([choice])]) as judged:
            experts, weights = moe.route(logits, bias, 3, True, 1.0, layer.imposed)
            layer.judged = moe.judge(logits, bias, layer.imposed)
        assert experts.tolist() == [choice]
        assert torch.allclose(weights.sum(), torch.tensor(1.0))
        assert layer.imposed is None
        scores = judged["layers.1.choice"]
        return float((scores.best - scores.taken).norm() / scores.best.norm())

    assert judge([0, 1, 2]) == judge([2, 0, 1]) == 0.0
    assert 0 < judge([0, 1, 3]) < 1e-6
    assert judge([0, 1, 4]) > 0.1
    with pytest.raises(ValueError, match="expected the chosen experts of 1 layers, found 0"), moe.imposed({"x": Layer()}, []):
        pass


def test_noise_is_measured_by_the_experts_that_it_moves_and_by_the_places() -> None:
    """Two experts that change places under noise are far from where they were, though the sorted scores are the same; an expert
    that noise raises above all others is seen in the places alone; a score that is no number measures nothing."""
    chosen, bias = torch.tensor([[0, 1]]), torch.zeros(4)

    def judge(*scores: float) -> moe.Judged:
        return moe.judge(torch.tensor([scores]).logit(), bias, chosen)

    still = judge(0.6, 0.5, 0.4, 0.3)
    swapped, raised = judge(0.5, 0.6, 0.4, 0.3), judge(0.6, 0.5, 0.4, 0.9)
    assert torch.allclose(swapped.best, still.best)
    assert torch.allclose(still.moved(swapped), still.best + torch.tensor([[-0.1, 0.1]]))
    assert torch.allclose(still.moved(raised), torch.tensor([[0.9, 0.6]]))
    assert torch.equal(still.moved(moe.Judged(still.imposed * torch.nan, still.best)), still.best)
