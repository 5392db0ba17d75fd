"""Kimi K3 cut to the part of one tensor-parallel rank: its config.json, its weights made on the spot, its memory.

On `run_tp` GPUs the slice "TPn" has on each of them the matrices that Kimi K3 has on each of n GPUs: everything that tensor
parallelism divides (heads, widths of experts and MLPs, vocabulary) is multiplied by run_tp / n, everything it replicates (hidden
and latent size, router, number of experts) is whole. Layer 0 is dense, every fourth layer is MLA, the others are KDA.

The weights are random with the released names and dtypes, and reach the model through its own `load_weights`, tensor by tensor
as from files: every rank makes the same full tensors from their names and takes its part. Two engines, or one on another number
of GPUs, therefore hold the same model. Router rows are N(0, 0.05) and the correction bias is 0, which spreads tokens over the
experts as a trained router does; smaller rows would send all of them to the same few. The model learns of the load format by a
plug-in of vLLM (`entry_points`).
"""

from __future__ import annotations

import logging
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points as installed_entry_points
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.k3_random")  # below vLLM's, which prints
LOAD_FORMAT = "k3_random"
WEIGHTS_PLUGIN, FORK_PLUGIN = "k3_random_weights", "kimi_k3_fast"
FORK_ENTRY = "vllm.model_executor.models.kimi_k3_fast:register"
DIVIDED = {"heads": 96, "expert": 3072, "dense": 33792, "vocab": 163840}  # of the whole model
HIDDEN, LATENT, EXPERTS, TOP_K, HEAD, SHARED = 7168, 3584, 896, 16, 128, 2
Q_RANK, KV_RANK, NOPE, ROPE = 1536, 512, 128, 64
# NVLink multicast stays off: on shared hosts a program that dies while using it can take the link down.
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
MXFP4_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
EXPERT = re.compile(r"(.*)experts\.(\d+)\.(w[123])\.weight_(packed|scale)$")


