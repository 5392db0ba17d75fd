"""Mailboxes over symmetric memory: how the ranks of one tensor-parallel group exchange small things without a library call.

`Mailbox` allocates this rank's box where the peers can write it, and exchanges the addresses. Kernels then send by storing into a
peer's box and receive by polling their own (`layout.py` says where and how). Everything is NVLink peer-to-peer memory within one
host; multicast is never used, because Hopper deployments may not have it and a program that dies while using it can take the link
down.

A wait is bounded (`BOUND_NS`, measured on the GPU's clock). A rank whose wait runs out writes the culprit into its own health
word and into that of every peer. The word is sticky: kernels that see it stop waiting, so the queue drains in milliseconds, and
deliver NaN, which no later stage mistakes for a result. All ranks end with the same word: the largest that anyone wrote. The host
reads it with `health()`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .layout import HEADER, Layout

BOUND_NS = 10_000_000_000  # how long a kernel waits for a peer
RANKS = (2, 4, 8)  # of one host, for which there are kernels
SMS = 132  # blocks that surely run at once, as those of an exchange wait for their counterparts


class PeerLost(RuntimeError):
    """A rank did not answer within the bound. Every rank of the group raises it with the same rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"Rank {rank} of the tensor-parallel group did not answer within the bound: it stalled or died, and what followed "
            "is NaN. Stop every rank of the group and start them again; the mailboxes do not recover."
        )
        self.rank = rank


@dataclass(frozen=True)
class Health:
    """A reading of the health word. `lost`: the rank that did not answer, or None while all is well."""

    lost: int | None

    @property
    def well(self) -> bool:
        return self.lost is None

    def check(self) -> None:
        """Raise PeerLost unless all is well."""
        if self.lost is not None:
            raise PeerLost(self.lost)


@dataclass
class Box:
    """One rank's mailbox, as kernels take it.

    memory: int32 [layout.bytes / 4] on this rank's device, written by the peers. addresses: int64 [world], every rank's memory as
    this process sees it. epoch: int32 [2], the last epoch and how many blocks have read it; this rank's alone.
    """

    rank: int
    layout: Layout
    memory: torch.Tensor
    addresses: torch.Tensor
    epoch: torch.Tensor

    def __post_init__(self) -> None:
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=self.memory.is_cuda)
        self._side = torch.cuda.Stream(self.memory.device) if self.memory.is_cuda else None

    @torch.inference_mode()  # as the tensors may be of a thread in that mode, and the one that asks of another
    def health(self) -> Health:
        """Read the health word beside whatever the GPU is doing: a copy of four bytes that waits for no compute stream."""
        with torch.cuda.stream(self._side):
            self._seen.copy_(self.memory[:1], non_blocking=True)
        if self._side:
            self._side.synchronize()
        code = int(self._seen.item())
        return Health(code - 1 if code else None)


class Mailbox(Box):
    """A box over symmetric memory: the ranks of `group` make one each, at the same point; multicast stays off.

    `words`: the most 64-bit words that one rank sends to one other in a call (the ops' plans say how many they need). `group`
    serves to exchange addresses and for a barrier; a CPU backend is enough. `room`: made before, by a rank that wants to know
    whether there is memory before it meets the others.
    """

    def __init__(self, group: dist.ProcessGroup, words: int, device: torch.device, room: torch.Tensor | None = None) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.group = group
        layout = Layout(dist.get_world_size(group), words)
        memory = self.room(layout.world, words, device) if room is None else room
        self._handle = symmetric.rendezvous(memory, group)
        addresses = torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64, device=device)
        super().__init__(dist.get_rank(group), layout, memory, addresses, torch.zeros(2, dtype=torch.int32, device=device))
        self._meet()  # nobody sends before every box is zeroed

    @staticmethod
    def room(world: int, words: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory of a mailbox of `world` ranks, int32. No other rank takes part."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # read by PyTorch when it allocates
        import torch.distributed._symmetric_memory as symmetric

        return symmetric.empty(Layout(world, words).bytes // 4, dtype=torch.int32, device=device).zero_()

    def _meet(self) -> None:
        torch.cuda.synchronize(self.memory.device)
        dist.barrier(self.group)

    def report_lost(self, rank: int) -> None:
        """Tell every rank, from the host, that `rank` is lost: their kernels stop waiting at once.

        For a rank that knows it goes down.
        """
        if not 0 <= rank < self.layout.world:
            raise ValueError(f"Expected a rank from 0 to {self.layout.world - 1}, found {rank}.")
        assert self._side is not None  # symmetric memory is on a GPU
        with torch.cuda.stream(self._side):
            for peer in range(self.layout.world):
                word = self._handle.get_buffer(peer, (1,), torch.int32)
                word.copy_(torch.clamp(word, min=rank + 1))
        self._side.synchronize()

    def recycle(self) -> None:
        """Forget all words and start the epochs anew; the health word stays.

        All ranks call it, with no kernel of theirs in flight.
        """
        self._meet()
        self.memory[HEADER // 4 :].zero_()
        self.epoch.zero_()
        self._meet()
