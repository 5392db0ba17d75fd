"""One KDA+MoE layer in two traces, fast under stock, drawn to the same scale.

    python benchmarks/timeline.py --stock STOCK.txt --fast FAST.txt --out PICTURE.png [--title TEXT]

A trace has a line for each kernel: start us, duration us, name, as `layer_chain.py --timeline` and the profiler of a decode
step write them. A kernel launched early by programmatic dependent launch waits for its predecessor: that time is the thin bar
below the row. The layer is the span from the end of the layer before to its own end, taken in the middle of the trace where
kernels are many.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

GROUPS = {  # in this order: the first word found in a kernel's name decides
    "AttnRes": ("attn_res",),
    "KDA": ("kda", "delta_rule", "f_b"),
    "router, top-k, sort": ("topk", "moe_align", "count_and_sort", "grouped_topk"),
    "experts": ("w13", "w2_", "humming", "process_input", "mul_sum"),
    "matrices": ("project", "front", "tail", "skinny", "gemm", "nvjet", "cublas", "splitk", "gemv"),
    "activations, norms, adds": ("situ", "rms_norm", "elementwise", "add", "mul"),
}
COLOURS = ("#6c8ebf", "#2b7a78", "#d79b00", "#b85450", "#4a4a4a", "#bdbdbd", "#e0e0e0")


@dataclass(frozen=True)
class Kernel:
    start: float
    end: float
    name: str

    @property
    def group(self) -> int:
        name = self.name.lower()
        return next((i for i, words in enumerate(GROUPS.values()) if any(w in name for w in words)), len(GROUPS))


def read(file: Path) -> list[Kernel]:
    """The kernels of a trace, by start. Raises ValueError on a line that is not `start duration name`."""
    kernels = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        parts = line.split(" ", 2)
        try:
            start, duration = float(parts[0]), float(parts[1])
        except (ValueError, IndexError):
            raise ValueError(f"{file}:{number}: expected 'start duration name', found {line[:60]!r}") from None
        kernels.append(Kernel(start, start + duration, parts[2]))
    return sorted(kernels, key=lambda k: k.start)


@dataclass(frozen=True)
class Layer:
    """Its kernels, and when the layer before it ended: kernels launched before that wait."""

    kernels: list[Kernel]
    begin: float


def one_layer(kernels: list[Kernel]) -> Layer:
    """The kernels of one KDA+MoE layer: from an AttnRes to the second one after it, with the fewest kernels in between.

    The layer with the fewest kernels is a KDA one, since MLA launches more; traces hold both.
    """
    mixes = [i for i, kernel in enumerate(kernels) if kernel.group == 0]
    if len(mixes) < 5:
        raise ValueError(f"expected a trace of several layers, found {len(mixes)} AttnRes kernels")
    layers = [kernels[a:b] for a, b in zip(mixes[:-2], mixes[2:], strict=True)]
    # Spans that begin at a layer's MLP hold the experts before their second AttnRes; keep those that hold them after it.
    whole = [layer for layer in layers if not _experts_first(layer) and any(k.group == 3 for k in layer)]
    fewest = min(len(layer) for layer in whole)
    same = [layer for layer in whole if len(layer) == fewest]
    chosen = same[len(same) // 2]
    return Layer(chosen, max((k.end for k in kernels[: kernels.index(chosen[0])]), default=chosen[0].start))


def _experts_first(layer: list[Kernel]) -> bool:
    second = next(i for i, kernel in enumerate(layer) if i and kernel.group == 0)
    return any(kernel.group == 3 for kernel in layer[:second])


def active(layer: Layer) -> list[tuple[Kernel, float, float]]:
    """Each kernel with the span in which it was not merely waiting for the one before it."""
    spans, reached = [], layer.begin
    for kernel in layer.kernels:
        spans.append((kernel, min(max(kernel.start, reached), kernel.end), kernel.end))
        reached = max(reached, kernel.end)
    return spans


def draw(rows: dict[str, Layer], title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    figure, axes = pyplot.subplots(figsize=(11, 3.2), layout="constrained")
    for y, layer in enumerate(rows.values()):
        origin = layer.begin
        spans = active(layer)
        end = max(span[2] for span in spans) - origin
        for kernel, begin, stop in spans:
            colour = COLOURS[kernel.group]
            axes.barh(
                -y - 0.4, begin - kernel.start, left=kernel.start - origin, height=0.1, color=colour, alpha=0.5, linewidth=0
            )
            axes.barh(-y, stop - begin, left=begin - origin, height=0.62, color=colour, edgecolor="white", linewidth=0.6)
        axes.text(end + 1.5, -y, f"{end:.0f} us, {len(layer.kernels)} launches", va="center", fontsize=9)
    axes.set_yticks([-y for y in range(len(rows))], list(rows))
    axes.set_xlabel("us since the layer before ended")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.14)
    axes.set_xlim(left=min(0, *(layer.kernels[0].start - layer.begin for layer in rows.values())))
    names = [*GROUPS, "other"]
    handles = [patches.Patch(color=c, label=n) for c, n in zip(COLOURS, names, strict=True)]
    axes.legend(handles=handles, ncols=len(handles), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.28), frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(out, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--fast", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="One KDA+MoE layer of a Kimi K3 rank slice, one H200")
    options = parser.parse_args()
    rows = {"stock": one_layer(read(options.stock)), "fast": one_layer(read(options.fast))}
    draw(rows, options.title, options.out)


if __name__ == "__main__":
    main()
