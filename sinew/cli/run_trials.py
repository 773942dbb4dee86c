"""``sinew run --trials``: policies on one robot, scene by scene, blind, each trial begun and judged and kept.

Space begins, pauses and goes on; ``s``, ``f`` and ``d`` say how it ended; Enter keeps that; ``q`` stops.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from sinew_client.policy import is_address

from sinew.cli import status, terminal
from sinew.cli.options import CAMERAS, CountIfAny, Flag, Runs, Texts, json_object, motion_of
from sinew.cli.run_leader import EnvelopeFlags, FrameKeeper, LeaderFlags
from sinew.cli.run_rig import ChunkFlags, Rig, open_rig
from sinew.cli.run_robot import EMBEDDED, Driven, RobotFlags, drive
from sinew.cli.run_view import Keys
from sinew.core import SinewError

if TYPE_CHECKING:
    from sinew.eval.settings import Task, Variant
    from sinew.eval.trials.desk import Desk
    from sinew.eval.trials.sitting import Sitting, Turn

SEED = 5000  # of the first scene, as of an evaluation
LOG = "run.log"  # in the folder: what the loop says while nobody may know which policy drives
VARIED = ("replan", "handover", "solver_steps", "dtype", "device", "engine")  # that --compare may change
LOOK_S = 0.05


@Parameter(name="*", group="Trials")
@dataclass(frozen=True)
class TrialFlags:
    """Trials of one policy, or of several in one sitting.

    Attributes:
        trials: scenes; each policy has one trial in each. A person says when one begins and how it ended, or the robot
            does (`success`: True, False or None while it goes on; `set_up(seed)`: it resets the scene), as simulated
            ones do.
        compare: another policy, or KEY=VALUE,... of the first one (replan, handover, engine ...), repeatable: it meets
            the same scenes, in random order, and nothing says which one drives.
        out: folder of the sitting, a line for each trial; the same command goes on where it was stopped, and
            `sinew leaderboard` reads it.
        judge: a file or a FIFO that another program writes lines to: go, success, failure, discard REASON, quit.
        seed: of the first scene: of the noise of its chunks, and of what a simulated robot sets up; 5000 if absent.
        order: a number that the order follows from; drawn, and kept, if absent.
        sequential: end also once a difference of two policies is shown, by a test that may be looked at after each
            scene. Without it the number of scenes is fixed, and nothing is shown before the last one.
    """

    trials: CountIfAny = None
    compare: Texts = ()
    out: Path | None = None
    judge: Path | None = None
    seed: Annotated[int, Parameter(validator=validators.Number(gte=0))] = SEED
    order: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None
    sequential: Flag = False

    def check(self, on: RobotFlags, by: ChunkFlags, lead: LeaderFlags) -> None:
        """Raise :class:`SinewError` for flags that do not go together, before anything is loaded."""
        if self.out is None:
            raise SinewError("--trials: expected --out FOLDER beside it, where each trial is kept, got none")
        if self.trials is not None and self.trials > 999:
            raise SinewError(f"--trials: expected at most 999 scenes, got {self.trials}")
        for flag, given in (
            ("--episodes", on.episodes), ("--takeover", lead.takeover), ("--shadow", lead.shadow),
            ("--assist", by.assist), ("--split", by.split),
        ):  # fmt: skip
            if given:
                raise SinewError(f"{flag}: expected none with --trials, each of which is one policy's own")


TRIALS = TrialFlags()


def run_trials(
    target: str,
    on: RobotFlags,
    by: ChunkFlags,
    lead: LeaderFlags,
    envelope: EnvelopeFlags,
    trials: TrialFlags,
    runs: Runs,
    key: str,
) -> int:
    """Play what is left of a sitting. Ends with its report, or where it was stopped."""
    trials.check(on, by, lead)
    from sinew.eval import farm
    from sinew.eval.trials.report import write_page
    from sinew.eval.trials.sitting import Sitting

    assert trials.out is not None
    assert trials.trials is not None
    with ExitStack() as stack:
        asked = _asked(target, by, trials, runs)
        open_robot = on.opener(by.substeps)
        rigs: list[Rig] = []

        def robot_of(policy: Any) -> Driven:
            if not rigs:
                return on.opened(stack, open_robot, policy)
            _same_robot(rigs[0].policy, policy, trials.compare[len(rigs) - 1])
            first = rigs[0].robot
            return on.driven((first.machine, first.prompt, first.rate), policy)

        for variant in asked:
            own = replace(by, handover=variant.handover, replan=variant.show("replan"))
            chosen = runs
            if not is_address(variant.target):
                chosen = replace(
                    runs, engine=variant.engine or "auto", dtype=variant.dtype, device=variant.device
                )
            rigs.append(open_rig(variant.target, on, own, lead, envelope, chosen, key, robot_of))
        machine = rigs[0].robot.machine
        keyboard = sys.stdin.isatty() and sys.stdout.isatty()
        waits = (keyboard or trials.judge is not None) and not by.go
        if not waits and not (hasattr(machine, "success") and hasattr(machine, "set_up")):
            got = "--go" if by.go else "a standard input that is no terminal"
            raise SinewError(
                "--trials: expected a keyboard, --judge FILE, or a robot that sets its scenes up and judges itself"
                f" (set_up and success), got {got}"
            )
        if on.seconds is None and not (keyboard or hasattr(machine, "success")):
            raise SinewError(
                "--seconds: expected the longest that a trial may take, as nobody is at a keyboard"
            )
        variants = [_settled(variant, rig) for variant, rig in zip(asked, rigs, strict=True)]
        task = _task(on)
        sitting = Sitting(
            trials.out, task, variants, trials.trials, trials.seed, trials.order, trials.sequential
        )
        stack.enter_context(farm.sole(trials.out, "it has one keyboard"))
        room = _Room(stack, on, lead, rigs, sitting, trials, waits, keyboard)
        failed = room.play()
        record = room.report()
    if record is not None and room.complete:
        from sinew.eval.report.evidence import plan_text
        from sinew.eval.report.report import terminal as shown

        for part in (*shown(record), plan_text(record["plan"])):
            terminal.console().print(part)
        terminal.say(f"wrote {write_page(sitting, record, lead.frames)}")
    else:
        due = sitting.due()
        left = 0 if due is None else due.total - due.number + 1
        terminal.say(
            f"{left} trials are left; the same command goes on from {trials.out}, and tells nothing until then"
        )
    terminal.emit(
        {**(record if room.complete and record else {}), "complete": room.complete, "failed": failed}
    )
    return status.ended(failed)


def _asked(target: str, by: ChunkFlags, trials: TrialFlags, runs: Runs) -> list[Variant]:
    from sinew.eval.settings import parse_replan
    from sinew.eval.variants import variants

    try:
        replan = parse_replan(by.replan)
    except ValueError as error:
        raise SinewError(f"--replan: {error}") from None
    for text in trials.compare:
        keys = [part.partition("=")[0] for part in text.split(",") if "=" in part and not Path(text).exists()]
        if other := [name for name in keys if name.replace("-", "_") not in VARIED]:
            raise SinewError(f"--compare: expected a policy, or one of {', '.join(VARIED)}, got {other[0]}")
    return variants(runs.variant(target, CAMERAS, replan=replan, handover=by.handover), (), trials.compare)


def _settled(variant: Variant, rig: Rig) -> Variant:
    """Return the variant with what plays it."""
    found = replace(variant, handover=rig.chosen.handover)
    if "://" in variant.target:
        return replace(found, device="cpu")
    return replace(found, engine=rig.about.get("engine"), device=str(rig.about.get("device", "cpu")))


def _task(on: RobotFlags) -> Task:
    """Return what all of them do: that of an environment is an evaluation's in real time."""
    from sinew.eval.settings import Task

    name = EMBEDDED.get(on.robot, on.robot).removeprefix("gym:")
    options, motion = json_object("--robot-options", on.robot_options), motion_of(on.motion)
    return Task(name, options, realtime=True, motion=dict(motion) if motion else None)


