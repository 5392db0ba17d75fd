"""Decode on the CPU, fast and standard path interleaved step by step in one engine: the same requests, caches and context.

The engine decodes a batch; every other step is sent to the standard path, so that both see the same clocks, neighbours and
context. A step is timed around the model's forward (`model`) and around the engine's whole step with scheduling and sampling
(`step`).

    python benchmarks/cpu_decode.py --out benchmarks/results/cpu_decode.json [--model tiny|1b] [--batches 1,8,32] [--steps 60]

`1b` generates a K3 of about a billion parameters (hidden 2048, 64 experts, top 8, MXFP4) and also states the share of the
memory floor: the bytes a step must read over the bandwidth that a copy reaches in the same process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PATHS = ("fast", "standard")
WARM = 6  # steps of each path that are not counted


def model_config(size: str) -> dict[str, Any]:
    from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import tiny_config

    if size == "tiny":
        return tiny_config()
    linear = {**tiny_config()["linear_attn_config"], "num_heads": 16, "head_dim": 128}
    return tiny_config(
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=5632,
        linear_attn_config=linear,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=64,
        num_experts_per_token=8,
        moe_intermediate_size=1024,
        routed_expert_hidden_size=1024,
    )


def start(folder: Path, batch: int) -> Any:
    """An in-process engine; one block of tokens for each request is enough for the contexts here."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="2")
    from vllm import LLM

    return LLM(str(folder), max_model_len=1024, max_num_seqs=max(batch, 2), enforce_eager=True, enable_prefix_caching=False)


def served_model(llm: Any) -> Any:
    found = llm.llm_engine.model_executor.driver_worker
    return getattr(found, "worker", found).model_runner.model


def measure(llm: Any, batch: int, steps: int, context: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each counted step by path: {"model": {path: [...]}, "step": {path: [...]}}."""
    from vllm import SamplingParams

    from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

    model, engine = served_model(llm), llm.llm_engine
    forward, spent = type(model).forward, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = forward(model, *args, **kwargs)
        spent.append(time.perf_counter() - began)
        return out

    model.forward = timed
    params = SamplingParams(max_tokens=2 * (steps + WARM) + 2, temperature=0, ignore_eos=True, detokenize=False)
    for i in range(batch):
        prompt = {"prompt_token_ids": [(7 * j * j + 13 * i + 1) % 250 for j in range(context)]}
        engine.add_request(f"decode-{batch}-{i}", prompt, params)
    while any(out.outputs[0].token_ids for out in engine.step()) is False:
        pass
    times: dict[str, dict[str, list[float]]] = {"model": {p: [] for p in PATHS}, "step": {p: [] for p in PATHS}}
    selected = model.fast.refusals
    for i in range(2 * (steps + WARM)):
        path = PATHS[i % 2]
        model.fast.refusals = selected if path == "fast" else (Refusal(Reason.MODE_OFF, "this step is the benchmark's baseline"),)
        began, before = time.perf_counter(), len(spent)
        if not engine.has_unfinished_requests():
            break
        engine.step()
        whole = time.perf_counter() - began
        if i >= 2 * WARM and len(spent) == before + 1:
            times["model"][path].append(spent[-1] * 1e3)
            times["step"][path].append(whole * 1e3)
    model.fast.refusals = selected
    del model.forward
    while engine.has_unfinished_requests():
        engine.step()
    return times


def copy_bandwidth() -> float:
    """Bytes a second that a copy of 512 MB moves, reads and writes together; best of five."""
    import torch

    source = torch.ones(1 << 29, dtype=torch.uint8)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(6):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() / best


def bytes_of_step(model: Any, batch: int) -> int:
    """Weights that a decode step of `batch` tokens must read, with the expected number of distinct experts, and the states
    twice.
    """
    c, total = model.config, 0
    for name, weight in model.named_parameters():
        size = weight.numel() * weight.element_size()
        if ".experts." in name:
            miss = (1 - c.experts_per_token / c.num_experts) ** batch
            total += int(size * (1 - miss))
        elif "embed_tokens" not in name:
            total += size
    state = sum(
        layer.heads * layer.head_dim**2 * 4 for layer in (x.self_attn for x in model.model.layers) if hasattr(layer, "head_dim")
    )
    return total + 2 * batch * state


def machine(*packages: str) -> dict[str, Any]:
    """Processor, cores that this process may use, and the versions of Python and of these packages. Standard library only."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "processor": next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def provenance() -> dict[str, Any]:
    import torch
    from vllm import __version__

    here = machine()
    commit = (
        subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
        or None
    )
    return {
        "cpu": here["processor"],
        "cores": here["cores"],
        "load_average_at_start": os.getloadavg(),
        "python": here["python"],
        "torch": torch.__version__,
        "vllm": __version__,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def plot(results: list[dict[str, Any]], title: str, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for offset, (path, colour) in enumerate(zip(PATHS, ("#2b4a6f", "#b9c4d0"), strict=True)):
        bars = axes.bar(
            [i + (offset - 0.5) * 0.38 for i in range(len(results))],
            [r["model_ms"][path] for r in results],
            0.36,
            color=colour,
            label=path,
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(results)), [f"batch {r['batch']}\n{r['ratio']:.2f}x" for r in results])
    axes.set_ylabel("median of one decode step, ms")
    axes.set_title(title, fontsize=10)
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write; the plot goes beside it as a PNG")
    parser.add_argument("--model", choices=("tiny", "1b"), default="tiny")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", type=int, default=60, help="counted steps of each path")
    parser.add_argument("--context", type=int, default=64)
    options = parser.parse_args()
    batches, results = [int(b) for b in options.batches.split(",")], []
    where = provenance()
    with tempfile.TemporaryDirectory() as folder:
        from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import write_tiny

        write_tiny(Path(folder), config=model_config(options.model))
        llm = start(Path(folder), max(batches))
        model = served_model(llm)
        bandwidth = copy_bandwidth()
        for batch in batches:
            times = measure(llm, batch, options.steps, options.context)
            medians = {kind: {p: statistics.median(times[kind][p]) for p in PATHS} for kind in times}
            moved = bytes_of_step(model, batch)
            floor = moved / bandwidth * 1e3
            results.append(
                {
                    "batch": batch,
                    "steps": {p: len(times["model"][p]) for p in PATHS},
                    "model_ms": medians["model"],
                    "step_ms": medians["step"],
                    "ratio": medians["model"]["standard"] / medians["model"]["fast"],
                    "step_ratio": medians["step"]["standard"] / medians["step"]["fast"],
                    "bytes": moved,
                    "floor_ms": floor,
                    "share_of_floor": floor / medians["model"]["fast"],
                }
            )
            r = results[-1]
            fast, standard = r["model_ms"]["fast"], r["model_ms"]["standard"]
            share = f"floor {floor:.3f} ms, share {r['share_of_floor']:.1%}"
            print(f"batch {batch:3d}: fast {fast:.3f} ms, standard {standard:.3f} ms, {r['ratio']:.2f}x; {share}", flush=True)
    report = {
        "benchmark": "cpu_decode",
        "model": options.model,
        "copy_gb_per_s": bandwidth / 1e9,
        "provenance": where,
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    plot(results, f"K3 {options.model}, {where['cpu']}, {where['cores']} cores, BF16", options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
