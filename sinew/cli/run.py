"""``sinew run``: drives a robot with a policy.

The space key pauses, so that the robot holds, or continues. ``p`` changes the instruction, ``t`` takes over or gives
back, and ``q`` stops.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sinew_client.auth import api_key_of
from sinew_client.control import Cadence, Keep, MotionWatch
from sinew_client.control.defaults import AUTO
from sinew_client.control.listeners.views import ViewRefresh
from sinew_client.control.run import Run, RunPlan

from sinew.cli import status, terminal
from sinew.cli.options import ROBOT_ENGINE, SETTING_FLAGS, RobotEngine, SettingFlags, changed
from sinew.cli.run_connection import assist_rule, open_assist
from sinew.cli.run_leader import ENVELOPE, LEADER, EnvelopeFlags, FrameKeeper, LeaderFlags
from sinew.cli.run_rig import CHUNKS, ChunkFlags, open_rig
from sinew.cli.run_robot import ROBOT, RobotFlags, drive, episodes_of, episodes_row
from sinew.cli.run_stream import STREAM, StreamFlags, run_stream
from sinew.cli.run_view import Keys, RunView
from sinew.core import SinewError

if TYPE_CHECKING:
    from sinew_client.arm.takeover import Takeover

SCHEMA = "sinew.run/1"


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
    runs: RobotEngine = ROBOT_ENGINE,
    _settings: SettingFlags = SETTING_FLAGS,
) -> int:
    """Drive a robot with a policy. Sinew sends one command, or holds the robot, in each control step.

    If there is a keyboard, the run begins paused. It ends with a report of the control rate and of the episodes. The
    exit status is 3 if answers failed or were missing at the end, or if the robot never got a command.

    This help shows the common flags. `sinew run --settings` lists all other settings. Use them with --set NAME=VALUE
    or in a file (--config FILE.toml, table [run]).

    Args:
        target: Policy that drives the robot: a server's address (tcp://HOST:PORT, or tcp://A,tcp://B to switch when
            one fails), a bundle, a folder of `sinew export`, a checkpoint or training run, or a hub name.
        api_key_file: File with the key of the servers. Default: SINEW_API_KEY in the environment.
    """
    key = api_key_of(api_key_file)
    if streaming.stream:
        if (flag := changed(by) or changed(lead) or changed(envelope)) is not None:
            raise SinewError(f"{flag}: expected none with --stream")
        return run_stream(target, on, streaming, key, runs)
    if (flag := changed(streaming)) is not None:
        raise SinewError(f"{flag} needs --stream")
    views = ViewRefresh.parse(by.refresh) if by.refresh else None
    with ExitStack() as stack:
        rule = assist_rule(target, by.assist, by.assist_when, by.assist_timeout)
        lead.check()
        open_robot = on.opener(by.substeps)  # checks the flags before the policy is loaded
        rig = open_rig(
            target, on, by, lead, envelope, runs, key, lambda policy: on.opened(stack, open_robot, policy)
        )
        plan, facts = rig.plan, rig.plan.facts
        machine, takeover = lead.opened(stack, plan)
        connect, assisted = rig.connect, None
        if by.assist is not None and rule is not None:
            connect = assisted = open_assist(
                by.assist, rule, by.assist_timeout, connect, plan.policy, plan.settings, key
            )
            stack.callback(assisted.close)
        keeper = None if lead.frames is None else FrameKeeper(lead.frames, plan, stack)
        if views is not None:
            views.check([camera["name"] for camera in plan.policy["cameras"]])
        listeners = [
            each for each in (takeover, None if keeper is None else Keep(keeper), views) if each is not None
        ]
        driving = stack.enter_context(rig.run(connect, robot=machine, listeners=listeners))
        loop = driving.loop
        on.follow(driving, target, advantage=by.advantage, guidance_scale=by.guidance_scale)
        on.reports(driving, rig.server, key)
        watch = MotionWatch()
        if plan.settings.motion is None:
            loop.controller.listeners.append(watch.put)
        if by.handover == AUTO:
            terminal.say(str(plan.choice))
            if plan.choice.replan_reason:
                terminal.say(f"requests {plan.choice.replan}: {plan.choice.replan_reason}")
        cadence = _drive(driving, plan, on.ticks(plan.settings.hz), by.go, takeover, lead.takeover_key)
    result = {
        "schema": SCHEMA,
        "robot": on.robot,
        "settings": plan.settings.to_dict(),
        "handover": str(plan.choice),
        **cadence.to_dict(),
        "prompt": on.prompt or loop.prompt,
        **episodes_of(facts),
    }
    rows = episodes_row(facts)
    if assisted is not None:
        result["assist"] = assisted.report()
        rows = [*rows, ("assist", assisted.text())]
    if keeper is not None:
        rows = [*rows, keeper.row()]
    if views is not None:
        result["refresh"] = views.text()
        rows = [*rows, ("refresh", views.text())]
    if rig.frames is not None:
        result["frames"] = rig.frames.text
        rows = [*rows, ("frames", rig.frames.text)]
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
    driving: Run, plan: RunPlan, steps: int | None, go: bool, takeover: Takeover | None, key: str
) -> Cadence:
    """Drive the robot with the live view. Without a terminal, there is no view, and the run begins at once."""
    loop = driving.loop
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if steps is None and not interactive and plan.facts.episodes is None:
        raise SinewError("--seconds: expected a number where there is no keyboard to stop with")
    if not interactive:
        terminal.log(logging.WARNING, "%(message)s")
        drive(driving, plan.robot, plan.policy, steps)
        return loop.report()
    if not go:
        loop.pause()
    with Keys(loop, takeover, key) as keys, terminal.drawn(RunView(loop, keys).picture, 8):
        drive(driving, plan.robot, plan.policy, steps)
    return loop.report()
