"""Open a robot by name: one without hardware ("dry"), a Python class of yours, or one of LeRobot's robots."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import pkgutil
import time
from dataclasses import replace
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from sinew_client.control.facts import RobotFacts, facts_of, missing_methods
from sinew_client.control.interfaces import Robot
from sinew_client.errors import ClientError
from sinew_client.modules import load_named
from sinew_client.untrusted import shown

logger = logging.getLogger(__name__)


class RobotError(ClientError):
    """A robot cannot be opened, or does not fit the policy. The message states the reason."""


class Dry:
    """A robot without hardware, for a dry run. It fits any policy.

    Its frames are noise, and its state follows the commands.

    Args:
        policy: The policy's description (``metadata()["policy"]``).

    Attributes:
        commands: Number of commands so far.
        holds: Number of holds so far.
    """

    physical = False

    def __init__(self, policy: Mapping[str, Any]):
        rng = np.random.default_rng(0)
        self._images = {
            camera["name"]: rng.integers(0, 256, (int(camera["height"]), int(camera["width"]), 3), np.uint8)
            for camera in policy["cameras"]
        }
        self.state = np.zeros(int(policy["state"]["dim"]), np.float32)
        self.joints: dict[str, list[str]] | None = None
        if all(policy[what].get("names") for what in ("state", "action")):
            self.joints = {what: list(policy[what]["names"]) for what in ("state", "action")}
        self.commands = self.holds = 0

    def observe(self) -> dict[str, Any]:
        return {"images": self._images, "state": self.state.copy(), "time": time.monotonic()}

    def act(self, row: np.ndarray) -> None:
        self.commands += 1
        count = min(len(row), len(self.state))
        self.state[:count] = row[:count]

    def hold(self) -> None:
        self.holds += 1


class Pair:
    """Combines two of LeRobot's robots into one robot.

    The names of the first robot's joints and cameras begin with ``left_``, those of the second robot with ``right_``.

    Raises:
        RobotError: Only one of the robots uses degrees.
    """

    def __init__(self, left: Any, right: Any):
        self.sides = {"left": left, "right": right}
        degrees = [lerobot_setting(each, "use_degrees") for each in (left, right)]
        if degrees[0] != degrees[1]:
            raise RobotError(
                f"use_degrees: expected the same value for both arms, got {degrees[0]} and {degrees[1]}"
            )
        self.config = left.config

    def _named(self, of: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
        return {
            f"{side}_{name}": value for side, arm in self.sides.items() for name, value in of(arm).items()
        }

    @property
    def action_features(self) -> dict[str, Any]:
        return self._named(lambda arm: arm.action_features)

    @property
    def observation_features(self) -> dict[str, Any]:
        return self._named(lambda arm: arm.observation_features)

    def connect(self) -> None:
        """Connect both robots. If the second robot cannot be connected, disconnect the first one."""
        self.sides["left"].connect()
        try:
            self.sides["right"].connect()
        except BaseException:
            self.sides["left"].disconnect()
            raise

    def disconnect(self) -> None:
        """Disconnect both robots, the second one even if the first one raises."""
        try:
            self.sides["left"].disconnect()
        finally:
            self.sides["right"].disconnect()

    def get_observation(self) -> dict[str, Any]:
        return self._named(lambda arm: arm.get_observation())

    def send_action(self, action: Mapping[str, float]) -> None:
        for side, arm in self.sides.items():
            at = len(side) + 1
            arm.send_action(
                {name[at:]: value for name, value in action.items() if name.startswith(f"{side}_")}
            )


class LeRobotArm:
    """A wrapper around one of LeRobot's robots, with the methods that Sinew's control loop needs.

    To hold, it sends the last action again. Before the first action, it sends the present position. The robot's bus
    allows one caller at a time, so the robot cannot be held while it is observed. Its servos hold their goal meanwhile.

    If you close a robot that is not at its rest pose, its motors stay on, so that the robot does not fall. This
    overrides ``disable_torque_on_disconnect`` of its configuration.

    Args:
        robot: A robot with ``action_features``, ``observation_features``, ``get_observation`` and ``send_action``
            (LeRobot 0.4).
        policy: The policy's description. If it does not name its joints, the robot's own order is used.
        cameras: For each camera of the policy, the camera of the robot, if their names differ.
        joints: For each joint of the policy, the joint of the robot, if their names differ (:func:`match_joints`).

    Attributes:
        motion: The motion "absolute" if all names of actions end in ".pos", else None.
        joint_unit: "deg", or "of -100 to 100" (the calibrated range), if the configuration states it, else "".

    Raises:
        RobotError: The robot does not have the policy's joints or cameras.
    """

    concurrent_hold = False

    def __init__(
        self,
        robot: Any,
        policy: Mapping[str, Any],
        cameras: Mapping[str, str] | None = None,
        joints: Mapping[str, str] | None = None,
    ):
        self.robot, self._cameras = robot, dict(cameras or {})
        had = [name for name, kind in robot.action_features.items() if not isinstance(kind, tuple)]
        features = robot.observation_features
        missing = [name for name in had if name not in features]
        if missing:
            raise RobotError(
                f"robot: expected all joints of its actions in its state too, but its state has no {missing[0]}"
            )
        for what in ("state", "action"):
            if int(policy[what].get("dim", len(had))) != len(had):
                raise RobotError(
                    f"robot: the policy's {what} has {policy[what]['dim']} values, but the robot has {len(had)}"
                    f" joints: {', '.join(had)}"
                )
        self._states, self.joints = joints_of(policy, had, had, joints or {})
        for camera in (camera["name"] for camera in policy["cameras"]):
            name = self._cameras.setdefault(camera, camera)
            if name not in features:
                camera_names = [key for key, kind in features.items() if isinstance(kind, tuple)]
                new = camera_names[0] if len(camera_names) == 1 else "NEW"
                whose = "" if len(camera_names) == 1 else ", NEW being the robot's name"
                raise RobotError(
                    f"cameras: the policy requires {camera}; the robot has {', '.join(camera_names) or 'none'}"
                    + (f". Map it with --rename {new}={camera}{whose}" if camera_names else "")
                )
        # In LeRobot's own arms, the suffix ".pos" marks a goal position in an action and a position in the state.
        absolute = all(name.endswith(".pos") for name in self.joints)
        self.motion = {"kind": "absolute"} if absolute else None
        degrees = lerobot_setting(robot, "use_degrees")
        self.joint_unit = "" if degrees is None else "deg" if degrees else "of -100 to 100"
        self._last: dict[str, float] | None = None
        # True if the motors may be switched off, because the robot has not moved or is at its rest pose.
        self._free = True

    def observe(self) -> dict[str, Any]:
        taken = time.monotonic()
        seen = self.robot.get_observation()
        images = {camera: np.asarray(seen[name], np.uint8) for camera, name in self._cameras.items()}
        state = np.array([float(seen[name]) for name in self._states], np.float32)
        return {"images": images, "state": state, "time": taken}

    def act(self, row: np.ndarray) -> None:
        self._free = False
        self._last = {name: float(value) for name, value in zip(self.joints, row)}
        self.robot.send_action(self._last)

    def hold(self) -> None:
        if self._last is None:
            seen = self.robot.get_observation()
            self._last = {name: float(seen[name]) for name in self.joints}
        self.robot.send_action(self._last)

    def rested(self) -> None:
        """Record that the robot is at its rest pose, so that ``close`` may switch its motors off."""
        self._free = True

    def close(self) -> None:
        """Disconnect the robot.

        If it is not at its rest pose, its motors stay on, with the last command as their goal.
        """
        if not self._free:
            for device in self.robot.sides.values() if isinstance(self.robot, Pair) else (self.robot,):
                keep_torque(device)
        self.robot.disconnect()


def lerobot_setting(device: Any, name: str) -> Any:
    """Return a setting from the configuration of one of LeRobot's robots; None if its configuration lacks it."""
    return getattr(getattr(device, "config", None), name, None)


