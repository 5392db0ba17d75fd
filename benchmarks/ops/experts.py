"""Routed MXFP4 experts at the shapes of TP8 and TP16 ranks: every tactic side by side, and stock vLLM for the same work.

    python benchmarks/ops/experts.py --json OUT [--tp 8,16] [--batches 1,2,4,8,16,32,64] [--parts both]
        [--layout raw,humming] [--table TACTICS]
    ncu --set full --clock-control none python benchmarks/ops/experts.py --once w13 --batches 8 [--tp 8]

Parts: `w13` and `w2` alone; `both`, all from chosen experts to the weighted sum, where stock's variant sorts, multiplies, applies
SiTU, multiplies and sums; `routed`, the same with the choice of experts in front, whose launch also groups the pairs for the
tactics that want them grouped. `--table` writes the tactic of each shape that was fastest in `both`, with where the number comes
from: the file that `plan` reads. `--once` launches one part three times with the default tactic, for a profiler.

`--layout`: where the weights lie as in the checkpoint and as stock keeps them, side by side.

One layer's experts (2 GB for a TP8 rank) stay; every call of a graph routes its tokens to other experts, drawn evenly, so
weights come from memory as they do in a model. `moved`: codes and scales of the distinct experts of a call, on average. Stock's
output is compared with ours before anything is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import stock
from ahead import compile_all
from timing import Case, Timing, arguments, main, provenance

from vllm.model_executor.models.kimi_k3_fast.ops import build, moe_front, posted
from vllm.model_executor.models.kimi_k3_fast.ops import experts as op
from vllm.model_executor.models.kimi_k3_fast.ops.experts import humming, reference
from vllm.model_executor.models.kimi_k3_fast.ops.experts.torch_form import Weights

ROUTINGS = 24  # as many calls as one graph holds: no call meets the experts of the last one in the cache
STOCK = "stock (Humming, indexed)"
PARTS = ("w13", "w2", "both", "routed")


def draw_weights(config: op.Config) -> Weights:
    e, length, width = config.experts, config.hidden, config.width

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

    return Weights(
        draw(0, 256, e, 2 * width, length // 2),
        draw(118, 124, e, 2 * width, length // 32),
        draw(0, 256, e, length, width // 2),
        draw(118, 124, e, length, width // 32),
    )


@dataclasses.dataclass
class Call:
    """The tensors of one batch: a routing, and the logits that lead to it, for every call of a graph."""

    config: op.Config
    weights: dict[str, Weights]  # by layout
    routings: list[op.Routing]
    logits: list[torch.Tensor]
    z: torch.Tensor
    scratch: op.Scratch
    out: torch.Tensor
    bias: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def draw(cls, config: op.Config, weights: dict[str, Weights]) -> Call:
        routings, logits = [], []
        for _ in range(ROUTINGS):
            scores = torch.randn(config.tokens, config.experts, device="cuda") * 2
            best = scores.topk(config.top_k)
            chosen = torch.sigmoid(best.values)
            chosen /= chosen.sum(1, keepdim=True)
            routings.append(reference.group(config, best.indices.int(), chosen, config.tokens))
            logits.append(scores)
        z = torch.randn(config.tokens, config.hidden, device="cuda").bfloat16()
        hidden = torch.zeros(config.pairs, config.width, dtype=torch.bfloat16, device="cuda")
        zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        bias = torch.zeros(config.experts, device="cuda")
        return cls(config, weights, routings, logits, z, op.Scratch(hidden), torch.zeros_like(z), bias, zero)

    @property
    def distinct(self) -> float:
        """Experts that a call touches, on average."""
        return sum(int(routing.num_active) for routing in self.routings) / ROUTINGS

    def moved(self, part: str) -> int:
        """Bytes of weights that a call must read."""
        row = self.config.width * (self.config.hidden // 2 + self.config.hidden // 32)
        return round(self.distinct * row * {"w13": 2, "w2": 1}.get(part, 3))

    def ours(self, i: int, plan: op.Plan, part: str, choice: posted.Plan | None = None) -> None:
        routing = self.routings[i]
        if choice:
            r = routing
            groups = (r.offsets, r.pairs, r.active, r.num_active, self.arrived)
            listed = moe_front.Groups(*groups) if choice.config.grouped else None  # type: ignore[arg-type]
            moe_front.run_topk(choice, self.logits[i], self.bias, r.num_tokens, r.ids, r.weights, listed)
        weights = self.weights[plan.config.layout]
        if part == "w13":
            op.run_w13(plan, weights, self.z, routing, self.scratch)
        elif part == "w2":
            op.run_w2(plan, weights, routing, self.scratch, self.out)
        else:
            op.run(plan, weights, self.z, routing, self.scratch, self.out)

    def theirs(self, i: int, run: Callable[..., None], choose: Callable[..., object] | None = None) -> None:
        ids, weights = self.routings[i].ids, self.routings[i].weights
        if choose:
            weights, ids = choose(self.logits[i], self.bias, self.config.top_k)  # type: ignore[misc]
        run(self.z, ids, weights, self.out)


def stock_experts(config: op.Config, weights: Weights) -> Callable[[Call], Callable[..., None]] | None:
    """Stock's experts on a copy of these weights in stock's layout; a batch's `Call` -> run(z, ids, weights, out). None, with the
    reason on stderr, where vLLM cannot be imported whole or refuses.
    """
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.fused_humming_moe import HummingIndexedExperts
        from vllm.model_executor.layers.quantization.utils.humming import get_humming_moe_quant_config

        with set_current_vllm_config(VllmConfig()):
            layer = stock.humming_layer(config, weights)
            if layer is None:
                return None
            experts = HummingIndexedExperts(layer.moe_config, get_humming_moe_quant_config(layer))
        experts.get_global_valid_shape_m = lambda ids: ids.numel()  # the model asks its forward context, which is not here
    except Exception as error:  # vLLM's import fails in many ways where it is not installed whole
        print(f"stock experts are not here: {type(error).__name__}: {error}", file=sys.stderr)
        return None

    def of_batch(call: Call) -> Callable[..., None]:
        one, two, _ = experts._workspace_shapes(call.config.tokens, config.top_k, MoEActivation.SITU)
        spaces = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in (one, two)]

        def run(z: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
            experts.apply(
                output=out,
                hidden_states=z,
                w1=layer.w13_weight,
                w2=layer.w2_weight,
                topk_weights=chosen,
                topk_ids=ids,
                activation=MoEActivation.SITU,
                global_num_experts=config.experts,
                expert_map=None,
                a1q_scale=None,
                a2_scale=None,
                workspace13=spaces[0],
                workspace2=spaces[1],
                expert_tokens_meta=None,
                apply_router_weight_on_input=False,
            )

        return run

    return of_batch


def agree(call: Call, plan: op.Plan, run: Callable[..., None]) -> None:
    """Both compute the same thing. Raises AssertionError."""
    call.ours(0, plan, "both")
    ours = call.out.float().clone()
    call.theirs(0, run)
    difference = float((ours - call.out.float()).norm() / ours.norm())
    assert difference < 0.02, f"stock's experts differ from ours by {difference:.3f} of the norm"


def lay_out(raw: Weights, layouts: list[str]) -> dict[str, Weights]:
    """The same weights in every layout that is asked for."""
    return {layout: humming.pack(raw) if layout == op.HUMMING else raw for layout in layouts}


def cases(tps: list[int], batches: list[int], parts: list[str], layouts: list[str]) -> Iterator[Case]:
    arch = build.device_arch()
    for tp in tps:
        raw = draw_weights(op.Config(1, width=3072 // tp))
        weights = lay_out(raw, layouts)
        with_stock = {"both", "routed"} & set(parts)
        incumbent = stock_experts(op.Config(1, width=3072 // tp), raw) if with_stock else None
        for batch in batches:
            configs = [op.Config(batch, width=3072 // tp, layout=layout) for layout in layouts]
            call = Call.draw(configs[0], weights)
            plans = [op.plan(config, arch, tactic) for config in configs for tactic in op.tactics(config)]
            run = incumbent(call) if incumbent else None
            for plan in plans if run else ():
                agree(call, plan, run)
            for part in parts:
                variants: dict[str, Callable[[int], object]] = {}
                if part == "routed":
                    choose = stock.topk()
                    for plan in (op.plan(config, arch) for config in configs):
                        choice = moe_front.topk_plan(moe_front.TopkConfig(batch, grouped=plan.tactic.grouped), arch)
                        variants[str(plan.tactic)] = partial(call.ours, plan=plan, part=part, choice=choice)
                    if run and choose:
                        variants[STOCK] = partial(call.theirs, run=run, choose=choose)
                else:
                    variants = {str(plan.tactic): partial(call.ours, plan=plan, part=part) for plan in plans}
                    if run and part == "both":
                        variants[STOCK] = partial(call.theirs, run=run)
                label = {"tp": tp, "batch": batch, "part": part, "experts": round(call.distinct, 1)}
                yield Case(label, call.moved(part), variants, copies=ROUTINGS, baseline=STOCK)
        del raw, weights, incumbent
        torch.cuda.empty_cache()


def write_table(path: Path, timings: list[Timing], commit: str | None, layouts: list[str]) -> None:
    """The fastest tactic of every shape and layout in `both`, beside the entries of other shapes that the file has."""
    arch = build.device_arch()
    table = json.loads(path.read_text()) if path.exists() else []
    source = provenance(commit)
    shapes = dict.fromkeys((t.label["tp"], t.label["batch"]) for t in timings if t.label["part"] == "both")
    for (tp, batch), layout in itertools.product(shapes, layouts):
        config = op.Config(batch, width=3072 // tp, layout=layout)
        own = {str(tactic): tactic for tactic in op.tactics(config)}
        rows = [t for t in timings if (t.label["tp"], t.label["batch"], t.label["part"]) == (tp, batch, "both") and not t.error]
        stocks = [t for t in rows if t.variant == STOCK]
        ours = min((t for t in rows if t.variant in own), key=lambda t: t.us, default=None)
        if ours is None:
            continue
        shape = {"arch": arch, **{name: getattr(config, name) for name in op.SHAPE}}
        table = [row for row in table if {name: row[name] for name in shape} != shape]
        tactic = own[ours.variant]
        kept = {name: source[name] for name in ("gpu", "driver", "versions", "commit", "date")}
        times = {"us": round(ours.us, 2), "incumbent_us": round(stocks[0].us, 2) if stocks else None}
        table.append({**shape, "tactic": dataclasses.asdict(tactic), **times, **kept})
    path.write_text(json.dumps(sorted(table, key=lambda r: (r["arch"], r["layout"], -r["width"], r["tokens"])), indent=1) + "\n")


def once(part: str, tp: int, batch: int, layout: str) -> None:
    """Three launches with different experts."""
    config = op.Config(batch, width=3072 // tp, layout=layout)
    call, plan = Call.draw(config, lay_out(draw_weights(config), [layout])), op.plan(config, build.device_arch())
    torch.cuda.synchronize()
    for i in range(3):
        call.ours(i, plan, part)
        torch.cuda.synchronize()


def compile_kernels(tps: list[int], batches: list[int], arch: str, layouts: list[str]) -> None:
    shapes = itertools.product(tps, batches, layouts)
    configs = [op.Config(batch, width=3072 // tp, layout=layout) for tp, batch, layout in shapes]
    specs = [spec for c in configs for tactic in [*op.tactics(c), None] for spec in op.plan(c, arch, tactic, False).specs]
    specs += [moe_front.topk_spec(moe_front.TopkConfig(c.tokens, grouped=g)) for c in configs for g in (False, True)]
    compile_all(dict.fromkeys(specs), arch)


if __name__ == "__main__":
    parser = arguments("experts")
    parser.add_argument("--tp", default="8,16")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--layout", default=op.RAW)
    parser.add_argument("--table", type=Path, help="update this tactics.json with the fastest tactics")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    parser.add_argument("--once", choices=PARTS[:3], help="launch a part three times, for a profiler")
    options = parser.parse_args()
    tps, batches = ([int(n) for n in text.split(",")] for text in (options.tp, options.batches))
    layouts = options.layout.split(",")
    if options.once:
        once(options.once, tps[0], batches[0], layouts[0])
    elif options.compile:
        compile_kernels(tps, batches, options.compile, layouts)
    else:
        compile_kernels(tps, batches, build.device_arch(), layouts)
        timings = main("experts", cases(tps, batches, options.parts.split(","), layouts), options)
        if options.table:
            write_table(options.table, timings, options.commit, layouts)
