"""train's own numerics: the chunk form against its definition, the packed experts against their decoding."""

from __future__ import annotations

import torch
from kda import kda_chunk, kda_recurrent
from mxfp4 import GROUP, VALUES, fake_quantize, pack, unpack

from vllm.model_executor.models.kimi_k3_fast.model import mxfp4 as served


def test_the_chunk_form_equals_the_recurrence_also_at_the_decay_bound() -> None:
    gen = torch.Generator().manual_seed(0)
    for length, shift in ((1, 0.0), (63, -4.0), (150, 4.0)):  # sigmoid near 1: every token decays by almost e^-5
        q, k = (torch.nn.functional.normalize(torch.randn(2, length, 2, 32, generator=gen), dim=-1) for _ in range(2))
        v = torch.randn(2, length, 2, 32, generator=gen)
        g = -5 * torch.sigmoid(torch.randn(2, length, 2, 32, generator=gen) + shift)
        beta = torch.sigmoid(torch.randn(2, length, 2, generator=gen))
        expected = kda_recurrent(q.double(), k.double(), v.double(), g.double(), beta.double())
        own = (kda_recurrent(q, k, v, g, beta) - expected).abs().max()
        assert (kda_chunk(q, k, v, g, beta) - expected).abs().max() < 16 * own + 1e-7


def test_packing_rounds_to_the_nearest_value_and_the_server_decodes_the_same() -> None:
    gen = torch.Generator().manual_seed(1)
    weight = torch.randn(16, 4 * GROUP, generator=gen) * torch.exp2(torch.randint(-20, 8, (16, 1), generator=gen).float())
    packed, scale = pack(weight)
    decoded = unpack(packed, scale)
    grid = torch.tensor(sorted({s * v for v in VALUES for s in (1, -1)}))
    factor = torch.exp2(scale.float() - 127).repeat_interleave(GROUP, -1)
    nearest = (weight[..., None] / factor[..., None] - grid).abs().amin(-1) * factor
    assert torch.equal((weight - decoded).abs(), nearest) or torch.allclose((weight - decoded).abs(), nearest, rtol=1e-6)
    assert torch.equal(fake_quantize(weight), decoded)
    assert torch.equal(served.decode(packed, scale, torch.float32), decoded)


def test_packing_is_idempotent() -> None:
    weight = torch.randn(8, 2 * GROUP, generator=torch.Generator().manual_seed(2))
    once = unpack(*pack(weight))
    assert torch.equal(unpack(*pack(once)), once)
