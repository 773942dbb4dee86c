"""Let a large policy on a server assist a small policy on the robot.

The small policy ("near") answers every request. A rule decides when the large policy ("far") gets a request too. The
robot never waits for the far policy. When a chunk of the far policy arrives, the robot follows it until half of the
chunk's actions have passed. Chunks that arrive later than that are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Mapping

import numpy as np

from sinew_client.control.motion import Motion
from sinew_client.control.replan import disagreement
from sinew_client.control.requester import Call, Requester
from sinew_client.control.safety import checked_rows
from sinew_client.errors import ClientError
from sinew_client.faults import Faults

logger = logging.getLogger(__name__)

# If the time of a frame is earlier than the time of the previous frame by more than this, the clock was set back, and
# the stored times are invalid.
SET_BACK_S = 10.0


@dataclass(frozen=True)
class AssistRule:
    """The conditions under which the far policy gets a request. One met condition is enough. A condition whose value is
    None is never met.

    Attributes:
        every: The far policy's last answer is at least this many seconds old.
        disagreement: The near policy's new chunk differs from the actions that the robot follows by more than this
            root mean square, over their common control steps.
        uncertainty: Two answers of the near policy to the same observation, with different noise, differ by more than
            this root mean square.
    """

    every: float | None = None
    disagreement: float | None = None
    uncertainty: float | None = None


def parse_assist(text: str) -> AssistRule:
    """Parse a rule for requests to the far policy.

    Args:
        text: ``every:SECONDS``, ``disagreement:LIMIT`` and ``uncertainty:LIMIT``, separated by commas. The far policy
            gets a request if one of these conditions is met.

    Returns:
        The rule.

    Raises:
        ValueError: The text is not a rule.

    Example:
        >>> parse_assist("every:2,disagreement:0.1")
        AssistRule(every=2.0, disagreement=0.1, uncertainty=None)
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if (
            name not in ("every", "disagreement", "uncertainty")
            or not 0.0 <= number < float("inf")
            or name in limits
        ):
            raise ValueError(
                f"assist: expected every:SECONDS, disagreement:LIMIT or uncertainty:LIMIT, each once, got {text!r}"
            )
        limits[name] = number
    return AssistRule(**limits)


@dataclass(frozen=True)
class _Followed:
    """A chunk that the robot follows: H targets, float32 [H, D], and the time of its camera frame, in seconds."""

    targets: np.ndarray
    time: float

    def rest(self, now: float, hz: float) -> np.ndarray:
        """Return the targets whose time has not passed at ``now``, float32 [R, D].

        Args:
            now: Present time, in seconds.
            hz: Control steps per second.
        """
        return self.targets[max(0, round((now - self.time) * hz)) :]


