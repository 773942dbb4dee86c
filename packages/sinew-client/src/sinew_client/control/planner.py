"""Run a planner next to a control loop: a function of yours that changes the instruction while the robot moves."""

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
    """Calls a planner at a fixed rate on its own thread, and changes the instruction if the planner returns a new one.

    If the planner raises an exception, or returns an invalid text (more than 4,096 characters, or no UTF-8), the error
    is logged and the instruction stays. A call that takes longer than a period delays the next call.

    Args:
        plan: The planner. It gets the instruction and the newest observation: a dict with "images" and "state", and
            "said" if the policy's language head has generated text. It returns a new instruction, or None.
        hz: Calls per second, 0.01 to 10.
        look: Function that returns the instruction and the observation, such as :func:`newest_of` with a loop. It
            returns None if there is no observation yet.
        say: Function that gets the new instruction, such as ``loop.say``.

    Raises:
        ClientError: The rate is out of range.
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
        """End the thread after the running call. Wait for this call at most ``timeout`` seconds."""
        self._end.set()
        self._thread.join(timeout)

    def once(self) -> None:
        """Call the planner once with the newest observation. Do nothing if there is no observation yet."""
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
            logger.exception("the planner failed, so the instruction does not change")
        else:
            self.changes += 1

    def _run(self) -> None:
        while not self._end.wait(self._period):
            self.once()


def newest_of(loop: Loop) -> tuple[str, dict[str, Any]] | None:
    """Return the present instruction and the newest observation of a loop, for a planner.

    Args:
        loop: The loop.

    Returns:
        The instruction and a dict with "images" and "state". "said" is the last text of the policy's language head, if
        there is any. None before the first observation.
    """
    observer, text = loop.observer, loop.controller.said
    if observer.state is None or not observer.images:
        return None
    observation = {"images": observer.images, "state": observer.state, **({"said": text} if text else {})}
    return loop.prompt, observation


def open_planner(text: str) -> Plan:
    """Import a planner.

    Args:
        text: ``module:name`` of a callable.

    Returns:
        The callable.

    Raises:
        ClientError: The module or the name does not exist, or the object is not callable.
    """
    plan = load_named(text, f"planner {text}")
    if not callable(plan):
        raise ClientError(f"planner {text}: expected a callable, got {type(plan).__name__}")
    return plan
