"""Fixtures of the model's tests: vLLM's parallel groups of one process, without an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `harness` and `reference` are modules beside the tests


@pytest.fixture(scope="package")
def parallel_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups with one rank over gloo, and a current config: what its parallel layers ask for when built."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()):
        rendezvous = tmp_path_factory.mktemp("gloo") / "store"
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1)
        yield
        cleanup_dist_env_and_memory()
    torch.set_num_threads(threads)
