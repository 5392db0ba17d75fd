"""How the ranks of a tensor-parallel group exchange sums on GPUs: through mailboxes, or by stock's all-reduce.

Every rank says in one collective what it was told and what it runs on, and all draw the same conclusion: a rank that decided
alone would wait for others that never come. A mailbox is made in two steps, so that what can fail on one rank alone, its memory,
is agreed about before the ranks meet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import in_the_same_node_as
from vllm.platforms import current_platform

from ..comm import RANKS, SMS, Box, Mailbox

logger = logging.getLogger(__name__)

ASKED = ("stock", "auto", "mailbox")  # values of the setting `exchange`

Post = Callable[[int], Callable[[], Box]]
"""Room for so many words on this rank; what it returns is called by all ranks, and makes the mailbox."""


def choose(wanted: str, group: Any, all_gather: Callable[[list[int]], list[list[int]]] | None) -> Post | None:
    """The mailboxes' maker, or None where stock's all-reduce serves. wanted: the setting; group: vLLM's tensor-parallel group;
    all_gather: over its host side, None for one rank. A collective.

    Raises ValueError, on every rank, where the ranks were told different things, or mailboxes by name and there can be none.
    """
    if all_gather is None:
        return None
    device = torch.cuda.current_device()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    everyone = all_gather([ASKED.index(wanted), sms, current_platform.visible_device_id_to_physical_device_id(device)])
    asked = sorted({ASKED[told] for told, *_ in everyone})
    if len(asked) > 1:
        raise ValueError(f"exchange: expected one setting on all ranks, found {', '.join(asked)}")
    if wanted == "stock":
        return None
    missing = _missing(group, [sms for _, sms, _ in everyone], [gpu for *_, gpu in everyone])
    if missing is None:
        return lambda words: _post(group, words)
    if wanted == "mailbox":
        raise ValueError(f"exchange is 'mailbox': expected {missing}; set it to 'auto' or 'stock'")
    logger.info("Kimi K3 fast path: ranks sum by stock's all-reduce, as mailboxes need %s", missing)
    return None


def _missing(group: Any, sms: list[int], gpus: list[int]) -> str | None:
    """What these ranks lack for mailboxes. sms, gpus: of each its number of SMs and its number on the host."""
    if len(gpus) not in RANKS:
        return f"{', '.join(map(str, RANKS))} ranks, found {len(gpus)}"
    if not all(in_the_same_node_as(group.cpu_group)):
        return "all ranks on one host, found several"
    if min(sms) < SMS:
        return f"{SMS} SMs, whose blocks wait for each other, found {min(sms)}"
    if not current_platform.is_fully_connected(gpus):
        return "NVLink between all GPUs, found none between some"
    return None


def _post(group: Any, words: int) -> Callable[[], Box]:
    room = Mailbox.room(group.world_size, words, group.device)
    return lambda: Mailbox(group.cpu_group, words, group.device, room)
