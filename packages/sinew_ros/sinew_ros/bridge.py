"""Connects a policy server with a robot's topics, as a contract describes them.

The bridge does not depend on ROS or DDS. The bridge requires a :class:`Transport` with subscriptions, publishers
and a clock. So the same bridge runs in a node of rclpy (:mod:`sinew_ros.node`) and over plain DDS
(:mod:`sinew_ros.dds`).
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from sinew_client import Client, PolicySpec
from sinew_client.arm.end_effector import EndEffector
from sinew_client.auth import key_from_environment
from sinew_client.control import (
    Cadence,
    Command,
    CommandListener,
    Controller,
    Reporter,
    Servers,
    SettingsError,
)
from sinew_client.control.authority import POLICY
from sinew_client.control.run import FOLLOWS, Run, RunPlan

from sinew_ros import messages
from sinew_ros.contract import JOINT_STATE, Contract, ContractError
from sinew_ros.robot import TopicRobot

if TYPE_CHECKING:
    from sinew_ros.goals import Goals

logger = logging.getLogger(__name__)

STRING, BOOL, STATUS = "std_msgs/msg/String", "std_msgs/msg/Bool", "diagnostic_msgs/msg/DiagnosticArray"
NODE = "sinew_policy"  # name of the ROS node
# Quality-of-service profiles. SENSOR is best effort with a short queue. COMMAND is reliable. LATCHED is
# reliable, and a late subscriber receives the newest message.
SENSOR, COMMAND, LATCHED = "sensor", "command", "latched"


class Transport(Protocol):
    """Interface for access to topics by name and type, as ROS 2 writes them: ``/joint_states``,
    ``sensor_msgs/msg/JointState``.
    """

    def subscribe(self, topic: str, kind: str, quality: str, callback: Callable[[Any], None]) -> None:
        """Call a function with every message of a topic.

        Args:
            topic: Name of the topic.
            kind: Type of the messages in ROS, such as sensor_msgs/msg/JointState.
            quality: Quality of service: SENSOR, COMMAND or LATCHED.
            callback: The function. It may be called from any thread.
        """

    def publisher(self, topic: str, kind: str) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that publishes messages. The function may be called from any thread.

        Args:
            topic: Name of the topic.
            kind: Type of the messages in ROS.

        Returns:
            A function of the fields of a message.
        """

    def now(self) -> float:
        """Return the ROS time in seconds."""


