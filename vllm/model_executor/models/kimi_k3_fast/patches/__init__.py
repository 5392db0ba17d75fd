"""The fork's changes to vLLM's shared code: small insert-only diffs, applied in memory at start in every process.

`apply()` is called once at registration. `state()` says what is installed and what has run in this process.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from .. import guard
from ..reasons import Reason, Refusal
from . import hooks
from .applier import DISPLACED, INSTALLED, Applier

_applier: Applier | None = None
_told: dict[str, Any] = {}

HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "1": {"worker": ("batch_dispatched",)},
    "2": {"engine": ("blocks_allocated", "scheduled"), "worker": ("step_received",)},
    "3": {"engine": ("must_end",), "worker": ("logits_checked", "mark")},
}
"""For each patch and kind of process, the hooks that run in every step there."""

SUSPICIOUS = 32  # calls of one hook after which another of the same kind of process must have been called too


def apply() -> list[Refusal]:
    """Patch this process, once. Returns the patches that are refused; what depends on them must be off."""
    global _applier
    if _applier is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return [Refusal(Reason.BASE_VERSION, "vLLM is not installed")]
        roots = [Path(place).parent for place in spec.submodule_search_locations]
        root = next(place for place in roots if (place / "vllm" / "v1").is_dir())
        _applier = Applier(root)
        _applier.apply()
        hooks.check = check
        guard.refused_patches = _applier.refusals
        if "1" not in _applier.refusals:
            guard.expect_opens()
    return list(_applier.refusals.values())


def state() -> dict[str, dict[str, Any]]:
    """By patch: the state of each target, why it is refused, and how often each of its hooks has run in this process."""
    if _applier is None:
        return {}
    states = _applier.states()
    for name, patch in states.items():
        wanted = [hook for names in HOOKS[name].values() for hook in names]
        patch["ran"] = {hook: hooks.ran.get(hook, 0) for hook in wanted}
    return states


def check() -> None:
    """Tell of patches that changed state, and of those that are installed but do not run: a worker its guard, the engine core the
    workers, with the next scheduled step."""
    global _told
    states = state()
    visible = {name: {**patch, "ran": {hook: bool(n) for hook, n in patch["ran"].items()}} for name, patch in states.items()}
    silent = [(name, detail) for name, patch in states.items() for detail in _silent(name, patch)]
    silent = [(name, detail) for name, detail in silent if guard.current().once(f"patch {name}: {detail}")]
    if visible == _told and not silent:
        return
    _told = visible
    if hooks.ran.get("scheduled") and not hooks.ran.get("step_received"):
        hooks.process.update(patches=visible, silent=[*hooks.process.get("silent", ()), *silent])
        return
    guard.current().patches(visible)
    for name, detail in silent:
        guard.current().violation(Reason.PATCH_NOT_RUN, {"patch": name}, detail)


def worker_report() -> str:
    """This rank's report, patches looked at first, as JSON text."""
    check()
    return json.dumps(guard.current().report())


def _silent(name: str, patch: dict[str, Any]) -> list[str]:
    found = [f"{t}: something replaced the patched function" for t, s in patch["targets"].items() if s == DISPLACED]
    if INSTALLED not in patch["targets"].values():
        return found
    for kind, wanted in HOOKS[name].items():
        peers = [hook for kinds in HOOKS.values() for hook in kinds.get(kind, ())]
        busiest = max((hooks.ran.get(hook, 0) for hook in peers), default=0)
        for hook in wanted:
            if busiest >= SUSPICIOUS and not hooks.ran.get(hook, 0):
                found.append(f"{hook} never ran while other hooks of this process ran in every step")
    return found


__all__ = ["apply", "check", "hooks", "state", "worker_report"]
