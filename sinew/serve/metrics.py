"""The server's metrics for Prometheus: the latency of each stage, the length of the queue, missed deadlines, the number
of sessions, and the errors of each kind.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sinew.core import SinewError
from sinew.serve.request import Outcome

__all__ = ["CONTENT_TYPE", "Metrics"]

# Upper bounds of the histogram buckets in seconds, from a small policy on a large GPU to a large policy on
# two CPU cores.
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.033, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STAGES = ("queue", "preprocess", "vision", "prefix", "text", "head", "postprocess")
ABOUT = ("version", "engine", "device", "dtype", "hardware")  # labels of the metric ``sinew_info``
SESSION_S = 30.0  # seconds without a request after which a session counts as ended
MAX_SESSIONS = 10_000  # largest number of stored sessions, because clients choose the names


# Without this call, each counter exports a second series with its start time.
disable_created_metrics()


class KeptRecords(Collector):
    """Counts the records that ``--record`` and ``--rerun`` have written, dropped or failed to write."""

    def __init__(self, stats: Callable[[], Mapping[str, Mapping[str, int]]]):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield one counter with two labels: the flag that has enabled the recording, and the outcome of the record."""
        metric = CounterMetricFamily(
            "sinew_records",
            "Requests that the server was asked to record, by outcome",
            labels=["by", "outcome"],
        )
        for name, counts in self._stats().items():
            for outcome in ("written", "dropped", "failed"):
                metric.add_metric([name, outcome], counts[outcome])
        yield metric


class PolicyIdentities(Collector):
    """A metric with the identity of the bundle that runs under each policy name. A graph of this metric shows updates
    and rollbacks.

    Args:
        identities: :meth:`sinew.serve.policies.Policies.identities`.
    """

    def __init__(self, identities: Callable[[], Mapping[str, Mapping[str, str]]]):
        self._identities = identities

    def collect(self) -> Iterator[Metric]:
        """Yield one metric of the type "info", with one sample for each policy name."""
        metric = InfoMetricFamily("sinew_policy", "The bundle that runs under each name", labels=["policy"])
        for name, identity in self._identities().items():
            labels = {key: identity.get(key, "") for key in ("hash", "source", "version", "date")}
            metric.add_metric([name], {"name": identity["policy"], **labels})
        yield metric


