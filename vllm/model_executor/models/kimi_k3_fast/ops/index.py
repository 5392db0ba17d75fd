"""Every kernel of the project, in one list: what `k3fast kernels list|compile|verify` and CI go through.

An op joins by a module here; its `specs()` returns the kernels of the shapes that are served and of the small shapes that tests
run.
"""

from __future__ import annotations

import importlib

from .build import KernelSpec

OPS: tuple[str, ...] = ()


def specs(op: str | None = None) -> list[KernelSpec]:
    """The kernels of one op, or of all. Raises ValueError for an op that is not listed."""
    if op is not None and op not in OPS:
        raise ValueError(f"Expected an op of {', '.join(OPS)}; found {op!r}.")
    package = __name__.rpartition(".")[0]
    return [spec for name in ([op] if op else OPS) for spec in importlib.import_module(f"{package}.{name}").specs()]
