"""The released checkpoint's format, without vLLM: what its files must hold, checking them, and writing them.

`released_tensors` lists every tensor name and shape that a configuration implies, independently of the model classes (a test
holds the two together). `write_released` writes any set of tensors in that format; `write_tiny` a small random model with every
feature of K3.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from . import mxfp4
from .config import MXFP4_FORMAT, K3Config
from .tokenizer import byte_tokenizer, write_tokenizer

PREFIX = "language_model."
INDEX_NAME = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_HEADER_LIMIT = 100_000_000  # the limit of the safetensors format itself


class CheckpointError(ValueError):
    """The checkpoint cannot be loaded. The message lists everything wrong with it, by file or tensor name."""


class Stored(NamedTuple):
    """A tensor as a file's header declares it."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def inspect_files(directory: Path) -> dict[str, Stored]:
    """Every tensor declared by the safetensors files of `directory`, from their headers alone.

    Raises CheckpointError listing every missing, truncated or corrupt file, and every tensor declared twice.
    """
    index = directory / INDEX_NAME
    problems: list[str] = []
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        problems += [
            f"{n}: expected because {INDEX_NAME} names it, found no such file" for n in names if not (directory / n).exists()
        ]
        files = [directory / n for n in names if (directory / n).exists()]
    else:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            problems.append(f"expected *.safetensors files in {directory}, found none")
    found: dict[str, Stored] = {}
    for file in files:
        try:
            for name, stored in _read_header(file):
                if name in found:
                    problems.append(f"{name}: expected once, found in {found[name].file} and {file.name}")
                found[name] = stored
        except ValueError as error:
            problems.append(f"{file.name}: {error}")
    if problems:
        raise CheckpointError(
            "the checkpoint's files are damaged; fetch or write them again. Nothing was loaded.\n"
            + "\n".join(f"  - {p}" for p in problems)
        )
    return found


