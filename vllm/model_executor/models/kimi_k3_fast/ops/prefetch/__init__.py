"""`prefetch`: ask for the next matrix's weights to come into L2 while something else leaves memory idle.

    no tensor changes; of every `every` rows of the matrix the first `first` are on their way when the launch ends

Only weights: they are static, so the launch asks before its dependency wait, and nothing that it asks for can be stale. It is
meant for the time in which ranks wait for one another: a sum over ranks moves little and takes 5 us, in which memory could read
20 MB. A matmul deals its rows to blocks in order, so what is asked for is spread over the matrix in the same way: every block
then finds a part of its rows in L2. Before a plain launch it does not pay: weights that the next kernel fetches itself before its
own wait fill that time already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...reasons import Reason, Refusal
from ..build import ARCHS, STATIC, Compiled, KernelSpec, Param, get

MOST_BYTES = 32 << 20  # of 50 MB of L2: the rest is for what runs meanwhile


@dataclass(frozen=True)
class Config:
    """`rows` x `columns` of the BF16 matrix. `blocks` of `threads`: how many ask. `inline`: launched in the stream of the layer,
    under programmatic dependent launch; False: beside it, on a stream of its own.
    """

    rows: int
    columns: int
    every: int = 16
    first: int = 4
    blocks: int = 8
    threads: int = 128
    inline: bool = True

    @property
    def wanted(self) -> int:
        """Rows that are asked for."""
        return self.rows // self.every * self.first + min(self.rows % self.every, self.first)

    @property
    def bytes(self) -> int:
        return self.wanted * self.columns * 2


@dataclass(frozen=True)
class Plan:
    """What will run: one kernel."""

    config: Config
    arch: str
    spec: KernelSpec


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"prefetch: expected one of {', '.join(ARCHS)}, found {arch}")
    c = config
    checks = (
        (c.rows >= 1 and c.columns >= 8 and c.columns % 8 == 0, f"rows of whole 16 bytes, found {c.rows} of {c.columns} columns"),
        (1 <= c.first <= c.every, f"the first 1 to {c.every} of every {c.every} rows, found {c.first}"),
        (c.blocks >= 1 and c.threads in range(32, 1025, 32), f"whole warps, found {c.blocks} blocks of {c.threads} threads"),
        (c.bytes <= MOST_BYTES, f"at most {MOST_BYTES} bytes, which L2 can keep, found {c.bytes}"),
    )
    failed = [text for holds, text in checks if not holds]
    return Refusal(Reason.OP_SHAPE, f"prefetch: expected {failed[0]}") if failed else None


def spec(config: Config) -> KernelSpec:
    params = (Param("w", "bf16", (config.rows, config.columns), STATIC),)
    return KernelSpec("bf16_prefetch", "prefetch", config, f"{__name__}.cute:bf16_prefetch", params)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    refusal = unavailable_reason(config, arch)
    if refusal:
        raise ValueError(str(refusal))
    return Plan(config, arch, spec(config))


def compiled(plan: Plan) -> Compiled:
    """The callable kernel of a plan: loads or compiles it. Once, before capture."""
    return get(plan.spec, plan.arch)


def run(plan: Plan, weight: torch.Tensor, stream: int | None = None) -> None:
    """weight [rows, columns] bf16: parts of it are asked into L2. Nothing is written."""
    compiled(plan)(weight, stream=stream)


def specs() -> list[KernelSpec]:
    """In front of the experts' router and of a TP8 in-projection, and a small one."""
    return [spec(c) for c in (Config(40, 64, every=16, first=5, blocks=2, threads=32), Config(896, 7168), Config(6288, 7168))]
