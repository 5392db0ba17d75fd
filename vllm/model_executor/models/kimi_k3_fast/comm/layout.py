"""The mailbox of one rank: where each word lies. Host and device code share this file; it is pure arithmetic.

A mailbox is written by the peers and read by its owner. A word is 64 bits: 32 bits of data (two BF16) and the epoch in which it
was sent. A reader polls the word itself until the epoch is the one it waits for, so no flag, fence or barrier stands between a
peer's store and its use: one trip over the link. (64-bit accesses are single-copy atomic: PTX ISA, memory consistency model.)

    byte 0           health word (int32), sticky: 0 while well, else 1 + the rank that did not answer in time
    byte HEADER      words[parity][sender][index]

Each call is an epoch of its own, counted alike on all ranks. Two parities suffice: a rank that sends in epoch e + 2 has finished
epoch e + 1, for which every peer had to send after finishing epoch e, that is, after reading everything of it.

The epoch is 32 bits wide. Words of an epoch that lies 2^32 calls back could be taken for new; at 370 calls a step and 100 steps a
second that is 1.3 days without that word having been written in between, so `Mailbox.recycle` clears the words long before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HEADER = 256  # bytes
WORD = 8  # bytes
PARITIES = 2


@dataclass(frozen=True)
class Layout:
    """`world` ranks, each with room for `words` words in every epoch."""

    world: int
    words: int

    @property
    def bytes(self) -> int:
        """Size of one rank's mailbox."""
        return HEADER + PARITIES * self.world * self.words * WORD


def first_word(world: int, words: Any, parity: Any, sender: Any) -> Any:
    """Index of a sender's first word, counted behind the header. For plain and for traced integers."""
    return (parity * world + sender) * words
