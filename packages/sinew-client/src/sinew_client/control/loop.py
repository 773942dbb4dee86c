"""The control loop of a robot: at a fixed rate, it sends one command or holds the robot."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from dataclasses import replace
from typing import Any, Callable, Sequence

import numpy as np

from sinew_client.control.authority import POLICY
from sinew_client.control.controller import UNKNOWN, BaseController, Command
from sinew_client.control.facts import facts_of
from sinew_client.control.interfaces import NoCommand, NoObservation, Robot, Source, Stopped
from sinew_client.control.listeners.hold_log import HoldLog
from sinew_client.control.listeners.listener import LoopListener
from sinew_client.control.motion import interpolate
from sinew_client.control.observer import Observer
from sinew_client.control.pace import Pace
from sinew_client.control.report import Cadence, cadence
from sinew_client.control.requester import Call, Requester
from sinew_client.control.safety import Guard
from sinew_client.control.settings import Settings, SettingsError
from sinew_client.control.watchdog import watchdog_of
from sinew_client.errors import Refused
from sinew_client.faults import PERMANENT

logger = logging.getLogger(__name__)


def between_ticks(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a method of the loop so that any thread may call it. The loop runs it before the next control step."""

    @functools.wraps(method)
    def later(self: Loop, *args: Any) -> None:
        self.calls.append(functools.partial(method, self, *args))

    return later


