"""`prefetch`: which bytes it asks for, on a machine in software; that it changes none and that a matmul gets faster, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ptx_machine import run as run_ptx

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import prefetch as op
from vllm.model_executor.models.kimi_k3_fast.ops.prefetch import reference
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

SMALL = [
    op.Config(40, 64, every=16, first=5, blocks=2, threads=32),
    op.Config(7, 128, every=4, first=4, blocks=1, threads=32),
    op.Config(130, 8, every=3, first=1, blocks=3, threads=32),
]


def test_refuses_what_it_cannot_do() -> None:
    assert op.unavailable_reason(SMALL[0], "sm_80").reason is Reason.OP_ARCH
    for change in ({"columns": 60}, {"first": 17}, {"first": 0}, {"threads": 40}, {"rows": 1 << 20, "columns": 7168}):
        assert op.unavailable_reason(replace(SMALL[0], **change), "sm_90a").reason is Reason.OP_SHAPE, change


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_ptx_asks_for_each_wanted_row_once(config: op.Config) -> None:
    """Against a count of rows: none past the end, none twice. The machine checks that each lies inside the matrix."""
    w = torch.randn(config.rows, config.columns).bfloat16()
    before, asked = w.clone(), []
    run_ptx(op.spec(config), {"w": w}, (config.blocks,), prefetched=asked)
    start, size = min(first for first, _ in asked), config.columns * 2
    assert sorted((first - start) // size for first, _ in asked) == reference.rows(config)
    assert {count for _, count in asked} == {size} and config.wanted == len(asked)
    assert torch.equal(w, before)


@pytest.mark.parametrize("config", SMALL[:1], ids=str)
def test_compiles_without_spilling(config: op.Config, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]) -> None:
    assert not findings(op.spec(config), arch)


@pytest.mark.gpu
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("config", [*SMALL, op.Config(896, 7168, first=16)], ids=str)
def test_changes_no_byte(config: op.Config, inline: bool) -> None:
    """A guard row before and behind the matrix: it must stay as it is as well."""
    around = torch.randn(config.rows + 2, config.columns, device="cuda").bfloat16()
    before, w = around.clone(), around[1:-1]
    plan = op.plan(replace(config, inline=inline), build.device_arch())
    op.run(plan, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(plan, w)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(around, before)


@pytest.mark.gpu
def test_the_rows_are_in_l2_afterwards() -> None:
    """A reduction over 12 MB that were flushed out is faster behind a prefetch of all of it and an idle while; by the median."""
    config = op.Config(896, 7168, every=16, first=16, inline=False)
    w = torch.randn(config.rows, config.columns, device="cuda").bfloat16()
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    plan, out = op.plan(config, build.device_arch()), torch.empty(1, device="cuda", dtype=torch.bfloat16)
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(22):
        ahead = turn % 2 == 0
        flush.fill_(turn)
        if ahead:
            op.run(plan, w)
        torch.cuda._sleep(100_000)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.amax(w.view(-1), dim=0, keepdim=True, out=out)
        end.record()
        torch.cuda.synchronize()
        if turn > 1:
            times[ahead].append(start.elapsed_time(end))
    warm, cold = (sorted(times[k])[5] for k in (True, False))
    assert warm < cold, (warm, cold)
