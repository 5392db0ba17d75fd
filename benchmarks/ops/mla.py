"""MLA decode on a TP8 and a TP16 slice: query, attention and value apart, several splits of the context side by side.

    python benchmarks/ops/mla.py --json OUT [--stage attention --every-tactic --tactics FILE] [--heads 12] [--cache bf16]
        [--contexts 512 131072] [--requests 1 8] [--compile ARCH]

Bytes: the weights and the cached rows that a stage must read once. Caches and weights are cold: sets of tensors are taken in
turn, or one is many times the L2 cache.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock, winners
from benchmarks.ops.ahead import compile_all
from benchmarks.timing import CALLS, Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import build, mla

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_BYTES = 40 << 30  # of cache in one case
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


def context_of(config: mla.Config, length: int) -> mla.Context:
    """Random pages in a random order, every request with `length` tokens, this step's the last of them."""
    pages = config.requests * config.pages
    numbers = torch.empty(pages, config.block_size, mla.ROW, device="cuda", dtype=torch.bfloat16).normal_()
    cache = numbers.to(torch.float8_e4m3fn).view(torch.uint8) if config.fp8 else numbers
    table = torch.randperm(pages, device="cuda").view(config.requests, config.pages).int()
    last = length - 1
    slots = table[:, last // config.block_size].long() * config.block_size + last % config.block_size
    return mla.Context(slots, cache, table, torch.full((config.requests,), length, dtype=torch.int32, device="cuda"))


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


def torch_value(config: mla.Config, s: dict[str, torch.Tensor], latent: torch.Tensor) -> torch.Tensor:
    v = torch.bmm(latent.transpose(0, 1), s["w_uv"].transpose(1, 2)).transpose(0, 1).reshape(latent.shape[0], -1)
    first = config.q_rank + mla.ROW
    return v * torch.sigmoid(s["x"][:, first : first + v.shape[1]])


def projections(heads_of: list[int]) -> Iterator[Case]:
    """Query (with the cache insert) and value (with the gate), beside the same work in plain PyTorch."""
    arch = build.device_arch()
    for heads in heads_of:
        for tokens in BATCHES:
            config = mla.Config(heads, tokens, mla.columns(heads), 768, 1)
            plan = mla.plan(config, arch, mla.Tactic(1, 2))
            moved = heads * (192 * config.q_rank + 256 * mla.LATENT) * 2
            copies = copies_for(moved)
            sets = [weights_of(config) for _ in range(copies)]
            weights = [mla.Weights(*(s[name] for name in mla.Weights._fields)) for s in sets]
            context, scratch = context_of(config, 300), scratch_of(plan)

            def query(i: int, plan=plan, sets=sets, weights=weights, context=context, scratch=scratch) -> None:
                mla.run_query(plan, sets[i]["x"], weights[i], context, scratch)

            def value(i: int, plan=plan, sets=sets, weights=weights, scratch=scratch) -> None:
                mla.run_value(plan, sets[i]["x"], weights[i], sets[i]["y"], scratch)

            label = {"slice": f"TP{96 // heads}", "batch": tokens}
            variants = {"query": query, "torch query": lambda i, c=config, s=sets: torch_query(c, s[i])}
            bytes_ = heads * (192 * config.q_rank + 128 * mla.LATENT) * 2
            yield Case({**label, "stage": "query"}, bytes_, variants, copies, "torch query")
            latent = scratch["latent"].view(tokens, heads, mla.LATENT)
            variants = {"value": value, "torch value": lambda i, c=config, s=sets, x=latent: torch_value(c, s[i], x)}
            yield Case({**label, "stage": "value"}, heads * 128 * mla.LATENT * 2, variants, copies, "torch value")


def torch_attention(config: mla.Config, c: mla.Context, query: torch.Tensor, length: int) -> torch.Tensor:
    """Gathered rows, two batched products and a softmax: what PyTorch makes of it without a paged kernel."""
    rows = c.cache[c.table.long()].view(config.requests, -1, mla.ROW)[:, :length]
    weights = torch.softmax(torch.bmm(query, rows.transpose(1, 2)).float() * config.scale, dim=-1)
    return torch.bmm(weights.to(rows.dtype), rows[..., : mla.LATENT])


def stock_attention(
    config: mla.Config, sets: list[mla.Context], query: torch.Tensor, length: int
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
            cache_seqlens=sets[0].lengths,
            qkv_dtype=torch.bfloat16,
            page_size=config.block_size,
            **common,
        )
    except Exception as error:
        print(f"stock FlashAttention 3 does not plan: {error}", file=sys.stderr)
        return None

    def run(i: int) -> object:
        cache = sets[i].cache.unsqueeze(-2)
        return decode(
            q=rope,
            k=cache[..., mla.LATENT :],
            v=cache[..., : mla.LATENT],
            q_v=latent,
            seqused_k=sets[i].lengths,
            block_table=sets[i].table,
            softmax_scale=config.scale,
            fa_version=3,
            scheduler_metadata=ahead,
            **common,
        )

    return run


def shapes(heads_of: list[int], formats: list[str], contexts: list[int], batches: list[int]) -> Iterator[tuple[mla.Config, int]]:
    """Configs and context lengths whose cache fits into a third of the device's memory."""
    for heads in heads_of:
        for fp8 in (name == "fp8" for name in formats):
            block = (1536 if fp8 else 768) if heads == 12 else 384
            for length in contexts:
                for requests in batches:
                    config = mla.Config(heads, requests, mla.columns(heads), block, -(-length // block), fp8=fp8)
                    if bytes_of(config, length) <= MOST_BYTES:
                        yield config, length


def bytes_of(config: mla.Config, length: int) -> int:
    return config.requests * length * mla.ROW * (1 if config.fp8 else 2)


def name(tactic: mla.Tactic) -> str:
    return f"splits{tactic.splits} stages{tactic.stages}"


def chosen(config: mla.Config, every_tactic: bool, arch: str) -> list[mla.Tactic]:
    return mla.tactics(config) if every_tactic else [mla.chosen_tactic(config, arch)]


def attention(every_tactic: bool, wanted: list[tuple[mla.Config, int]], arch: str) -> Iterator[Case]:
    """Attention over the cache with the merge of its shares, beside stock's FlashAttention 3 or plain PyTorch."""
    for config, length in wanted:
        moved = bytes_of(config, length)
        copies = 1 if moved > 1 << 29 else copies_for(moved, cap=16)  # one is ten times the L2 cache then
        sets = [context_of(config, length) for _ in range(copies)]
        nothing = torch.ones(2, device="cuda")
        weights = mla.Weights(*[nothing] * 5, scales=nothing)  # attention takes the scales alone
        variants: dict[str, Callable[[int], object]] = {}
        for tactic in chosen(config, every_tactic, arch):
            plan = mla.plan(config, arch, tactic)
            scratch = scratch_of(plan)

            def run(i: int, plan=plan, sets=sets, scratch=scratch, weights=weights) -> None:
                mla.run_attention(plan, weights, sets[i], scratch)

            variants[name(tactic)] = run
        query = torch.randn(config.requests, config.heads, mla.ROW, device="cuda").bfloat16()
        incumbent = stock_attention(config, sets, query, length)
        if incumbent:
            variants["stock FLASH_ATTN_MLA"] = incumbent
        elif not config.fp8 and config.requests * length <= 1 << 18:
            variants["plain torch"] = lambda i, c=config, s=sets, q=query, n=length: torch_attention(c, s[i], q, n)
        baseline = next((variant for variant in variants if not variant.startswith("splits")), None)
        fields = {"heads": config.heads, "requests": config.requests, "queries": 1, "fp8": config.fp8}
        label = {"slice": f"TP{96 // config.heads}", **fields, "context": length}
        calls = max(1, min(CALLS, (32 << 30) // moved))
        yield Case(label, moved, variants, copies, baseline, calls)
        del sets, variants


if __name__ == "__main__":
    parser = arguments("mla")
    parser.add_argument("--stage", choices=("projections", "attention", "all"), default="all")
    parser.add_argument("--heads", type=int, nargs="*", default=[12, 6], help="heads of a rank: 12 is TP8, 6 is TP16")
    parser.add_argument("--cache", nargs="*", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 32768, 131072, 524288, 1 << 20])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument(
        "--every-tactic", action="store_true", help="compare splits and stages of attention, not only the chosen one"
    )
    parser.add_argument("--tactics", type=Path, help="write the fastest tactics of attention to this table")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    arch = options.compile or build.device_arch()
    wanted = (
        list(shapes(options.heads, options.cache, options.contexts, options.requests)) if options.stage != "projections" else []
    )
    plans = [mla.plan(c, arch, t, load=False) for c, _ in wanted for t in chosen(c, options.every_tactic, arch)]
    specs = [plan.specs[stage] for plan in plans for stage in ("attend", "merge") if stage in plan.specs]
    if options.stage != "attention":
        every = [mla.Config(h, t, mla.columns(h), 768, 1) for h in options.heads for t in BATCHES]
        specs += [s for c in every for s in mla.plan(c, arch, mla.Tactic(1, 2), load=False).specs.values()]
    compile_all(dict.fromkeys(specs), arch)
    if options.compile:
        sys.exit()
    cases = itertools.chain(
        projections(options.heads) if options.stage != "attention" else (), attention(options.every_tactic, wanted, arch)
    )
    timings = main("mla", cases, options)
    if options.tactics:
        attending = [t for t in timings if "context" in t.label]
        fields = {name(t): asdict(t) for c, _ in wanted for t in chosen(c, options.every_tactic, arch)}
        winners.write(options.tactics, arch, attending, fields, mla.SHAPE, options.commit)
