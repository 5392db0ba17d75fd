"""Adapter: what vLLM says of a step, as the plain values of `plan` and of the executors. The only reader of vLLM's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context

from ..guard import Guard
from ..model.backend import KDAMetadata, MLAMetadata, StepRows
from ..reasons import Reason, Refusal
from . import cuda_executor
from .executor import CacheRows, StateSlots, StepTensors
from .plan import StepKey


def bind_ranks(guard: Guard) -> Callable[[list[int]], list[list[int]]] | None:
    """Name this process' rank, and let the guards of a tensor-parallel group compare their decisions over its host-side group.

    Returns that collective: lists of integers, equally long on all ranks -> every rank's; None for one rank.
    """
    group = get_tp_group()
    guard.rank = f"rank{group.rank_in_group}"
    if group.world_size == 1:
        return None

    def all_gather(numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(group.world_size)]
        torch.distributed.all_gather(everyone, mine, group=group.cpu_group)
        return [theirs.tolist() for theirs in everyone]

    guard.bind_ranks(group.rank_in_group, group.world_size, all_gather)
    return all_gather


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


def batch_key(batch: Any, mode: str, bound: int) -> StepKey:
    """The same of a batch of the V2 runner (`InputBatch`), from its host-side arrays. mode: how it is going to run."""
    scheduled = batch.num_scheduled_tokens[: batch.num_reqs]
    prompt = int(scheduled[batch.is_prefilling_np[: batch.num_reqs]].sum())
    width = int(scheduled[0]) if batch.num_reqs and (scheduled == scheduled[0]).all() else 0
    return StepKey(batch.num_reqs, batch.num_tokens, batch.num_tokens_after_padding, prompt, width, bound, mode)


def cuda_step(
    names: Sequence[str], tokens: int, step: Mapping[str, Any], slot_mapping: Mapping[str, torch.Tensor]
) -> cuda_executor.StepTensors | Refusal:
    """The CUDA executor's index tensors, from stock's metadata of a batch of `tokens` decoding requests about to be captured.

    Stock's builders keep these tensors at one address for all replays of a graph, since its own captured kernels read them too.
    """
    slots, rows, tables, lengths, starts = {}, {}, {}, {}, None
    for name in names:
        group = step[name]
        states = getattr(group, "non_spec_state_indices_tensor", None)
        decoding = group.num_decodes if group.num_prefills == 0 else -1
        if decoding != tokens:
            return _unexpected(name, f"{tokens} decoding requests and no prompt", f"{decoding}")
        if states is not None:
            starts = group.non_spec_query_start_loc
            slots[name] = states.view(-1, 1)
            found: list[tuple[torch.Tensor, tuple[int, ...], torch.dtype]] = [(slots[name], (tokens, 1), torch.int32)]
        else:
            starts = group.query_start_loc if starts is None else starts
            tables[name], lengths[name] = group.decode.block_table, group.decode.seq_lens
            rows[name] = slot_mapping[name][:tokens]
            found = [
                (tables[name], (tokens, tables[name].shape[1]), torch.int32),
                (lengths[name], (tokens,), torch.int32),
                (rows[name], (tokens,), torch.int64),
            ]
        for tensor, shape, dtype in found:
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                return _unexpected(name, f"{dtype} {shape} row-major", f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}")
    if starts is None or starts.dtype != torch.int32 or starts.shape[0] <= tokens:
        return _unexpected("the batch", f"int32 starts of {tokens} requests", str(None if starts is None else starts.shape))
    return cuda_executor.StepTensors(slots, rows, tables, lengths, starts[tokens : tokens + 1])


def _unexpected(where: str, expected: str, found: str) -> Refusal:
    return Refusal(Reason.CACHES_LAYOUT, f"metadata of {where}: expected {expected}, found {found}")
