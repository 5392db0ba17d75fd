"""Adapter: what vLLM says of a step, as the plain values of `plan` and `executor`. The only reader of vLLM's forward context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from ..model.backend import KDAMetadata, MLAMetadata, StepRows
from .executor import CacheRows, StateSlots, StepTensors
from .plan import StepKey


def attention_metadata() -> Mapping[str, Any] | None:
    """The step's metadata by layer name; None in profiling and dummy runs."""
    metadata = get_forward_context().attn_metadata
    return metadata if isinstance(metadata, Mapping) and metadata else None


def groups(metadata: Mapping[str, Any], layers: Sequence[str]) -> dict[str, str]:
    """Each layer's cache group, named by its first layer: layers of one group share one metadata object."""
    first: dict[int, str] = {}
    return {layer: first.setdefault(id(metadata[layer]), layer) for layer in layers}


def step_key(rows: StepRows | None, padded: int, bound: int) -> StepKey:
    """What every rank knows of a step.

    A row without context is a one-token prompt: its state starts from zero, as a prompt's does. Without speculation every request
    with more than one token is in its prompt.
    """
    if rows is None:
        return StepKey(requests=0, tokens=padded, padded=padded, prompt_tokens=0, width=0, bound=0)
    requests = len(rows.decodes) + len(rows.prefills)
    tokens = rows.starts[requests]
    prompt = sum(rows.starts[i + 1] - rows.starts[i] for i in rows.prefills) + sum(rows.context(i) == 0 for i in rows.decodes)
    width = 1 if not rows.prefills else tokens // requests if tokens % requests == 0 else 0
    return StepKey(requests, tokens, padded, prompt, width, bound)


def step_tensors(metadata: Mapping[str, Any], names: Sequence[str]) -> StepTensors:
    """The executor's index tensors of the cache groups `names`, for a step in which each request has one token."""
    found: StepTensors = {}
    for name in names:
        group = metadata[name]
        if isinstance(group, KDAMetadata):
            found[name] = StateSlots(group.slots)
        elif isinstance(group, MLAMetadata):
            found[name] = CacheRows(
                group.slot_mapping, group.block_table, torch.tensor(group.rows.lengths), max(group.rows.lengths)
            )
        else:
            raise TypeError(f"layer {name}: expected KDA or MLA metadata of the standard path, found {type(group).__name__}")
    return found
