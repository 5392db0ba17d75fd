"""MLA decode on a TP8 and a TP16 slice: query, attention and value apart and together, several splits of the context side by
side.

Bytes: the weights and the cached rows that a stage must read once. Caches and weights are cold: sets of tensors are taken in
turn.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import build, mla

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "u8": torch.uint8}


def weights_of(config: mla.Config) -> dict[str, torch.Tensor]:
    h = config.heads
    kv_b = (torch.randn(h, 256, mla.LATENT, device="cuda") * mla.LATENT**-0.5).bfloat16()
    return {
        "x": torch.randn(config.tokens, config.columns, device="cuda").bfloat16(),
        "q_norm": torch.ones(config.q_rank, device="cuda").bfloat16(),
        "kv_norm": torch.ones(mla.LATENT, device="cuda").bfloat16(),
        "q_b": (torch.randn(h * 192, config.q_rank, device="cuda") * config.q_rank**-0.5).bfloat16(),
        "w_uk": kv_b[:, :128],
        "w_uv": kv_b[:, 128:],
        "scales": torch.ones(2, device="cuda"),
        "y": torch.empty(config.tokens, h * 128, device="cuda").bfloat16(),
    }


def context_of(config: mla.Config, length: int) -> dict[str, torch.Tensor]:
    pages = config.requests * config.pages
    numbers = torch.randn(pages, config.block_size, mla.ROW, device="cuda").bfloat16()
    cache = numbers.to(torch.float8_e4m3fn).view(torch.uint8) if config.fp8 else numbers
    table = torch.randperm(pages, device="cuda").view(config.requests, config.pages).int()
    last = length - 1
    slots = table[:, last // config.block_size].long() * config.block_size + last % config.block_size
    return {
        "cache": cache,
        "table": table,
        "slot_mapping": slots,
        "lengths": torch.full((config.requests,), length, dtype=torch.int32, device="cuda"),
    }


def scratch_of(plan: mla.Plan) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(shape, dtype=DTYPES[dtype], device="cuda") for name, (shape, dtype) in plan.scratch_shapes().items()
    }


def torch_query(config: mla.Config, s: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same work as stock does it, kernel by kernel, in plain PyTorch (cuBLAS for the products): the incumbent of query."""
    rank = config.q_rank
    q_c = torch.nn.functional.rms_norm(s["x"][:, :rank], (rank,), s["q_norm"], config.norm_eps)
    torch.nn.functional.rms_norm(s["x"][:, rank : rank + mla.LATENT], (mla.LATENT,), s["kv_norm"], config.norm_eps)
    q = torch.nn.functional.linear(q_c, s["q_b"]).view(-1, config.heads, 192)
    return torch.cat([torch.bmm(q[..., :128].transpose(0, 1), s["w_uk"]).transpose(0, 1), q[..., 128:]], dim=-1)


def projections() -> Iterator[Case]:
    arch = build.device_arch()
    for heads in (12, 6):
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            config = mla.Config(heads, tokens, mla.columns(heads), 768, 1)
            plan = mla.plan(config, arch, mla.Tactic(1, 2))
            moved = heads * (192 * config.q_rank + 256 * mla.LATENT) * 2
            copies = copies_for(moved)
            sets = [weights_of(config) for _ in range(copies)]
            context, scratch = context_of(config, 300), scratch_of(plan)
            names = ("x", "q_norm", "kv_norm", "q_b", "w_uk", "scales")

            def query(i: int, plan=plan, sets=sets, context=context, scratch=scratch, names=names) -> None:
                mla.run_query(plan, *(sets[i][n] for n in names), context["slot_mapping"], context["cache"], scratch)

            def value(i: int, plan=plan, sets=sets, scratch=scratch) -> None:
                mla.run_value(plan, sets[i]["x"], sets[i]["w_uv"], sets[i]["y"], scratch)

            label = {"slice": f"TP{96 // heads}", "batch": tokens}
            variants = {"query": query, "torch query": lambda i, c=config, s=sets: torch_query(c, s[i])}
            yield Case(
                {**label, "stage": "query"}, heads * (192 * config.q_rank + 128 * mla.LATENT) * 2, variants, copies, "torch query"
            )
            latent = scratch["latent"].view(tokens, heads, mla.LATENT)

            def torch_value(i: int, sets=sets, latent=latent, c=config) -> torch.Tensor:
                v = (
                    torch.bmm(latent.transpose(0, 1), sets[i]["w_uv"].transpose(1, 2))
                    .transpose(0, 1)
                    .reshape(latent.shape[0], -1)
                )
                return v * torch.sigmoid(sets[i]["x"][:, c.q_rank + mla.ROW : c.q_rank + mla.ROW + v.shape[1]])

            variants = {"value": value, "torch value": torch_value}
            yield Case({**label, "stage": "value"}, heads * 128 * mla.LATENT * 2, variants, copies, "torch value")


