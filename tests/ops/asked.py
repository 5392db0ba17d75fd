"""What kernels on the PTX machine ask into L2 of following matrices: exactly the wanted columns of every row, once."""

from __future__ import annotations

import torch
from ptx_machine import BASE, GAP

from vllm.model_executor.models.kimi_k3_fast.ops import ahead, build
from vllm.model_executor.models.kimi_k3_fast.ops.ahead import Ahead


def following(what: Ahead, ranks: int = 1) -> list[list[torch.Tensor]]:
    """The matrices of each rank. All lie behind each other in one tensor."""
    whole = torch.randn(ranks * sum(what.rows), what.pitch).bfloat16().split(what.rows * ranks)
    return [list(whole[i : i + len(what.rows)]) for i in range(0, len(whole), len(what.rows))]


def as_parameters(what: Ahead, matrices: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """They as a kernel takes them. `check` wants them in front of its other tensors."""
    return dict(zip([p.name for p in ahead.params(what)], ahead.arguments(what, matrices), strict=True))


def check(what: Ahead, found: list[tuple[int, int]], ranks: int = 1) -> None:
    """found: what the machine's memory says was asked for, by ranks whose matrices come first in it."""
    starts = [BASE + GAP + 2 * (row * what.pitch + what.first) for row in range(ranks * sum(what.rows))]
    assert sorted(found) == [(start, 2 * what.columns) for start in starts]


def around(spec: build.KernelSpec) -> tuple[str, str]:
    """A kernel's code behind its dependency wait, in front of and behind the first request."""
    text = (build.ensure(spec, "sm_90a") / f"{spec.name}-{build.content_hash(spec, 'sm_90a')}.ptx").read_text()
    before, _, after = text.partition("cp.async.bulk.prefetch")
    return before.partition("griddepcontrol.wait")[2], after
