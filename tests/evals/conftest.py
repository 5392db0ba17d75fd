"""What the gate's tests share: paths to evals/ and to the modules beside the tests, and a suite of short items."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm.model_executor.models.kimi_k3_fast.evaluation import suites

sys.path[:0] = [str(Path(__file__).parent), *(str(suites.EVALS / part) for part in ("", "tasks", "faults"))]


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Items short enough for a server of the standard library: the gate's logic does not depend on their length."""
    from small_suite import small_evals

    return small_evals(tmp_path_factory.mktemp("evals"), {256: 10}, {2: 10}, wave=4)
