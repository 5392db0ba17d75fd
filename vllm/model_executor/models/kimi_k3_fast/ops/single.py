"""Ops that are one launch of the matmul of `skinny.py`, or the library's products with a kernel or none: plan and kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..reasons import Refusal
from .build import DTYPES, Compiled, KernelSpec, get

Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape and dtype (a key of `build.DTYPES`)


@dataclass(frozen=True)
class Plan:
    """What will run. `config` has a `chosen` tactic and a `shape`. `spec`: the kernel of ours, None where the library does all
    of it. `scratch`: buffers that `run` writes, made once by who runs the plan.
    """

    config: Any
    arch: str
    spec: KernelSpec | None
    scratch: Shapes = field(default_factory=dict, compare=False)

    def scratch_shapes(self) -> Shapes:
        """name -> (shape, dtype) of what `run` wants as `scratch`."""
        return self.scratch

    def __str__(self) -> str:
        kernel = ""
        if self.spec is not None:
            kernel = f"{self.spec.op}: {self.spec.name} on "
            kernel += " ".join(f"{p.name} {'x'.join(map(str, p.shape))}" for p in self.spec.params)
        if self.config.chosen != self.config.shape.tactic:
            return f"{kernel}; products by the library" if kernel else f"{self.config}: product by the library"
        return f"{kernel}; {self.config.chosen}, {self.config.shape.smem_bytes} B shared"


def make(
    config: Any,
    arch: str,
    refusal: Refusal | None,
    spec: Callable[[Any], KernelSpec | None],
) -> Plan:
    """Raises ValueError where there is a refusal."""
    if refusal:
        raise ValueError(str(refusal))
    return Plan(config, arch, spec(config))


def find_scratch(plan: Plan, scratch: Mapping[str, torch.Tensor] | None) -> list[torch.Tensor]:
    """The plan's buffers, in its order. Raises ValueError where one is missing or another."""
    found = []
    for name, (shape, dtype) in plan.scratch.items():
        tensor = (scratch or {}).get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype is not DTYPES[dtype][1]:
            has = "none" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"expected a buffer {name} of {shape} {dtype}, as plan.scratch_shapes() says; found {has}")
        found.append(tensor)
    return found


class Planned(Protocol):
    """What a plan of one kernel has, whatever else it knows."""

    @property
    def arch(self) -> str: ...
    @property
    def spec(self) -> KernelSpec | None: ...


def compiled(plan: Planned) -> Compiled:
    """The callable kernel of a plan: loads or compiles it. Once, before capture. Raises ValueError where it has none."""
    if plan.spec is None:
        raise ValueError(f"expected a plan with a kernel, found {plan}")
    return get(plan.spec, plan.arch)
