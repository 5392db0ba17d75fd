"""What every test shares: GPU tests are skipped without CUDA, and the run says how many were not run."""

from __future__ import annotations

import os

import pytest

# Small tensors on two cores: more threads than one only make the tests compete with each other and with the servers they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM would bind the one thread to the same core in every engine, and `make test` runs two suites side by side.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

_not_run: list[str] = []


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, and put the tests that start an engine last."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
            _not_run.append(item.nodeid)
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files whose GPU tests were not run here."""
    if not _not_run:
        return
    terminalreporter.section("GPU tests not run here")
    for file in sorted({nodeid.partition("::")[0] for nodeid in _not_run}):
        count = sum(nodeid.partition("::")[0] == file for nodeid in _not_run)
        terminalreporter.write_line(f"{file}: {count}")
