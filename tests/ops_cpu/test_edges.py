"""What does not fit is refused with what was expected and found, before anything is written: never undefined behaviour."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import attend_case, expert_weights, kda_case, normal

from vllm.model_executor.models.kimi_k3_fast.ops.cpu import library
from vllm.model_executor.models.kimi_k3_fast.ops.kda import torch_form as kda
from vllm.model_executor.models.kimi_k3_fast.scope.rules import CPU_SIZES

BF16, INT = torch.bfloat16, torch.int64


def refused(call, *says: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    missing = [part for part in ("expected", "found", *says) if part not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def test_linear(best):
    x, w = torch.zeros(2, 32), torch.zeros(8, 32)
    refused(lambda: best.linear(x, w[:, :31]), "weight", "32", "(8, 31)")
    refused(lambda: best.linear(x.bfloat16(), w), "weight", "bfloat16", "float32")
    refused(lambda: best.linear(x.double(), w.double()), "float32 or bfloat16", "float64")
    refused(lambda: best.linear(x.T.contiguous().T, w), "contiguous rows", "strides (1, 2)")
    refused(lambda: best.linear(x, torch.zeros(32, 8).T), "weight", "strides")
    refused(lambda: best.linear(x.expand(1, 2, 32)[0, :1].expand(2, 32), w), "ldx", "0")
    refused(lambda: best.linear(x.to("meta"), w), "meta")


def test_dense_others(best):
    refused(lambda: best.gate_up(torch.zeros(1, 8), torch.zeros(7, 8), 4.0, 25.0), "even number of rows")
    refused(lambda: best.situ(torch.zeros(1, 7), 4.0, 25.0), "even number of columns")
    refused(lambda: best.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5, torch.float32), "weight", "(8,)")
    sources, score = torch.zeros(2, 3, 8), torch.zeros(8)
    refused(lambda: best.mix(sources, torch.zeros(2, 8), score, None, 1e-5, torch.float32), "delta", "(3, 8)")
    refused(lambda: best.mix(sources, None, score, None, 1e-5, torch.float16), "float16")
    refused(lambda: best.mix(sources.transpose(0, 1), None, score, None, 1e-5, torch.float32), "each source contiguous")
    refused(lambda: best.mix(torch.zeros(65, 3, 8), None, score, None, 1e-5, torch.float32), "n from 1 to 64", "65")
    refused(
        lambda: best.mix(torch.zeros(1, 3, 8).expand(2, 3, 8), None, score, None, 1e-5, torch.float32), "24 elements apart", "0"
    )


def test_kda_prompt(best):
    packed, conv_state, state, w, _ = kda_case(5, 1, BF16, 6)
    before = conv_state.clone(), state.clone()

    def prompt(starts=(0, 3, 5), slots=(1, 2), resumed=(True, False), w=w, index=INT, flag=torch.bool):
        where = torch.tensor(slots), torch.tensor(starts, dtype=index), torch.tensor(resumed, dtype=flag)
        return lambda: best.kda_prompt(packed, conv_state, state, *where, w, BF16)

    refused(prompt(starts=(1, 3, 5)), "starts from 0 to 5", "found 1 to 5")
    refused(prompt(starts=(0, 3, 6)), "found 0 to 6")
    refused(prompt(starts=(0, 3, 4)), "found 0 to 4")
    refused(prompt(starts=(0, 2**40, 5)), "ascending", str(2**40))
    refused(prompt(starts=(0, -1, 5)), "ascending", "-1")
    refused(prompt(starts=(0, 5)), "starts", "(3,)")
    refused(prompt(index=torch.int32), "starts", "int64")
    refused(prompt(flag=INT), "resumed", "bool")
    refused(prompt(slots=(1, 6)), "slots", "found 6 in row 1")
    refused(prompt(slots=(4, 4)), "distinct slots")
    refused(prompt(w=dataclasses.replace(w, lower_bound=-10.5)), "-10 to 0", "-10.5")
    refused(prompt(w=dataclasses.replace(w, lower_bound=float("nan"))), "-10 to 0")
    assert torch.equal(conv_state, before[0]) and torch.equal(state, before[1]), "a refused prompt wrote state"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kda(best, dtype):
    packed, conv_state, state, w, _ = kda_case(3, 1, BF16, 6)
    before = conv_state.clone(), state.clone()

    def step(slots=(1, 2, 3), packed=packed, conv_state=conv_state, state=state, w=w):
        return lambda: best.kda_step(packed, conv_state, state, torch.tensor(slots, dtype=dtype), w, BF16)

    refused(step((1, 6, 2)), "slots", "6)", "found 6 in row 1")
    refused(step((1, 2**31 - 1, 2)), "2147483647")
    refused(step((4, 1, 4)), "distinct slots", "4 in rows 0 and 2")
    refused(step((1, 2)), "(3,)")
    refused(step(packed=packed[:, :600]), "at least")
    refused(step(packed=packed.float()), "bfloat16")
    refused(step(state=state.bfloat16()), "float32")
    refused(step(conv_state=conv_state[:, :2]), "conv_state")
    refused(step(w=dataclasses.replace(w, f_b=w.f_b[:, ::2])), "f_b", "contiguous")
    refused(step(w=dataclasses.replace(w, conv=w.conv[:100])), "conv")
    narrow = dataclasses.replace(w, dt_bias=w.dt_bias[:, :24], f_b=w.f_b[:24], conv=w.conv[:72], out_norm=w.out_norm[:24])
    refused(step(w=narrow, conv_state=torch.zeros(6, 3, 72), state=torch.zeros(6, 1, 24, 24)), "dim a multiple of 16", "24")
    assert torch.equal(conv_state, before[0]) and torch.equal(state, before[1]), "a refused step wrote state"
    step((-5, 0, -(2**31)))()
    assert torch.equal(conv_state, before[0]) and torch.equal(state, before[1])


def test_mla(best):
    query, cache, table, lengths, latent = attend_case([17, 3], 2, BF16)

    def attend(cache=cache, table=table, lengths=lengths, query=query):
        return lambda: best.attend(query, cache, table, lengths, latent, 0.1, 17)

    refused(attend(lengths=torch.tensor([33, 3])), "lengths", "[0, 33)", "33 in row 0")
    refused(attend(lengths=torch.tensor([1, -1])), "-1 in row 1")
    for bad in (-1, cache.shape[0], 2**31 - 1):
        other = table.clone()
        other[0, 1] = bad
        refused(attend(table=other), "block ids", str(bad))
        assert attend(table=other, lengths=torch.tensor([16, 3]))().isfinite().all(), "an id behind the end is not read"
    refused(attend(table=table.float()), "int32 or int64")
    refused(attend(table=table.T), "block_table")
    refused(attend(cache=cache[..., :-1]), "cache")
    refused(attend(query=normal(2, 129, 80, dtype=BF16)), "heads from 1 to 128", "129")

    packed, norms = normal(2, 200, dtype=BF16), (torch.ones(48), torch.ones(latent))
    before = cache.clone()
    rows = lambda slots: best.mla_rows(packed, *norms, 1e-5, cache, torch.tensor(slots))  # noqa: E731
    count = cache.shape[0] * cache.shape[1]
    refused(lambda: rows([0, count]), "slot_mapping", str(count))
    refused(lambda: rows([2**62, 0]), str(2**62))
    refused(lambda: rows([5, 5]), "distinct")
    refused(lambda: best.mla_rows(packed[:, :100], *norms, 1e-5, cache, torch.tensor([0, 1])), "at least")
    assert torch.equal(before.view(torch.int16), cache.view(torch.int16)), "a refused step wrote rows"
    refused(lambda: best.absorb(normal(2, 3, 48), normal(3, 32, 8, dtype=BF16)), "w_uk")
    refused(lambda: best.values(normal(2, 3, 8), normal(3, 4, 8), normal(3, 12)), "gate")


def test_moe(best):
    x, w = normal(2, 64, dtype=BF16), expert_weights(3, 64, 32)
    run = lambda ids, x=x, w=w: best.experts(x, torch.tensor(ids), torch.ones(2, 2), w, 4.0, 25.0)  # noqa: E731
    refused(lambda: run([[0, 1], [3, 0]]), "ids", "3)", "found 3 in row 2")
    refused(lambda: run([[0, 1], [2**40, 0]]), str(2**40))
    refused(lambda: run([[0, 1]]), "ids", "(2, 2)")
    refused(lambda: run([[0, 1], [1, 0]], x=normal(2, 32, dtype=BF16)), "w13")
    refused(lambda: run([[0, 1], [1, 0]], w=dataclasses.replace(w, s2=w.s2[:, ::2])), "s2")
    refused(lambda: best.route(normal(1, 8), normal(4, 8), torch.zeros(4), 5, True, 1.0), "top_k from 1 to 4", "5")
    refused(lambda: best.route(normal(1, 8), normal(4, 8, dtype=BF16), torch.zeros(4), 2, True, 1.0), "gate", "float32")


def at_size(best, name: str, size: int) -> None:
    """The operator that bounds a size of `rules.CPU_SIZES`, with that size."""
    f32, i64 = torch.float32, INT
    if name == "KDA head width":
        w = kda.Weights(normal(3 * size, 4), normal(size, 2), torch.ones(1, 1), normal(1, size), torch.ones(size), -5.0)
        state = torch.zeros(2, 3, 3 * size), torch.zeros(2, 1, size, size)
        best.kda_step(normal(1, 4 * size + 3), *state, torch.ones(1, dtype=i64), w, f32)
    elif name == "KDA conv width":
        packed, _, state, w, _ = kda_case(1, 1, f32, 2)
        w = dataclasses.replace(w, conv=normal(384, size))
        best.kda_step(packed, torch.zeros(2, size - 1, 384), state, torch.ones(1, dtype=i64), w, f32)
    elif name == "MLA heads":
        table, lengths = torch.zeros(1, 1, dtype=i64), torch.ones(1, dtype=i64)
        best.attend(normal(1, size, 8), normal(1, 4, 8), table, lengths, 4, 1.0, 1)
    elif name == "MLA key width":
        best.absorb(normal(1, 1, size), normal(1, size, 8))
    elif name == "AttnRes sources":
        best.mix(normal(size, 1, 8), None, normal(8), None, 1e-5, f32)
    elif name == "experts of a token":
        best.route(normal(1, 8), normal(600, 8), normal(600), size, True, 1.0)
    else:
        latent, width = (size, 32) if name == "expert input" else (32, size)
        w = expert_weights(1, latent, width)
        best.experts(normal(1, latent), torch.zeros(1, 1, dtype=i64), torch.ones(1, 1), w, 4.0, 25.0)


@pytest.mark.parametrize("name", CPU_SIZES)
def test_the_bounds_of_the_scope_rule_are_those_of_the_library(best, name):
    low, high, multiple = CPU_SIZES[name]
    small = high < 2**20  # the others are bounded by memory long before
    for size in {low, high} if small else {low, 3 * multiple}:
        at_size(best, name, size)
    for size in ({high + multiple, high + 1} if small else set()) | ({low + multiple // 2} if multiple > 1 else set()):
        with pytest.raises(ValueError, match="expected"):
            at_size(best, name, size)


def test_the_last_row_of_a_table_is_no_edge(best):
    """The largest index that fits, of every operator that takes one: what is refused above starts right behind it."""
    packed, conv_state, state, w, _ = kda_case(1, 1, BF16, 6)
    assert best.kda_step(packed, conv_state, state, torch.tensor([5]), w, BF16).any()
    query, cache, _, _, latent = attend_case([3], 2, BF16)
    last = torch.tensor([[cache.shape[0] - 1]])
    cache[-1] = 1.0
    assert (best.attend(query, cache, last, torch.tensor([cache.shape[1]]), latent, 0.1, 16) - 1).abs().max() < 1e-5
    weights = expert_weights(3, 64, 32)
    ids = torch.tensor([[2]])
    assert best.experts(normal(1, 64), ids, torch.ones(1, 1), weights, 4.0, 25.0).any()


@pytest.mark.parametrize("size", [2**31 + 1, 2**40, 2**62])
def test_sizes_whose_product_passes_the_integers_are_refused(best, size):
    """Straight at the C ABI, where a caller's arithmetic is not trusted: no pointer is read, every operator names the size."""
    where, n = torch.zeros(64, dtype=INT).data_ptr(), size
    calls = {
        "linear": (where, n, where, n, where, 0, 1, 1, n, 1),
        "gate_up": (where, n, where, n, where, 0, 1, 1, n, 4.0, 25.0, 1, 1),
        "mix": (where, n, None, where, None, where, 0, 2, n, 4, 1e-5, 1),
        "rms_norm": (where, n, where, where, 0, 1, n, 1e-5),
        "situ": (where, n, where, 0, 1, n, 4.0, 25.0, 1, 1),
        "kda": (where, n, where, where, 0, where, n, where, 8, 1, *[where] * 6, 0, 1, n, 128, 1, 1, -5.0, -1, None, None, 1),
        "mla_rows": (where, n, where, where, where, where, 0, n, n, 1, 8, where, 8, 1, 0, 1, 1, 4, 4, 1e-5),
        "mla_absorb": (where, where, 1, n, where, 0, 1, n, 1, n, 1, 1),
        "mla_attend": (where, where, 0, n, n, 1, 8, where, 8, 1, n, where, 8, 1, where, 0, 1, 1, 8, 4, 1.0, 1),
        "mla_value": (where, where, 1, n, where, n, where, 0, 1, n, 1, n, 1),
        "route": (where, n, where, where, where, where, 0, 1, n, 8, 1, 1, 1.0, 1),
        "experts": (where, n, where, where, *[where] * 5, 0, 1, 1, n, 32, 32, 4.0, 25.0, 1, 1),
        "reserve": (n, 1, 1, 1, 1, 1, 1),
    }
    assert set(calls) == set(library.SIGNATURES) - {"set_level"}, "an operator was added"
    for name, arguments in calls.items():
        with pytest.raises(ValueError, match=r"expected .* found") as error:
            best._call(name, *arguments)
        assert str(size) in str(error.value) or name == "mix", f"{name}: {error.value}"


def test_a_matrix_past_two_gib_elements_is_addressed_whole(best):
    """Sizes whose product passes 2^31: rows of a strided view that lie past it are read where they are."""
    memory = torch.empty(2**31 + 2**16, dtype=BF16)  # not touched but for a few pages
    rows = memory.as_strided((3, 64), (2**30, 1))
    rows.copy_(torch.arange(3).unsqueeze(1) + torch.zeros(3, 64))
    x = torch.ones(1, 64, dtype=BF16)
    assert best.linear(x, rows).tolist() == [[0.0, 64.0, 128.0]]
    cache = memory.as_strided((3, 2, 64), (2**30, 64, 1))
    packed = torch.ones(1, 128, dtype=BF16)
    best.mla_rows(packed, torch.ones(32), torch.ones(48), 1e-5, cache, torch.tensor([5]))
    assert (memory[2**31 + 64 : 2**31 + 128].float() - 1).abs().max() < 2**-7
