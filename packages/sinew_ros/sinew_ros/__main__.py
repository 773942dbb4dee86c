"""``sinew-ros run CONTRACT.yaml`` drives a robot. ``sinew-ros contract tcp://server:5555`` prints a new contract.

With ROS installed: ``ros2 run sinew_ros sinew-ros run CONTRACT.yaml``.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinew_client import Client, ClientError
from sinew_client.addresses import split_list
from sinew_client.signals import handled

from sinew_ros.actions import ask
from sinew_ros.bag import STORAGES, Bag, Recorded
from sinew_ros.bridge import NODE, Bridge
from sinew_ros.contract import Contract, read, skeleton
from sinew_ros.goals import KIND as ACTION_KIND
from sinew_ros.goals import NAME as ACTION
from sinew_ros.goals import OUTCOMES, SUCCEEDED, Goals
from sinew_ros.lifecycle import STATES, Managed
from sinew_ros.messages import time_of
from sinew_ros.service import KIND, NAME, ChunkService

ENDS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="sinew-ros", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="drive a robot")
    run.add_argument("contract", type=Path)
    run.add_argument(
        "--transport",
        default="rclpy",
        metavar="rclpy|dds|bag:PATH",
        help="dds uses CycloneDDS without an installed ROS; bag plays a recording once",
    )
    run.add_argument(
        "--record", type=Path, help="folder of a new bag that records all received and published messages"
    )
    run.add_argument(
        "--storage", choices=STORAGES, default=STORAGES[0], help="storage format of the recorded bag"
    )
    run.add_argument("--server", help="address of the server, in place of the contract's servers")
    run.add_argument(
        "--lifecycle",
        action="store_true",
        help=f"run as a managed node: /{NODE}/change_state configures and activates it, not /sinew/enable",
    )
    run.add_argument(
        "--action",
        action="store_true",
        help=f"let goals of {ACTION} ({ACTION_KIND}) drive the robot, not /sinew/enable",
    )
    run.add_argument("--steps", type=int, help="number of control steps after which the node ends")
    serve = verbs.add_parser("serve", help=f"answer the service {NAME} ({KIND})")
    serve.add_argument("server")
    serve.add_argument(
        "--hz", type=float, help="control rate of the trajectory in Hz; by default the policy's rate"
    )
    serve.add_argument("--transport", default="rclpy", metavar="rclpy|dds")
    goal = verbs.add_parser(
        "goal", help=f"send {ACTION} a goal over DDS; with ROS, `ros2 action send_goal` does"
    )
    goal.add_argument("prompt", help="the instruction; '' uses the node's own instruction")
    for limit, what in (("time", "longest duration of the goal"), ("hold", "longest hold")):
        goal.add_argument(
            f"--{limit}-limit",
            type=float,
            default=0.0,
            metavar="S",
            help=f"{what} in seconds; by default the node's limit",
        )
    goal.add_argument(
        "--limit-succeeds", action="store_true", help="count a goal that reaches its time limit as a success"
    )
    blank = verbs.add_parser("contract", help="print a contract for a server's policy, which you complete")
    blank.add_argument("server")
    blank.add_argument("--hz", type=float)
    given, ros = parser.parse_known_args(arguments)
    if ros and ros[0] != "--ros-args":
        parser.error(f"unknown argument {ros[0]}")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        if given.verb == "contract":
            with Client(given.server, timeout=10.0) as client:
                sys.stdout.write(skeleton(given.server, client.metadata()["policy"], given.hz))
            return 0
        return {"serve": serve_calls, "goal": send_goal, "run": drive}[given.verb](given, ros)
    except ClientError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def drive(given: argparse.Namespace, ros: list[str]) -> int:
    """Drive a robot until a signal or a manager's shutdown. Print the report of the bridge as one line of JSON.

    Args:
        given: Parsed arguments of ``sinew-ros run``.
        ros: Further arguments, which are passed to ROS.

    Returns:
        The exit code: 1 if messages could not be recorded, else 0.

    Raises:
        ClientError: An argument, the contract or the server is invalid.
    """
    if given.lifecycle and given.steps is not None:
        raise ClientError(
            "--steps: cannot be combined with --lifecycle, because the manager ends the node; omit --steps"
        )
    # Read the contract first, so that an invalid contract is rejected before any topic is created.
    contract(given)
    transport = served = opened(given.transport, ros)
    recorded, driver, goals = None, None, Goals() if given.action else None

    ended = threading.Event()

    def end() -> None:
        ended.set()
        if driver is not None:
            driver.stop()
        elif not given.lifecycle:
            raise ClientError("a signal ended the program before the robot was driven")

    # Handle signals until the transport is closed and the recording is complete.
    with handled((signal.SIGINT, signal.SIGTERM), lambda *_: end()):
        try:
            for flag in ("lifecycle", "action"):
                if getattr(given, flag) and not hasattr(served, "serve"):
                    raise ClientError(
                        f"--transport: expected rclpy or dds for --{flag}, got {given.transport}"
                    )
            if given.record is not None:
                transport = recorded = Recorded(transport, given.record, given.storage)
            if given.lifecycle:
                driver = Managed(
                    served,
                    transport,
                    lambda topics: Bridge(contract(given), topics, managed=True, goals=goals),
                    goals,
                )
                # A manager may have ended the node before `driver` was assigned.
                if ended.is_set():
                    driver.stop()
                if goals is not None:
                    served.act(ACTION, ACTION_KIND, goals)
                driver.wait()
                bridge = driver.bridge
            else:
                driver = bridge = Bridge(contract(given), transport, goals=goals)
                if goals is not None:
                    goals.open(bridge)
                    served.act(ACTION, ACTION_KIND, goals)
                # Only a bag has `begin`: it starts to play.
                if (begin := getattr(transport, "begin", None)) is not None:
                    begin(bridge.stop)
                bridge.run(given.steps)
        finally:
            if goals is not None:
                goals.shut("the node ends")
                goals.close()
            transport.close()
    report = {} if bridge is None else bridge.report()
    if isinstance(driver, Managed):
        report["state"] = STATES[driver.state]
    if recorded is not None:
        report["bag"] = recorded.report()
    if goals is not None:
        report["goals"] = dict(goals.count)
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if recorded is None or not recorded.failed else 1


def contract(given: argparse.Namespace) -> Contract:
    """Read the contract that the command line names. ``--server`` replaces its servers.

    Raises:
        ContractError: The contract is not valid. The message names the wrong field.
    """
    robot_contract = read(given.contract)
    return (
        replace(robot_contract, servers=tuple(split_list(given.server))) if given.server else robot_contract
    )


def serve_calls(given: argparse.Namespace, ros: list[str]) -> int:
    """Answer calls of the service until a signal. Print the number of answered and failed calls as one line of
    JSON.

    Args:
        given: Parsed arguments of ``sinew-ros serve``.
        ros: Further arguments, which are passed to ROS.

    Returns:
        The exit code.
    """
    ended = threading.Event()
    service = ChunkService(given.server, given.hz)
    transport = opened(given.transport, ros)
    with handled(ENDS, lambda *_: ended.set()):
        try:
            if not hasattr(transport, "serve"):
                raise ClientError(
                    f"--transport: expected rclpy or dds, which support services, got {given.transport}"
                )
            transport.serve(NAME, KIND, service.answer)
            sys.stderr.write(f"serving {NAME}\n")
            ended.wait()
        finally:
            transport.close()
            service.close()
    sys.stdout.write(json.dumps({"answered": service.answered, "failed": service.failed}) + "\n")
    return 0


def send_goal(given: argparse.Namespace, ros: list[str]) -> int:
    """Send a goal to the action server, and print the result as one line of JSON. A signal cancels the goal.

    Args:
        given: Parsed arguments of ``sinew-ros goal``.
        ros: Further arguments, which are passed to ROS.

    Returns:
        The exit code: 0 if the goal succeeded, else 1.
    """
    for limit in ("time_limit", "hold_limit"):
        if not 0 <= getattr(given, limit) < 1e9:
            raise ClientError(
                f"--{limit.replace('_', '-')}: expected 0 s or more, got {getattr(given, limit):g}"
            )
    cancel, transport = threading.Event(), opened("dds", ros)

    def tell(said: Any) -> None:
        moves = said.message or f"moves, {said.age_ms:.0f} ms after the frame"
        sys.stderr.write(f"{said.elapsed.sec} s: {said.steps} steps, {said.held} held; {moves}\n")

    goal = {"prompt": given.prompt, "limit_succeeds": given.limit_succeeds}
    goal.update({name: time_of(getattr(given, name)) for name in ("time_limit", "hold_limit")})
    with handled(ENDS, lambda *_: cancel.set()):
        try:
            status, result = ask(transport, ACTION, ACTION_KIND, goal, tell, cancel)
        finally:
            transport.close()
    named = {
        name: getattr(result, name) for name in ("message", "steps", "held", "chunks", "failed_requests")
    }
    sys.stdout.write(json.dumps({"outcome": OUTCOMES[result.outcome][0], **named}) + "\n")
    return 0 if status == SUCCEEDED else 1


def opened(name: str, ros: list[str]) -> Any:
    """Open a transport (a connection to ROS topics) by its name: rclpy, dds or bag:PATH.

    Raises:
        ClientError: The name is none of these, or the transport cannot be opened.
    """
    kind, _, path = name.partition(":")
    if kind == "bag" and path:
        return Bag(Path(path))
    if name == "dds":
        from sinew_ros.dds import Dds

        return Dds()
    if name == "rclpy":
        from sinew_ros.node import Rclpy

        return Rclpy(arguments=ros)
    raise ClientError(f"--transport: expected rclpy, dds or bag:PATH, got {name}")


if __name__ == "__main__":
    sys.exit(main())
