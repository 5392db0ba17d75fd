"""The choice of experts as compiled, on the PTX machine of the tests: ids, ties, weights, padded rows, pairs by expert."""

from __future__ import annotations

import bulk_machine
import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import moe_front as op
from vllm.model_executor.models.kimi_k3_fast.ops.moe_front.torch_form import route


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("config", "live"),
    [
        (op.TopkConfig(1), 1),
        (op.TopkConfig(3, 48, 4, scaling=2.4, grouped=True), 2),  # fewer warps than choices: every expert is a candidate
        (op.TopkConfig(2, 130, 3, renormalise=False, grouped=True), 2),
        (op.TopkConfig(1, 30, 4, grouped=True), 0),
    ],
    ids=lambda value: f"{value.tokens}x{value.experts}" if isinstance(value, op.TopkConfig) else f"live{value}",
)
def test_the_compiled_choice_is_the_plain_one(config: op.TopkConfig, live: int, ties: bool, shared_store: build.Store) -> None:
    generator = torch.Generator().manual_seed(live)
    logits = torch.randn(config.tokens, config.experts, generator=generator) * 2
    logits = logits.round() if ties else logits
    bias = torch.randn(config.experts, generator=generator) * (0.0 if ties else 0.1)

    def poisoned(n: int) -> torch.Tensor:
        return torch.full((n,), -7, dtype=torch.int32)

    pairs = config.tokens * config.top_k
    tensors = {
        "bias": bias,
        "logits": logits,
        "num_tokens": torch.tensor([live], dtype=torch.int32),
        "ids": poisoned(pairs).view(config.tokens, -1),
        "weights": torch.full((config.tokens, config.top_k), torch.nan),
        "offsets": poisoned(config.experts + 1),
        "pairs": poisoned(pairs),
        "active": poisoned(config.experts),
        "num_active": poisoned(1),
        "arrived": torch.zeros(1, dtype=torch.int32),
    }
    spec = op.topk_spec(config)
    bulk_machine.run(spec, {p.name: tensors[p.name] for p in spec.params}, (config.tokens,), seed=live)
    ids, weights = tensors["ids"], tensors["weights"]
    wanted, wanted_weights = route(logits, bias, config.top_k, config.renormalise, config.scaling)
    assert torch.equal(ids[:live].long(), wanted[:live])
    torch.testing.assert_close(weights[:live], wanted_weights[:live], rtol=2e-6, atol=1e-7)
    assert (ids[live:] == 0).all() and (weights[live:] == 0).all()
    if config.grouped:
        chosen = ids[:live].flatten().long()
        counts = torch.bincount(chosen, minlength=config.experts)
        active = torch.nonzero(counts).flatten()
        assert tensors["offsets"].tolist() == [0, *counts.cumsum(0).tolist()]
        assert tensors["pairs"][: chosen.numel()].tolist() == torch.argsort(chosen, stable=True).tolist()
        assert tensors["num_active"].item() == active.numel()
        assert tensors["active"][: active.numel()].tolist() == active.tolist()
        assert tensors["arrived"].item() == 0
