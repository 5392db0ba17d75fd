"""Ranks in threads over a real barrier: agreement, the first differing step, and quarantine on all ranks at once."""

import threading

import torch

from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, Guard, Path, Policy
from vllm.model_executor.models.kimi_k3_fast.guard.shadow import Step
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal


class Ranks:
    """An all-gather between threads."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.slots: list = [None] * world

    def gatherer(self, rank: int):
        def all_gather(mine):
            self.slots[rank] = list(mine)
            self.barrier.wait()
            everyone = [list(values) for values in self.slots]
            self.barrier.wait()
            assert len({len(values) for values in everyone}) == 1, "a collective needs equally long lists"
            return everyone

        return all_gather


def run(world: int, steps: int, decide, quarantine_on=None):
    ranks = Ranks(world)
    guards = [Guard(Policy(agree_every=16, events_path=""), rank=f"rank{r}") for r in range(world)]
    effective: dict[int, int] = {}

    def work(rank: int) -> None:
        guard = guards[rank]
        guard.bind_ranks(rank, world, ranks.gatherer(rank))
        for step in range(1, steps + 1):
            guard.open_step(BatchFacts("none", 1, 1, 1, 1, True, ("a",)))
            if guard.quarantined("bad") and rank not in effective:
                effective[rank] = step
            path = decide(rank, step)
            refusals = () if path is Path.FAST else (Refusal(Reason.STEP_PREFILL),)
            guard.close_step(path, refusals, "k", 1, 1, 1, 0)
            if quarantine_on == (rank, step):
                guard.violation(Reason.SHADOW_LOGITS, {"plan_key": "bad"})

    threads = [threading.Thread(target=work, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [guard.report() for guard in guards], effective


def test_ranks_that_agree_report_nothing():
    reports, _ = run(3, 100, lambda rank, step: Path.FAST if step % 3 else Path.STANDARD)
    for report in reports:
        assert report["violations"]["by_reason"] == {}
        assert report["counters"]["agreement_checks"] == 6
        assert report["decisions"]["checked_step"] == 96


def test_a_rank_that_decides_differently_is_named_with_the_first_step():
    reports, _ = run(3, 100, lambda rank, step: Path.STANDARD if (rank, step) == (2, 41) else Path.FAST)
    for report in reports:
        assert report["violations"]["by_reason"] == {"ranks_disagree": 1}
        where = report["violations"]["last"][0]["where"]
        assert (where["first_step"], where["exact"], where["ranks"]) == (41, True, [2])


def test_a_quarantine_takes_effect_on_all_ranks_at_the_same_step():
    reports, effective = run(2, 64, lambda rank, step: Path.FAST, quarantine_on=(1, 20))
    assert effective == {0: 32, 1: 32}
    assert all(report["quarantined"] == {"bad": "shadow_logits"} for report in reports)


def test_what_one_rank_finds_wrong_every_rank_saves_its_part_of(tmp_path):
    ranks, agreed = Ranks(2), {}
    guards = [Guard(Policy(events_path=str(tmp_path / f"{r}" / "e.jsonl")), rank=f"rank{r}") for r in range(2)]

    def work(rank: int) -> None:
        guards[rank].bind_ranks(rank, 2, ranks.gatherer(rank))
        state = torch.ones(1, 8)
        wrong = state * (1 + 1e-2 * rank)
        inputs = lambda: {"input_ids": torch.tensor([rank])}  # noqa: E731
        agreed[rank] = [
            guards[rank].shadow("decode/1", {"layers.0.state": fast}, {"layers.0.state": state}, inputs, {}, together=True)
            for fast in (state, wrong)
        ]

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert agreed == {0: [True, True], 1: [True, False]}
    assert [guard.report()["violations"]["by_reason"] for guard in guards] == [{}, {"shadow_state": 1}]
    parts = [Step.load(next((tmp_path / f"{rank}" / "k3fast-steps").glob("*.pt"))) for rank in range(2)]
    assert [part.inputs["input_ids"].item() for part in parts] == [0, 1]
