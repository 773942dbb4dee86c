"""One command per control step, or a hold with a reason. No clocks, no sockets: time is counted in control steps."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from sinew_client.control.authority import ALIGNING, ALIGNS, HUMAN, POLICY, RETURNING, SILENT, HandedOver
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
HALTED = "the last chunk expected the robot elsewhere"
REASONS, OTHER = (
    100,
    "other reasons",
)  # reasons quote what servers say, so there may not be any number of them
AHEAD_S = 0.1  # by which a frame's time may be later than the clock says
UNKNOWN = "the state is not known"
UNTRAINED = "the delay is longer than the rows that the policy was trained to continue"


@dataclass(frozen=True)
class Command:
    """The command of one control step. row: float32 [D] for the robot; None: it holds, for ``reason``.

    clipped: limits that changed the row. age: control steps since the frame that it comes from. chunk, index: where
    the row comes from; -1 where it holds, and of a human's. seam: True for the first row of another chunk than before.
    by: who drives, "policy", "human", until the leader is where the robot is "aligning", and at the end of a run
    "returning". wanted: what the policy would have sent while somebody else drives (``BaseController.shadow``).
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
    """What every controller is: a guard before each command, a reason for each hold, and counts of both.

    A subclass says when to ask (:meth:`wants_chunk`, :meth:`ask`), takes answers (:meth:`arrived`, :meth:`failed`) and
    plans (:meth:`_planned`). Everything that goes wrong ends in a hold; everything that comes back ends it.

    dim: numbers of a command; 0: as many as the first answer has. max_rows: of an answer. Another one has failed.
    continuous: answers come by themselves and say what they were made from, so what cannot be seen, or another
    instruction, takes none of them away. delay: control steps from a question to its answer.

    Call :meth:`command` exactly once per control step, with steps that grow.
    """

    continuous = False
    needs_state = False  # in every control step, for the command
    starting = STARTING  # the reason of a hold before there is anything to execute

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
        self.held: Counter = Counter()  # reason -> control steps
        self.clipped: Counter = Counter()  # "joint.limit" -> commands
        self.clipped_commands = 0
        self.ages: Counter = Counter()  # control steps since the frame -> executed rows
        self.faults = Faults()  # answers that failed, and those that nothing could execute
        self.unanswered = 0  # questions without an answer since the last one
        self.listeners: list[Callable[[str, dict], None]] = []
        self._fault = ""  # why the robot holds until an answer arrives
        self._chunk = -1
        self._step: int | None = None  # of the last command
        self.driver = POLICY
        self.shadow = False  # the policy says what it would do while somebody else drives
        self.handed = HandedOver()
        self._led: tuple[int, np.ndarray | None, str] = (-1, None, SILENT)  # the newest row of a leader
        # The last of those that was sent, or where the robot was when the leader was aligned with it; and the step.
        self.followed: tuple[int, np.ndarray] | None = None
        self._before = self.followed
        # A pose, and what was sent since the state says the same one; now, and before the last command.
        self._ahead: tuple[np.ndarray, np.ndarray] | None = None
        self._ahead_before = self._ahead

    # ------------------------------------------------------------------------- what a subclass says

    @property
    def chunks(self) -> int:
        """Return how many answers were taken."""
        raise NotImplementedError

    @property
    def request(self) -> ChunkRequest | None:
        """Return the request under way, where answers are asked for one at a time."""
        return None

    @property
    def said(self) -> str:
        """Return the newest text of the policy's language head, "" where it says none."""
        return ""

    def wants_chunk(self, step: int) -> bool:
        """Return True if an observation is to be sent in this step."""
        raise NotImplementedError

    def refines(self, step: int) -> bool:
        """Return True if an edge adapter's rows would be taken in this step."""
        return False

    def ask(
        self,
        step: int,
        frame: int,
        state: np.ndarray | None = None,
        time: float = 0.0,
        frame_time: float = 0.0,
    ) -> ChunkRequest:
        """Take note of a question; return what goes with it. time, frame_time: seconds since the first tick, of the
        question and of its newest frame, which ``frame`` counts in control steps."""
        raise NotImplementedError

    def arrived(self, step: int, answer: Any) -> bool:
        """Take an answer; return whether it is one. What no robot may be sent is a fault."""
        raise NotImplementedError

    def failed(self, step: int, reason: str, kind: str = "") -> None:
        """Take note of an answer that will not come: no server, no network, too late, refused.

        kind: of the error, "" for what is none (:func:`~sinew_client.faults.kind_of`).
        """
        self._tell("failed", {"step": step, "reason": reason, "kind": kind})
        self.unanswered += 1
        if kind:
            self.faults.add(kind, reason)

    def broken(self, step: int, reason: str) -> None:
        """Take note of an answer that no robot may be sent."""
        self._tell("bad_chunk", {"step": step, "reason": reason})
        self.faults.add("bad_chunk", reason)

    def fault(self, step: int, reason: str, moved: bool = False) -> None:
        """Hold: the observation cannot be trusted, or the robot says so. moved: it may be elsewhere now, as at the
        beginning of another episode."""
        raise NotImplementedError

    def unsent(self, command: Command, reason: str) -> None:
        """Take note that the robot did not take the command of this step: it holds until a fresh answer, and begins
        from where it is then."""
        self.fault(command.step, reason)
        self.stands(None)
        if command.by == HUMAN:
            self.handed.steps -= 1
            self.followed = self._before
        elif command.by == POLICY:
            self.ages[command.age] -= 1
        self._count(reason)

    def instructed(self, step: int, prompt: str) -> None:
        """Take note of another instruction, from this step on."""
        self._tell("prompt", {"step": step, "prompt": prompt})

    def leaves(self, command: Command, time: float) -> None:
        """Take note of when a command goes to the robot, seconds since the first tick."""

    def _planned(self, step: int, state: np.ndarray | None) -> Command:
        raise NotImplementedError

    def _wanted(self, step: int, state: np.ndarray | None) -> np.ndarray | None:
        """Commit a step that somebody else drives; return what the policy would have sent, before the limits."""
        self.trajectory.take(step)
        return None

    def _commanded(self, command: Command, state: np.ndarray | None) -> None:
        """Take note of what is sent: after the limits."""

    def _drop(self) -> None:
        """Forget what is planned, and what is under way."""
        raise NotImplementedError

    # ------------------------------------------------------------------------- events

    def pause(self) -> None:
        """Hold from the next command on; the plan is dropped, what is under way is ignored."""
        self._tell("pause", {})
        self.paused = True
        self._leaves_alone()
        self._drop()

    def resume(self, position: np.ndarray | None = None, moved: bool = True) -> None:
        """Go on with a fresh answer.

        position: where the robot is, in the numbers of a command, if known; without one nothing is sent until
        :meth:`stands` says one, where limits begin with it. moved: False (in older journals) where nobody can have
        moved it since the last command.
        """
        self._tell("resume", {"position": position, "moved": moved})
        self.paused, self._fault = False, self.starting
        if moved or position is not None:
            self._begins(position)
        elif self.guard is not None:
            self.guard.held()

    def due(self, step: int) -> bool:
        """Return True if there is a row for this step."""
        return not self.paused and (self.driver in (HUMAN, RETURNING) or self.trajectory.at(step) is not None)

    def wants_position(self, step: int) -> bool:
        """Return True if a row is due in this step and the limits need to know where the robot is (:meth:`stands`)."""
        return self.guard is not None and not self.guard.known and self.due(step)

    def stands(self, position: np.ndarray | None) -> None:
        """Take note of where the robot is, standing still: in the numbers of a command, NaN where it is not known."""
        self._tell("stands", {"position": position})
        if position is None:  # its last command was not sent
            self._ahead = self._ahead_before
        if self.guard is not None:
            self.guard.start(position)

    def _begins(self, position: np.ndarray | None) -> None:
        """Let limits count from ``position``, where it may have been moved to: in the numbers of a command, None where
        that is not known."""
        self._ahead = self._ahead_before = None
        if self.guard is not None:
            self.guard.start(position)

    def stood(self) -> None:
        """Take note that the robot was held since its last command, by something else than a command."""
        self._tell("stood", {})
        if self.guard is not None:
            self.guard.held()

    def _leaves_alone(self) -> None:
        """Let the policy drive again: what somebody took over has ended without a hand-over."""
        if self.driver != POLICY:
            self.driver = ALIGNING if self.shadow else POLICY

    # ------------------------------------------------------------------------- somebody else drives

    def take_over(self, step: int, shadow: bool = False) -> None:
        """Hold from this step on, until a leader is where the robot is (:meth:`aligned`). shadow: for good, while the
        policy says what it would do."""
        self._tell("take_over", {"step": step, "shadow": shadow})
        self.driver, self.shadow, self._fault, self.followed = ALIGNING, shadow, "", None
        self._drop()

    def aligned(self, step: int) -> None:
        """Follow a leader from this step on."""
        self._tell("aligned", {"step": step})
        if self.followed is None:  # else it led before, and somebody drives already
            self.handed.changed(HUMAN)
        self.driver, self.followed = HUMAN, None

    def realign(self, step: int) -> None:
        """Hold from this step on until the leader, which is elsewhere than it was, is where the robot is again."""
        self._tell("realign", {"step": step})
        self.driver = ALIGNING

    def led(self, step: int, row: np.ndarray | None, reason: str = "") -> None:
        """Take a leader's row of this step, float32 [D]; None: hold, for ``reason``."""
        self._tell("led", {"step": step, "row": row, "reason": reason})
        self._led = (step, row, reason)

    def hand_back(self, step: int) -> None:
        """Hold from this step on, until the policy has a fresh answer."""
        self._tell("hand_back", {"step": step})
        if self.driver == HUMAN or (self.driver == ALIGNING and self.followed is not None):
            self.handed.changed(POLICY)
        self.driver, self._fault = POLICY, self.starting
        self._drop()

    def returns(self, step: int) -> None:
        """Follow the way to the rest pose from this step on (:meth:`led`). The policy is not asked any more."""
        self._tell("returns", {"step": step})
        self.driver, self._fault, self.followed = RETURNING, "", None
        self._drop()

    def _followed(self, step: int, state: np.ndarray | None) -> Command:
        """Return the command of a step in which somebody else drives or wants to."""
        wanted = self._wanted(step, state)
        if self.paused:
            return Command(step, None, PAUSED, by=self.driver, wanted=wanted)
        at, row, reason = self._led
        if self.driver == ALIGNING or at != step or row is None:
            why = ALIGNS if self.driver == ALIGNING else reason if at == step and reason else SILENT
            return Command(step, None, why, by=self.driver, wanted=wanted)
        if self.needs_state and state is None:
            return Command(step, None, UNKNOWN, by=self.driver, wanted=wanted)
        try:
            target = self.motion.reached(row, state) if self.needs_state else row
            found = self._bounded(step, target, state, 0, -1, -1, row)
        except ValueError as error:  # a state that the motion cannot read
            found = Command(step, None, str(error))
        return replace(found, by=self.driver, wanted=wanted, seam=False)

    # ------------------------------------------------------------------------- commands

    def command(self, step: int, state: np.ndarray | None = None) -> Command:
        """Return the command of this step.

        state: the robot's. A controller that ``needs_state`` holds where it is None: no state was observed in this step
        that may be acted on.

        Raises ValueError for a step that has had its command.
        """
        if self.guard is not None and self._step is not None and step > self._step + 1:
            self.guard.skipped()
        found = (self._planned if self.driver == POLICY else self._followed)(step, state)
        self._step = step
        if found.row is None:
            self._hold(found, state)
        else:
            self._commanded(found, state)
            if found.by == HUMAN:
                assert self._led[1] is not None
                self.handed.steps += 1
                self._before, self.followed = self.followed, (step, self._led[1])
            elif found.by == POLICY:
                self.ages[found.age] += 1
            if self.guard is not None and self.guard.limits is not None:
                self.handed.commanded(found.row, self.guard.before, self.guard.limits.names)
        self.clipped.update(found.clipped)
        self.clipped_commands += bool(found.clipped)
        self._tell("command", {"command": found, "state": state})
        return found

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
        """Return the command of a target: inside the workspace, then behind the guard. row: what says it already.
        Raises ValueError for a state that the motion cannot read."""
        limits = None if self.guard is None else self.guard.limits
        if limits is None or not limits.boxed.any():
            sent = self.motion.command(target, state) if row is None else row
            return self._guarded(step, sent, age, chunk, index)
        low, high = self._box(limits, state)
        inside = np.clip(target, low.astype(np.float32), high.astype(np.float32))
        met = tuple(f"{limits.name(int(at))}.workspace" for at in np.flatnonzero(inside != target))
        if met and limits.when == "hold":
            return Command(step, None, "beyond {}".format(", ".join(met)), met)
        said = self.motion.command(target, state) if row is None else row
        sent = self.motion.command(inside, state) if met else said

        def stays(row: np.ndarray) -> bool:
            """The limits of a command may carry it on where it should turn: a stop comes first."""
            reached, here = self.motion.reached(row, state), self._pose(limits, state)
            ends = np.fmin(low, here), np.fmax(high, here)  # one that stands outside is led back
            slack = 4.0 * np.spacing(np.maximum(np.abs(reached), np.abs(inside)))
            return not np.any((reached < ends[0] - slack) | (reached > ends[1] + slack))

        found = self._guarded(step, sent, age, chunk, index, said, stays)
        if found.row is not None:
            self._goes(self.motion.reached(found.row, state), self._pose(limits, state))
        return replace(found, clipped=(*found.clipped, *met)) if met else found

    def _pose(self, limits: Limits, state: np.ndarray | None) -> np.ndarray:
        """Return where the robot is in the numbers of a target, float [D], NaN where it is not known: where it was sent
        last, if a command is a place, else where this step's state says."""
        here = None if self.guard is None else self.guard.here
        assert here is not None
        pose = self.motion.pose(state, limits.dim)
        return np.where(self.motion.placed(limits.dim), here, pose).astype(np.float32)

    def _box(self, limits: Limits, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the workspace, less what was sent since the state last changed: a sensor that shows the same state
        again and again may be frozen, and the robot where it was sent."""
        low, high = limits.workspace_low, limits.workspace_high
        if not self.needs_state or self._ahead is None:
            return low, high
        pose, sent = self._ahead
        ahead = np.where(self._pose(limits, state) == pose, sent, 0.0)
        return low - np.minimum(ahead, 0.0), high - np.maximum(ahead, 0.0)

    def _goes(self, target: np.ndarray, pose: np.ndarray) -> None:
        """Note that a robot whose state says ``pose`` was sent to ``target``."""
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
        said: np.ndarray | None = None,
        inside: Callable[[np.ndarray], bool] = lambda _: True,
    ) -> Command:
        """Return the command of a row behind the guard, or the hold that the guard wants."""
        seam, self._chunk = self._chunk not in (-1, chunk), chunk
        if self.guard is None:
            return Command(step, row, "", (), age, chunk, index, seam)
        verdict = self.guard.check(row, said, inside)
        if verdict.row is None:
            return Command(step, None, verdict.reason, verdict.clipped)
        return Command(step, verdict.row, "", verdict.clipped, age, chunk, index, seam)

    def _hold(self, found: Command, state: np.ndarray | None) -> None:
        self._count(found.reason)
        if self.guard is not None:
            self.guard.held()

    def _count(self, reason: str) -> None:
        known = reason in self.held or len(self.held) < REASONS
        self.held[reason if known else OTHER] += 1

    def _tell(self, event: str, values: dict) -> None:
        for listener in self.listeners:
            listener(event, values)


class Controller(BaseController):
    """Plays chunks that are asked for, one at a time: a player behind a guard.

    max_age: control steps after its frame beyond which a row is not executed any more; None: a row is valid in its
        own step, however old its frame.
    finish: True executes the rows at hand after a request has failed; False holds at once.
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
        self._reached: np.ndarray | None = None  # the target of the last command
        self.player, self.max_age, self.finish = player, max_age, finish
        self.needs_state = player.motion.needs_state

    @property
    def chunks(self) -> int:
        return self.player.chunks

    @property
    def request(self) -> ChunkRequest | None:
        return self.player.request

    # ------------------------------------------------------------------------- events

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
        """Begin a request; see :meth:`Player.ask`."""
        self._tell("ask", {"step": step, "frame": frame, "state": state})
        return self.player.ask(step, frame, state)

    def arrived(self, step: int, answer: Any) -> bool:
        """Take the answer to the request under way; return whether it is a chunk: anything but 1 to ``max_rows`` rows
        of ``dim`` finite real numbers is a fault, and so is what the motion cannot follow."""
        try:
            rows = checked_rows(answer, self.dim, self.max_rows)
        except RowsError as error:
            self.broken(step, str(error))
            return False
        self._tell("arrived", {"step": step, "actions": rows})
        try:
            self.player.accept(rows, step)
        except Exception as error:
            logger.exception("a chunk could not be taken")
            self._break(step, f"a chunk could not be taken: {type(error).__name__}: {error}")
            return False
        self.dim, self._fault, self.unanswered = rows.shape[1], "", 0
        return True

    def refines(self, step: int) -> bool:
        return not self.paused and self.driver == POLICY and self.player.refines(step)

    def refined(self, step: int, rows: np.ndarray, state: np.ndarray | None = None) -> None:
        """Take an edge adapter's rows, see :meth:`Player.refined`. What is no chunk is a fault."""
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
        """Take note of an answer that no robot may be sent: hold until a good one."""
        super().broken(step, reason)
        self._fail(step, reason, drop=True)

    def _break(self, step: int, reason: str) -> None:
        self.faults.add("bad_chunk", reason)
        self._fail(step, reason, drop=True)

    def fault(self, step: int, reason: str, moved: bool = False) -> None:
        """Hold until a fresh chunk: the observation cannot be trusted, or the robot says so."""
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

    # ------------------------------------------------------------------------- commands

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
            found = self._bounded(step, target, state, age, node.chunk, node.index)
        except ValueError as error:  # the state has another width than before
            self.player.restart(step)
            self._fault = str(error)
            return Command(step, None, self._fault)
        if found.row is None:
            self.player.restart(step)
            self._fault = found.reason
        return found

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
        except ValueError:  # the person drives on, whatever the policy makes of the state
            return None

    # ------------------------------------------------------------------------- where a filter begins

    def resume(self, position: np.ndarray | None = None, moved: bool = True) -> None:
        super().resume(position, moved)
        if moved or position is not None:
            self._places(position)

    def stands(self, position: np.ndarray | None) -> None:
        super().stands(position)
        self._places(position)

    def _hold(self, found: Command, state: np.ndarray | None) -> None:
        super()._hold(found, state)
        self._rests(state)

    def _places(self, position: np.ndarray | None) -> None:
        """Note that the robot is where ``position`` says, in the numbers of a command; None: not known."""
        self._reached = None if position is None else np.asarray(position, np.float32)
        self._rests(None)

    def _rests(self, state: np.ndarray | None) -> None:
        """Let the filter begin anew from where the robot is: where its state says, else where it was sent."""
        if self.smoothing is None:
            return
        at = np.full(self.dim, np.nan) if self._reached is None else self._reached
        if self.needs_state and state is not None:
            here = self.motion.pose(state, self.dim)
            at = np.where(np.isnan(here), at, here)
        self.smoothing.rest(at)
