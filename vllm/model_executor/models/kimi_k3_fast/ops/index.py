"""Every kernel of the project, in one list: what `k3fast kernels list|compile|verify` and CI go through.

An op joins by its name here; its `specs()` returns the kernels that serving needs for its default shapes and those that cover
each code path at a small size.
"""

from __future__ import annotations

import importlib

from .build import ARCHS, KernelSpec

OPS: tuple[str, ...] = (
    "attn_res",
    "projection",
    "kda",
    "mla",
    "moe_front",
    "experts",
    "moe_tail",
    "oproj",
    "all_reduce",
    "prefetch",
)

# A kernel that keeps registers in memory is a failure, unless it is listed here with the reason: (kernel, architecture) -> why.
SPILLS: dict[tuple[str, str], str] = {
    ("bf16_oproj", arch): "8 bytes at one token: the ring leaves registers to the kernels beside it, and its fence takes one more"
    for arch in ("sm_100a", "sm_103a")
} | {
    (name, arch): "8 to 24 bytes at 64 tokens and 8 ranks: kept once, read once for an output, not where words are polled for"
    for name in ("bf16_oproj_two_shot", "bf16_all_reduce_two_shot")
    for arch in ARCHS
}


def specs(op: str | None = None) -> list[KernelSpec]:
    """The kernels of one op, or of all; equal ones once. Raises ValueError for an op that is not listed."""
    if op is not None and op not in OPS:
        raise ValueError(f"Expected an op of {', '.join(OPS)}; found {op!r}.")
    package = __name__.rpartition(".")[0]
    found = [spec for name in ([op] if op else OPS) for spec in importlib.import_module(f"{package}.{name}").specs()]
    return list(dict.fromkeys(found))
