"""Every operator test runs on every instruction set of this machine; they share the yardstick of the GPU kernels' tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.model_executor.models.kimi_k3_fast.ops import cpu

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ops")]  # for `cases` and `yardstick`


@pytest.fixture(params=cpu.available())
def cpp(request: pytest.FixtureRequest) -> Iterator[cpu.CpuForms]:
    """The C++ forms on one instruction set."""
    yield cpu.CpuForms(request.param)
    cpu.CpuForms("auto")


@pytest.fixture
def best() -> cpu.CpuForms:
    return cpu.CpuForms("auto")
