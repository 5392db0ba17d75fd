"""`all_reduce`: plans and refusals, compilation, ranks against each other on a machine in software, and on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ptx_machine import run_ranks
from yardstick import check_error

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
EPS = 1e-3  # counts beside the smaller tokens' squares
NORMS = [
    op.NormConfig(3, 64, 2, EPS, shots=1),
    op.NormConfig(3, 64, 2, EPS, shots=2),
    op.NormConfig(5, 136, 4, EPS, shots=1),  # three warps of 68 words
    op.NormConfig(5, 136, 4, EPS, shots=2),
    op.NormConfig(2, 2112, 4, EPS, shots=2),  # two words for most threads, one for others
]


def test_reference_rounds_once() -> None:
    parts = [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(8)]
    exact = reference.exact(parts)
    assert (reference.in_order(parts).double() - exact).abs().max() <= exact.abs().max() * 2**-8


@pytest.mark.parametrize(
    "config", [*SMALL, *NORMS, op.Config(64, 7168, 8, 2), op.Config(64, 7168, 2), op.NormConfig(64, 3584, 8, EPS)], ids=str
)
def test_every_pair_has_a_word_of_its_own(config: op.Config | op.NormConfig) -> None:
    words = [(config.owner(p) if config.two_shot else 0, config.word(p)) for p in range(config.pairs)]
    assert len(set(words)) == config.pairs and max(w for _, w in words) < config.words
    if config.two_shot:
        summed = range(config.pairs if isinstance(config, op.Config) else config.tokens)
        second = {(config.owner(p) if isinstance(config, op.Config) else 0, config.second(p)) for p in summed}
        assert len(second) == len(summed)
        assert config.share <= min(w for _, w in second) and max(w for _, w in second) < config.words
    assert config.blocks * config.threads * config.items >= config.pairs


@pytest.mark.parametrize("config", NORMS, ids=str)
def test_with_the_norm_a_rank_owns_its_columns(config: op.NormConfig) -> None:
    row, share = config.columns // 2, config.columns // 2 // config.world
    for pair in range(config.pairs):
        assert config.owner(pair) == pair % row // share
        assert config.packed(pair) == pair // row * share + pair % row % share


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
    assert op.norm_unavailable_reason(NORMS[0], "sm_80").reason is Reason.OP_ARCH
    for change in (
        {"world": 3},
        {"columns": 66},
        {"columns": 0},
        {"columns": 7172},
        {"tokens": 0},
        {"tokens": 133},
        {"shots": 3},
    ):
        assert op.norm_unavailable_reason(replace(NORMS[0], **change), "sm_90a").reason is Reason.OP_SHAPE, change
        with pytest.raises(ValueError, match="all_reduce: expected"):
            op.norm_plan(replace(NORMS[0], **change), "sm_90a")


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_served_latent_has_a_plan(world: int, tokens: int) -> None:
    plan = op.norm_plan(op.NormConfig(tokens, 3584, world, 1e-5), "sm_90a")
    assert plan.config.threads == 896 and plan.config.items == 2, "whole warps for 1,792 words"
    assert plan.words == tokens * (1792 // world + 1 if plan.config.two_shot else 1792)


@pytest.mark.parametrize("config", [*SMALL[:2], *NORMS[:2]], ids=str)
def test_compiles_without_spilling(
    config: op.Config | op.NormConfig, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]
) -> None:
    assert not findings(_spec(config), arch)


def _spec(config: op.Config | op.NormConfig) -> build.KernelSpec:
    return op.spec(config) if isinstance(config, op.Config) else op.norm_spec(config)


def _ranks(config: op.Config | op.NormConfig) -> list[dict[str, Any]]:
    """The arguments of every rank. What a kernel does not write stays poison."""
    layout, shapes = Layout(config.world, config.words), {p.name: p.shape for p in _spec(config).params}
    return [
        {
            "norm": 1 + 0.3 * torch.randn(config.columns, generator=torch.Generator().manual_seed(7)).bfloat16(),
            "x": torch.empty(shapes["x"], dtype=torch.bfloat16),
            "out": torch.empty(shapes["out"], dtype=torch.bfloat16),
            "peers": torch.zeros(config.world, dtype=torch.int64),
            "box": torch.zeros(layout.bytes // 4, dtype=torch.int32),
            "epoch": torch.zeros(2, dtype=torch.int32),
            "rank": r,
            "words": layout.words,
        }
        for r in range(config.world)
    ]


def _renew(ranks: list[dict[str, Any]], seed: int) -> list[torch.Tensor]:
    """New activations, of tokens that differ in size, and poisoned outputs. Returns the activations."""
    generator = torch.Generator().manual_seed(seed)
    for own in ranks:
        size = torch.logspace(-2, 1, len(own["x"]))[:, None]
        own["x"].copy_(size * torch.randn(own["x"].shape, generator=generator))
        own["out"].fill_(float("nan"))
    return [own["x"] for own in ranks]


@pytest.mark.parametrize("config", [*SMALL, *NORMS], ids=str)
def test_ranks_agree_over_epochs(config: op.Config | op.NormConfig) -> None:
    """Three calls in a row over the same mailboxes: each must see its own epoch's words and nothing of those before. The sum is
    alike on all ranks, bit for bit; with the norm, the ranks' shares make up the whole."""
    ranks = _ranks(config)
    for call in range(3):
        parts = _renew(ranks, call)
        run_ranks(_spec(config), ranks, (config.blocks,), seed=call)
        if isinstance(config, op.Config):
            assert all(torch.equal(own["out"], reference.in_order(parts)) for own in ranks)
        else:
            case = (parts, ranks[0]["norm"], config.eps)
            whole = torch.cat([own["out"] for own in ranks], 1)
            check_error(whole, reference.exact_norm(*case), reference.torch_norm(*case))
        for own in ranks:
            assert own["epoch"].tolist() == [call + 1, 0]
            assert own["box"][0] == 0, "a rank was called lost"


