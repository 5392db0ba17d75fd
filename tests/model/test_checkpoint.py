"""The released format: what is written can be loaded in every stored form, and whatever is wrong with it is said at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness
from safetensors.torch import load_file, save_file

from vllm.model_executor.models.kimi_k3_fast.model import checkpoint, loader
from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import (
    CheckpointError,
    random_tensors,
    tiny_config,
    tiny_kimi_linear_config,
)
from vllm.model_executor.models.kimi_k3_fast.model.config import K3Config
from vllm.model_executor.models.kimi_k3_fast.model.layers import Slot, slot

pytestmark = pytest.mark.usefixtures("parallel_groups")
CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)
FIRST = "language_model.model.layers.0."
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3."


@pytest.fixture(scope="module")
def slots(parallel_groups: None) -> dict[str, Slot]:
    return dict(Harness(CONFIG, TENSORS).model.slots())


def load(slots: dict[str, Slot], tensors: dict[str, torch.Tensor], folder: Path | None = None, mtp: int = 0) -> None:
    loader.load(slots, tensors.items(), folder, CONFIG["num_hidden_layers"], mtp)


@pytest.mark.parametrize("config", [tiny_config(), tiny_kimi_linear_config(), tiny_kimi_linear_config(q_lora_rank=48)])
def test_the_model_and_the_format_agree_on_every_tensor(config: dict[str, Any]) -> None:
    model = Harness(config, random_tensors(config)).model
    listed = {name: shape for name, shape, _ in checkpoint.released_tensors(K3Config.from_hf(config))}
    assert {name: target.shapes[0] for name, target in model.slots()} == listed


def test_every_parameter_is_loaded() -> None:
    """Loading fills every element of every parameter but the padding: rows of the projections and of the vocabulary."""
    model = Harness(CONFIG, TENSORS).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(200 if parameter.dtype == torch.uint8 else -1e30)
    load(dict(model.slots()), {n: torch.zeros_like(t) for n, t in TENSORS.items()})
    for name, parameter in model.named_parameters():
        left = int((parameter != 0).sum())
        padding = {"in_proj.weight": 15 * 128, "embed_tokens.weight": 64 * 128, "lm_head.weight": 64 * 128}
        allowed = next((n for end, n in padding.items() if name.endswith(end)), 0)
        assert left <= allowed and left % 128 == 0, f"{name}: {left} elements were not loaded"


@pytest.mark.parametrize(
    "prefixes", [("", ""), ("language_model.model.", "language_model."), ("language_model.", "language_model.")]
)
@pytest.mark.parametrize("form", ["flat", "4d", "padded"])
def test_stored_forms(prefixes: tuple[str, str], form: str) -> None:
    """Every prefix the layers and the head are stored under, and every form of `A_log`."""
    layers, head = prefixes
    layers = layers or "model."
    expected = dict(Harness(CONFIG, TENSORS).model.named_parameters())
    stored = random_tensors(CONFIG, prefix="", a_log_form=form)
    renamed = {(layers + n.removeprefix("model.") if n.startswith("model.") else head + n): t for n, t in stored.items()}
    for name, parameter in Harness(CONFIG, renamed).model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_written_in_shards_and_read_back(tmp_path: Path, slots: dict[str, Slot]) -> None:
    checkpoint.write_released(tmp_path, CONFIG, TENSORS, shards=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    found = checkpoint.inspect_files(tmp_path)
    assert {name: stored.shape for name, stored in found.items()} == {name: tuple(t.shape) for name, t in TENSORS.items()}
    load(slots, TENSORS, tmp_path)
    checkpoint.write_released(tmp_path, CONFIG, TENSORS)
    assert [f.name for f in tmp_path.glob("*.safetensors")] == ["model.safetensors"], "an earlier checkpoint's files stayed"


def broken() -> tuple[dict[str, torch.Tensor], list[str]]:
    """A checkpoint with every kind of wrong shape and name, and the lines that must be reported."""
    tensors = dict(TENSORS)
    del tensors[FIRST + "self_attn.A_log"], tensors[EXPERT + "w2.weight_scale"]
    tensors[FIRST + "self_attn.q_proj.weight"] = torch.zeros(128, 127)
    tensors[EXPERT + "w1.weight_packed"] = torch.zeros(64, 32, dtype=torch.int8)
    tensors["language_model.model.layers.9.input_layernorm.weight"] = torch.ones(128)
    tensors["model.norm.weight"] = torch.ones(128)
    return tensors, [
        "missing: model.layers.0.self_attn.A_log [4]",
        "missing: model.layers.1.block_sparse_moe.experts.3.w2.weight_scale [64, 2]",
        f"mis-shaped: {FIRST}self_attn.q_proj.weight: expected [128, 128], found [128, 127]",
        f"mistyped: {EXPERT}w1.weight_packed: expected uint8, found torch.int8",
        "unexpected: language_model.model.layers.9.input_layernorm.weight [128]",
        "duplicate: model.norm.weight, stored before under another prefix",
    ]


@pytest.mark.parametrize("on_disk", [True, False])
def test_everything_wrong_is_one_error(on_disk: bool, tmp_path: Path, slots: dict[str, Slot]) -> None:
    tensors, lines = broken()
    if on_disk:
        checkpoint.write_released(tmp_path, CONFIG, tensors)
    before = {name: target.dest.clone() for name, target in slots.items()}
    with pytest.raises(CheckpointError) as caught:
        load(slots, {n: torch.zeros_like(t) for n, t in tensors.items()}, tmp_path if on_disk else None)
    text = str(caught.value)
    listed = [line.removeprefix("  - ") for line in text.splitlines() if line.startswith("  - ")]
    # The order in which two tensors of one name come is the file's; either may be called the duplicate.
    assert sorted(line.replace("language_model.", "") for line in listed) == sorted(
        line.replace("language_model.", "") for line in lines
    )
    if on_disk:
        assert "Nothing was loaded" in text
        assert all(torch.equal(before[name], target.dest) for name, target in slots.items()), "something was loaded all the same"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (FIRST + "self_attn.o_proj.weight", float("nan")),
        (FIRST + "mlp.down_proj.weight", float("inf")),
        (EXPERT + "w3.weight_scale", 255),
        ("language_model.model.embed_tokens.weight", float("-inf")),
    ],
)
def test_values_that_are_not_finite(name: str, value: float, slots: dict[str, Slot]) -> None:
    damaged = TENSORS[name].clone()
    damaged.view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=f"not finite: {re.escape(name)} holds NaN or infinity"):
        load(slots, {**TENSORS, name: damaged})


def test_vision_and_draft_tensors_are_left_out(slots: dict[str, Slot]) -> None:
    extra = {"vision_tower.patch_embed.weight": torch.ones(3), "language_model.model.layers.9.eh_proj.weight": torch.ones(2, 4)}
    load(slots, TENSORS | extra, mtp=1)
    with pytest.raises(CheckpointError, match=r"unexpected: language_model\.model\.layers\.9"):
        load(slots, TENSORS | extra)


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "cut in the data":
        file.write_bytes(content[:-100])
    elif how == "cut in the header":
        file.write_bytes(content[:50])
    elif how == "longer than declared":
        file.write_bytes(content + b"\0" * 8)
    elif how == "no header length":
        file.write_bytes(b"\xff" * 8 + content[8:])
    elif how == "no JSON":
        file.write_bytes(content[:8] + b"\x01" * 40 + content[48:])
    elif how == "empty":
        file.write_bytes(b"")


@pytest.mark.parametrize(
    "how", ["cut in the data", "cut in the header", "longer than declared", "no header length", "no JSON", "empty", "gone"]
)
def test_damaged_files(how: str, tmp_path: Path, slots: dict[str, Slot]) -> None:
    checkpoint.write_released(tmp_path, CONFIG, TENSORS, shards=2)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    if how == "gone":
        file.unlink()
    else:
        damage(file, how)
    kept = {name: target.dest.clone() for name, target in slots.items()}
    with pytest.raises(CheckpointError, match=rf"(?s){file.name}.*expected .*found"):
        load(slots, {n: torch.zeros_like(t) for n, t in TENSORS.items()}, tmp_path)
    assert all(torch.equal(kept[name], target.dest) for name, target in slots.items())


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"model.norm.weight": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"model.norm.weight: expected once, found in a.safetensors and b.safetensors"):
        checkpoint.inspect_files(tmp_path)


def test_a_slot_takes_its_rank_s_part() -> None:
    """Rank 1 of 2: rows, columns, and a view into a packed weight."""
    full = torch.arange(24.0).view(6, 4)
    rows, columns, packed = torch.zeros(3, 4), torch.zeros(6, 2), torch.zeros(10, 4)
    loader.copy_into(slot(rows, dim=0, full=6, start=3), full)
    loader.copy_into(slot(columns, dim=1, full=4, start=2), full)
    loader.copy_into(slot(packed[2:5], dim=0, full=6, start=3), full)
    assert torch.equal(rows, full[3:]) and torch.equal(columns, full[:, 2:])
    assert torch.equal(packed[2:5], full[3:]) and packed[:2].sum() == packed[5:].sum() == 0


def test_the_tiny_checkpoint_is_whole_and_repeatable(tmp_path: Path) -> None:
    checkpoint.write_tiny(tmp_path / "a", seed=3)
    checkpoint.write_tiny(tmp_path / "b", seed=3)
    a, b = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized" and all(n.startswith("language_model.") for n in a)
    assert sum(f.stat().st_size for f in (tmp_path / "a").iterdir()) < 8 * 2**20