class Metrics:
    """All metrics of a server in one registry: counters, histograms, and Prometheus' standard metrics of the process.
    Thread-safe.

    Args:
        stats: Returns the scheduler's counters.
        healthy: Returns False while requests cannot be answered.
        metadata: Returns the server's present description of itself and its policy.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, int | bool]],
        healthy: Callable[[], bool] = lambda: True,
        metadata: Callable[[], Mapping[str, Any]] | None = None,
    ):
        self._registry = own = CollectorRegistry()
        ProcessCollector(registry=own)
        self._metadata = metadata or dict
        self._about = Info("sinew", "What runs here", registry=own)
        self._requests = Counter(
            "sinew_requests",
            "Requests by outcome: ok, or the code of an error",
            ["wire", "outcome", "policy"],
            registry=own,
        )
        self._latency = Histogram(
            "sinew_request_seconds",
            "Seconds from the arrival of a request to its reply",
            ["wire"],
            buckets=BUCKETS,
            registry=own,
        )
        stage = Histogram("sinew_stage_seconds", "Time by stage", ["stage"], buckets=BUCKETS, registry=own)
        self._stages = {name: stage.labels(name) for name in STAGES}
        self._batch = Histogram(
            "sinew_batch_size",
            "Answered requests by the number of requests in their batch",
            buckets=(1, 2, 3, 4, 6, 8, 12, 16, 32),
            registry=own,
        )
        self._adapters = Counter(
            "sinew_adapter_requests",
            "Answered requests by the adapter that computed them",
            ["adapter"],
            registry=own,
        )
        self._missed = Counter(
            "sinew_deadline_misses",
            "Requests that were answered or rejected after their deadline",
            ["wire"],
            registry=own,
        )
        self._connections = Gauge("sinew_connections", "Open connections", ["wire"], registry=own)
        for name, about, value in (
            ("sinew_queue_depth", "Requests that wait", lambda: stats()["waiting"]),
            ("sinew_running", "1 while an inference runs, otherwise 0", lambda: stats()["running"]),
            ("sinew_healthy", "1 while requests can be answered, otherwise 0", healthy),
            (
                "sinew_inferences",
                "Inferences since the server was started",
                lambda: stats().get("batches", 0),
            ),
            ("sinew_sessions", f"Sessions heard of in the last {SESSION_S:g} s", lambda: self.sessions),
        ):
            Gauge(name, about, registry=own).set_function(value)
        self.outcomes: Tally[str] = Tally()  # outcome -> number of requests of all protocols
        # Answers that are not counted yet.
        self._answered: deque[tuple[str, Outcome, float, bool, str]] = deque()
        self._counting = threading.Lock()
        self._lock = threading.Lock()
        self._heard: dict[Hashable, float] = {}

    def request(self, wire: str, outcome: Outcome, seconds: float, missed: bool, policy: str = "") -> None:
        """Store an answer, so that :meth:`count` counts it.

        Args:
            wire: Name of the protocol.
            outcome: The answer, or the error.
            seconds: Seconds from the request's arrival to its answer.
            missed: True if the answer was later than the deadline.
            policy: Name of the policy; "" if the request reached no policy.
        """
        self._answered.append((wire, outcome, seconds, missed, policy))

    def count(self) -> None:
        """Count the stored answers. The reply to the robot is sent before, so no robot waits for this."""
        # A reader of the metrics waits until the counting in progress is finished.
        with self._counting:
            while self._answered:
                self._count(*self._answered.popleft())

    def _count(self, wire: str, outcome: Outcome, seconds: float, missed: bool, policy: str) -> None:
        code = outcome.code if isinstance(outcome, SinewError) else "ok"
        self._requests.labels(wire, code, policy).inc()
        self.outcomes[code] += 1
        if missed:
            self._missed.labels(wire).inc()
        if isinstance(outcome, SinewError):
            return
        self._latency.labels(wire).observe(seconds)
        if outcome.adapter:
            self._adapters.labels(outcome.adapter).inc()
        timing = outcome.timing
        self._batch.observe(timing.batch)
        for name, stage in self._stages.items():
            stage.observe(getattr(timing, f"{name}_ms") / 1e3)

    def add(self, collector: Collector) -> None:
        """Add the metrics of another collector to :meth:`exposition`."""
        self._registry.register(collector)

    def connection(self, wire: str, change: int) -> None:
        """Count the open connections of a protocol.

        Args:
            wire: Name of the protocol.
            change: +1 for a new connection, -1 for a closed connection.
        """
        self._connections.labels(wire).inc(change)

    def session(self, name: Hashable) -> None:
        """Record that a session has sent a request, so that the session counts as active."""
        now = time.monotonic()
        with self._lock:
            # Move the session to the end, because the sessions are sorted by their last request.
            self._heard.pop(name, None)
            self._heard[name] = now
            while len(self._heard) > MAX_SESSIONS or now - next(iter(self._heard.values())) > SESSION_S:
                del self._heard[next(iter(self._heard))]

    @property
    def sessions(self) -> int:
        now = time.monotonic()
        with self._lock:
            return sum(now - heard <= SESSION_S for heard in self._heard.values())

    def exposition(self) -> bytes:
        """Return all metrics as bytes in Prometheus' text format. ``CONTENT_TYPE`` is the content type of this
        format.
        """
        self.count()
        # Read the description each time, because a hot-swap may have changed the policy.
        metadata = self._metadata()
        server, policy = (metadata.get(part, {}) for part in ("server", "policy"))
        self._about.info(
            {name: str(server.get(name, "")) for name in ABOUT}
            | {"policy": str(policy.get("name", "")), "architecture": str(policy.get("architecture", ""))}
        )
        return generate_latest(self._registry)
