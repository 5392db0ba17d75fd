"""Loading the released checkpoint into the model: every tensor has one named slot, and everything wrong is reported at once.

The model says where each checkpoint tensor goes (`Slot`). The files' headers are compared with that before a byte is read, so a
wrong checkpoint leaves the model untouched; values are checked as they stream in. After any error the model is not to be used,
and vLLM does not start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from . import mxfp4
from .checkpoint import PREFIX, CheckpointError, inspect_files
from .layers import Slot

VISION_PREFIXES = ("vision_tower.", "mm_projector.")


class Report:
    """Everything wrong with a checkpoint, by tensor name."""

    def __init__(self, slots: Mapping[str, Slot], ignored: tuple[str, ...]) -> None:
        self.slots, self.ignored = slots, ignored
        self.seen: set[str] = set()
        self.problems: list[str] = []

    def accept(self, stored_name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Slot | None:
        """The slot for a stored tensor; None when it is ignored or wrong (then noted)."""
        name = canonical_name(stored_name)
        if name.startswith(self.ignored):
            return None
        target = self.slots.get(name)
        if target is None:
            self.problems.append(f"unexpected: {stored_name} {list(shape)}")
        elif name in self.seen:
            self.problems.append(f"duplicate: {stored_name}, stored before under another prefix")
        elif shape not in target.shapes:
            expected = " or ".join(str(list(s)) for s in target.shapes)
            self.problems.append(f"mis-shaped: {stored_name}: expected {expected}, found {list(shape)}")
        elif dtype is None or target.is_bytes != (dtype == torch.uint8) or not (target.is_bytes or dtype.is_floating_point):
            expected = "uint8" if target.is_bytes else "a floating-point type"
            self.problems.append(f"mistyped: {stored_name}: expected {expected}, found {dtype}")
        else:
            self.seen.add(name)
            return target
        self.seen.add(name)
        return None

    def finish(self, consequence: str) -> None:
        """Raise CheckpointError if anything was wrong or is missing."""
        problems = self.problems + [
            f"missing: {name} {list(target.shapes[0])}" for name, target in self.slots.items() if name not in self.seen
        ]
        if problems:
            raise CheckpointError(
                f"the checkpoint does not fit the configuration ({len(problems)} tensors). {consequence} "
                "Check that config.json and the weights belong together.\n" + "\n".join(f"  - {p}" for p in sorted(problems))
            )


def canonical_name(name: str) -> str:
    """A released name without the multimodal wrapper's prefix. The wrapper may store its text layers with or without `model.`."""
    name = name.removeprefix(PREFIX)
    return name if not name.startswith(("layers.", "embed_tokens.", "norm.", "output_attn_res_")) else f"model.{name}"


def load(
    slots: Mapping[str, Slot], weights: Iterable[tuple[str, torch.Tensor]], directory: Path | None, num_layers: int, num_mtp: int
) -> None:
    """Fill every slot from `weights` (name, full tensor). `directory`: the checkpoint's local folder, checked first when given.

    Tensors of the vision part and of `num_mtp` extra draft layers are left out. Raises CheckpointError.
    """
    ignored = (*VISION_PREFIXES, *(f"model.layers.{num_layers + i}." for i in range(num_mtp)))
    if directory is not None:
        headers = Report(slots, ignored)
        for name, stored in inspect_files(directory).items():
            headers.accept(name, stored.shape, stored.dtype)
        headers.finish("Nothing was loaded.")
    report = Report(slots, ignored)
    try:
        for name, tensor in weights:
            target = report.accept(name, tuple(tensor.shape), tensor.dtype)
            if target is None:
                continue
            if not is_finite(name, tensor):
                report.problems.append(f"not finite: {name} holds NaN or infinity")
                continue
            copy_into(target, tensor)
    except SafetensorError as error:
        raise CheckpointError(
            f"expected readable safetensors files, found a truncated or corrupt one: {error}. Fetch the "
            "checkpoint again; the model is not usable."
        ) from error
    report.finish("The model is not usable.")


def is_finite(name: str, tensor: torch.Tensor) -> bool:
    """No NaN and no infinity: by value, or by the NaN code of an MXFP4 scale."""
    if tensor.dtype == torch.uint8:
        return not (name.endswith("weight_scale") and bool((tensor == mxfp4.SCALE_NAN).any()))
    return bool(torch.isfinite(tensor).all())


def copy_into(target: Slot, tensor: torch.Tensor) -> None:
    """Copy this rank's part of a stored tensor into its slot."""
    first = target.shapes[0]
    if tuple(tensor.shape) != first:
        tensor = tensor.reshape(-1)[: first[0]]
    part = tensor[tuple(slice(s, s + n) for s, n in zip(target.start, target.dest.shape, strict=True))]
    target.dest.data.copy_(part)
