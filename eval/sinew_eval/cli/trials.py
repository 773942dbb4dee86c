"""``sinew trials``: compare policies on one robot, scene by scene and blind. A person starts, judges and confirms
each trial.

The space key begins, pauses and continues a trial. ``s``, ``f`` and ``d`` give the verdict (success, failure,
discard), Enter confirms it, and ``q`` stops.
"""

from __future__ import annotations

import inspect
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators
from rich.console import Group
from rich.panel import Panel
from rich.text import Text
from sinew.cli import status, terminal
from sinew.cli.options import (
    CAMERAS,
    ROBOT_ENGINE,
    SETTING_FLAGS,
    Count,
    Flag,
    RobotEngine,
    Runs,
    SettingFlags,
    Texts,
    changed,
    json_object,
    motion_of,
)
from sinew.cli.run_connection import asking
from sinew.cli.run_leader import ENVELOPE, LEADER, EnvelopeFlags, FrameKeeper, LeaderFlags
from sinew.cli.run_rig import CHUNKS, ChunkFlags, RunContext, open_rig
from sinew.cli.run_robot import EMBEDDED, ROBOT, RobotFlags, drive, of_robot
from sinew.cli.run_view import Keys
from sinew.core import SinewError
from sinew_client.auth import api_key_of
from sinew_client.control.listeners.keep import Keep
from sinew_client.signals import handled
from sinew_client.target import addresses_of

from sinew_eval.cli.eval import print_report, variant_of

if TYPE_CHECKING:
    from sinew_eval.episodes.runner import Episode
    from sinew_eval.episodes.settings import Variant
    from sinew_eval.trials.sitting import PendingTrial, TrialSession

KEYS = {"s": "success", "f": "failure", " ": "go", "\r": "keep", "\n": "keep", "q": "quit"}
# Key: state of the trial. Value: the help line, which lists the keyboard keys of this state.
HELP = {
    "waits": "space begins   q stops",
    "runs": "space pauses or continues   s success   f failure   d discard   q stops",
    "is judged": "Enter keeps it   s success   f failure   d discard   q stops",
}
# The option --compare may change these options.
COMPARABLE_SETTINGS = (
    "replan",
    "handover",
    "solver_steps",
    "dtype",
    "device",
    "engine",
)
MAX_SCENES = 999  # largest number of scenes
# Options that define how a trial is driven and when it ends. They are equal for all trials of a session.
LOOP_OPTIONS = ("hz", "seconds", "prompt", "stale")
BY_CHUNKS = ("substeps", "max_age", "finish", "future", "advantage", "guidance_scale")


@Parameter(name="*", group="Trials")
@dataclass(frozen=True)
class TrialFlags:
    """Options for trials of one policy, or of several policies in one session.

    Attributes:
        scenes: Number of scenes. Every policy has one trial in each. A person starts each trial and judges it. A
            robot can do so itself, as simulated ones do: `set_up(seed)` prepares a scene, and `success` is True,
            False, or None while the trial runs.
        out: Folder with one line for each trial. The same command continues an interrupted run. `sinew leaderboard`
            reads the folder.
        compare: Another policy, or settings of the first one as KEY=VALUE,... (replan, handover, engine ...).
            Repeatable. All meet the same scenes in random order, and nothing shows which one drives.
        judge: File or FIFO to which another program writes lines: go, success, failure, discard REASON, quit.
        seed: Seed of the first scene. It sets the noise of the chunks and the scene of a simulated robot.
        order: Number that determines the order of the trials. Default: a random number, which is stored.
        sequential: Also end when a sequential test shows a difference between two policies. Without this flag, all
            scenes are played and no result is shown before the last one.
    """

    scenes: Count
    out: Path
    compare: Texts = ()
    judge: Path | None = None
    seed: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 5000
    order: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None
    sequential: Flag = False


