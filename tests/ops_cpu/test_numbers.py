"""The C++ forms against float64, on every instruction set: no further off than twice PyTorch's own error in the same dtype."""

from __future__ import annotations

import pytest
import torch
from cases import attend_case, expert_weights, kda_case, normal
from yardstick import check_error

from vllm.model_executor.models.kimi_k3_fast.ops.attn_res import torch_form as attn_res
from vllm.model_executor.models.kimi_k3_fast.ops.experts import reference as experts_reference
from vllm.model_executor.models.kimi_k3_fast.ops.experts import torch_form as experts
from vllm.model_executor.models.kimi_k3_fast.ops.kda import reference as kda_reference
from vllm.model_executor.models.kimi_k3_fast.ops.kda import torch_form as kda
from vllm.model_executor.models.kimi_k3_fast.ops.mla import torch_form as mla
from vllm.model_executor.models.kimi_k3_fast.ops.moe_front import torch_form as moe_front
from vllm.model_executor.models.kimi_k3_fast.ops.moe_front.reference import situ as exact_situ
from vllm.model_executor.models.kimi_k3_fast.ops.situ.torch_form import situ

DTYPES = [torch.float32, torch.bfloat16]
BETA, LINEAR = 4.0, 25.0
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


# -- projections -------------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 64, 65])
@pytest.mark.parametrize(("rows", "columns"), [(48, 256), (33, 47), (1, 1), (7, 1023)])
def test_linear(cpp, dtype, tokens, rows, columns):
    x, w = normal(tokens, columns, dtype=dtype), normal(rows, columns, dtype=dtype)
    check_error(cpp.linear(x, w), x.double() @ w.double().T, torch.nn.functional.linear(x, w))


@dtypes
def test_linear_of_cancelling_terms(cpp, dtype):
    """Large terms that cancel and leave small ones: the order and the width of the sums show. Held to PyTorch's error where the
    terms that cancel are summed apart: whether its own kernel sums them side by side depends on the machine."""
    x, w = normal(5, 1024, dtype=dtype, scale=100.0), normal(64, 1024, dtype=dtype)
    x[:, 1::2], w[:, 1::2] = -x[:, ::2], w[:, ::2] * (1 + 2**-6)
    apart = sum(x[:, i::2].float() @ w[:, i::2].float().T for i in (0, 1)).to(dtype)
    check_error(cpp.linear(x, w), x.double() @ w.double().T, apart)


def test_linear_keeps_denormals_or_drops_them_whole(cpp):
    """BF16 dot products of the hardware treat denormals as zero; nothing else may change."""
    x, w = torch.full((2, 64), 1e-39, dtype=torch.bfloat16), torch.ones(16, 64, dtype=torch.bfloat16)
    exact = x.double() @ w.double().T
    found = cpp.linear(x, w).double()
    assert ((found - exact).abs() <= 2.0**-120).all()
    x[:, 5] = 3.0
    assert (cpp.linear(x, w) == 3.0).all()


def test_linear_passes_non_finite_values_on(cpp):
    for dtype in DTYPES:
        x, w = torch.ones(3, 96, dtype=dtype), torch.ones(20, 96, dtype=dtype)
        x[1, 95], x[2, 3] = float("nan"), float("inf")
        found = cpp.linear(x, w)
        assert torch.equal(found[0], torch.full((20,), 96.0, dtype=dtype))
        assert found[1].isnan().all() and (found[2] == float("inf")).all()


def test_linear_of_strided_rows(cpp):
    packed, w = normal(4, 300, dtype=torch.bfloat16), normal(24, 100, dtype=torch.bfloat16)
    assert torch.equal(cpp.linear(packed[:, 100:200], w), cpp.linear(packed[:, 100:200].contiguous(), w))


@dtypes
@pytest.mark.parametrize("linear_beta", [LINEAR, None])
@pytest.mark.parametrize(("tokens", "width", "columns"), [(1, 64, 128), (5, 37, 96), (64, 48, 64)])
def test_gate_up(cpp, dtype, linear_beta, tokens, width, columns):
    x, w = normal(tokens, columns, dtype=dtype), normal(2 * width, columns, dtype=dtype)
    gate, up = (x.double() @ w.double().T).chunk(2, dim=1)
    plain = situ(torch.nn.functional.linear(x, w), BETA, linear_beta)
    check_error(cpp.gate_up(x, w, BETA, linear_beta), exact_situ(gate, up, BETA, linear_beta), plain)


