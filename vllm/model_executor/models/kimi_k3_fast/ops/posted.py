"""Ops that sum over the ranks of a host through mailboxes: the parameters that a mailbox fills, and the check that it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..comm import Box
from ..reasons import Refusal
from .build import MAILBOX, SCALAR, STATE, STATIC, KernelSpec, Param, Sym


class Posting:
    """A plan whose kernel may take a mailbox. `config` has `world` and `words`."""

    config: Any
    spec: KernelSpec | None

    @property
    def words(self) -> int:
        """Of the mailbox; 0 where it takes none."""
        return self.config.words


@dataclass(frozen=True)
class Plan(Posting):
    """What will run: one kernel (None: the library's product)."""

    config: Any
    arch: str
    spec: KernelSpec | None

    @classmethod
    def make(cls, config: Any, arch: str, refusal: Refusal | None, spec: Callable[[Any], KernelSpec | None]) -> Plan:
        """Raises ValueError where there is a refusal."""
        if refusal:
            raise ValueError(str(refusal))
        return cls(config, arch, spec(config))


def params(world: int) -> tuple[Param, ...]:
    """A kernel's last parameters: what `arguments` gives."""
    return (
        Param("peers", "i64", (world,), STATIC, points_to=MAILBOX),
        Param("box", "i32", (Sym("box"),), MAILBOX),
        Param("epoch", "i32", (2,), STATE, align=8),
        Param("rank", "i32", (), SCALAR),
        Param("words", "i32", (), SCALAR),
    )


def arguments(plan: Posting, mailbox: Box | None) -> tuple[Any, ...]:
    """The mailbox as the kernel takes it. Raises ValueError where it does not fit the plan."""
    if mailbox is None or mailbox.layout.world != plan.config.world or mailbox.layout.words < plan.words:
        found = mailbox.layout if mailbox else None
        assert plan.spec is not None  # who needs a mailbox is a kernel
        expected = f"a mailbox of {plan.config.world} ranks and {plan.words} words"
        raise ValueError(f"{plan.spec.op}: expected {expected}, found {found}.")
    return mailbox.addresses, mailbox.memory, mailbox.epoch, mailbox.rank, mailbox.layout.words
