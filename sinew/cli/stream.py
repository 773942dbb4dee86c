"""``sinew stream``: a robot on a stream. Samples go out at every tick, frames when they come, and nodes come back."""

from __future__ import annotations

import logging
import math
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, validators
from sinew_client import Client, ClientError
from sinew_client.control import (
    Journal,
    Limits,
    Loop,
    Planner,
    Settings,
    Stream,
    StreamController,
    StreamReport,
)
from sinew_client.control.defaults import stated
from sinew_client.control.planner import open_planner
from sinew_client.control.reaction import LOOPS, histogram
from sinew_client.control.settings import LARGEST_CHUNK
from sinew_client.control.stream import Watching
from sinew_client.errors import Refused
from sinew_client.policy import is_address
from sinew_client.protocol import MAX_ROWS
from sinew_client.streams import StreamLink

from sinew import progress
from sinew.auth import key_from_environment
from sinew.cli import status, terminal
from sinew.cli.infer import running
from sinew.cli.options import RUNS, Runs, json_object
from sinew.cli.run_robot import (
    choose_prompt,
    episodes_of,
    episodes_row,
    follow_episodes,
    refusal,
    robot_opener,
)
from sinew.cli.stream_view import StreamView, report_table
from sinew.core import SinewError
from sinew.signals import handled

log = logging.getLogger(__name__)

SCHEMA = "sinew.stream/1"


def stream(
    target: str = "tcp://127.0.0.1:5555",
    /,
    *,
    robot: str = "dry",
    robot_options: str | None = None,
    cameras: Annotated[list[str] | None, Parameter(negative="")] = None,
    prompt: str = "",
    hz: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    camera_hz: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 30.0,
    rtc: Literal["guided", "no-jacobian", "ramp", "none"] = "none",
    interpolation: Literal["linear", "hold"] = "linear",
    fusion: str = "latest_only",
    motion: str | None = None,
    limits: Path | None = None,
    stale: float = 0.5,
    watchdog: bool = True,
    planner: str | None = None,
    planner_hz: float = 1.0,
    text_tokens: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=256))] = 0,
    seconds: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    episodes: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    session: str = "",
    record: Path | None = None,
    runs: Runs = RUNS,
) -> int:
    """Drive a robot with a stream: prefixes of the newest frame and runs of the head never wait for each other.

    The server side is `sinew serve` with its native wire. Ends with rates, ages, misses and reaction times and, of
    gym:ENV, the episodes. Exit status 3: windows failed by errors, or the robot never got a command. docs/stream.md.

    Args:
        target: address of a server (tcp://host:port), several with commas in between (the next one where one is gone),
            or what is loaded here: a bundle, a checkpoint, a name of the hub.
        robot: dry (no hardware), gym:ENV, module:Class (methods observe, act, hold, and sense where the state alone
            is cheaper; the current folder is searched first) or lerobot:TYPE.
        robot_options: JSON object, arguments of the robot's constructor or fields of LeRobot's configuration.
        cameras: POLICY=ROBOT, which of the robot's cameras is which of the policy's; repeatable.
        prompt: the instruction, of all episodes; if absent, of gym:ENV each episode's own, else the policy's.
        hz: ticks, samples and nodes per second; the policy's own, or the environment's, if absent.
        camera_hz: frames per second.
        rtc: how whole chunks continue what runs: guided, no-jacobian or ramp. none, the default, lets a newer window
            replace the old one at once; docs/control.md says why. Heads with a time per row need none.
        interpolation: between the rows of whole chunks, where hz is not the policy's own rate.
        fusion: of overlapping windows: latest_only, average, weighted_average, conservative, mix:WEIGHT or ramp:ROWS.
        motion: JSON object, what actions are measured from, which says where the robot is before its first command;
            {"kind": "absolute"} ...; as the policy or the robot's driver states it if absent.
        limits: .toml or .json with low, high, velocity, acceleration and still (the command at which the robot stands
            still, such as 0 of velocities) per joint; the policy's own if absent.
        stale: seconds beyond which a frame is too old to act on.
        watchdog: hold the robot from another thread while its own methods block; --no-watchdog for one that must not be
            held while it observes.
        planner: module:name of a callable (instruction, observation) that returns another instruction, or None.
        planner_hz: calls of the planner per second.
        text_tokens: of each text that the policy's language head says beside, one token a prefix; 0 for none. Bundles
            keep it on request (sinew convert --set lm_head=true).
        seconds: end after this long.
        episodes: of gym:ENV, end after so many.
        session: name of this robot's stream on its connection.
        record: file for the journal; `sinew client --replay FILE` repeats its decisions.
    """
    with ExitStack() as stack:
        try:
            open_robot = robot_opener(robot, robot_options, cameras, episodes)  # before anything is loaded
            plan = None if planner is None else open_planner(planner)
            policy, open_link = _policy(target, runs, rtc)
            machine, instruction, rate = open_robot(policy)
            if hasattr(machine, "close"):
                stack.callback(machine.close)
            rate = hz or rate or policy.get("control_hz")
            if not rate:
                raise SinewError("--hz: expected a rate; neither the policy nor the robot states one")
            given = choose_prompt(prompt, instruction, policy)
            if seconds is None and episodes is None and not sys.stdout.isatty():
                raise SinewError("--seconds: expected a number where there is no terminal to stop at")
            dim = int(policy["action"]["dim"])
            found = Limits.read(limits, dim) if limits is not None else Limits.from_metadata(policy)
            options = {"rtc": rtc, "interpolation": interpolation, "text_tokens": text_tokens}
            said = json_object("--motion", motion) or stated(policy) or getattr(machine, "motion", None)
            most = _most_nodes(policy, float(rate))
            settings = Settings(
                hz=float(rate), motion=said, limits=found.to_dict() if found is not None else None, stale=stale,
                chunk_size=most, watchdog=watchdog, fusion=fusion,
            )  # fmt: skip
            settings.of_stream(dim)  # what is wrong with it is said before a stream is opened
            link = open_link(float(rate), session, options, given, most)
            stack.callback(link.close)
            loop = Loop(Watching(machine, camera_hz), Stream(link), settings, dim, given)
            follow_episodes(machine, loop.restart, prompt)
            if record is not None:
                journal = Journal(record, settings, dim, robot=robot, target=target, prompt=given)
                stack.callback(journal.close)
                loop.listeners.append(journal.put)
            planning = None
            if plan is not None:
                planning = Planner(plan, planner_hz, loop.seen, loop.say)
                stack.callback(planning.close)
            report = _drive(loop, machine, None if seconds is None else max(1, round(seconds * float(rate))))
        except Refused as error:
            raise SinewError(refusal(str(error), machine, policy)) from error
        except ClientError as error:
            raise SinewError(str(error)) from error
    controller = loop.controller
    assert isinstance(controller, StreamController)
    histograms = {
        name: histogram(1e3 * each for each in controller.reactions.anywhere(name)) for name in LOOPS
    }
    result = {"schema": SCHEMA, "robot": robot, **report.to_dict(), "histograms_ms": histograms}
    result |= {"prompt": prompt or loop.prompt, **episodes_of(machine)}
    if text_tokens:
        newest = controller.newest
        result["text"] = {"running": newest.text, "said": newest.said} if newest is not None else {}
    terminal.console(stderr=True).print(report_table(report, episodes_row(machine)))
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


