"""The guard: when the fast path ran, what it changed, and when it stepped aside. `current()` is this process' guard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..reasons import Refusal
from .core import Guard, graph_name
from .policy import GuardStop, Policy
from .records import BatchFacts, GraphKey, Mutation, Path, StateView, WriteSet

refused_patches: Mapping[str, Refusal] = {}
"""Patches that this process could not take, by name: what the guard is blind to here. The fast path does not run unwatched."""

_guard: Guard | None = None
_opens_expected = False


def current() -> Guard:
    """This process' guard, made with default settings when first asked for."""
    global _guard
    if _guard is None:
        _guard = Guard()
        _guard.opens_expected = _opens_expected
    return _guard


def expect_opens() -> None:
    """Say that the patched runner opens every real step: from now on an unopened forward is a warm-up, not a step."""
    global _opens_expected
    _opens_expected = True
    current().opens_expected = True


def _forget() -> None:
    """A forked child has its own steps and no writer thread: it starts a guard of its own."""
    global _guard
    _guard = None


os.register_at_fork(after_in_child=_forget)


def configure(settings: Any, rank: str | None = None) -> Guard:
    """Give this process' guard the fork's settings (and the name of its rank, for the report and the event file)."""
    current().configure(settings, rank)
    return current()


__all__ = [
    "BatchFacts",
    "GraphKey",
    "Guard",
    "GuardStop",
    "Mutation",
    "Path",
    "Policy",
    "StateView",
    "WriteSet",
    "configure",
    "current",
    "expect_opens",
    "graph_name",
]