def keep_torque(device: Any) -> None:
    """Configure one of LeRobot's robots, and the arms inside it, so that its motors stay on after a disconnect."""
    for part in (device, *(getattr(device, name, None) for name in ("left_arm", "right_arm"))):
        if lerobot_setting(part, "disable_torque_on_disconnect"):
            part.config.disable_torque_on_disconnect = False
            logger.warning(
                "the arm is not at its rest pose, so its motors stay on; support it before you switch it off"
            )


def joints_of(
    policy: Mapping[str, Any], state: Sequence[str], action: Sequence[str], given: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Order a robot's joints as in a policy's state and action.

    Args:
        policy: The policy's description. If it does not name its joints, the robot's own order is used.
        state: Names of the joints in the robot's state.
        action: Names of the joints in the robot's command.
        given: For each joint of the policy, the joint of the robot, if their names differ.

    Returns:
        The robot's joints in the order of the policy's state, and in the order of its action.

    Raises:
        RobotError: Robot and policy have different joints, or ``given`` has a joint that the policy does not have.
    """
    orders, unknown = [], {**given}
    for what, had in (("state", state), ("action", action)):
        joints = list(policy[what].get("names") or ())
        orders.append(match_joints(joints, had, given, what) if joints else list(had))
        unknown = {name: other for name, other in unknown.items() if name not in joints}
    if unknown:
        allowed = [name for what in ("state", "action") for name in policy[what].get("names") or ()]
        raise RobotError(
            f"rename_joint: expected joints of the policy, {', '.join(dict.fromkeys(allowed)) or 'but it names none'},"
            f" got {', '.join(unknown)}"
        )
    return orders[0], orders[1]


def match_joints(
    wanted: Sequence[str], had: Sequence[str], given: Mapping[str, str], what: str = "joints"
) -> list[str]:
    """Find the robot's joint for each joint of a policy.

    Args:
        wanted: Joints of the policy.
        had: Joints of the robot.
        given: For each joint of the policy, the joint of the robot. Without an entry, the names must be equal, with or
            without LeRobot's suffix ``.pos``.
        what: "state" or "action", for error messages.

    Returns:
        The robot's joints in the order of ``wanted``.

    Raises:
        RobotError: Joints are missing. The message names the joints, and the option that maps them.

    Example:
        >>> match_joints(["elbow"], ["elbow.pos"], {})
        ['elbow.pos']
    """
    matches = []
    for name in wanted:
        names = [given[name]] if name in given else [name, f"{name}.pos"]
        if name.endswith(".pos") and name not in given:
            names.append(name[: -len(".pos")])
        matches.append(next((other for other in names if other in had), ""))
    lost = [name for name, other in zip(wanted, matches) if not other]
    spare = [name for name in had if name not in matches]
    if lost or spare or len(set(matches)) < len(matches):
        # Show a complete option only if exactly one joint is left on each side. Any other pair would be a guess, and a
        # user who copies a wrong guess would swap two joints.
        example = f"for each of {', '.join(lost or wanted)}: --set rename_joint=NEW=JOINT, NEW being the robot's name"
        if len(lost) == len(spare) == 1:
            example = f"such as --set rename_joint={spare[0]}={lost[0]}"
        raise RobotError(
            f"robot: the policy's {what} has the joints {', '.join(wanted)}, the robot {', '.join(had) or 'none'}; map"
            f" the robot's joints, {example}"
        )
    return matches


def open_lerobot(
    kind: str,
    options: Mapping[str, Any],
    policy: Mapping[str, Any],
    cameras: Mapping[str, str] | None = None,
    joints: Mapping[str, str] | None = None,
) -> LeRobotArm:
    """Open and connect one of LeRobot's robots.

    Args:
        kind: Type of the robot, such as ``so101_follower``. Two types joined by a plus open a :class:`Pair`.
        options: Fields of the robot's configuration. For a pair, a mapping with "left" and "right".
        policy: The policy's description.
        cameras: For each camera of the policy, the camera of the robot, if their names differ.
        joints: For each joint of the policy, the joint of the robot, if their names differ.

    Returns:
        The connected robot.

    Raises:
        RobotError: The robot cannot be opened, or does not fit the policy.
    """
    kinds = kind.split("+")
    if len(kinds) > 1 and (len(kinds) > 2 or sorted(options) != ["left", "right"]):
        raise RobotError(
            f"lerobot:{kind}: expected two types, and options with the keys left and right, got {len(kinds)} types and"
            f" the keys {', '.join(options) or 'none'}"
        )
    try:
        robots = importlib.import_module("lerobot.robots")
    except ImportError as error:
        raise RobotError(
            f'--robot lerobot:{kind} needs the package lerobot in this environment ({error}); the tutorial "From a'
            ' LeRobot checkpoint to a robot" shows the installation'
        ) from error
    try:
        each = [options] if len(kinds) == 1 else [options["left"], options["right"]]
        arms = [
            robots.make_robot_from_config(
                lerobot_config(lerobot_choice(robots, robots.RobotConfig, one), own)
            )
            for one, own in zip(kinds, each)
        ]
        robot = arms[0] if len(arms) == 1 else Pair(*arms)
        arm = LeRobotArm(robot, policy, cameras, joints)
        robot.connect()
    except ClientError:
        raise
    except UnknownTypeError as error:
        raise RobotError(f"lerobot: {error}") from error
    # A driver can raise any type of exception, for example if a servo or a calibration is missing.
    except Exception as error:
        raise RobotError(f"lerobot:{kind}: {type(error).__name__}: {error}") from error
    return arm


def lerobot_config(made: Any, options: Mapping[str, Any]) -> Any:
    """Create one of LeRobot's configuration objects from plain values.

    Args:
        made: The class of the configuration.
        options: The value of each field, by the field's name, as on LeRobot's command line. Cameras are objects with
            their ``type``.

    Returns:
        The configuration.

    Raises:
        ValueError: A field is not valid. The message names it.
    """
    register_cameras(options)
    draccus = importlib.import_module("draccus")  # LeRobot reads its configurations with draccus
    try:
        return draccus.decode(made, dict(options))
    except draccus.utils.DraccusException as error:
        raise ValueError(str(error)) from error


def register_cameras(options: Mapping[str, Any]) -> None:
    """Import LeRobot's modules for all cameras in the options of a robot, and of the arms inside it.

    LeRobot's configurations accept a type of camera only after its module was imported.

    Args:
        options: Fields of a robot's configuration.

    Raises:
        ValueError: LeRobot has no such type of camera, or its module cannot be imported.
    """
    for name, value in options.items():
        if not isinstance(value, Mapping):
            continue
        if name != "cameras":
            register_cameras(value)
            continue
        for camera, fields in value.items():
            kind = fields.get("type") if isinstance(fields, Mapping) else None
            if not isinstance(kind, str):
                continue  # LeRobot itself rejects this camera later, with a message that names the camera
            package = importlib.import_module("lerobot.cameras")
            try:
                lerobot_choice(package, package.CameraConfig, kind)
            except (UnknownTypeError, ImportError) as error:
                raise ValueError(f"cameras.{camera}.type: {error}") from error


# The package names of LeRobot's plugins begin with one of these prefixes.
PLUGINS = ("lerobot_robot_", "lerobot_camera_", "lerobot_teleoperator_")


class UnknownTypeError(KeyError):
    """LeRobot has no robot, camera or teleoperator of this type."""

    def __str__(self) -> str:
        return str(self.args[0])


def import_plugins() -> dict[str, str]:
    """Import the installed plugins of LeRobot, as LeRobot's own commands do. Each plugin then registers its types.

    LeRobot up to 0.4 finds plugins by the names of modules, and later releases by the names of distributions. This
    function supports both.

    Returns:
        For each plugin that could not be imported, the reason.
    """
    names = {module.name for module in pkgutil.iter_modules()}
    names.update(each.metadata["Name"] or "" for each in importlib.metadata.distributions())
    tried = {name: _problem_of(name) for name in sorted(names) if name.startswith(PLUGINS)}
    return {name: why for name, why in tried.items() if why}


def _problem_of(plugin: str) -> str:
    """Import a plugin of LeRobot. Return the reason if the import failed, else ""."""
    try:
        importlib.import_module(plugin)
    except Exception as error:  # noqa: BLE001 - a broken plugin must not stop a robot that does not need the plugin
        return f"{type(error).__name__}: {error}"
    return ""


def lerobot_choice(package: Any, base: Any, kind: str) -> Any:
    """Find LeRobot's configuration class for a type of robot, camera or teleoperator.

    LeRobot registers a type when the type's module is imported. So this function imports the plugins, and then the
    modules of the package until the type is registered.

    Args:
        package: LeRobot's package with the modules of the types, such as ``lerobot.robots``.
        base: LeRobot's base class of these configurations.
        kind: The type, such as "so101_follower".

    Returns:
        The configuration class.

    Raises:
        UnknownTypeError: There is no such type.
        ImportError: The type may belong to a module that cannot be imported, for example without its driver.
    """
    folders = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", ()))]
    broken = import_plugins()
    for name in ("", *sorted(folders, key=lambda folder: folder != kind)):
        module = f"{package.__name__}.{name}"
        try:
            if name:
                importlib.import_module(module)
        except ImportError as error:
            if error.name != module:
                broken[name] = str(error)
        with contextlib.suppress(KeyError):
            return base.get_choice_class(kind)
    registered = sorted(base.get_known_choices()) if hasattr(base, "get_known_choices") else folders
    types = ", ".join(registered) or "the types that LeRobot registers"
    if broken:
        others = "; ".join(f"{name}: {why}" for name, why in broken.items())
        raise ImportError(
            f"expected one of {types}, got {kind!r}; these modules could not be imported: {others}"
        )
    plugin = f"lerobot_{package.__name__.rpartition('.')[2].removesuffix('s')}_"
    raise UnknownTypeError(
        f"expected one of {types}, got {kind!r}; to add a type of your own, install a package named {plugin}NAME that"
        " registers it"
    )


def find_class(text: str) -> Callable[..., Robot]:
    """Import a robot class of the user.

    Args:
        text: ``module:Class``. The module is in the current folder or in an installed package.

    Returns:
        The class, or another callable that creates a robot.

    Raises:
        ClientError: The module or the class does not exist.
    """
    value = load_named(text, f"robot {text}")
    if not callable(value):
        raise RobotError(f"robot {text}: expected a class, got {type(value).__name__}")
    return value


def open_class(text: str, options: Mapping[str, Any], cameras: Mapping[str, str] | None = None) -> Any:
    """Create a robot from a class of the user with the methods ``observe``, ``act`` and ``hold``.

    Args:
        text: ``module:Class``.
        options: Keyword arguments of the class.
        cameras: For each camera of the policy, the camera of the robot, if their names differ.

    Returns:
        The robot.

    Raises:
        RobotError: The robot cannot be created, or a method is missing.
    """
    factory = find_class(text)
    try:
        robot = factory(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise RobotError(f"robot {text}: {type(error).__name__}: {error}") from error
    if missing := missing_methods(robot):
        raise RobotError(f"robot {text}: expected the methods observe, act and hold; {missing[0]} is missing")
    return Renamed(robot, cameras) if cameras else robot


def ordered(robot: Any, policy: Mapping[str, Any], given: Mapping[str, str]) -> Any:
    """Wrap a robot so that its state and its commands have the order of the policy's state and action.

    Args:
        robot: The robot. Its ``joints`` are a list of names, or one list each for "state" and "action".
        policy: The policy's description.
        given: For each joint of the policy, the joint of the robot, if their names differ.

    Returns:
        The wrapped robot. The robot itself if the order is the same, or if robot or policy do not name their joints.

    Raises:
        RobotError: The joints do not fit, or ``given`` has joints but the robot has no names.
    """
    names = facts_of(robot).joints
    if names is None:
        if given:
            raise RobotError(
                "rename_joint: expected a robot that names its joints; add an attribute `joints` with their names"
            )
        return robot
    each = names if isinstance(names, Mapping) else {"state": names, "action": names}
    if not all(
        isinstance(each.get(what), (list, tuple)) and all(isinstance(name, str) for name in each[what])
        for what in ("state", "action")
    ):
        raise RobotError(
            f"robot: joints: expected a list of joint names, got {shown(names)}; rename the attribute if it is"
            " something else"
        )
    for what in ("state", "action"):
        dim = policy[what].get("dim")  # the dimension is None if the policy's numbers are poses
        if dim is not None and len(each[what]) != int(dim):
            raise RobotError(f"robot: joints: expected {dim} names for its {what}, got {len(each[what])}")
    if not (given or policy["state"].get("names") or policy["action"].get("names")):
        return robot
    states, actions = joints_of(policy, each["state"], each["action"], given)
    if states == list(each["state"]) and actions == list(each["action"]):
        return robot
    places = [each["state"].index(name) for name in states]
    return Ordered(robot, places, [actions.index(name) for name in each["action"]], actions)


class Renamed:
    """A wrapper around a robot that gives its cameras the policy's names.

    Args:
        robot: The robot.
        cameras: For each camera of the policy, the camera of the robot. All other cameras have the same name in both.
    """

    def __init__(self, robot: Any, cameras: Mapping[str, str]):
        self._robot, self._cameras = robot, dict(cameras)
        self.act, self.hold = robot.act, robot.hold

    def facts(self) -> RobotFacts:
        """Return the facts of the wrapped robot."""
        return facts_of(self._robot)

    def observe(self) -> dict[str, Any]:
        seen = self._robot.observe()
        return {**seen, "images": renamed(seen["images"], self._cameras)}


class Ordered:
    """A wrapper around a robot that converts its state and its commands to the order of a policy.

    Args:
        robot: The robot.
        states: For each value of the policy's state, its index in the robot's state.
        actions: For each value of the robot's command, its index in the policy's action.
        joints: Names of the values in a command, in the policy's order.
    """

    def __init__(self, robot: Any, states: Sequence[int], actions: Sequence[int], joints: Sequence[str]):
        self._robot, self._states, self._actions, self._joints = (
            robot,
            list(states),
            list(actions),
            list(joints),
        )
        self.hold = robot.hold

    def facts(self) -> RobotFacts:
        """Return the facts of the wrapped robot, with joints and poses in the policy's order."""
        own = facts_of(self._robot)
        sense = own.sense
        reordered = None if sense is None else lambda: np.asarray(sense())[self._states]
        poses = {name: self._pose(pose) for name, pose in own.poses.items()}
        return replace(own, joints=self._joints, sense=reordered, poses=poses)

    def _pose(self, pose: Any) -> Any:
        """Convert a rest pose of the robot to the policy's order. A pose of another size is returned unchanged."""
        if isinstance(pose, Mapping):
            return [pose[name] for name in self._joints] if sorted(pose) == sorted(self._joints) else pose
        return np.asarray(pose)[np.argsort(self._actions)] if len(pose) == len(self._actions) else pose

    def observe(self) -> dict[str, Any]:
        seen = dict(self._robot.observe())
        observation = {**seen, "state": np.asarray(seen["state"])[self._states]}
        # A watched robot also reports the command of its driver. Reorder this command too.
        if seen.get("action") is not None:
            place = np.argsort(self._actions)
            observation["action"] = np.asarray(seen["action"])[place]
        return observation

    def act(self, row: np.ndarray) -> None:
        self._robot.act(np.asarray(row)[self._actions])


def renamed(images: Mapping[str, Any], cameras: Mapping[str, str]) -> dict[str, Any]:
    """Rename the cameras of an observation from the robot's names to the policy's names.

    Args:
        images: Frames by the robot's cameras.
        cameras: For each camera of the policy, the camera of the robot. All other cameras have the same name in both.

    Returns:
        The same frames by the policy's cameras.

    Raises:
        RobotError: The robot has no such camera.
    """
    for camera in cameras.values():
        if camera not in images:
            raise RobotError(
                f"--rename: expected a camera of the robot ({', '.join(images) or 'none'}), got {camera}"
            )
    sources = set(cameras.values())
    others = {name: frame for name, frame in images.items() if name not in sources}
    return {**others, **{name: images[camera] for name, camera in cameras.items()}}