def trials(
    target: str = "tcp://127.0.0.1:5555",
    /,
    *,
    plan: TrialFlags,
    on: RobotFlags = ROBOT,
    by: ChunkFlags = CHUNKS,
    lead: LeaderFlags = LEADER,
    envelope: EnvelopeFlags = ENVELOPE,
    runs: RobotEngine = ROBOT_ENGINE,
    api_key_file: Path | None = None,
    _settings: SettingFlags = SETTING_FLAGS,
) -> int:
    """Compare policies on one robot, blind and scene by scene.

    A person sets up each scene, starts each trial and judges it. Nothing shows which policy drives. The run ends with a
    report. The exit status is 3 if answers failed with errors, or if the robot never got a command.

    `sinew trials --settings` lists the settings that have no flag. Use them with --set NAME=VALUE or in a file
    (--config FILE.toml, table [trials]). The pages "Drive a robot" and
    "Trials on a robot" of the documentation explain these settings.

    Args:
        target: Policy that drives the robot, as for `sinew run`.
        api_key_file: File with the key of the servers. Default: SINEW_API_KEY in the environment.
    """
    key = api_key_of(api_key_file)
    if (count := plan.scenes) > MAX_SCENES:
        raise SinewError(f"--scenes: expected at most {MAX_SCENES}, got {count}")
    driven = changed(replace(lead, frames=None)) or changed(
        replace(ChunkFlags(), assist=by.assist, split=by.split)
    )
    if on.episodes is not None or driven:
        raise SinewError(
            f"{driven or '--episodes'}: not supported in trials, because one policy drives each trial alone; omit it"
        )
    from sinew_eval.episodes import episode_log
    from sinew_eval.episodes.settings import Task, Variant
    from sinew_eval.trials.report import write_page
    from sinew_eval.trials.sitting import TrialSession

    with ExitStack() as stack:
        asked, open_robot, rigs = _asked(target, by, plan, runs), on.opener(by.substeps), list[RunContext]()
        variants = list[Variant]()

        def robot_of(policy: Any) -> Any:
            if not rigs:
                return on.opened(stack, open_robot, policy)
            first = rigs[0].plan
            _same_robot(first.policy, policy, plan.compare[len(rigs) - 1], on.kinematics is not None)
            return first.robot

        for variant in asked:
            own = replace(by, handover=variant.handover, replan=variant.show("replan"))
            chosen, here = runs, not addresses_of(variant.target)
            if here:
                engine = variant.engine or "auto"
                chosen = replace(runs, engine=engine, dtype=variant.dtype, device=variant.device)
            rigs.append(rig := open_rig(variant.target, on, own, lead, envelope, chosen, key, robot_of))
            # For a server, record no engine, because the server may load another engine during the session.
            ran: dict[str, Any] = rig.about if here else {"engine": None, "device": "cpu"}
            made = replace(variant, engine=ran["engine"], device=str(ran["device"]))
            variants.append(replace(made, handover=rig.plan.choice.handover))
        motion, options = motion_of(on.motion), json_object("--robot-options", on.robot_options)
        name = EMBEDDED.get(on.robot, on.robot).removeprefix("gym:")
        task = Task(name, options, realtime=True, motion=dict(motion) if motion else None)
        room = TrialSetup(stack, on, by, lead, plan, rigs, key)
        plan.out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(episode_log.sole(plan.out, "wait until that session has ended"))
        rules = {name: getattr(on, name) for name in LOOP_OPTIONS} | {
            name: getattr(by, name) for name in BY_CHUNKS
        }
        sitting = TrialSession(plan.out, task, variants, count, plan.seed, plan.order, plan.sequential, rules)
        failed = room.play(sitting)
        record, due = room.report(sitting), sitting.due()
    if due is None and record is not None:
        print_report(record)
        terminal.console().print(record["plan"]["said"])
        terminal.say(f"wrote {write_page(sitting, record, lead.frames)}")
    elif due is not None:
        left = due.total - due.number + 1
        terminal.say(f"{left} of {due.total} trials remain; run the same command to continue from {plan.out}")
    terminal.emit({**(record if due is None and record else {}), "complete": due is None, "failed": failed})
    return status.ended(failed)


def _asked(target: str, by: ChunkFlags, plan: TrialFlags, runs: Runs) -> list[Variant]:
    from sinew_eval.episodes.settings import parse_replan
    from sinew_eval.episodes.variants import variants

    for text in plan.compare:
        names = [
            part.partition("=")[0] for part in text.split(",") if "=" in part and not Path(text).exists()
        ]
        if other := [name for name in names if name.replace("-", "_") not in COMPARABLE_SETTINGS]:
            raise SinewError(
                f"--compare: expected a policy, or settings of {', '.join(COMPARABLE_SETTINGS)}, got {other[0]}"
            )
    try:
        base = variant_of(target, runs, CAMERAS, replan=parse_replan(by.replan), handover=by.handover)
    except ValueError as error:
        raise SinewError(f"--replan: {error}") from None
    return variants(base, (), plan.compare)