@dtypes
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 30.0, 1e4])
def test_situ(cpp, dtype, scale):
    x = normal(3, 2 * 83, dtype=dtype, scale=scale)
    gate, up = x.double().chunk(2, dim=1)
    check_error(cpp.situ(x, BETA, LINEAR), exact_situ(gate, up, BETA, LINEAR), situ(x, BETA, LINEAR))


def test_situ_is_accurate_for_each_value(cpp):
    """Relative to each value, from denormals to saturation; not only to the largest."""
    x = torch.cat([torch.logspace(-37, 3, 5000), -torch.logspace(-37, 1.5, 5000)]).repeat(2).view(1, -1)
    gate, up = x.double().chunk(2, dim=1)
    exact = exact_situ(gate, up, BETA, LINEAR)
    error = ((cpp.situ(x, BETA, LINEAR).double() - exact).abs() / exact.abs().clamp_min(2.0**-126)).max()
    assert error < 8 * 2.0**-23, f"relative error {error:.2e}"


# -- AttnRes -----------------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(("n", "tokens", "width"), [(1, 1, 128), (2, 3, 100), (9, 64, 64), (4, 1, 7168)])
@pytest.mark.parametrize("normed", [True, False])
def test_mix(cpp, dtype, n, tokens, width, normed):
    sources = normal(n, tokens + 2, width).to(dtype).float()[:, :tokens]
    delta, score, norm = normal(tokens, width, dtype=dtype), normal(width, scale=0.3), normal(width)
    added = sources.clone()
    added[-1] = (added[-1] + delta).to(dtype)
    mixed = attn_res.mix(added, score, 1e-5)
    exact = attn_res.mix(added.double(), score.double(), 1e-5)
    if normed:
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
        plain = attn_res.rms_norm(mixed, norm, 1e-5, dtype)
    else:
        plain = mixed.to(dtype)
    found = cpp.mix(sources, delta, score, norm if normed else None, 1e-5, dtype)
    assert torch.equal(sources, added), "the prefix is the sum, rounded to the model's dtype; other sources stay"
    check_error(found, exact, plain)


def test_mix_of_one_dominant_source(cpp):
    """A logit far above the others: their weights vanish without a NaN."""
    sources, score = torch.full((4, 2, 64), 1e-3), torch.full((64,), 50.0)
    sources[2] = 100.0
    exact = attn_res.mix(sources.double(), score.double(), 1e-5)
    check_error(cpp.mix(sources, None, score, None, 1e-5, torch.float32), exact, attn_res.mix(sources, score, 1e-5))


@dtypes
def test_rms_norm(cpp, dtype):
    x, weight = normal(5, 203, dtype=dtype, scale=3.0), normal(203)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    check_error(cpp.rms_norm(x, weight, 1e-5, dtype), exact, attn_res.rms_norm(x, weight, 1e-5, dtype))


# -- KDA ---------------------------------------------------------------------------------------------------------------------


def kda_both(cpp, dtype, packed, conv_state, state, slots, w, a_log):
    args = (packed, w.conv, w.f_b, a_log, w.dt_bias.flatten(), w.out_norm, slots.view(-1, 1), conv_state, state)
    exact = kda_reference.decode(*args)
    plain_conv, plain_state = conv_state.clone(), state.clone()
    plain = kda.step(packed, plain_conv, plain_state, slots.long(), w, dtype)
    found = cpp.kda_step(packed, conv_state, state, slots, w, dtype)
    check_error(found, exact[0], plain)
    assert torch.equal(conv_state, plain_conv), "raw inputs are stored as they came"
    check_error(state, exact[2], plain_state)


@dtypes
@pytest.mark.parametrize(("tokens", "heads"), [(1, 2), (3, 1), (17, 2)])
def test_kda(cpp, dtype, tokens, heads):
    packed, conv_state, state, w, a_log = kda_case(tokens, heads, dtype, 20)
    slots = torch.randperm(19)[:tokens] + 1
    kda_both(cpp, dtype, packed, conv_state, state, slots, w, a_log)


