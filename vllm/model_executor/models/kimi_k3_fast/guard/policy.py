"""What the guard does about what it sees.

`mode`    auto: fall back and say so; require: a decode step that falls back ends its requests with an error; off: no fast path.
`policy`  report: count and tell; quarantine: also never use that plan key again; stop: also end the process with an error.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


class GuardStop(RuntimeError):
    """Raised by policy `stop`: a violation ends the engine instead of being worked around."""


@dataclass(frozen=True)
class Policy:
    """The settings the guard acts on, flat and already validated. Numbers called `every` count steps; 0 is never."""

    mode: str = "auto"
    policy: str = "quarantine"
    allow: tuple[str, ...] = ()
    audit_every: int = 0
    shadow_every: int = 0
    agree_every: int = 256
    events_path: str = ""
    events_max_bytes: int = 64 << 20
    events_keep: int = 3
    summary_seconds: float = 60.0

    @classmethod
    def of(cls, settings: Any) -> Policy:
        """From the fork's settings object (`audit`, `shadow`: `.every`; `events`: `.path`, `.max_mib`, `.keep`)."""
        return cls(
            mode=settings.mode,
            policy=settings.policy,
            allow=tuple(settings.allow),
            audit_every=settings.audit.every,
            shadow_every=settings.shadow.every,
            agree_every=settings.agree_every,
            events_path=settings.events.path,
            events_max_bytes=settings.events.max_mib << 20,
            events_keep=settings.events.keep,
            summary_seconds=settings.summary_seconds,
        )

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "allow": list(self.allow)}
