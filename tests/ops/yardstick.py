"""How far a kernel may be from the truth: twice what PyTorch's own arithmetic in the same types is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bulk_machine import run as run_ptx

from vllm.model_executor.models.kimi_k3_fast.comm import Box
from vllm.model_executor.models.kimi_k3_fast.comm.layout import Layout
from vllm.model_executor.models.kimi_k3_fast.ops import build

FP32_SLACK = 2.0**-20  # of the largest value


def check_error(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """`found` against the float64 truth `exact`, no further off than twice PyTorch's `plain`, in the largest and in the root
    mean square error.

    One unit of bf16 rounding of the largest value is always allowed: where PyTorch is exact by luck, a kernel need not be.
    """
    assert torch.isfinite(found).all(), (
        f"expected finite values, found {(~torch.isfinite(found)).sum().item()} others of {found.numel()}"
    )
    exact, error, allowed = exact.double(), (found.double() - exact).abs(), (plain.double() - exact).abs()
    slack = exact.abs().max().item() * (2.0**-9 if found.dtype is torch.bfloat16 else FP32_SLACK)
    assert error.max() <= 2 * allowed.max() + slack, f"largest error {error.max():.3e}, PyTorch's {allowed.max():.3e}"
    rms, yard = error.square().mean().sqrt(), allowed.square().mean().sqrt()
    assert rms <= 2 * yard + slack / 16, f"root mean square error {rms:.3e}, PyTorch's {yard:.3e}"


def replay_with(run, inputs: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Capture `run` in a CUDA graph, change the inputs in place, poison the outputs, replay."""
    run()  # loads the code; not allowed while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for name, tensor in fresh.items():
        inputs[name].copy_(tensor)
    for out in outputs:
        out.fill_(float("nan") if out.is_floating_point() else -7)
    graph.replay()
    torch.cuda.synchronize()


def scratch_of(plan: Any, device: str = "cuda") -> dict[str, torch.Tensor]:
    """The buffers a plan wants, full of NaN."""
    wanted = plan.scratch_shapes().items()
    return {name: torch.full(shape, float("nan"), device=device, dtype=build.DTYPES[dtype][1]) for name, (shape, dtype) in wanted}


def played(grid: tuple[int, ...]) -> Callable[[build.KernelSpec, str], Callable[..., None]]:
    """In the place of `build.get`: the kernel runs on the PTX machine, on tensors of the CPU."""

    def get(spec: build.KernelSpec, arch: str) -> Callable[..., None]:
        names = [param.name for param in spec.params]
        return lambda *tensors, stream=None: run_ptx(spec, dict(zip(names, tensors, strict=True)), grid, seed=len(names))

    return get


def mailbox_parameters(box: Box) -> dict[str, Any]:
    """A mailbox as a kernel's last parameters, by name."""
    return {"peers": box.addresses, "box": box.memory, "epoch": box.epoch, "rank": box.rank, "words": box.layout.words}


def boxes(layout: Layout, device: str = "cuda") -> list[Box]:
    """The mailboxes of ranks that share one device: what symmetric memory gives, without other processes."""
    memories = [torch.zeros(layout.bytes // 4, dtype=torch.int32, device=device) for _ in range(layout.world)]
    addresses = torch.tensor([m.data_ptr() for m in memories], dtype=torch.int64, device=device)
    epochs = [torch.zeros(2, dtype=torch.int32, device=device) for _ in memories]
    return [Box(rank, layout, memory, addresses, epochs[rank]) for rank, memory in enumerate(memories)]
