"""Prometheus series on the API server's `/metrics`, from the last report that was gathered.

Label sets are bounded: ranks of the deployment, two paths, the codes of the closed enum, and the counters' fixed names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SERIES = {
    "k3fast_selected": ("gauge", ("rank",), "1 where the deployment may take the fast path, 0 where it was refused."),
    "k3fast_steps": ("counter", ("rank", "path"), "Steps by the path that computed them: fast or standard."),
    "k3fast_tokens": ("counter", ("rank", "path"), "Real tokens (no padding) by path."),
    "k3fast_decode_tokens": ("counter", ("rank", "path"), "Real tokens that are not prompt, by path."),
    "k3fast_padded_rows": ("counter", ("rank", "path"), "Rows that only padded a batch to its graph's size."),
    "k3fast_fallback_steps": ("counter", ("rank",), "Standard steps without prompt tokens."),
    "k3fast_standard_reasons": ("counter", ("rank", "reason"), "Standard steps, once under each of their reasons."),
    "k3fast_violations": ("counter", ("rank", "reason"), "Things that must never happen, by reason."),
    "k3fast_quarantined_plans": ("gauge", ("rank",), "Plan keys retired after a violation."),
    "k3fast_events": ("counter", ("rank", "name"), "Named counters of the guard (docs/guard.md)."),
    "k3fast_event_lines_lost": ("counter", ("rank",), "Event lines that no file will ever hold."),
    "k3fast_report_age_seconds": ("gauge", (), "Age of the report that these series come from."),
}
"""Name (counters get `_total`), kind, labels and meaning of every series."""


def samples(rank: Mapping[str, Any]) -> Iterable[tuple[str, tuple[str, ...], float]]:
    """(series, label values after `rank`, value) of one rank's report."""
    yield "k3fast_selected", (), float(rank["deployment"]["selected"] is True)
    for path in ("fast", "standard"):
        for series in ("steps", "tokens", "decode_tokens", "padded_rows"):
            yield f"k3fast_{series}", (path,), rank["steps"][path][series]
    yield "k3fast_fallback_steps", (), rank["steps"]["fallback"]
    for reason, count in rank["steps"]["by_reason"].items():
        yield "k3fast_standard_reasons", (reason,), count
    for reason, count in rank["violations"]["by_reason"].items():
        yield "k3fast_violations", (reason,), count
    yield "k3fast_quarantined_plans", (), len(rank["quarantined"])
    for name, count in rank["counters"].items():
        yield "k3fast_events", (name,), count
    yield "k3fast_event_lines_lost", (), rank["events"]["lost"]


class ReportCollector(Collector):
    """Turns the newest report into series at each scrape; before the first report there are none."""

    def __init__(self, newest: Callable[[], Mapping[str, Any] | None]) -> None:
        self._newest = newest

    def describe(self) -> Iterable[Metric]:
        return [self._family(name) for name in SERIES]

    def collect(self) -> Iterable[Metric]:
        report = self._newest()
        if report is None:
            return []
        families = {name: self._family(name) for name in SERIES}
        for rank in report["ranks"]:
            for name, labels, value in samples(rank):
                families[name].add_metric((rank["rank"], *labels), value)
        families["k3fast_report_age_seconds"].add_metric((), max(0.0, time.time() - report["time"]))
        return families.values()

    @staticmethod
    def _family(name: str) -> Any:
        kind, labels, text = SERIES[name]
        return (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, text, labels=labels)


def register(newest: Callable[[], Mapping[str, Any] | None]) -> ReportCollector:
    """Serve the series from this process' default registry."""
    collector = ReportCollector(newest)
    REGISTRY.register(collector)
    return collector
