"""The contract between a robot's topics and a policy: one YAML file, which is checked before the robot moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client import ClientError
from sinew_client.arm.end_effector import KinematicsOptions
from sinew_client.arm.kinematics import Chain, read_chain
from sinew_client.control import Settings
from sinew_client.control.defaults import stated
from sinew_client.control.rest import HOLD
from sinew_client.documentation import page
from sinew_client.untrusted import named, read_yaml, shown

IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
JOINT_STATE, ARRAY = "sensor_msgs/msg/JointState", "std_msgs/msg/Float64MultiArray"
TRAJECTORY = "trajectory_msgs/msg/JointTrajectory"
GROUP, SINGLE = "interbotix_xs_msgs/msg/JointGroupCommand", "interbotix_xs_msgs/msg/JointSingleCommand"
# Key: type of a gripper's ROS action. Value: the contract's field for the constant of each goal (maximum effort, or
# speed).
GOALS = {"control_msgs/action/GripperCommand": "effort", "franka_msgs/action/Move": "speed"}
CAMERA_TYPES = (IMAGE, COMPRESSED)
ACTION_TYPES = (TRAJECTORY, JOINT_STATE, ARRAY, GROUP, SINGLE, *GOALS)
FIELDS = ("position", "velocity", "effort")


class ContractError(ClientError, ValueError):
    """A field of the contract is missing, is unknown, or does not fit the policy. The message names the field."""


@dataclass(frozen=True)
class Camera:
    """A topic with camera frames.

    Attributes:
        name: Name of the camera in the policy.
        topic: Name of the topic.
        type: Type of the messages, one of ``CAMERA_TYPES``.
        max_age: Largest age of a frame in seconds. Older frames are dropped, and the robot holds without a newer
            one.
        rate: Messages per second below which the status topic warns; None for no warning.
    """

    name: str
    topic: str
    type: str
    max_age: float
    rate: float | None = None


@dataclass(frozen=True)
class Joints:
    """A part of the policy's state: joints of a JointState topic, in the policy's order.

    The policy's value is ``scale * message's value + offset``.

    Attributes:
        name: Name of the part.
        topic: Name of the topic.
        joints: Names of the joints in the messages.
        field: Field of the messages: position, velocity or effort.
        scale: Scale of each joint, float64 [n].
        offset: Offset of each joint, float64 [n].
        max_age: Largest age of a message in seconds.
        rate: Messages per second below which the status topic warns; None for no warning.
    """

    name: str
    topic: str
    joints: tuple[str, ...]
    field: str
    scale: np.ndarray
    offset: np.ndarray
    max_age: float
    rate: float | None = None


@dataclass(frozen=True)
class Output:
    """A topic that receives some of the numbers of an action, in the policy's order.

    The message's value is ``(policy's value - offset) / scale``.

    Attributes:
        topic: Name of the topic or of the action.
        type: Type of the messages, one of ``ACTION_TYPES``.
        joints: Names of the joints in the messages.
        field: Field of the messages: position, velocity or effort.
        scale: Scale of each joint, float64 [n], as in :class:`Joints`.
        offset: Offset of each joint, float64 [n], as in :class:`Joints`.
        group: Name of the group, for a JointGroupCommand.
        constant: Effort or speed of each goal, for a gripper action.
        change: Smallest difference from the last goal that causes a new goal, for a gripper action.
    """

    topic: str
    type: str
    joints: tuple[str, ...]
    field: str
    scale: np.ndarray
    offset: np.ndarray
    group: str = ""
    constant: float = 0.0
    change: float = 0.0


@dataclass(frozen=True)
class GoalSettings:
    """Settings for goals of the action RunPolicy. The limits apply to goals that do not set their own.

    Attributes:
        time_limit: Seconds after which a goal ends.
        hold_limit: Longest uninterrupted hold in seconds, after which a goal ends.
        preempt: True if a new goal replaces the running goal. False if the new goal is rejected.
        feedback: Feedback messages per second.
    """

    time_limit: float = 60.0
    hold_limit: float = 10.0
    preempt: bool = False
    feedback: float = 2.0


@dataclass(frozen=True)
class Contract:
    """All settings that connect a robot's topics with a policy.

    Attributes:
        servers: Addresses of servers. If a server fails, the next one is used.
        settings: Settings of the control loop.
        cameras: Topics of the cameras.
        states: Topics of the state.
        outputs: Topics of the actions.
        prompt: The instruction; "" for the policy's default.
        start: True to drive at once. False waits for true on the enable topic.
        stamps: "header" uses the stamp of a message as its exposure time. "arrival" uses the arrival time, for
            drivers that do not stamp.
        names: Names of the topics for the prompt, enabling, the status and the success.
        kinematics: For a policy that outputs poses: the arm that converts them to joint values, and the meaning of the
            action's values. None for other policies.
        goals: Settings for goals of the action.
    """

    servers: tuple[str, ...]
    settings: Settings
    cameras: tuple[Camera, ...]
    states: tuple[Joints, ...]
    outputs: tuple[Output, ...]
    prompt: str = ""
    start: bool = False
    stamps: str = "header"
    names: Mapping[str, str] = field(default_factory=dict)
    kinematics: tuple[Chain, KinematicsOptions] | None = None
    goals: GoalSettings = GoalSettings()

    @property
    def state_dim(self) -> int:
        return sum(len(part.joints) for part in self.states)

    @property
    def action_dim(self) -> int:
        return sum(len(part.joints) for part in self.outputs)

    def check(self, policy: Mapping[str, Any]) -> None:
        """Compare the contract with the description of a policy.

        Args:
            policy: ``metadata()["policy"]`` of a server.

        Raises:
            ContractError: The cameras or the sizes of state and action differ.
        """
        policy_names = [camera["name"] for camera in policy["cameras"]]
        contract_names = [camera.name for camera in self.cameras]
        if sorted(policy_names) != sorted(contract_names):
            raise ContractError(
                "cameras: expected the policy's cameras {}, got {}; use the policy's names".format(
                    ", ".join(policy_names), ", ".join(contract_names)
                )
            )
        for where, parts, dim in (
            ("state", self.states, self.state_dim),
            ("action", self.outputs, self.action_dim),
        ):
            # The policy outputs poses, so its sizes differ from the number of joints.
            if self.kinematics is not None:
                continue
            if int(policy[where]["dim"]) != dim:
                names = [joint for part in parts for joint in part.joints]
                raise ContractError(
                    "{}: expected the policy's {} numbers, got {} joints: {}".format(
                        where, policy[where]["dim"], dim, ", ".join(names)
                    )
                )


def read(path: Path) -> Contract:
    """Read a contract from a YAML file.

    Raises:
        ContractError: The file cannot be read, or a field is wrong. The message names the field.
    """
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        # Use strerror, because the text of an OSError repeats the path.
        why = getattr(error, "strerror", None) or error
        raise ContractError(f"{path}: {why}") from error
    return parse(content, path.parent)


def parse(given: Any, folder: Path = Path()) -> Contract:
    """Convert the content of a YAML file to a contract.

    Args:
        given: Content of the file.
        folder: Folder to which file names in the contract are relative.

    Raises:
        ContractError: A field is wrong. The message names the field.
    """
    top = _Fields("contract", given)
    servers = top.texts("server")
    names = _Fields("names", top.get("names", {}))
    topics = {key: names.text(key, f"/sinew/{key}") for key in ("prompt", "enable", "status", "success")}
    names.end()
    cameras = _Fields("cameras", top.get("cameras"))
    all_cameras = tuple(_camera(name, cameras.get(name)) for name in cameras.left())
    outputs = tuple(_output(where, part) for where, part in _parts("action", top.get("action")))
    states = tuple(_joints(where, part) for where, part in _parts("state", top.get("state")))
    limits = top.get("limits", None)
    if limits is not None:
        _Fields("limits", limits)
    settings = (
        _settings(
            top.number("hz"),
            limits,
            _Fields("control", top.get("control", {})),
            max(x.max_age for x in (*all_cameras, *states)),
        )
        if all_cameras
        else Settings(top.number("hz"))
    )
    kinematics = _kinematics(top.get("kinematics", None), folder)
    if kinematics is None:
        settings.controller(sum(len(part.joints) for part in outputs))
    contract = Contract(
        servers, settings, all_cameras, states, outputs, top.text("prompt", ""), top.flag("start", False),
        top.choice("stamps", ("header", "arrival"), "header"), topics, kinematics,
        _goals(_Fields("goals", top.get("goals", {}))),
    )  # fmt: skip
    top.end()
    _consistent(contract)
    return contract


def _kinematics(given: Any, folder: Path) -> tuple[Chain, KinematicsOptions] | None:
    if given is None:
        return None
    part = _Fields("kinematics", given)
    file = folder / part.text("file")
    try:
        options = KinematicsOptions.parse({key: part.given[key] for key in part.left()})
        return read_chain(file, options.tip, options.base), options
    except ClientError as error:
        raise ContractError(f"kinematics: {error}") from error


def _goals(given: _Fields) -> GoalSettings:
    usual = GoalSettings()
    settings = GoalSettings(
        given.number("time_limit", usual.time_limit),
        given.number("hold_limit", usual.hold_limit),
        given.flag("preempt", usual.preempt),
        given.number("feedback", usual.feedback),
    )
    given.end()
    return settings


def _settings(hz: float, limits: Any, control: _Fields, stale: float) -> Settings:
    given: dict[str, Any] = {}
    for key in ("max_age", "deadline"):
        if key in control.given:
            given[key] = control.number(key)
    for key in ("finish", "future"):
        given[key] = control.flag(key, False)
    for key in ("handover", "replan"):
        if key in control.given:
            given[key] = control.text(key)
    motion, substeps = control.get("motion", None), control.get("substeps", 1)
    if motion is not None:
        _Fields("control.motion", motion)
    if isinstance(substeps, bool) or not isinstance(substeps, int):
        raise ContractError(f"control.substeps: expected a whole number, got {shown(substeps)}")
    # By default the robot holds at the end and does not move to its rest pose. A launch file stops its nodes within
    # seconds, and other nodes may move the robot at that time.
    given["rest"] = control.get("rest", HOLD)
    control.end()
    return Settings(hz, limits=limits, motion=motion, substeps=substeps, stale=stale, **given)


def _consistent(contract: Contract) -> None:
    if not contract.cameras:
        raise ContractError("cameras: expected at least one camera, got none; add the policy's cameras")
    taken: dict[str, str] = {topic: f"names.{key}" for key, topic in contract.names.items()}
    for where, part in (
        *((f"cameras.{each.name}", each) for each in contract.cameras),
        *(("state", each) for each in contract.states),
        *(("action", each) for each in contract.outputs),
    ):
        if part.topic in taken and where != "state":
            raise ContractError(
                f"{where}.topic: {named(part.topic)} is already the topic of {taken[part.topic]}; use another one"
            )
        taken[part.topic] = where
    if any(each.type == TRAJECTORY for each in contract.outputs):
        if contract.settings.substeps > 1:
            raise ContractError(
                "control.substeps: expected 1 with a JointTrajectory, because its controller interpolates"
            )
        offsets = (contract.settings.motion or {}).get("kind") == "offsets" and contract.kinematics is None
        if offsets and contract.settings.limits is not None:
            raise ContractError(
                "limits: remove them for motion offsets with a JointTrajectory, because limits apply to commands only"
            )


def skeleton(server: str, policy: Mapping[str, Any], hz: float | None) -> str:
    """Return the text of a contract for a policy, with all names that its server states. The user completes the
    topics.

    Args:
        server: Address of the server.
        policy: ``metadata()["policy"]`` of the server.
        hz: Control rate; None uses the policy's rate, or 20 Hz.
    """
    rate = float(hz or policy.get("control_hz") or 20.0)
    motion_values = stated(policy)
    motion = "" if motion_values is None else f", motion: {json.dumps(motion_values)}"
    lines = [
        f"server: {server}",
        f"prompt: {json.dumps(policy.get('default_prompt') or '')}  # instruction for the robot",
        f"hz: {rate:g}  # control rate, the rate of the actions of a chunk",
        "start: false  # wait for true on /sinew/enable",
        "stamps: header  # or arrival, for drivers that do not stamp",
        f"control: {{deadline: 2.0{motion}}}  # handover (chunk merging) and replan: see {page('late-answers')}",
        "cameras:",
    ]
    names = [str(camera["name"]) for camera in policy["cameras"]]
    lines += [
        f"  {name}: {{topic: /{name}/image_raw/compressed, type: {COMPRESSED}, max_age: 0.2}}"
        for name in names
    ]
    for where, kind, topic in (
        ("state", JOINT_STATE, "/joint_states"),
        ("action", TRAJECTORY, "/arm_controller/joint_trajectory"),
    ):
        spec = policy[where]
        names = [str(name) for name in spec.get("names") or []] or [
            f"joint{i}" for i in range(int(spec["dim"]))
        ]
        age = ", max_age: 0.2" if where == "state" else ""
        joints = ", ".join(names)
        lines += [
            f"{where}:  # policy's number = scale x message's number + offset (from radians to degrees: 57.29578)",
            f"  {{topic: {topic}, type: {kind}, joints: [{joints}], scale: 1.0, offset: 0.0{age}}}",
        ]
    if (motion_values or {}).get("kind") == "absolute":
        lines.append(
            "limits: {velocity: 1.5, when: clip}  # in the policy's units; also low, high, acceleration"
        )
    else:
        lines.append(
            "# limits: {velocity: 1.5}  # limits of commands; requires control.motion, or still: the command at rest"
        )
    return "\n".join(lines) + "\n"


def _parts(where: str, given: Any) -> list[tuple[str, Any]]:
    """Return the parts of a vector of the policy with their field names. A vector with one part may be written
    without a list.

    Args:
        where: Field of the contract with the vector, such as "state".
        given: Content of this field.
    """
    if isinstance(given, list):
        if not given:
            raise ContractError(f"{where}: expected at least one topic, got an empty list")
        return [(f"{where}[{index}]", part) for index, part in enumerate(given)]
    return [(where, given)]


def _camera(name: str, given: Any) -> Camera:
    part = _Fields(f"cameras.{name}", given)
    camera = Camera(
        name, part.text("topic"), part.choice("type", CAMERA_TYPES), part.number("max_age", 0.5), part.rate()
    )
    part.end()
    return camera


def _joints(where: str, given: Any) -> Joints:
    part = _Fields(where, given)
    topic, _ = part.text("topic"), part.choice("type", (JOINT_STATE,), JOINT_STATE)
    joints = part.joints()
    part_of_state = Joints(
        where, topic, joints, part.choice("field", FIELDS, "position"), part.vector("scale", 1.0, len(joints)),
        part.vector("offset", 0.0, len(joints)), part.number("max_age", 0.5), part.rate(),
    )  # fmt: skip
    part.end()
    return part_of_state


def _output(where: str, given: Any) -> Output:
    part = _Fields(where, given)
    joints, kind = part.joints(), part.choice("type", ACTION_TYPES)
    output = Output(
        part.text("topic"), kind, joints, part.choice("field", FIELDS, "position"),
        part.vector("scale", 1.0, len(joints)), part.vector("offset", 0.0, len(joints)),
        part.text("group") if kind == GROUP else "", part.number(GOALS[kind]) if kind in GOALS else 0.0,
        part.number("change", 0.005) if kind in GOALS else 0.0,
    )  # fmt: skip
    if kind not in (JOINT_STATE, ARRAY) and output.field != "position":
        name = kind.rpartition("/")[2]
        raise ContractError(f"{where}.field: expected position for a {name}, got {output.field}")
    if (kind == SINGLE or kind in GOALS) and len(joints) != 1:
        raise ContractError(
            f"{where}.joints: expected one joint for a {kind.rpartition('/')[2]}, got {len(joints)}"
        )
    if np.any(output.scale == 0):
        raise ContractError(f"{where}.scale: expected numbers other than 0, got a 0")
    part.end()
    return output


class _Fields:
    """Reads a mapping of the contract key by key. :meth:`end` rejects keys that were never read, because they may be
    misspelt.
    """

    def __init__(self, where: str, given: Any):
        if not isinstance(given, Mapping):
            kind = "nothing" if given is None else type(given).__name__
            raise ContractError(f"{where}: expected a mapping, got {kind}")
        self.where, self.given, self._taken = named(where), given, set()

    def _name(self, key: str) -> str:
        return named(key) if self.where == "contract" else f"{self.where}.{named(key)}"

    def get(self, key: str, *default: Any) -> Any:
        self._taken.add(key)
        if key not in self.given:
            if default:
                return default[0]
            raise ContractError(f"{self._name(key)}: expected a value, got nothing; add the field")
        return self.given[key]

    def left(self) -> list[str]:
        for key in self.given:
            if not isinstance(key, str) or not key:
                raise ContractError(f"{self.where}: expected text as keys, got {shown(key)}")
        return [key for key in self.given if key not in self._taken]

    def end(self) -> None:
        left = self.left()
        if left:
            raise ContractError(
                "{}: unknown field; use one of {}".format(self._name(left[0]), ", ".join(sorted(self._taken)))
            )

    def text(self, key: str, *default: str) -> str:
        value = self.get(key, *default)
        if not isinstance(value, str) or (not value and not default):
            raise ContractError(f"{self._name(key)}: expected text, got {shown(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(each, str) and each for each in values):
            raise ContractError(
                f"{self._name(key)}: expected an address or a list of addresses, got {shown(value)}"
            )
        return tuple(values)

    def choice(self, key: str, known: tuple[str, ...], *default: str) -> str:
        value = self.text(key, *default)
        if value not in known:
            raise ContractError(
                "{}: expected {}, got {}".format(self._name(key), " or ".join(known), named(value))
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ContractError(f"{self._name(key)}: expected true or false, got {shown(value)}")
        return value

    def number(self, key: str, *default: float) -> float:
        value = self.get(key, *default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise ContractError(f"{self._name(key)}: expected a number above 0, got {shown(value)}")
        return float(value)

    def rate(self) -> float | None:
        return self.number("rate") if "rate" in self.given else None

    def joints(self) -> tuple[str, ...]:
        value = self.get("joints")
        if not isinstance(value, list) or not value or not all(isinstance(x, str) and x for x in value):
            raise ContractError(f"{self._name('joints')}: expected a list of names, got {shown(value)}")
        if len(set(value)) < len(value):
            twice = next(x for x in value if value.count(x) > 1)
            raise ContractError(
                f"{self._name('joints')}: {named(twice)} is listed twice; list each joint once"
            )
        return tuple(value)

    def vector(self, key: str, default: float, size: int) -> np.ndarray:
        value = self.get(key, default)
        values = value if isinstance(value, list) else [value] * size
        # Compare the values before the conversion: an integer of 400 digits does not fit into a float, and
        # math.isfinite() would raise OverflowError.
        numbers = all(
            isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1e30 for x in values
        )
        if not numbers or len(values) != size:
            raise ContractError(
                f"{self._name(key)}: expected a number or a list of {size} numbers, got {shown(value)}"
            )
        return np.array(values, np.float64)
