"""Routed experts at load: read as stock packs them, where the kernels know that layout, else copied before stock repacks."""

from __future__ import annotations

from types import SimpleNamespace as Module

import pytest
import torch
from cuda_fakes import Packs

from vllm.model_executor.models.kimi_k3_fast.fast.cuda_views import KeptExperts
from vllm.model_executor.models.kimi_k3_fast.ops import experts as op
from vllm.model_executor.models.kimi_k3_fast.ops.experts import humming

NAMES = ("w13", "s13", "w2", "s2")


class Marlin(Packs):
    mxfp4_backend = Module(name="MARLIN")


def raw(width: int = 64, hidden: int = 256) -> dict[str, torch.Tensor]:
    """Three experts as stock has loaded them."""
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "w13_weight": (2 * width, hidden // 2),
        "w13_weight_scale": (2 * width, hidden // 32),
        "w2_weight": (hidden, width // 2),
        "w2_weight_scale": (hidden, width // 32),
    }
    return {name: torch.randint(0, 255, (3, *size), dtype=torch.uint8, generator=generator) for name, size in sizes.items()}


def loaded(
    method: Packs, tensors: dict[str, torch.Tensor], noted: Module | None = None
) -> tuple[KeptExperts, Module, tuple[int, int]]:
    """The experts after stock has processed them, stock's module, and the bytes that were announced before."""
    routed = Module(quant_method=method, moe_config=noted, **{name: tensor.clone() for name, tensor in tensors.items()})
    kept, size = KeptExperts("layer 1", routed), KeptExperts.bytes_of(routed)
    method.process_weights_after_loading(routed)
    return kept, routed, size


def test_packed_experts_are_stocks_own_memory() -> None:
    tensors = raw()
    kept, routed, size = loaded(Packs(), tensors)
    assert size == (sum(t.numel() for t in tensors.values()), 0)
    w = kept.weights
    assert w is not None and w.layout == op.HUMMING and w.width == 64
    theirs = (routed.w13_weight, routed.w13_weight_scale, routed.w2_weight, routed.w2_weight_scale)
    assert [getattr(w, name).data_ptr() for name in NAMES] == [t.data_ptr() for t in theirs]
    back = humming.unpack(w)
    assert all(torch.equal(getattr(back, name), tensor) for name, tensor in zip(NAMES, tensors.values(), strict=True))


@pytest.mark.parametrize("method", [Packs(), Marlin()], ids=["in place", "copied"])
def test_experts_that_stock_widens_with_zeros_are_read_as_wide_as_they_are(method: Packs) -> None:
    narrow, wide = raw(64), raw(192)
    for name in ("w13_weight", "w13_weight_scale"):
        split, real = wide[name].view(3, 2, 192, -1), narrow[name].view(3, 2, 64, -1)
        split.zero_()
        split[:, :, :64] = real
    for name in ("w2_weight", "w2_weight_scale"):
        wide[name].zero_()
        wide[name][:, :, : narrow[name].shape[2]] = narrow[name]
    noted = Module(intermediate_size_per_partition_unpadded=64)
    kept, _, (shared, copied) = loaded(method, wide, noted)
    w = kept.weights
    assert w is not None and w.width == 64
    if w.layout == op.HUMMING:
        assert (w.pitch, shared, copied) == (192, sum(t.numel() for t in wide.values()), 0)
        w = humming.unpack(w)
    else:
        assert (shared, copied) == (0, w.bytes)
    assert all(torch.equal(getattr(w, name), tensor) for name, tensor in zip(NAMES, narrow.values(), strict=True))
    wide["w13_weight"][2, 100, 3] = 1
    kept, _, _ = loaded(type(method)(), wide, noted)
    assert kept.weights is None and "expected zeros in the rows behind 64" in kept.problem


@pytest.mark.parametrize(("method", "width"), [(Marlin(), 64), (Packs(), 96)], ids=["another backend", "rows not in blocks"])
def test_what_the_kernels_cannot_read_in_place_is_copied(method: Packs, width: int) -> None:
    tensors = raw(width)
    kept, _, size = loaded(method, tensors)
    assert size == (0, sum(t.numel() for t in tensors.values()))
    assert kept.weights is not None and kept.weights.layout == op.RAW and kept.weights.width == width
    assert all(torch.equal(getattr(kept.weights, name), t) for name, t in zip(NAMES, tensors.values(), strict=True))


def test_packing_of_another_kind_is_named() -> None:
    """Activations of eight bits: another order of the nibbles."""
    kept, _, _ = loaded(Packs("float8e4m3"), raw())
    assert kept.weights is None and "layer 1, w13: expected packing for" in kept.problem and "float8e4m3" in kept.problem


def test_packing_of_another_shape_is_named() -> None:
    method = Packs()
    process = method.process_weights_after_loading

    def pad(layer: Module) -> None:
        process(layer)
        layer.w2_weight = torch.nn.functional.pad(layer.w2_weight, (0, 128))

    method.process_weights_after_loading = pad  # type: ignore[method-assign]
    kept, _, _ = loaded(method, raw())
    assert kept.weights is None and "layer 1, packed w" in kept.problem


def test_a_nan_scale_is_refused_whatever_the_layout() -> None:
    for method in (Packs(), Marlin()):
        tensors = raw()
        tensors["w2_weight_scale"][1, 2, 0] = 255
        kept, _, _ = loaded(method, tensors)
        assert kept.weights is None and "found 255" in kept.problem
