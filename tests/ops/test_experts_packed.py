"""MXFP4 experts in stock's packed layout: its description against single indices and stock's own bytes, and the kernels on it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_experts import make_routing, make_weights, play

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import experts as op
from vllm.model_executor.models.kimi_k3_fast.ops.experts import humming
from vllm.model_executor.models.kimi_k3_fast.ops.experts.layout import PackedFirst
from vllm.model_executor.models.kimi_k3_fast.ops.experts.torch_form import GROUP, Weights
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

TENSORS = ("w13", "s13", "w2", "s2")
# (hidden, width, experts) -> SHA-256 of random experts, and of what stock vLLM 0.32.0 made of them on an H200.
STOCKS_OWN = {
    (256, 128, 2): (
        "f7d370d75aa162730f9702924d54515825c1c3d57cdfe2bd8200ebb148695649",
        "0c605b6637f18dbae18befdaaf13253000a08f4b37d667ed7d8827e4c1ca2b29",
    ),
    (3584, 192, 1): (
        "15915911a86baa4466f81ae6e4ef1316a4ea61ffa007db99b0d7c3d0b95e60db",
        "2fa77c7102a5b9f00ceb070c0fb8cd12fc5e9e4fb4b682d75231c21c4b1434a3",
    ),
}


def test_a_nibble_lies_where_the_description_says() -> None:
    codes = torch.randint(0, 256, (2, 128, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = humming.pack_codes(codes)
    assert packed.shape == (2, 6, 256) and packed.dtype == torch.int32
    for row in range(128):
        for column in range(96):
            q, odd, upper = column % 8 // 2, column % 2, column % 16 // 8
            word = row // 64 * 128 + 16 * (row % 8) + 4 * q + row % 64 // 16
            nibble = 4 * odd + 2 * (row % 16 // 8) + upper
            found = packed[:, column // 16, word] >> 4 * nibble & 15
            wanted = codes[:, row, column // 2] >> 4 * odd & 15
            assert torch.equal(found, wanted.int()), (row, column)


@pytest.mark.parametrize(("hidden", "width", "count"), STOCKS_OWN, ids=str)
def test_packing_gives_the_bytes_that_stock_gave(hidden: int, width: int, count: int) -> None:
    generator = torch.Generator().manual_seed(hidden + width)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    def digest(weights: Weights) -> str:
        tensors = (getattr(weights, name).contiguous().view(torch.uint8) for name in TENSORS)
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()

    raw = Weights(
        draw(0, 256, count, 2 * width, hidden // 2),
        draw(110, 140, count, 2 * width, hidden // GROUP),
        draw(0, 256, count, hidden, width // 2),
        draw(110, 140, count, hidden, width // GROUP),
    )
    drawn, stocks = STOCKS_OWN[hidden, width, count]
    assert digest(raw) == drawn, "PyTorch's generator gives other numbers than when stock packed them"
    assert digest(humming.pack(raw)) == stocks


def test_the_scales_of_a_lanes_rows_lie_in_line() -> None:
    scales = torch.randint(0, 255, (2, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = humming.pack_scales(scales)
    for row in range(128):
        assert torch.equal(packed[:, :, row // 64 * 64 + row % 8 * 8 + row % 64 // 8], scales[:, row])


@pytest.mark.parametrize("width", [64, 128, 192])
def test_unpacking_undoes_packing_and_its_padding(width: int) -> None:
    raw = make_weights(op.Config(tokens=1, hidden=256, width=width, experts=3, top_k=1))
    packed = humming.pack(raw)
    rows, columns = -(-2 * width // 256) * 256, -(-width // 128) * 128
    assert packed.w13.shape == (3, 16, 2 * rows) and packed.s13.shape == (3, 8, rows)
    assert packed.w2.shape == (3, columns // 16, 512) and packed.s2.shape == (3, columns // GROUP, 256)
    assert packed.width == width
    back = humming.unpack(packed)
    assert all(torch.equal(getattr(back, name), getattr(raw, name)) for name in TENSORS)


def test_experts_that_stock_widens_are_packed_with_zeros_behind_gate_and_behind_up() -> None:
    raw = make_weights(op.Config(tokens=1, hidden=256, width=64, experts=3, top_k=1))
    packed = humming.pack(raw, pitch=128)
    assert packed.w13.shape == (3, 16, 512) and packed.w2.shape == (3, 8, 512) and (packed.width, packed.pitch) == (64, 128)
    rows = humming.unpack_codes(packed.w13)
    assert torch.equal(rows[:, 128:192], raw.w13[:, 64:]) and not rows[:, 64:128].any() and not rows[:, 192:].any()
    back = humming.unpack(packed)
    assert all(torch.equal(getattr(back, name), getattr(raw, name)) for name in TENSORS)


ON_MACHINE = op.Config(tokens=3, hidden=256, width=64, experts=6, top_k=2, layout=op.HUMMING)
FEW = op.PackedTactic(grouped=False, strip=2, split=2, flight=2, ahead=1, warps=3, depth=2)
FEW_GROUPED = replace(FEW, grouped=True, strip=4, split=4, flight=1, spread=False)


@pytest.mark.parametrize(
    ("config", "tactic", "live", "meet"),
    [
        (ON_MACHINE, FEW, 2, None),  # a padded row
        (replace(ON_MACHINE, width=192), replace(FEW, strip=1, split=1, flight=3, depth=4, spread=False), 3, None),
        (replace(ON_MACHINE, tokens=4), replace(FEW_GROUPED, strip=2, split=1, flight=3, below=4), 4, 2),
        (replace(ON_MACHINE, tokens=2, width=128, pitch=192), replace(FEW, strip=4, flight=3, below=2, warps=2), 2, None),
        (replace(ON_MACHINE, tokens=9, width=128), FEW_GROUPED, 9, 2),  # experts with more tokens than a pass takes
        (replace(ON_MACHINE, tokens=9), replace(FEW_GROUPED, spread=True, below=8, depth=1), 8, None),
    ],
    ids=["pairs", "one row group", "grouped", "widened by stock", "several passes", "eight row groups"],
)
def test_the_compiled_kernels_compute_the_reference(
    config: op.Config, tactic: op.PackedTactic, live: int, meet: int | None, fresh_store: build.Store
) -> None:
    """Their PTX, on the machine of the tests: w13 by a grid of three blocks, then w2; outputs are NaN before."""
    assert op.unavailable_reason(config, "sm_90a") is None
    tactic = op.fitted(config, tactic)
    routing = make_routing(config, num_tokens=live, experts=meet)
    routing.ids[live:] = -1
    play(config, tactic, routing, live, lambda weights: humming.pack(weights, config.pitch), 8 * tactic.below)


@pytest.mark.parametrize("tactic", [op.PACKED, op.PACKED_GROUPED], ids=str)
@pytest.mark.parametrize("width", [64, 192])
def test_the_kernels_compile(
    findings: Callable[[build.KernelSpec, str], list[str]], arch: str, tactic: op.PackedTactic, width: int
) -> None:
    config = replace(op.SMALL, width=width, layout=op.HUMMING)
    for spec in op.plan(config, arch, tactic, compiled=False).specs:
        assert not findings(spec, arch), spec


@pytest.mark.parametrize("width", [3072, 768, 384, 192])
@pytest.mark.parametrize("tokens", op.SERVED_TOKENS)
def test_every_tactic_divides_the_served_shapes(tokens: int, width: int) -> None:
    config = op.Config(tokens=tokens, width=width, layout=op.HUMMING)
    assert op.unavailable_reason(config, "sm_90a") is None
    for tactic in (op.default_tactic(config), *op.tactics(config)):
        assert op.fitted(config, tactic) == tactic
        first = PackedFirst(config.hidden, width, tactic.strip, tactic.split, tactic.flight, tactic.grouped)
        assert first.steps * first.pieces * tactic.split * GROUP == config.hidden and first.finishers <= tactic.split
        assert tactic.flight >= 2 and tactic.depth >= 2 and width % (8 // tactic.below * GROUP) == 0


def test_a_shape_that_was_measured_was_so_at_every_batch() -> None:
    """A batch without a row would take the next larger one's, whose experts have several tokens each."""
    measured: dict[tuple[str, int], set[int]] = {}
    for row in op._measured():
        measured.setdefault((row["layout"], row["width"]), set()).add(row["tokens"])
    assert measured and all(batches == set(op.SERVED_TOKENS) for batches in measured.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [({"width": 96}, "expert width"), ({"hidden": 384}, "latent width"), ({"pitch": 192}, "a pitch of at least 384")],
)
def test_a_shape_that_stock_pads_within_is_refused(change: dict[str, int], words: str) -> None:
    """Gate and up rows must be whole blocks of 64, and w2's rows be all there is."""
    refusal = op.unavailable_reason(replace(op.Config(tokens=8, layout=op.HUMMING), **change), "sm_90a")
    assert refusal is not None and refusal.reason is Reason.OP_SHAPE and words in refusal.detail


