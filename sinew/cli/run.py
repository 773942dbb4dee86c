"""``sinew run``: a policy drives a robot.

Space pauses and holds, or goes on; ``p`` changes the instruction; ``t`` takes over, or gives back; ``q`` stops.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter
from sinew_client.control import Adapter, Cadence, Loop, MotionWatch, Settings, choose
from sinew_client.control.defaults import AUTO, HANDOVER, REPLAN
from sinew_client.history import History

from sinew.auth import api_key_of
from sinew.cli import status, terminal
from sinew.cli.options import RUNS, Count, Flag, Positive, Runs, changed, motion_of
from sinew.cli.run_connection import (
    ASSIST_TIMEOUT,
    ASSIST_WHEN,
    assist_rule,
    check_guidance,
    conditioned,
    open_assist,
    open_connection,
)
from sinew.cli.run_leader import ENVELOPE, LEADER, EnvelopeFlags, FrameKeeper, LeaderFlags
from sinew.cli.run_robot import ROBOT, Driven, RobotFlags, drive, episodes_of, episodes_row
from sinew.cli.run_stream import STREAM, StreamFlags, run_stream
from sinew.cli.run_view import Keys, RunView
from sinew.core import SinewError

SCHEMA = "sinew.run/1"


@Parameter(name="*", group="Chunks")
@dataclass(frozen=True)
class ChunkFlags:
    """How chunks are asked for and executed.

    Attributes:
        substeps: commands per control step, for faster actuators; they are interpolated.
        handover: auto, freeze, naive, aligned, ensemble[:M], aggregate[:MIX] or rtc[:GUIDANCE[:SCHEDULE[:BETA]]];
            +halt:LIMIT behind one stops the robot where a late chunk expects it elsewhere. auto: aligned where actions
            are targets (--motion, or the policy itself, says so), else freeze; the choice is printed with its reason.
        replan: when to ask: STEPS, full, queue:FRACTION (at most this part of a chunk is left) or
            disagreement:LIMIT,STEPS.
        max_age: seconds after its frame beyond which a row is not executed.
        timeout: seconds to wait for an answer.
        finish: after a failed request, execute the rows at hand instead of holding at once.
        future: tell the policy the state that the robot will have when the answer arrives.
        edge_adapter: a file; a small network that refines the newest chunk in every control step (docs/fleet.md).
        split: address of a server's context.FORM, which computes vision and prefix of the bundle whose head runs here.
        assist: address of a larger policy that is asked beside the one that is loaded here.
        assist_when: every:SECONDS since its last answer, disagreement:LIMIT, uncertainty:LIMIT; separated by commas.
        assist_timeout: seconds to wait for it.
        frames_as: how frames travel to a server: raw; a JPEG quality from 1 to 95; or auto, JPEG 90 where requests
            spend more than 50 ms on the network and it helps. What was sent, and why, is in the report.
        go: begin at once, also with a keyboard.
        advantage: that the prompt of each request shall state, as positive; '' for none, the policy's usual one if
            absent.
        guidance_scale: of classifier-free guidance towards it, 0 to 100; 1, the advantage alone, if absent.
    """

    substeps: Count = 1
    handover: str = HANDOVER
    replan: str = REPLAN
    max_age: float | None = None
    timeout: float = 2.0
    finish: Flag = False
    future: Flag = False
    edge_adapter: Path | None = None
    split: str | None = None
    assist: str | None = None
    assist_when: str = ASSIST_WHEN
    assist_timeout: Positive = ASSIST_TIMEOUT
    frames_as: str = "raw"
    go: Flag = False
    advantage: str | None = None
    guidance_scale: float | None = None


CHUNKS = ChunkFlags()


def run(
    target: str = "tcp://127.0.0.1:5555",
    /,
    *,
    on: RobotFlags = ROBOT,
    by: ChunkFlags = CHUNKS,
    streaming: StreamFlags = STREAM,
    api_key_file: Path | None = None,
    lead: LeaderFlags = LEADER,
    envelope: EnvelopeFlags = ENVELOPE,
    runs: Runs = RUNS,
) -> int:
    """Drive a robot with a policy: chunks become one command per control step, whatever the network does.

    With --stream no chunk is waited for. Chunks start paused where there is a keyboard. Ends with a report of the
    cadence and, of gym:ENV, of the episodes. Exit status 3: answers failed by errors, or were missing at the end, or
    the robot never got a command; a late answer now and then, for which it held, is none of these. docs/control.md.

    Args:
        target: address of a server (tcp://host:port; tcp://A,tcp://B turns to the next one where one fails), or what is
            loaded here: a bundle, a folder of `sinew export`, a checkpoint or training run, a name of the hub.
        api_key_file: a file with the key of servers; SINEW_API_KEY in the environment if absent.
    """
    key = api_key_of(api_key_file)
    if streaming.stream:
        if (flag := changed(by) or changed(lead) or changed(envelope)) is not None:
            raise SinewError(f"{flag}: expected none with --stream")
        return run_stream(target, on, streaming, key, runs)
    if (flag := changed(streaming)) is not None:
        raise SinewError(f"{flag}: expected --stream beside it, got none")
    with ExitStack() as stack:
        rule = assist_rule(target, by.assist, by.assist_when, by.assist_timeout)
        lead.check()
        edge = None if by.edge_adapter is None else Adapter.read(by.edge_adapter)
        open_robot = on.opener(by.substeps)  # before anything is loaded
        policy, about, connect = open_connection(target, runs, by.split, key, by.frames_as)
        server, sending = connect, getattr(connect, "frames", None)
        connect = conditioned(connect, about, by.advantage, by.guidance_scale)
        robot = on.opened(stack, open_robot, policy)
        own = getattr(robot.machine, "motion", None)
        try:
            chosen = choose(by.handover, motion_of(on.motion), policy, edge is not None, own)
        except ValueError as error:
            raise SinewError(f"--{error}") from error
        check_guidance(chosen.handover, policy, about)
        if edge is not None:
            edge.check(policy, robot.rate)
        settings = Settings(
            hz=robot.rate, handover=chosen.handover, replan=by.replan, motion=chosen.motion,
            limits=lead.limits(robot, chosen.motion, policy), max_age=by.max_age, deadline=by.timeout,
            stale=on.stale, finish=by.finish, future=by.future, substeps=by.substeps,
            committed_rows=int(policy.get("committed_rows") or 0),
            refine=0 if edge is None else edge.form.max_age,
            # A far policy's chunks may be longer, and nobody knows them while it is not there.
            chunk_size=0 if by.assist is not None else int(policy.get("chunk_size") or 0), watchdog=on.watchdog,
            **envelope.settings(),
        )  # fmt: skip
        machine, takeover = lead.opened(stack, robot, settings, policy)
        assisted = None
        if by.assist is not None and rule is not None:
            connect = assisted = open_assist(
                by.assist, rule, by.assist_timeout, connect, policy, settings, key
            )
            stack.callback(assisted.close)
        history = History.of(policy)
        kept = None if lead.frames is None else FrameKeeper(lead.frames, robot, stack)
        loop = Loop(
            machine, connect, settings, robot.dim, robot.prompt, adapter=edge, history=history,
            takeover=takeover, keep=kept,
        )  # fmt: skip
        stack.callback(loop.close)
        said = {"advantage": by.advantage, "guidance_scale": by.guidance_scale}
        on.follow(stack, loop, robot, settings, target, **said)
        on.reports(stack, loop, robot, server, key)
        watch = MotionWatch()
        if settings.motion is None:
            loop.listeners.append(watch.put)
        if by.handover == AUTO:
            terminal.say(str(chosen))
        cadence = _drive(loop, robot, policy, on.ticks(robot.rate), by.go, lead.takeover_key)
    result = {
        "schema": SCHEMA,
        "robot": on.robot,
        "settings": settings.to_dict(),
        "handover": str(chosen),
        **cadence.to_dict(),
        "prompt": on.prompt or loop.prompt,
        **episodes_of(robot.machine),
    }
    rows = episodes_row(robot.machine)
    if assisted is not None:
        result["assist"] = assisted.report()
        rows = [*rows, ("assist", assisted.text())]
    if kept is not None:
        rows = [*rows, kept.row()]
    if sending is not None:
        result["frames"] = sending.text
        rows = [*rows, ("frames", sending.text)]
    table = terminal.table("cadence", "", "", rows=[*rows, *cadence.rows()], show_header=False)
    terminal.console(stderr=True).print(table)
    if (fit := watch.fit()) is not None:
        terminal.say(fit.advice())
        result["motion"] = asdict(fit)
    failed = status.problems(
        cadence.faults, cadence.executed, cadence.held, loop.stopped, cadence.unanswered
    ) + ([text] if assisted is not None and (text := status.text_of(assisted.faults.to_dict())) else [])
    terminal.emit(result | {"failed": failed})
    return status.ended(failed)


def _drive(
    loop: Loop, robot: Driven, policy: dict[str, Any], steps: int | None, go: bool, key: str
) -> Cadence:
    """Run the loop under its live view; without a terminal it begins at once."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if steps is None and not interactive and not hasattr(loop.robot, "episodes"):
        raise SinewError("--seconds: expected a number where there is no keyboard to stop with")
    if not interactive:
        terminal.log(logging.WARNING, "%(message)s")
        drive(loop, robot, policy, steps)
        return loop.report()
    if not go:
        loop.pause()
    with Keys(loop, key) as keys, terminal.drawn(RunView(loop, keys).picture, 8):
        drive(loop, robot, policy, steps)
    return loop.report()
