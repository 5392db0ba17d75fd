"""The matmul that PyTorch ships (cuBLAS on GPUs) as a tactic: for many tokens it is faster than the kernels of `skinny.py`.

Those have their weights on the way before the dependency wait and do in one launch what others do in several, which pays for few
tokens. For 64 they read the activation from shared memory too often; there the library's product is faster, even with small
kernels of ours around it for what one launch had done at once (a norm).

Its launches are ordinary ones: each starts when all before it on the stream is finished, and a kernel of ours behind it waits for
it as for any other, so the order of memory holds. It can be captured, needs no artefact, and no memory but the scratch that a
plan names.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

LEAST_TOKENS = 48  # from here on it is the choice where nothing was measured


@dataclass(frozen=True)
class Library:
    """A tactic without parameters. `call`: what a row of a tactics.json shows it by."""

    call: str = "torch.mm"

    def __str__(self) -> str:
        return "library"


LIBRARY = Library()


def problem(tokens: int) -> str | None:
    """Why the library does not serve this batch, or None."""
    return None if 1 <= tokens <= 64 else f"expected 1 to 64 tokens, found {tokens}"


def multiply(a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stream: int | None = None) -> None:
    """a [T, K] bf16, weight [N, K] bf16 -> out [T, N] bf16, overwritten and rounded once.

    Raises ValueError where `out` has another size: PyTorch would allocate.
    """
    _check(a, weight, out)
    with _on(stream):
        torch.mm(a, weight.t(), out=out)


def add_product(a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stream: int | None = None) -> None:
    """out [T, N] bf16 += a weight^T, rounded once. a [T, K] bf16, weight [N, K] bf16. Raises ValueError as `multiply`."""
    _check(a, weight, out)
    with _on(stream):
        torch.addmm(out, a, weight.t(), out=out)


def _check(a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    if out.shape != (a.shape[0], weight.shape[0]):
        raise ValueError(f"expected an output of {a.shape[0]} x {weight.shape[0]}, found {' x '.join(map(str, out.shape))}")


def _on(stream: int | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(torch.cuda.ExternalStream(stream))