def _same_robot(first: dict[str, Any], policy: dict[str, Any], name: str) -> None:
    """Raise :class:`SinewError` where two policies see another robot, or move another one."""

    def seen(of: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"cameras": [camera["name"] for camera in of["cameras"]]}
        for part in ("state", "action"):
            found[part] = [of[part]["dim"], list(of[part].get("names") or ())]
        return found

    for part, wanted in seen(first).items():
        if (got := seen(policy)[part]) != wanted:
            raise SinewError(f"--compare {name}: expected the {part} of the first policy {wanted}, got {got}")


# ----------------------------------------------------------------------------- the room


class TrialKeys(Keys):
    """The keys of a sitting. desk: of the trial that is due, which each one brings."""

    desk: Desk

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type] # the first trial brings it
        self.left = False

    def quit(self) -> None:
        self.left = True
        self.desk.loop.stop()

    def typed(self, text: str) -> None:
        self.desk.say("discard", "key", text)

    def press(self, key: str) -> None:
        from sinew.eval.trials.desk import RUNS, SET_UP

        desk = self.desk
        self.loop = desk.loop
        if self.typing is None and key in "spftd \r\n":
            if key in "sf":
                desk.say("success" if key == "s" else "failure", "key")
            elif key == "d" and desk.state not in (SET_UP, "over"):
                desk.loop.pause()
                self.typing = ""
            elif key in "\r\n":
                desk.keep()
            elif key == " " and desk.state == SET_UP:
                desk.go()
            elif key == " " and desk.state == RUNS:
                super().press(key)
            return
        super().press(key)


