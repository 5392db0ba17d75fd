"""A shadowed step: run fast, state put back, run standard, compared; on caches of both kinds, with faults on the fast side."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.fast import watch
from vllm.model_executor.models.kimi_k3_fast.fast.executor import CacheRows, StateSlots
from vllm.model_executor.models.kimi_k3_fast.guard import Guard, Policy, StateView, WriteSet
from vllm.model_executor.models.kimi_k3_fast.model.moe import Judged

BLOCK = 4


@pytest.fixture
def step(tmp_path):
    """(guard, caches, run): `run(fault)` decodes one step of two requests whose recurrence must not be applied twice."""
    torch.manual_seed(0)
    caches = SimpleNamespace(conv=torch.randn(6, 3, 8), state=torch.randn(6, 2, 4, 4), latent=torch.randn(6, BLOCK, 10))
    views = [
        StateView("layers.0.conv", "kda_conv", 0, 0, caches.conv),
        StateView("layers.0.state", "kda_recurrent", 0, 0, caches.state),
        StateView("layers.1.latent", "mla_latent", 1, 1, caches.latent, BLOCK),
    ]
    writes = WriteSet(slots={0: torch.tensor([2, 4])}, rows={1: torch.tensor([5, 18, -1])})
    guard = Guard(Policy(shadow_every=1, events_path=str(tmp_path / "e.jsonl")))
    x = torch.randn(2, 16)

    def forward(fault: float) -> torch.Tensor:
        caches.conv[[2, 4]] = caches.conv[[2, 4]].roll(1, 1) * 0.5
        caches.state[[2, 4]] = caches.state[[2, 4]] * 0.9 + 1.0
        caches.latent.view(-1, 10)[[5, 18]] = x[:, :10]
        return (x + caches.state[[2, 4]].flatten(1)[:, :16]) * (1 + fault)

    def run(fault: float = 0.0, state_fault: float = 0.0, chosen: float = 0.7, noise: float = 0.0) -> torch.Tensor:
        """`chosen`: score of the expert that the fast side took, where the standard side's own has 0.7; `noise`: by how much a
        nudge of the standard side moves that score."""
        runs = iter((0.0, noise))

        def fast(choices: list[torch.Tensor]) -> torch.Tensor:
            choices.append(torch.tensor([[1], [0]]))
            hidden = forward(fault)
            caches.state[4] += state_fault
            return hidden

        @contextmanager
        def impose(choices):
            assert [choice.tolist() for choice in choices] == [[[1], [0]]]
            yield {"layers.0.choice": Judged(torch.full((2, 1), chosen + next(runs)), torch.full((2, 1), 0.7))}

        before = {name: tensor.clone() for name, tensor in vars(caches).items()}
        both = watch.run_both(views, writes, fast, lambda nudge: forward(nudge), lambda hidden: hidden * 2, impose)
        for name, tensor in before.items():
            assert torch.equal(getattr(caches, name), tensor), f"{name}: not put back"
        agreed = watch.shadowed(guard, "decode/t2", views, both, lambda: {"input_ids": torch.tensor([1, 2])}, {})
        assert agreed == (fault == state_fault == 0.0 and 0.7 - chosen < 6 * noise + 1e-6), "a nudge counts twice, and thrice"
        return forward(0.0)

    return guard, caches, forward, run


def test_the_step_leaves_what_one_standard_step_leaves(step):
    guard, caches, forward, run = step
    before = {name: tensor.clone() for name, tensor in vars(caches).items()}
    expected_hidden = forward(0.0)
    expected = {name: tensor.clone() for name, tensor in vars(caches).items()}
    for name, tensor in before.items():
        getattr(caches, name).copy_(tensor)
    assert torch.equal(run(), expected_hidden)
    for name, tensor in expected.items():
        assert torch.equal(getattr(caches, name), tensor), f"{name}: applied twice, or not put back"
    assert guard.report()["violations"]["by_reason"] == {}
    assert guard.report()["counters"]["shadow_steps"] == 1


@pytest.mark.parametrize(
    ("faults", "reason", "tensor"),
    [
        ((1e-2, 0.0), "shadow_logits", ("hidden", "logits")),
        ((0.0, 1e-2), "shadow_state", ("layers.0.state",)),
        ((0.0, 0.0, 0.69), "shadow_choice", ("layers.0.choice",)),
        ((0.0, 0.0, 0.69, 1e-3), "shadow_choice", ("layers.0.choice",)),
    ],
    ids=["output off by 1e-2", "state off by 1e-2", "a worse expert", "a worse expert, and noise that does not explain it"],
)
def test_a_fault_of_the_fast_side_is_named_and_does_not_reach_the_caller(step, faults, reason, tensor):
    guard, caches, forward, run = step
    before = {name: value.clone() for name, value in vars(caches).items()}
    expected = forward(0.0)
    for name, value in before.items():
        getattr(caches, name).copy_(value)
    assert torch.equal(run(*faults), expected), "the caller gets the standard path's numbers"
    report = guard.report()
    assert report["violations"]["by_reason"] == {reason: 1}
    assert report["violations"]["last"][0]["where"]["tensor"] in tensor
    assert guard.quarantined("decode/t2")


def test_an_expert_whose_score_noise_moves_as_far_is_no_fault(step):
    guard, _, _, run = step
    run(chosen=0.69, noise=2e-3)
    assert guard.report()["violations"]["by_reason"] == {}


def test_draws_of_noise_put_the_state_back_and_keep_the_furthest(step, monkeypatch):
    _, caches, forward, _ = step
    monkeypatch.setattr(watch, "DRAWS", 3)
    views = [StateView("layers.0.state", "kda_recurrent", 0, 0, caches.state)]
    writes = WriteSet(slots={0: torch.tensor([2, 4])}, rows={})
    state = caches.state.clone()
    impose = lambda choices: nullcontext({})  # noqa: E731
    both = watch.run_both(views, writes, lambda choices: forward(0.0), lambda nudge: forward(nudge), lambda hidden: None, impose)
    asked = []

    def standard(nudge: float, draw: int) -> torch.Tensor:
        asked.append((nudge, draw))
        return forward(nudge * (2 - abs(draw - 2)))

    found = list(watch.draws(both, views, writes, standard, lambda hidden: None, impose))
    noise = watch.NUDGES * watch.own_error(torch.float32)
    assert asked == [(noise, draw) for draw in (1, 2, 3)]
    assert torch.equal(caches.state, state)
    assert torch.equal(found[-1]["hidden"], forward(2 * noise)), "the second draw's"


def test_a_snapshot_holds_what_the_step_read_and_nothing_else(step):
    """Slots and blocks are numbered anew; what the step overwrote is as it was before."""
    _, caches, forward, _ = step
    views = [
        StateView("layers.0.state", "kda_recurrent", 0, 0, caches.state),
        StateView("layers.1.latent", "mla_latent", 1, 1, caches.latent, BLOCK),
    ]
    writes = WriteSet(slots={0: torch.tensor([2, 4])}, rows={1: torch.tensor([5, 18])})
    state, latent = caches.state.clone(), caches.latent.clone()
    tensors = {
        "kda": StateSlots(torch.tensor([2, 4])),
        # 6 tokens in blocks 3 and 1, 3 tokens in block 4: their last ones are rows 5 and 18
        "mla": CacheRows(torch.tensor([5, 18]), torch.tensor([[3, 1, 0], [4, 5, 0]]), torch.tensor([6, 3]), 6),
    }
    chosen = [torch.tensor([[7, 3], [0, 1]])]

    def fast(choices: list[torch.Tensor]) -> torch.Tensor:
        choices.extend(chosen)
        return forward(0.0)

    impose = lambda choices: nullcontext({})  # noqa: E731
    both = watch.run_both(views, writes, fast, lambda nudge: forward(nudge), lambda hidden: None, impose)
    kept = watch.snapshot(views, ["kda", "mla"], tensors, torch.tensor([11, 12]), both)
    assert torch.equal(kept["choices.0"], chosen[0])
    assert kept["groups.0.slots"].tolist() == [1, 2]
    assert torch.equal(kept["layers.0.state"], state[[2, 4]])
    assert kept["groups.1.block_table"].tolist() == [[2, 1, 0], [3, 0, 0]]
    assert kept["groups.1.slot_mapping"].tolist() == [1 * BLOCK + 1, 3 * BLOCK + 2]
    assert torch.equal(kept["layers.1.latent"], latent[[1, 3, 4]])