@dtypes
@pytest.mark.parametrize("bias", [-60.0, 60.0], ids=["no decay", "decay at its bound"])
def test_kda_at_the_ends_of_the_decay(cpp, dtype, bias):
    packed, conv_state, state, w, a_log = kda_case(3, 1, dtype, 8)
    w.dt_bias.fill_(bias)
    kda_both(cpp, dtype, packed, conv_state, state, torch.tensor([1, 5, 2]), w, a_log)


def test_kda_many_steps_stay_close(cpp):
    """Errors of the state do not build up faster than PyTorch's over 40 steps."""
    packed, conv_state, state, w, a_log = kda_case(2, 1, torch.bfloat16, 4)
    slots = torch.tensor([3, 1])
    exact_conv, exact_state = conv_state.double(), state.double()
    plain_conv, plain_state = conv_state.clone(), state.clone()
    for _ in range(40):
        packed = normal(*packed.shape, dtype=torch.bfloat16)
        args = (packed, w.conv, w.f_b, a_log, w.dt_bias.flatten(), w.out_norm, slots.view(-1, 1), exact_conv, exact_state)
        exact, exact_conv, exact_state = kda_reference.decode(*args)
        plain = kda.step(packed, plain_conv, plain_state, slots, w, torch.bfloat16)
        found = cpp.kda_step(packed, conv_state, state, slots, w, torch.bfloat16)
        check_error(found, exact, plain)
    check_error(state, exact_state, plain_state)


def test_kda_padding_writes_nothing(cpp):
    packed, conv_state, state, w, _ = kda_case(4, 1, torch.bfloat16, 6)
    packed[[0, 2, 3]] = float("nan")
    before = conv_state.clone(), state.clone()
    found = cpp.kda_step(packed, conv_state, state, torch.tensor([0, 4, -1, 0]), w, torch.bfloat16)
    assert (found[[0, 2, 3]] == 0).all() and found[1].isfinite().all()
    rest = [0, 1, 2, 3, 5]
    assert torch.equal(conv_state[rest], before[0][rest]) and torch.equal(state[rest], before[1][rest])
    assert not torch.equal(state[4], before[1][4])


def test_kda_layouts_and_index_types(cpp):
    """Channel-first conv states, pages with gaps between slots, a column of an int32 block table: the same bits."""
    packed, conv_state, state, w, _ = kda_case(3, 1, torch.bfloat16, 6)
    slots = torch.tensor([2, 5, 1])
    page = torch.zeros(6, 2, *state.shape[1:])
    page[:, 0] = state
    turned = conv_state.transpose(1, 2).contiguous().transpose(1, 2)
    table = torch.zeros(3, 7, dtype=torch.int32)
    table[:, 0] = slots
    expected = cpp.kda_step(packed, conv_state, state, slots, w, torch.bfloat16)
    assert torch.equal(cpp.kda_step(packed, turned, page[:, 0], table[:, 0], w, torch.bfloat16), expected)
    assert torch.equal(turned, conv_state) and torch.equal(page[:, 0], state) and (page[:, 1] == 0).all()


# -- KDA over prompts --------------------------------------------------------------------------------------------------------


def prompt_both(cpp, dtype, starts, slots, resumed, case):
    """C++ and PyTorch against the recurrence in float64, token by token."""
    packed, conv_state, state, w, a_log = case
    starts, slots, resumed = torch.tensor(starts), torch.tensor(slots), torch.tensor(resumed)
    exact, exact_conv, exact_state = (
        torch.zeros(len(packed), w.dt_bias.numel(), dtype=torch.float64),
        conv_state.double(),
        state.double(),
    )
    for r, slot in enumerate(slots.tolist()):
        if slot > 0 and starts[r] < starts[r + 1] and not resumed[r]:
            exact_conv[slot], exact_state[slot] = 0, 0
        for t in range(starts[r], starts[r + 1]) if slot > 0 else ():
            args = (packed[t : t + 1], w.conv, w.f_b, a_log, w.dt_bias.flatten(), w.out_norm, slots[r].view(1, 1))
            y, exact_conv, exact_state = kda_reference.decode(*args, exact_conv, exact_state)
            exact[t] = y[0]
    plain_conv, plain_state = conv_state.clone(), state.clone()
    plain = kda.prompt(packed, plain_conv, plain_state, slots, starts, resumed, w, dtype)
    found = cpp.kda_prompt(packed, conv_state, state, slots.int(), starts, resumed, w, dtype)
    check_error(found, exact, plain)
    assert torch.equal(conv_state, plain_conv), "raw inputs are stored as they came"
    check_error(state, exact_state, plain_state)


