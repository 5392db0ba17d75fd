"""One KDA+MoE layer as a captured chain on one GPU: every launch of the fast path in order, each layer with its own weights.

A rank slice of Kimi K3 has the shapes of one tensor-parallel rank (TP8: 12 heads, expert width 384; TP16: 6 and 192) and all
the replicated matrices in full. LAYERS layers follow each other in one CUDA graph, so that each finds its weights cold, as in
the model. The time of a layer is the graph's median over LAYERS; launches are counted by the profiler, not by hand.

    python benchmarks/layer_chain.py --json OUT [--slices 8,16] [--batches 1,8] [--timeline DIR]

`--tactics` compares ways to cut the four matmuls in one run: "default;k4 d8;ring c512 z168;tail=ring,front=ring c256" measures
four chains; a matmul that is not named keeps its default. A letter sets a field of `Tactic` (LETTERS), `g1` makes one group of
every tile of rows. `ring` takes columns of a stage (c), KiB of all stages (z), fetching warps (f), warps that share the columns
(k), cycles of its pace (p), e1 for weights that leave L2 first, l1 for tokens by lanes. `library` multiplies by PyTorch's
product, in more launches; `skinny` by our kernel where the library is the default. Below a result stands how much later than all
before it each kernel of a layer ends: what it costs the chain.
`--layout raw,humming` measures the experts on the checkpoint's layout and on the one that stock keeps, `--experts` with other
cuts of theirs: "default;strip=4 flight=3" names fields of the tactic. `--mix` does so for AttnRes: "default;blocks=7 parts=2".
`--compile ARCH` compiles all kernels and needs no GPU; K3FAST_JOBS limits the processes, here and before a measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ops.ahead import compile_all
from benchmarks.timing import COPY_BYTES_PER_SECOND, provenance, replay_us
from vllm.model_executor.models.kimi_k3_fast.ops import attn_res, build, experts, kda, moe_front, moe_tail, projection
from vllm.model_executor.models.kimi_k3_fast.ops.experts import humming
from vllm.model_executor.models.kimi_k3_fast.ops.experts.torch_form import Weights as ExpertWeights
from vllm.model_executor.models.kimi_k3_fast.ops.library import LIBRARY, Library
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import TILE, ring_tactic

D, LATENT, EXPERTS, TOP_K, HEAD = 7168, 3584, 896, 16, 128
LAYERS = 4
REPLAYS = 41
STOCK_US = {(8, 1): 141.0, (8, 8): 270.0}  # the same span of stock vLLM 0.32.0 on this card, taken from its own timeline
STOCK_LAUNCHES = 21
LETTERS = {
    "s": "splits",
    "w": "row_warps",
    "k": "k_warps",
    "t": "tiles",
    "d": "depth",
    "p": "prefetch",
    "r": "resident",
    "m": "stages",
}


@dataclass(frozen=True)
class Slice:
    """Sizes of one rank of `full_tp`."""

    full_tp: int

    @property
    def heads(self) -> int:
        return 96 // self.full_tp

    @property
    def width(self) -> int:
        return 3072 // self.full_tp

    @property
    def shared(self) -> int:
        return 6144 // self.full_tp


def matrix(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16()


def layer_weights(s: Slice) -> dict[str, Any]:
    """Random weights of one layer; router rows are wide enough to spread tokens over many experts."""
    inner = s.heads * HEAD
    byte = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")  # noqa: E731
    scale = lambda *shape: torch.full(shape, 120, dtype=torch.uint8, device="cuda")  # noqa: E731
    return {
        "score": torch.randn(2, D, device="cuda") * D**-0.5,
        "norm": torch.ones(2, D, device="cuda").bfloat16(),
        "in_proj": matrix(kda.columns(s.heads), D),
        "conv": torch.randn(3 * inner, 4, device="cuda") * 0.5,
        "f_b": matrix(inner, HEAD),
        "a_log": torch.rand(s.heads, device="cuda"),
        "dt_bias": torch.randn(inner, device="cuda") * 0.1,
        "out_norm": torch.ones(HEAD, device="cuda").bfloat16(),
        "o_proj": matrix(D, inner),
        "router": (torch.randn(EXPERTS, D, device="cuda") * 0.05).bfloat16(),
        "bias": torch.zeros(EXPERTS, device="cuda"),
        "down": matrix(LATENT, D),
        "gate_up": matrix(2 * s.shared, D),
        "experts": ExpertWeights(
            byte(EXPERTS, 2 * s.width, LATENT // 2),
            scale(EXPERTS, 2 * s.width, LATENT // 32),
            byte(EXPERTS, LATENT, s.width // 2),
            scale(EXPERTS, LATENT, s.width // 32),
        ),
        "latent_norm": torch.ones(LATENT, device="cuda").bfloat16(),
        "up": matrix(D, LATENT),
        "shared_down": matrix(D, s.shared),
    }


def matmuls(s: Slice, batch: int) -> dict[str, Any]:
    """The configs of the four matmuls."""
    return {
        "in_proj": projection.Config(batch, kda.columns(s.heads), D),
        "o_proj": projection.Config(batch, D, s.heads * HEAD),
        "front": moe_front.Config(batch, D, EXPERTS, LATENT, s.shared),
        "tail": moe_tail.Config(batch, D, LATENT, s.shared),
    }


def cut(name: str, config: Any, text: str, arch: str) -> Any:
    """The config of one matmul with the tactic that `text` has for it: one for all, or name=tactic,name=tactic."""
    if "=" in text:
        text = dict(part.strip().split("=") for part in text.split(",")).get(name, "default")
    if text in ("library", "skinny"):
        by_library = text == "library" and name != "front"  # which the library does not multiply
        return replace(config, tactic=LIBRARY if by_library else config.shape.tactic)
    if not text.startswith("ring"):
        return cut_by_letters(OPS[name], config, text, arch)
    sizes = {word[0]: int(word[1:]) for word in text.split()[1:]}
    names = {"c": "chunk", "f": "fetchers"}
    options = {names[letter]: size for letter, size in sizes.items() if letter in names}
    if "z" in sizes:
        options["space"] = sizes["z"] * 1024
    whole = {"whole": TILE} if name == "front" else {}
    rows = sum(config.rows) if name == "front" else config.rows
    tactic = ring_tactic(rows, config.shape.columns, config.tokens, **options, **whole)
    flags = {"passing": bool(sizes.get("e")), "by_lanes": bool(sizes.get("l"))}
    tactic = replace(tactic, **flags, k_warps=sizes.get("k", tactic.k_warps), pace=sizes.get("p", 0))
    found = replace(config, tactic=tactic)
    refusal = OPS[name].unavailable_reason(found, arch)
    if refusal:
        print(f"no {text!r} for {config}: {refusal}", flush=True)
    return config if refusal else found


def cut_by_letters(op: Any, config: Any, text: str, arch: str) -> Any:
    """The config with the tactic that `text` describes: "default", or fields by letter, such as "k4 d8". `g2` makes groups of two
    tiles, as many as the rows need. More splits mean fewer groups; row warps are as many as the rows need, unless given. A matmul
    that cannot be cut so keeps its default.
    """
    if text == "default":
        return config
    values = {word[0]: int(word[1:]) for word in text.split()}
    tiles = values.pop("g", None)
    fields = {LETTERS[letter]: value for letter, value in values.items()}
    first = config.shape.tactic
    groups = first.groups * first.splits // fields.get("splits", first.splits)
    if tiles:
        fields = {"tiles": tiles, "row_warps": 1, "splits": 1, "prefetch": 0, "stages": 0, **fields}
        rows = sum(config.rows) if isinstance(config.rows, tuple) else config.rows
        groups = -(-rows // (TILE * fields["tiles"] * fields["row_warps"]))
    row_warps = [fields["row_warps"]] if "row_warps" in fields else range(1, 9)
    for more in range(4 if tiles else 1):  # a matrix among several may need a group more than its share
        for warps in row_warps:
            found = replace(config, tactic=replace(first, **{**fields, "groups": groups + more, "row_warps": warps}))
            if op.unavailable_reason(found, arch) is None:
                return found
    print(f"no {text!r} for {config}: {op.unavailable_reason(found, arch)}", flush=True)
    return config


def routed(s: Slice, batch: int, layout: str, cut: str, arch: str, compiled: bool = True) -> experts.Plan:
    """The plan of the experts, with the fields of its tactic that `cut` names."""
    config = experts.Config(batch, width=s.width, layout=layout)
    fields = fields_of(cut)
    tactic = replace(experts.chosen_tactic(config, arch), **fields) if fields else None
    return experts.plan(config, arch, tactic, compiled)


def fields_of(cut: str) -> dict[str, int]:
    return {name: int(value) for name, value in (word.split("=") for word in cut.split() if word != "default")}


def fits(layout: str, cut: str) -> bool:
    """Whether the tactics of this layout have such fields."""
    return fields_of(cut).keys() <= asdict(experts.PACKED if layout == "humming" else experts.PAIRS).keys()


def mix_of(batch: int, cut: str) -> attn_res.Config:
    """AttnRes of four closed blocks, with the fields of its config that `cut` names."""
    return replace(attn_res.Config(batch, D, prev=4, has_delta=True), **fields_of(cut))


OPS = {"in_proj": projection, "o_proj": projection, "front": moe_front, "tail": moe_tail}


class Chain:
    """The chain of one slice and batch: plans, buffers and per-layer state, made once."""

    def __init__(
        self,
        s: Slice,
        batch: int,
        weights: list[dict[str, Any]],
        arch: str,
        tactic: str,
        experts_plan: experts.Plan,
        mix: str,
    ) -> None:
        self.weights, self.batch = weights, batch
        inner, columns = s.heads * HEAD, kda.columns(s.heads)
        bf16 = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
        self.prefix, self.blocks = bf16(64, D), torch.randn(8, 64, D, device="cuda").bfloat16()
        self.prefix[:batch] = torch.randn(batch, D, device="cuda").bfloat16()
        self.delta, self.mixed, self.y, self.out = bf16(batch, D), bf16(batch, D), bf16(batch, inner), bf16(batch, D)
        self.packed, self.z, self.routed = bf16(batch, columns), bf16(batch, LATENT), bf16(batch, LATENT)
        self.logits, self.hidden = torch.zeros(batch, EXPERTS, device="cuda"), bf16(batch, s.shared)
        self.slots = (1 + torch.arange(batch, device="cuda", dtype=torch.int32)).view(batch, 1)
        self.conv = [bf16(batch + 1, 3, 3 * inner) for _ in weights]
        self.state = [torch.randn(batch + 1, s.heads, HEAD, HEAD, device="cuda") * 0.1 for _ in weights]
        self.attn_res = attn_res.plan(mix_of(batch, mix), arch)
        matmul = {n: OPS[n].plan(cut(n, c, tactic, arch), arch) for n, c in matmuls(s, batch).items()}
        self.in_proj, self.o_proj, self.front, self.tail = (matmul[n] for n in ("in_proj", "o_proj", "front", "tail"))
        self.products = {name: bf16(*shape) for name, (shape, _) in self.tail.scratch_shapes().items()}
        self.kda = kda.plan(kda.Config(s.heads, batch, columns), arch)
        self.experts, self.width = experts_plan, s.width
        self.topk = moe_front.topk_plan(moe_front.TopkConfig(batch, grouped=experts_plan.tactic.grouped), arch)
        self.routing, self.choose = self._routing(batch)
        pairs = batch * TOP_K
        self.scratch = experts.Scratch(bf16(pairs, s.width))

    def _routing(self, batch: int) -> tuple[experts.Routing, Callable[[dict[str, Any]], None]]:
        """The routing buffers and the launch that fills them from logits."""
        integers = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device="cuda")  # noqa: E731
        pairs = batch * TOP_K
        routing = experts.Routing(
            ids=integers(batch, TOP_K),
            weights=torch.zeros(batch, TOP_K, device="cuda"),
            num_tokens=torch.tensor([batch], dtype=torch.int32, device="cuda"),
            offsets=integers(EXPERTS + 1),
            pairs=integers(pairs),
            active=integers(EXPERTS),
            num_active=integers(1),
        )

        groups = None
        if self.experts.tactic.grouped:
            groups = moe_front.Groups(routing.offsets, routing.pairs, routing.active, routing.num_active, integers(1))

        def choose(w: dict[str, Any]) -> None:
            moe_front.run_topk(self.topk, self.logits, w["bias"], routing.num_tokens, routing.ids, routing.weights, groups)

        return routing, choose

    def layer(self, i: int) -> None:
        """Layer i: attn_res, in-projection, KDA, o-projection, attn_res, front, top-k, experts, tail."""
        w = self.weights[i]
        attn_res.run(self.attn_res, w["score"][0], w["norm"][0], self.delta, self.blocks, self.prefix, self.mixed)
        projection.run(self.in_proj, self.mixed, w["in_proj"], self.packed)
        kda.run(
            self.kda,
            self.packed,
            w["conv"],
            w["f_b"],
            w["a_log"],
            w["dt_bias"],
            w["out_norm"],
            self.slots,
            self.conv[i],
            self.state[i],
            self.y,
        )
        projection.run(self.o_proj, self.y, w["o_proj"], self.out)
        attn_res.run(self.attn_res, w["score"][1], w["norm"][1], self.out, self.blocks, self.prefix, self.mixed)
        outputs = (self.logits, self.z, self.hidden)
        moe_front.run(self.front, self.mixed, w["router"], w["down"], w["gate_up"], *outputs)
        self.choose(w)
        experts.run(self.experts, w["experts"], self.z, self.routing, self.scratch, self.routed)
        weights = (w["latent_norm"], w["up"], w["shared_down"])
        moe_tail.run(self.tail, self.routed, self.hidden, *weights, self.delta, self.products)

    def all_layers(self) -> None:
        for i in range(len(self.weights)):
            self.layer(i)

    def bytes_read(self) -> int:
        """What one layer must read once: matrices, the experts that were chosen, states (read and written)."""
        w = self.weights[0]
        dense = sum(w[n].numel() * 2 for n in ("in_proj", "f_b", "o_proj", "router", "down", "gate_up", "up", "shared_down"))
        distinct = int(torch.unique(self.routing.ids).numel())
        per_expert = 3 * self.width * (LATENT // 2 + LATENT // 32)
        return dense + distinct * per_expert + 2 * self.state[0][1:].numel() * 4


def measure(chain: Chain) -> tuple[float, torch.cuda.CUDAGraph]:
    """Median microseconds of a layer under graph replay, and the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain.all_layers()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.all_layers()
        chain.all_layers()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(REPLAYS):
        times.append(replay_us(graph, start, end) / (2 * len(chain.weights)))
    return statistics.median(times), graph


