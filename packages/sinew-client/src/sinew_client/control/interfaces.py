"""The two interfaces of a control loop: a robot, and a source of actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Protocol

import numpy as np

if TYPE_CHECKING:
    from sinew_client.control.requester import Outcome


class Robot(Protocol):
    """The three methods of a robot.

    One thread calls all methods. Each should return within a period. Except for ``hold``, no method is called before
    the last call has returned.

    Set the attribute ``concurrent_hold`` = False if the robot cannot be held from another thread while ``observe`` or
    ``act`` blocks, for example because all methods share an unlocked bus. The robot then gets neither commands nor
    holds while they block.

    Set the attribute ``needs_state`` = True if a command depends on the position in the same step, as for poses. The
    robot is then observed in each control step with a command, and holds if no observation is valid.
    """

    def observe(self) -> Mapping[str, Any]:
        """Read the cameras and the state.

        Returns:
            A dict with ``images`` {camera: uint8 [height, width, 3]} and ``state`` float [S]. Optional entries:
                ``time``, the exposure time of the newest frame in seconds of time.monotonic(), or ``age``, the seconds
                since the exposure; ``times``, the time of each camera and of "state", if these differ
                (``Settings.stale_of``, ``Settings.skew``); ``action`` float [D], another driver's command, if the
                robot is only watched
                (:class:`~sinew_client.control.listeners.shadow.ShadowListener`). For a stream
                (:class:`~sinew_client.control.stream.Watching`), ``images`` is absent if there is no newer frame, and
                ``blind`` is the reason if there should be one.

        Raises:
            NoObservation: There is no valid observation.
        """

    def act(self, row: np.ndarray) -> None:
        """Send one command.

        Args:
            row: float32 [D] in the policy's units.

        Raises:
            NoCommand: The command was not sent.
        """

    def hold(self) -> None:
        """Stay in place: repeat the last position, or send zero velocity, as the robot needs it.

        Another thread may call it (:class:`~sinew_client.control.watchdog.Watchdog`) if ``observe`` or
        ``act`` has not returned for two periods. No other call of ``hold`` runs at the same time, and no command is
        sent before it has returned.
        """


class NoObservation(Exception):  # noqa: N818 - this exception reports a state of the robot, and not an error of the program
    """Raised by ``observe`` if there is no valid observation, for example because a camera stopped sending frames.

    The robot holds, with the text as the reason, until there is a valid observation.
    """


class NoCommand(Exception):  # noqa: N818 - this exception reports a state of the robot, and not an error of the program
    """Raised by ``act`` if it did not send a command, for example because a pose is out of reach.

    The robot holds until there is a fresh chunk.

    Args:
        reason: Why the robot holds.
        detail: Details of this one command, for the log.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Stopped(Exception):  # noqa: N818 - a robot raises this exception to end the loop
    """Raised by ``observe`` or ``act`` to end the run."""


class Source(Protocol):
    """A source of actions. Its methods return without waiting. Times are seconds of the loop's clock (``Pace.now``).

    The type of an answer depends on the controller: a chunk for each observation
    (:class:`~sinew_client.control.requester.Requester`), or windows of a stream
    (:class:`~sinew_client.control.stream.Stream`).

    Attributes:
        continuous: True if answers arrive without requests. ``Settings.fusion`` then states how they are fused.
    """

    continuous: bool

    @property
    def failures(self) -> int:
        """Number of observations with an error as the answer, or without an answer."""

    def ready(self, now: float) -> bool:
        """Return True if an observation may be sent now."""

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        """Send an observation."""

    def poll(self, now: float) -> Outcome | None:
        """Return the oldest answer that has arrived, or None. Answers never precede their observation."""

    def cancel(self) -> None:
        """Abandon the requests in progress. Their answers are dropped."""

    def close(self, wait: float = 0.0) -> None:
        """Close the source. Wait at most ``wait`` seconds for the requests in progress."""
