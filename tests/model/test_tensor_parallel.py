"""Two ranks without an engine: sharded heads, experts and vocabulary give the logits of the float64 reference."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPT = [7 + 5 * i % 250 for i in range(40)]


CONFIGS = ("tiny_config", "tiny_kimi_linear_config")


def rank_main(rank: int, folder: str, results: Any) -> None:
    """One rank: a harness for each configuration over one gloo group of two. Sends the logits of each, or the traceback."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["VLLM_DIST_IDENT"] = f"two_ranks_{os.getppid()}"  # names the shared memory that the ranks reduce through
    try:
        from harness import Harness
        from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        from vllm.model_executor.models.kimi_k3_fast.model import checkpoint

        torch.set_num_threads(1)
        logits = {}
        with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=2))):
            init_distributed_environment(2, rank, f"file://{folder}/store", rank, "gloo")
            initialize_model_parallel(2)
            for name in CONFIGS:
                config = getattr(checkpoint, name)()
                engine = Harness(config, checkpoint.random_tensors(config, seed=8))
                pieces = [engine.step([(0, PROMPT[:30])])]
                pieces += [engine.step([(0, [token])]) for token in PROMPT[30:]]
                logits[name] = torch.cat(pieces).double().numpy()
        results.put((rank, logits))
    except BaseException:
        results.put((rank, traceback.format_exc()))


@pytest.mark.soak  # the engine's two ranks are held to the same reference, token by token, in tests/engine/test_tokens.py
def test_two_ranks_give_the_reference(tmp_path: Path) -> None:
    from reference import Reference

    from vllm.model_executor.models.kimi_k3_fast.model import checkpoint

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, str(tmp_path), results)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        received = dict(results.get(timeout=240) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()
    failures = [text for text in received.values() if isinstance(text, str)]
    assert not failures, "\n".join(failures)
    for name in CONFIGS:
        config = getattr(checkpoint, name)()
        expected = Reference(config, checkpoint.random_tensors(config, seed=8)).logits(PROMPT)
        assert (torch.from_numpy(received[0][name]) - expected).norm() / expected.norm() < 1e-5, name