def _read_header(file: Path) -> Iterator[tuple[str, Stored]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= _HEADER_LIMIT:
            raise ValueError(f"corrupt: expected a safetensors header length in its first 8 bytes, found {length}")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError(f"truncated: expected a header of {length} bytes, found {len(text)}")
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        declared = [(name, tuple(entry["shape"]), DTYPES.get(entry["dtype"])) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"corrupt: expected a safetensors header in JSON, found something else ({error})") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ValueError(f"{'truncated' if size < expected else 'corrupt'}: expected {expected} bytes, found {size}")
    for name, shape, dtype in declared:
        yield name, Stored(file.name, shape, dtype)


Entry = tuple[str, tuple[int, ...], torch.dtype]


# -- names and shapes ------------------------------------------------------------------------------------------------------------
def released_tensors(c: K3Config) -> Iterator[Entry]:
    """(name without prefix, shape, dtype) of every tensor of the released format, in the order of the layers."""
    bf16, size = torch.bfloat16, c.hidden_size
    yield "model.embed_tokens.weight", (c.vocab_size, size), bf16
    for i in range(c.num_layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (size,), bf16
        yield layer + "post_attention_layernorm.weight", (size,), bf16
        if c.attn_res_block is not None:
            for part in ("self_attention_res", "mlp_res"):
                yield layer + f"{part}_norm.weight", (size,), bf16
                yield layer + f"{part}_proj.weight", (1, size), bf16
        for name, shape, dtype in _kda_tensors(c) if c.is_kda(i) else _mla_tensors(c):
            yield layer + "self_attn." + name, shape, dtype
        if c.is_moe(i):
            yield from ((layer + "block_sparse_moe." + n, s, d) for n, s, d in _moe_tensors(c))
        else:
            yield from ((layer + "mlp." + n, s, d) for n, s, d in _mlp_tensors(c, c.intermediate_size))
    if c.attn_res_block is not None:
        yield "model.output_attn_res_norm.weight", (size,), bf16
        yield "model.output_attn_res_proj.weight", (1, size), bf16
    yield "model.norm.weight", (size,), bf16
    yield "lm_head.weight", (c.vocab_size, size), bf16


def _kda_tensors(c: K3Config) -> Iterator[Entry]:
    bf16, f32 = torch.bfloat16, torch.float32
    width, rank = c.kda_heads * c.kda_head_dim, c.kda_head_dim
    for name in ("q", "k", "v"):
        yield f"{name}_proj.weight", (width, c.hidden_size), bf16
        yield f"{name}_conv1d.weight", (width, 1, c.conv_width), bf16
    yield "f_a_proj.weight", (rank, c.hidden_size), bf16
    yield "f_b_proj.weight", (width, rank), bf16
    yield "b_proj.weight", (c.kda_heads, c.hidden_size), bf16
    if c.full_rank_gate:
        yield "g_proj.weight", (width, c.hidden_size), bf16
    else:
        yield "g_a_proj.weight", (rank, c.hidden_size), bf16
        yield "g_b_proj.weight", (width, rank), bf16
    yield "A_log", (c.kda_heads,), f32
    yield "dt_bias", (width,), f32
    yield "o_norm.weight", (rank,), bf16
    yield "o_proj.weight", (c.hidden_size, width), bf16


def _mla_tensors(c: K3Config) -> Iterator[Entry]:
    bf16 = torch.bfloat16
    query = c.num_heads * (c.nope_dim + c.rope_dim)
    if c.q_lora_rank is None:
        yield "q_proj.weight", (query, c.hidden_size), bf16
    else:
        yield "q_a_proj.weight", (c.q_lora_rank, c.hidden_size), bf16
        yield "q_a_layernorm.weight", (c.q_lora_rank,), bf16
        yield "q_b_proj.weight", (query, c.q_lora_rank), bf16
    yield "kv_a_proj_with_mqa.weight", (c.mla_row_size, c.hidden_size), bf16
    yield "kv_a_layernorm.weight", (c.kv_lora_rank,), bf16
    yield "kv_b_proj.weight", (c.num_heads * (c.nope_dim + c.v_head_dim), c.kv_lora_rank), bf16
    if c.mla_output_gate:
        yield "g_proj.weight", (c.num_heads * c.v_head_dim, c.hidden_size), bf16
    yield "o_proj.weight", (c.hidden_size, c.num_heads * c.v_head_dim), bf16


def _mlp_tensors(c: K3Config, width: int) -> Iterator[Entry]:
    for name in ("gate_proj", "up_proj"):
        yield f"{name}.weight", (width, c.hidden_size), torch.bfloat16
    yield "down_proj.weight", (c.hidden_size, width), torch.bfloat16


def _moe_tensors(c: K3Config) -> Iterator[Entry]:
    assert c.num_experts is not None
    bf16, u8 = torch.bfloat16, torch.uint8
    size, width = c.expert_input_size, c.moe_intermediate_size
    yield "gate.weight", (c.num_experts, c.hidden_size), bf16
    yield "gate.e_score_correction_bias", (c.num_experts,), torch.float32
    if c.latent_size is not None:
        yield "routed_expert_down_proj.weight", (size, c.hidden_size), bf16
        if c.latent_norm:
            yield "routed_expert_norm.weight", (size,), bf16
        yield "routed_expert_up_proj.weight", (c.hidden_size, size), bf16
    for e in range(c.num_experts):
        for name, rows, columns in (("w1", width, size), ("w3", width, size), ("w2", size, width)):
            if c.mxfp4_experts:
                yield f"experts.{e}.{name}.weight_packed", (rows, columns // 2), u8
                yield f"experts.{e}.{name}.weight_scale", (rows, columns // mxfp4.GROUP), u8
            else:
                yield f"experts.{e}.{name}.weight", (rows, columns), bf16
    if c.num_shared_experts:
        yield from (("shared_experts." + n, s, d) for n, s, d in _mlp_tensors(c, c.shared_intermediate_size))


# -- writing ---------------------------------------------------------------------------------------------------------------------
def write_released(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, tokenizer: Any = None, shards: int = 1
) -> None:
    """Write a checkpoint: config.json, generation_config.json, safetensors (with an index for `shards` > 1) and a tokenizer.

    `tensors` has the names that go into the files. `tokenizer` is a `tokenizers.Tokenizer` with the special tokens of
    `.tokenizer`; None writes the byte-level one. Files of an earlier checkpoint in `directory` are removed first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (*directory.glob("*.safetensors"), directory / INDEX_NAME):
        stale.unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    text = config.get("text_config", config)
    generation = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in text}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    _write_tensors(directory, tensors, shards)
    write_tokenizer(directory, byte_tokenizer() if tokenizer is None else tokenizer, text["max_position_embeddings"])


def _write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    names = list(tensors)
    per_file = -(-len(names) // shards)
    pieces = [names[i : i + per_file] for i in range(0, len(names), per_file)]
    weight_map: dict[str, str] = {}
    for i, piece in enumerate(pieces):
        file = "model.safetensors" if len(pieces) == 1 else f"model-{i + 1:05d}-of-{len(pieces):05d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in piece}, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(piece, file))
    if len(pieces) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        (directory / INDEX_NAME).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
        )


def quantization_config() -> dict[str, Any]:
    """The `quantization_config` of the released checkpoint: MXFP4 for the routed experts alone."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": mxfp4.GROUP,
        "symmetric": True,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": MXFP4_FORMAT,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": MXFP4_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\..*",
            "re:.*routed_expert_.*",
            "re:.*gate$",
        ],
    }


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a small K3: both layer kinds, three AttnRes blocks, latent MoE with shared experts, two last MLA layers."""
    tokenizer = byte_tokenizer()
    config = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.token_to_id("[PAD]"),
        "bos_token_id": tokenizer.token_to_id("[BOS]"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8, 9],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "moe_intermediate_size": 64,
        "num_shared_experts": 2,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "attn_res_block_size": 4,
        "num_nextn_predict_layers": 0,
        "quantization_config": quantization_config(),
    }
    return {**config, **overrides}


def tiny_kimi_linear_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a small Kimi-Linear: SiLU, ordinary residuals, BF16 experts at model width, low-rank gate, full query."""
    config = tiny_config()
    for name in ("activation_situ_beta", "activation_situ_linear_beta", "routed_expert_hidden_size", "latent_moe_use_norm"):
        del config[name]
    for name in ("attn_res_block_size", "q_lora_rank", "mla_use_output_gate", "quantization_config"):
        del config[name]
    linear = dict(config["linear_attn_config"])
    del linear["use_full_rank_gate"], linear["gate_lower_bound"]
    config |= {"hidden_act": "silu", "linear_attn_config": linear, "num_shared_experts": 1, "routed_scaling_factor": 2.446}
    return {**config, **overrides}


def random_tensors(
    config: Mapping[str, Any], seed: int = 0, *, prefix: str = PREFIX, a_log_form: str = "flat"
) -> dict[str, torch.Tensor]:
    """Random weights for a configuration, in the released names and dtypes, of a size that keeps activations near one.

    `a_log_form`: how `A_log` is stored: "flat" [H], "4d" (1, 1, H, 1), or "padded" (zeros up to 128).
    """
    generator = torch.Generator().manual_seed(seed)
    c = K3Config.from_hf(dict(config))
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, dtype in released_tensors(c):
        if name.endswith("weight_scale"):
            continue  # written with its packed weight
        if name.endswith("weight_packed"):
            rows, half = shape
            weight = torch.randn(rows, 2 * half, generator=generator) / math.sqrt(2 * half)
            packed, scale = mxfp4.encode(weight)
            tensors[prefix + name] = packed
            tensors[prefix + name.removesuffix("packed") + "scale"] = scale
            continue
        tensor = _random_tensor(name, shape, generator)
        if name.endswith("A_log"):
            tensor = _store_a_log(tensor, a_log_form)
        tensors[prefix + name] = tensor.to(dtype)
    return tensors


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return 0.3 * noise
    if name.endswith("dt_bias"):
        return noise - 2.0  # decay factors between about 0.3 and 1 in both gate forms
    if name.endswith("e_score_correction_bias"):
        return 0.02 * noise
    if "norm.weight" in name:
        return 1.0 + 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    if "conv1d" in name:
        return noise / math.sqrt(shape[-1])
    if name.endswith("lm_head.weight"):
        return noise * (3.0 / math.sqrt(shape[-1]))  # spread logits, so that greedy tokens are not decided by rounding
    return noise / math.sqrt(shape[-1])


def _store_a_log(a_log: torch.Tensor, form: str) -> torch.Tensor:
    if form == "flat":
        return a_log
    if form == "4d":
        return a_log.view(1, 1, -1, 1)
    if form == "padded":
        return torch.cat((a_log, a_log.new_zeros(128 - a_log.numel())))
    raise ValueError(f"a_log_form: expected 'flat', '4d' or 'padded', found {form!r}")


def write_tiny(
    directory: Path, seed: int = 0, *, config: Mapping[str, Any] | None = None, a_log_form: str = "flat", shards: int = 1
) -> None:
    """Write a small random checkpoint with every feature of Kimi K3 (or of `config`), ready to be served."""
    config = tiny_config() if config is None else config
    write_released(directory, config, random_tensors(config, seed, a_log_form=a_log_form), shards=shards)
