"""The gate: what must hold of an arm, alone and beside the other one. Every condition is one check with one verdict.

A check that cannot be made is neither passed nor failed: it is unknown, and a gate with an unknown check and no failed one
exits with 2, not with 0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arm import Arm, Item, prompts_sha256
from .stats import Paired, fewest_losses, paired
from .suites import Suite

LEAST_CHARACTERS_A_TOKEN = 16  # a prompt of fewer tokens than characters / 16 was cut: no tokenizer packs text so tightly
ACCOUNTED = 0.99  # share of the served decode tokens that the guard must have seen


class Verdict(enum.Enum):
    """Value: the exit status it leads to."""

    PASS = 0
    FAIL = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Coverage:
    """Decode tokens that the guard counted while the arm ran."""

    fast: int
    standard: int

    @property
    def share(self) -> float:
        return self.fast / (self.fast + self.standard)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def scores(items: Sequence[Item], metric: str) -> list[float]:
    """One score per prompt: the mean over its seeds (avg@k)."""
    by_prompt: dict[int, list[float]] = {}
    for item in items:
        by_prompt.setdefault(item.item, []).append(item.scores[metric])
    return [mean(values) for _, values in sorted(by_prompt.items())]


def judge(passed: bool, name: str, detail: str) -> Check:
    return Check(name, Verdict.PASS if passed else Verdict.FAIL, detail)


def unknown(name: str, detail: str) -> Check:
    return Check(name, Verdict.UNKNOWN, detail)


# -- one arm ----------------------------------------
def check_requests(arm: Arm, suite: Suite) -> Iterator[Check]:
    """Every prompt got an answer, every answer was scored, none was cut without a word."""
    items = [i for task in arm.items.values() for i in task]
    missing = [name for name, task in suite.tasks.items() if len(arm.items.get(name, [])) == 0]
    yield judge(not arm.lost and not missing, "complete", "; ".join([*arm.lost[:3], *missing]) or f"{len(items)} items")
    failed = [i for i in items if i.error]
    yield judge(
        not failed, "requests", f"{len(failed)} of {len(items)} failed" + (f", first: {failed[0].error[:200]}" if failed else "")
    )
    mute = [i for i in items if not i.error and i.finish not in ("stop", "length", "tool_calls")]
    yield judge(
        not mute, "finish reasons", f"{len(mute)} replies without a known one" + (f", first: {mute[0].finish!r}" if mute else "")
    )
    cut = [i for i in items if not i.error and _prompt_cut(i)]
    told = f", first: {cut[0].prompt_tokens} tokens seen of {cut[0].prompt_characters} characters" if cut else ""
    yield judge(not cut, "prompts whole", f"{len(cut)} of {len(items)} reached the model cut{told}")
    for name, task in suite.tasks.items():
        part = arm.items.get(name, [])
        if part:
            share = mean([i.finish == "length" for i in part])
            yield judge(
                share <= task.max_truncated,
                f"truncated {name}",
                f"{share:.1%} at the token limit, {task.max_truncated:.1%} allowed",
            )


def _prompt_cut(item: Item) -> bool:
    if item.expected_tokens is not None:
        return item.prompt_tokens != item.expected_tokens
    return item.prompt_tokens * LEAST_CHARACTERS_A_TOKEN < item.prompt_characters


def check_scores(arm: Arm, suite: Suite, baseline: Mapping[str, Any] | None) -> Iterator[Check]:
    """The mean of every task against the recorded one, where the prompts are the recorded ones."""
    for name, task in suite.tasks.items():
        items, check = arm.items.get(name, []), f"score {name}"
        recorded = (baseline or {}).get("tasks", {}).get(name)
        if not items:
            continue  # `complete` has failed
        found = mean(scores(items, task.metric))
        if recorded is None:
            yield unknown(check, f"{task.metric} {found:.4f}; nothing is recorded for it")
        elif recorded["prompts_sha256"] != prompts_sha256(items):
            yield unknown(check, f"{task.metric} {found:.4f}, but on other prompts than the recorded {recorded['score']:.4f}")
        else:
            floor = recorded["score"] - task.tolerance
            yield judge(found >= floor, check, f"{task.metric} {found:.4f}, recorded {recorded['score']:.4f}, floor {floor:.4f}")


# -- the guard's account ----------------------------------------
Ranks = list[tuple[Mapping[str, Any], Mapping[str, Any]]]  # each rank's report before and after


def ranks(arm: Arm) -> Ranks | None:
    """None without both reports, or where another process gave the second one."""
    if arm.report_before is None or arm.report_after is None:
        return None
    before, after = arm.report_before.get("ranks", []), arm.report_after.get("ranks", [])
    same = [r.get("pid") for r in before] == [r.get("pid") for r in after]
    return list(zip(before, after, strict=True)) if same and before else None


def coverage(arm: Arm) -> Coverage | None:
    """The guard's count of decode tokens; of several ranks the worst, since a step is fast only where every rank was."""
    found = ranks(arm)
    if found is None:
        return None
    fast, standard = ([_since(*pair, path) for pair in found] for path in ("fast", "standard"))
    return None if min(*fast, *standard) < 0 else Coverage(min(fast), max(standard))


