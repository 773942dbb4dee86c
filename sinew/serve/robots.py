"""What robots say of their own runs: the newest report of each, for the dashboard and Prometheus.

Anybody who may ask the server may send one. So a report is checked (``RobotReport.parse``), there are at most 32 at
once, and one that lies changes its own row alone: a row belongs to a peer, a session and a number that the robot drew.
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
from sinew_client.control import controller, windows
from sinew_client.robot_report import STATES, RobotReport

from sinew.serve.metrics import SESSION_S

MAX_ROBOTS = 32  # remembered at once
# Reasons of holds that metrics tell apart: others quote what servers and drivers say.
REASONS = (
    *(controller.PAUSED, controller.STARTING, controller.STARVED, controller.LATE),
    *(windows.NO_WINDOW, windows.OUT_OF_NODES, windows.OLD_FRAME),
)
Key = tuple[str, str, str, int]  # wire, client, session, run


@dataclass(frozen=True)
class Reported:
    """One robot. number: from 1 to ``MAX_ROBOTS``, the lowest that was free. heard: by the clock of :class:`Robots`."""

    number: int
    policy: str
    report: RobotReport
    heard: float


class Robots(Collector):
    """The newest report of each robot; one that was silent for as long as a session may be is forgotten.

    Thread-safe. clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._robots: dict[Key, Reported] = {}  # those that were heard last stand last

    def put(self, wire: str, client: str, session: str, policy: str, data: bytes | memoryview) -> None:
        """Take a robot's report. Where all places are taken, the peer that has most loses the one that was silent for
        longest. Raises RequestError for bytes that are no report."""
        report = RobotReport.parse(data)
        key, now = (wire, client, session, report.run), self._clock()
        with self._lock:
            self._forget(now)
            before = self._robots.pop(key, None)
            if before is None and len(self._robots) >= MAX_ROBOTS:
                rows = Counter(peer for _, peer, _, _ in self._robots)
                rows[client] += 1
                most = max(rows, key=lambda peer: (rows[peer], peer == client))
                del self._robots[next(each for each in self._robots if each[1] == most)]
            taken = {each.number for each in self._robots.values()}
            number = next(n for n in range(1, MAX_ROBOTS + 1) if n not in taken)
            self._robots[key] = Reported(number if before is None else before.number, policy, report, now)

    def rows(self) -> list[dict[str, Any]]:
        """Return who they are, seconds since each was heard, and what it said; by number, ready for JSON."""
        now = self._clock()
        return [
            {
                "number": robot.number,
                **dict(zip(("wire", "client", "session"), key, strict=False)),
                "policy": robot.policy,
                "heard_s": round(now - robot.heard, 3),
                **{name: value for name, value in robot.report.to_dict().items() if name != "run"},
            }
            for key, robot in self._sorted()
        ]

    def _sorted(self) -> list[tuple[Key, Reported]]:
        with self._lock:
            self._forget(self._clock())
            return sorted(self._robots.items(), key=lambda each: each[1].number)

    def _forget(self, now: float) -> None:
        self._robots = {key: each for key, each in self._robots.items() if now - each.heard <= SESSION_S}

    def collect(self) -> Iterator[Metric]:
        """Yield metrics of Prometheus. Their labels are numbers of robots and known words: no text of a client's."""
        robots = [(str(each.number), each.report) for _, each in self._sorted()]
        states = Counter(report.state for _, report in robots)
        found = GaugeMetricFamily("sinew_robots", "Robots that report, by what they do", labels=["state"])
        for state in STATES:
            found.add_metric([state], states[state])
        yield found
        age = GaugeMetricFamily(
            "sinew_robot_row_age_seconds", "Frame to execution of the last rows", labels=["robot", "quantile"]
        )
        held = CounterMetricFamily(
            "sinew_robot_held_steps", "Control steps that held", labels=["robot", "reason"]
        )
        played = CounterMetricFamily("sinew_robot_episodes", "Finished episodes", labels=["robot", "outcome"])
        for number, report in robots:
            for share, ms in (("0.5", report.age_p50_ms), ("0.95", report.age_p95_ms)):
                if ms is not None:
                    age.add_metric([number, share], ms / 1e3)
            reasons = Counter[str]()
            for reason, count in report.held.items():
                reasons[reason if reason in REASONS else "other"] += count
            for reason, count in reasons.items():
                held.add_metric([number, reason], count)
            if report.episodes is not None:
                won = report.successes or 0
                played.add_metric([number, "won"], won)
                played.add_metric([number, "lost"], report.episodes - won)
        yield from (age, held, played)
        for kind, name, about in (
            (GaugeMetricFamily, "rate_hz", "Control steps per second of the last ten seconds"),
            (GaugeMetricFamily, "rows_hz", "Rows of the policy executed per second"),
            (CounterMetricFamily, "steps", "Control steps"),
            (CounterMetricFamily, "late", "Control ticks that began late"),
            (CounterMetricFamily, "clipped_commands", "Commands that a limit changed"),
            (CounterMetricFamily, "failed_requests", "Requests without an answer that could be executed"),
            (CounterMetricFamily, "takeovers", "Times that a human took over"),
        ):
            family = kind(f"sinew_robot_{name}", about, labels=["robot"])
            for number, report in robots:
                family.add_metric([number], getattr(report, name))
            yield family
