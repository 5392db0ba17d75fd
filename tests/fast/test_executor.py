"""One decode step of the executor: C++ and PyTorch forms give the same hidden states and the same caches, padding included."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.fast.backend import Backend, pick
from vllm.model_executor.models.kimi_k3_fast.fast.executor import CacheRows, Executor, StateSlots
from vllm.model_executor.models.kimi_k3_fast.fast.plan import Plan
from vllm.model_executor.models.kimi_k3_fast.fast.views import Backbone, Dense, Kda, Layer, Mix, Mla, Moe
from vllm.model_executor.models.kimi_k3_fast.ops import cpu
from vllm.model_executor.models.kimi_k3_fast.ops.cpu import library
from vllm.model_executor.models.kimi_k3_fast.ops.experts import torch_form as experts
from vllm.model_executor.models.kimi_k3_fast.ops.kda import torch_form as kda
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

D, HEADS, DIM, LATENT, SHARED, BLOCK, SLOTS = 64, 2, 32, 32, 16, 8, 12


def backbone(dtype: torch.dtype, stored: torch.dtype | None = None) -> Backbone:
    """Four layers: KDA with a dense MLP, then MLA, KDA and MLA with experts; blocks close at layers 0 and 2. `stored`: a narrower
    dtype whose values the weights take."""
    generator, own = torch.Generator().manual_seed(3), dtype

    def draw(*shape: int, scale: float = 0.15, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator) * scale
        return x.to(stored or own).to(own) if dtype is None else x.to(dtype)

    def byte(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    wide, f32 = HEADS * DIM, torch.float32
    mix = lambda: Mix(draw(D, dtype=f32), 1 + draw(D, dtype=f32))  # noqa: E731

    def attention(index: int) -> Kda | Mla:
        if index % 2 == 0:
            weights = kda.Weights(
                draw(3 * wide, 4, scale=0.5, dtype=f32),
                draw(wide, DIM),
                draw(HEADS, 1, dtype=f32).exp(),
                draw(HEADS, DIM, dtype=f32),
                1 + draw(DIM, dtype=f32),
                -5.0,
            )
            states = draw(SLOTS, 3, 3 * wide), draw(SLOTS, HEADS, DIM, DIM, dtype=f32)
            return Kda("kda", draw(4 * wide + DIM + HEADS + 14, D), weights, draw(D, wide), *states)
        both = draw(HEADS, 2 * DIM, LATENT)
        norms = 1 + draw(48, dtype=f32), 1 + draw(LATENT, dtype=f32)
        packed, q_b = draw(48 + LATENT + SHARED + wide, D), draw(HEADS * (DIM + SHARED), 48)
        cache = draw(SLOTS, BLOCK, LATENT + SHARED, scale=1.0)
        return Mla("mla", packed, *norms, 1e-5, q_b, both[:, :DIM], both[:, DIM:], draw(D, wide), cache, 0.15)

    def mlp(index: int) -> Dense | Moe:
        if index == 0:
            return Dense(draw(2 * 96, D), draw(D, 96))
        weights = experts.Weights(
            byte(0, 256, 8, 64, 16), byte(118, 123, 8, 64, 1), byte(0, 256, 8, 32, 16), byte(118, 123, 8, 32, 1)
        )
        norm, shared = 1 + draw(32, dtype=f32), Dense(draw(2 * 48, D), draw(D, 48))
        # The bias decides, so that rounding never chooses between near-tied experts.
        router = draw(8, D, dtype=f32), draw(8, scale=3.0, dtype=f32)
        return Moe(*router, 3, True, 1.5, draw(32, D), weights, norm, draw(D, 32), shared)

    layers = tuple(Layer(i, i % 2 == 0, mix(), attention(i), mix(), mlp(i)) for i in range(4))
    table = draw(20, D, scale=1.0)
    final = dataclasses.replace(mix(), norm=None)
    return Backbone(1, dtype, D, 1e-5, 4.0, 25.0, layers, final, lambda ids: table[ids], lambda x: x, 0)


def caches(views: Backbone) -> list[torch.Tensor]:
    held = [layer.attention for layer in views.layers]
    return [x for view in held for x in ((view.conv_state, view.state) if isinstance(view, Kda) else (view.cache,))]


def run(
    backend: Backend, dtype: torch.dtype, slots: list[int], steps: int, stored: torch.dtype | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states of every step, and the caches after the last."""
    views, tokens = backbone(dtype, stored), len(slots)
    executor, plan = Executor(views, backend, 8), Plan("decode", tokens, 1, backend.name, 1)
    live, hidden = torch.tensor(slots) > 0, []
    table = torch.tensor([[slot, slot + 5] if slot > 0 else [0, 0] for slot in slots], dtype=torch.int32)
    for step in range(steps):
        lengths = torch.where(live, 5 + step, 0)  # crosses from one block into the next
        at = lengths - 1
        rows = torch.where(live, table[torch.arange(tokens), at.clamp_min(0) // BLOCK].long() * BLOCK + at % BLOCK, -1)
        tensors: Any = {"kda": StateSlots(torch.tensor(slots)), "mla": CacheRows(rows, table, lengths, int(lengths.max()))}
        hidden.append(executor.run(plan, torch.arange(tokens) + step, tensors)[live])
    return hidden, caches(views)


@pytest.mark.parametrize("level", cpu.available())
@pytest.mark.parametrize("slots", [[3], [3, 0, 5, -1, 1]], ids=["one", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_both_forms_take_the_same_steps(level, slots, dtype):
    """fp32: the same numbers. BF16: C++ is no further than twice PyTorch's distance from the same weights in fp32."""
    exact = run(pick("torch"), torch.float32, slots, 6, stored=dtype)
    plain, found = run(pick("torch"), dtype, slots, 6), run(pick(level), dtype, slots, 6)
    pairs = zip(*([torch.stack(hidden), *after] for hidden, after in (found, plain, exact)), strict=True)
    for ours, theirs, truth in pairs:
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error, allowed, largest = ((x.double() - truth).abs().max() for x in (ours, theirs, torch.zeros(())))
        slack = 3e-5 if dtype is torch.float32 else 2**-8
        assert error <= 2 * allowed + slack * largest, f"{error:.2e}, PyTorch's {allowed:.2e}, largest value {largest:.2e}"


def test_padding_leaves_every_other_slot_alone():
    before = caches(backbone(torch.bfloat16))
    for backend in (pick("torch"), pick("auto")):
        _, after = run(backend, torch.bfloat16, [3, 0, -1], 6)
        for old, new in zip(before, after, strict=True):
            rest = [i for i in range(SLOTS) if i not in (3, 8)]
            assert torch.equal(old[rest], new[rest]) and not torch.equal(old[3], new[3])


def drawn_steps() -> list[tuple[torch.Tensor, Any]]:
    """Steps of changing width, whose requests change places, over contexts that outgrow the table held at first."""
    steps = []
    for number, slots in enumerate([[3, 7, 1], [7], [1, 3, 0], [7, 3], [2, 3, 7], [5], [7, 1, 4]]):
        live, width = torch.tensor(slots) > 0, len(slots)
        lengths = torch.where(live, 59 + 3 * number + torch.arange(width), 0)  # the ninth block begins at 64
        table = torch.stack([torch.randperm(SLOTS - 1) + 1 for _ in slots])
        at = (lengths - 1).clamp_min(0)
        rows = torch.where(live, table[torch.arange(width), at // BLOCK] * BLOCK + at % BLOCK, -1)
        held = {"kda": StateSlots(torch.tensor(slots)), "mla": CacheRows(rows, table, lengths, int(lengths.max()))}
        steps.append((torch.randint(0, 20, (width,)), held))
    return steps


@pytest.mark.parametrize("level", cpu.available())
def test_a_played_step_is_the_recorded_one(level):
    """One executor, which plays what it recorded, against one made anew for each step: the same bits, experts and caches."""
    torch.manual_seed(1)
    backend, played, fresh = pick(level), backbone(torch.bfloat16), backbone(torch.bfloat16)
    executor, steps = Executor(played, backend, 4), drawn_steps()
    reserved = backend.forms.allocations()
    for ids, tensors in steps + steps:
        plan, once = Plan("decode", len(ids), 1, backend.name, 1), Executor(fresh, backend, 4)
        executor.choices, once.choices = [], []
        found, expected = executor.run(plan, ids, tensors), once.run(plan, ids, tensors)
        assert torch.equal(found, expected) and len(found) == len(ids)
        assert len(executor.choices) == 3 and all(map(torch.equal, executor.choices, once.choices))
    assert all(map(torch.equal, caches(played), caches(fresh)))
    assert backend.forms.allocations() == reserved, "the memory reserved at binding is enough"


def test_a_step_that_fails_is_not_played_again():
    (ids, tensors), *_ = drawn_steps()
    bad = tensors | {"kda": StateSlots(torch.tensor([3, SLOTS, 1]))}
    views = backbone(torch.bfloat16)
    executor, plan = Executor(views, pick("auto"), 4), Plan("decode", 3, 1, "cpp", 1)
    with pytest.raises(ValueError, match="expected slots"):
        executor.run(plan, ids, bad)
    views_of_another = backbone(torch.bfloat16)
    expected = Executor(views_of_another, pick("auto"), 4).run(plan, ids, tensors)
    assert torch.equal(executor.run(plan, ids, tensors), expected)
    with pytest.raises(ValueError, match="expected slots"):  # a played one, too, says what does not fit
        executor.run(plan, ids, bad)


def test_the_choice_has_a_reason(monkeypatch):
    assert (pick("torch").name, pick("torch").refusal) == ("torch", None)
    assert pick("auto").name == f"cpp-{cpu.available()[-1]}" and pick("auto").refusal is None
    reason = Refusal(Reason.CPU_LIBRARY, "none here")
    monkeypatch.setattr("vllm.model_executor.models.kimi_k3_fast.fast.backend.load", lambda: reason)
    assert (pick("auto").name, pick("auto").refusal, str(pick("auto"))) == ("torch", reason, "torch (cpu_library: none here)")
    monkeypatch.undo()
    monkeypatch.setattr(library, "LEVELS", ("portable",))  # a machine that has nothing else
    found = pick("avx2")
    assert found.name == "torch" and found.refusal is not None and found.refusal.reason is Reason.CPU_LIBRARY
