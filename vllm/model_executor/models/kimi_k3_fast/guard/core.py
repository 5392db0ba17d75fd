"""`Guard`: what one process knows about the steps it ran, why, and what went wrong.

A step's calls are few, and find the caches cold: between them the model has run. So `close_step` only checks the step's writes
and keeps one record; the records are counted and hashed in a row, when they are flushed: once a second, or when somebody asks.
Totals, events and log lines are made then, too. Captured CUDA graphs run no Python: `planned` remembers what was decided at
capture, and a dispatched descriptor of that graph closes its own record.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..reasons import Reason, Refusal
from .agreement import Agreement
from .events import EventLog
from .ledger import Finding, Ledger
from .policy import GuardStop, Policy
from .records import BatchFacts, GraphKey, Mutation, Path, StateView, StepKind, StepRecord, WriteSet
from .totals import COUNTS, SCHEMA, Totals

if TYPE_CHECKING:
    import torch

    from .audit import Audit

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
DETAILED_VIOLATIONS = 100  # of one reason; later ones are only counted
WAITING_RECORDS = 1024  # at which they are flushed before their second is over


class Guard:
    """One per process. All methods are called from the process' model thread, except that `post` and `report` may come from
    another one at any time: under Ray, steps and remote calls have a thread each."""

    def __init__(self, policy: Policy | None = None, rank: str = "rank0", clock: Callable[[], float] = time.time) -> None:
        self.policy = policy or Policy()
        self.rank = rank
        self.step = 0  # steps opened
        self.watching = False  # whether the patched lines of this process report to this guard
        self.opens_expected = False  # whether a patched runner opens every real step
        self.late_refusals: tuple[Refusal, ...] = ()  # reasons against fast steps that showed after the start
        self.agreement = Agreement()
        self.ledger = Ledger()
        self._audit: Audit | None = None
        self._begun = [0, 0]  # standard and fast steps whose writes were announced
        self._said: set[str] = set()
        self._inbox: deque[tuple[Reason, dict[str, Any], str]] = deque()  # from other threads
        self.posted: Callable[[Reason], None] = lambda reason: None  # told on the thread that posts; may raise to end the engine
        self._clock = clock
        self._lock = threading.RLock()  # between a step's counting and a report's flush
        self._lost = 0  # lines of the event file, as of the last flush
        self._totals = Totals()
        self._records: deque[StepRecord] = deque()  # closed steps, not counted yet: appending needs no lock
        self._pending: dict[StepKind, tuple[int, list[int]]] = {}  # signature, and COUNTS since the last flush
        self._details: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._peaks: dict[str, float] = {}
        self._more: dict[str, int] = {}
        self._open: BatchFacts | None = None
        self._plans: dict[GraphKey, tuple[str | None, tuple[Refusal, ...]]] = {}
        self._quarantine: set[str] = set()
        self._failing: dict[str, Reason] = {}
        self._next_flush = 0.0
        self._next_summary = 0.0
        self._summed: tuple[int, int, int] = (0, 0, 0)
        self.events = self._event_log()
        self._started()

    # -- start -----------------------------------------------------------------------------------------------------

    def configure(self, settings: Any, rank: str | None = None) -> None:
        """Replace the policy with the fork's settings (or a `Policy`); a new event path starts a new event file."""
        policy = settings if isinstance(settings, Policy) else Policy.of(settings)
        renewed = (policy.events_path, rank or self.rank) != (self.policy.events_path, self.rank)
        self.policy, self.rank = policy, rank or self.rank
        if renewed:
            self.events.close()
            self.events = self._event_log()
        now = {"rank": self.rank, "policy": self.policy.as_dict()}
        if renewed or any(self._totals.start.get(name) != value for name, value in now.items()):
            self._totals.start |= now  # the rank may have been named before, and no file be wanted
            self._carry()

    def _event_log(self) -> EventLog:
        return EventLog(self.policy.events_path, self.rank, self.policy.events_max_bytes, self.policy.events_keep)

    def _started(self) -> None:
        self._emit("start", schema=SCHEMA, rank=self.rank, pid=os.getpid(), policy=self.policy.as_dict())

    def _carry(self) -> None:
        """Write everything counted so far in one line, from which the file adds up whatever it lacks before."""
        self._lost = self.events.lost
        self.events.write({"kind": "carry", "t": self._clock(), "totals": self._totals.carry()})

    def deployment(self, refusals: Sequence[Refusal], facts: Mapping[str, str], mutations: Sequence[Mutation] = ()) -> None:
        """The verdict on the deployment, with every reason; one log line. From here on the patched lines report."""
        self.watching = self.policy.mode != "off"
        self._emit(
            "deployment",
            selected=not refusals,
            refusals=[{"reason": r.reason.code, "detail": r.detail} for r in refusals],
            facts=dict(facts),
            mutations=[{"name": m.name, "before": m.before, "after": m.after, "why": m.why} for m in mutations],
        )
        changed = ", ".join(f"{m.name} {m.before} -> {m.after}" for m in mutations) or "nothing"
        if refusals:
            logger.warning("Kimi K3 fast path refused: %s. Settings changed: %s.", "; ".join(map(str, refusals)), changed)
        else:
            logger.info("Kimi K3 fast path selected (mode %s). Settings changed: %s.", self.policy.mode, changed)

    def step_aside(self, refusal: Refusal) -> None:
        """No fast step from now on: something that the guard needs to see does not report. Every rank calls it at the same step.
        Plans that are baked into graphs are retired."""
        self.late_refusals = (*self.late_refusals, refusal)
        before = self._totals.deployment
        refused = [*before["refusals"], {"reason": refusal.reason.code, "detail": refusal.detail}]
        self._emit("deployment", **{**before, "selected": False, "refusals": refused})
        for plan_key, _ in self._plans.values():
            if plan_key is not None:
                self._retire(plan_key, refusal.reason.code)

    def bind_ranks(self, rank: int, world: int, all_gather: Callable[[list[int]], list[list[int]]]) -> None:
        """Compare decisions over `all_gather` (a host-side collective of equally long lists of integers) from now on."""
        with self._lock:
            self._count_records()  # the steps before belong to this rank alone
            self.agreement = Agreement(rank, world, all_gather)

    # -- capture ---------------------------------------------------------------------------------------------------

    @property
    def planned_graphs(self) -> dict[GraphKey, str]:
        """The plan in each captured graph that has one."""
        return {graph: plan for graph, (plan, _) in self._plans.items() if plan is not None}

    def planned(self, graph: GraphKey, decided: str | Sequence[Refusal]) -> None:
        """Remember what was decided while `graph` was captured: a plan key, or the refusals."""
        plan_key, refusals = (decided, ()) if isinstance(decided, str) else (None, tuple(decided))
        self._plans[GraphKey(*graph)] = (plan_key, refusals)
        self._emit("planned", graph=graph_name(graph), plan_key=plan_key, reasons=[r.reason.code for r in refusals])

    # -- steps -----------------------------------------------------------------------------------------------------

    def open_step(self, facts: BatchFacts) -> None:
        """A batch was dispatched. A replayed graph closes its own record."""
        if self._open is not None:
            self._unclosed(self._open)
        if self._inbox:
            self._read_inbox()
        self.step += 1
        self._open = facts
        if self.agreement.world > 1 and self.policy.agree_every and self.step % self.policy.agree_every == 0:
            self.agree()
        if facts.mode != "full":
            return
        plan = self._plans.get(facts.graph_key)
        if plan is None:
            self._open = None
            self.violation(Reason.GRAPH_UNPLANNED, {"graph": graph_name(facts.graph_key)}, "replayed without a recorded plan")
            return
        plan_key, refusals = plan
        width = facts.num_tokens // max(facts.num_reqs, 1)
        path = Path.STANDARD if plan_key is None else Path.FAST
        decode = facts.decode_tokens if facts.decode_tokens >= 0 else facts.num_tokens * facts.uniform
        self.close_step(path, refusals, plan_key, facts.num_reqs, facts.num_tokens, decode, width - 1 if facts.uniform else 0)
        if plan_key in self._quarantine:
            self.violation(Reason.QUARANTINE_BYPASSED, {"graph": graph_name(facts.graph_key), "plan_key": plan_key}, "replayed")

    def close_step(
        self,
        path: Path,
        refusals: tuple[Refusal, ...],
        plan_key: str | None,
        requests: int,
        tokens: int,
        decode_tokens: int,
        spec_width: int,
        write_set: WriteSet | None = None,
    ) -> None:
        """A step was computed on `path`, or is about to be where nothing of it is sampled (see `auditing`). `refusals` are all
        reasons for the standard path; `plan_key` names the plan taken, or the one that was refused; counts are real rows (no
        padding)."""
        facts, self._open = self._open, None
        if facts is None:
            if self.opens_expected and self.watching:
                self.count("unscheduled_forwards")
                self.abandon_step()
                return
            self.step += 1
        mode, padding = ("none", 0) if facts is None else (facts.mode, facts.padded_tokens - facts.num_tokens)
        kind = (path, plan_key, mode, spec_width, refusals)
        self._records.append((self.step, kind, requests, tokens, decode_tokens, padding))
        if write_set is not None:
            found = self.ledger.check(write_set, facts.request_ids if facts else (), requests, tokens)
            if self.auditing:
                found += self._audited(write_set, requests, tokens)
            for finding in found:
                self._found(finding, plan_key)
        if path is Path.STANDARD and decode_tokens == tokens and self.policy.mode == "require":
            self._require(refusals, facts)
        if time.monotonic() >= self._next_flush or len(self._records) >= WAITING_RECORDS:
            self.flush()

    def _count_records(self) -> None:
        """Count the closed steps by their kind, and hash this rank's decisions, in the order of the steps. Under the lock."""
        last: StepKind | None = None
        for _ in range(len(self._records)):
            step, kind, requests, tokens, decode_tokens, padding = self._records.popleft()
            if kind != last:  # rarely: steps of one kind follow each other, and a comparison costs less than a hash
                last = kind
                signature, counts = self._pending.get(kind) or self._new_kind(kind)
            counts[0] += 1
            counts[1] += requests
            counts[2] += tokens
            counts[3] += decode_tokens
            counts[4] += padding
            self.agreement.add(step, signature + tokens * 0x9E3779B1 + requests)

    def _new_kind(self, kind: StepKind) -> tuple[int, list[int]]:
        path, plan_key, mode, width, refusals = kind
        codes = tuple(sorted({r.reason.code for r in refusals}))
        signature = zlib.crc32(repr((path.value, plan_key, mode, width, codes)).encode())
        self._details.update({r.reason.code: r.detail for r in refusals if r.detail})
        return self._pending.setdefault(kind, (signature, [0] * len(COUNTS)))

    def _unclosed(self, facts: BatchFacts) -> None:
        self._open = None
        where = {"mode": facts.mode, "tokens": facts.num_tokens}
        self.violation(Reason.STEP_UNRECORDED, where, "a dispatched step ended without saying which path it took")

    def abandon_step(self) -> None:
        """Forget the open record and the digests taken for it: the forward raised, or was no step. A record that was closed ahead
        stays counted: vLLM's engine does not outlive the exception."""
        self._open = None
        if self._audit is not None:
            self._audit.abandon()

    # -- state -----------------------------------------------------------------------------------------------------

    def slots_changed(self, changes: Iterable[tuple]) -> None:
        """Changes since the last step, in order: (allocated | shared | copied | freed, request, slots)."""
        with self._lock:
            found = self.ledger.follow(changes)
        for finding in found:
            self._found(finding, None)

    def bind_state(self, generation: int, views: Sequence[StateView]) -> None:
        """All persistent state that steps may touch, anew at each binding of the caches."""
        from .audit import Audit

        self._audit = Audit(generation, views)
        self.ledger.layout({view.group: view.rows_per_slot for view in views if view.rows_per_slot > 1})

    def begin_writes(self, path: Path = Path.FAST) -> bool:
        """Call right before a step runs, on every rank. Takes the audit's digests if they are due; True if it is a fast step that
        is to be compared with the standard path (see `shadow`)."""
        audit, shadow = self.policy.audit_every, self.policy.shadow_every
        if not (audit or shadow):
            return False
        fast = path is Path.FAST
        self._begun[fast] += 1
        if audit and self._audit is not None and self._begun[fast] % audit == 0:
            self._audit.begin()
        return fast and bool(shadow) and self._begun[fast] % shadow == 0

    @property
    def auditing(self) -> bool:
        """Whether digests were taken for the step that runs: it is closed behind its writes, to be compared with them."""
        return self._audit is not None and self._audit.begun

    def shadow(
        self,
        plan_key: str,
        fast: Mapping[str, torch.Tensor],
        standard: Mapping[str, torch.Tensor],
        inputs: Callable[[], Mapping[str, torch.Tensor]],
        depth: Mapping[str, int],
        nudged: Mapping[str, torch.Tensor] | None = None,
        origin: Mapping[str, Any] | None = None,
        together: bool = False,
        draws: Iterable[Mapping[str, torch.Tensor]] = (),
    ) -> bool:
        """Compare a fast step with the standard path: tensors [rows, ...] by name, `logits` (or hidden states) and every state
        written. Past the bar: a violation that names the first tensor past it, where the fault begins, and the step is saved for
        `k3fast replay-step` with what `inputs` returns (asked only then, since it may be large) and `origin`, plain values that
        name the model. True if all stay within. `nudged`: see `shadow.compare`. `together`: every rank calls this for the same
        step; what one of them finds, all save their part of. `draws`: what the standard path comes to with noise at every place,
        furthest first to last; asked, by all ranks alike, while the step is past the bar."""
        from .shadow import compare, first_past

        self.count("shadow_steps")
        none: Mapping[str, torch.Tensor] = {}
        for number, drawn in enumerate(itertools.chain([none], draws)):
            if number == 1:
                self.count("shadow_drawn_steps")
            found = compare(fast, standard, depth, nudged, drawn)
            first = first_past(found, depth)
            differs = first is not None
            past = self.agreement.any(differs) if together else differs
            if not past:
                break
        self.peak("shadow_worst_ratio", max((d.ratio for d in found), default=0.0))
        if not past:
            return True
        sides = {"fast": dict(fast), "standard": dict(standard), "nudged": dict(nudged or standard), "drawn": dict(drawn)}
        saved = self._save_step(plan_key, sides, inputs, depth, origin or {})
        if first is None:
            return True
        where = {"plan_key": plan_key, "tensor": first.name, "row": first.row, "saved": saved}
        self.violation(first.reason, where, str(first))
        return False

    def _save_step(self, plan_key: str, sides: Any, inputs: Callable[[], Any], depth: Any, origin: Any) -> str:
        """The path, or nothing: enough are kept, or the disk is full."""
        from .shadow import Step, folder_for

        step = Step(
            plan_key, self.step, dict(inputs()), **sides, depth=dict(depth), settings=self.policy.as_dict(), origin=dict(origin)
        )
        try:
            return str(step.save(folder_for(self.policy.events_path)) or "")
        except OSError:
            self.count("shadow_files_lost")
            return ""

    def _audited(self, write_set: WriteSet, requests: int, tokens: int) -> list[Finding]:
        assert self._audit is not None
        self.count("audited_steps")
        return self._audit.end(write_set, requests, tokens, lambda slot: self.ledger.writer.get(slot, ""))

    def _found(self, finding: Finding, plan_key: str | None) -> None:
        self.violation(finding.reason, {**finding.where, **({"plan_key": plan_key} if plan_key else {})}, finding.detail)

    def post(self, reason: Reason, where: Mapping[str, Any], detail: str = "") -> None:
        """A violation seen on another thread: recorded with the next step or report."""
        self._inbox.append((reason, dict(where), detail))
        self.posted(reason)

    def _read_inbox(self) -> None:
        while self._inbox:
            self.violation(*self._inbox.popleft())

    def once(self, what: str) -> bool:
        """True the first time it is asked about `what`."""
        fresh = what not in self._said
        self._said.add(what)
        return fresh

    def _require(self, refusals: Sequence[Refusal], facts: BatchFacts | None) -> None:
        refused = [r for r in refusals if r.reason.code not in self.policy.allow]
        if not refused and refusals:
            return
        self.count("require_failed_steps")
        reason = refused[0].reason if refused else Reason.STEP_UNRECORDED
        for request in facts.request_ids if facts else ():
            self._failing[request] = reason

    def fail_request(self, request_id: str, reason: Reason) -> None:
        """End this request with an error when its step's output is handed over."""
        self._failing[request_id] = reason

    def take_failing(self) -> dict[str, Reason]:
        """Requests to end with an error, and why; each is handed out once."""
        failing, self._failing = self._failing, {}
        return failing

    # -- violations ------------------------------------------------------------------------------------------------

    def violation(self, reason: Reason, where: Mapping[str, Any], detail: str = "") -> None:
        """Something that must never happen was observed. `where` names what is known of plan_key, layer, slot, request."""
        where = {"step": self.step, **where}
        with self._lock:
            seen = self._totals.violations.get(reason.code, 0) + self._more.get(reason.code, 0)
            if seen < DETAILED_VIOLATIONS:
                self._emit("violation", reason=reason.code, where={k: _plain(v) for k, v in where.items()}, detail=detail)
                logger.error("Kimi K3 guard: %s (%s) at %s", reason.code, detail or reason.meaning, dict(where))
            else:
                self._more[reason.code] = self._more.get(reason.code, 0) + 1
        if self.policy.policy == "stop":
            self.flush()
            self.events.drain(1.0)
            raise GuardStop(f"{reason.code}: {detail or reason.meaning} at {dict(where)}; policy `stop` ends the engine")
        if self.policy.policy == "quarantine" and where.get("plan_key"):
            self.quarantine(str(where["plan_key"]), reason)

    def quarantine(self, plan_key: str, reason: Reason) -> None:
        """Retire `plan_key`. With several ranks it takes effect at their next comparison, on all at the same step."""
        if self.agreement.world > 1:
            self.agreement.propose(plan_key, reason.code)
        else:
            self._retire(plan_key, reason.code)

    def _retire(self, plan_key: str, code: str) -> None:
        if plan_key not in self._quarantine:
            self._quarantine.add(plan_key)
            self._emit("quarantine", plan_key=plan_key, reason=code)
            logger.error("Kimi K3 guard: plan %s runs on the standard path from now on (%s)", plan_key, code)

    def quarantined(self, plan_key: str) -> bool:
        return plan_key in self._quarantine

    def agree(self) -> None:
        """Compare the ranks' decisions and take over their quarantines. A collective: every rank calls it at the same step."""
        with self._lock:
            self._count_records()
        difference, retired = self.agreement.compare(self.step)
        self.count("agreement_checks")
        for plan_key, code in retired:
            self._retire(plan_key, code)
        if difference is not None:
            where = {"first_step": difference.first_step, "exact": difference.exact, "ranks": difference.ranks}
            self.violation(Reason.RANKS_DISAGREE, where, difference.describe())

    # -- counting and reporting ------------------------------------------------------------------------------------

    def count(self, name: str, by: int = 1) -> None:
        """Add to a named counter of the report."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + by

    def peak(self, name: str, value: float) -> None:
        """Keep the largest value seen under `name`."""
        with self._lock:
            self._peaks[name] = max(self._peaks.get(name, value), value)

    def patches(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Patch states of this process that changed: installed, refused, has run."""
        self._emit("patches", patches={name: dict(state) for name, state in states.items()})

    def _emit(self, kind: str, **fields: Any) -> None:
        with self._lock:
            event = {"kind": kind, "t": self._clock(), **fields}
            self._totals.apply(event)
            self.events.write(event)

    def flush(self) -> None:
        """Move what was counted into the totals and the event file."""
        now = time.monotonic()
        self._next_flush = now + FLUSH_SECONDS
        self._read_inbox()
        with self._lock:
            self._flush()
        if self.policy.summary_seconds and now >= self._next_summary:
            self._summary()
            self._next_summary = now + self.policy.summary_seconds

    def _flush(self) -> None:
        for name, count in self.ledger.take_counts():
            self.count(name, count)
        self._count_records()
        if self._pending:
            rows = [
                [path.value, key, mode, width, sorted({r.reason.code for r in refusals}), *counts]
                for (path, key, mode, width, refusals), (_, counts) in self._pending.items()
            ]
            details, self._details = self._details, {}
            self._pending = {}
            self._emit("steps", rows=rows, details=details, last_step=self.agreement.step)
        if self._counts or self._peaks:
            added, self._counts = self._counts, {}
            peaks, self._peaks = self._peaks, {}
            self._emit("counters", add=added, max=peaks)
        for code, count in self._more.items():
            self._emit("violation", reason=code, count=count)
        self._more = {}
        if (decisions := self.agreement.state()) != self._totals.decisions:
            self._emit("decisions", state=decisions)
        if self.events.lost != self._lost and self.events.healthy:
            self._carry()

    def _summary(self) -> None:
        report = self._totals.report()
        fast, standard = report["steps"]["fast"]["steps"], report["steps"]["standard"]["steps"]
        violations = sum(report["violations"]["by_reason"].values())
        if (fast, standard, violations) == self._summed or not fast + standard:
            return
        self._summed = (fast, standard, violations)
        reasons = ", ".join(f"{code} {n}" for code, n in sorted(report["steps"]["by_reason"].items())) or "none"
        logger.info(
            "Kimi K3: %d of %d steps fast (%.1f %%); standard because of: %s; violations: %d; quarantined plans: %d",
            fast,
            fast + standard,
            100.0 * fast / (fast + standard),
            reasons,
            violations,
            len(report["quarantined"]),
        )

    def report(self) -> dict[str, Any]:
        """This rank's report: JSON types only, schema version under `schema`. See docs/guard.md for the fields."""
        self.flush()
        with self._lock:
            return self._totals.report() | {"events": self.events.state()}


def graph_name(graph: GraphKey | tuple) -> str:
    mode, tokens, requests, uniform = graph
    return f"{mode}/t{tokens}/r{requests}{'/uniform' if uniform else ''}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


__all__ = ["BatchFacts", "Guard", "StateView", "graph_name"]