def sizes(full_tp: int, run_tp: int) -> dict[str, int]:
    """The divided sizes of the slice, over all run_tp GPUs. Raises ValueError where K3 does not divide by full_tp."""
    for name, whole in DIVIDED.items():
        if whole % full_tp or full_tp % run_tp:
            raise ValueError(
                f"expected full_tp to divide {name} = {whole} and run_tp to divide full_tp, found {full_tp}, {run_tp}"
            )
    return {name: whole * run_tp // full_tp for name, whole in DIVIDED.items()}


def config(full_tp: int, run_tp: int, layers: int) -> dict[str, Any]:
    """config.json of the slice TP`full_tp` for `run_tp` GPUs."""
    s = sizes(full_tp, run_tp)
    numbers = range(1, layers + 1)
    linear = {
        "kda_layers": [n for n in numbers if n % 4],
        "full_attn_layers": [n for n in numbers if n % 4 == 0],
        "num_heads": s["heads"],
        "head_dim": HEAD,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }
    model = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "head_dim": HEAD,
        "vocab_size": s["vocab"],
        "intermediate_size": s["dense"],
        "rms_norm_eps": 1e-5,
        "attn_res_block_size": 12,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    attention = {
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["heads"],
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": HEAD,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": linear,
    }
    experts = {
        "num_experts": EXPERTS,
        "num_experts_per_token": TOP_K,
        "moe_intermediate_size": s["expert"],
        "num_shared_experts": SHARED,
        "routed_expert_hidden_size": LATENT,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "quantization_config": {"quant_method": "mxfp4", "format": "mxfp4-pack-quantized"},
    }
    return {**model, **attention, **experts}


# -- memory ----------------------------------------------------------------------------------------------------------------------
def expert_bytes(full_tp: int, padded: bool = False) -> int:
    """Bytes of one expert on one rank: three MXFP4 matrices with a scale byte for 32 values. `padded`: at least 256 rows, as
    stock vLLM keeps them."""
    width = DIVIDED["expert"] // full_tp
    return 3 * LATENT * (max(width, 256) if padded else width) * 17 // 32


def layer_bytes(full_tp: int) -> dict[str, int]:
    """BF16 bytes of each part of a layer on one rank, for parts of either kind of layer."""
    heads, width = DIVIDED["heads"] // full_tp, 2 * DIVIDED["expert"] // full_tp
    inner = heads * HEAD
    return {
        "kda": 2 * (HIDDEN * (4 * inner + HEAD + heads) + HEAD * inner + HIDDEN * inner) + 4 * 12 * inner,
        "mla": 2 * (HIDDEN * (Q_RANK + KV_RANK + ROPE + inner) + Q_RANK * heads * (NOPE + ROPE) + HIDDEN * inner)
        + 2 * 2 * KV_RANK * heads * (NOPE + HEAD),  # twice: stock keeps kv_b and, of the same size, its absorbed halves
        "router": 2 * EXPERTS * HIDDEN,
        "latent": 2 * 2 * LATENT * HIDDEN,
        "shared": 2 * 3 * HIDDEN * width,
        "dense": 2 * 3 * HIDDEN * DIVIDED["dense"] // full_tp,
    }


def weight_bytes(full_tp: int, layers: int) -> int:
    """Bytes of the weights of one engine on one GPU."""
    part, mla = layer_bytes(full_tp), layers // 4
    moe = part["router"] + part["latent"] + part["shared"] + EXPERTS * expert_bytes(full_tp, padded=True)
    ends = 2 * 2 * HIDDEN * DIVIDED["vocab"] // full_tp
    return ends + (layers - mla) * part["kda"] + mla * part["mla"] + part["dense"] + (layers - 1) * moe


def token_bytes(layers: int) -> int:
    """Cache bytes of one token on one GPU: one row of latent and rope for each MLA layer, the same on every rank."""
    return (layers // 4) * 2 * (KV_RANK + ROPE)


def floor_bytes(full_tp: int, layers: int, batch: int, context: int) -> int:
    """Bytes that a decode step must move on one GPU: matrices once, the experts that `batch` tokens are expected to choose if
    they choose evenly, KDA states twice, MLA rows once. Router and latent projections count whole, as stock reads them."""
    part, mla, kda = layer_bytes(full_tp), layers // 4, layers - layers // 4
    chosen = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** batch)
    moe = part["router"] + part["latent"] + part["shared"] + int(chosen * expert_bytes(full_tp))
    heads = DIVIDED["heads"] // full_tp
    state = 2 * 4 * heads * HEAD * HEAD * batch * kda
    head = 2 * HIDDEN * DIVIDED["vocab"] // full_tp
    absorbed = part["mla"] - 2 * KV_RANK * heads * (NOPE + HEAD)
    weights = head + kda * part["kda"] + mla * absorbed + part["dense"] + (layers - 1) * moe
    return weights + state + batch * context * token_bytes(layers)


def cache_bytes(full_tp: int, layers: int, total: int, engines: int = 2, overhead: int = 8 << 30) -> int:
    """Cache bytes for each of `engines` (stock's and the fork's, or the fork's alone) that share a GPU of `total` bytes.

    overhead: CUDA context, activations of a prefill chunk and graphs of one engine. The fork reads stock's weights in place; a
    GPU on which it copies the experts has less. Raises ValueError where nothing is left.
    """
    weights = weight_bytes(full_tp, layers)
    left = int(total * 0.97) // engines - weights - overhead
    if left < 1 << 30:
        raise ValueError(
            f"expected room for {engines} engines of {layers} layers of TP{full_tp} in {total / 2**30:.0f} GiB: the weights take "
            f"{weights / 2**30:.1f} GiB in each, {left / 2**30:.1f} GiB is left for each cache. Take fewer layers, or one engine "
            "for both."
        )
    return left


# -- weights ---------------------------------------------------------------------------------------------------------------------
def tensors(
    hf_config: Any, device: Any, seed: int = 0, whole: Callable[[str, Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """(released name, full tensor) of every weight. The tensors of a layer's experts are parts of six large ones.

    whole: is offered each of the six, all experts of a layer in one, under the name of expert 0; those that it takes do not come
    one by one.
    """
    import torch

    from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import released_tensors
    from vllm.model_executor.models.kimi_k3_fast.model.config import K3Config

    def noise(name: str, make: Callable[[torch.Generator], torch.Tensor]) -> torch.Tensor:
        return make(torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + seed))

    text = hf_config if isinstance(hf_config, Mapping) else hf_config.to_dict()
    c = K3Config.from_hf(text.get("text_config", text))
    made: dict[str, torch.Tensor | None] = {}
    for name, shape, dtype in released_tensors(c):
        found = EXPERT.match(name)
        if found is None:
            made.clear()  # the layer's experts are done
            yield name, noise(name, lambda g, n=name, s=shape: normal(n, s, g)).to(dtype)
            continue
        layer, expert, matrix, kind = found.groups()
        key = f"{layer}experts.{matrix}.{kind}"
        if key not in made:
            all_of_them = noise(key, lambda g, k=kind, s=(c.num_experts, *shape): mxfp4(k, s, g))
            made[key] = None if whole is not None and whole(name, all_of_them) else all_of_them
        part = made[key]
        if part is not None:
            yield name, part[int(expert)]


class WholeExperts:
    """Loads a layer's experts in six pieces by stock's own loader, which takes 5376 small ones for seconds of every layer.

    The last expert of each piece is loaded once more, alone, as from a file. Where that changes anything, all are loaded alone.
    """

    def __init__(self, model: Any) -> None:
        self.parameters = dict(model.named_parameters())
        self.pieces = 0

    def __call__(self, name: str, piece: Any) -> bool:
        """Whether it could be loaded whole. name: of expert 0's tensor; piece [experts, rows, columns]."""
        found = EXPERT.match(name)
        assert found is not None
        layer, _, matrix, kind = found.groups()
        target = f".{'w2' if matrix == 'w2' else 'w13'}_weight{'_scale' if kind == 'scale' else ''}"
        names = [n for n in self.parameters if layer in n and n.endswith(target)]
        load = getattr(self.parameters[names[0]], "weight_loader", None) if len(names) == 1 else None
        if load is None:
            return False
        parameter, last = self.parameters[names[0]], piece.shape[0] - 1
        try:
            load(parameter, piece, names[0], shard_id=matrix, expert_id=0)
            whole = parameter.data[last].clone()
            load(parameter, piece[last], names[0], shard_id=matrix, expert_id=last)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            logger.warning("%s is loaded expert by expert: %s", names[0], error)
            return False
        if not bool((whole == parameter.data[last]).all()):
            logger.warning("%s is loaded expert by expert: as a whole it got other bytes", names[0])
            return False
        self.pieces += 1
        return True


def normal(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    """A weight of a size that keeps activations near one, float32."""
    import torch

    draw = torch.randn(shape, generator=generator, device=generator.device)
    if "norm.weight" in name:
        return 1 + 0.1 * draw
    if name.endswith("e_score_correction_bias"):
        return draw.zero_()
    if name.endswith("gate.weight"):
        return draw.mul_(0.05)
    if name.endswith("dt_bias"):
        return draw - 2  # with the next line: decay factors of a token from about 0.3 to almost 1
    if name.endswith("A_log"):
        return 0.3 * draw
    if name.endswith("embed_tokens.weight"):
        return draw
    return draw.mul_(shape[-1] ** -0.5)


def mxfp4(kind: str, shape: tuple[int, ...], generator: Any) -> Any:
    """All codes alike, or scales around the power of two that makes the dequantised matrix of its fan-in's size; uint8."""
    import torch

    made = torch.empty(shape, dtype=torch.uint8, device=generator.device)
    if kind == "packed":
        return made.random_(0, 256, generator=generator)
    middle = 127 + round(math.log2((32 * shape[-1]) ** -0.5 / MXFP4_RMS))
    return made.random_(middle - 1, middle + 2, generator=generator)


def register() -> None:
    """vLLM's plug-in entry: make `load_format="k3_random"` known. Safe to call twice."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomWeights(BaseModelLoader):
        """Weights from their names instead of from files."""

        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            began, device = time.monotonic(), next(p.device for p in model.parameters())
            whole = WholeExperts(model)
            model.load_weights(tensors(model_config.hf_config, device, whole=whole))
            logger.info("random weights in %.1f s, %d pieces of experts whole", time.monotonic() - began, whole.pieces)

    register_model_loader(LOAD_FORMAT)(RandomWeights)


def entry_points(folder: Path) -> list[str]:
    """Make the plug-ins known to every process that has the returned folders on PYTHONPATH: this module's, and the fork's where
    it is put into a vLLM without being installed."""
    known = {point.name for point in installed_entry_points(group="vllm.general_plugins")}
    lines = ["[vllm.general_plugins]", f"{WEIGHTS_PLUGIN} = rank_slice:register"]
    if FORK_PLUGIN not in known:
        lines.append(f"{FORK_PLUGIN} = {FORK_ENTRY}")
    info = folder / "k3_benchmark-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: k3-benchmark\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return [str(folder), str(Path(__file__).parent)]