class Assist:
    """Combines the connections to a near policy and a far policy. Use it as ``connect`` of a :class:`Requester`.

    Args:
        near: Function that opens a connection to the near policy.
        far: Function that opens a connection to the far policy.
        rule: The conditions for a request to the far policy.
        hz: Control steps per second.
        deadline: Time limit of a request to the far policy, seconds.
        motion: The motion, which states what actions are relative to. None for actions without a known motion.
        clock: The clock of the observations' ``time``, in seconds. Observations without ``time`` get the present time.

    Attributes:
        asked: Number of requests to the far policy, by reason.
        failed: Number of requests to the far policy without an answer, by reason.
        answered: Number of answers of the far policy.
        late: Number of answers of the far policy that arrived too late.
        near_chunks: Number of chunks from the near policy.
        far_chunks: Number of chunks from the far policy.
    """

    def __init__(
        self,
        near: Callable[[], Call],
        far: Callable[[], Call],
        rule: AssistRule,
        hz: float,
        deadline: float,
        motion: Motion | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._near, self.rule, self.hz = near, rule, hz
        self._motion, self._clock = motion or Motion(), clock
        self._far = Requester(far, deadline)
        self._answered = float("-inf")  # time of the far policy's last answer, seconds
        # This pair is the time and the state of the last frame that was sent to the far policy.
        self._sent: tuple[float, np.ndarray | None] = (0.0, None)
        self._followed: _Followed | None = None  # the far policy's chunk, while the robot follows it
        self._last: _Followed | None = None  # the chunk, near or far, that `answer` returned last
        self._now = float("-inf")  # time of the last observation, seconds
        self._draws = 0
        self._dim = 0  # number of values in each action of the near policy
        self._lock = threading.Lock()
        self.asked: Counter = Counter()  # number of requests to the far policy, by reason
        self.failed: Counter = Counter()  # number of requests without an answer, by reason
        self.faults = Faults()  # the failures that count as errors, and not as normal operation
        self.answered = self.late = self.near_chunks = self.far_chunks = 0

    def __call__(self) -> Call:
        return _AssistedCall(self, self._near())

    def close(self) -> None:
        """Close the connection to the far policy."""
        self._far.close()

    def report(self) -> dict[str, Any]:
        """Return the counts: requests to the far policy by reason, its answers, and the chunks from each policy."""
        return {
            "asked": dict(self.asked),
            "answered": self.answered,
            "late": self.late,
            "failed": dict(self.failed),
            "chunks": {"near": self.near_chunks, "far": self.far_chunks},
        }

    def text(self) -> str:
        """Return the counts of :meth:`report` as one line of text for a log."""
        why = ", ".join(f"{count} {reason}" for reason, count in self.asked.items())
        return (
            f"{self.far_chunks} of {self.far_chunks + self.near_chunks} chunks from the far policy, "
            f"{sum(self.asked.values())} requests{f' ({why})' if why else ''}: {self.answered} answers, "
            f"{self.late} of them too late, {sum(self.failed.values())} failures"
        )

    def answer(self, near: Call, observation: Mapping[str, Any], limit: float) -> np.ndarray:
        """Return the chunk for an observation: the rest of the far policy's chunk if there is one, else the near chunk.

        Args:
            near: The connection to the near policy.
            observation: The observation.
            limit: Time limit of a request to the near policy, seconds.

        Returns:
            The actions, float32 [H, D].
        """
        now = float(observation.get("time") or self._clock())
        state = observation.get("state")
        # The lock is necessary: an abandoned call may still run in its thread when the next call begins.
        with self._lock:
            if now < self._now - SET_BACK_S:
                self._answered, self._followed, self._last = float("-inf"), None, None
            self._now = now
            self._poll(now)
            self._draws += 1
            draw = self._draws
        rows = checked_rows(near(observation, limit), self._dim)
        self._dim = rows.shape[1]
        targets = self._motion.targets(rows, state)
        spread = (
            None if self.rule.uncertainty is None else self._spread(near, observation, limit, targets, draw)
        )
        with self._lock:
            why = self._why(targets, spread, now)
            if why and self._far.ready(self._clock()):
                self.asked[why] += 1
                self._sent = (now, state)
                self._far.ask(observation, self._clock())
            if self._followed is not None:
                rest = self._followed.rest(now, self.hz)
                if 2 * len(rest) > len(self._followed.targets):
                    self.far_chunks += 1
                    self._last = self._followed
                    return self._motion.rows(rest, state)
                self._followed = None
            self.near_chunks += 1
            self._last = _Followed(targets, now)
        return rows

    def _poll(self, now: float) -> None:
        outcome = self._far.poll(self._clock())
        if outcome is None:
            return
        if outcome.reason:
            self.failed[outcome.reason] += 1
            if outcome.kind:
                self.faults.add(outcome.kind, f"the far policy: {outcome.reason}")
            logger.warning(
                "the far policy sent no usable chunk, so the near policy continues: %s", outcome.reason
            )
            return
        then, state = self._sent
        try:
            rows = checked_rows(outcome.value, self._dim)
            targets = self._motion.targets(rows, state)
        except ValueError as error:
            self.failed[f"the far policy: {error}"] += 1
            self.faults.add("bad_chunk", f"the far policy: {error}")
            logger.warning("the far policy sent no usable chunk, so the near policy continues: %s", error)
            return
        self._answered = now
        self.answered += 1
        chunk = _Followed(targets, then)
        if 2 * len(chunk.rest(now, self.hz)) > len(chunk.targets):
            self._followed = chunk
        else:
            self.late += 1

    def _spread(
        self, near: Call, observation: Mapping[str, Any], limit: float, targets: np.ndarray, draw: int
    ) -> float | None:
        """Request a second answer of the near policy, with other noise, and compare it with the first one.

        Args:
            near: The connection to the near policy.
            observation: The observation of the first answer.
            limit: Time limit of the request, seconds.
            targets: Actions of the first answer as targets for the robot, float32 [H, D].
            draw: Seed of the noise, and number of this comparison from 1.

        Returns:
            Root mean square difference of the two answers; None if they have no common steps.

        Raises:
            ClientError: The policy does not draw noise, so its answers are always equal.
        """
        second = np.asarray(near({**observation, "seed": draw}, limit), np.float32)
        distance = disagreement(targets, self._motion.targets(second, observation.get("state")))
        if distance == 0.0 and draw == 1:
            raise ClientError(
                "assist: uncertainty: expected a policy that draws noise, got two equal answers; use the rule every or"
                " disagreement instead"
            )
        return distance

    def _why(self, targets: np.ndarray, spread: float | None, now: float) -> str:
        """Return the name of the condition of the rule that is met, such as "every"; "" if no condition is met.

        Args:
            targets: The near policy's newest actions as targets, float32 [H, D].
            spread: Difference between two answers of the near policy; None if it was not measured.
            now: Present time, in seconds.
        """
        rule = self.rule
        if rule.every is not None and now - self._answered >= rule.every:
            return "every"
        if rule.disagreement is not None and self._last is not None:
            difference = disagreement(self._last.rest(now, self.hz), targets)
            if difference is not None and difference > rule.disagreement:
                return "disagreement"
        if rule.uncertainty is not None and spread is not None and spread > rule.uncertainty:
            return "uncertainty"
        return ""


class _AssistedCall:
    def __init__(self, assist: Assist, near: Call):
        self._assist, self._near = assist, near

    def __call__(self, observation: Mapping[str, Any], limit: float) -> np.ndarray:
        return self._assist.answer(self._near, observation, limit)

    def close(self) -> None:
        close = getattr(self._near, "close", None)
        if close is not None:
            close()
