"""Ops that are one launch of the matmul of `skinny.py`: their plan, and the kernel of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..reasons import Refusal
from .build import Compiled, KernelSpec, get


@dataclass(frozen=True)
class Plan:
    """What will run: one kernel. `config` has a `shape`."""

    config: Any
    arch: str
    spec: KernelSpec

    def __str__(self) -> str:
        shape = self.config.shape
        sizes = " ".join(f"{p.name} {'x'.join(map(str, p.shape))}" for p in self.spec.params)
        return f"{self.spec.op}: {self.spec.name} on {sizes}; {shape.tactic}, {shape.smem_bytes} B shared"


def make(config: Any, arch: str, refusal: Refusal | None, spec: Callable[[Any], KernelSpec]) -> Plan:
    """Raises ValueError where there is a refusal."""
    if refusal:
        raise ValueError(str(refusal))
    return Plan(config, arch, spec(config))


class Planned(Protocol):
    """What a plan of one kernel has, whatever else it knows."""

    @property
    def arch(self) -> str: ...
    @property
    def spec(self) -> KernelSpec: ...


def compiled(plan: Planned) -> Compiled:
    """The callable kernel of a plan: loads or compiles it. Once, before capture."""
    return get(plan.spec, plan.arch)