def torch_attention(config: mla.Config, s: dict[str, torch.Tensor], query: torch.Tensor, length: int) -> torch.Tensor:
    """Gathered rows, two batched products and a softmax: what PyTorch makes of it without a paged kernel."""
    rows = s["cache"][s["table"].long()].view(config.requests, -1, mla.ROW)[:, :length]
    weights = torch.softmax(torch.bmm(query, rows.transpose(1, 2)).float() * config.scale, dim=-1)
    return torch.bmm(weights.to(rows.dtype), rows[..., : mla.LATENT])


def stock_attention(
    config: mla.Config, sets: list[dict[str, torch.Tensor]], query: torch.Tensor, length: int
) -> Callable[[int], object] | None:
    """FlashAttention 3 as the FLASH_ATTN_MLA backend calls it: splits planned ahead, as for a captured graph."""
    decode, schedule = stock.mla_decode(), stock.mla_schedule()
    if decode is None or schedule is None or config.fp8:
        return None
    latent, rope = query.split([mla.LATENT, mla.ROPE], dim=-1)
    starts = torch.arange(config.requests + 1, device="cuda", dtype=torch.int32)
    common = {"max_seqlen_q": 1, "max_seqlen_k": length, "cu_seqlens_q": starts, "causal": True, "num_splits": 32}
    try:
        ahead = schedule(
            batch_size=config.requests,
            num_heads_q=config.heads,
            num_heads_kv=1,
            headdim=mla.ROPE,
            headdim_v=mla.LATENT,
            cache_seqlens=sets[0]["lengths"],
            qkv_dtype=torch.bfloat16,
            page_size=config.block_size,
            **common,
        )
    except Exception as error:
        print(f"stock FlashAttention 3 does not plan: {error}", file=sys.stderr)
        return None

    def run(i: int) -> object:
        cache = sets[i]["cache"].unsqueeze(-2)
        return decode(
            q=rope,
            k=cache[..., mla.LATENT :],
            v=cache[..., : mla.LATENT],
            q_v=latent,
            seqused_k=sets[i]["lengths"],
            block_table=sets[i]["table"],
            softmax_scale=config.scale,
            fa_version=3,
            scheduler_metadata=ahead,
            **common,
        )

    return run


def attention(every_tactic: bool) -> Iterator[Case]:
    arch = build.device_arch()
    contexts = [(1, 512), (1, 32768), (1, 131072), (1, 1 << 20), (8, 512), (8, 32768), (32, 8192), (64, 2048)]
    for heads, fp8 in ((12, False), (12, True), (6, False)):
        block = (1536 if fp8 else 768) if heads == 12 else 384
        for requests, length in contexts:
            config = mla.Config(heads, requests, mla.columns(heads), block, -(-length // block), fp8=fp8)
            moved = requests * length * mla.ROW * (1 if fp8 else 2)
            copies = copies_for(moved, cap=16)
            sets = [context_of(config, length) for _ in range(copies)]
            scales = torch.ones(2, device="cuda")
            variants: dict[str, Callable[[int], object]] = {}
            for tactic in mla.tactics(config) if every_tactic else [mla.default_tactic(config)]:
                plan = mla.plan(config, arch, tactic)
                scratch = scratch_of(plan)

                def run(i: int, plan=plan, sets=sets, scratch=scratch, scales=scales) -> None:
                    s = sets[i]
                    mla.run_attention(plan, s["cache"], s["table"], s["lengths"], scales, scratch)

                variants[f"splits{tactic.splits} stages{tactic.stages}"] = run
            query = torch.randn(requests, heads, mla.ROW, device="cuda").bfloat16()
            incumbent = stock_attention(config, sets, query, length)
            if incumbent:
                variants["stock FLASH_ATTN_MLA"] = incumbent
            elif not fp8 and requests * length <= 1 << 18:
                variants["plain torch"] = lambda i, c=config, s=sets, q=query, n=length: torch_attention(c, s[i], q, n)
            baseline = next((name for name in variants if not name.startswith("splits")), None)
            label = {"slice": f"TP{96 // heads}", "cache": "fp8" if fp8 else "bf16", "requests": requests, "context": length}
            yield Case(label, moved, variants, copies, baseline)


if __name__ == "__main__":
    parser = arguments("mla")
    parser.add_argument("--stage", choices=("projections", "attention", "all"), default="all")
    parser.add_argument(
        "--every-tactic", action="store_true", help="compare splits and stages of attention, not only the default"
    )
    options = parser.parse_args()
    cases = itertools.chain(
        projections() if options.stage != "attention" else (),
        attention(options.every_tactic) if options.stage != "projections" else (),
    )
    main("mla", cases, options)