class JudgeFile(threading.Thread):
    """Reads what another program says of the trials, from its end on. desk: of the trial that is due."""

    desk: Desk

    def __init__(self, path: Path):
        super().__init__(name="sinew-judge", daemon=True)
        self.left = False
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            raise SinewError(f"--judge {path}: {error.strerror}") from error
        self._end = threading.Event()

    def close(self) -> None:
        self._end.set()
        self.join()
        os.close(self._file)

    def run(self) -> None:
        rest = b""
        while not self._end.wait(LOOK_S):
            try:
                rest += os.read(self._file, 65536)
            except BlockingIOError:  # a FIFO that nobody has written to for now
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self.take(line.decode("utf-8", "replace").strip())

    def take(self, line: str) -> None:
        """Do what a line says; what is not due is said, and does nothing."""
        word, _, note = line.partition(" ")
        done = False
        if word == "go":
            done = self.desk.go()
        elif word in ("success", "failure") or (word == "discard" and note.strip()):
            done = self.desk.say(word, "file", note.strip())
        elif word == "quit":
            self.left = done = True
            self.desk.loop.stop()
        elif word:
            terminal.say(f"--judge: expected go, success, failure, discard REASON or quit, got {line[:80]!r}")
            return
        if word and not done:
            terminal.say(f"--judge: {line[:80]!r} does nothing while the trial's state is: {self.desk.state}")


