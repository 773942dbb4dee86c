"""The robot's loop: at every tick of a fixed rate, one command or one hold."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from dataclasses import replace
from typing import Any, Callable, Mapping

import numpy as np

from sinew_client.control.adapter import Adapter
from sinew_client.control.adapter_file import AdapterError
from sinew_client.control.authority import ALIGNING, HUMAN, POLICY
from sinew_client.control.controller import AHEAD_S, LATE, UNKNOWN, BaseController, Command, Controller
from sinew_client.control.facts import facts_of
from sinew_client.control.interfaces import NoCommand, NoObservation, Robot, Source, Stopped
from sinew_client.control.motion import interpolate, state_of
from sinew_client.control.pace import Pace, SimulatedPace
from sinew_client.control.refinement import Refinement
from sinew_client.control.report import Cadence, SourceAges, cadence
from sinew_client.control.requester import Call, Requester
from sinew_client.control.settings import Settings, SettingsError
from sinew_client.control.takeover import Onlooker, ShadowAgreement, Takeover
from sinew_client.control.watchdog import watchdog_of
from sinew_client.errors import Refused
from sinew_client.faults import PERMANENT
from sinew_client.history import History

logger = logging.getLogger(__name__)


OTHER_CLOCK = "the newest frame's time is not of this clock (time.monotonic): "


class Loop:
    """Runs a robot with the rows of a source until :meth:`stop`.

    source: a :class:`Source`, or what opens a connection for requests (``connect`` of a :class:`Requester`), whose call
    returns float [H, D]. prompt: the instruction, may change at any time; "": what the robot's observations say.
    pace: when ticks begin; :class:`~sinew_client.control.pace.SimulatedPace` plays without a clock. watch: called after
    every control step with the command; must be quick. adapter: refines chunks in every control step; the settings'
    ``refine`` is its ``max_age``. hold_refused: hold also where the very first request is refused for what it is, and
    ask again: of a robot whose instruction or cameras come later. history: of the moments that the policy reads
    (``History.of``): of more than one, the robot is observed at every control step, and requests have those before
    (``earlier``). takeover: who may drive in the policy's place (:meth:`take_over`), or does so from the beginning.
    keep: called after every control step that sent a command, with what was observed in it, the instruction and the
    command; the robot is then observed at every control step. Must be quick.

    While it runs a watchdog holds the robot where the loop is late by two periods, unless the settings or the robot say
    that it must not (``Settings.watchdog``, ``Robot.concurrent_hold``).

    Raises :class:`SettingsError` for limits of velocity or acceleration that nothing says where to begin with.
    """

    def __init__(
        self,
        robot: Robot,
        source: Source | Callable[[], Call],
        settings: Settings,
        dim: int,
        prompt: str = "",
        pace: Pace | None = None,
        watch: Callable[[Command], None] | None = None,
        adapter: Adapter | None = None,
        hold_refused: bool = False,
        history: History | None = None,
        takeover: Takeover | None = None,
        keep: Callable[[Mapping[str, Any], str, Command], None] | None = None,
    ):
        if bool(settings.refine) != (adapter is not None):
            raise SettingsError(
                f"refine: expected an adapter's max_age with one, else 0, got {settings.refine}"
            )
        settings.check_start(dim)
        if bool(settings.fusion) != getattr(source, "continuous", False):
            wanted = (
                "none of chunks that are asked for"
                if settings.fusion
                else "how windows of a stream are fused"
            )
            raise SettingsError(f"fusion: expected {wanted}, got {settings.fusion!r}")
        self.robot, self.settings, self.prompt = robot, settings, prompt
        self._facts = facts_of(robot)
        self.controller: BaseController = settings.controller(dim)
        self._dim = dim
        self._edge: Refinement | None = None
        if adapter is not None:
            assert isinstance(self.controller, Controller)
            self._edge = Refinement(adapter, self.controller)
        self.source: Source = (
            source if hasattr(source, "poll") else Requester(source, settings.deadline)  # type: ignore[assignment, arg-type]
        )
        self.pace = pace or Pace(settings.period / settings.substeps)
        self.watchdog = watchdog_of(robot, self.pace.period, settings.watchdog, self.pace.real)
        self.listeners: list[Callable[[str, dict], None]] = self.controller.listeners
        self.steps = 0
        self._watch, self._hold_refused, self._keep = watch, hold_refused, keep
        self.takeover = takeover
        self.agreement: ShadowAgreement | None = (
            None  # of the policy with who drives, where that is all it is asked for
        )
        if takeover is not None and takeover.shadow:
            limits = self.controller.guard.limits if self.controller.guard is not None else None
            self.agreement = ShadowAgreement(() if limits is None else limits.names)
            self.controller.take_over(0, shadow=True)
        self._history = history or History()
        self._calls: list[Callable[[], None]] = []  # of other threads, carried out between two ticks
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._last: np.ndarray | None = None  # the last command of a control step
        self._command: Command | None = None
        self._state: np.ndarray | None = None
        self._images: Mapping[str, Any] = {}  # of the newest frame
        self._seen: tuple[int, Mapping[str, Any]] = (
            -1,
            {},
        )  # the step of the newest observation, and what it was
        self._ages = SourceAges()
        self._state_age = 0.0  # seconds, of its newest state
        self._unseen = ""  # why the last observation that failed could not be acted on
        self._age = 0.0  # of the newest frame when the present tick began, seconds

    def watch(self, watcher: Callable[[Command], None]) -> None:
        """Call ``watcher`` after every control step; it must be quick."""
        self._watch = watcher

    # ------------------------------------------------------------------------- from any thread

    def stop(self) -> None:
        """End after the present tick; the robot holds."""
        self._ended.set()

    def pause(self) -> None:
        """Hold within one period, until :meth:`resume`."""
        self._between_ticks(self._pause)

    def resume(self) -> None:
        self._between_ticks(self._resume)

    def take_over(self) -> None:
        """Hold within one period, bring the leader to where the robot is, and follow it until :meth:`hand_back`."""
        self._between_ticks(self._take_over)

    def hand_back(self) -> None:
        """Hold within one period, until the policy has a fresh answer."""
        self._between_ticks(self._hand_back)

    @property
    def driver(self) -> str:
        """Return who drives: "policy", "human", or "aligning" while the leader is brought to where the robot is."""
        return self.controller.driver

    def say(self, prompt: str) -> None:
        """Change the instruction; rows that follow the old one are dropped, but a stream's windows follow the new one
        from the next prefix on."""
        self._between_ticks(lambda: self._say(prompt))

    def restart(self, reason: str, prompt: str = "") -> None:
        """Drop the plan and hold until a fresh chunk: the world is another one, such as a new episode's, and its first
        request brings the instruction ``prompt``, where there is one."""
        self._between_ticks(lambda: self._restart(reason, prompt))

    @property
    def stopped(self) -> bool:
        """Return True if :meth:`stop` has ended the run, and not its length or the robot."""
        return self._ended.is_set()

    @property
    def paused(self) -> bool:
        return self.controller.paused

    @property
    def reason(self) -> str:
        """Return why the robot holds, "" while it moves."""
        return "" if self._command is None else self._command.reason

    def seen(self) -> tuple[str, dict[str, Any]] | None:
        """Return the instruction and the newest observation, for a planner; None before there is one. ``said`` in it is
        the last text of the policy's language head, where one was asked for."""
        if self._state is None or not self._images:
            return None
        said = self.controller.said
        return self.prompt, {"images": self._images, "state": self._state, **({"said": said} if said else {})}

    def report(self) -> Cadence:
        return cadence(
            self.controller,
            self.pace,
            self.steps,
            self.source.failures,
            self.settings.substeps,
            self.watchdog,
            self.agreement,
            self._ages,
        )

    # ------------------------------------------------------------------------- the loop

    def run(self, steps: int | None = None) -> Cadence:
        """Run until so many control steps were taken, or until stopped. The robot holds at the end, whatever ended it.

        May be called again to go on. Raises :class:`~sinew_client.errors.Refused` where the very first request is
        refused for what it is: the robot has not moved, and the next one would fare no better.
        """
        try:
            with self.watchdog:
                while not self._ended.is_set() and (steps is None or self.steps < steps):
                    self.tick(self.pace.next())
        except Stopped as end:
            logger.info("the robot has ended the run: %s", end)
        finally:
            with contextlib.suppress(Stopped):  # which it may do at its last hold
                self.robot.hold()
        return self.report()

    def close(self) -> None:
        """End the connection; waits for a request under way, but not longer than its deadline or 5 s."""
        self.source.close(min(self.settings.deadline, 5.0))

    def tick(self, number: int) -> None:
        """Do what is due in one tick of the pace: a control step, or a point between two."""
        step, part = divmod(number, self.settings.substeps)
        fresh = self._command is None or step > self._command.step
        if fresh:
            if self._command is not None and self._command.row is not None:
                self._last = self._command.row
            self._prepare(step)
        if self.watchdog.claim():
            self.controller.stood()
        if fresh or self._command is None:
            self._command = self._step(step)
        command = self._command
        if command.row is None:
            self.robot.hold()
        elif self.settings.substeps == 1:
            if command.by == POLICY:
                self.controller.leaves(command, self._time(step))  # before: acting may take its time
            self._act(command, command.row)
        else:
            self._act(command, interpolate(self._last, command.row, (part + 1) / self.settings.substeps))
        self.watchdog.sent()

    def _act(self, command: Command, row: np.ndarray) -> None:
        """Send a command, or part of it; the robot holds where it does not take it, and for the rest of the step."""
        try:
            if self._facts.needs_state() and self._seen[0] != command.step:
                raise NoCommand(UNKNOWN, self._unseen)
            self.robot.act(row)
        except NoCommand as refused:
            self.robot.hold()
            if refused.reason not in self.controller.held:
                logger.warning("step %d: holds: %s", command.step, refused)
            self._command = replace(command, row=None, reason=refused.reason)
            self._last = None
            self.controller.unsent(command, refused.reason)

    def _prepare(self, step: int) -> None:
        """Do all that may take its time before a control step's command: look, ask, take what has come."""
        now = self.pace.now()
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        self._poll(step, now)
        seen = None
        needed = self.controller.needs_state or self._history.moments > 1 or self._keep is not None
        if (needed and not self.paused) or self.controller.refines(step):
            seen = self._observe(step, now)
        if self.controller.wants_chunk(step) and self.source.ready(now):
            seen = self._ask(step, now, seen)
            if not self.controller.continuous:
                self._poll(step, now)  # an answer that takes no time
        if self._edge is not None and seen is not None:
            self._adapted(step, self._edge.refine, step, seen)
        self._follow(step, now, seen)
        lost = self.controller.wants_position(step)
        if seen is None and (lost or (self._facts.needs_state() and self.controller.due(step))):
            seen = self._observe(step, now)
        if lost and seen is not None:
            self.controller.stands(self._measured(self._state))

    def _step(self, step: int) -> Command:
        # A state that commands count from is of this step: an older one, or one that may not be acted on, is none.
        of_step = not self.controller.needs_state or self._seen[0] == step
        command = self.controller.command(step, self._state if of_step else None)
        if self._last is None and command.row is not None:
            self._last = self._from()
        self.steps += 1
        if self.agreement is not None and command.row is not None:
            self.agreement.add(command.step, command.wanted, command.row)
        if self._keep is not None and command.row is not None and self._seen[0] == step:
            self._keep(self._seen[1], self.prompt, command)
        self._log(command)
        if self._watch is not None:
            self._watch(command)
        return command

    def _time(self, step: int) -> float:
        """Return seconds since the first tick, never before this control step was due."""
        return max(step / self.settings.hz, self.pace.since(self.pace.now()))

    def _log(self, command: Command) -> None:
        """Log the beginning and the end of a hold, with its reason. In simulated time holds are what is studied."""
        if isinstance(self.pace, SimulatedPace):
            return
        before = self._command.reason if self._command is not None else ""
        if command.reason and command.reason != before:
            usual = command.reason == LATE and self.controller.held[LATE] > 1  # freeze does so at every chunk
            level = logging.INFO if usual else logging.WARNING
            aligns = command.by == ALIGNING and self.takeover is not None and self.takeover.apart
            why = self._unseen if command.reason == UNKNOWN else aligns
            said = f"{command.reason} ({why})" if why else command.reason
            logger.log(level, "step %d: holds: %s", command.step, said)
        elif before and not command.reason:
            logger.info("step %d: goes on after: %s", command.step, before)

    def _poll(self, step: int, now: float) -> None:
        while (outcome := self.source.poll(now)) is not None:
            if outcome.reason:
                self.controller.failed(step, outcome.reason, outcome.kind)
                if outcome.kind in PERMANENT and not (self.controller.chunks or self._hold_refused):
                    raise Refused(outcome.reason)
            else:
                self._arrived(step, outcome.value)

    def _arrived(self, step: int, answer: Any) -> None:
        asked = self.controller.player.request if isinstance(self.controller, Controller) else None
        if not self.controller.arrived(step, answer):
            return
        if self._edge is not None:
            self._edge.arrived(answer)
        if self.agreement is not None and asked is not None:
            rows = self.controller.motion.commands(np.asarray(answer, np.float32), asked.state)
            self.agreement.said(asked.frame, rows, self.settings.speed)

    def _observe(self, step: int, now: float) -> dict[str, Any] | None:
        """Return the robot's observation; None where there is none or its newest frame is too old: the robot holds."""
        try:
            seen = dict(self.robot.observe())
        except NoObservation as blind:
            self._fault(step, str(blind))
            return None
        state = state_of(seen["state"])
        times = seen.pop("times", None) or {}
        seen = {**exposed(times, seen), **seen}
        given, age = seen.get("time"), float_of(seen.pop("age", 0.0))
        if given is None:
            self._age, seen["time"] = age, now - age
        else:
            seen["time"] = float_of(given)
            self._age = now - seen["time"]
            age = self.pace.now() - seen["time"]  # after a look that took its time
        # Of a stream a node counts, and the frame that it was made from.
        reason = frame_fault(age, math.inf if self.controller.continuous else self.settings.stale)
        looked = self.pace.now()
        self._ages.add({name: looked - float_of(at) for name, at in times.items()}, seen.get("images", {}))
        if not reason:
            reason = sources_fault(times, seen.get("images", {}), looked, self.settings)
        if not reason and not np.all(np.isfinite(state)):
            reason = "the state is not finite"
        reason = reason or self.controller.motion.lacks(state)
        if reason:
            self._fault(step, reason)
            return None
        self._state = state
        self._state_age = looked - float_of(times["state"]) if "state" in times else age
        self._images = seen.get("images", self._images)
        self._seen = (step, seen)
        self._history.see(step, self._images, self._state)
        return seen

    def _fault(self, step: int, reason: str) -> None:
        """Hold for what cannot be seen. The answer to a request is not worth waiting for then; a stream goes on."""
        self._unseen = reason
        if not self.controller.continuous:
            self.source.cancel()
        self.controller.fault(step, reason)

    def _ask(self, step: int, now: float, seen: dict[str, Any] | None) -> dict[str, Any] | None:
        """Send a request; return what it has seen. seen: what this control step has observed already."""
        seen = seen or self._observe(step, now)
        if seen is None:
            return None
        frame = step - max(0, round(self._age * self.settings.hz))
        times = self._time(step), self.pace.since(seen["time"])
        request = self.controller.ask(step, frame, self._state, *times)
        if self._edge is not None and not self._adapted(step, self._edge.asked, seen):
            return None
        said: dict[str, Any] = {"prompt": self.prompt} if self.prompt or "prompt" not in seen else {}
        if self._history.moments > 1:
            said["earlier"] = self._history.before(step)
        self.source.ask({**seen, **said, **request.fields}, now)
        if "blind" in seen:
            self._fault(step, seen["blind"])
        return seen

    def _adapted(self, step: int, what: Callable[..., None], *given: Any) -> bool:
        """Do something with the adapter; what it cannot take is a fault."""
        try:
            what(*given)
        except AdapterError as error:
            self._fault(step, str(error))
            return False
        return True

    # ------------------------------------------------------------------------- between two ticks

    def _between_ticks(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._calls.append(call)

    def _pause(self) -> None:
        if not self.controller.paused:
            self.source.cancel()
            self.controller.pause()
            self._last = None  # somebody may move the robot

    def _resume(self) -> None:
        if self.controller.paused:
            self._history.clear()
            seen = self._observe(self._next, self.pace.now())
            self.controller.resume(None if seen is None else self._measured(self._state))

    def _take_over(self) -> None:
        if self.takeover is None or self.controller.paused or self.controller.driver != POLICY:
            return
        self.source.cancel()
        self.controller.take_over(self._next)

    def _hand_back(self) -> None:
        if self.takeover is None or self.takeover.shadow or self.controller.driver == POLICY:
            return
        self.controller.hand_back(self._next)

    def _follow(self, step: int, now: float, seen: dict[str, Any] | None) -> None:
        """Do what is due with a leader."""
        if self.takeover is None or self.controller.paused:
            return
        if (asked := self.takeover.asks()) is not None:
            (self._take_over if asked else self._hand_back)()
        if self.controller.driver == POLICY:
            return
        here = None if self.controller.guard is None else self.controller.guard.here
        here = self._last if here is None else here
        lost = self.controller.driver != HUMAN and (here is None or np.any(np.isnan(here)))
        if lost and (seen is not None or self._observe(step, now) is not None):
            here = self._measured(self._state)
        if isinstance(self.robot, Onlooker):  # what was done is in what it shows
            self._observe(step, now)
        last = self.controller.followed
        followed = None if last is None else (max(0, step - last[0] - 1) / self.settings.hz, last[1])
        self.takeover.follow(self.controller, step, here, followed)
        if self.controller.driver == HUMAN and self.controller.followed is None and here is not None:
            self.controller.followed = step, here

    def _restart(self, reason: str, prompt: str) -> None:
        self.source.cancel()
        self.controller.fault(self._next, reason, moved=True)
        self._last = None
        self._history.clear()
        if prompt:
            self._instruct(prompt)

    def _instruct(self, prompt: str) -> None:
        """Ask with another instruction from the next request on, and let the journal know."""
        if prompt != self.prompt:
            self.prompt = prompt
            for listener in self.listeners:
                listener("prompt", {"step": self._next, "prompt": prompt})

    def _say(self, prompt: str) -> None:
        if prompt != self.prompt:
            self._instruct(prompt)
            # Windows of a stream follow it from the next prefix on. What was planned for the old one is dropped, while
            # limits go on counting from the last command: the robot may not have been held when the answer comes.
            if not (self.controller.continuous or self.controller.paused):
                self.source.cancel()
                self.controller.fault(self._next, self.controller.starting)

    @property
    def _next(self) -> int:
        """Return the first control step without a command."""
        return 0 if self._command is None else self._command.step + 1

    def _measured(self, state: np.ndarray | None) -> np.ndarray:
        """Return where a robot of this state is in the numbers of a command, NaN where it does not say so, or did when
        it may have been elsewhere: a stream takes old frames."""
        if state is None or self._state_age > self.settings.stale:
            return np.full(self._dim, np.nan)
        return self.controller.motion.position(state, self._dim)

    def _from(self) -> np.ndarray | None:
        """Return what the command of this step moves from, if known: points between are on the way from there."""
        guard = self.controller.guard
        if guard is None or guard.before is None or not np.all(np.isfinite(guard.before)):
            return None
        return guard.before


def float_of(value: Any) -> float:
    """Return a number as float, NaN for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def frame_fault(age: float, stale: float) -> str:
    """Return why a frame of this age, in seconds, may not be acted on; "" if it may."""
    if not math.isfinite(age):
        return OTHER_CLOCK + f"{age} s old"
    if age < -AHEAD_S:
        return OTHER_CLOCK + f"{-age:.3g} s ahead of it"
    return f"the newest frame is older than {stale:g} s" if age > stale else ""


def exposed(times: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, float]:
    """Return the ``time`` of an observation that says only when the frame of each camera was exposed: the oldest."""
    frames = [float_of(times[name]) for name in seen.get("images", {}) if name in times]
    return {"time": min(frames)} if frames and "age" not in seen else {}


def sources_fault(times: Mapping[str, Any], images: Mapping[str, Any], now: float, settings: Settings) -> str:
    """Return why what each camera and the state show may not be acted on together; "" if it may.

    times: when each was exposed or measured, seconds of the loop's clock. What the settings bound has to have one.
    """
    of, skew = settings.stale_of, settings.skew
    wanted = [*of, *(images if skew is not None else ())]
    for name in wanted:
        if name not in times:
            return f"{name}: expected when it was seen (times of the observation), got nothing"
    for name in times:
        limit = math.inf if settings.fusion and name != "state" else settings.stale
        if reason := frame_fault(now - float_of(times[name]), of.get(name, limit)):
            return f"{name}: {reason}"
    frames = {name: float_of(times[name]) for name in images if name in times}
    if skew is not None and frames:
        first, last = min(frames, key=frames.__getitem__), max(frames, key=frames.__getitem__)
        if frames[last] - frames[first] > skew:
            return f"frames of {first} and {last} are more than {skew:g} s apart"
    return ""
