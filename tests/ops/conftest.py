"""What the operator tests share: GPU tests are listed as skipped without a device, artefacts live in a folder of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.ops import build, commands

sys.path.insert(0, str(Path(__file__).parent))  # the test kernels are modules beside the tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason shown in the summary, what needs a CUDA device where there is none. On Blackwell every kernel is
    compiled by test_verify.py; the further configurations of the operators' own files are left to `make soak` there."""
    for item in items:
        compiles = "compile" in item.name.partition("[")[0] and item.path.name not in ("test_verify.py", "test_build.py")
        if compiles and any(arch in item.name for arch in ("sm_100a", "sm_103a")):
            item.add_marker(pytest.mark.soak)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def findings() -> Callable[[build.KernelSpec, str], list[str]]:
    """What is wrong with a kernel: `findings(spec, arch)` names spilled registers and every access out of order.

    It is compiled and judged once for all tests and runs: artefacts and verdicts are kept in the user's store, by content.
    """
    judge: Callable[..., dict[str, Any]] = partial(commands._verify, [str(folder) for folder in build.store.folders])
    return lambda spec, arch: judge(spec, arch)["findings"]


@pytest.fixture(scope="session")
def store_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> build.Store:
    return build.Store([tmp_path_factory.mktemp("kernels")])


@pytest.fixture
def shared_store(store_of_the_run: build.Store, monkeypatch: pytest.MonkeyPatch) -> build.Store:
    """The store of the tests' own kernels, each compiled once in a run; for tests that do not look at the compiling itself."""
    monkeypatch.setattr(build, "store", store_of_the_run)
    return store_of_the_run


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
