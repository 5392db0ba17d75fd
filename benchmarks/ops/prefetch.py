"""A matmul behind a wait of some microseconds in which memory is idle, with and without its weights asked into L2 meanwhile.

    python benchmarks/ops/prefetch.py --json OUT [--compile ARCH]

The wait is one thread that spins, as long as a sum over ranks takes (`--wait-us`). A call is: the prefetch, in the layer's stream
or on one beside it; the wait; the in-projection of a TP8 slice. Weights are cold. "wait alone" and "matmul alone" say what the
parts take; what the prefetch gains is the difference to "nothing asked".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops.ahead import compile_all
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import build, projection
from vllm.model_executor.models.kimi_k3_fast.ops import prefetch as op

ROWS, COLUMNS = 6288, 7168
PARTS = (1, 2, 4)  # of every 16 rows
CLOCK = 1.98  # GHz, of the spinning thread


def configs() -> list[op.Config]:
    return [op.Config(ROWS, COLUMNS, 16, first, inline=inline) for first in PARTS for inline in (True, False)]


def cases(batches: list[int], wait_us: float) -> Iterator[Case]:
    arch, moved = build.device_arch(), ROWS * COLUMNS * 2
    copies = copies_for(moved)
    weights = [torch.randn(ROWS, COLUMNS, device="cuda").bfloat16() for _ in range(copies)]
    cycles, side = int(wait_us * CLOCK * 1e3), torch.cuda.Stream()
    for tokens in batches:
        x = torch.randn(tokens, COLUMNS, device="cuda").bfloat16()
        out = torch.empty(tokens, ROWS, device="cuda", dtype=torch.bfloat16)
        matmul = projection.plan(projection.Config(tokens, ROWS, COLUMNS), arch)

        def multiply(i: int, matmul=matmul, x=x, out=out) -> None:
            projection.run(matmul, x, weights[i], out)

        def waited(i: int, multiply=multiply) -> None:
            torch.cuda._sleep(cycles)
            multiply(i)

        def inline(i: int, plan: op.Plan, waited=waited) -> None:
            op.run(plan, weights[i])
            waited(i)

        def beside(i: int, plan: op.Plan, multiply=multiply) -> None:
            main_stream = torch.cuda.current_stream()
            side.wait_stream(main_stream)
            op.run(plan, weights[i], stream=side.cuda_stream)
            torch.cuda._sleep(cycles)
            main_stream.wait_stream(side)
            multiply(i)

        variants: dict[str, Callable[[int], object]] = {
            "nothing asked": waited,
            "wait alone": lambda i: torch.cuda._sleep(cycles),
            "matmul alone": multiply,
        }
        for config in configs():
            plan, form = op.plan(config, arch), inline if config.inline else beside
            name = f"{config.bytes / 1e6:.0f} MB {'in the stream' if config.inline else 'beside it'}"
            variants[name] = lambda i, plan=plan, form=form: form(i, plan)
        yield Case({"slice": "TP8", "batch": tokens, "wait_us": wait_us}, moved, variants, copies, "nothing asked")


if __name__ == "__main__":
    parser = arguments("prefetch")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--wait-us", type=float, default=5.0, help="how long memory is idle before the matmul")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    matmuls = [spec for t in options.batches if (spec := projection.spec(projection.Config(t, ROWS, COLUMNS)))]
    compile_all([*(op.spec(c) for c in configs()), *matmuls], options.compile or build.device_arch())
    if not options.compile:
        main("prefetch", cases(options.batches, options.wait_us), options)
