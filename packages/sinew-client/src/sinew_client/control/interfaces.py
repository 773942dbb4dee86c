"""What a loop stands between: a robot, and a source of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Protocol

import numpy as np

if TYPE_CHECKING:
    from sinew_client.control.requester import Outcome


class Robot(Protocol):
    """The three methods that a robot has. Each is called from one thread, should return within a period, and is not
    called before the one before has returned, but for ``hold``.

    A robot that cannot be held from another thread while ``observe`` or ``act`` blocks, such as one with a bus that is
    read in ``observe`` and not locked, says so with an attribute ``concurrent_hold`` = False: it then has no command
    and no hold for as long as they block.

    A robot whose next command counts from where it is seen, such as one of poses, has an attribute ``needs_state`` =
    True. It is then observed in each control step with a command, and holds where no observation may be acted on.
    """

    def observe(self) -> Mapping[str, Any]:
        """Return ``images`` {camera: uint8 [h, w, 3]} and ``state`` float [S]; where the robot knows it ``time``,
        seconds of the loop's clock (time.monotonic) at which the newest frame was exposed, or ``age``, seconds since
        then; ``times``, the same of each camera by its name, and of the "state", where they differ
        (``Settings.stale_of``, ``Settings.skew``); ``action`` float [D], what somebody else has it do, where it is only
        looked at (:class:`~sinew_client.control.listeners.shadow.Onlooker`). Raises :class:`NoObservation` where there
        is nothing to act on. What goes to a stream (:class:`~sinew_client.control.stream.Watching`) is without
        ``images`` where there is no newer frame, and has ``blind``, the reason, where one should be there."""

    def act(self, row: np.ndarray) -> None:
        """Send one command, float32 [D] in the policy's units. Raises :class:`NoCommand` where it sends nothing."""

    def hold(self) -> None:
        """Stay where you are: repeat the last position, or zero velocity, as the robot needs it. May be called from
        another thread (:class:`~sinew_client.control.watchdog.Watchdog`) while ``observe`` or ``act`` has not returned
        for two periods; never beside another ``hold``, and no command is sent before it has returned."""


class NoObservation(Exception):  # noqa: N818 - what the robot is
    """No observation that may be acted on, such as of a camera that fell silent: raised by ``observe``. The robot holds
    with its text as the reason until there is one again."""


class NoCommand(Exception):  # noqa: N818 - what the robot got
    """A command that the robot is not sent, such as a pose out of its reach: raised by ``act`` before anything was. The
    robot holds with ``reason`` until there is a fresh chunk. detail: of this one command, for the log."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Stopped(Exception):  # noqa: N818 - raised by a robot to end the loop
    """The end of a run: raised by ``observe`` or ``act`` when there is nothing more to do."""


class Source(Protocol):
    """Where rows come from; nothing of it waits. Times are seconds of the loop's clock (``Pace.now``).

    What an answer is depends on the settings' controller: a chunk for each observation
    (:class:`~sinew_client.control.requester.Requester`), or windows as they come
    (:class:`~sinew_client.control.stream.Stream`).

    continuous: answers come by themselves, so the settings say how they are fused (``Settings.fusion``).
    """

    continuous: bool

    @property
    def failures(self) -> int:
        """Return how many observations were answered by an error, or not at all."""

    def ready(self, now: float) -> bool:
        """Return True if an observation may be sent now."""

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        """Send an observation."""

    def poll(self, now: float) -> Outcome | None:
        """Return one answer that has come, oldest first; None where there is none. Never before its observation."""

    def cancel(self) -> None:
        """Let what is under way go nowhere."""

    def close(self, wait: float = 0.0) -> None:
        """End; wait at most so many seconds for what is under way."""
