"""The two interfaces of a control loop: a robot, and a source of actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Protocol

import numpy as np

if TYPE_CHECKING:
    from sinew_client.control.requester import Outcome


class Robot(Protocol):
    """The interface of a robot: three methods that you implement.

    One thread calls all methods, one after the other. Each method should return within a control period. Only ``hold``
    may be called from another thread while another method still runs.

    Optional attributes (:class:`~sinew_client.control.facts.RobotFacts` lists all of them):

    * ``concurrent_hold = False``: ``hold`` is never called while ``observe`` or ``act`` blocks. Set it if another
    thread cannot hold the robot then, for example because all methods share an unlocked bus.
    * ``needs_state = True``: the loop observes the robot in each control step with a command, and holds it if there is
    no valid observation. Set it if a command depends on the position in the same step, as for poses.

    Example:
        >>> class Arm:
        ...     def observe(self):
        ...         return {"images": {"front": self.camera.read()}, "state": self.bus.positions()}
        ...     def act(self, row):
        ...         self.bus.move_to(row)
        ...     def hold(self):
        ...         self.bus.move_to(self.bus.positions())
    """

    def observe(self) -> Mapping[str, Any]:
        """Read the cameras and the state.

        Returns:
            A dict with ``images`` {camera: uint8 [height, width, 3]} and ``state`` float [S]. Optional entries:

            * ``time``: exposure time of the newest frame, seconds of time.monotonic(). Or ``age``: seconds since then.
            * ``times``: the time of each camera and of "state", if they differ (``Settings.stale_of``,
            ``Settings.skew``).
            * ``action``: float [D], the command of another driver, if the robot is only watched
            (:class:`~sinew_client.control.listeners.shadow.ShadowListener`).
            * ``blind``: only for a stream (:class:`~sinew_client.control.stream.Watching`): the reason why a frame that
            is due is missing. For a stream, ``images`` is absent if there is no newer frame.

        Raises:
            NoObservation: There is no valid observation.
        """

    def act(self, row: np.ndarray) -> None:
        """Send one command.

        Args:
            row: The values of the command, float32 [D] in robot units.

        Raises:
            NoCommand: The command was not sent.
        """

    def hold(self) -> None:
        """Make the robot stay in place: repeat the last position, or send zero velocity, as your robot requires.

        The watchdog may call this method from another thread if ``observe`` or ``act`` has not returned for two
        periods (:class:`~sinew_client.control.watchdog.Watchdog`). Calls of ``hold`` never overlap, and no command is
        sent before ``hold`` has returned.
        """


class NoObservation(Exception):  # noqa: N818 - it reports a state of the robot, not a program error
    """Raised by ``observe`` if there is no valid observation, for example because a camera stopped sending frames.

    The robot then holds until there is a valid observation. The text of the exception is the reason in the log.
    """


class NoCommand(Exception):  # noqa: N818 - it reports a state of the robot, not a program error
    """Raised by ``act`` if it did not send a command, for example because a pose is out of reach.

    The robot then holds until there is a fresh chunk.

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
    """The interface of a source of actions. Its methods never wait. Times are seconds of the loop's clock.

    There are two kinds of sources. A :class:`~sinew_client.control.requester.Requester` returns a chunk for each
    observation. A :class:`~sinew_client.control.stream.Stream` returns windows of a stream.

    Attributes:
        continuous: True if answers arrive without requests. ``Settings.fusion`` then states how they are mixed.
    """

    continuous: bool

    @property
    def failures(self) -> int:
        """Number of observations that got an error or no answer."""

    def ready(self, now: float) -> bool:
        """Return True if the source can take an observation now (:meth:`ask`)."""

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        """Begin a request with an observation, without waiting for the answer."""

    def poll(self, now: float) -> Outcome | None:
        """Return the oldest answer that has arrived since the last call; None if there is none."""

    def cancel(self) -> None:
        """Abandon the requests in progress, and drop their answers."""

    def close(self, wait: float = 0.0) -> None:
        """Close the source. Wait at most ``wait`` seconds for the requests in progress."""
