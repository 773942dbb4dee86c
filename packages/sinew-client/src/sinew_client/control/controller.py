"""Decide the command of each control step, or hold the robot with a reason.

The module uses neither clocks nor sockets. It counts time in control steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from sinew_client.control.authority import ALIGNING, ALIGNS, HUMAN, POLICY, RETURNING, SILENT, AuthorityChange
from sinew_client.control.delay import DelayEstimate
from sinew_client.control.motion import Motion
from sinew_client.control.player import ChunkRequest, Player
from sinew_client.control.safety import Guard, Limits, RowsError, checked_rows
from sinew_client.control.smoothing import Smoothing
from sinew_client.control.trajectory import Trajectory
from sinew_client.faults import Faults
from sinew_client.protocol import MAX_ROWS

logger = logging.getLogger(__name__)

PAUSED, STARTING, STARVED, LATE = "paused", "no chunk yet", "out of rows", "waiting for a chunk"
HALTED = "the last chunk expected the robot at another position"
# At most REASONS different reasons of holds are counted, because reasons can contain any text of a server. Further
# reasons are counted as OTHER.
REASONS, OTHER = 100, "other reasons"
AHEAD_S = 0.1  # a frame's time may be ahead of the clock by this many seconds
UNKNOWN = "the state is not known"
UNTRAINED = "the delay is longer than the rows that the policy was trained to continue"


@dataclass(frozen=True)
class Command:
    """The command of one control step.

    Attributes:
        step: The control step.
        row: The values for the robot, float32 [D]; None if the robot holds.
        reason: Why the robot holds; "" if it moves.
        clipped: Joints and limits that changed the command, such as "elbow.velocity".
        age: Control steps since the observation from which the command was computed; -1 for a hold.
        chunk: Number of the command's chunk; -1 for a hold or a human's command.
        index: Index of the action in that chunk; -1 for a hold or a human's command.
        seam: True for the first command from a new chunk.
        by: The driver: "policy", "human", "aligning" while the leader moves to the robot's position, or "returning"
            while the robot returns to its rest pose.
        wanted: The command of the policy while a human drives in shadow mode, float32 [D]; None otherwise.
    """

    step: int
    row: np.ndarray | None
    reason: str = ""
    clipped: tuple[str, ...] = ()
    age: int = -1
    chunk: int = -1
    index: int = -1
    seam: bool = False
    by: str = POLICY
    wanted: np.ndarray | None = None


class BaseController:
    """Base class of the controllers. It checks each command against the limits, and counts commands and holds.

    A subclass decides when to request a chunk (:meth:`wants_chunk`, :meth:`ask`), processes the answers
    (:meth:`arrived`, :meth:`failed`) and chooses the action of a step (:meth:`_planned`). After a failure the robot
    holds until a valid answer arrives. Call :meth:`command` exactly once per control step, in rising order.

    Args:
        trajectory: The buffer of actions by control step.
        motion: The motion, which states what actions are relative to.
        delay: The estimate of the delay from a request to its answer.
        guard: The check of each command against the limits; None for no check.
        dim: Number of values in a command (D). 0 takes the width of the first answer.
        max_rows: Largest number of actions in an answer. A longer answer counts as failed.

    Attributes:
        continuous: True if answers arrive without requests, as in a stream. A missing observation or a new instruction
            then does not drop answers.
        paused: True between :meth:`pause` and :meth:`resume`.
        driver: Who drives: "policy", "aligning", "human" or "returning".
        listeners: Functions that get each event by name, with its values. A decision log is such a listener.
    """

    continuous = False
    needs_state = False  # True if a command cannot be computed without the state of the same control step
    starting = STARTING  # the reason of a hold before the first answer

    def __init__(
        self,
        trajectory: Trajectory,
        motion: Motion,
        delay: DelayEstimate,
        guard: Guard | None,
        dim: int,
        max_rows: int,
    ):
        self.trajectory, self.motion, self.delay, self.guard = trajectory, motion, delay, guard
        self.dim, self.max_rows = dim, max_rows
        self.paused = False
        self.held: Counter = Counter()  # number of control steps in which the robot held, by reason
        self.clipped: Counter = Counter()  # number of commands that a limit changed, by "joint.limit"
        self.clipped_commands = 0
        self.ages: Counter = Counter()  # number of executed actions, by their age (in control steps)
        self.faults = Faults()  # the answers that failed or could not be executed
        self.unanswered = 0  # number of requests that failed since the last answer
        self.listeners: list[Callable[[str, dict], None]] = []
        self._fault = ""  # the reason why the robot holds until the next answer
        self._chunk = -1
        self._step: int | None = None  # control step of the last command
        self.driver = POLICY
        # True in shadow mode: the policy does not move the robot, and its plan is compared with the commands of another
        # driver.
        self.shadow = False
        self.handed = AuthorityChange()
        # The leader's newest command: control step, command [D] or None, and the reason if there is no command.
        self._led: tuple[int, np.ndarray | None, str] = (-1, None, SILENT)
        # The last command that followed the leader (the human's arm): its control step and its numbers. After an
        # alignment, the numbers are the robot's position.
        self.followed: tuple[int, np.ndarray] | None = None
        self._before = self.followed
        # A pose, and the sum of the commands that were sent while the state stayed at this pose. If the robot did not
        # execute its last command, `_ahead_before` restores the earlier value.
        self._ahead: tuple[np.ndarray, np.ndarray] | None = None
        self._ahead_before = self._ahead

    @property
    def chunks(self) -> int:
        """Number of accepted answers."""
        raise NotImplementedError

    @property
    def request(self) -> ChunkRequest | None:
        """The request in progress; None if there is none, or if answers arrive without requests."""
        return None

    @property
    def said(self) -> str:
        """Newest text of the policy's language head; "" if the policy has not generated text."""
        return ""

    def wants_chunk(self, step: int) -> bool:
        """Return True if the loop should send an observation to the policy in this control step."""
        raise NotImplementedError

    def refines(self, step: int) -> bool:
        """Return True if an edge adapter may refine the actions in this control step."""
        return False

    def ask(
        self,
        step: int,
        frame: int,
        state: np.ndarray | None = None,
        time: float = 0.0,
        frame_time: float = 0.0,
    ) -> ChunkRequest:
        """Record that a request is sent, and compute its fields.

        Args:
            step: The control step.
            frame: Control step in which the newest frame was exposed.
            state: State of the observation, float [S].
            time: Time of the request, seconds since the first tick.
            frame_time: Time of the newest frame, seconds since the first tick.

        Returns:
            The request, with the fields that the loop adds to the observation.
        """
        raise NotImplementedError

    def arrived(self, step: int, answer: Any) -> bool:
        """Process an answer of the policy. Return False if the answer is not valid, which counts as a fault."""
        raise NotImplementedError

    def failed(self, step: int, reason: str, kind: str = "") -> None:
        """Record a request that failed: the server or the network was missing, the answer came too late, or the server
        rejected the request.

        Args:
            step: The control step.
            reason: Why the request failed.
            kind: Kind of the error; "" if the failure is part of normal operation
                (:func:`~sinew_client.faults.kind_of`).
        """
        self._tell("failed", {"step": step, "reason": reason, "kind": kind})
        self.unanswered += 1
        if kind:
            self.faults.add(kind, reason)

    def broken(self, step: int, reason: str) -> None:
        """Record that an answer must not be executed. ``reason`` states why."""
        self._tell("bad_chunk", {"step": step, "reason": reason})
        self.faults.add("bad_chunk", reason)

    def fault(self, step: int, reason: str, moved: bool = False) -> None:
        """Hold the robot, because its observation cannot be used, or because the robot asks for it.

        Args:
            step: The control step.
            reason: Why the robot holds.
            moved: True if the robot may be at another position now, as at the beginning of an episode.
        """
        raise NotImplementedError

    def unsent(self, command: Command, reason: str) -> None:
        """Record that the robot rejected this command and did not execute it.

        The robot holds until a fresh answer arrives, and then starts from its present position.

        Args:
            command: The command.
            reason: Why the robot rejected the command.
        """
        self.fault(command.step, reason)
        self.stands(None)
        if command.by == HUMAN:
            self.handed.steps -= 1
            self.followed = self._before
        elif command.by == POLICY:
            self.ages[command.age] -= 1
        self._count(reason)

    def instructed(self, step: int, prompt: str) -> None:
        """Record a new instruction, which applies from this control step on."""
        self._tell("prompt", {"step": step, "prompt": prompt})

    def leaves(self, command: Command, time: float) -> None:
        """Record that a command is sent to the robot at ``time``, in seconds since the first tick."""

    def _planned(self, step: int, state: np.ndarray | None) -> Command:
        raise NotImplementedError

    def _wanted(self, step: int, state: np.ndarray | None) -> np.ndarray | None:
        """Return the policy's command for a step in which a human drives, before the limits change it; None if there is
        no command.
        """
        self.trajectory.take(step)
        return None

    def _commanded(self, command: Command, state: np.ndarray | None) -> None:
        """Process the command that is sent to the robot, after the limits were applied. ``state`` is the robot's state
        in this step, float [S].
        """

    def _drop(self) -> None:
        """Drop all planned actions and the request in progress."""
        raise NotImplementedError

    def pause(self) -> None:
        """Hold the robot from the next control step on. Planned actions are dropped, and late answers are ignored."""
        self._tell("pause", {})
        self.paused = True
        self._leaves_alone()
        self._drop()

    def resume(self, position: np.ndarray | None = None, moved: bool = True) -> None:
        """Continue after a pause, as soon as a fresh answer arrives.

        Args:
            position: Position of the robot, float [D] in the order of a command; None if it is unknown. If the limits
                need the position, the robot holds until :meth:`stands` sets it.
            moved: True if a person may have moved the robot since the last command. False occurs only in older logs.
        """
        self._tell("resume", {"position": position, "moved": moved})
        self.paused, self._fault = False, self.starting
        if moved or position is not None:
            self._begins(position)
        elif self.guard is not None:
            self.guard.held()

    def due(self, step: int) -> bool:
        """Return True if the robot has an action for this control step."""
        return not self.paused and (self.driver in (HUMAN, RETURNING) or self.trajectory.at(step) is not None)

    def wants_position(self, step: int) -> bool:
        """Return True if an action is due, but the limits need the robot's position first (:meth:`stands`)."""
        return self.guard is not None and not self.guard.known and self.due(step)

    def stands(self, position: np.ndarray | None) -> None:
        """Set the position of a robot that stands still.

        Args:
            position: float [D] in the order of a command, with NaN for unknown numbers; None if all are unknown.
        """
        self._tell("stands", {"position": position})
        # Without a position, the robot did not execute its last command, so that command does not count.
        if position is None:
            self._ahead = self._ahead_before
        if self.guard is not None:
            self.guard.start(position)

    def _begins(self, position: np.ndarray | None) -> None:
        """Start the limits at ``position``, float [D], because the robot may have been moved. None means unknown."""
        self._ahead = self._ahead_before = None
        if self.guard is not None:
            self.guard.start(position)

    def stood(self) -> None:
        """Record that the watchdog, or another part of the program, has held the robot since its last command."""
        self._tell("stood", {})
        if self.guard is not None:
            self.guard.held()

    def _leaves_alone(self) -> None:
        """End a take-over without a hand-back, so that the policy drives again.

        In shadow mode, align the leader again.
        """
        if self.driver != POLICY:
            self.driver = ALIGNING if self.shadow else POLICY

    def take_over(self, step: int, shadow: bool = False) -> None:
        """Begin a take-over: hold the robot until the leader is at the robot's position (:meth:`aligned`).

        Args:
            step: The control step.
            shadow: True if the leader drives for the whole run, and the policy's actions are only compared.
        """
        self._tell("take_over", {"step": step, "shadow": shadow})
        self.driver, self.shadow, self._fault, self.followed = ALIGNING, shadow, "", None
        self._drop()

    def aligned(self, step: int) -> None:
        """Record that the leader is aligned. The robot follows the leader from this control step on."""
        self._tell("aligned", {"step": step})
        # If `followed` is set, the human also drove before this realignment, so the driver has not changed.
        if self.followed is None:
            self.handed.changed(HUMAN)
        self.driver, self.followed = HUMAN, None

    def realign(self, step: int) -> None:
        """Hold the robot, because the leader has moved away, until the leader is at the robot's position again."""
        self._tell("realign", {"step": step})
        self.driver = ALIGNING

    def led(self, step: int, row: np.ndarray | None, reason: str = "") -> None:
        """Set the leader's command for this control step.

        Args:
            step: The control step.
            row: The command, float32 [D]; None holds the robot.
            reason: Why there is no command.
        """
        self._tell("led", {"step": step, "row": row, "reason": reason})
        self._led = (step, row, reason)

    def hand_back(self, step: int) -> None:
        """End a take-over: hold the robot until the policy has a fresh answer. Then the policy drives."""
        self._tell("hand_back", {"step": step})
        if self.driver == HUMAN or (self.driver == ALIGNING and self.followed is not None):
            self.handed.changed(POLICY)
        self.driver, self._fault = POLICY, self.starting
        self._drop()

    def returns(self, step: int) -> None:
        """Begin the return to the rest pose, whose commands come from :meth:`led`. The policy gets no more requests."""
        self._tell("returns", {"step": step})
        self.driver, self._fault, self.followed = RETURNING, "", None
        self._drop()

    def _followed(self, step: int, state: np.ndarray | None) -> Command:
        """Return the command of a control step in which a leader drives, or in which the robot returns to its rest
        pose.
        """
        policy_command = self._wanted(step, state)
        if self.paused:
            return Command(step, None, PAUSED, by=self.driver, wanted=policy_command)
        at, row, reason = self._led
        if self.driver == ALIGNING or at != step or row is None:
            why = ALIGNS if self.driver == ALIGNING else reason if at == step and reason else SILENT
            return Command(step, None, why, by=self.driver, wanted=policy_command)
        if self.needs_state and state is None:
            return Command(step, None, UNKNOWN, by=self.driver, wanted=policy_command)
        try:
            target = self.motion.reached(row, state) if self.needs_state else row
            command = self._bounded(step, target, state, 0, -1, -1, row)
        except ValueError as error:  # the state does not have the numbers that the motion needs
            command = Command(step, None, str(error))
        return replace(command, by=self.driver, wanted=policy_command, seam=False)

    def command(self, step: int, state: np.ndarray | None = None) -> Command:
        """Decide the command of a control step.

        Args:
            step: The control step.
            state: State of the robot in this step, float [S]; None if there is no valid state. If the controller
                ``needs_state``, the robot then holds.

        Returns:
            The command, or a hold with its reason.

        Raises:
            ValueError: This control step already has a command.
        """
        if self.guard is not None and self._step is not None and step > self._step + 1:
            self.guard.skipped()
        command = (self._planned if self.driver == POLICY else self._followed)(step, state)
        self._step = step
        if command.row is None:
            self._hold(command, state)
        else:
            self._commanded(command, state)
            if command.by == HUMAN:
                assert self._led[1] is not None
                self.handed.steps += 1
                self._before, self.followed = self.followed, (step, self._led[1])
            elif command.by == POLICY:
                self.ages[command.age] += 1
            if self.guard is not None and self.guard.limits is not None:
                self.handed.commanded(command.row, self.guard.before, self.guard.limits.names)
        self.clipped.update(command.clipped)
        self.clipped_commands += bool(command.clipped)
        self._tell("command", {"command": command, "state": state})
        return command

    def _bounded(
        self,
        step: int,
        target: np.ndarray,
        state: np.ndarray | None,
        age: int,
        chunk: int,
        index: int,
        row: np.ndarray | None = None,
    ) -> Command:
        """Clip a target to the workspace, and check the command for this target against the other limits.

        Args:
            step: The control step.
            target: The target, float32 [D] (:class:`~sinew_client.control.motion.Motion`).
            state: State of the robot in this step, float [S].
            age: Control steps since the observation of the action.
            chunk: Number of the chunk.
            index: Index of the action in the chunk.
            row: The command for the target, if it is already known.

        Returns:
            The command, or a hold with its reason.

        Raises:
            ValueError: The state does not have the values that the motion needs.
        """
        limits = None if self.guard is None else self.guard.limits
        if limits is None or not limits.boxed.any():
            sent = self.motion.command(target, state) if row is None else row
            return self._guarded(step, sent, age, chunk, index)
        low, high = self._box(limits, state)
        inside = np.clip(target, low.astype(np.float32), high.astype(np.float32))
        met = tuple(f"{limits.name(int(at))}.workspace" for at in np.flatnonzero(inside != target))
        if met and limits.when == "hold":
            return Command(step, None, "beyond {}".format(", ".join(met)), met)
        requested = self.motion.command(target, state) if row is None else row
        sent = self.motion.command(inside, state) if met else requested

        def stays(row: np.ndarray) -> bool:
            """Return True if a command leads to a position inside the workspace.

            The check is necessary because a limit of acceleration may move the robot beyond the clipped target.
            """
            reached, here = self.motion.reached(row, state), self._pose(limits, state)
            # A robot outside the workspace may stay there and move back, so its position extends the workspace.
            ends = np.fmin(low, here), np.fmax(high, here)
            slack = 4.0 * np.spacing(np.maximum(np.abs(reached), np.abs(inside)))
            return not np.any((reached < ends[0] - slack) | (reached > ends[1] + slack))

        command = self._guarded(step, sent, age, chunk, index, requested, stays)
        if command.row is not None:
            self._goes(self.motion.reached(command.row, state), self._pose(limits, state))
        return replace(command, clipped=(*command.clipped, *met)) if met else command

    def _pose(self, limits: Limits, state: np.ndarray | None) -> np.ndarray:
        """Return the robot's position in the order of a target, float32 [D], with NaN for unknown values.

        The position is the last command if commands are positions, else the state of this step.
        """
        here = None if self.guard is None else self.guard.here
        assert here is not None
        pose = self.motion.pose(state, limits.dim)
        return np.where(self.motion.placed(limits.dim), here, pose).astype(np.float32)

    def _box(self, limits: Limits, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper end of the workspace, [D] each, for the next command.

        If the state does not change, the sensor may be frozen, while the robot executes the commands. So the workspace
        is reduced by the sum of the commands since the state last changed.
        """
        low, high = limits.workspace_low, limits.workspace_high
        if not self.needs_state or self._ahead is None:
            return low, high
        pose, sent = self._ahead
        ahead = np.where(self._pose(limits, state) == pose, sent, 0.0)
        return low - np.minimum(ahead, 0.0), high - np.maximum(ahead, 0.0)

    def _goes(self, target: np.ndarray, pose: np.ndarray) -> None:
        """Record that a command moves the robot from position ``pose`` to position ``target``, each float [D]."""
        if not self.needs_state:
            return
        self._ahead_before = self._ahead
        before, sent = self._ahead or (pose, np.zeros(len(pose)))
        self._ahead = pose, np.where(pose == before, sent, 0.0) + (target - pose)

    def _guarded(
        self,
        step: int,
        row: np.ndarray,
        age: int,
        chunk: int,
        index: int,
        requested: np.ndarray | None = None,
        inside: Callable[[np.ndarray], bool] = lambda _: True,
    ) -> Command:
        """Check a command against the limits. Return the allowed command, or a hold with its reason.

        Args:
            step: The control step.
            row: The command, float32 [D].
            age: Control steps since the observation of the action.
            chunk: Number of the chunk.
            index: Index of the action in the chunk.
            requested: The command before it was clipped to the workspace; None if it was not clipped.
            inside: Function that returns True if a command stays in the workspace.
        """
        seam, self._chunk = self._chunk not in (-1, chunk), chunk
        if self.guard is None:
            return Command(step, row, "", (), age, chunk, index, seam)
        verdict = self.guard.check(row, requested, inside)
        if verdict.row is None:
            return Command(step, None, verdict.reason, verdict.clipped)
        return Command(step, verdict.row, "", verdict.clipped, age, chunk, index, seam)

    def _hold(self, command: Command, state: np.ndarray | None) -> None:
        self._count(command.reason)
        if self.guard is not None:
            self.guard.held()

    def _count(self, reason: str) -> None:
        has_own_counter = reason in self.held or len(self.held) < REASONS
        self.held[reason if has_own_counter else OTHER] += 1

    def _tell(self, event: str, values: dict) -> None:
        for listener in self.listeners:
            listener(event, values)


class Controller(BaseController):
    """The controller for requested chunks. One request is in progress at a time.

    Args:
        player: Decides when to request a chunk, and which action belongs to which control step.
        guard: Checks every command against the limits; None for no check.
        max_age: Largest age of an action, in control steps since its observation. Older actions are not executed. None
            sets no limit.
        finish: True executes the remaining actions after a failed request. False holds the robot at once.
        dim: Number of values in a command (D). 0 takes the width of the first chunk.
        max_rows: Largest number of actions in a chunk.
        smoothing: A filter of the actions; None for no filter.
    """

    def __init__(
        self,
        player: Player,
        guard: Guard | None = None,
        max_age: int | None = None,
        finish: bool = False,
        dim: int = 0,
        max_rows: int = MAX_ROWS,
        smoothing: Smoothing | None = None,
    ):
        super().__init__(player.trajectory, player.motion, player.delay, guard, dim, max_rows)
        self.smoothing = smoothing
        self._reached: np.ndarray | None = None  # the target of the last command, float32 [D]
        self.player, self.max_age, self.finish = player, max_age, finish
        self.needs_state = player.motion.needs_state

    @property
    def chunks(self) -> int:
        return self.player.chunks

    @property
    def request(self) -> ChunkRequest | None:
        return self.player.request

    def wants_chunk(self, step: int) -> bool:
        asks = self.driver == POLICY or self.shadow
        return asks and not self.paused and self.player.wants_chunk(step)

    def ask(
        self,
        step: int,
        frame: int,
        state: np.ndarray | None = None,
        time: float = 0.0,
        frame_time: float = 0.0,
    ) -> ChunkRequest:
        """Record that a request is sent, and compute its fields. Arguments are as in :meth:`BaseController.ask`."""
        self._tell("ask", {"step": step, "frame": frame, "state": state, "time": time})
        return self.player.ask(step, frame, state)

    def arrived(self, step: int, answer: Any) -> bool:
        """Process the answer to the request in progress.

        Args:
            step: The control step.
            answer: A valid chunk has 1 to ``max_rows`` actions of ``dim`` finite numbers. Any other answer counts as a
                fault, and the robot holds.

        Returns:
            True if the chunk is valid.
        """
        try:
            rows = checked_rows(answer, self.dim, self.max_rows)
        except RowsError as error:
            self.broken(step, str(error))
            return False
        self._tell("arrived", {"step": step, "actions": rows})
        try:
            self.player.accept(rows, step)
        except Exception as error:
            logger.exception("a chunk could not be used")
            self._break(step, f"a chunk could not be used: {type(error).__name__}: {error}")
            return False
        self.dim, self._fault, self.unanswered = rows.shape[1], "", 0
        return True

    def refines(self, step: int) -> bool:
        return not self.paused and self.driver == POLICY and self.player.refines(step)

    def refined(self, step: int, rows: np.ndarray, state: np.ndarray | None = None) -> None:
        """Replace the coming actions by those of an edge adapter. Invalid actions count as a fault.

        Args:
            step: The control step.
            rows: float32 [R, D], for this control step and the next ones.
            state: State of the robot in this step, float [S].
        """
        try:
            rows = checked_rows(rows, self.dim, self.max_rows, what="the edge adapter's chunk")
        except RowsError as error:
            self.broken(step, str(error))
            return
        self._tell("refined", {"step": step, "rows": rows, "state": state})
        if self.refines(step):
            self.player.refined(rows, step, state)

    def failed(self, step: int, reason: str, kind: str = "") -> None:
        super().failed(step, reason, kind)
        self._fail(step, reason, drop=not self.finish)
        self.player.delay.reconnected()

    def broken(self, step: int, reason: str) -> None:
        """Record an answer that must not be executed, and hold the robot until a valid answer arrives."""
        super().broken(step, reason)
        self._fail(step, reason, drop=True)

    def _break(self, step: int, reason: str) -> None:
        self.faults.add("bad_chunk", reason)
        self._fail(step, reason, drop=True)

    def fault(self, step: int, reason: str, moved: bool = False) -> None:
        """Hold the robot until a fresh chunk arrives. The arguments are those of :meth:`BaseController.fault`."""
        self._tell("fault", {"step": step, "reason": reason, "moved": moved})
        self._fail(step, reason, drop=True)
        if moved:
            self._leaves_alone()
            self._places(None)
            self._begins(None)

    def _fail(self, step: int, reason: str, drop: bool) -> None:
        self.player.failed()
        if drop:
            self.player.restart(step)
            self._fault = reason

    def _drop(self) -> None:
        self.player.failed()
        self.player.restart()

    def _planned(self, step: int, state: np.ndarray | None) -> Command:
        node = self.player.take(step)
        if self.paused:
            return Command(step, None, PAUSED)
        if node is None:
            why = STARVED if self.player.chunks else STARTING
            if self.player.handover.stops and self.player.waiting and self.player.chunks:
                why = LATE
            elif self.player.stopping and self.player.waiting:
                why = UNTRAINED
            elif self.player.halted:
                why = HALTED
            return Command(step, None, self._fault or why)
        age = step - node.frame
        if self.max_age is not None and age > self.max_age:
            self.player.restart(step)
            self._fault = f"rows are older than {self.max_age} steps"
            return Command(step, None, self._fault)
        target = node.row if self.smoothing is None else self.smoothing.next(node, self.trajectory)
        try:
            command = self._bounded(step, target, state, age, node.chunk, node.index)
        except ValueError as error:  # the state now has another number of values
            self.player.restart(step)
            self._fault = str(error)
            return Command(step, None, self._fault)
        if command.row is None:
            self.player.restart(step)
            self._fault = command.reason
        return command

    def _commanded(self, command: Command, state: np.ndarray | None) -> None:
        assert command.row is not None
        self._reached = self.motion.reached(command.row, state)
        self.player.commanded(command.step, command.row, state)
        if command.by != POLICY:
            self._rests(state)

    def _wanted(self, step: int, state: np.ndarray | None) -> np.ndarray | None:
        node = self.player.take(step)
        if node is None or not self.shadow:
            return None
        if self.max_age is not None and step - node.frame > self.max_age:
            return None
        try:
            return self.motion.command(node.row, state)
        except ValueError:  # the policy cannot use this state, but the human may continue to drive
            return None

    def resume(self, position: np.ndarray | None = None, moved: bool = True) -> None:
        super().resume(position, moved)
        if moved or position is not None:
            self._places(position)

    def stands(self, position: np.ndarray | None) -> None:
        super().stands(position)
        self._places(position)

    def _hold(self, command: Command, state: np.ndarray | None) -> None:
        super()._hold(command, state)
        self._rests(state)

    def _places(self, position: np.ndarray | None) -> None:
        """Restart the filter at the robot's position, float [D] in the order of a command; None if it is unknown."""
        self._reached = None if position is None else np.asarray(position, np.float32)
        self._rests(None)

    def _rests(self, state: np.ndarray | None) -> None:
        """Restart the filter at the robot's observed position, or else at its last command."""
        if self.smoothing is None:
            return
        at = np.full(self.dim, np.nan) if self._reached is None else self._reached
        if self.needs_state and state is not None:
            here = self.motion.pose(state, self.dim)
            at = np.where(np.isnan(here), at, here)
        self.smoothing.rest(at)
