"""Tells a robot's server how its run goes, once a second, from a thread that no command waits for."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from typing import Any, Mapping, Protocol

import numpy as np

from sinew_client.client import Client
from sinew_client.control.loop import Loop
from sinew_client.control.safety import RATES
from sinew_client.control.takeover import ALIGNING, HUMAN
from sinew_client.errors import ClientError, ServerError
from sinew_client.faults import PERMANENT
from sinew_client.robot_report import RobotReport

logger = logging.getLogger(__name__)

PERIOD_S = 1.0  # between two reports
TIMEOUT_S = 1.0  # for one of them,
LAST_S = 0.3  # and for the last, which the end of a run waits for
RECENT = 10  # reports over which rates and ages are counted


class Told(Protocol):
    """Where a robot's requests go at present (:class:`~sinew_client.control.Servers`, ``StreamLink``)."""

    @property
    def present(self) -> str: ...


class Reporter:
    """Reports a loop's run to its server while inside ``with``, and that it has ended.

    A report opens a connection of its own and closes it, so it holds no place of the server's and delays no request; it
    is made of counts that the loop keeps anyway. One that gets no answer is dropped. A server that does not take any,
    such as one of before there were reports, is told nothing more, which is logged once.

    where: says which server is asked at present. name: of the robot, for people. robot: with ``finished`` and
    ``successes`` where it plays episodes; the loop's own if absent. sent, failed: reports so far.
    """

    def __init__(
        self,
        loop: Loop,
        where: Told,
        api_key: str = "",
        session: str = "",
        name: str = "",
        robot: Any = None,
        period: float = PERIOD_S,
    ):
        self._loop, self._where, self._key, self._session = loop, where, api_key, session
        self._robot, self._name, self._period = loop.robot if robot is None else robot, name, period
        self._run_id = random.SystemRandom().getrandbits(64)
        self.sent = self.failed = 0
        self.refused: set[str] = set()  # addresses that take no reports
        self._recent: deque[tuple[float, int, dict[int, int]]] = deque(maxlen=RECENT)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sinew-report", daemon=True)

    def __enter__(self) -> Reporter:
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S + LAST_S)

    def look(self, ended: bool = False) -> RobotReport:
        """Return how the run goes now."""
        loop, controller = self._loop, self._loop.controller
        (then, old_steps, old_ages), (now, steps, ages) = self._recent[0], self._note()
        span = max(now - then, 1e-6)
        rows = {age: count - old_ages.get(age, 0) for age, count in ages.items()}
        rows = {age: count for age, count in rows.items() if count > 0}
        ms = 1e3 / loop.settings.hz
        reason = "" if ended else loop.reason
        guard, handed = controller.guard, controller.handed
        return RobotReport(
            run=self._run_id,
            name=self._name,
            state="ended" if ended else self._state(reason),
            reason=reason,
            hz=loop.settings.hz,
            rate_hz=round((steps - old_steps) / span, 3),
            rows_hz=round(sum(rows.values()) / span, 3),
            age_p50_ms=round(ms * quantile(rows, 0.5), 3) if rows else None,
            age_p95_ms=round(ms * quantile(rows, 0.95), 3) if rows else None,
            longest_gap_ms=round(1e3 * loop.watchdog.longest, 3),
            steps=steps,
            late=loop.pace.late,
            skipped=loop.pace.skipped,
            held=dict(controller.held),
            clipped_commands=controller.clipped_commands,
            clipped=dict(controller.clipped),
            limits=() if guard is None or guard.limits is None else _limits(guard.limits),
            failed_requests=loop.source.failures,
            takeovers=handed.to_human,
            steps_by_hand=max(0, handed.steps),
            episodes=getattr(self._robot, "finished", None),
            successes=getattr(self._robot, "successes", None),
        )

    def _state(self, reason: str) -> str:
        loop = self._loop
        if loop.paused:
            return "paused"
        if loop.driver in (HUMAN, ALIGNING):
            return loop.driver
        return "holds" if reason else "moves" if loop.steps else "starting"

    def _note(self) -> tuple[float, int, dict[int, int]]:
        """Remember counts for rates; return them."""
        # dict() copies in one step, while the loop counts on; whatever iterates would not.
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
            self.sent += 1
        except (ClientError, OSError) as error:
            self.failed += 1
            if isinstance(error, ServerError) and error.code in PERMANENT:
                self.refused.add(address)
                logger.info("%s takes no reports of this robot: %s", address, error)
            else:
                logger.debug("a report was not taken: %s", error)


def quantile(counts: Mapping[int, int], share: float) -> int:
    """Return the value up to which so large a share of counted values lies; one at least was counted."""
    rank, below = share * sum(counts.values()), 0
    for value in sorted(counts):
        below += counts[value]
        if below >= rank:
            break
    return value


def _limits(limits: Any) -> tuple[str, ...]:
    """Return which limits are in force, by the words of a report."""
    ranged = bool(np.isfinite([limits.low, limits.high]).any())
    found = [("range", ranged), *((name, bool(np.isfinite(getattr(limits, name)).any())) for name in RATES)]
    return tuple(name for name, there in (*found, ("workspace", bool(limits.boxed.any()))) if there)