class _Room:
    """Where trials are played: the robot, the policies, and who may say something."""

    def __init__(
        self,
        stack: ExitStack,
        on: RobotFlags,
        lead: LeaderFlags,
        rigs: list[Rig],
        sitting: Sitting,
        trials: TrialFlags,
        waits: bool,
        keyboard: bool,
    ):
        self.on, self.rigs, self.sitting, self.waits = on, rigs, sitting, waits
        self.confirms = keyboard and waits
        self.machine = rigs[0].robot.machine
        self.kept = None if lead.frames is None else FrameKeeper(lead.frames, rigs[0].robot, stack)
        self.faults: list[str] = []
        self.complete = False
        self.keys: TrialKeys | None = None
        self.file: JudgeFile | None = None
        self.turn: Turn | None = None
        if len(rigs) > 1:
            _hide_log(stack, sitting.out / LOG)
        if trials.judge is not None:
            self.file = JudgeFile(trials.judge)
        if keyboard:
            self.keys = TrialKeys()
        elif len(rigs) == 1:
            terminal.log(logging.WARNING, "%(message)s")

    @property
    def left(self) -> bool:
        """Return True if somebody has ended the sitting."""
        return any(each is not None and each.left for each in (self.keys, self.file))

    def play(self) -> list[str]:
        """Play what is due; return what failed, a sentence each."""
        from sinew.eval.trials.desk import SET_UP

        with ExitStack() as stack:
            while (turn := self.sitting.due()) is not None and not self.left:
                first, self.turn = self.turn is None, turn
                self.sitting.note("begun", turn)
                with ExitStack() as own:
                    desk, episode_of = self._open(own, turn)
                    for each in (self.keys, self.file):
                        if each is not None:
                            each.desk = desk
                    if first:
                        self._listen(stack)
                    if not self._drive(desk):
                        if desk.state == SET_UP:
                            self.sitting.note("left", turn)
                        break
                    self.sitting.end(turn, episode_of())
                    self.report()
                    self._tell(turn, desk)
                if desk.verdict == "discard" and desk.by == "loop":
                    break
        self.complete = turn is None
        return self.faults

    def report(self) -> dict[str, Any] | None:
        """Write what was played so far, and return it."""
        from sinew.eval.trials.report import write_report

        return write_report(self.sitting, self.rigs[0].robot.rate, terminal.typed())

    def _listen(self, stack: ExitStack) -> None:
        if self.file is not None:
            self.file.start()
            stack.callback(self.file.close)
        if self.keys is not None:
            stack.enter_context(self.keys)
            stack.enter_context(terminal.drawn(self.picture, 8))

    def _open(self, own: ExitStack, turn: Turn) -> tuple[Desk, Any]:
        """Return a trial that is set up, and what makes an episode of it once it is over."""
        from sinew.eval.robot import SimulatedRobot
        from sinew.eval.runner import StepByStep
        from sinew.eval.trials.desk import Desk, SeededCalls, TrialTally, episode

        rig, variant = self.rigs[turn.variant], self.sitting.variants[turn.variant]
        if hasattr(self.machine, "set_up"):
            self.machine.set_up(turn.seed)
        calls = SeededCalls(rig.connect, turn.seed, variant.solver_steps)
        # A world that stands still between its steps is late for none of them.
        period = rig.settings.period / rig.settings.substeps
        pace = StepByStep(period) if isinstance(self.machine, SimulatedRobot) else None
        if self.kept is not None:
            self.kept.episode = turn.name
        loop = rig.loop(self.machine, calls, pace=pace, keep=self.kept)
        own.callback(loop.close)
        if simulated := isinstance(self.machine, SimulatedRobot):
            loop.prompt = self.on.prompt or self.machine.task
        journal = None if self.on.record is None else self.on.record / f"{turn.name}.jsonl"
        on = replace(self.on, record=journal)
        on.follow(own, loop, rig.robot, rig.settings, variant.target)
        on.reports(own, loop, rig.robot, rig.server, "")
        tally = TrialTally()
        desk = Desk(loop, tally, self.waits, self.confirms, self.on.ticks(rig.robot.rate))
        name = self.machine.adapter.task(self.machine.info) if simulated else loop.prompt
        size = int(rig.policy.get("chunk_size") or 0)
        if not self.confirms and self.waits:
            terminal.say(f"{self._where(turn)}; it waits for go")
        return desk, lambda: episode(turn, name, size, desk, calls)

    def _drive(self, desk: Desk) -> bool:
        """Let a trial go on until it is over; return False where it was ended before that."""
        from sinew.eval.trials.desk import OVER, RUNS

        if not self.waits:
            desk.go()
        loop, rig = desk.loop, self.rigs[self.turn.variant if self.turn else 0]
        while True:
            drive(loop, rig.robot, rig.policy, None)
            if loop.stopped:
                break
            desk.ask_robot()  # it has ended the run
            if desk.state == RUNS:  # and does not say how
                if not self.confirms:
                    desk.say("discard", "loop", "the robot ended the run and did not say how")
                    break
                desk.say("", "robot")
            if not self.confirms:
                break
        if desk.state != OVER:
            return False
        report = loop.report()
        if text := status.text_of(report.faults):
            self.faults.append(text)
        lost = status.problems({}, report.executed, report.held, False, report.unanswered)
        if lost and not self.confirms and desk.by != "file" and desk.verdict != "success":
            # Nobody saw it, and it is no failure of the policy's.
            desk.verdict, desk.by, desk.note = "discard", "loop", lost[0]
            self.faults += lost
        return True

    def _where(self, turn: Turn) -> str:
        if hasattr(self.machine, "set_up"):
            todo = f"scene {turn.scene}"
        elif turn.again:
            todo = f"set scene {turn.scene} up again, as it was"
        else:
            todo = f"set scene {turn.scene} up"
        return f"trial {turn.number} of {turn.total}: {todo}"

    def _tell(self, turn: Turn, desk: Desk) -> None:
        if self.keys is None:
            note = f" ({desk.note})" if desk.note else ""
            terminal.say(
                f"{self._where(turn)}: {desk.verdict}{note} after {desk.tally.steps} steps, says {desk.by}"
            )

    def picture(self) -> Panel:
        """Return what a person sees: nothing of it tells one policy from another."""
        from sinew.eval.trials.desk import JUDGED, SET_UP

        keys, turn = self.keys, self.turn
        assert keys is not None
        assert turn is not None
        desk, loop = keys.desk, keys.desk.loop
        facts = Table.grid(padding=(0, 2))
        facts.add_row("trial", Text(self._where(turn), style="bold"))
        facts.add_row("instruction", Text(loop.prompt or "-"))
        if desk.state == SET_UP:
            text, style, help_line = "waits", "yellow", "space begins   q stops"
        elif keys.typing is not None:
            text, style = f"discarded, because: {keys.typing}_", "bold"
            help_line = "Enter discards it   Esc goes back"
        elif desk.state == JUDGED:
            text, style = f"judged: {desk.verdict or 'not yet'} ({desk.by})", "bold"
            help_line = "Enter keeps it   s success   f failure   d discard   q stops"
        else:
            text, style = ("paused", "yellow") if loop.paused else ("runs", "green")
            help_line = "space pauses or goes on   s success   f failure   d discard   q stops"
        facts.add_row("state", Text(text, style=style))
        limit = "" if desk.limit is None else f" of {desk.limit / loop.settings.hz:g} s"
        facts.add_row("time", f"{desk.tally.steps / loop.settings.hz:.1f} s{limit}")
        return Panel(Group(facts, Text(help_line, style="dim")), title="sinew run --trials")


def _hide_log(stack: ExitStack, path: Path) -> None:
    """Write the log to a file: how long a policy is waited for tells which one it is."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(root.removeHandler, handler)
