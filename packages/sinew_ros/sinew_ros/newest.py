"""Stores the newest message of a topic, and counts all messages."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from sinew_client.control import NoObservation

from sinew_ros.messages import Refused, stamp

AHEAD = 0.1  # seconds that a stamp may be in the future, because the clocks of two machines differ
KEPT = 10_000  # number of message ages that are stored for the percentiles
REASONS = 32  # largest number of different reasons that are counted separately


class Newest:
    """Stores the newest message of a topic. Any thread adds messages. The loop's thread gets the newest message.

    Every message is counted once: ``received`` = ``used`` + ``replaced`` (by a newer message before it was used)
    + ``dropped`` (rejected, counted by reason) + one that may be waiting.

    Args:
        name: Name of the camera or of the part of the state.
        read: Function that converts a message for the policy. The loop's thread calls it once for each used
            message. Raises Refused.
        check: Checks every message when it arrives, so it must be fast. Raises Refused.
        max_age: Seconds since the exposure after which a message is not used any more.
        stamped: True if the stamp of a message is its exposure time. False uses the arrival time.
        topic: Name of the topic, for messages to users.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[Any], Any],
        check: Callable[[Any], Any],
        max_age: float,
        stamped: bool = True,
        topic: str = "",
    ):
        self.name, self.max_age, self.topic = name, max_age, topic
        self._read, self._check, self._stamped = read, check, stamped
        self.received = self.used = self.replaced = 0
        self.dropped: Counter = Counter()
        self.ages: deque[float] = deque(maxlen=KEPT)  # seconds from exposure to use
        self.arrivals: deque[float] = deque(maxlen=64)
        self._lock = threading.Lock()
        self._message: Any = None  # the newest message, if it was not read yet
        self._value: Any = None
        self._taken = 0.0  # exposure time of the newest message, in seconds of the loop's clock
        self._seen = 0.0  # exposure time of the value that was read last, in seconds of the loop's clock
        self._stamp = 0.0  # exposure time of the newest message, in seconds of ROS time
        self._any = False

    def put(self, message: Any, now: float, clock: float) -> None:
        """Store a message.

        Args:
            message: The message.
            now: Time on the loop's clock, seconds.
            clock: ROS time, seconds.
        """
        with self._lock:
            self.received += 1
            self.arrivals.append(now)
            try:
                exposed = self._exposed(message, clock)
                self._check(message)
            except Refused as reason:
                self._drop(str(reason))
                return
            self.replaced += self._message is not None
            self._message, self._any = message, True
            self._stamp, self._taken = exposed, now - (clock - exposed)

    def take(self, now: float) -> tuple[Any, float]:
        """Return the newest value and its exposure time on the loop's clock.

        Args:
            now: Time on the loop's clock, seconds.

        Raises:
            NoObservation: No message has arrived yet, or the newest message is too old.
        """
        with self._lock:
            message, self._message = self._message, None
            taken = self._taken
        if message is not None:
            try:
                self._value, self._seen = self._read(message), taken
            except Refused as reason:  # the previous value stays in use
                with self._lock:
                    self._drop(str(reason))
            else:
                with self._lock:
                    self.used += 1
                    self.ages.append(now - taken)
        if self._value is None:
            why = f": {self.dropped.most_common(1)[0][0]}" if self.dropped else ""
            where = f" on {self.topic}" if self.topic else ""
            raise NoObservation(f"{self.name}: no message{where} yet{why}")
        if now - self._seen > self.max_age:
            raise NoObservation(f"{self.name}: the newest message is older than {self.max_age:g} s")
        return self._value, self._seen

    def rate(self) -> float:
        """Return the rate of the last messages in Hz; 0 for fewer than two messages."""
        seen = list(self.arrivals)
        return (len(seen) - 1) / (seen[-1] - seen[0]) if len(seen) > 1 and seen[-1] > seen[0] else 0.0

    def _drop(self, reason: str) -> None:
        """Count a rejected message by its reason. The number of reasons is limited, because a reason may quote a
        message.
        """
        listed = reason in self.dropped or len(self.dropped) < REASONS
        self.dropped[reason if listed else "other reasons"] += 1

    def _exposed(self, message: Any, clock: float) -> float:
        if not self._stamped:
            return clock
        exposed = stamp(message)
        if exposed == 0.0:
            raise Refused("the message has no stamp")
        if exposed > clock + AHEAD:
            raise Refused("the stamp is in the future")
        if clock - exposed > self.max_age:
            raise Refused(f"older than {self.max_age:g} s when it arrived")
        # If the clock was set back, for example at the start of another bag, the last stamp is in the future. Then
        # accept an older stamp.
        if self._any and exposed <= self._stamp <= clock + AHEAD:
            raise Refused("not newer than the previous message")
        return exposed