def _most_nodes(policy: dict[str, Any], rate: float) -> int:
    """Return how many nodes a window may have: those of a chunk at the stream's rate."""
    rows, hz = int(policy.get("chunk_size") or 0), float(policy.get("control_hz") or rate)
    return max(MAX_ROWS, min(math.ceil(rows * max(1.0, rate / hz)) + 1, LARGEST_CHUNK))


def _policy(target: str, runs: Runs, rtc: str) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return what the policy says about itself, and what opens a stream to it."""
    if is_address(target):
        if runs != RUNS:
            raise SinewError("engine, provider, device and dtype belong to the server; start it with them")
        addresses = target.split(",")
        with Client(addresses, timeout=10.0, api_key=key_from_environment()) as client:
            served = client.metadata()
        if reason := served["server"].get("unstreamed"):
            raise SinewError(f"stream: {target}: {reason}")

        def remote(rate: float, session: str, options: dict[str, Any], _prompt: str, most: int) -> StreamLink:
            if options["text_tokens"] and not served["server"].get("lm_head"):
                raise SinewError(
                    f"--text-tokens: expected 0, or a bundle that keeps its language head at {target} (sinew convert"
                    " --set lm_head=true)"
                )
            return StreamLink(
                addresses, rate, session, api_key=key_from_environment(), options=options, max_rows=most
            )

        return served["policy"], remote
    from sinew.policy import load
    from sinew.serve.safety import Safety
    from sinew.stream import LocalLink, Session, StreamSettings

    with progress.task(f"loading {target}"):
        local = load(target, **runs.keywords())
        unguided = f"engine {local.engine_name} knows no --rtc {rtc}"
        reason = local.facts.unshared or (unguided if rtc not in ("none", *local.facts.guides) else "")
        if reason and runs.engine == "auto":
            log.info("engine plan: %s", reason)
            local = load(target, **{**runs.keywords(), "engine": "plan"})
        elif local.facts.unshared:
            raise SinewError(f"stream: {reason}")
        local.warm_up()
    log.info("%s", running(local))
    policy = local.spec.to_dict()
    policy["action"]["limits"] = Safety(local.processor).limits()

    def here(rate: float, _session: str, options: dict[str, Any], prompt: str, _most: int) -> LocalLink:
        settings = StreamSettings(
            rate, options["rtc"], options["interpolation"], text_tokens=options["text_tokens"]
        )
        return LocalLink(Session(local, settings, prompt))

    return policy, here


def _drive(loop: Loop, machine: Any, ticks: int | None) -> StreamReport:
    """Run under the live view where there is a terminal; a signal ends the run with the robot holding."""
    with handled((signal.SIGTERM, signal.SIGHUP), lambda *_: loop.stop()):
        try:
            if not sys.stdout.isatty():
                terminal.log(logging.WARNING, "%(message)s")
                loop.run(ticks)
            else:
                with StreamView(loop, machine):
                    loop.run(ticks)
        except KeyboardInterrupt:  # the robot holds already: the loop has seen to that
            loop.stop()
    return StreamReport.of(loop)
