"""What the operator tests share: GPU tests are listed as skipped without a device, artefacts live in a folder of the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.ops import build

sys.path.insert(0, str(Path(__file__).parent))  # the test kernels are modules beside the tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason shown in the summary, what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def fresh_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[build.Store]:
    """An empty artefact store, and no kernel loaded before."""
    monkeypatch.setattr(build, "store", build.Store([tmp_path / "kernels"]))
    monkeypatch.setattr(build, "compiled_here", [])
    monkeypatch.setattr(build, "_loaded", {})
    yield build.store


@pytest.fixture(params=build.ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    """Each architecture the kernels are compiled for."""
    return request.param
