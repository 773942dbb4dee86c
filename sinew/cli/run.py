"""``sinew run``: a policy drives a robot.

Space pauses and holds, or goes on; ``p`` changes the instruction; ``q`` stops.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators
from rich.table import Table
from sinew_client import ClientError
from sinew_client.control import Adapter, Cadence, Journal, Limits, Loop, MotionWatch, Settings, choose
from sinew_client.control.defaults import AUTO, HANDOVER, REPLAN
from sinew_client.errors import Refused
from sinew_client.history import History

from sinew.cli import status, terminal
from sinew.cli.options import RUNS, Runs, json_object
from sinew.cli.run_connection import (
    ASSIST_WHEN,
    assist_rule,
    check_guidance,
    conditioned,
    open_assist,
    open_connection,
)
from sinew.cli.run_robot import (
    choose_prompt,
    episodes_of,
    episodes_row,
    follow_episodes,
    refusal,
    robot_opener,
)
from sinew.cli.run_view import Keys, RunView
from sinew.core import SinewError
from sinew.signals import handled

SCHEMA = "sinew.run/1"


def run(
    target: str = "tcp://127.0.0.1:5555",
    /,
    *,
    robot: str = "dry",
    robot_options: str | None = None,
    cameras: Annotated[list[str] | None, Parameter(negative="")] = None,
    prompt: str = "",
    advantage: str | None = None,
    guidance_scale: float | None = None,
    hz: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    substeps: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    handover: str = HANDOVER,
    replan: str = REPLAN,
    motion: str | None = None,
    limits: Path | None = None,
    max_age: float | None = None,
    deadline: float = 2.0,
    stale: float = 0.5,
    watchdog: bool = True,
    finish: Annotated[bool, Parameter(negative="")] = False,
    future: Annotated[bool, Parameter(negative="")] = False,
    edge_adapter: Path | None = None,
    split: str | None = None,
    assist: str | None = None,
    assist_when: str = ASSIST_WHEN,
    assist_deadline: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 5.0,
    seconds: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    episodes: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    go: Annotated[bool, Parameter(negative="")] = False,
    record: Path | None = None,
    runs: Runs = RUNS,
) -> int:
    """Drive a robot with a policy: chunks become one command per control step, whatever the network does.

    Starts paused where there is a keyboard. Ends with a report of the cadence and, of gym:ENV, of the episodes. Exit
    status 3: answers failed by errors, or were missing at the end, or the robot never got a command; a late answer now
    and then, for which it held, is none of these. docs/control.md.

    Args:
        target: address of a server (tcp://host:port; tcp://A,tcp://B turns to the next one where one fails), or what is
            loaded here: a bundle, a folder of `sinew export`,
            a checkpoint or training run, a name of the hub.
        robot: dry (no hardware), blocks, pen or egg (embedded tasks), gym:ENV, module:Class (methods observe, act,
            hold; the current folder is searched first) or lerobot:TYPE.
        robot_options: JSON object, arguments of the robot's constructor or fields of LeRobot's configuration.
        cameras: POLICY=ROBOT, which of the robot's cameras is which of the policy's; repeatable.
        prompt: the instruction, of all episodes; if absent, of gym:ENV each episode's own, else the policy's.
        advantage: that the prompt of each request shall state, as positive; '' for none, the policy's usual one if
            absent.
        guidance_scale: of classifier-free guidance towards it, 0 to 100; 1, the advantage alone, if absent.
        hz: control rate; the policy's own, or the environment's, if absent.
        substeps: commands per control step, for faster actuators; they are interpolated.
        handover: auto, freeze, naive, aligned, ensemble[:M], aggregate[:MIX] or rtc[:GUIDANCE[:SCHEDULE[:BETA]]];
            +halt:LIMIT behind one stops the robot where a late chunk expects it elsewhere. auto: aligned where actions
            are targets (--motion, or the policy itself, says so), else freeze; the choice is printed with its reason.
        replan: when to ask: STEPS, full, queue:FRACTION (at most this part of a chunk is left) or
            disagreement:LIMIT,STEPS.
        motion: JSON object, what actions are measured from; {"kind": "absolute"} ...; as the policy states it if
            absent, {"kind": "as is"} for rows as they come.
        limits: .toml or .json with low, high, velocity, acceleration and still (the command at which the robot stands
            still, such as 0 of velocities) per joint; the policy's own if absent.
        max_age: seconds after its frame beyond which a row is not executed.
        deadline: seconds to wait for an answer.
        stale: seconds beyond which a frame is too old to act on.
        watchdog: hold the robot from another thread while its own methods block; --no-watchdog for one that must not be
            held while it observes.
        finish: after a failed request, execute the rows at hand instead of holding at once.
        future: tell the policy the state that the robot will have when the answer arrives.
        edge_adapter: a file; a small network that refines the newest chunk in every control step (docs/fleet.md).
        split: address of a server's context.FORM, which computes vision and prefix of the bundle whose head runs here.
        assist: address of a larger policy that is asked beside the one that is loaded here.
        assist_when: every:SECONDS since its last answer, disagreement:LIMIT, uncertainty:LIMIT; separated by commas.
        assist_deadline: seconds to wait for it.
        seconds: end after this long.
        episodes: of gym:ENV, end after so many.
        go: begin at once, also with a keyboard.
        record: file for the journal; `sinew client --replay FILE` repeats its decisions.
    """
    with ExitStack() as stack:
        try:
            rule = assist_rule(target, assist, assist_when)
            edge = None if edge_adapter is None else Adapter.read(edge_adapter)
            open_robot = robot_opener(robot, robot_options, cameras, episodes)  # before anything is loaded
            policy, about, connect = open_connection(target, runs, split)
            connect = conditioned(connect, about, advantage, guidance_scale)
            machine, instruction, rate = open_robot(policy)
            if hasattr(machine, "close"):
                stack.callback(machine.close)
            own = getattr(machine, "motion", None)
            try:
                chosen = choose(handover, json_object("--motion", motion), policy, edge is not None, own)
            except ValueError as error:
                raise SinewError(f"--{error}") from error
            check_guidance(chosen.handover, policy, about)
            dim = int(policy["action"]["dim"])
            rate = hz or rate or policy.get("control_hz")
            if not rate:
                raise SinewError("--hz: expected a rate; neither the policy nor the robot states one")
            given = choose_prompt(prompt, instruction, policy)
            found = Limits.read(limits, dim) if limits is not None else Limits.from_metadata(policy)
            if edge is not None:
                edge.check(policy, float(rate))
            settings = Settings(
                hz=float(rate), handover=chosen.handover, replan=replan, motion=chosen.motion,
                limits=found.to_dict() if found is not None else None, max_age=max_age, deadline=deadline,
                stale=stale, finish=finish, future=future, substeps=substeps,
                committed_rows=int(policy.get("committed_rows") or 0),
                refine=0 if edge is None else edge.form.max_age,
                # A far policy's chunks may be longer, and nobody knows them while it is not there.
                chunk_size=0 if assist is not None else int(policy.get("chunk_size") or 0), watchdog=watchdog,
            )  # fmt: skip
            assisted = None
            if assist is not None and rule is not None:
                connect = assisted = open_assist(assist, rule, assist_deadline, connect, policy, settings)
                stack.callback(assisted.close)
            loop = Loop(machine, connect, settings, dim, given, adapter=edge, history=History.of(policy))
            stack.callback(loop.close)
            follow_episodes(machine, loop.restart, prompt)
            if record is not None:
                said = {"advantage": advantage, "guidance_scale": guidance_scale}
                journal = Journal(record, settings, dim, robot=robot, target=target, prompt=given, **said)
                stack.callback(journal.close)
                loop.listeners.append(journal.put)
            watch = MotionWatch()
            if settings.motion is None:
                loop.listeners.append(watch.put)
            if handover == AUTO:
                terminal.console(stderr=True).print(str(chosen), soft_wrap=True, markup=False)
            cadence = _drive(loop, seconds, go)
        except Refused as error:
            raise SinewError(refusal(str(error), machine, policy)) from error
        except ClientError as error:
            raise SinewError(str(error)) from error
    result = {
        "schema": SCHEMA,
        "robot": robot,
        "settings": settings.to_dict(),
        "handover": str(chosen),
        **cadence.to_dict(),
        "prompt": prompt or loop.prompt,
        **episodes_of(machine),
    }
    if assisted is not None:
        result["assist"] = assisted.report()
    print_cadence(cadence, episodes_row(machine))
    if (fit := watch.fit()) is not None:
        terminal.console(stderr=True).print(fit.advice(), soft_wrap=True, markup=False)
        result["motion"] = asdict(fit)
    failed = status.problems(
        cadence.faults, cadence.executed, cadence.held, loop.stopped, cadence.unanswered
    ) + ([text] if assisted is not None and (text := status.text_of(assisted.faults.to_dict())) else [])
    terminal.emit(result | {"failed": failed})
    return status.ended(failed)


def _drive(loop: Loop, seconds: float | None, go: bool) -> Cadence:
    """Run the loop under its live view; without a terminal it begins at once."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    steps = None if seconds is None else max(1, round(seconds * loop.settings.hz))
    if steps is None and not interactive and not hasattr(loop.robot, "episodes"):
        raise SinewError("--seconds: expected a number where there is no keyboard to stop with")
    if not interactive:
        terminal.log(logging.WARNING, "%(message)s")
        return _run(loop, steps)
    if not go:
        loop.pause()
    with Keys(loop) as keys, RunView(loop, keys):
        return _run(loop, steps)


def _run(loop: Loop, steps: int | None) -> Cadence:
    # A signal ends the run as ``q`` does: after the present tick, with the robot holding and the journal complete.
    with handled((signal.SIGTERM, signal.SIGHUP), lambda *_: loop.stop()):
        try:
            return loop.run(steps)
        except KeyboardInterrupt:  # the robot holds already: the loop has seen to that
            loop.stop()
            return loop.report()


def print_cadence(cadence: Cadence, first: Sequence[tuple[str, str]] = ()) -> None:
    table = Table(title="cadence", show_header=False)
    for name, text in [*first, *cadence.rows()]:
        table.add_row(name, text)
    terminal.console(stderr=True).print(table)
