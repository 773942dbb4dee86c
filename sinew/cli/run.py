"""``sinew run``: a policy drives a robot.

Space pauses and holds, or goes on; ``p`` changes the instruction; ``q`` stops.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from rich.table import Table
from sinew_client import Client, ClientError
from sinew_client.control import Cadence, Journal, Limits, Loop, Servers, Settings
from sinew_client.control.requester import Call
from sinew_client.control.robots import Dry, open_class, open_lerobot

from sinew import progress
from sinew.cli import terminal
from sinew.cli.infer import running
from sinew.cli.options import RUNS, Runs
from sinew.cli.run_view import Keys, View
from sinew.core import RTC, SinewError
from sinew.keys import key_from_environment
from sinew.sources import is_server

log = logging.getLogger(__name__)

SCHEMA = "sinew.run/1"


def run(
    target: str = "tcp://127.0.0.1:5555",
    /,
    *,
    robot: str = "dry",
    robot_options: str | None = None,
    cameras: Annotated[list[str] | None, Parameter(negative="")] = None,
    prompt: str = "",
    hz: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    substeps: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    handover: str = "aligned",
    replan: str = "queue:0.2",
    motion: str | None = None,
    limits: Path | None = None,
    max_age: float | None = None,
    deadline: float = 2.0,
    stale: float = 0.5,
    finish: Annotated[bool, Parameter(negative="")] = False,
    future: Annotated[bool, Parameter(negative="")] = False,
    seconds: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    episodes: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    go: Annotated[bool, Parameter(negative="")] = False,
    record: Path | None = None,
    runs: Runs = RUNS,
) -> int:
    """Drive a robot with a policy: chunks become one command per control step, whatever the network does.

    Starts paused where there is a keyboard. Ends with a report of the cadence. docs/control.md.

    Args:
        target: address of a server (tcp://host:port; tcp://A,tcp://B turns to the next one where one fails), or what is
            loaded here: a bundle, a folder of `sinew export`,
            a checkpoint or training run, a name of the hub.
        robot: dry (no hardware), gym:ENV, module:Class (methods observe, act, hold) or lerobot:TYPE.
        robot_options: JSON object, arguments of the robot's constructor or fields of LeRobot's configuration.
        cameras: POLICY=ROBOT, which of the robot's cameras is which of the policy's; repeatable.
        prompt: the instruction.
        hz: control rate; the policy's own, or the environment's, if absent.
        substeps: commands per control step, for faster actuators; they are interpolated.
        handover: freeze, naive, aligned, ensemble[:M], aggregate[:MIX] or rtc[:GUIDANCE[:SCHEDULE[:BETA]]].
        replan: when to ask: STEPS, full, queue:FRACTION or disagreement:LIMIT,STEPS.
        motion: JSON object, what actions are measured from; {"kind": "absolute"} ...
        limits: .toml or .json with low, high, velocity, acceleration per joint; the policy's own if absent.
        max_age: seconds after its frame beyond which a row is not executed.
        deadline: seconds to wait for an answer.
        stale: seconds beyond which a frame is too old to act on.
        finish: after a failed request, execute the rows at hand instead of holding at once.
        future: tell the policy the state that the robot will have when the answer arrives.
        seconds: end after this long.
        episodes: of gym:ENV, end after so many.
        go: begin at once, also with a keyboard.
        record: file for the journal; `sinew client --replay FILE` repeats its decisions.
    """
    with ExitStack() as stack:
        try:
            policy, about, connect = _connection(target, runs)
            check_guidance(handover, policy, about)
            machine, instruction, rate = open_robot(robot, robot_options, cameras, policy, episodes)
            if hasattr(machine, "close"):
                stack.callback(machine.close)
            dim = int(policy["action"]["dim"])
            rate = hz or rate or policy.get("control_hz")
            if not rate:
                raise SinewError("--hz: expected a rate; neither the policy nor the robot states one")
            if not (prompt := prompt or instruction or str(policy.get("default_prompt") or "")):
                raise SinewError(
                    "--prompt: expected an instruction; neither the policy nor the robot has one"
                )
            found = Limits.read(limits, dim) if limits is not None else Limits.from_metadata(policy)
            settings = Settings(
                hz=float(rate), handover=handover, replan=replan, motion=json_object("--motion", motion),
                limits=found.to_dict() if found is not None else None, max_age=max_age, deadline=deadline,
                stale=stale, finish=finish, future=future, substeps=substeps,
                committed_rows=int(policy.get("committed_rows") or 0),
            )  # fmt: skip
            loop = Loop(machine, connect, settings, dim, prompt)
            stack.callback(loop.close)
            if hasattr(machine, "on_episode"):
                machine.on_episode = loop.restart
            if record is not None:
                journal = Journal(record, settings, dim, robot=robot, target=target)
                stack.callback(journal.close)
                loop.listeners.append(journal.put)
            cadence = _drive(loop, seconds, go)
        except ClientError as error:
            raise SinewError(str(error)) from error
    result = {"schema": SCHEMA, "robot": robot, "settings": settings.to_dict(), **cadence.to_dict()}
    if hasattr(machine, "finished"):
        result |= {"episodes": machine.finished, "successes": machine.successes}
    print_cadence(cadence)
    terminal.emit(result)
    return 0


def _drive(loop: Loop, seconds: float | None, go: bool) -> Cadence:
    """Run the loop under its live view; without a terminal it begins at once."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    steps = None if seconds is None else max(1, round(seconds * loop.settings.hz))
    if steps is None and not interactive and not hasattr(loop.robot, "episodes"):
        raise SinewError("--seconds: expected a number where there is no keyboard to stop with")
    if not interactive:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        return _run(loop, steps)
    if not go:
        loop.pause()
    with Keys(loop) as keys, View(loop, keys):
        return _run(loop, steps)


def _run(loop: Loop, steps: int | None) -> Cadence:
    # A signal ends the run as ``q`` does: after the present tick, with the robot holding and the journal complete.
    before = {
        number: signal.signal(number, lambda *_: loop.stop()) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        return loop.run(steps)
    except KeyboardInterrupt:  # the robot holds already: the loop has seen to that
        return loop.report()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_cadence(cadence: Cadence) -> None:
    table = Table(title="cadence", show_header=False)
    for name, text in cadence.rows():
        table.add_row(name, text)
    terminal.console(stderr=True).print(table)


# ----------------------------------------------------------------------------- what is connected to what


def _connection(target: str, runs: Runs) -> tuple[dict[str, Any], dict[str, Any], Callable[[], Call]]:
    """Return what the policy says about itself, what is said about what runs it, and what opens a connection to it."""
    if is_server(target):
        if runs != RUNS:
            raise SinewError("engine, provider, device and dtype belong to the server; start it with them")
        key = key_from_environment()
        with Client(target.split(","), timeout=10.0, api_key=key) as client:
            served = client.metadata()
        opener = Servers(target.split(","), key)
        return served["policy"], served["server"], opener
    from sinew.policy import load
    from sinew.serve.safety import Safety

    with progress.task(f"loading {target}"):
        local = load(target, **runs.keywords())
        local.warm_up()
    log.info("%s", running(local))
    policy = local.spec.to_dict()
    policy["action"]["limits"] = Safety(local.processor).limits()
    return policy, local.describe(), lambda: lambda observation, _: local.infer(observation).actions


def check_guidance(handover: str, policy: dict[str, Any], about: dict[str, Any]) -> None:
    """Raise :class:`SinewError` for real-time chunking that this policy, or what runs it, does not do: before the robot
    moves. A server that does not say is asked as it comes."""
    method, _, settings = handover.partition(":")
    if method != "rtc":
        return
    if reason := about.get("unguided"):
        raise SinewError(f"--handover rtc: {reason}")
    trained = bool(policy.get("committed_rows"))
    kind = settings.partition(":")[0] or ("trained" if trained else "guided")
    if kind == "trained" and not trained:
        raise SinewError("--handover rtc:trained: this policy was not trained to continue committed rows")
    known = about.get("guidance", RTC)
    if kind in RTC and kind not in known:
        offers = " or ".join(f"rtc:{name}" for name in known)
        raise SinewError(
            f"--handover: expected {offers} on engine {about.get('engine')}, got rtc:{kind}; engines eager and plan"
            " take all"
        )


def open_robot(
    text: str, options: str | None, cameras: list[str] | None, policy: dict[str, Any], episodes: int | None
) -> tuple[Any, str, float | None]:
    """Return a robot, its own instruction and its own rate."""
    given = json_object("--robot-options", options) or {}
    kind, _, rest = text.partition(":")
    if episodes is not None and kind != "gym":
        raise SinewError("--episodes: belongs to --robot gym:ENV")
    if kind == "gym" and rest:
        from sinew.eval.adapters import make_env
        from sinew.eval.robot import SimulatedRobot

        env, adapter = make_env(rest, env_options=given)
        simulated = SimulatedRobot(env, adapter, episodes)
        return simulated, simulated.task, adapter.control_hz
    if kind == "lerobot" and rest:
        return open_lerobot(rest, given, policy, _pairs(cameras)), "", None
    if text == "dry":
        return Dry(policy), "", None
    if rest:
        return open_class(text, given), "", None
    raise SinewError(f"--robot: expected dry, gym:ENV, module:Class or lerobot:TYPE, got {text!r}")


def _pairs(texts: list[str] | None) -> dict[str, str]:
    for text in texts or []:
        if "=" not in text:
            raise SinewError(f"--cameras: expected POLICY=ROBOT, got {text!r}")
    return dict(text.split("=", 1) for text in texts or [])


def json_object(name: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SinewError(f"{name}: expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise SinewError(f"{name}: expected a JSON object, got {text}")
    return value