# -- on a GPU --------------------------------------------------------------------------------------------------------------------


def packed_by_stock(config: op.Config, raw: Weights) -> Weights:
    """What stock's MXFP4 method makes of a layer's experts on this device. Skips where it does not choose Humming."""
    pytest.importorskip("humming")
    pytest.importorskip("vllm.model_executor.layers.quantization.mxfp4")
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        layer = stock.humming_layer(config, raw)
    if layer is None:
        pytest.skip("stock does not choose Humming here")
    made = (layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)
    return Weights(*(t.data if t.dtype == torch.int32 else t.data.view(torch.uint8) for t in made), inner=config.width)


def test_an_item_has_as_many_warps_as_finish_it() -> None:
    """Each adds up 32 values: with fewer the others' would stay where they are, and who waits for their place would not end."""
    tactic = op.fitted(replace(op.SMALL, tokens=16, hidden=512, layout=op.HUMMING), replace(op.PACKED_GROUPED, split=2))
    assert tactic.split == 4 == PackedFirst(512, 64, tactic.strip, tactic.split, 1, True).finishers


@pytest.mark.parametrize("tactic", [op.PAIRS, op.GROUPED, op.PACKED, op.PACKED_GROUPED], ids=str)
def test_what_w2_reads_early_is_settled_by_w13(tactic: op.Tactic | op.PackedTactic) -> None:
    """The choice of experts stands in front of w13, so w2 may read it early where w13 settles; w13's own output it may not."""
    layout = op.HUMMING if isinstance(tactic, op.PackedTactic) else op.RAW
    config = replace(op.SMALL, tokens=16 if tactic.grouped else 4, layout=layout)
    first, second = op.specs_for(config, op.fitted(config, tactic))
    settled = {p.name for p in second.params if p.access is build.SETTLED}
    written = {p.name for p in first.params if p.access is build.OUTPUT}
    assert first.settles == bool(settled) == (layout == op.HUMMING)
    assert not settled & written and not any(p.access is build.SETTLED for p in first.params)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [384, 192])
def test_gpu_stocks_own_weights_are_what_the_description_packs(width: int) -> None:
    config = op.Config(tokens=1, width=width, experts=3, top_k=2)
    raw = make_weights(config, "cuda", scales=(0, 255))
    stocks, ours = packed_by_stock(config, raw), humming.pack(raw)
    for name in TENSORS:
        theirs, mine = getattr(stocks, name), getattr(ours, name)
        assert theirs.shape == mine.shape and theirs.dtype == mine.dtype, (name, theirs.shape, theirs.dtype)
        assert torch.equal(theirs, mine), f"{name}: {float((theirs != mine).float().mean()):.3f} of the elements differ"