class Loop:
    """The control loop of a robot. It requests actions, executes them within the limits, and holds the robot otherwise.

    All other parts of a run, such as a take-over or a recording, are listeners
    (:class:`~sinew_client.control.listeners.listener.LoopListener`).

    While the loop runs, a watchdog holds the robot if the loop is late by two periods, unless the settings or the
    robot forbid it (``Settings.watchdog``, ``Robot.concurrent_hold``).

    Threads:
        :meth:`stop`, :meth:`pause`, :meth:`resume`, :meth:`say` and :meth:`restart` may be called from any thread.
            All other methods belong to the thread of :meth:`run`.

    Args:
        robot: The robot.
        source: A :class:`Source`, or a function that opens a connection (``connect`` of a :class:`Requester`). Calling
            the connection with an observation returns a chunk, float [H, D].
        settings: All settings of the controller.
        dim: Number of values in a command (D). 0 takes the width of the first chunk.
        prompt: The instruction. "" takes the instruction of the robot's observations.
        pace: The timing of the ticks. :class:`~sinew_client.control.pace.SimulatedPace` runs without a clock.
        listeners: Further parts of the loop, in the order in which their hooks are called.
        hold_refused: What happens if the policy rejects the very first request with a permanent error. True holds the
            robot and requests again, for robots whose instruction or cameras become available later. False raises
            :class:`Refused`.

    Attributes:
        prompt: The present instruction.
        steps: Control steps so far.
        reason: Why the robot holds; "" while it moves.
        stopped: True if :meth:`stop` has ended the run; False if the run's length or the robot has ended it.
        returning: True while the robot returns to its rest pose. The loop then uses neither policy nor server.
        at_once: True if :meth:`stop` was called twice. The robot then does not return to its rest pose.
        next_step: The next control step. It has no command yet.
        last_row: The last command of a control step, float32 [D]; None if the robot may have been moved.
        now: Start of the present control step, seconds of the loop's clock.
        calls: Functions that run before the next control step. Any thread may append one.

    Raises:
        SettingsError: The limits need the position before the first command, but it is unknown. Or the settings do not
            fit the source or the listeners.

    Example:
        >>> loop = Loop(robot, connect, Settings(hz=30), dim=7, prompt="stack the cups")
        >>> report = loop.run(steps=300)
    """

    def __init__(
        self,
        robot: Robot,
        source: Source | Callable[[], Call],
        settings: Settings,
        dim: int,
        prompt: str = "",
        pace: Pace | None = None,
        listeners: Sequence[LoopListener] = (),
        hold_refused: bool = False,
    ):
        if bool(settings.refine) != any(each.refines for each in listeners):
            raise SettingsError(
                f"refine: expected the adapter's max_age with an edge adapter, and 0 without, got {settings.refine}"
            )
        settings.check_start(dim)
        if bool(settings.fusion) != getattr(source, "continuous", False):
            expected = '"" for requested chunks' if settings.fusion else "a fusion rule for a stream"
            raise SettingsError(f"fusion: expected {expected}, got {settings.fusion!r}")
        self.robot, self.settings, self.prompt = robot, settings, prompt
        self.controller: BaseController = settings.controller(dim)
        self.source: Source = (
            # Type: ignore[assignment, arg-type].
            source if hasattr(source, "poll") else Requester(source, settings.deadline)
        )
        self.pace = pace or Pace(settings.period / settings.substeps)
        self.observer = Observer(robot, settings, self.controller.motion, dim, self.pace)
        self.watchdog = watchdog_of(robot, self.pace.period, settings.watchdog, self.pace.real)
        self.steps = self.next_step = 0
        self.reason, self.stopped, self.at_once = "", False, False
        self.returning = False
        self.last_row: np.ndarray | None = None
        self.now = 0.0
        self.calls: deque[Callable[[], None]] = deque()
        self._facts, self._hold_refused = facts_of(robot), hold_refused
        self._command: Command | None = None
        self.listeners: list[LoopListener] = []
        for listener in (*listeners, HoldLog()):
            listener.attach(self)

    def stop(self) -> None:
        """End the run after the present tick and hold the robot.

        A second call also ends the return to the rest pose.
        """
        self.at_once, self.stopped = self.stopped, True

    @between_ticks
    def pause(self) -> None:
        """Hold the robot within one period, until :meth:`resume` is called."""
        if not self.controller.paused:
            self.source.cancel()
            self.controller.pause()
            # Forget the last command, because a person may move the robot during the pause.
            self.last_row = None

    @between_ticks
    def resume(self) -> None:
        """Continue after :meth:`pause`, from the robot's present position."""
        if self.controller.paused:
            for listener in self.listeners:
                listener.restarted()
            observation = self.observe(self.next_step, self.pace.now())
            self.controller.resume(None if observation is None else self.observer.position())

    @between_ticks
    def say(self, prompt: str) -> None:
        """Change the instruction.

        Chunks for the old instruction are dropped. A stream uses the new instruction from its next prefix on.

        Args:
            prompt: The new instruction.
        """
        if prompt == self.prompt:
            return
        self._instruct(prompt)
        # `moved` is False here: the limits still start at the last command, because the robot has not been moved and
        # the next answer may arrive before the robot holds.
        if not (self.controller.continuous or self.controller.paused):
            self.source.cancel()
            self.controller.fault(self.next_step, self.controller.starting)

    @between_ticks
    def restart(self, reason: str, prompt: str = "") -> None:
        """Drop all planned actions, because a new episode has begun or the robot was moved, and request a fresh chunk.

        Args:
            reason: Why the robot holds.
            prompt: The instruction of the first request; "" keeps the present instruction.
        """
        self.source.cancel()
        self.controller.fault(self.next_step, reason, moved=True)
        self.last_row = None
        for listener in self.listeners:
            listener.restarted()
        if prompt:
            self._instruct(prompt)

    def run(self, steps: int | None = None) -> Cadence:
        """Run the loop. The robot holds at the end, even after an error. Call this method again to continue.

        Args:
            steps: Number of control steps since the start after which the run ends; None runs until the loop is
                stopped.

        Returns:
            The report so far.

        Raises:
            Refused: The policy rejected the very first request for good. The robot has not moved.
        """
        try:
            self.play(lambda: not self.stopped and (steps is None or self.steps < steps))
        except Stopped as end:
            logger.info("the robot has ended the run: %s", end)
        return self.report()

    def play(self, goes_on: Callable[[], bool]) -> None:
        """Run ticks while a condition is met. The robot holds at the end, even after an error.

        Args:
            goes_on: Function that returns False to end.

        Raises:
            Stopped: The robot has ended the run.
        """
        try:
            with self.watchdog:
                while goes_on():
                    self.tick(self.pace.next())
        finally:
            # A robot that has ended the run may raise Stopped again when it is held.
            with contextlib.suppress(Stopped):
                self.robot.hold()

    def report(self) -> Cadence:
        """Return the report of the run so far. May be called from any thread."""
        return cadence(
            self.controller,
            self.pace,
            self.steps,
            self.source.failures,
            self.settings.substeps,
            self.watchdog,
            self.observer.ages,
            {name: value for each in self.listeners for name, value in each.report().items()},
        )

    def close(self) -> None:
        """Close the source. Wait for a request in progress, at most until its deadline and at most 5 s."""
        self.source.close(min(self.settings.deadline, 5.0))

    def tick(self, number: int) -> None:
        """Run tick ``number``: a control step, or an interpolated command between two control steps (``substeps``)."""
        step, part = divmod(number, self.settings.substeps)
        fresh = self._command is None or step > self._command.step
        if fresh:
            if self._command is not None and self._command.row is not None:
                self.last_row = self._command.row
            self._prepare(step)
        if self.watchdog.claim():
            self.controller.stood()
        if fresh or self._command is None:
            self._decide(step)
        command = self._command
        assert command is not None
        if command.row is None:
            self.robot.hold()
        elif self.settings.substeps == 1:
            if command.by == POLICY:
                # Record the time before the command is sent, because ``act`` may take a long time.
                self.controller.leaves(command, elapsed(self.pace, step, self.settings.hz))
            self._act(command, command.row)
        else:
            self._act(command, interpolate(self.last_row, command.row, (part + 1) / self.settings.substeps))
        self.watchdog.sent()

    def observe(self, step: int, now: float) -> dict[str, Any] | None:
        """Observe the robot, and pass the observation to the listeners.

        Args:
            step: The control step.
            now: Start of the control step, seconds of the loop's clock.

        Returns:
            The observation; None if it is not valid. The robot then holds.
        """
        if not self.observer.look(step, now):
            self.hold(step, self.observer.fault)
            return None
        for listener in self.listeners:
            listener.observed(step, self.observer.observation)
        return self.observer.observation

    def hold(self, step: int, reason: str) -> None:
        """Hold the robot, because there is no valid observation. Requests are cancelled, but a stream continues."""
        self.observer.fault = reason
        if not self.controller.continuous:
            self.source.cancel()
        self.controller.fault(step, reason)

    def _prepare(self, step: int) -> None:
        """Do the slow work before the command of a control step: process answers, observe the robot, send a request."""
        now = self.now = self.pace.now()
        for _ in range(len(self.calls)):
            self.calls.popleft()()
        if not self.returning:
            self._poll(step, now)
        observation = None
        needed = self.controller.needs_state or any(each.observes for each in self.listeners)
        if (needed and not self.controller.paused) or self.controller.refines(step):
            observation = self.observe(step, now)
        if not self.returning and self.controller.wants_chunk(step) and self.source.ready(now):
            observation = self._ask(step, now, observation)
            if not self.controller.continuous:
                # Poll again, because a source in this process may have answered already.
                self._poll(step, now)
        for listener in self.listeners:
            try:
                listener.before(step, observation)
            except NoObservation as reason:  # noqa: PERF203 - the other listeners must still be called
                self.hold(step, str(reason))
        lost = self.controller.wants_position(step)
        if observation is None and (lost or (self._facts.needs_state() and self.controller.due(step))):
            observation = self.observe(step, now)
        if lost and observation is not None:
            self.controller.stands(self.observer.position())

    def _poll(self, step: int, now: float) -> None:
        """Pass the answers that have arrived to the controller.

        Args:
            step: The control step.
            now: Present time, seconds of the loop's clock.

        Raises:
            Refused: The policy rejected the first request.
        """
        while (outcome := self.source.poll(now)) is not None:
            if outcome.reason:
                self.controller.failed(step, outcome.reason, outcome.kind)
                if outcome.kind in PERMANENT and not (self.controller.chunks or self._hold_refused):
                    raise Refused(outcome.reason)
                continue
            request = self.controller.request
            if self.controller.arrived(step, outcome.value) and request is not None:
                for listener in self.listeners:
                    listener.answered(outcome.value, request)

    def _ask(self, step: int, now: float, observation: dict[str, Any] | None) -> dict[str, Any] | None:
        """Send an observation to the policy.

        Args:
            step: The control step.
            now: Start of the control step, seconds of the loop's clock.
            observation: The observation of this step, if the robot was observed already.

        Returns:
            The observation; None if nothing can be sent.
        """
        observation = observation or self.observe(step, now)
        if observation is None:
            return None
        hz, exposed = self.settings.hz, self.pace.since(observation["time"])
        frame = step - max(0, round(self.observer.age * hz))
        request = self.controller.ask(step, frame, self.observer.state, elapsed(self.pace, step, hz), exposed)
        fields: dict[str, Any] = {"prompt": self.prompt} if self.prompt or "prompt" not in observation else {}
        try:
            for listener in self.listeners:
                listener.request(step, fields)
        except NoObservation as reason:
            self.hold(step, str(reason))
            return None
        self.source.ask({**observation, **fields, **request.fields}, now)
        if "blind" in observation:
            self.hold(step, observation["blind"])
        return observation

    def _decide(self, step: int) -> None:
        """Let the controller decide the command of a control step, and pass the command to the listeners."""
        # If commands depend on the state, pass the state only if it was observed in the present control step.
        of_step = not self.controller.needs_state or self.observer.step == step
        command = self.controller.command(step, self.observer.state if of_step else None)
        if self.last_row is None and command.row is not None:
            self.last_row = _start(self.controller.guard)
        self.steps += 1
        for listener in self.listeners:
            listener.command(command)
        self._command, self.reason, self.next_step = command, command.reason, step + 1

    def _act(self, command: Command, row: np.ndarray) -> None:
        """Send a command, or an interpolated command, to the robot. If the robot rejects it, hold until the next step.

        Args:
            command: The command of this control step.
            row: The values to send, float32 [D].
        """
        try:
            if self._facts.needs_state() and self.observer.step != command.step:
                raise NoCommand(UNKNOWN, self.observer.fault)
            self.robot.act(row)
        except NoCommand as refused:
            self.robot.hold()
            if refused.reason not in self.controller.held:
                logger.warning("step %d: holds: %s", command.step, refused)
            self._command = replace(command, row=None, reason=refused.reason)
            self.reason, self.last_row = refused.reason, None
            self.controller.unsent(command, refused.reason)

    def _instruct(self, prompt: str) -> None:
        """Use a new instruction from the next request on, and record it in the decision log."""
        if prompt != self.prompt:
            self.prompt = prompt
            self.controller.instructed(self.next_step, prompt)


def elapsed(pace: Pace, step: int, hz: float) -> float:
    """Return the time of a control step in seconds since the first tick: the present time, or the time at which the
    step is due if that is later.
    """
    return max(step / hz, pace.since(pace.now()))


def _start(guard: Guard | None) -> np.ndarray | None:
    """Return the robot's position before its first command, float32 [D]; None if a value is unknown.

    The interpolated commands of the first control step start at this position.
    """
    if guard is None or guard.before is None or not np.all(np.isfinite(guard.before)):
        return None
    return guard.before
