"""Send the state of a robot's run to its server once a second, from a thread that never delays a command."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from typing import Any

import numpy as np

from sinew_client.client import Client
from sinew_client.control.authority import POLICY
from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.loop import Loop
from sinew_client.control.report import percentiles
from sinew_client.control.safety import RATES
from sinew_client.errors import ClientError, ServerError
from sinew_client.faults import kind_of
from sinew_client.robot_report import FARTHEST, MAX_POINTS, RobotReport

logger = logging.getLogger(__name__)

PERIOD_S = 1.0  # seconds between two reports
TIMEOUT_S = 1.0  # time limit of a report, seconds
# The last report has this time limit in seconds. The limit is short, because the end of a run waits for this report.
LAST_S = 0.3
RECENT = 10  # rates and ages in a report are computed from this many last reports


class Reporter:
    """Sends reports about a loop to its server, for the dashboard. Use it in a ``with`` block.

    The last report states that the run has ended. Each report opens its own short connection, so it does not occupy a
    connection of the server. If a report gets no answer, it is dropped. If a server rejects a report, it gets no more
    reports, and the rejection is logged.

    Args:
        loop: The loop.
        where: A ``Servers`` or ``StreamLink``, whose attribute ``present`` is the server's address.
        api_key: Key of the server.
        session: Session of the robot, as in its observations.
        name: Name of the robot on the dashboard.
        facts: Facts of the robot; None reads them from the loop's robot.
        period: Seconds between two reports.

    Attributes:
        refused: Addresses that rejected a report.

    Example:
        >>> with Reporter(loop, servers, name="arm-1"):
        ...     loop.run()
    """

    def __init__(
        self,
        loop: Loop,
        where: Any,
        api_key: str = "",
        session: str = "",
        name: str = "",
        facts: RobotFacts | None = None,
        period: float = PERIOD_S,
    ):
        self._loop, self._where, self._key, self._session = loop, where, api_key, session
        self._facts, self._name, self._period = facts or facts_of(loop.robot), name, period
        self._number = random.SystemRandom().getrandbits(64)
        self.refused: set[str] = set()
        self._recent: deque[tuple[float, int, dict[int, int]]] = deque(maxlen=RECENT)
        self._note()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sinew-report", daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S + LAST_S)

    def look(self, ended: bool = False) -> RobotReport:
        """Collect the present state of the run. ``ended`` is True for the last report."""
        loop, controller = self._loop, self._loop.controller
        (then, old_steps, old_ages), (now, steps, ages) = self._recent[0], self._note()
        span, ms = max(now - then, 1e-6), 1e3 / loop.settings.hz
        rows = Counter({age: count - old_ages.get(age, 0) for age, count in ages.items()})
        row_ages = percentiles(ms * age for age in rows.elements())
        successes, episodes = self._facts.counts
        state = "holds" if loop.reason else "moves" if loop.steps else "starting"
        state = state if controller.driver == POLICY else controller.driver
        limits = None if controller.guard is None else controller.guard.limits
        return RobotReport(
            run=self._number,
            name=self._name,
            state="ended" if ended else "paused" if controller.paused else state,
            reason="" if ended else loop.reason,
            hz=loop.settings.hz,
            rate_hz=round((steps - old_steps) / span, 3),
            rows_hz=round(max(0, sum(rows.values())) / span, 3),
            age_p50_ms=row_ages.get("p50"),
            age_p95_ms=row_ages.get("p95"),
            steps=steps,
            late=loop.pace.late,
            skipped=loop.pace.skipped,
            held=dict(controller.held),
            clipped_commands=controller.clipped_commands,
            clipped=dict(controller.clipped),
            limits=() if limits is None else _in_force(limits),
            failed_requests=loop.source.failures,
            takeovers=controller.handed.to_human,
            steps_by_hand=max(0, controller.handed.steps),
            successes=successes,
            episodes=episodes,
            arm=_points(self._facts),
        )

    def _note(self) -> tuple[float, int, dict[int, int]]:
        # The loop changes the counts in another thread. dict() copies them in one step that no thread can interrupt.
        self._recent.append((time.monotonic(), self._loop.steps, dict(self._loop.controller.ages)))
        return self._recent[-1]

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            self._tell(self.look(), TIMEOUT_S)
        self._tell(self.look(ended=True), LAST_S)

    def _tell(self, report: RobotReport, timeout: float) -> None:
        address = self._where.present
        if address in self.refused:
            return
        try:
            with Client(address, api_key=self._key, timeout=timeout) as client:
                client.report(report, self._session)
        except (ClientError, OSError) as error:
            if isinstance(error, ServerError) and kind_of(error):
                self.refused.add(address)
                logger.info("%s rejects the reports of this robot, so it gets no more: %s", address, error)
            else:
                logger.debug("a report could not be sent: %s", error)


def _points(facts: RobotFacts) -> tuple[float, ...]:
    points = facts.points() if facts.points is not None else None
    if points is None or np.shape(points)[1:] != (3,) or len(points) > MAX_POINTS:
        return ()
    # The comparison is False for NaN, so unknown points are not sent either.
    return tuple(np.ravel(points).tolist()) if np.all(np.abs(points) < FARTHEST) else ()


def _in_force(limits: Any) -> tuple[str, ...]:
    each = {"range": (limits.low, limits.high), **{name: getattr(limits, name) for name in RATES}}
    ranged = tuple(name for name, bounds in each.items() if np.isfinite(bounds).any())
    return (*ranged, "workspace") if limits.boxed.any() else ranged
