"""The kernels that one deployment will ask for on GPUs, compiled ahead: no GPU, no weights, only the model's config.json.

    python -m vllm.model_executor.models.kimi_k3_fast.fast.cuda_ahead MODEL --arch sm_90a --tensor-parallel-size 8 \\
        --max-model-len 131072 --sizes 1,2,4,8,16,32,64

They go where a server looks for them (`K3FAST_KERNELS`, or the user's cache). The sizes are the decode batches that the server
captures; another maximum length or exchange is another set of kernels for MLA or for the sums over ranks. Stock's backend for the
experts is HUMMING on Hopper; where a server is told to take another one, `--experts raw` names the kernels that read copies.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..comm import RANKS
from ..model.config import K3Config
from ..ops import build
from ..ops import experts as experts_op
from ..ops.experts import HUMMING, RAW, padded_columns, padded_rows
from ..ops.experts.torch_form import Weights
from ..ops.kda import columns
from .compile_kernels import compile_missing
from .cuda_executor import Caches, Executor
from .cuda_views import HEAD, Dense, Kda, Layer, Mix, Mla, Model, Moe, Prepared

LATENT_ROW = 576
LEAST_WIDTH = 256  # stock pads a rank's experts to it where a model is divided
SIZES = (1, 2, 4, 8, 16, 32, 64)


def block_size(heads: int) -> int:
    """Tokens of a cache block as vLLM aligns them: multiples of 128 whose BF16 latent rows are no smaller than a KDA slot."""
    slot = 2 * 3 * 3 * heads * HEAD + 4 * heads * HEAD * HEAD
    return -(-slot // (2 * LATENT_ROW * 128)) * 128


def layout_of(arch: str, latent: int, width: int, pitch: int) -> str:
    """The layout of the experts that the kernels will find, with the backend that stock prefers on this architecture."""
    shape = experts_op.Config(1, latent, width, layout=HUMMING, pitch=pitch)
    return HUMMING if arch == "sm_90a" and experts_op.unavailable_reason(shape, arch) is None else RAW


def experts_of(experts: int, latent: int, width: int, pitch: int, layout: str) -> Weights:
    """Experts of one layer without memory. pitch: as stock has widened them, or 0."""

    def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if layout == RAW:
        sizes = ((2 * width, latent // 2), (2 * width, latent // 32), (latent, width // 2), (latent, width // 32))
        return Weights(*(made(torch.uint8, experts, *size) for size in sizes))
    rows, columns, found = padded_rows(2 * (pitch or width)), padded_columns(pitch or width), []
    for n, k in ((rows, latent), (latent, columns)):
        found += [made(torch.int32, experts, k // 16, 2 * n), made(torch.uint8, experts, k // 32, n)]
    return Weights(*found, layout=HUMMING, inner=width, pitch=pitch)


def model_of(c: K3Config, ranks: int, arch: str, layout: str | None = None) -> Model:
    """Views of one rank without memory: shapes and dtypes alone. layout: of the experts, else the one that stock makes. Raises
    ValueError where K3's features are missing."""
    if None in (c.attn_res_block, c.q_lora_rank, c.latent_size, c.num_experts) or not c.mxfp4_experts:
        raise ValueError("expected a configuration with AttnRes, low-rank query, latent experts in MXFP4, found another")
    assert c.attn_res_block is not None and c.q_lora_rank is not None and c.latent_size is not None and c.num_experts is not None

    def bf16(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    def f32(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    d, mix = c.hidden_size, Mix(f32(c.hidden_size), bf16(c.hidden_size))
    rank, latent, experts = c.q_lora_rank, c.latent_size, c.num_experts
    width, shared = c.moe_intermediate_size // ranks, c.num_shared_experts * c.moe_intermediate_size // ranks
    pitch = LEAST_WIDTH if ranks > 1 and width < LEAST_WIDTH else 0

    def attention(i: int) -> Kda | Mla:
        if c.is_kda(i):
            h = c.kda_heads // ranks
            inner, norm = h * HEAD, bf16(HEAD)
            weights = (f32(3 * inner, 4), bf16(inner, HEAD), f32(h), f32(inner), norm, bf16(d, inner))
            return Kda(f"layers.{i}", bf16(columns(h), d), *weights, h, c.gate_lower_bound, 1e-5)
        h = c.num_heads // ranks
        packed, halves = bf16(rank + LATENT_ROW + h * 128, d), (bf16(h, 128, 512), bf16(h, 128, 512))
        query = (bf16(rank), bf16(512), bf16(h * 192, rank))
        return Mla(f"layers.{i}", packed, *query, *halves, bf16(d, h * 128), h, c.rms_norm_eps, 192**-0.5)

    moe = Moe(
        router=bf16(experts, d),
        bias=f32(experts),
        down=bf16(latent, d),
        gate_up=bf16(2 * shared, d),
        experts=experts_of(experts, latent, width, pitch, layout or layout_of(arch, latent, width, pitch)),
        norm=bf16(latent),
        up=bf16(d, latent),
        shared_down=bf16(d, shared),
        top_k=c.experts_per_token,
        renormalise=c.renormalize,
        scaling=c.routed_scaling_factor,
    )
    block = c.attn_res_block
    layers = tuple(
        Layer(
            index=i,
            prev=-(-i // block),
            write=i // block if i % block == 0 else -1,
            attention_mix=mix,
            attention=attention(i),
            mlp_mix=mix,
            mlp=moe if c.is_moe(i) else Dense(lambda x: x),
        )
        for i in range(c.num_layers)
    )
    closed = c.num_attn_res_blocks
    return Model(d, c.rms_norm_eps, c.situ_beta, c.situ_linear_beta, layers, mix, closed, lambda ids: ids, Prepared())


def specs(
    hf_config: Any,
    arch: str,
    ranks: int,
    max_model_len: int,
    sizes: Iterable[int] = SIZES,
    mailbox: bool = False,
    layout: str | None = None,
    posted: int = 0,
) -> list[build.KernelSpec]:
    """Every kernel of these decode batches, once. posted: the setting `posted_tokens`. Raises ValueError where an operator has
    none for a shape."""
    c = K3Config.from_hf(hf_config)
    model, block = model_of(c, ranks, arch, layout), block_size(c.kda_heads // ranks)
    latent = {
        a.name: torch.empty(1, block, LATENT_ROW, device="meta")
        for a in (x.attention for x in model.layers)
        if isinstance(a, Mla)
    }
    pages = dict.fromkeys(latent, -(-max_model_len // block))
    mailbox = mailbox and ranks > 1
    caches = Caches({}, {}, latent)
    return Executor(model, lambda: caches, pages, arch, ranks, mailbox=mailbox, device="meta", posted=posted).specs(sizes)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with config.json, or that file")
    parser.add_argument("--arch", required=True, choices=build.ARCHS)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--exchange", choices=("stock", "mailbox"), help="else mailboxes for 2, 4 and 8 ranks, as a server does")
    parser.add_argument("--posted-tokens", type=int, default=0, help="the setting of that name")
    parser.add_argument("--experts", choices=(RAW, HUMMING), help="layout of the experts' weights, else stock's on ARCH")
    parser.add_argument("--list", action="store_true", help="print the kernels, compile none")
    o = parser.parse_args(arguments)
    file = o.model / "config.json" if o.model.is_dir() else o.model
    sizes = [int(size) for size in o.sizes.split(",")]
    ranks = o.tensor_parallel_size
    mailbox = o.exchange == "mailbox" if o.exchange else ranks in RANKS
    found = specs(json.loads(file.read_text()), o.arch, ranks, o.max_model_len, sizes, mailbox, o.experts, o.posted_tokens)
    if o.list:
        print("\n".join(f"{spec.name}-{build.content_hash(spec, o.arch)}" for spec in found))
        return
    print(f"{len(found)} kernels, {compile_missing(found, o.arch, print)} of them compiled now")


if __name__ == "__main__":
    main()
