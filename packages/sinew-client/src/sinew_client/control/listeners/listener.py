"""The base class of all listeners of a control loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from sinew_client.control.controller import Command
    from sinew_client.control.player import ChunkRequest


class LoopListener:
    """Takes part in one loop. A subclass overrides the hooks that it needs.

    Threads:
        The loop calls every hook in its own thread, so a hook must be quick. The order of a control step is
            :meth:`observed`, :meth:`request`, :meth:`answered`, :meth:`before`, :meth:`command`.

    Attributes:
        observes: True if the robot has to be observed in every control step.
        refines: True if the listener changes the actions of chunks (``Settings.refine``).
        detail: Why the robot does not move at present, for the log; "" if it moves.
        loop: The listener's loop.
    """

    observes = False
    refines = False
    detail = ""
    loop: Any

    def attach(self, loop: Any) -> None:
        """Take part in a loop from its next control step on."""
        self.loop = loop
        loop.listeners.append(self)

    def observed(self, step: int, observation: Mapping[str, Any]) -> None:
        """Take a valid observation. There may be several in one control step."""

    def request(self, step: int, fields: dict[str, Any]) -> None:
        """Add fields to a request before it is sent.

        Raises:
            NoObservation: The observation cannot be used. The request is not sent, and the robot holds.
        """

    def answered(self, answer: Any, request: ChunkRequest) -> None:
        """Take a chunk, float [H, D], that the controller has accepted, and the request of this chunk."""

    def before(self, step: int, observation: Mapping[str, Any] | None) -> None:
        """Act before the command of a control step is computed.

        Args:
            step: The control step.
            observation: The observation of this step; None without an observation.

        Raises:
            NoObservation: The observation cannot be used, so the robot holds.
        """

    def command(self, command: Command) -> None:
        """Take the command of a control step before the robot gets it.

        ``loop.reason`` still belongs to the previous command.
        """

    def restarted(self) -> None:
        """Forget earlier observations, because a new episode has begun or the robot was moved."""

    def report(self) -> dict[str, Any]:
        """Return the listener's fields of the run's report (:class:`~sinew_client.control.report.Cadence`)."""
        return {}
