"""Who may exchange through mailboxes: the same answer on all ranks, from what each of them knows."""

from __future__ import annotations

from types import SimpleNamespace as Module

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.fast import cuda_exchange


def choose(monkeypatch, wanted: str, ranks: int = 2, host=True, linked=True, sms=(132,), told: str | None = None):
    """What one of `ranks` decides. sms: of each rank, the last for all others; told: what the others were told."""
    group = Module(cpu_group="group", world_size=ranks, device="cpu")
    counts = [*sms, *[sms[-1]] * ranks][:ranks]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Module(multi_processor_count=counts[0]))
    monkeypatch.setattr(cuda_exchange, "in_the_same_node_as", lambda group: [True] * (ranks - 1) + [host])
    asked = []
    platform = Module(
        visible_device_id_to_physical_device_id=lambda device: 3,
        is_fully_connected=lambda gpus: asked.append(gpus) or linked,
    )
    monkeypatch.setattr(cuda_exchange, "current_platform", platform)

    def all_gather(mine: list[int]) -> list[list[int]]:
        theirs = cuda_exchange.ASKED.index(told or wanted)
        return [mine, *([theirs, counts[rank], 3 + rank] for rank in range(1, ranks))]

    found = cuda_exchange.choose(wanted, group, all_gather if ranks > 1 else None)
    assert asked in ([], [[3 + rank for rank in range(ranks)]])
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_one_host_that_are_linked_have_mailboxes(monkeypatch, ranks):
    for wanted, there in (("auto", True), ("mailbox", True), ("stock", False)):
        assert (choose(monkeypatch, wanted, ranks) is not None) is there, wanted
    assert choose(monkeypatch, "auto", 1) is None


@pytest.mark.parametrize(
    ("short", "said"),
    [
        ({"ranks": 16}, "2, 4, 8 ranks, found 16"),
        ({"host": False}, "all ranks on one host"),
        ({"sms": (132, 114)}, "132 SMs, .*found 114"),
        ({"linked": False}, "NVLink"),
    ],
)
def test_others_sum_by_stocks_all_reduce_or_say_what_is_missing(monkeypatch, short, said):
    assert choose(monkeypatch, "auto", **short) is None
    assert choose(monkeypatch, "stock", **short) is None
    with pytest.raises(ValueError, match=f"exchange is 'mailbox': expected {said}"):
        choose(monkeypatch, "mailbox", **short)


@pytest.mark.parametrize("wanted", ["auto", "stock", "mailbox"])
def test_ranks_that_were_told_different_things_do_not_start(monkeypatch, wanted):
    told = "stock" if wanted != "stock" else "auto"
    with pytest.raises(ValueError, match=f"expected one setting on all ranks, found {min(told, wanted)}, {max(told, wanted)}"):
        choose(monkeypatch, wanted, told=told)


def test_room_is_made_alone_and_joined_by_all(monkeypatch):
    calls = []
    monkeypatch.setattr(cuda_exchange.Mailbox, "room", staticmethod(lambda *args: calls.append(args) or "room"))
    post = choose(monkeypatch, "auto")
    monkeypatch.setattr(cuda_exchange.Mailbox, "__init__", lambda self, *args: calls.append(args))
    join = post(64)
    assert calls == [(2, 64, "cpu")]
    join()
    assert calls[1:] == [("group", 64, "cpu", "room")]
