"""Tests of the served model on GPUs: whole servers and engines of rank slices. All are marked `gpu`, and skipped without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]  # for `slices` and `rank_slice`


@pytest.fixture
def ranks() -> int:
    """All GPUs of this machine that a slice divides into: 2, 4 or 8."""
    from slices import gpus

    if gpus() < 2:
        pytest.skip("ranks need two GPUs")
    return max(count for count in (2, 4, 8) if count <= gpus())
