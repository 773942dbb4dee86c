"""Replay the requests of a decision log with other settings, to find out how often the robot would hold, and how old
its commands would be.

The loop's own controller decides, so the numbers are exact for the recorded latencies. The actions are not used, so a
replay cannot state how well the robot would have done its task.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from sinew_client.control.authority import POLICY
from sinew_client.control.controller import Command, Controller
from sinew_client.control.journal import JournalError, apply_event, read_events
from sinew_client.control.safety import Verdict
from sinew_client.control.settings import Settings

MAX_RULES = 6  # for each method of chunk merging, at most this many replan intervals are tried


@dataclass(frozen=True)
class Clipped:
    """How one limit changed the commands for one joint.

    Attributes:
        commands: Number of commands that the limit changed.
        largest: Largest difference between the requested and the sent value, robot units.
        furthest: The requested value with the largest difference, robot units.
    """

    commands: int
    largest: float
    furthest: float


@dataclass(frozen=True)
class RunLog:
    """The facts of a recorded run that its replay needs.

    Attributes:
        settings: Settings of the run.
        target: What computed the actions, as the user typed it; "" in older logs.
        dim: Number of values in a command.
        steps: The control steps with a command or a hold, in ascending order.
        drops: For each control step in which the loop dropped its planned actions (for example at a new episode): the
            reason, and True if the robot may have been moved.
        latencies: Number of control steps from each answered request to its answer.
        waits: For each request that did not fail: control steps to its answer, and from its newest frame to the
            request. If the loop dropped the request, the first number is the median latency, or the time until the
            drop if that was longer.
        failed: Number of requests without an executable answer.
        size: Number of actions in a chunk.
        held: Number of control steps in which the robot held, by reason.
        ages: Number of commands, by their age in control steps.
        requests: Number of requests for a chunk.
        clipped: Effect of each limit, by "joint.limit".
        late_ms: How late the control step of each request began, in milliseconds. Empty in older logs.
    """

    settings: Settings
    target: str
    dim: int
    steps: list[int] = field(default_factory=list)
    drops: dict[int, tuple[str, bool]] = field(default_factory=dict)
    latencies: list[int] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    failed: Counter = field(default_factory=Counter)
    size: int = 0
    held: Counter = field(default_factory=Counter)
    ages: Counter = field(default_factory=Counter)
    requests: int = 0
    clipped: dict[str, Clipped] = field(default_factory=dict)
    late_ms: list[float] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """Number of control periods without a tick, because the loop was late by more than a period."""
        return self.steps[-1] - self.steps[0] + 1 - len(self.steps)


@dataclass(frozen=True)
class Played:
    """The outcome of a replay.

    Attributes:
        handover: Method of chunk merging.
        replan: When the next chunk is requested.
        steps: Number of control steps.
        held: Number of control steps in which the robot holds, by reason.
        ages: Number of commands, by their age in control steps.
        requests: Number of requests for a chunk.
        reaction: For a change of the scene in each control step: the number of control steps until the first command
            that was computed from a later frame.
    """

    handover: str
    replan: str
    steps: int
    held: Counter
    ages: Counter
    requests: int
    reaction: list[int]

    @property
    def holds(self) -> int:
        return sum(self.held.values())


def read_run(path: Path) -> RunLog:
    """Read a decision log of ``sinew run --record``.

    Raises:
        JournalError: The file is not a decision log, or it is the log of a stream or of an edge adapter.
    """
    log: RunLog | None = None
    controller: Any = None
    guard = _LimitsWatch()
    request: tuple[int, int] | None = None  # step and age of the frame of the request in progress
    waits: list[
        tuple[int | None, int, int]
    ] = []  # per request: latency (None without an answer), time in progress, age of the frame
    for number, event in read_events(path):
        try:
            kind = event["event"]
            if log is None:
                settings = Settings(**event["settings"])
                if settings.fusion or settings.refine:
                    raise JournalError(
                        f"{path}: the run was a stream or had an edge adapter. Only runs that request chunks can be"
                        " replayed with other settings."
                    )
                log = RunLog(settings, str(event.get("target") or ""), event["dim"])
                controller = settings.controller(event["dim"])
                guard.watch(controller)
                continue
            step = event.get("step")
            if kind == "ask":
                log, request = replace(log, requests=log.requests + 1), (step, step - event["frame"])
                if event.get("time") is not None:
                    log.late_ms.append(1e3 * max(0.0, event["time"] - step * log.settings.period))
            elif kind == "arrived" and request is not None:
                log.latencies.append(step - request[0])
                waits.append((step - request[0], step - request[0], request[1]))
                log, request = replace(log, size=max(log.size, len(event["actions"]))), None
            elif kind in ("failed", "bad_chunk"):
                log.failed[event["reason"]] += 1
                request = None
            elif kind == "fault":
                log.drops[step] = event["reason"], bool(event.get("moved", False))
                if request is not None:
                    waits.append((None, step - request[0], request[1]))
                request = None
            command = apply_event(controller, event)
            if command is not None:
                guard.step(controller, command, event["state"])
                log.steps.append(command.step)
                if command.row is None:
                    log.held[command.reason] += 1
                elif command.by == POLICY:
                    log.ages[command.age] += 1
        except JournalError:
            raise
        except Exception as error:  # the order or the widths of the events are not those of a controller
            raise JournalError(f"{path}: line {number}: {type(error).__name__}: {error!s:.300}") from error
    if log is None or not log.steps or not log.latencies:
        raise JournalError(f"{path}: the log has no answered request, so there is nothing to replay")
    if request is not None:
        waits.append((None, log.steps[-1] + 1 - request[0], request[1]))
    usual = int(np.median(log.latencies))
    log.waits.extend(
        (max(usual, open_for) if known is None else known, age) for known, open_for, age in waits
    )
    log.clipped.update(guard.clipped)
    return log


def play(log: RunLog, handover: str | None = None, replan: str | None = None) -> Played:
    """Replay the requests of a run with its recorded latencies.

    The i-th request takes as long as the i-th recorded request that did not fail. If there are more requests, the
    latencies are used again from the beginning.

    Args:
        log: The recorded run.
        handover: Method of chunk merging; None takes the run's own.
        replan: When the next chunk is requested; None takes the run's own rule.

    Raises:
        ClientError: The method and the rule do not fit.
    """
    own = log.settings
    name, rule = handover or own.choice.handover, replan or own.replan
    settings = Settings(
        hz=own.hz, handover=name, replan=rule, max_age=own.max_age, deadline=own.deadline, stale=own.stale,
        committed_rows=own.committed_rows, chunk_size=own.chunk_size,
    )  # fmt: skip
    controller = settings.of_chunks(log.dim)
    chunk = np.zeros((max(1, round(log.size / own.speed)), log.dim), np.float32)
    if own.chunk_size:
        controller.max_rows = max(controller.max_rows, len(chunk))
    waits: Iterator[tuple[int, int]] = cycle(log.waits)
    due: int | None = None
    requests = 0
    commands: list[Command] = []
    for step in log.steps:
        if step in log.drops:
            controller.fault(step, *log.drops[step])
            due = None
        if due is not None and step >= due:
            controller.arrived(step, chunk)
            due = None
        if controller.wants_chunk(step):
            latency, delay = next(waits)
            controller.ask(step, step - delay)
            requests, due = requests + 1, step + latency
            if latency == 0:
                controller.arrived(step, chunk)
                due = None
        commands.append(controller.command(step))
    executed = [command for command in commands if command.row is not None]
    return Played(
        name,
        rule,
        len(commands),
        Counter(controller.held),
        Counter(command.age for command in executed),
        requests,
        _reactions([(command.step, command.step - command.age) for command in executed], set(log.drops)),
    )


def alternatives(log: RunLog, methods: tuple[str, ...]) -> list[Played]:
    """Replay a run with each method of chunk merging and several replan intervals. The run's own settings come first.

    Args:
        log: The recorded run.
        methods: Methods of chunk merging.
    """
    rules = [*[str(2**power) for power in range(16) if 2**power < log.size][: MAX_RULES - 1], "full"]
    pairs = [(log.settings.choice.handover, log.settings.replan)]
    pairs += [(method, rule) for method in methods for rule in rules if (method, rule) not in pairs]
    return [play(log, method, rule) for method, rule in pairs]


def _reactions(executed: list[tuple[int, int]], drops: set[int]) -> list[int]:
    """For a change of the scene in each control step, return the number of steps until the first command from a later
    frame.

    Args:
        executed: For each command, its control step and the step of the frame from which it was computed.
        drops: Steps in which the plan was dropped. A change before such a step is not counted beyond it.
    """
    newest = np.maximum.accumulate([frame for _, frame in executed]) if executed else np.zeros(0)
    ends = sorted(drops)
    reactions = []
    for step, _ in executed:
        at = int(np.searchsorted(newest, step))
        if at < len(executed):
            passed = bisect.bisect_right(ends, executed[at][0]) != bisect.bisect_right(ends, step)
            if not passed:
                reactions.append(executed[at][0] - step)
    return reactions


class _LimitsWatch:
    """Compares the commands that a policy requested with those that the limits allowed."""

    def __init__(self) -> None:
        self.clipped: dict[str, Clipped] = {}
        self._verdicts: list[tuple[np.ndarray, Verdict]] = []

    def watch(self, controller: Any) -> None:
        """Let the controller's guard report each check."""
        guard = controller.guard
        if guard is None:
            return
        check = guard.check

        def reported(row: np.ndarray, *rest: Any) -> Verdict:
            verdict = check(row, *rest)
            self._verdicts.append((np.asarray(row, np.float64), verdict))
            return verdict

        guard.check = reported

    def step(self, controller: Controller, then: Command, state: Any) -> None:
        """Repeat a logged command, and count how the limits changed it.

        Args:
            controller: The controller of the replay.
            then: The logged command.
            state: State of the robot in this step.
        """
        self._verdicts.clear()
        controller.command(then.step, None if state is None else np.array(state, np.float32))
        for requested, verdict in self._verdicts[-1:]:
            if verdict.row is None or not verdict.clipped:
                continue
            limits = controller.guard.limits if controller.guard is not None else None
            if limits is None:
                continue
            change = np.abs(requested - verdict.row)
            names = [limits.name(joint) for joint in range(limits.dim)]
            for text in verdict.clipped:
                joint = names.index(text.rpartition(".")[0])
                before = self.clipped.get(text, Clipped(0, 0.0, 0.0))
                worst = change[joint] >= before.largest
                self.clipped[text] = Clipped(
                    before.commands + 1,
                    float(change[joint]) if worst else before.largest,
                    float(requested[joint]) if worst else before.furthest,
                )
