"""The base class of all listeners of a control loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from sinew_client.control.controller import Command
    from sinew_client.control.player import ChunkRequest


class LoopListener:
    """Base class of all extensions of a control loop. A subclass overrides the hooks that it needs.

    Threads:
        The loop calls all hooks in its own thread, so a hook must return quickly. Within a control step, the order is
            :meth:`observed`, :meth:`request`, :meth:`answered`, :meth:`before`, :meth:`command`.

    Attributes:
        observes: True if the listener needs an observation in every control step.
        refines: True if the listener changes the actions of chunks (``Settings.refine``).
        detail: Why the robot holds at present, for the log; "" if the listener does not know.
        loop: The loop to which the listener is attached.
    """

    observes = False
    refines = False
    detail = ""
    loop: Any

    def attach(self, loop: Any) -> None:
        """Attach the listener to a loop. The loop calls the hooks from its next control step on."""
        self.loop = loop
        loop.listeners.append(self)

    def observed(self, step: int, observation: Mapping[str, Any]) -> None:
        """Process a valid observation. This hook may be called several times in one control step."""

    def request(self, step: int, fields: dict[str, Any]) -> None:
        """Add fields to a request before it is sent.

        Raises:
            NoObservation: The observation cannot be used. The request is not sent, and the robot holds.
        """

    def answered(self, answer: Any, request: ChunkRequest) -> None:
        """Process a chunk, float [H, D], that the controller has accepted. ``request`` is its request."""

    def before(self, step: int, observation: Mapping[str, Any] | None) -> None:
        """Run before the controller decides the command of a control step.

        Args:
            step: The control step.
            observation: The observation of this step; None without an observation.

        Raises:
            NoObservation: The observation cannot be used, so the robot holds.
        """

    def command(self, command: Command) -> None:
        """Process the command of a control step, before it is sent to the robot.

        ``loop.reason`` is still the reason of the previous step.
        """

    def restarted(self) -> None:
        """Forget earlier observations, because a new episode has begun or the robot was moved."""

    def report(self) -> dict[str, Any]:
        """Return the listener's fields of the run's report (:class:`~sinew_client.control.report.Cadence`)."""
        return {}
