"""`all_reduce`: plans and refusals, compilation, ranks against each other on a machine in software, and on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ptx_machine import run_ranks

from vllm.model_executor.models.kimi_k3_fast.comm.layout import Layout
from vllm.model_executor.models.kimi_k3_fast.ops import all_reduce as op
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops.all_reduce import reference
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

SMALL = [
    op.Config(3, 64, 2, 1, threads=128),
    op.Config(3, 64, 2, 2, threads=128),
    op.Config(5, 64, 4, 2, threads=128),
    op.Config(9, 130, 2, 1, threads=128),
]


def test_reference_rounds_once() -> None:
    parts = [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(8)]
    exact = reference.exact(parts)
    assert (reference.in_order(parts).double() - exact).abs().max() <= exact.abs().max() * 2**-8


@pytest.mark.parametrize("config", [*SMALL, op.Config(64, 7168, 8, 2), op.Config(64, 7168, 2)], ids=str)
def test_every_pair_has_a_word_of_its_own(config: op.Config) -> None:
    words = [(config.owner(p) if config.two_shot else 0, config.word(p)) for p in range(config.pairs)]
    assert len(set(words)) == config.pairs and max(w for _, w in words) < config.words
    if config.two_shot:
        second = [(config.owner(p), config.word(p, second=True)) for p in range(config.pairs)]
        assert len(set(second)) == config.pairs
        assert config.share <= min(w for _, w in second) and max(w for _, w in second) < config.words
    assert config.blocks * config.threads * config.items >= config.pairs


def test_refuses_what_it_cannot_compute() -> None:
    assert op.unavailable_reason(SMALL[0], "sm_80").reason is Reason.OP_ARCH
    for change in (
        {"world": 3},
        {"columns": 63},
        {"tokens": 0},
        {"shots": 3},
        {"threads": 100},
        {"tokens": 4096, "columns": 7168},
    ):
        assert op.unavailable_reason(replace(SMALL[0], **change), "sm_90a").reason is Reason.OP_SHAPE, change


@pytest.mark.parametrize("config", SMALL[:2], ids=str)
def test_compiles_without_spilling(config: op.Config, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]) -> None:
    assert not findings(op.spec(config), arch)


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_ranks_agree_bit_for_bit_over_epochs(config: op.Config) -> None:
    """Three calls in a row over the same mailboxes: each must see its own epoch's words and nothing of those before."""
    layout = Layout(config.world, config.words)
    ranks = [
        {
            "x": torch.empty(config.tokens, config.columns, dtype=torch.bfloat16),
            "out": torch.empty(config.tokens, config.columns, dtype=torch.bfloat16),
            "peers": torch.zeros(config.world, dtype=torch.int64),
            "box": torch.zeros(layout.bytes // 4, dtype=torch.int32),
            "epoch": torch.zeros(2, dtype=torch.int32),
            "rank": r,
            "words": layout.words,
        }
        for r in range(config.world)
    ]
    for call in range(3):
        generator = torch.Generator().manual_seed(call)
        for own in ranks:
            own["x"].copy_(torch.randn(own["x"].shape, generator=generator))
            own["out"].fill_(float("nan"))
        run_ranks(op.spec(config), ranks, (config.blocks,), seed=call)
        expected = reference.in_order([own["x"] for own in ranks])
        for own in ranks:
            assert torch.equal(own["out"], expected)
            assert own["epoch"].tolist() == [call + 1, 0]
            assert own["box"][0] == 0, "a rank was called lost"


# -- on two GPUs ----------------------------------------


def _rank(rank: int, folder: str, configs: list[op.Config]) -> None:
    import torch.distributed as dist

    from vllm.model_executor.models.kimi_k3_fast.comm import Mailbox

    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    device = torch.device("cuda", rank)
    box = Mailbox(dist.group.WORLD, max(c.words for c in configs), device)
    for config in configs:
        plan = op.plan(config, build.device_arch())
        x = torch.zeros(config.tokens, config.columns, device=device, dtype=torch.bfloat16)
        out = torch.full_like(x, float("nan"))
        op.run(plan, x, out, box)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.run(plan, x, out, box)
        for step in range(20):
            both = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2 * step + r)).bfloat16() for r in range(2)]
            x.copy_(both[rank])
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out.cpu(), reference.in_order(both)), (config, step)
    box.health().check()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_replay_with_changed_inputs(tmp_path: Path) -> None:
    configs = [op.Config(t, 7168, 2, shots) for t in (1, 8, 64) for shots in (1, 2)]
    for config in configs:
        build.ensure(op.spec(config), build.device_arch())
    torch.multiprocessing.spawn(_rank, (os.fspath(tmp_path), configs), nprocs=2)
