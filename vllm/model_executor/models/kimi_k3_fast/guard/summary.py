"""One verdict over all ranks' reports: what an on-call person reads first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .totals import SCHEMA

RECENT_BUCKETS = 6
FALLBACK_SHARE = 0.01

HEALTHY, IDLE, REFUSED, FALLING_BACK, VIOLATION = "healthy", "idle", "refused", "falling back", "violation"


def summarise(ranks: Sequence[Mapping[str, Any]], process: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The answer of `GET /k3fast/report`: schema version, status, one object for each rank, and the API server's own state."""
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "status": status(ranks),
        "ranks_agree": agree(ranks),
        "ranks": list(ranks),
        "api_server": dict(process or {}),
    }


def status(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The worst that holds on any rank. Falling back: more than 1 % of the last minute's steps without prompt tokens."""
    if any(rank["violations"]["by_reason"] for rank in ranks) or not agree(ranks):
        return VIOLATION
    if not ranks or any(rank["deployment"]["selected"] is False for rank in ranks):
        return REFUSED
    recent = [bucket for rank in ranks for bucket in rank["history"]["buckets"][-RECENT_BUCKETS:]]
    fast, fallback = sum(bucket[1] for bucket in recent), sum(bucket[3] for bucket in recent)
    if fallback > FALLBACK_SHARE * (fast + fallback):
        return FALLING_BACK
    return HEALTHY if fast else IDLE


def agree(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ranks that stand at the same step have taken the same decisions up to it."""
    heads: dict[int, set[str]] = {}
    for rank in ranks:
        heads.setdefault(rank["decisions"]["step"], set()).add(rank["decisions"]["hash"])
    return all(len(hashes) == 1 for hashes in heads.values())