def kernels(graph: torch.cuda.CUDAGraph) -> list[tuple[float, float, str]]:
    """(start us, duration us, name) of every kernel of one replay."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    rows = [
        (e.time_range.start, e.time_range.elapsed_us(), e.name)
        for e in trace.events()
        if e.device_type.name == "CUDA" and "Memcpy" not in e.name
    ]
    first = min(r[0] for r in rows)
    return sorted((start - first, us, name) for start, us, name in rows)


def costs(rows: list[tuple[float, float, str]], launches: int) -> list[tuple[str, float]]:
    """(name, us) of each kernel of a layer, in order: how much later than all before it ended; median over all layers but the
    first.
    """
    ends: list[list[float]] = [[] for _ in range(launches)]
    last = 0.0
    for i, (start, us, _) in enumerate(rows):
        if i >= launches:
            ends[i % launches].append(max(start + us - last, 0.0))
        last = max(last, start + us)
    ours = [name.removeprefix("kernel_cutlass__") for _, _, name in rows[:launches]]
    short = [name.split("_Static")[0].split("_Dynamic")[0][:40] for name in ours]
    return [(name, statistics.median(found)) for name, found in zip(short, ends, strict=True)]


def specs_of(
    s: Slice, batch: int, tactics: list[str], arch: str, routings: list[tuple[str, str]], mixes: list[str]
) -> list[build.KernelSpec]:
    """Every kernel of a chain. routings: layouts of the experts with cuts of their tactics; mixes: cuts of AttnRes."""
    of_matmuls = [OPS[n].spec(cut(n, c, text, arch)) for text in tactics for n, c in matmuls(s, batch).items()]
    found = [spec for spec in of_matmuls if spec is not None]
    for layout, text in routings:
        plan = routed(s, batch, layout, text, arch, compiled=False)
        found += [*plan.specs, moe_front.topk_spec(moe_front.TopkConfig(batch, grouped=plan.tactic.grouped))]
    found += [attn_res.plan(mix_of(batch, mix), arch).spec for mix in mixes]
    return [*found, kda.plan(kda.Config(s.heads, batch, kda.columns(s.heads)), arch, load=False).spec]


TABLES = {"in_proj": ("projection",), "o_proj": ("projection", "oproj"), "front": ("moe_front",), "tail": ("moe_tail",)}


def matmul_costs(costs: list[tuple[str, float]], experts_launches: int) -> dict[str, float]:
    """What each matmul costs a layer, of what its kernels do: all that run between the kernels around it."""
    names = [name for name, _ in costs]
    mixes = [i for i, name in enumerate(names) if name.startswith("attn_res")]
    at = {name: next(i for i, found in enumerate(names) if found.startswith(name)) for name in ("kda", "topk")}
    ends = {
        "in_proj": (mixes[0] + 1, at["kda"]),
        "o_proj": (at["kda"] + 1, mixes[1]),
        "front": (mixes[1] + 1, at["topk"]),
        "tail": (at["topk"] + 1 + experts_launches, len(names)),
    }
    return {name: sum(us for _, us in costs[first:last]) for name, (first, last) in ends.items()}


def write_tables(folder: Path, results: list[dict[str, Any]], arch: str, source: dict[str, Any]) -> None:
    """For every slice and batch the tactics of the fastest chain into the ops' tactics.json: a matmul is never alone in a step.
    `us` and `incumbent_us` are what the kernel costs its chain and the default's, `chain_us` the whole layer.
    """
    sizes = ("rows", "columns", "latent", "experts", "shared", "world")
    fresh: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for s, batch in dict.fromkeys((r["slice"], r["batch"]) for r in results):
        case = [r for r in results if (r["slice"], r["batch"]) == (s, batch) and r["finite"]]
        best, default = min(case, key=lambda r: r["us"]), next((r for r in case if r["tactic"] == "default"), None)
        for name, config in matmuls(Slice(int(s[2:])), batch).items():
            tactic = cut(name, config, best["tactic"], arch).chosen
            shape = {f: getattr(config, f) for f in sizes if f in config.__dataclass_fields__}
            row = {"arch": arch, "tokens": batch, **shape, "tactic": asdict(tactic), "us": round(best["matmul_us"][name], 2)}
            row |= {"incumbent": "default", "incumbent_us": round(default["matmul_us"][name], 2) if default else None}
            row |= {"chain_us": round(best["us"], 2), "from": source}
            for op in TABLES[name]:
                if op != "oproj" or isinstance(tactic, Library) or tactic.groups * tactic.splits <= 132:
                    fresh.setdefault(op, {})[(arch, *sorted(shape.items()), batch)] = row
    for op, rows in fresh.items():
        path, names = folder / op / "tactics.json", [n for n in next(iter(rows.values())) if n in sizes]
        old = {(r["arch"], *sorted((n, r[n]) for n in names), r["tokens"]): r for r in json.loads(path.read_text())}
        table = sorted((old | rows).items(), key=lambda item: str(item[0]))
        path.write_text("[\n" + ",\n".join(json.dumps(row) for _, row in table) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--slices", default="8,16")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--timeline", type=Path, help="folder for one file a case: start us, duration us, kernel")
    parser.add_argument("--tactics", default="default", help="descriptions of the matmuls' tactic, separated by semicolons")
    parser.add_argument("--compile", metavar="ARCH", help="compile the matmuls for this architecture and stop; needs no GPU")
    parser.add_argument("--tables", type=Path, help="folder of the ops, whose tactics.json take the fastest tactics")
    parser.add_argument("--layout", default="raw", help="layouts of the experts: raw,humming")
    parser.add_argument("--experts", default="default", help="cuts of the experts' tactic, separated by semicolons")
    parser.add_argument("--mix", default="default", help="cuts of AttnRes, separated by semicolons")
    parser.add_argument("--commit")
    options = parser.parse_args()
    routings = [
        (layout, text) for layout in options.layout.split(",") for text in options.experts.split(";") if fits(layout, text)
    ]
    tactics, mixes = ([text.strip() for text in texts.split(";")] for texts in (options.tactics, options.mix))
    cases = [(Slice(int(n)), int(b)) for n in options.slices.split(",") for b in options.batches.split(",")]
    arch = options.compile or build.device_arch()
    compile_all(dict.fromkeys(spec for s, b in cases for spec in specs_of(s, b, tactics, arch, routings, mixes)), arch)
    if options.compile:
        return
    results = []
    peak = COPY_BYTES_PER_SECOND.get(torch.cuda.get_device_name())
    for full_tp in map(int, options.slices.split(",")):
        s = Slice(full_tp)
        weights = {"raw": [layer_weights(s) for _ in range(LAYERS)]}
        if "humming" in options.layout:
            weights["humming"] = [{**w, "experts": humming.pack(w["experts"])} for w in weights["raw"]]
        cuts = itertools.product(map(int, options.batches.split(",")), tactics, routings, mixes)
        for batch, tactic, (layout, text), mix in cuts:
            chain = Chain(s, batch, weights[layout], arch, tactic, routed(s, batch, layout, text, arch), mix)
            us, graph = measure(chain)
            rows = kernels(graph)
            launches = len(rows) / (2 * LAYERS)
            moved = chain.bytes_read()
            floor = moved / peak * 1e6 if peak else None
            stock = STOCK_US.get((full_tp, batch))
            results.append(
                {
                    "slice": f"TP{full_tp}",
                    "batch": batch,
                    "tactic": tactic,
                    "layout": layout,
                    "experts": str(chain.experts.tactic),
                    "mix": f"{chain.attn_res.config.blocks} blocks, {chain.attn_res.config.parts} warps a source",
                    "us": us,
                    "launches": launches,
                    "bytes": moved,
                    "floor_us": floor,
                    "share_of_floor": floor / us if floor else None,
                    "stock_us": stock,
                    "speedup": stock / us if stock else None,
                    "finite": bool(torch.isfinite(chain.delta.float()).all()),
                }
            )
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in results[-1].items()}, flush=True)
            results[-1]["costs_us"] = costs(rows, round(launches))
            results[-1]["matmul_us"] = matmul_costs(results[-1]["costs_us"], len(chain.experts.specs))
            print("   ", " ".join(f"{name} {us:.1f}" for name, us in results[-1]["costs_us"]), flush=True)
            if options.timeline:
                options.timeline.mkdir(parents=True, exist_ok=True)
                text = "".join(f"{start:.1f} {us:.1f} {name[:120]}\n" for start, us, name in rows)
                case = f"tp{full_tp}_b{batch}_{layout}_{tactic.replace(' ', '-')}"[:100]
                (options.timeline / f"{case}.txt").write_text(text)
        del weights
        torch.cuda.empty_cache()
    where = provenance(options.commit)
    if options.tables:
        source = {name: where[name] for name in ("gpu", "driver", "commit", "date", "versions")}
        write_tables(options.tables, results, arch, source)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"benchmark": "layer_chain", "provenance": where, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
