"""Rewrite a small K3 checkpoint in sizes that the GPU kernels take; what it computes stays the same.

    python evals/for_gpu.py checkpoints/k3-tiny OUT

MLA's kernel wants a query rank that is a multiple of 256, and the trained tiny checkpoint has 128. Four times as many rows of
zeros do not change a query, if the norm's weight is halved: the mean of squares is a quarter, its root a half, and a half is
exact in BF16. Only epsilon weighs four times as much. The quantisation is named as vLLM names it for the released wrapper, whose
hook does not run for a bare text model.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TIMES = 4
STEP = 256  # of the query rank, in MLA's kernel


def widen(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor, those of the low-rank query `TIMES` as wide: q_a [r, D] -> [4r, D], its norm, q_b [h*d, r] -> [h*d, 4r]."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("q_a_proj.weight"):
            tensor = torch.cat([tensor, tensor.new_zeros((TIMES - 1) * tensor.shape[0], tensor.shape[1])])
        elif name.endswith("q_a_layernorm.weight"):
            tensor = torch.cat([tensor * TIMES**-0.5, tensor.new_zeros((TIMES - 1) * tensor.shape[0])])
        elif name.endswith("q_b_proj.weight"):
            tensor = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], (TIMES - 1) * tensor.shape[1])], dim=1)
        made[name] = tensor.contiguous()
    return made


def config_for_gpu(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the widened checkpoint. Raises ValueError where widening does not help or is not needed."""
    rank = config["q_lora_rank"]
    if rank % STEP == 0 or (TIMES * rank) % STEP:
        raise ValueError(f"expected a query rank of which {TIMES} times is a multiple of {STEP} and which is none, found {rank}")
    quantization = {"quant_method": "mxfp4", "format": config["quantization_config"]["format"]}
    return {**config, "q_lora_rank": TIMES * rank, "quantization_config": quantization}


def main(source: Path, target: Path) -> None:
    config = config_for_gpu(json.loads((source / "config.json").read_text()))
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json" and file.name != "config.json":
            shutil.copy(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(widen(load_file(source / "model.safetensors")), target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