def _since(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> int:
    return int(after["steps"][path]["decode_tokens"]) - int(before["steps"][path]["decode_tokens"])


def check_path(arm: Arm, require_fast: float) -> Iterator[Check]:
    """The fast path served what was asked of it, by the guard's count, and nothing that must not happen did."""
    found, seen = ranks(arm), coverage(arm)
    if found is None or seen is None:
        detail = "no report from the server, or another process gave the second one: load the plug-in, leave the server running"
        yield unknown("fast share", detail)
        return
    # The first token of a reply comes out of the prompt's own step.
    served = sum(max(i.completion_tokens - 1, 0) for task in arm.items.values() for i in task)
    total = seen.fast + seen.standard
    if total == 0:
        yield unknown("fast share", f"the guard counted no decode token while {served} were served")
    else:
        detail = f"{seen.share:.4f} of {total} decode tokens, {require_fast} asked"
        other = _added((r["steps"]["by_reason"] for r, _ in found), (r["steps"]["by_reason"] for _, r in found))
        told = f"; other steps by reason: {_listed(other)}" if seen.share < require_fast else ""
        yield judge(seen.share >= require_fast, "fast share", detail + told)
        name, detail = "all steps counted", f"{total} decode tokens counted, {served} served"
        if total >= ACCOUNTED * served:
            yield judge(True, name, detail)
        else:
            yield unknown(name, detail + ": steps went past the guard")
    new = _added((r["violations"]["by_reason"] for r, _ in found), (r["violations"]["by_reason"] for _, r in found))
    assert arm.report_after is not None
    agree = bool(arm.report_after.get("ranks_agree", True))
    yield judge(not new and agree, "violations", _listed(new) if agree else f"{_listed(new)}; the ranks decided differently")


def _added(before: Iterable[Mapping[str, int]], after: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """What each reason's count grew by, the largest of all ranks."""
    grown: dict[str, int] = {}
    for old, new in zip(before, after, strict=True):
        for reason, count in new.items():
            if count > old.get(reason, 0):
                grown[reason] = max(grown.get(reason, 0), count - old.get(reason, 0))
    return grown


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items(), key=lambda r: -r[1])) or "none"