@pytest.mark.parametrize("config", [*SMALL[:3], *NORMS[2:4]], ids=str)
def test_a_missing_rank_is_named_to_everybody_within_the_bound(config: op.Config | op.NormConfig) -> None:
    ranks, lost = _ranks(config), config.world - 1
    _renew(ranks, 0)
    run_ranks(_spec(replace(config, bound_ns=2000)), ranks, (config.blocks,), missing=lost)
    assert [int(own["box"][0]) for own in ranks] == [1 + lost] * config.world, "the lost rank itself is told, too"
    assert all(own["out"].isnan().all() for own in ranks)
    assert [own["epoch"].tolist() for own in ranks] == [[1, 0]] * lost + [[0, 0]], "who is left is ready for another call"


# -- on two GPUs ----------------------------------------


def _rank(rank: int, folder: str, configs: list[op.Config | op.NormConfig]) -> None:
    import torch.distributed as dist

    from vllm.model_executor.models.kimi_k3_fast.comm import Mailbox

    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    device = torch.device("cuda", rank)
    box = Mailbox(dist.group.WORLD, max(c.words for c in configs), device)
    for config in configs:
        ranks = _ranks(config)
        x, norm, out = (ranks[rank][name].to(device) for name in ("x", "norm", "out"))
        if isinstance(config, op.Config):
            call = partial(op.run, op.plan(config, build.device_arch()), x, out, box)
        else:
            call = partial(op.run_norm, op.norm_plan(config, build.device_arch()), x, norm, out, box)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for step in range(20):
            both = _renew(ranks, step)
            x.copy_(both[rank])
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            if isinstance(config, op.Config):
                assert torch.equal(out.cpu(), reference.in_order(both)), (config, step)
                continue
            case = (both, ranks[0]["norm"], config.eps)
            exact, plain = (form(*case).chunk(2, 1)[rank] for form in (reference.exact_norm, reference.torch_norm))
            check_error(out.cpu(), exact, plain)
    box.health().check()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_replay_with_changed_inputs(tmp_path: Path) -> None:
    configs: list[op.Config | op.NormConfig] = [op.Config(t, 7168, 2, shots) for t in (1, 8, 64) for shots in (1, 2)]
    configs += [op.NormConfig(t, 3584, 2, 1e-5, shots) for t in (1, 8, 64) for shots in (1, 2)]
    for config in configs:
        build.ensure(_spec(config), build.device_arch())
    torch.multiprocessing.spawn(_rank, (os.fspath(tmp_path), configs), nprocs=2)
