"""One server for all tests of this folder: the tiny checkpoint behind `vllm serve`, asked through the `openai` client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# for `asking` and `load_clients`, for `cpu_decode`
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]

MODEL = "tiny-k3"
MAX_MODEL_LEN = 512
# Stays after the run, for whoever asks why a test failed.
LOG = Path(__file__).resolve().parents[2] / ".demo" / "server-tests.log"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and "server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny checkpoint."""
    from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import write_tiny

    directory = tmp_path_factory.mktemp("checkpoint") / "tiny-k3"
    write_tiny(directory)
    return directory


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[object]:
    """A running `cli.server.Server`."""
    from vllm.model_executor.models.kimi_k3_fast.cli.demo import COMPACT_JSON, SMALL_CACHE
    from vllm.model_executor.models.kimi_k3_fast.cli.server import Server

    args = ["--served-model-name", MODEL, "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8"]
    args += [*SMALL_CACHE, *COMPACT_JSON]
    args += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prefix-caching"]
    args += ["--dtype", "float32"]  # texts are compared between batches of other sizes, which round differently in BF16
    with Server(tiny, args, log=LOG) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