@dtypes
@pytest.mark.parametrize(
    ("starts", "slots", "resumed"),
    [
        ([0, 1], [2], [False]),
        ([0, 2, 18], [3, 1], [True, False]),
        ([0, 16, 16, 49], [1, 5, 2], [False, False, True]),
        ([0, 3, 10, 27], [0, 4, -1], [True, True, False]),
    ],
    ids=["one token", "shorter than the conv", "chunk edges, one without tokens", "rows without a slot"],
)
def test_kda_prompt(cpp, dtype, starts, slots, resumed):
    prompt_both(cpp, dtype, starts, slots, resumed, kda_case(starts[-1], 2, dtype, 6))


@dtypes
@pytest.mark.parametrize("bias", [-60.0, 60.0], ids=["no decay", "decay at its bound"])
def test_kda_prompt_at_the_ends_of_the_decay(cpp, dtype, bias):
    """At the bound a factor from the chunk's first to its last token would be e^80, past fp32 with the rest of the sum."""
    case = kda_case(40, 1, dtype, 4)
    case[3].dt_bias.fill_(bias)
    prompt_both(cpp, dtype, [0, 40], [1], [True], case)


def test_kda_prompt_where_the_decay_changes_within_a_chunk(cpp):
    """Fifteen tokens at the bound, then one that keeps everything, and the reverse, channel by channel."""
    packed, conv_state, state, w, a_log = kda_case(32, 1, torch.float32, 4)
    f_a = packed[:, 512:640]
    f_a.zero_()
    f_a[::2, 0] = 30.0
    f_a[-4:, 0] = -30.0
    w.f_b.zero_()
    w.f_b[::2, 0], w.f_b[1::2, 0] = 5.0, -5.0
    prompt_both(cpp, torch.float32, [0, 32], [1], [True], (packed, conv_state, state, w, a_log))


