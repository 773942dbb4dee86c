"""A planner next to a robot's loop: a function that changes the instruction while the robot moves."""

from __future__ import annotations

import logging
import threading
from typing import Any, Callable, Mapping

from sinew_client.control.loop import Loop
from sinew_client.errors import ClientError
from sinew_client.modules import load_named

logger = logging.getLogger(__name__)

SLOWEST, FASTEST = 0.01, 10.0  # Hz
LONGEST = 4096  # longest instruction, characters
# A plan is called with the instruction and the newest observation. It returns a new instruction, or None for no change.
Plan = Callable[[str, Mapping[str, Any]], "str | None"]


class Planner:
    """Calls ``plan`` ``hz`` times a second on its own thread, and passes the result to ``say``.

    Args:
        plan: Function of the instruction and the newest observation ({"images", "state"}, and "said", the last text
            of the policy's language head, if any). It returns a new instruction, or None to keep the present one. A
            call that takes longer than a period delays the next call. If it raises an exception, or returns a text of
            more than 4,096 characters or without UTF-8 form, the error is logged, and the instruction stays.
        look: Returns the instruction and the observation, such as :func:`newest_of` a loop; None if there is no
            observation yet.
        say: Function that takes a new instruction.
        hz: Calls per second.
    """

    def __init__(
        self,
        plan: Plan,
        hz: float,
        look: Callable[[], tuple[str, Mapping[str, Any]] | None],
        say: Callable[[str], None],
    ):
        if not SLOWEST <= hz <= FASTEST:
            raise ClientError(f"planner: expected {SLOWEST:g} to {FASTEST:g} calls a second, got {hz}")
        self._plan, self._period, self._look, self._say = plan, 1.0 / hz, look, say
        self.calls = self.changes = self.failures = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sinew-planner", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 1.0) -> None:
        """End after the running call. A call that takes longer than ``timeout`` seconds is abandoned."""
        self._end.set()
        self._thread.join(timeout)

    def once(self) -> None:
        """Call the planner once with the newest observation."""
        newest = self._look()
        if newest is None:
            return
        self.calls += 1
        try:
            answer = self._plan(*newest)
            if not isinstance(answer, str) or not answer.strip() or answer == newest[0]:
                return
            if len(answer) > LONGEST:
                raise ClientError(f"planner: expected at most {LONGEST} characters, got {len(answer)}")
            answer.encode()
            self._say(answer)
        except BaseException:
            self.failures += 1
            logger.exception("the planner failed; the instruction stays")
        else:
            self.changes += 1

    def _run(self) -> None:
        while not self._end.wait(self._period):
            self.once()


def newest_of(loop: Loop) -> tuple[str, dict[str, Any]] | None:
    """Return a loop's instruction and its newest observation, for a planner; None before the first observation.

    The key "said" of the observation is the last text of the policy's language head, if there is any.
    """
    observer, text = loop.observer, loop.controller.said
    if observer.state is None or not observer.images:
        return None
    observation = {"images": observer.images, "state": observer.state, **({"said": text} if text else {})}
    return loop.prompt, observation


def open_planner(text: str) -> Plan:
    """Load the callable ``module:name``. Raises ClientError."""
    plan = load_named(text, f"planner {text}")
    if not callable(plan):
        raise ClientError(f"planner {text}: expected a callable, got {type(plan).__name__}")
    return plan
