"""Decode of the whole engine on GPUs: stock vLLM and the fast path on the same model, in turns, in one run.

    python benchmarks/gpu_engine.py --out benchmarks/results/h200/engine_tp8_on_2.json --full-tp 8 --run-tp 2 --layers 24
    python benchmarks/gpu_engine.py --out FILE --full-tp 16 --layers 12 --batches 1,8,64 --contexts 512 --trace --check
    python benchmarks/gpu_engine.py --plot FILE
    python benchmarks/gpu_engine.py --table FILE_OF_1_GPU FILE_OF_2 FILE_OF_4 FILE_OF_8

The model is a rank slice (`rank_slice.py`). Two engines share the GPUs, each in a process of its own (`engine_arm.py`): stock
with the fork's plug-in not loaded, and the fork with mode `require`. Both hold the same requests at the same context. They take
turns of `--steps` decode steps, `--rounds` times, the order changing every round, so that clocks, temperature and neighbours
touch both alike; a turn begins when the other engine's GPU work is done. A step is timed from outside: scheduling, sampling and
output are in it. The figure of a point is the median over rounds, divided by the layers; embedding, head and sampling are spread
over them, for both.

The guard's word is part of the result: decode tokens of the measured turns by path and reason, on every rank. Points that do not
fit into the caches or into `--deadline` are listed with the reason. The JSON is written anew after every point.

`--check` compares greedy tokens; `--trace` adds launches and GPU times of each point from the profiler.

Memory of one GPU, TP8 slice: an expert is 2.19 MB, so a MoE layer is 1.97 GB of experts and 0.24 GB beside them. Of a card of 151
GB two engines of 24 layers take 52 GB each. `--engines 1` starts in half the time: a single engine that holds stock's decode
graphs beside the fast ones (`twin_graphs.py`) and is switched between turns. Both arms then read the same weights, caches and
requests; stock's steps also pass through the fork's watching lines on the host.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import rank_slice
from engine_arm import Arm, ArmFailed, Half, Spec

ARMS = ("stock", "fast")
LONG = 8192  # from this context on, requests stay from one batch size to the next: prompts are what costs the time
SLACK = 4096  # tokens that a request may grow beyond its prompt over all points of a context
COPY_BYTES_PER_SECOND = 4.3e12  # what a copy reaches on an H200, reads and writes together
TARGETS = {(8, 2): {1: 1.88, 8: 1.6, 64: 1.4}, (8, 8): {1: 1.58, 64: 1.31}}  # (full TP, run TP) -> batch -> ratio at context 512


class Engine(Protocol):
    """What the measurement asks of an arm: see `engine_arm.Engine`."""

    name: str

    def call(self, method: str, *args: Any, seconds: float = 600.0) -> Any: ...


# -- points ----------------------------------------------------------------------------------------------------------------------
def points_of(text: str, batches: str, contexts: str) -> dict[int, list[int]]:
    """Context -> batches, ascending. `text` is "512:1,2,4;32768:1,8", or empty for all `batches` at all `contexts`."""
    if not text:
        text = ";".join(f"{context}:{batches}" for context in contexts.split(","))
    found: dict[int, list[int]] = {}
    for part in text.split(";"):
        context, _, sizes = part.partition(":")
        found[int(context)] = sorted({int(size) for size in sizes.split(",")})
    return dict(sorted(found.items()))


class Clock:
    """Says whether a point may still begin: its prompts at the rate seen so far, and its steps at the pace of the last point."""

    def __init__(self, deadline: float) -> None:
        self.began, self.deadline = time.monotonic(), deadline
        self.tokens_per_second, self.point_seconds = math.inf, 0.0

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    def filled(self, tokens: int, seconds: float) -> None:
        if tokens >= LONG:
            self.tokens_per_second = tokens / seconds

    def allows(self, prompt_tokens: int) -> bool:
        # Long prompts are slower than the short ones before them: half of the rate seen is a guess on the safe side.
        return self.passed + 2 * prompt_tokens / self.tokens_per_second + 1.5 * self.point_seconds < self.deadline


def measure_point(arms: Mapping[str, Engine], batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """Turns of both arms that already hold `batch` requests."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    counted: dict[str, list[dict[str, Any]]] = {}
    lost = 0
    for i in range(rounds):
        for name in sorted(arms, reverse=i % 2 == 0):
            before = arms[name].call("report")
            turn = arms[name].call("steps", steps)
            times[name].append(turn["seconds"] / steps * 1e3)
            lost += batch * steps - turn["tokens"]
            if before is not None:
                counted[name] = proof(before, arms[name].call("report"), counted.get(name, ()))
    return {"rounds_ms": times, "tokens_lost": lost, "guard": counted}