def _same_robot(first: Mapping[str, Any], policy: Mapping[str, Any], name: str, posed: bool) -> None:
    """Check that two policies use the same observations and actions.

    Args:
        first: Metadata of the first policy.
        policy: Metadata of another policy.
        name: Name of the other policy, for messages.
        posed: True if the actions are poses, whose reference must also be equal.

    Raises:
        SinewError: The policies differ.
    """

    def seen(by: Mapping[str, Any]) -> dict[str, Any]:
        about: dict[str, Any] = {
            part: {key: by[part].get(key) for key in ("dim", "names", "units")}
            for part in ("state", "action")
        }
        about["cameras"] = sorted(camera["name"] for camera in by["cameras"])
        return {**about, "motion": by.get("motion")} if posed else about

    wanted, got = seen(first), seen(policy)
    for part in (part for part in wanted if wanted[part] != got[part]):
        raise SinewError(
            f"--compare {name}: expected the {part} of the first policy, {wanted[part]}, got {got[part]}"
        )


class TrialSetup(Keys):
    """Everything that trials are played with: the robot, the policies, and the keyboard."""

    turn: PendingTrial

    def __init__(
        self,
        stack: ExitStack,
        on: RobotFlags,
        by: ChunkFlags,
        lead: LeaderFlags,
        flags: TrialFlags,
        rigs: list[RunContext],
        key: str,
    ):
        from sinew_eval.trials.desk import VerdictInput

        super().__init__(None)  # type: ignore[arg-type] # each trial has its own loop
        self.on, self.rigs, self.key = on, rigs, key
        self.machine: Any = rigs[0].plan.robot
        self.scenes = rigs[0].plan.facts.scenes
        self.alone = self.scenes is not None
        if self.scenes is not None:
            try:
                inspect.signature(self.scenes.set_up).bind(0)
            except TypeError as error:
                raise SinewError(
                    f"robot: expected a method set_up(seed), which prepares a scene: {error}"
                ) from None
        self.keyboard = sys.stdin.isatty() and sys.stdout.isatty()
        waits = (self.keyboard or flags.judge is not None) and not by.go
        if not (waits or self.alone):
            raise SinewError(
                "trials: expected a keyboard, --judge FILE, or a robot that prepares its scenes and judges itself"
                f" (set_up, success), got {'go=true' if by.go else 'a standard input that is not a terminal'}"
            )
        limit = on.ticks(rigs[0].plan.settings.hz)
        if limit is None and not (self.keyboard or self.alone):
            raise SinewError(
                "--seconds: pass the longest time of a trial, because there is no keyboard to end a trial"
            )
        self.desk = VerdictInput(waits, self.keyboard and waits, limit, flags.judge)
        stack.callback(self.desk.close)
        self.frame_keeper = None if lead.frames is None else FrameKeeper(lead.frames, rigs[0].plan, stack)

    def play(self, sitting: TrialSession) -> list[str]:
        """Play the remaining trials of a session. Returns one sentence for each failure."""
        from sinew_eval.trials.desk import DISCARD, OVER

        failed: list[str] = []
        with ExitStack() as stack:
            if len(self.rigs) > 1:
                # The waiting time can reveal the policy. Write the log to a file, so that the judge does not see it.
                handler, root = logging.FileHandler(sitting.out / "run.log"), logging.getLogger()
                handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
                root.addHandler(handler)
                stack.callback(handler.close)
                stack.callback(root.removeHandler, handler)
            elif not self.keyboard:
                terminal.log(logging.WARNING, "%(message)s")
            while (turn := sitting.due()) is not None and not self.desk.left:
                first, self.turn = self.loop is None, turn
                sitting.begin(turn)
                with ExitStack() as own:
                    episode_of = self._set_up(own, sitting)
                    if first and self.keyboard:
                        stack.enter_context(self)
                        stack.enter_context(terminal.drawn(self.picture, 8))
                    failed += self._drive(self.rigs[turn.variant])
                    if self.desk.state != OVER:
                        break
                    sitting.end(turn, episode := episode_of())
                self.report(sitting)
                self._tell(
                    f"{self.desk.verdict} after {episode.steps} steps ({self.desk.by}) {self.desk.note}"
                )
                if (self.desk.verdict, self.desk.by) == (DISCARD, "loop"):
                    break
        return failed

    def report(self, sitting: TrialSession) -> dict[str, Any] | None:
        """Write the report of all trials so far, and return it."""
        from sinew_eval.trials.report import write_report

        return write_report(sitting, self.rigs[0].plan.settings.hz, terminal.typed())

    def _set_up(self, own: ExitStack, sitting: TrialSession) -> Callable[[], Episode]:
        """Prepare a trial. Returns a function that builds its episode when the trial is over."""
        from sinew_eval.episodes.robot import SimulatedRobot
        from sinew_eval.episodes.runner import StepByStep
        from sinew_eval.trials.desk import scene_noise

        # Discard a reason that was typed for the previous trial.
        turn, machine, self.typing = self.turn, self.machine, None
        rig, variant = self.rigs[turn.variant], sitting.variants[turn.variant]
        if self.scenes is not None:
            # No loop handles signals yet. Exit with SystemExit, so that open resources are closed.
            with (
                handled((signal.SIGTERM, signal.SIGHUP), lambda number, _: sys.exit(128 + number)),
                of_robot(),
            ):
                self.scenes.set_up(turn.seed)
        latencies: list[float] = []
        connect = asking(rig.connect, scene_noise(turn.seed, variant.solver_steps), latencies)
        simulated = isinstance(machine, SimulatedRobot)
        # A simulation that waits between its steps is never late, so its pace must not skip steps.
        pace = StepByStep(rig.plan.settings.period / rig.plan.settings.substeps) if simulated else None
        if self.frame_keeper is not None:
            self.frame_keeper.episode = sitting.take(turn.name)
        listeners = [] if self.frame_keeper is None else [Keep(self.frame_keeper)]
        driving = own.enter_context(rig.run(connect, pace=pace, listeners=listeners))
        self.loop = loop = driving.loop
        loop.prompt = self.on.prompt or rig.plan.facts.task() or loop.prompt
        task = machine.adapter.task(machine.info) if simulated else loop.prompt
        journal = None if self.on.record is None else self.on.record / f"{turn.name}.jsonl"
        on = replace(self.on, record=journal)
        on.follow(driving, variant.target)
        on.reports(driving, rig.server, self.key)
        self.desk.begin(loop)
        if self.desk.waits:
            self._tell("waits for go")
        return lambda: self.desk.episode(turn, task, int(rig.plan.policy.get("chunk_size") or 0), latencies)

    def _drive(self, rig: RunContext) -> list[str]:
        """Run a trial until it is over or the session is stopped. Returns one sentence for each failure."""
        loop = self.loop
        while not loop.stopped:
            drive(loop, rig.plan.robot, rig.plan.policy, None)
            if not loop.stopped:
                self.desk.ended()
        report = loop.report()
        faults = status.text_of(report.faults)
        lost = status.problems({}, report.executed, report.held, False, report.unanswered)
        if lost:
            self.desk.lost(lost[0])
        return [*([faults] if faults else []), *(lost if self.desk.by == "loop" else [])]

    def quit(self) -> None:
        self.desk.take("quit", "key")

    def typed(self, text: str) -> None:
        self.desk.take(f"discard {text}", "key")

    def press(self, key: str) -> None:
        from sinew_eval.trials.desk import JUDGED, RUNS

        if self.typing is not None or (key == " " and self.desk.state == RUNS):
            super().press(key)
        elif key == "d" and self.desk.state in (RUNS, JUDGED):
            self.loop.pause()
            self.typing = ""
        else:
            self.desk.take(KEYS.get(key, ""), "key")

    @property
    def _where(self) -> str:
        turn = self.turn
        todo = f"scene {turn.scene}" if self.alone else f"set scene {turn.scene} up"
        again = " again, same as before" if turn.again and not self.alone else ""
        return f"trial {turn.number} of {turn.total}: {todo}{again}"

    def _tell(self, text: str) -> None:
        if not self.keyboard:
            terminal.say(f"{self._where}: {text}".strip())

    def picture(self) -> Panel:
        """Return the panel for the judge. It does not reveal which policy runs."""
        desk, loop = self.desk, self.loop
        limit = "" if self.on.seconds is None else f" of {self.on.seconds:g} s"
        status_text = f"{desk.state} {desk.verdict} {desk.by and f'({desk.by})'}".strip()
        status_text = "is paused" if status_text == "runs" and loop.controller.paused else status_text
        rows = [
            (f"{self._where}\n", "bold"),
            (f"instruction  {loop.prompt}\n", ""),
            (f"time         {desk.tally.steps / loop.settings.hz:.1f} s{limit}\n", ""),
            (f"the trial    {status_text}\n", "green" if status_text == "runs" else "bold yellow"),
        ]
        help_line = HELP.get(desk.state, "")
        if self.typing is not None:
            rows.append((f"discarded, because  {self.typing}_\n", "bold"))
            help_line = "Enter discards it   Esc goes back"
        return Panel(Group(Text.assemble(*rows), Text(help_line, style="dim")), title="sinew trials")
