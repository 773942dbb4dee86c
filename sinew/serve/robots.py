"""Stores the newest report of each robot's run, for the dashboard and Prometheus.

Every client of the server may send a report. So each report is checked (``RobotReport.parse``), at most 32 are stored,
and a false report changes only its own row. A row belongs to a peer, a session and a random number of the robot.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sinew_client.control.controller import LATE, PAUSED, STARTING, STARVED
from sinew_client.control.windows import NO_WINDOW, OLD_FRAME, OUT_OF_NODES
from sinew_client.robot_report import STATES, RobotReport

from sinew.serve.metrics import SESSION_S

MAX_ROBOTS = 32  # largest number of stored reports
# Reasons why a robot holds its position that have their own label in the metrics. All other reasons contain free text
# of servers and drivers, and share the label "other".
REASONS = (PAUSED, STARTING, STARVED, LATE, NO_WINDOW, OUT_OF_NODES, OLD_FRAME)
GAUGES = ("rate_hz", "rows_hz", "row_age_seconds")
PLAIN = ("rate_hz", "rows_hz", "steps", "late", "clipped_commands", "failed_requests", "takeovers")
LABELS = {"row_age_seconds": ["quantile"], "held_steps": ["reason"], "episodes": ["outcome"]}
Key = tuple[str, str, str, int]  # (protocol, client, session, random number of the run)


@dataclass(frozen=True)
class Reported:
    """The newest report of a robot.

    Attributes:
        number: Number of the robot: the lowest free number from 1 to ``MAX_ROBOTS``.
        policy: Name of the robot's policy.
        report: The report.
        heard: Time of the report, seconds of the clock.
    """

    number: int
    policy: str
    report: RobotReport
    heard: float


class Robots(Collector):
    """The newest report of each robot. A report is removed when the robot was silent for ``SESSION_S`` seconds.
    Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._robots: dict[Key, Reported] = {}  # reports by robot, the oldest report first

    def put(self, wire: str, client: str, session: str, policy: str, data: bytes | memoryview) -> None:
        """Store a report of a robot. If no place is free, the peer with the most reports loses its oldest report.

        Args:
            wire: Name of the protocol.
            client: Address of the peer.
            session: Session of the robot.
            policy: Name of the robot's policy.
            data: The report.

        Raises:
            RequestError: The report is not valid.
        """
        report = RobotReport.parse(data)
        key, now = (wire, client, session, report.run), self._clock()
        with self._lock:
            self._forget(now)
            before = self._robots.pop(key, None)
            if before is None and len(self._robots) >= MAX_ROBOTS:
                rows = Counter([client, *(peer for _, peer, _, _ in self._robots)])
                most = max(rows, key=lambda peer: (rows[peer], peer == client))
                del self._robots[next(each for each in self._robots if each[1] == most)]
            taken = {each.number for each in self._robots.values()}
            number = min({*range(1, MAX_ROBOTS + 1)} - taken) if before is None else before.number
            self._robots[key] = Reported(number, policy, report, now)

    def rows(self) -> list[dict[str, Any]]:
        """Return the robots by number, each with the age and the content of its last report, ready for JSON."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            robots = sorted(self._robots.items(), key=lambda each: each[1].number)
        return [
            {
                **dict(zip(("wire", "client", "session"), key, strict=False)),
                **{name: value for name, value in vars(each.report).items() if name != "run"},
                "number": each.number,
                "policy": each.policy,
                "heard_s": round(now - each.heard, 3),
            }
            for key, each in robots
        ]

    def _forget(self, now: float) -> None:
        self._robots = {key: each for key, each in self._robots.items() if now - each.heard <= SESSION_S}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Their labels are numbers of robots and fixed words, but no text of a client."""
        robots = self.rows()
        states = Counter(row["state"] for row in robots)
        metrics: dict[str, Any] = {
            "robots": GaugeMetricFamily("sinew_robots", "Robots now", labels=["state"])
        }
        for kind in (*LABELS, *PLAIN):
            family = GaugeMetricFamily if kind in GAUGES else CounterMetricFamily
            labels = ["robot", *LABELS.get(kind, [])]
            metrics[kind] = family(f"sinew_robot_{kind}", "As a robot's report says", labels=labels)
        for state in STATES:
            metrics["robots"].add_metric([state], states[state])
        for row in robots:
            number = str(row["number"])
            for share, ms in (("0.5", row["age_p50_ms"]), ("0.95", row["age_p95_ms"])):
                if ms is not None:
                    metrics["row_age_seconds"].add_metric([number, share], ms / 1e3)
            hold_counts = Counter[str]()
            for reason, count in row["held"].items():
                hold_counts[reason if reason in REASONS else "other"] += count
            for reason, count in hold_counts.items():
                metrics["held_steps"].add_metric([number, reason], count)
            if (played := row["episodes"]) is not None:
                won = row["successes"] or 0
                for outcome, count in (("won", won), ("lost", played - won)):
                    metrics["episodes"].add_metric([number, outcome], count)
            for name in PLAIN:
                metrics[name].add_metric([number], row[name])
        yield from metrics.values()
