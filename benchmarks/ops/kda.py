"""KDA decode on a TP8 and a TP16 slice: every tactic beside stock's native kernel, which wants f_b as a launch of its own
before it.

    python benchmarks/ops/kda.py --json OUT [--every-tactic --tactics FILE] [--requests 8 16] [--heads 12] [--compile ARCH]

Bytes: state read and written, conv window, f_b, the row of the in-projection and the output. States and weights are cold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock as incumbent
from benchmarks.ops import winners
from benchmarks.ops.ahead import compile_all
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import build, kda

D = kda.D
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def moved(config: kda.Config) -> int:
    width = config.heads * D
    state = config.tokens * config.heads * D * D * 4 + config.requests * config.heads * D * D * 4
    conv = (2 * 3 + config.queries - 1) * 3 * width * 2 * config.requests
    static = width * D * 2 + 3 * width * 16 + width * 4
    return state + conv + static + config.tokens * (config.columns + width) * 2


def tensors(config: kda.Config, copies: int) -> list[dict[str, torch.Tensor]]:
    """Sets that share one pool of state slots but no slot, and no weight."""
    h, width, per_row = config.heads, config.heads * D, 1 + config.drafts
    slots_needed = config.requests * per_row
    state = torch.randn(1 + copies * slots_needed, h, D, D, device="cuda")
    conv = torch.randn(1 + copies * slots_needed, 2 + per_row, 3 * width, device="cuda").bfloat16()
    sets = []
    for i in range(copies):
        made = {
            "x": torch.randn(config.tokens, config.columns, device="cuda").bfloat16(),
            "conv_weight": torch.randn(3 * width, 4, device="cuda"),
            "f_b": (torch.randn(width, D, device="cuda") * D**-0.5).bfloat16(),
            "a_log": torch.rand(h, device="cuda"),
            "dt_bias": torch.randn(width, device="cuda"),
            "norm_weight": torch.ones(D, device="cuda").bfloat16(),
            "slots": (1 + i * slots_needed + torch.arange(slots_needed, device="cuda")).view(-1, per_row).int(),
            "conv_state": conv,
            "state": state,
            "y": torch.empty(config.tokens, width, device="cuda").bfloat16(),
        }
        if config.drafts:
            made["accepted"] = torch.ones(config.requests, dtype=torch.int32, device="cuda")
            made["starts"] = torch.arange(0, config.tokens + 1, config.queries, device="cuda").int()
        sets.append(made)
    return sets


def stock(config: kda.Config, sets: list[dict[str, torch.Tensor]]) -> dict[str, Callable[[int], object]]:
    """What vLLM launches for the same work, where it is installed whole: its native fused decode after f_b for plain steps of 12
    heads and more, its Triton kernels (convolution, recurrence, gated norm) after f_b for 6 heads and for verify steps."""
    h, width, per_row = config.heads, config.heads * D, 1 + config.drafts
    linear = incumbent.linear(sets[0]["x"][:, 4 * width : 4 * width + D], sets[0]["f_b"]) or torch.nn.functional.linear

    def gates(s: dict[str, torch.Tensor]) -> dict[str, object]:
        x = s["x"]
        return {
            "raw_g": linear(x[:, 4 * width : 4 * width + D], s["f_b"]).view(1, -1, h, D),
            "raw_beta": x[:, 4 * width + D : 4 * width + D + h].unsqueeze(0),
            "A_log": s["a_log"],
            "dt_bias": s["dt_bias"],
            "lower_bound": config.lower_bound,
        }

    native = incumbent.kda_decode()
    if native is not None and h in (12, 24, 48, 96) and not config.drafts:
        taps = [s["conv_weight"].view(3, width, 4).transpose(1, 2).contiguous() for s in sets]
        norms = [s["norm_weight"].float() for s in sets]

        def fused(i: int) -> None:
            s = sets[i]
            native(
                x=s["x"][:, : 3 * width],
                weight=taps[i],
                bias=None,
                conv_state=s["conv_state"].transpose(1, 2),
                state_indices=s["slots"][:, 0],
                state=s["state"],
                out=s["y"].view(1, -1, h, D),
                output_gate=s["x"][:, 3 * width : 4 * width].unflatten(1, (h, D)),
                norm_weight=norms[i],
                norm_eps=config.norm_eps,
                **gates(s),
            )

        return {"stock f_b + fused_kda_decode": fused}
    kernels = incumbent.kda_triton()
    if kernels is None:
        return {}
    convolve, packed, recurrent, norm_gated = kernels

    def by_kernel(i: int) -> object:
        s = sets[i]
        first, mixed = s["slots"][:, 0], s["x"][:, : 3 * width]
        conv_state, out = s["conv_state"].transpose(1, 2), torch.empty_like(s["y"]).view(1, -1, h, D)
        options = {"activation": "silu", "conv_state_indices": first, "out": torch.empty_like(mixed)}
        if config.drafts:
            options |= {"num_accepted_tokens": s["accepted"], "query_start_loc": s["starts"], "max_query_len": per_row}
        mixed = convolve(mixed, conv_state, s["conv_weight"], None, **options)
        if config.drafts:
            q, k, v = (part.unflatten(1, (h, D)).unsqueeze(0) for part in mixed.split(width, dim=1))
            recurrent(
                q=q,
                k=k,
                v=v,
                initial_state=s["state"],
                cu_seqlens=s["starts"],
                ssm_state_indices=s["slots"],
                num_accepted_tokens=s["accepted"],
                out=out,
                **gates(s),
            )
        else:
            packed(mixed_qkv=mixed, initial_state=s["state"], state_indices=first, out=out, **gates(s))
        gate = s["x"][:, 3 * width : 4 * width].unflatten(1, (h, D))
        return norm_gated(out, gate.unsqueeze(0), s["norm_weight"], None, "sigmoid", eps=config.norm_eps)

    return {"stock f_b + 3 Triton kernels": by_kernel}


def name(tactic: kda.Tactic) -> str:
    return f"split{tactic.split} threads{tactic.threads} groups{tactic.row_groups} stages{tactic.stages}"


def configs(heads: list[int], only: list[int] | None, verify: bool) -> Iterator[kda.Config]:
    """Plain steps of every batch, and verify steps of 2, 4 and 8 tokens."""
    for h in heads:
        shapes = [(r, 1) for r in BATCHES] + ([(1, 2), (1, 4), (1, 8), (8, 2), (8, 4)] if verify else [])
        for r, q in shapes:
            if not only or r in only:
                yield kda.Config(h, r, kda.columns(h), queries=q, drafts=q - 1)


def chosen(config: kda.Config, every_tactic: bool, arch: str) -> list[kda.Tactic]:
    return kda.tactics(config) if every_tactic else [kda.chosen_tactic(config, arch)]


def cases(every_tactic: bool, wanted: list[kda.Config], arch: str) -> Iterator[Case]:
    for config in wanted:
        copies = copies_for(moved(config))
        sets = tensors(config, copies)
        variants = dict(stock(config, sets))
        for tactic in chosen(config, every_tactic, arch):
            plan = kda.plan(config, arch, tactic)
            variants[name(tactic)] = lambda i, plan=plan, sets=sets: kda.run(plan, **sets[i])
        if config.queries == 1:
            live = sets[0]["state"][1:].view(copies, -1)
            variants["torch state.mul_ (memory alone)"] = lambda i, live=live: live[i].mul_(1.0)
        label = {"slice": f"TP{96 // config.heads}", **{n: getattr(config, n) for n in kda.SHAPE}}
        baseline = next((variant for variant in variants if variant.startswith("stock")), None)
        yield Case(label, moved(config), variants, copies, baseline)
        del sets, variants


if __name__ == "__main__":
    parser = arguments("kda")
    parser.add_argument("--every-tactic", action="store_true", help="compare all tactics, not only the chosen one")
    parser.add_argument("--requests", type=int, nargs="*", help="only these batches")
    parser.add_argument("--heads", type=int, nargs="*", default=[12, 6], help="heads of a rank: 12 is TP8, 6 is TP16")
    parser.add_argument("--plain", action="store_true", help="leave out verify steps")
    parser.add_argument("--tactics", type=Path, help="write the fastest tactics to this table")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    arch = options.compile or build.device_arch()
    wanted = list(configs(options.heads, options.requests, not options.plain))
    compile_all([kda.spec(c, t) for c in wanted for t in chosen(c, options.every_tactic, arch)], arch)
    if options.compile:
        sys.exit()
    timings = main("kda", cases(options.every_tactic, wanted, arch), options)
    if options.tactics:
        fields = {name(t): asdict(t) for c in wanted for t in chosen(c, options.every_tactic, arch)}
        winners.write(options.tactics, arch, timings, fields, kda.SHAPE, options.commit)
