"""The mailbox's arithmetic: no two senders, parities or indices share a word, and the health word says who is lost."""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.comm import Box, Health, PeerLost
from vllm.model_executor.models.kimi_k3_fast.comm.layout import HEADER, PARITIES, WORD, Layout, first_word


@pytest.mark.parametrize(("world", "words"), [(2, 1), (4, 7), (8, 33)])
def test_every_word_has_one_place(world: int, words: int) -> None:
    layout = Layout(world, words)
    places = [
        HEADER + (first_word(world, words, parity, sender) + index) * WORD
        for parity, sender, index in itertools.product(range(PARITIES), range(world), range(words))
    ]
    assert len(set(places)) == len(places) == PARITIES * world * words
    assert min(places) == HEADER and max(places) + WORD == layout.bytes
    assert all(place % WORD == 0 for place in places), "a word that is not aligned is not read in one piece"


@pytest.mark.parametrize("inference", [False, True])
def test_the_health_word_names_the_lost_rank(inference: bool) -> None:
    """Also where the box was made in inference mode, as a worker makes it, and another thread asks."""
    with torch.inference_mode(inference):
        memory = torch.zeros(Layout(2, 1).bytes // 4, dtype=torch.int32)
        box = Box(0, Layout(2, 1), memory, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))
    assert box.health() == Health(None) and box.health().well
    box.health().check()
    with torch.inference_mode(inference):
        memory[0] = 2
    assert box.health().lost == 1
    with pytest.raises(PeerLost, match="Rank 1") as lost:
        box.health().check()
    assert lost.value.rank == 1
