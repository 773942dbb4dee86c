"""``sinew run --stream``: sends the robot's state in every control step, and frames when there are new ones, and
receives waypoints (future commands).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from cyclopts import Parameter, validators
from sinew_client.control import Planner, Stream, StreamController, StreamReport
from sinew_client.control.defaults import usual_guidance
from sinew_client.control.planner import newest_of, open_planner
from sinew_client.control.reaction import LOOPS, histogram
from sinew_client.control.run import Run, RunPlan
from sinew_client.control.stream import Watching
from sinew_client.streams import StreamLink
from sinew_client.target import addresses_of

from sinew.cli import status, terminal
from sinew.cli.options import Flag, Positive, Runs, Setting
from sinew.cli.run_connection import ask_server, load_here
from sinew.cli.run_robot import RobotFlags, drive, episodes_of, episodes_row, plan_run
from sinew.cli.run_stream_view import StreamView, report_table
from sinew.core import SinewError

SCHEMA = "sinew.stream/1"

log = logging.getLogger(__name__)


@Parameter(name="*", group="Stream")
@dataclass(frozen=True)
class StreamFlags:
    """A stream in place of chunks. The policy's prefix and its head run at the same time on the newest data.

    Attributes:
        stream: Drive with a stream instead of single chunks. The server needs its native protocol.
        camera_hz: Frames per second that the stream sends.
        rtc: How a new chunk continues the running one: guided, no-jacobian, ramp, or none (the new one replaces the
            old one at once). auto prints its choice for this policy with the reason. At present it takes none.
        interpolation: Interpolation between the actions of whole chunks, if hz differs from the policy's rate.
        fusion: How overlapping action windows are merged: latest_only, average, weighted_average, conservative,
            mix:WEIGHT or ramp:ROWS.
        planner: Callable, as module:name, that takes (instruction, observation) and returns a new instruction or
            None.
        planner_hz: Calls of the planner per second.
        text_tokens: Length of each text that the policy's language head produces while it acts. One token is computed
            per prefix. 0 produces none. The bundle must contain the head (`sinew convert --set lm_head=true`).
        session: Name of this robot's stream on its connection.
    """

    stream: Flag = False
    camera_hz: Setting[Positive] = 30.0
    rtc: Setting[Literal["auto", "guided", "no-jacobian", "ramp", "none"]] = "auto"
    interpolation: Setting[Literal["linear", "hold"]] = "linear"
    fusion: Setting[str] = "latest_only"
    planner: Setting[str | None] = None
    planner_hz: Setting[float] = 1.0
    text_tokens: Setting[Annotated[int, Parameter(validator=validators.Number(gte=0, lte=256))]] = 0
    session: Setting[str] = ""


STREAM = StreamFlags()


def run_stream(target: str, on: RobotFlags, by: StreamFlags, key: str, runs: Runs) -> int:
    """Drive a robot with a stream. At the end, print rates, ages, misses, reaction times, and episodes of gym:ENV."""
    with ExitStack() as stack:
        open_robot = on.opener()  # checks the flags before the policy is loaded
        planner = None if by.planner is None else open_planner(by.planner)
        guidance: str = "none" if by.rtc == "auto" else by.rtc
        policy, open_link = _policy(target, runs, guidance, key)
        if by.rtc == "auto":
            guidance, why = usual_guidance(policy)
            log.info("rtc %s: %s", guidance, why)
        robot = on.opened(stack, open_robot, policy)
        if on.seconds is None and on.episodes is None and not sys.stdout.isatty():
            raise SinewError("--seconds: expected a number where there is no terminal to stop at")
        options = {"rtc": guidance, "interpolation": by.interpolation, "text_tokens": by.text_tokens}
        plan = plan_run(policy, robot, on.chosen(policy) | {"fusion": by.fusion}, on.prompt)
        hz = plan.settings.hz
        link = open_link(hz, by.session, options, plan.prompt, plan.settings.chunk_size)
        stack.callback(link.close)
        driving = stack.enter_context(Run(plan, Stream(link), robot=Watching(robot, by.camera_hz)))
        loop = driving.loop
        on.follow(driving, target)
        on.reports(driving, link, key, by.session)
        planning = None
        if planner is not None:
            planning = Planner(planner, by.planner_hz, partial(newest_of, loop), loop.say)
            stack.callback(planning.close)
        report = _drive(driving, plan, on.ticks(hz))
    controller = loop.controller
    assert isinstance(controller, StreamController)
    histograms = {
        name: histogram(1e3 * each for each in controller.reactions.anywhere(name)) for name in LOOPS
    }
    result = {"schema": SCHEMA, "robot": on.robot, **report.to_dict(), "histograms_ms": histograms}
    result |= {"prompt": on.prompt or loop.prompt, **episodes_of(plan.facts)}
    if by.text_tokens:
        newest = controller.newest
        result["text"] = {"running": newest.text, "said": newest.said} if newest is not None else {}
    terminal.console(stderr=True).print(report_table(report, episodes_row(plan.facts)))
    failed = status.problems(report.faults, report.executed, report.held, loop.stopped)
    if planning is not None:
        result["planner"] = {
            "calls": planning.calls,
            "changes": planning.changes,
            "failed": planning.failures,
        }
        failed += [f"the planner failed in {planning.failures} of {planning.calls} calls"] * bool(
            planning.failures
        )
    terminal.emit(result | {"failed": failed})
    return status.ended(failed)


def _policy(target: str, runs: Runs, rtc: str, key: str) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return the policy's description, and a function that opens a stream to it."""
    if addresses := addresses_of(target):
        served = ask_server(target, runs, key)
        if reason := served["server"].get("unstreamed"):
            raise SinewError(f"--stream: {target}: {reason}")

        def remote(rate: float, session: str, options: dict[str, Any], _prompt: str, most: int) -> StreamLink:
            if options["text_tokens"] and not served["server"].get("lm_head"):
                raise SinewError(
                    f"text_tokens: expected 0, or a bundle that keeps its language head at {target} (sinew convert"
                    " --set lm_head=true)"
                )
            arguments = {"api_key": key, "options": options, "max_rows": most, "policy": served["policy"]}
            return StreamLink(addresses, rate, session, **arguments)

        return served["policy"], remote
    from sinew.stream import LocalLink, Session, StreamSettings

    local, policy = load_here(target, runs, stream=rtc)
    local.warm_up()

    def here(rate: float, _session: str, options: dict[str, Any], prompt: str, _most: int) -> LocalLink:
        settings = StreamSettings(
            rate, options["rtc"], options["interpolation"], text_tokens=options["text_tokens"]
        )
        return LocalLink(Session(local, settings, prompt))

    return policy, here


def _drive(driving: Run, plan: RunPlan, ticks: int | None) -> StreamReport:
    """Drive the robot, with the live view if there is a terminal."""
    loop = driving.loop
    if not sys.stdout.isatty():
        terminal.log(logging.WARNING, "%(message)s")
        drive(driving, plan.robot, plan.policy, ticks)
    else:
        with terminal.drawn(StreamView(loop, plan.facts).picture, 4):
            drive(driving, plan.robot, plan.policy, ticks)
    return StreamReport.of(loop)