def proof(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """What the guard counted between two reports, rank by rank, on top of `earlier` turns."""
    ranks = []
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        past = earlier[i] if earlier else {"decode_tokens": {}, "reasons": {}, "violations": {}}
        tokens = {
            path: new["steps"][path]["decode_tokens"] - old["steps"][path]["decode_tokens"] + past["decode_tokens"].get(path, 0)
            for path in ("fast", "standard")
        }
        total = sum(tokens.values())
        ranks.append(
            {
                "rank": new.get("rank"),
                "decode_tokens": tokens,
                "fast_share": tokens["fast"] / total if total else None,
                "reasons": added(old["steps"]["by_reason"], new["steps"]["by_reason"], past["reasons"]),
                "violations": added(old["violations"]["by_reason"], new["violations"]["by_reason"], past["violations"]),
            }
        )
    return ranks


def added(old: Mapping[str, int], new: Mapping[str, int], past: Mapping[str, int]) -> dict[str, int]:
    sums = {name: new.get(name, 0) - old.get(name, 0) + past.get(name, 0) for name in {*old, *new, *past}}
    return {name: count for name, count in sorted(sums.items()) if count}


def judged(point: Mapping[str, Any], shape: Mapping[str, int]) -> dict[str, Any]:
    """The point with its medians, ratio, floor, and the worst rank's share of fast decode tokens."""
    layers, batch, context = shape["layers"], point["batch"], point["context"]
    ms = {name: statistics.median(times) for name, times in point["rounds_ms"].items()}
    floor = rank_slice.floor_bytes(shape["full_tp"], layers, batch, context) / COPY_BYTES_PER_SECOND * 1e6 / layers
    shares = [rank["fast_share"] for rank in point["guard"].get("fast", ())]
    wanted = TARGETS.get((shape["full_tp"], shape["run_tp"]), {}).get(batch) if context == 512 else None
    ratio = ms["stock"] / ms["fast"]
    return {
        **point,
        "ms": ms,
        "us_per_layer": {name: value * 1e3 / layers for name, value in ms.items()},
        "ratio": ratio,
        "ratio_by_round": [s / f for s, f in zip(point["rounds_ms"]["stock"], point["rounds_ms"]["fast"], strict=True)],
        "floor_us_per_layer": floor,
        "share_of_floor": {name: floor / (value * 1e3 / layers) for name, value in ms.items()},
        "fast_share": min((share or 0.0 for share in shares), default=None),
        "wanted_ratio": wanted,
        "reached": None if wanted is None else ratio >= wanted,
    }


def measure(
    arms: Mapping[str, Engine], points: Mapping[int, Sequence[int]], options: Any, record: dict[str, Any], save: Any
) -> None:
    """All points, into record["results"] and record["not_run"]; `save` is called after each."""
    clock = Clock(options.deadline - record.get("start_seconds", 0.0))
    for context, batches in points.items():
        room = min(arm.call("room", context + SLACK) for arm in arms.values())
        held = 0
        for batch in batches:
            fresh = batch - held if context >= LONG else batch
            why = None
            if batch > room:
                why = f"the caches hold {room} requests of {context} tokens"
            elif not clock.allows(2 * fresh * context):
                why = f"no time left: {clock.passed:.0f} s passed, {fresh * context} tokens of prompts in each engine to go"
            if why:
                record["not_run"].append({"batch": batch, "context": context, "why": why})
                print(f"context {context:7d} batch {batch:3d}: not run, {why}", flush=True)
                continue
            if context < LONG:
                for arm in arms.values():
                    arm.call("drop")
            fills = {name: arms[name].call("fill", batch, context) for name in reversed(ARMS)}
            for fill in fills.values():
                clock.filled(fill["prompt_tokens"], fill["seconds"])
            held, began = batch, time.monotonic()
            point = measure_point(arms, batch, options.rounds, options.steps)
            point = judged({"batch": batch, "context": context, "fill": fills, **point}, record["shape"])
            if options.trace:
                point["trace"] = {name: arm.call("trace", 16) for name, arm in arms.items()}
            clock.point_seconds = time.monotonic() - began
            record["results"].append(point)
            print(row(point), flush=True)
            save()
        for arm in arms.values():
            arm.call("drop")


def row(point: Mapping[str, Any]) -> str:
    us, share = point["us_per_layer"], point["fast_share"]
    spread = point["ratio_by_round"]
    text = (
        f"context {point['context']:7d} batch {point['batch']:3d}: stock {us['stock']:7.1f} fast {us['fast']:7.1f} us a layer, "
        f"{point['ratio']:.2f}x ({min(spread):.2f} to {max(spread):.2f})"
    )
    if point["wanted_ratio"]:
        text += f", wanted {point['wanted_ratio']}x"
    text += f", fast decode tokens {share:.2%}" if share is not None else ""
    text += f", {point['tokens_lost']} tokens did not come" if point["tokens_lost"] else ""
    launches = {name: ranks[0].get("launches") for name, ranks in point.get("trace", {}).items()}
    if launches:
        text += ", launches " + " | ".join(f"{name} {count:.0f}" for name, count in launches.items() if count)
    return text


# -- greedy tokens ---------------------------------------------------------------------------------------------------------------
def margin(top: Mapping[int, float], first: int, second: int) -> float | None:
    """How far `first` lies above `second` in log-probability; None where one of them is not among the top."""
    return top[first] - top[second] if first in top and second in top else None


def leaders(top: Mapping[int, float]) -> list[int]:
    return sorted(top, key=lambda token: -top[token])[:2]


def greedy_check(
    stock: Engine, fast: Engine, prompts: Sequence[Sequence[int]], count: int, top: int = 10, most: int = 24
) -> dict[str, Any]:
    """Greedy tokens of both arms, position by position along stock's own: after a difference both go on from stock's token.

    A difference is explained where stock's logits tie within stock's own error: its margin between the two tokens is at most the
    distance at which stock stands from itself, for the same margins, when the same tokens come as a prompt instead of one by one.
    """
    texts = [list(prompt) for prompt in prompts]
    tops: list[list[Mapping[int, float]]] = [[] for _ in prompts]
    differences: list[dict[str, Any]] = []
    apart: list[float] = []
    for _ in range(most):
        open_ = [i for i, rows in enumerate(tops) if len(rows) < count]
        if not open_:
            break
        longest = max(count - len(tops[i]) for i in open_)
        theirs, ours = (arm.call("complete", [texts[i] for i in open_], longest, top) for arm in (stock, fast))
        for i, s, f in zip(open_, theirs, ours, strict=True):
            for j, (token, other) in enumerate(zip(s["tokens"], f["tokens"], strict=True)):
                if len(tops[i]) == count:
                    break
                first, second = leaders(s["top"][j])
                mine, its = margin(s["top"][j], first, second), margin(f["top"][j], first, second)
                if mine is not None and its is not None:
                    apart.append(abs(mine - its))
                texts[i].append(token)
                tops[i].append(s["top"][j])
                if token != other:
                    where = {"prompt": i, "position": len(tops[i]) - 1, "stock": token, "fast": other}
                    differences.append({**where, "stock_margin": margin(s["top"][j], token, other)})
                    break
    own, other_tokens = own_error(stock, prompts, texts, tops, top)
    bar = max(own, default=0.0)
    for difference in differences:
        gap = difference["stock_margin"]
        difference["explained"] = gap is not None and gap <= bar
    return {
        "positions": sum(map(len, tops)),
        "asked": count * len(prompts),
        "differences": differences,
        "explained": all(d["explained"] for d in differences),
        "stock_own_differences": other_tokens,
        "stock_own_error": spread(own),
        "fast_from_stock": spread(apart),
    }


def own_error(
    stock: Engine, prompts: Sequence[Sequence[int]], texts: Sequence[list[int]], tops: Sequence[list], top: int
) -> tuple[list[float], int]:
    """By position, |stock's margin of its two leading tokens, decoded, minus the same by one prefill of the same tokens|; and at
    how many positions the prefill prefers another token."""
    found, others = [], 0
    for prompt, again, rows in zip(prompts, stock.call("complete", texts, 1, top, top), tops, strict=True):
        for decoded, prefilled in zip(rows, again["prompt"][len(prompt) :], strict=True):
            first, second = leaders(decoded)
            one, two = margin(decoded, first, second), margin(prefilled, first, second)
            others += leaders(prefilled)[0] != first
            if one is not None and two is not None:
                found.append(abs(one - two))
    return found, others


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {"count": len(ordered), "median": at(0.5), "p99": at(0.99), "max": ordered[-1]}


# -- picture ---------------------------------------------------------------------------------------------------------------------
def plot(record: Mapping[str, Any], file: Path) -> None:
    """Microseconds a layer over the batch for both arms, a panel for each context, with the ratio at every point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = sorted({point["context"] for point in record["results"]})
    figure, panels = pyplot.subplots(1, len(contexts), figsize=(4.2 * len(contexts), 3.6), squeeze=False, layout="constrained")
    for axes, context in zip(panels[0], contexts, strict=True):
        points = [p for p in record["results"] if p["context"] == context]
        batches = [p["batch"] for p in points]
        for name, colour in zip(ARMS, ("#b9c4d0", "#2b4a6f"), strict=True):
            axes.plot(batches, [p["us_per_layer"][name] for p in points], marker="o", color=colour, label=name)
        axes.plot(batches, [p["floor_us_per_layer"] for p in points], color="#999999", linestyle=":", label="bytes at copy speed")
        for p in points:
            place = (p["batch"], p["us_per_layer"]["fast"])
            axes.annotate(f"{p['ratio']:.2f}x", place, (0, -12), textcoords="offset points", ha="center", fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests")
        axes.set_title(f"context {context:,}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("decode step, us a layer")
    panels[0][0].legend(fontsize=8)
    shape, rank = record["shape"], record["arms"]["fast"]["ranks"][0]
    title = f"TP{shape['full_tp']} slice of Kimi K3, {shape['layers']} layers, {shape['run_tp']} x {rank.get('device', 'CPU')}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=130)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Runs on different numbers of GPUs side by side, in Markdown: a row for each point of each run. Launches, and microseconds
    in kernels that only exchange, are of rank 0 and there if the run was traced."""
    rows = [
        "| GPUs | slice | layers | context | batch | stock us a layer | fast us a layer | ratio | share of floor, stock | fast "
        "| launches, stock | fast | exchanging us a layer, stock | fast | fast decode tokens |",
        "|" + "---|" * 15,
    ]
    for record in sorted(records, key=lambda r: (r["shape"]["run_tp"], r["shape"]["full_tp"])):
        shape = record["shape"]
        for point in record["results"]:
            traced = {name: point.get("trace", {}).get(name, [{}])[0] for name in ARMS}
            us = point["us_per_layer"]
            cells = [shape["run_tp"], f"TP{shape['full_tp']}", shape["layers"], point["context"], point["batch"]]
            cells += [f"{us[name]:.1f}" for name in ARMS] + [f"{point['ratio']:.2f}"]
            cells += [f"{point['share_of_floor'][name]:.0%}" for name in ARMS]
            cells += [f"{traced[name]['launches']:.0f}" if "launches" in traced[name] else "" for name in ARMS]
            waits = [traced[name].get("communication_us") for name in ARMS]
            cells += ["" if wait is None else f"{wait / shape['layers']:.1f}" for wait in waits]
            cells += ["" if point["fast_share"] is None else f"{point['fast_share']:.2%}"]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


# -- the run ---------------------------------------------------------------------------------------------------------------------
def output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def provenance(commit: str | None) -> dict[str, Any]:
    here = str(Path(__file__).parent)
    return {
        "gpus": (
            output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader") or ""
        ).splitlines(),
        "commit": commit or output_of("git", "-C", here, "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "cpus": len(os.sched_getaffinity(0)),
    }


def start_up(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that each engine took to start, and what the fork's own part of it was on the slowest rank."""
    took = {f"{name}_seconds": facts["start_seconds"] for name, facts in record["arms"].items()}
    gauges = [rank.get("gauges", {}) for rank in record["guard"] or ()]
    for name in sorted({name for rank in gauges for name in rank if name.startswith("startup_")}):
        took[name] = round(max(rank.get(name, 0.0) for rank in gauges), 2)
    return took


def gpu_bytes() -> int:
    """Memory of the smallest GPU here; 0 without one. Asked of another process: this one stays off the GPUs."""
    ask = "import torch; print(*(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())))"
    return min(map(int, (output_of(sys.executable, "-c", ask) or "0").split()), default=0)


def specs(options: argparse.Namespace, folder: Path, longest: int, most: int) -> dict[str, Spec]:
    """Both arms; they differ in the plug-ins and settings of the fork, and in nothing else."""
    total = gpu_bytes()
    if options.model:
        model = options.model
    else:
        (folder / "model").mkdir()
        text = rank_slice.config(options.full_tp, options.run_tp, options.layers)
        (folder / "model" / "config.json").write_text(json.dumps(text, indent=1))
        model = str(folder / "model")
    common: dict[str, Any] = {
        "model": model,
        "load_format": "auto" if list(Path(model).glob("*.safetensors")) else rank_slice.LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": longest + SLACK,
        "max_num_seqs": most,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "tensor_parallel_size": options.run_tp,
        "seed": 0,
    }
    if total:
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= max(most, 1)]
        room = int(options.kv_gib * 2**30) or rank_slice.cache_bytes(options.full_tp, options.layers, total, options.engines)
        common |= {
            "kv_cache_memory_bytes": room,
            "gpu_memory_utilization": 0.05,  # of no effect beside the line above, but checked against what is free
            "compilation_config": {"cudagraph_capture_sizes": sizes, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        }
    else:
        common |= {"enforce_eager": True, "max_num_batched_tokens": 1024}
    fork = {"mode": options.mode, "allow_unvalidated": True, **json.loads(options.settings)}
    settings = {"stock": None if options.stock == "plain" else {"mode": "off"}, "fast": fork}
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of `engine_arm` go to the workers
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **rank_slice.NO_MULTICAST,
    }
    if output_of(sys.executable, "-c", "import importlib.util as u; print(u.find_spec('flashinfer') is not None)") == "False":
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    path = rank_slice.entry_points(folder / "entry")
    made = {}
    for name in ARMS:
        given = settings[name]
        plugins = [rank_slice.WEIGHTS_PLUGIN, *([rank_slice.FORK_PLUGIN] if given else [])]
        own = {"VLLM_PLUGINS": ",".join(plugins), "VLLM_CACHE_ROOT": str(Path(options.cache).expanduser() / name)}
        extra_options = {"additional_config": {"kimi_k3_fast": given}} if given else {}
        log = options.out.with_suffix(f".{name}.log")
        made[name] = Spec(name, {**common, **extra_options}, {**environment, **own}, path, log)
    return made


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Prompts of different lengths, the same in every run."""
    import random

    draw = random.Random(7)
    return [[draw.randrange(3, vocabulary) for _ in range(draw.randrange(16, 300))] for _ in range(count)]


def run(options: argparse.Namespace) -> int:
    points = points_of(options.points, options.batches, options.contexts)
    longest, most = max(points, default=512), max((max(b) for b in points.values()), default=8)
    record: dict[str, Any] = {
        "benchmark": "gpu_engine",
        "provenance": provenance(options.commit),
        "shape": {"full_tp": options.full_tp, "run_tp": options.run_tp, "layers": options.layers},
        "method": {
            "rounds": options.rounds,
            "steps": options.steps,
            "statistic": "median over rounds of the mean step of a turn, timed from outside",
            "stock": "plug-in not loaded" if options.stock == "plain" else "mode off",
            "model": options.model or "rank slice, random weights, the same in both arms",
        },
        "arms": {},
        "results": [],
        "not_run": [],
    }

    def save() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")

    status, began = 0, time.monotonic()
    started: list[Arm] = []
    arms: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            wanted = specs(options, Path(folder), longest, most)
            started = [Arm(wanted[name]) for name in ARMS[2 - options.engines :]]
            for arm in started:
                arm.begin("start")
                if options.one_by_one:
                    record["arms"][arm.name] = arm.wait(options.deadline)
            if not options.one_by_one:
                record["arms"] = {arm.name: arm.wait(options.deadline) for arm in started}
            arms = {arm.name: arm for arm in started}
            if options.engines == 1:
                record["method"]["stock"] = f"{arms['fast'].call('twin')} decode graphs of stock's model in the fork's engine"
                record["arms"]["stock"] = record["arms"]["fast"]
                arms = {name: Half(name, started[0]) for name in ARMS}
            record["start_seconds"] = round(time.monotonic() - began, 1)
            for name, facts in record["arms"].items():
                print(f"{name}: {facts['ranks'][0]['model_class']}, started in {facts['start_seconds']} s", flush=True)
            save()
            measure(arms, points, options, record, save)
            if options.check:
                vocabulary = json.loads(Path(wanted["stock"].options["model"], "config.json").read_text())["vocab_size"]
                prompts = random_prompts(options.check_prompts, vocabulary)
                record["greedy"] = greedy_check(arms["stock"], arms["fast"], prompts, options.check_tokens)
                shown = {key: value for key, value in record["greedy"].items() if key != "differences"}
                print(f"greedy: {len(record['greedy']['differences'])} differences; {shown}", flush=True)
                save()
            record["guard"] = arms["fast"].call("report")
            record["start_up"] = start_up(record)
            print(f"start-up: {record['start_up']}", flush=True)
            record["arms_at_end"] = {name: arm.call("facts")["ranks"] for name, arm in arms.items()}
        except ArmFailed as error:
            record["failed"] = str(error)
            print(error, file=sys.stderr)
            status = 1
        finally:
            record["seconds"] = round(time.monotonic() - began, 1)
            save()
            for engine in started:
                engine.stop()
    slower = [p for p in record["results"] if p["ratio"] < 1]
    for point in slower:
        print(f"slower than stock: context {point['context']}, batch {point['batch']}: {point['ratio']:.2f}x")
    try:
        if record["results"]:
            plot(record, options.out.with_suffix(".png"))
    except ImportError:
        print(f"no matplotlib here: python benchmarks/gpu_engine.py --plot {options.out}")
    return status


def numbers(text: str) -> str:
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, found {text!r}")
    return text


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON to write; logs and picture go beside it")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="make the picture of an earlier run and stop")
    parser.add_argument("--table", type=Path, nargs="+", metavar="JSON", help="print runs side by side and stop")
    parser.add_argument("--full-tp", type=int, default=8, help="the tensor-parallel size whose rank shapes are run")
    parser.add_argument("--run-tp", type=int, default=1, help="GPUs to run on")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batches", type=numbers, default="1,2,4,8,16,32,64")
    parser.add_argument("--contexts", type=numbers, default="512")
    parser.add_argument("--points", default="", help="instead of batches and contexts: 512:1,8,64;32768:1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a turn")
    parser.add_argument("--check", action="store_true", help="compare greedy tokens")
    parser.add_argument("--check-prompts", type=int, default=16)
    parser.add_argument("--check-tokens", type=int, default=64)
    parser.add_argument("--trace", action="store_true", help="profile 16 steps of every point")
    parser.add_argument("--deadline", type=float, default=440.0, help="seconds after which no further point begins")
    parser.add_argument("--mode", default="require", choices=("require", "auto", "off"), help="of the fast arm")
    parser.add_argument("--settings", default="{}", help="more settings of the fork, as JSON")
    parser.add_argument("--stock", default="plain", choices=("plain", "off"), help="the fork not loaded, or loaded with mode off")
    parser.add_argument("--kv-gib", type=float, default=0.0, help="cache of each engine; 0: what the memory allows")
    parser.add_argument(
        "--engines", type=int, default=2, choices=(1, 2), help="1: one engine with stock's graphs beside the fast"
    )
    parser.add_argument("--one-by-one", action="store_true", help="start the engines one after the other")
    parser.add_argument("--cache", default="~/.cache/k3-engine-benchmark", help="where the engines keep compiled code")
    parser.add_argument("--model", help="a folder with another config.json, and weights if it has any")
    parser.add_argument("--commit", help="the commit measured, where the tree is not a git checkout")
    return parser


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    if options.plot:
        plot(json.loads(options.plot.read_text()), options.plot.with_suffix(".png"))
        return 0
    if options.table:
        print(table([json.loads(file.read_text()) for file in options.table]))
        return 0
    if options.out is None:
        parser.error("expected --out FILE, --plot FILE or --table FILE")
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