def check_speculation(arm: Arm) -> Iterator[Check]:
    """Where drafts are on, they were verified by the model: a synthetic acceptance returns the draft's text, not the model's."""
    facts = deployment(arm).get("facts") or {}
    drafts = sum(v for k, v in arm.speculation.items() if k.endswith("num_drafts"))
    if facts.get("speculation", "None") == "None" and not drafts:
        return
    named = facts.get("rejection_sampling", "None")
    method = "" if named == "None" else named
    accepted = sum(v for k, v in arm.speculation.items() if k.endswith("num_accepted_tokens"))
    detail = (
        f"{drafts:.0f} drafts verified, {accepted:.0f} tokens accepted, rejection sampling {method or 'not named by the report'}"
    )
    if "synthetic" in method:
        yield judge(False, "acceptance real", detail + ": the replies are the draft model's")
    elif not method or not drafts:
        yield unknown("acceptance real", detail)
    else:
        yield judge(True, "acceptance real", detail)


def deployment(arm: Arm) -> Mapping[str, Any]:
    """What the first rank says of the deployment: selected, refusals, facts; empty without a report."""
    found = (arm.report_after or {}).get("ranks") or [{}]
    return found[0].get("deployment") or {}


# -- two arms ----------------------------------------
def check_pair(candidate: Arm, reference: Arm, suite: Suite) -> Iterator[tuple[Check, Paired | None]]:
    """Each task and all of them together, item by item against the other arm, with the exact sign test.

    All items together are tested at the suite's level; each task at that level divided by their number.
    """
    alone = suite.alpha / len(suite.tasks)
    all_candidate: list[float] = []
    all_reference: list[float] = []
    for name, task in suite.tasks.items():
        ours, theirs = candidate.items.get(name, []), reference.items.get(name, [])
        same = [(i.item, i.seed, i.prompt_sha256) for i in ours] == [(i.item, i.seed, i.prompt_sha256) for i in theirs]
        if not same or not ours:
            yield unknown(f"paired {name}", "the arms answered other prompts or seeds: run both again"), None
            continue
        pair = scores(ours, task.metric), scores(theirs, task.metric)
        all_candidate += pair[0]
        all_reference += pair[1]
        yield _judge_pair(f"paired {name}", paired(*pair), alone)
    if all_candidate:
        result = paired(all_candidate, all_reference)
        name, fewest = "paired all items", fewest_losses(suite.alpha)
        if result.items < fewest:
            yield unknown(name, f"{result.items} items cannot show a regression at {suite.alpha}: it takes {fewest}"), result
        else:
            yield _judge_pair(name, result, suite.alpha)


def _judge_pair(name: str, result: Paired, alpha: float) -> tuple[Check, Paired]:
    detail = f"of {result.items} items {result.worse} worse and {result.better} better, p {result.p:.3g}, level {alpha:.3g}"
    return judge(result.p >= alpha, name, detail), result


# -- the whole ----------------------------------------
@dataclass(frozen=True)
class Judgement:
    checks: tuple[Check, ...]
    tests: Mapping[str, Paired]

    @property
    def verdict(self) -> Verdict:
        """Failed if anything failed; unknown if anything is; else passed."""
        found = {check.verdict for check in self.checks}
        return next((v for v in (Verdict.FAIL, Verdict.UNKNOWN) if v in found), Verdict.PASS if found else Verdict.UNKNOWN)


def decide(
    arm: Arm, suite: Suite, baseline: Mapping[str, Any] | None, *, require_fast: float | None, against: Arm | None
) -> Judgement:
    """Judge `arm`; `require_fast` None judges no path (the reference arm); `against` is the reference arm, if there is one."""
    parts: list[Callable[[], Iterator[Check]]] = [
        lambda: check_requests(arm, suite),
        lambda: check_scores(arm, suite, baseline),
        lambda: check_speculation(arm),
    ]
    if require_fast is not None:
        parts.append(lambda: check_path(arm, require_fast))
    checks = [check for part in parts for check in part()]
    tests: dict[str, Paired] = {}
    if against is not None:
        checks += [Check(f"reference {c.name}", c.verdict, c.detail) for c in check_requests(against, suite)]
        for check, result in check_pair(arm, against, suite):
            checks.append(check)
            if result is not None:
                tests[check.name] = result
    return Judgement(tuple(checks), tests)