class Bridge:
    """Runs a policy on a robot with ROS topics.

    Args:
        contract: The contract between the topics and the policy.
        transport: The transport of the topics.
        timeout: Seconds to wait for the server's description of the policy.
        managed: True if the caller enables the bridge. The bridge then starts paused, and ignores the enable
            topic.
        goals: Goals of an action. Each goal enables the bridge and provides the instruction. None without an
            action.

    Raises:
        ContractError: The contract does not fit the policy. No topic is subscribed in this case.
    """

    def __init__(
        self,
        contract: Contract,
        transport: Transport,
        timeout: float = 10.0,
        managed: bool = False,
        goals: Goals | None = None,
    ):
        self.contract, self._transport, self._goals = contract, transport, goals
        managed = managed or goals is not None
        key = key_from_environment()
        with Client(list(contract.servers), timeout=timeout, api_key=key) as client:
            policy = client.metadata()["policy"]
        # Raise an error if the server's description of the policy is invalid.
        PolicySpec.from_dict(policy)
        contract.check(policy)
        publish = [transport.publisher(output.topic, output.type) for output in contract.outputs]
        robot: Any = TopicRobot(contract, publish, transport.now)
        self.robot = robot
        settings = contract.settings
        if contract.kinematics is not None:
            robot = EndEffector(robot, *contract.kinematics, policy, settings.hz * settings.substeps)
            logger.info("%s", robot.text())
        chosen = {name: value for name, value in settings.to_dict().items() if name not in FOLLOWS}
        if settings.limits is None and (settings.motion or {}).get("kind") == "offsets":
            # Remove the policy's limits: they apply to delta actions, but the topics may carry positions.
            chosen["limits"] = {}
        # Each goal of the action contains its own instruction, so the contract needs no prompt.
        prompt = contract.prompt or (None if goals is not None and not policy.get("default_prompt") else "")
        try:
            plan = RunPlan.of(policy, robot, chosen, prompt=prompt)
        except SettingsError as error:
            raise ContractError(str(error)) from error
        self.prompt = plan.prompt
        logger.info("%s", plan.choice)
        if plan.choice.replan_reason:
            logger.info(
                "when to request the next chunk (replan %s): %s",
                plan.choice.replan,
                plan.choice.replan_reason,
            )
        servers = Servers(
            contract.servers,
            key,
            # Do not send `time`: it is ROS time, and only the control loop uses it.
            without=("time",),
            policy=policy,
        )
        self._reporter = partial(Reporter, where=servers, api_key=key, name="ROS 2")
        # If the server rejects the first request, the robot holds, and the status topic publishes the reason.
        self.driving = Run(
            plan, servers, server=servers, listeners=[CommandListener(self._watch)], hold_refused=True
        )
        self.loop = self.driving.loop
        self.ended = False  # True after the loop has ended and the robot holds
        self._enabled = contract.start and not managed
        if not self._enabled:
            self.loop.pause()
        self._chunk: int | None = None  # number of the chunk that was last published on the trajectory topics
        # Target of the last command, as one point of the planned trajectory.
        self._target: np.ndarray | None = None
        self._reason = ""
        self._status = transport.publisher(contract.names["status"], STATUS)
        for camera in contract.cameras:
            transport.subscribe(camera.topic, camera.type, SENSOR, partial(self.robot.camera, camera.name))
        for index, part in enumerate(contract.states):
            transport.subscribe(part.topic, JOINT_STATE, SENSOR, partial(self.robot.state, index))
        for name, kind, wanted, take in (
            ("prompt", STRING, goals is None, lambda message: self.loop.say(str(message.data))),
            ("enable", BOOL, not managed, lambda message: self.enable(bool(message.data))),
            ("success", BOOL, goals is not None, lambda message: message.data and goals.succeed()),
        ):
            if wanted:
                transport.subscribe(contract.names[name], kind, COMMAND, take)

    def enable(self, on: bool) -> None:
        """Start to drive the robot, or hold it until the next call with True. Repeated calls with the same value
        have no effect.
        """
        # Compare with the last call of this method and not with the loop's state, because the loop reacts later.
        if on == self._enabled:
            return
        self._enabled = on
        logger.warning("%s", "the policy drives the robot" if on else "paused: the robot holds")
        if on:
            self.loop.resume()
        else:
            self.loop.pause()

    def stop(self) -> None:
        """End :meth:`run` after the present control step. A second call also ends the return to the rest pose."""
        self.loop.stop()

    def run(self, steps: int | None = None) -> Cadence:
        """Drive the robot until :meth:`stop`. At the end the robot holds.

        Args:
            steps: Number of control steps; None for no limit.

        Returns:
            The timing of the control loop.
        """
        ended = threading.Event()
        reporter = threading.Thread(target=self._report_each_second, args=(ended,), daemon=True)
        reporter.start()
        try:
            with self._reporter(self.loop):
                return self.driving.run(steps)
        finally:
            ended.set()
            reporter.join()
            self._halt()
            self.ended = True
            self.loop.close()

    def _watch(self, command: Command) -> None:
        """Publish a new trajectory when a new chunk begins, and stop the trajectory when the robot begins to hold its
        position.
        """
        self._reason = command.reason
        self.robot.paused = self.loop.controller.paused
        if self._goals is not None:
            self._goals.saw(command, self.loop.controller.paused)
        # EndEffector converts each pose to joint angles when the pose is executed, so no joint trajectory
        # exists in advance.
        if self.contract.kinematics is not None:
            return
        if command.row is None:
            self._halt()
            return
        controller = self.loop.controller
        assert isinstance(controller, Controller)
        rows = planned(controller, command) if command.by == POLICY else command.row[None]
        self._target = rows[0]
        if command.chunk != self._chunk or command.by != POLICY:
            self.robot.follow(rows)
            self._chunk = command.chunk

    def _halt(self) -> None:
        """Stop the trajectory that the robot follows: publish a trajectory that ends at the target of the last
        command.
        """
        if self._chunk is not None and self._target is not None:
            self.robot.follow(self._target[None])
        self._chunk = None

    def report(self) -> dict[str, Any]:
        """Return the counts and ages of every topic, the published messages, and the timing of the loop, ready for
        JSON.
        """
        return {**self.robot.report(), "control": self.loop.report().to_dict()}

    def _report_each_second(self, ended: threading.Event) -> None:
        while not ended.wait(1.0):
            self._tell()

    def _tell(self) -> None:
        try:
            self._status(self.status())
        except Exception:
            logger.exception("the status could not be published")

    def status(self) -> dict[str, Any]:
        """Return the present state as a diagnostic_msgs/DiagnosticArray."""
        report, paused, reason = self.report(), self.loop.controller.paused, self._reason
        values: dict[str, Any] = {"prompt": self.loop.prompt, "chunks": report["control"]["chunks"]}
        values["failed requests"] = report["control"]["failed_requests"]
        slow = []
        named = {**{x.name: x for x in self.contract.cameras}, **{x.name: x for x in self.contract.states}}
        for name, topic in report["topics"].items():
            ages = topic["age_ms"]
            values[name] = "{} received, {} used, {} replaced, {} dropped, {} Hz{}".format(
                topic["received"], topic["used"], topic["replaced"], sum(topic["dropped"].values()), topic["hz"],
                f", age p50 {ages['p50']} ms, p99 {ages['p99']} ms" if ages else "",
            )  # fmt: skip
            for why, count in topic["dropped"].items():
                values[f"{name} dropped: {why}"] = count
            required_rate = named[name].rate
            if required_rate is not None and topic["hz"] < required_rate:
                slow.append(f"{name} at {topic['hz']:g} of {required_rate:g} Hz")
        if reason and not paused:
            level, text = 2, f"holds: {reason}"
        elif slow:
            level, text = 1, "; ".join(slow)
        else:
            level, text = 0, "paused" if paused else "runs"
        return messages.diagnostics(self._transport.now(), level, text, values)


def planned(controller: Controller, command: Command) -> np.ndarray:
    """Return the targets of this control step and of the following steps, within the limits, float32 [n, D].

    A copy of the controller's guard applies the limits, so they are the same as for the later commands. Actions
    that would be too old at their own step are left out.

    Args:
        controller: The controller of the loop.
        command: The command of this control step.
    """
    player = controller.player
    rows = list(player.trajectory.rows_from(command.step))
    if controller.max_age is not None:
        rows = rows[: max(1, controller.max_age - command.age + 1)]
    if controller.guard is None or controller.guard.limits is None:
        return np.stack(rows)
    guard = copy.deepcopy(controller.guard)
    targets = rows[:1]
    for row in rows[1:]:
        verdict = guard.check(player.motion.command(row, None))
        if verdict.row is None:
            break
        targets.append(verdict.row)
    return np.stack(targets).astype(np.float32)