def test_kda_prompt_in_pieces(cpp):
    """A prompt cut anywhere, and its decode steps, leave the same states up to rounding: what chunked prefill asks."""
    packed, conv_state, state, w, _ = kda_case(45, 2, torch.float32, 3)
    whole_conv, whole_state, slots = conv_state.clone(), state.clone(), torch.tensor([2])

    def prompt(rows, conv, s, on):
        return cpp.kda_prompt(rows, conv, s, slots, torch.tensor([0, len(rows)]), torch.tensor([on]), w, torch.float32)

    whole = prompt(packed, whole_conv, whole_state, False)
    parts = [prompt(packed[a:b], conv_state, state, a > 0) for a, b in ((0, 1), (1, 20), (20, 43))]
    parts += [cpp.kda_step(packed[t : t + 1], conv_state, state, slots, w, torch.float32) for t in (43, 44)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    torch.testing.assert_close(state, whole_state, rtol=0, atol=1e-5 * float(whole_state.abs().max()))
    assert torch.equal(conv_state, whole_conv)


# -- MLA ---------------------------------------------------------------------------------------------------------------------


def attend_exact(query, cache, table, lengths, latent, scale):
    query, cache, block = query.double(), cache.double(), cache.shape[1]
    out = torch.zeros(*query.shape[:2], latent, dtype=torch.float64)
    for t, length in enumerate(lengths.tolist()):
        if length:
            rows = cache[table[t, : -(-length // block)].long()].reshape(-1, cache.shape[2])[:length]
            out[t] = torch.softmax(query[t] @ rows.T * scale, dim=-1) @ rows[:, :latent]
    return out


@dtypes
@pytest.mark.parametrize(
    "lengths", [[1], [16], [17], [15, 0, 33, 1], [1000], [257, 3, 256, 700]], ids=lambda lengths: "-".join(map(str, lengths))
)
@pytest.mark.parametrize("heads", [1, 6])
def test_attend(cpp, dtype, lengths, heads):
    query, cache, table, ends, latent = attend_case(lengths, heads, dtype)
    args = (query, cache, table, ends, latent, 0.1, max(lengths))
    check_error(cpp.attend(*args), attend_exact(*args[:-1]), mla.attend(*args))


@dtypes
def test_attend_with_sharp_scores(cpp, dtype):
    """Scores of hundreds: without a running maximum the exponentials overflow."""
    query, cache, table, ends, latent = attend_case([300, 40], 4, dtype, scale=30.0)
    args = (query, cache, table, ends, latent, 1.0, 300)
    check_error(cpp.attend(*args), attend_exact(*args[:-1]), mla.attend(*args))


def test_attend_over_a_long_context(cpp):
    """100,000 rows, cut into many parts."""
    query, cache, table, ends, latent = attend_case([100_000, 5], 2, torch.bfloat16, block=128)
    args = (query, cache, table, ends, latent, 0.2, 100_000)
    check_error(cpp.attend(*args), attend_exact(*args[:-1]), mla.attend(*args))


@dtypes
def test_mla_rows(cpp, dtype):
    q_rank, latent, shared, block = 48, 64, 16, 8
    packed, cache = normal(5, q_rank + latent + shared + 40, dtype=dtype), normal(4, block, latent + shared, dtype=dtype)
    q_norm, kv_norm = normal(q_rank), normal(latent)
    slots = torch.tensor([9, -1, 31, 0, -1])
    q_a, kv_a, key = packed[:, :q_rank], packed[:, q_rank : q_rank + latent], packed[:, q_rank + latent :][:, :shared]
    expected = cache.clone()
    rows = torch.cat([attn_res.rms_norm(kv_a, kv_norm, 1e-5, dtype), key], dim=1)
    mla.insert(expected, rows, slots)
    found = cpp.mla_rows(packed, q_norm, kv_norm, 1e-5, cache, slots)
    exact = q_a.double() * torch.rsqrt(q_a.double().square().mean(-1, keepdim=True) + 1e-5) * q_norm.double()
    check_error(found, exact, attn_res.rms_norm(q_a, q_norm, 1e-5, dtype))
    torch.testing.assert_close(cache, expected, rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=0)
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[[9, 31, 0]] = False
    assert torch.equal(cache.view(32, -1)[untouched], expected.view(32, -1)[untouched])
    assert torch.equal(cache.view(32, -1)[[9, 31, 0], latent:], key[[0, 2, 3]])


@dtypes
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_absorb_and_values(cpp, dtype, tokens):
    heads, nope, value, latent, shared = 3, 32, 24, 72, 16
    both = normal(heads, nope + value, latent, dtype=dtype, scale=0.2)
    w_uk, w_uv = both[:, :nope], both[:, nope:]
    q = normal(tokens, heads, nope + shared, dtype=dtype)
    query = cpp.absorb(q, w_uk)
    exact = torch.einsum("thn,hnr->thr", q[..., :nope].double(), w_uk.double())
    check_error(query[..., :latent], exact, torch.einsum("thn,hnr->thr", q[..., :nope], w_uk))
    assert torch.equal(query[..., latent:], q[..., nope:])

    lat, packed = normal(tokens, heads, latent), normal(tokens, 10 + heads * value, dtype=dtype)
    gate = packed[:, 10:]
    exact = torch.einsum("thr,hvr->thv", lat.double(), w_uv.double()).flatten(1) * gate.double().sigmoid()
    plain = torch.einsum("thr,hvr->thv", lat.to(dtype), w_uv).flatten(1)
    check_error(cpp.values(lat, w_uv, gate), exact, (plain.float() * gate.float().sigmoid()).to(dtype))


# -- MoE ---------------------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 64, 8), (5, 33, 4), (64, 16, 16), (2, 896, 16)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route(cpp, dtype, tokens, count, top_k, renormalise):
    x, gate, bias = normal(tokens, 96, dtype=dtype), normal(count, 96, scale=0.1), normal(count, scale=0.2)
    scores = torch.sigmoid(x.double() @ gate.double().T)
    order = torch.sort(scores + bias.double(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    exact = scores.gather(1, order)
    exact = exact / exact.sum(-1, keepdim=True) if renormalise else exact
    ids, weights = cpp.route(x, gate, bias, top_k, renormalise, 2.5)
    assert torch.equal(ids, order)
    logits = x.float() @ gate.T
    check_error(weights, exact * 2.5, moe_front.route(logits, bias, top_k, renormalise, 2.5)[1])


def test_route_breaks_ties_by_the_lower_id(cpp):
    x, gate, bias = torch.ones(2, 16), torch.zeros(40, 16), torch.zeros(40)
    bias[[7, 21, 33]] = 1.0
    ids, weights = cpp.route(x, gate, bias, 5, True, 1.0)
    assert ids.tolist() == [[7, 21, 33, 0, 1]] * 2
    assert torch.equal(weights, torch.full((2, 5), 0.2))


def test_route_of_nan_still_names_experts(cpp):
    """A row of NaN must not become an index out of the table: its request is ended later, by its logits."""
    x, gate, bias = torch.full((1, 16), float("nan")), normal(12, 16), torch.zeros(12)
    ids, weights = cpp.route(x, gate, bias, 4, True, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] and weights.isnan().all()


def experts_exact(x, ids, weights, w, linear_beta=LINEAR):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k, expert in enumerate(ids[t].tolist()):
            if expert >= 0:
                gate, up = (experts_reference.decode(w.w13[expert], w.s13[expert]).double() @ x[t].double()).chunk(2)
                down = experts_reference.decode(w.w2[expert], w.s2[expert]).double()
                out[t] += weights[t, k].double() * (down @ exact_situ(gate, up, BETA, linear_beta))
    return out


def check_experts(cpp, x, ids, weights, w, linear_beta=LINEAR):
    found = cpp.experts(x, ids, weights, w, BETA, linear_beta)
    plain = experts.run(x, ids, weights, w, lambda h: situ(h, BETA, linear_beta))
    check_error(found, experts_exact(x, ids, weights, w, linear_beta), plain)


@dtypes
@pytest.mark.parametrize("linear_beta", [LINEAR, None])
@pytest.mark.parametrize(("tokens", "top_k", "count"), [(1, 4, 8), (3, 2, 5), (7, 3, 4), (64, 4, 6), (130, 2, 3)])
def test_experts(cpp, dtype, tokens, top_k, count, linear_beta):
    x, w = normal(tokens, 96, dtype=dtype), expert_weights(count, 96, 64)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)])
    check_experts(cpp, x, ids, torch.rand(tokens, top_k), w, linear_beta)


@dtypes
def test_one_expert_takes_all_pairs(cpp, dtype):
    """256 pairs of one expert, more than one tile of tokens; the others stay empty."""
    x, w = normal(64, 64, dtype=dtype), expert_weights(3, 64, 32)
    check_experts(cpp, x, torch.full((64, 4), 1), torch.rand(64, 4), w)


def test_experts_padding_and_no_live_row(cpp):
    x, w = normal(3, 64, dtype=torch.bfloat16), expert_weights(3, 64, 32)
    ids, weights = torch.tensor([[2, 0], [-1, -1], [1, -1]]), torch.rand(3, 2)
    x[1] = float("nan")
    weights[1] = float("nan")
    found = cpp.experts(x, ids, weights, w, BETA, LINEAR)
    assert (found[1] == 0).all() and found[[0, 2]].isfinite().all()
    keep = [0, 2]
    check_error(
        found[keep],
        experts_exact(x[keep], ids[keep], weights[keep], w),
        experts.run(x[keep], ids[keep], weights[keep], w, lambda h: situ(h, BETA, LINEAR)),
    )
    assert (cpp.experts(x, torch.full((3, 2), -1), weights, w, BETA, LINEAR) == 0).all()


def test_every_nibble_and_scale_is_decoded_exactly(cpp):
    """Each byte under each scale whose products stay finite, through a unit vector: exact in fp32."""
    latent, width = 32, 32
    w = expert_weights(1, latent, width, 127, 128)
    w.w2[0] = torch.arange(512).view(latent, 16).byte()
    for code in (1, 2, 30, 126, 127, 128, 200):
        w.s2.fill_(code)
        for column in (0, 1, 31):
            w.w13.zero_()
            w.w13[0, column, 0] = w.w13[0, width + column, 0] = 2  # gate = up = x[0]
            x = torch.zeros(1, latent)
            x[0, 0] = 1.0
            hidden = cpp.situ(torch.ones(1, 2), BETA, LINEAR)[0, 0]
            expected = (experts.decode(w.w2[0], w.s2[0], torch.float32)[:, column] * hidden).unsqueeze(0)
            found = cpp.experts(x, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), w, BETA, LINEAR)
            torch.testing.assert_close(found, expected, rtol=2**-22, atol=2.0**-149)
