"""What the service counts, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sandboxes.pool import BUCKETS_S, Durations

if TYPE_CHECKING:
    from sandboxes.service import Service


class Metrics(Collector):
    """The pool's counters and the service's own, read when asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        service, counters = self._service, self._service.pool.counters
        totals = {
            "leases": "sandboxes handed out",
            "started": "sandboxes started",
            "discarded": "sandboxes thrown away broken or unclean",
            "retired": "sandboxes replaced after their number of uses",
            "leaked": "sandboxes that could not be removed",
            "refused": "leases that the queue had no room for",
        }
        for name, text in totals.items():
            yield CounterMetricFamily(f"agent_rl_sandbox_{name}", text, value=getattr(counters, name))
        yield CounterMetricFamily("agent_rl_sandbox_expired", "leases that nobody used", value=service.expired)
        yield GaugeMetricFamily("agent_rl_sandbox_waiting", "leases in the queue", value=counters.waiting)
        yield GaugeMetricFamily("agent_rl_sandbox_in_use", "sandboxes in use", value=counters.leased)
        yield GaugeMetricFamily("agent_rl_sandbox_size", "sandboxes at most", value=service.pool.spec.size)
        programs = CounterMetricFamily("agent_rl_sandbox_programs", "programs run", labels=["status"])
        for status, count in counters.results.items():
            programs.add_metric([status], count)
        yield programs
        answers = CounterMetricFamily("agent_rl_sandbox_http_answers", "requests", labels=["client", "route", "code"])
        for (client, route, code), count in service.answers.items():
            answers.add_metric([client, route, str(code)], count)
        yield answers
        for name, what in (("wait", counters.wait), ("start", counters.start), ("exec", counters.exec)):
            yield _histogram(f"agent_rl_sandbox_{name}_seconds", what)


def _histogram(name: str, durations: Durations) -> Metric:
    buckets, so_far = [], 0
    for bound, count in zip(BUCKETS_S, durations.buckets, strict=True):
        so_far += count
        buckets.append((str(bound), so_far))
    buckets.append(("+Inf", durations.count))
    return HistogramMetricFamily(name, "seconds", buckets=buckets, sum_value=durations.total_s)
