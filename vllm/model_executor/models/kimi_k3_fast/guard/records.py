"""The plain records that cross the guard's border: what a step was, what it wrote, what the fork changed.

The callers (the patched lines, the fast path) fill them with numbers, strings and tensors; the guard never looks behind them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..reasons import Refusal

if TYPE_CHECKING:
    import torch


class Path(enum.Enum):
    """Which implementation computed a step."""

    FAST = "fast"
    STANDARD = "standard"


class GraphKey(NamedTuple):
    """What identifies a captured CUDA graph: the same for the capture and for every replay."""

    mode: str  # "none" (eager), "piecewise" or "full"
    padded_tokens: int
    padded_reqs: int
    uniform: bool


@dataclass(slots=True)
class BatchFacts:
    """One batch descriptor as the model runner dispatched it, with real and padded rows.

    `request_ids` lists the requests of the real rows in batch order; `decode_tokens` counts the rows that are not prompt,
    -1 when the runner did not say.
    """

    mode: str
    num_tokens: int
    padded_tokens: int
    num_reqs: int
    padded_reqs: int
    uniform: bool
    request_ids: Sequence[str] = ()
    decode_tokens: int = -1

    @property
    def graph_key(self) -> GraphKey:
        return GraphKey(self.mode, self.padded_tokens, self.padded_reqs, self.uniform)


StepKind = tuple[Path, str | None, str, int, tuple[Refusal, ...]]
"""What steps are counted by: path, plan key, mode, speculative width, refusals."""

StepRecord = tuple[int, StepKind, int, int, int, int]
"""One closed step as it waits to be counted: number, kind, requests, tokens, decode tokens and padded rows. A plain tuple, since
one is made in every step."""


@dataclass(frozen=True)
class Mutation:
    """A setting of vLLM that the fork changed at start."""

    name: str
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class StateView:
    """A named piece of persistent state that steps read and write.

    The tensor's first dimension counts slots (blocks of the KV-cache manager; 1 for a plain buffer). With `rows_per_slot`
    > 1 the second dimension counts rows inside a slot, such as the tokens of a paged latent cache, and writes are
    declared by row. Views of several cache groups may share memory; the guard finds that out from the addresses.
    """

    name: str
    kind: str  # "kda_conv", "kda_recurrent", "mla_latent", "buffer" or "mailbox"
    layer: int  # -1 when it belongs to no layer
    group: int  # KV-cache group, -1 for buffers
    tensor: torch.Tensor
    rows_per_slot: int = 1


@dataclass(slots=True)
class WriteSet:
    """Everything a step says it writes. What is not listed must not change.

    `slots[group]` are the recurrent-state slots written in that cache group, one for each real request in batch order;
    `rows[group]` are the flat cache rows (block id * rows per block + offset) written by attention; `buffers` the names
    of persistent buffers; `epochs` the mailbox epochs after the step. Values may be tensors: those on a device are read only in
    sampled steps.
    """

    slots: Mapping[int, list[int] | torch.Tensor] = field(default_factory=dict)
    rows: Mapping[int, list[int] | torch.Tensor] = field(default_factory=dict)
    buffers: Sequence[str] = ()
    epochs: Mapping[str, int] = field(default_factory=dict)
