"""Write the model as a checkpoint of the released format, and read one back.

Routed experts are packed MXFP4, the router's correction bias, `A_log` and `dt_bias` are float32, all else is BF16.
"""

import json
from pathlib import Path

import torch
import vocabulary as vb
from model import TinyConfig, TinyK3, hf_config
from mxfp4 import pack, unpack
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias")
EXPERTS = ".block_sparse_moe.experts."


def released_tensors(model: TinyK3) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if EXPERTS in name:
            stem, which = name.rsplit(".", 1)
            for expert, weight in enumerate(value):
                packed, scale = pack(weight)
                out[f"{stem}.{expert}.{which}.weight_packed"] = packed
                out[f"{stem}.{expert}.{which}.weight_scale"] = scale
        else:
            out[name] = value.to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16).contiguous()
    return out


def save_checkpoint(model: TinyK3, folder: Path, metadata: dict[str, str]) -> int:
    """Weights, configuration and tokenizer into `folder`; returns the weights' size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(released_tensors(model), path, metadata={"format": "pt", **metadata})
    specials = {"pad_token_id": vb.PAD, "bos_token_id": vb.BEGIN, "eos_token_id": vb.END}
    (folder / "config.json").write_text(json.dumps(hf_config(model.cfg, specials), indent=1) + "\n")
    generation = {**specials, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    vb.save_tokenizer(folder, model.cfg.max_position_embeddings)
    return path.stat().st_size


def load_checkpoint(folder: Path, cfg: TinyConfig, model: TinyK3) -> None:
    """Fill `model` with a checkpoint's values, widened to float32: what a server computes with, exactly."""
    tensors = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        if EXPERTS in name:
            stem, which = name.rsplit(".", 1)
            state[name] = torch.stack(
                [
                    unpack(tensors[f"{stem}.{e}.{which}.weight_packed"], tensors[f"{stem}.{e}.{which}.weight_scale"])
                    for e in range(cfg.num_experts)
                ]
            )
        else:
            state[name] = tensors[name].float()
    model.load_state_dict(state)
