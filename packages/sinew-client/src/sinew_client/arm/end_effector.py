"""Drive a robot whose commands are joint positions with a policy whose actions are end-effector poses.

The policy's state is the pose of the arm's tip. Inverse kinematics converts each action to joint positions that bring
the tip to the requested pose. A pose is rejected if it is out of reach, if it is singular, or if a joint would have to
move too fast. The robot then holds and reports the reason.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, fields, replace
from typing import Any, Mapping, Sequence

import numpy as np

from sinew_client.arm.kinematics import Chain, KinematicsError
from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.interfaces import NoCommand, NoObservation
from sinew_client.control.robots import RobotError, match_joints
from sinew_client.rotations import (
    from_6d,
    from_quaternion,
    from_rpy,
    from_vector,
    to_6d,
    to_quaternion,
    to_rpy,
    to_vector,
    undetermined,
)
from sinew_client.untrusted import named, shown

LARGEST = sys.float_info.max  # a larger Python integer cannot be converted to a float
# A joint has this velocity limit in rad/s (or m/s), if neither the robot's file nor the options state one.
USUAL_VELOCITY = math.pi
SOFT = 0.01  # weight of the rotation error when the rotation is only "near": the position then has priority
INVOLVED = 0.3  # an error message names each joint that has at least this share of the singular motion
SLACK = 1e-5  # tolerance of the velocity check, radians or metres per control step
# Key: a form of the end effector's pose. Value: the count of its numbers, a function that converts these numbers to a
# matrix, and the inverse function.
_FORMS: dict[str, tuple[int, Any, Any]] = {
    "xyz": (3, None, None),
    "rpy": (3, from_rpy, to_rpy),
    "rotvec": (3, from_vector, to_vector),
    "quat": (4, from_quaternion, to_quaternion),
    "wxyz": (4, lambda x: from_quaternion(np.roll(x, -1)), lambda m: np.roll(to_quaternion(m), 1)),
    "rot6d": (6, from_6d, to_6d),
    "gripper": (1, None, None),
    "joints": (0, None, None),  # the number of joints depends on the robot
}
# Key: a form of the pose. Value: the names that bundles use for its numbers.
_NAMED = {
    "xyz": ("x", "y", "z"),
    "rpy": ("roll", "pitch", "yaw"),
    "rotvec": ("rx", "ry", "rz"),
    "quat": ("qx", "qy", "qz", "qw"),
    "wxyz": ("qw", "qx", "qy", "qz"),
}
_UNIT = re.compile(r"(?:(\d+(?:\.\d+)?) ?)?(m|mm|cm|rad|deg)")
_SIZES = {"m": 1.0, "cm": 1e-2, "mm": 1e-3, "rad": 1.0, "deg": math.pi / 180}
_GRIPPERS = ("gripper", "opening", "close", "jaw", "finger")


@dataclass(frozen=True)
class PosePart:
    """A part of a state or action vector: consecutive numbers that are a position, a rotation, a gripper or joints.

    Attributes:
        form: Form of the numbers, such as "xyz" or "rotvec".
        first: Index of the first number in the vector.
        size: Count of the numbers.
        unit: Metres or radians per unit of the numbers.
        offset: True if the numbers are relative to the tip's present pose (a delta). False if they are relative to the
            base.
    """

    form: str
    first: int
    size: int
    unit: float = 1.0
    offset: bool = False

    def of(self, vector: np.ndarray) -> np.ndarray:
        """Return the numbers of this part from a whole vector [D], converted to metres or radians, float64 [size]."""
        return self.unit * np.asarray(vector, np.float64)[self.first : self.first + self.size]


def parse_parts(
    text: str, units: Sequence[str] = (), what: str = "action", joints: int = 0
) -> tuple[PosePart, ...]:
    """Parse the layout of a pose vector.

    Args:
        text: Parts separated by commas: ``xyz``, ``rpy`` (about fixed axes), ``rotvec``, ``quat`` (x, y, z, w),
            ``wxyz``, ``rot6d``, ``gripper`` and ``joints``. ``d`` before one of the first three makes it a delta.
            ``*SIZE`` after a part is the size of one unit, such as ``dxyz*0.02``.
        units: Unit of each number, as bundles state them. ``20 mm`` makes a unit 0.02 m. A unit that is neither
            length nor angle is rejected.
        what: "state" or "action", the prefix of error messages.
        joints: Count of the numbers of the part ``joints``.

    Returns:
        The parts, in the order of the vector.

    Raises:
        KinematicsError: The text or a unit is not valid.

    Example:
        >>> [part.size for part in parse_parts("dxyz*0.02,drotvec,gripper")]
        [3, 3, 1]
    """
    parts, first = [], 0
    for word in text.split(","):
        name, star, size = word.strip().partition("*")
        offset = name.startswith("d") and name[1:] in ("xyz", "rpy", "rotvec")
        form = name[1:] if offset else name
        if form not in _FORMS:
            raise KinematicsError(
                f"{what}: expected {', '.join(_FORMS)}, dxyz, drpy or drotvec, got {name!r:.40}"
            )
        count = _FORMS[form][0] or joints
        unit = _unit(units[first : first + count], form, f"{what}.{name}")
        if star:
            unit = _size(size, f"{what}.{name}")
        parts.append(PosePart(form, first, count, unit, offset))
        first += count
    forms = [part.form for part in parts if part.form != "gripper"]
    turns = [form for form in forms if form not in ("xyz", "joints")]
    if len(turns) > 1 or len(set(forms)) < len(forms):
        raise KinematicsError(
            f"{what}: expected at most one position (xyz) and one rotation, got {text!r:.80}"
        )
    return tuple(parts)


def _unit(units: Sequence[str], form: str, field: str) -> float:
    """Convert the units of a bundle to the size of one unit in metres or radians.

    Args:
        units: Unit of each number of a part, such as "mm", "20 mm" or "deg".
        form: Form of the part, such as "xyz".
        field: Name of the part in error messages.

    Returns:
        The size; 1.0 if the bundle states no units, and for grippers and joints.

    Raises:
        KinematicsError: A unit does not belong to this form, or the units differ.
    """
    if form in ("gripper", "joints") or not any(units):
        return 1.0
    sizes = set()
    for text in units:
        match = _UNIT.fullmatch(text)
        length = match is not None and match[2] in ("m", "cm", "mm")
        angle = match is not None and not length
        if (form == "xyz" and length) or (form in ("rpy", "rotvec") and angle):
            assert match is not None
            sizes.add(float(match[1] or 1.0) * _SIZES[match[2]])
        elif form in ("quat", "wxyz", "rot6d") and text in ("", "1"):
            sizes.add(1.0)
        else:
            allowed = {"xyz": "m, cm or mm", "rpy": "rad or deg", "rotvec": "rad or deg"}.get(form, "none")
            raise KinematicsError(f"{field}: expected the unit {allowed}, the policy states {text!r:.40}")
    if len(sizes) > 1:
        raise KinematicsError(
            f"{field}: expected the same unit for all values, got {', '.join(units)} from the policy"
        )
    return sizes.pop()


def _size(text: str, field: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0.0 < size < math.inf:
        raise KinematicsError(f"{field}: expected a number above 0 after *, got {text!r:.40}")
    return size


def parts_of(names: Sequence[str], offsets: Sequence[int] = ()) -> str:
    """Derive the layout of a pose vector from the names of its numbers.

    Args:
        names: Names of the numbers, such as "ee.x" or "gripper.pos".
        offsets: Indices of the numbers that are delta actions.

    Returns:
        The layout in the form that :func:`parse_parts` reads; "" if a name is unknown.

    Example:
        >>> parts_of(["x", "y", "z", "rx", "ry", "rz", "gripper"])
        'xyz,rotvec,gripper'
    """
    short = [re.split(r"[./ ]", name.lower())[-1] for name in names]
    short = [re.sub(r"^(ee|eef|tcp|delta|d)_", "", name) for name in short]
    words, at = [], 0
    while at < len(short):
        form = next((form for form, own in _NAMED.items() if tuple(short[at : at + len(own)]) == own), "")
        if form:
            words.append("d" * (at in offsets) + form)
            at += len(_NAMED[form])
        elif any(word in short[at] for word in _GRIPPERS):
            words.append("gripper")
            at += 1
        else:
            return ""
    return ",".join(words)


@dataclass(frozen=True)
class KinematicsOptions:
    """Options for the conversion of a policy's poses to joint positions.

    Attributes:
        tip: Name of the tip's frame in the URDF or MJCF file (:func:`~sinew_client.arm.kinematics.read_chain`).
        base: Name of the base frame in the same file.
        action: Layout of the policy's action (:func:`parse_parts`). "" derives it from the names of the numbers.
        state: Layout of the policy's state. "" derives the layout from the names of the numbers.
        unit: Unit of the robot's joints, "rad" or "deg".
        offsets: Coordinate frame of delta actions: "base" or "tip".
        rotation: "exact" reaches the requested rotation. "near" approaches it as far as the position allows, for arms
            with fewer than six joints. "keep" holds the rotation that the tip has at the first command. "free" allows
            any rotation. "" chooses by the arm and the action. With six joints or more: "exact" if the action has a
            rotation, else "keep". With fewer joints: "near" if the action has a rotation, else "free".
        within: Largest allowed errors of a pose that is reached: metres and radians.
        singular: Smallest allowed singular value of the jacobian, with lengths in multiples of the arm's reach. A pose
            with a smaller value is rejected.
        velocity: Velocity limit of each joint in rad/s or m/s, or one limit for all joints. None takes the limits of
            the robot's file.
    """

    tip: str = ""
    base: str = ""
    action: str = ""
    state: str = ""
    unit: str = ""
    offsets: str = "base"
    rotation: str = ""
    within: tuple[float, float] = (1e-3, 1e-2)
    singular: float = 0.01
    velocity: Any = None

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> KinematicsOptions:
        """Parse the options from a mapping, such as the JSON object of the setting ``kinematics_options``.

        Args:
            given: The value of each field, by the field's name. None takes the defaults.

        Returns:
            The options.

        Raises:
            KinematicsError: A field is unknown or has a wrong value. The message names the field.
        """
        if given is not None and not isinstance(given, Mapping):
            raise KinematicsError(f"options: expected an object, got {shown(given)}")
        values = dict(given or {})
        types = {field.name: field.type for field in fields(cls)}
        for name, value in values.items():
            if name not in types:
                raise KinematicsError(f"{named(name)}: unknown option; use one of {', '.join(types)}")
            if types[name] == "str" and not isinstance(value, str):
                raise KinematicsError(f"{name}: expected a text, got {shown(value)}")
        options = cls(**values)
        for name, choices in (
            ("unit", ("", "rad", "deg")),
            ("offsets", ("base", "tip")),
            ("rotation", ("", "exact", "near", "keep", "free")),
        ):
            if getattr(options, name) not in choices:
                raise KinematicsError(
                    f"{name}: expected one of {', '.join(filter(None, choices))}, got {getattr(options, name)!r:.40}"
                )
        for name, count in (("within", 2), ("singular", 0)):
            if not _positive(getattr(options, name), count):
                raise KinematicsError(
                    f"{name}: expected {count or 'one'} number{'s' * (count > 1)} above 0, got"
                    f" {shown(getattr(options, name))}"
                )
        return options

    def parts(self, policy: Mapping[str, Any], what: str, joints: int = 0) -> tuple[PosePart, ...]:
        """Determine the layout of a policy's state or action vector.

        Args:
            policy: The policy's description.
            what: "state" or "action".
            joints: Count of the robot's own numbers, for the part ``joints``.

        Returns:
            The parts, in the order of the vector.

        Raises:
            KinematicsError: The layout is unknown, or has another count of numbers than the vector.
        """
        stated: str = getattr(self, what)
        about = policy[what]
        names, motion = about.get("names") or (), policy.get("motion") or {}
        offsets = motion.get("action") or () if what == "action" and motion.get("kind") == "offsets" else ()
        text = stated or parts_of(names, tuple(offsets))
        if not text:
            raise KinematicsError(
                f"{what}: the layout of the pose cannot be derived from the names {', '.join(names) or '(none)'};"
                f" set it, such as"
                f""" --set kinematics_options='{{"{what}": "xyz,rotvec,gripper"}}'"""
            )
        parsed = parse_parts(text, about.get("units") or (), what, joints)
        wrong = [part for part in parsed if part.form == "joints" if what == "action"]
        if wrong or (what == "state" and any(part.offset for part in parsed)):
            raise KinematicsError(
                f"{what}: expected {'poses' if wrong else 'no deltas (dxyz)'}, got {text!r:.80}"
            )
        size = parsed[-1].first + parsed[-1].size
        if size != int(about["dim"]):
            raise KinematicsError(
                f"{what}: expected a layout with {about['dim']} values, as the policy has, got {size} from {text!r}"
            )
        return parsed


def _positive(value: Any, count: int) -> bool:
    """Return True if ``value`` is a finite number above 0. If ``count`` is above 0, a list of ``count`` such numbers is
    accepted too.
    """
    each = value if count else [value]
    return (
        isinstance(each, (list, tuple))
        and len(each) == (count or 1)
        and all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0.0 < x <= LARGEST for x in each)
    )


class KnownArm:
    """A wrapper around a robot that also computes the points of its arm, so that a viewer can show the arm.

    Commands pass through unchanged.

    Args:
        robot: A robot whose commands are joint positions.
        chain: The kinematic chain of its arm.
        names: Names of the robot's numbers.
        unit: Unit of the robot's joints, "rad" or "deg". "" takes the robot's own unit (``joint_unit``), or the unit
            in ``units``.
        joints: For each joint of the chain, the joint of the robot, if their names differ.
        spare: Number of values that the robot has in addition to the arm's joints; None allows any number.
        units: Units of the numbers, as a policy states them.

    Raises:
        RobotError: Joints or units do not fit (:class:`~sinew_client.control.robots.RobotError`).
    """

    def __init__(
        self,
        robot: Any,
        chain: Chain,
        names: Sequence[str],
        unit: str = "",
        joints: Mapping[str, str] | None = None,
        spare: int | None = None,
        units: Sequence[str] = (),
    ):
        self.chain, self._robot = chain, robot
        self._places = _matched(chain, names, joints or {}, spare)
        stated = {units[at] for at in self._places if at < len(units)}
        unit = unit or facts_of(robot).joint_unit or " or ".join(sorted(stated)) or "rad"
        if unit not in ("rad", "deg"):
            raise RobotError(
                f"robot: expected joints in radians or degrees, got {unit}; for LeRobot's arms, add"
                """ --robot-options '{"use_degrees": true}'"""
            )
        self._radians = np.where(chain.slides, 1.0, math.pi / 180 if unit == "deg" else 1.0)
        self._seen: np.ndarray | None = None  # last observed state: all its numbers

    def observe(self) -> dict[str, Any]:
        observation = dict(self._robot.observe())
        self._seen = np.asarray(observation["state"], np.float64)
        return observation

    def arm_points(self) -> np.ndarray | None:
        """Return the positions of the base, the joints and the tip in the last observation. Safe from any thread.

        Returns:
            float64 [J + 2, 3] in metres, in the base's frame; None before the first observation.
        """
        if (seen := self._seen) is None:
            return None
        tip = self.chain.forward(self._of(seen))
        return np.concatenate([np.zeros((1, 3)), tip.anchors, tip.place[None]])

    def text(self) -> str:
        """Return one line for the log: the chain of joints, and that it is only used to show the arm."""
        chain = self.chain
        return (
            f"kinematics: {len(chain.joints)} joints from {chain.base} to {chain.tip}, to show the arm; the policy's"
            " actions are joints"
        )

    def _of(self, whole: np.ndarray) -> np.ndarray:
        """Select the chain's joints from the robot's numbers [D], and convert to radians or metres, float64 [J]."""
        return np.asarray(whole)[self._places] * self._radians

    def facts(self) -> RobotFacts:
        """Return the facts of the wrapped robot, with the points of its arm added."""
        return replace(facts_of(self._robot), points=self.arm_points)

    def act(self, row: np.ndarray) -> None:
        self._robot.act(row)

    def hold(self) -> None:
        self._robot.hold()


class EndEffector(KnownArm):
    """A wrapper around a robot with joint commands, whose state and commands are poses of the arm's tip.

    ``act`` raises :class:`~sinew_client.control.interfaces.NoCommand` for a rejected pose.

    Args:
        robot: A robot whose commands are joint positions. If it has no joint names (``joints``), its numbers are the
            joints of the chain, followed by one number for each gripper.
        chain: The kinematic chain of its arm.
        options: The layout of the poses, and the treatment of rotations and limits.
        policy: The policy's description, with its state, action and motion.
        hz: Commands per second, for the velocity limits.
        joints: For each joint of the chain, the joint of the robot, if their names differ.

    Raises:
        RobotError: Joints or numbers do not fit (:class:`~sinew_client.control.robots.RobotError`).
        KinematicsError: Parts or units do not fit (:class:`~sinew_client.arm.kinematics.KinematicsError`).
    """

    def __init__(
        self,
        robot: Any,
        chain: Chain,
        options: KinematicsOptions,
        policy: Mapping[str, Any],
        hz: float,
        joints: Mapping[str, str] | None = None,
    ):
        names = facts_of(robot).joints
        names = names["action"] if isinstance(names, Mapping) else names
        size = len(chain.joints)
        self.options, self._period = options, 1.0 / hz
        self._velocity = _velocities(chain, options.velocity)
        self.action = options.parts(policy, "action")
        had = list(names) if names is not None else numbers_of(chain, self.action)
        super().__init__(robot, chain, had, options.unit, joints, _grippers(self.action))
        self._width = len(had)
        self._others = [at for at in range(len(had)) if at not in self._places]
        self.state = options.parts(policy, "state", len(had))
        if _grippers(self.state) > len(self._others):
            raise KinematicsError(
                f"state: expected at most {len(self._others)} grippers (the robot's), got {_text(self.state)}"
            )
        if not any(part.form == "xyz" for part in self.action):
            raise KinematicsError("action: expected a position of the tip (xyz or dxyz), got none")
        turned = any(part.form not in ("xyz", "gripper") for part in self.action)
        whole = size >= 6
        self.rotation = options.rotation or (
            ("exact" if whole else "near") if turned else ("keep" if whole else "free")
        )
        if self.rotation in ("exact", "near") and not turned:
            raise KinematicsError(
                f"rotation: {self.rotation} needs a rotation in the action, got an action without one; use keep or free"
            )
        self._weight = {"free": 0.0, "near": SOFT}.get(self.rotation, 1.0)
        if self.rotation == "exact" and not whole:
            raise KinematicsError(
                f"rotation: exact needs at least 6 joints, and {chain.base} to {chain.tip} has {size}; use near, which"
                " reaches the position and approaches the rotation"
            )
        # The observed positions of the joints. Each command sets them to None, until the robot is observed again.
        self._now: np.ndarray | None = None
        self._sent: np.ndarray | None = None  # joints of the last command; None after a hold
        # For rotation "keep": the rotation of the tip at the first command.
        self._kept: np.ndarray | None = None

    @property
    def motion(self) -> dict[str, Any] | None:
        """The motion ``{"kind": "absolute"}`` if action and state have the same layout, else None."""
        return {"kind": "absolute"} if self.action == self.state else None

    def text(self) -> str:
        """Return one line for the log: the chain of joints, the layout of the poses, and the treatment of rotations."""
        chain = self.chain
        free = [name for name, own in zip(chain.joints, chain.velocity) if math.isnan(own)]
        usual = (
            f"; no velocity is stated of {', '.join(free)}, {USUAL_VELOCITY:.4g}/s is taken"
            if free and self.options.velocity is None
            else ""
        )
        return (
            f"kinematics: {len(chain.joints)} joints from {chain.base} to {chain.tip}; action {_text(self.action)},"
            f" state {_text(self.state)}; rotation {self.rotation}{usual}"
        )

    def facts(self) -> RobotFacts:
        """Return the facts of the wrapped robot, changed for poses: no joint names, and a speed limit of its own."""
        own = super().facts()
        sense = own.sense
        posed = None if sense is None else lambda: self._encoded(sense())
        absolute = self.action == self.state and not any(part.offset for part in self.action)
        poses = {name: self._of_joints(pose) for name, pose in own.poses.items()} if absolute else {}
        return replace(
            own,
            joints=None,
            sense=posed,
            bounds_speed=True,
            needs_state=lambda: self.needs_state,
            poses=poses,
            between=self.between if absolute else None,
        )

    def _of_joints(self, pose: Any) -> np.ndarray:
        """Convert joint positions to a pose in the layout of the action, float32. ``pose`` is a list of positions, or a
        mapping from joint names to positions.
        """
        names = facts_of(self._robot).names("action")
        whole = self._checked([pose[name] for name in names] if isinstance(pose, Mapping) else pose)
        tip = self.chain.forward(self._of(whole))
        return self._written(self.action, whole, tip.place, tip.turn)

    def between(self, start: np.ndarray, goal: np.ndarray, share: float) -> np.ndarray:
        """Interpolate between two poses. Between them, the tip turns about one fixed axis.

        Args:
            start: The first pose, [D] in the layout of the action.
            goal: The last pose, [D].
            share: 0 for the first pose, 1 for the last pose.

        Returns:
            The pose in between, float64 [D].
        """
        pose = np.array(start, np.float64) + share * (np.asarray(goal, np.float64) - start)
        for part in self.action:
            if part.form not in ("xyz", "gripper", "joints"):
                _, read, write = _FORMS[part.form]
                first, last = (read(part.of(vector)) for vector in (start, goal))
                turned = from_vector(share * to_vector(last @ first.T)) @ first
                pose[part.first : part.first + part.size] = write(turned) / part.unit
        return pose

    def observe(self) -> dict[str, Any]:
        seen = dict(self._robot.observe())
        observation = {**seen, "state": self._encoded(seen["state"])}
        did = observation.pop("action", None)
        # A watched robot also reports the command of its driver. Delta actions cannot be derived from that command.
        if did is not None and not any(part.offset for part in self.action):
            whole = self._checked(did)
            tip = self.chain.forward(self._of(whole))
            observation["action"] = self._written(self.action, whole, tip.place, tip.turn)
        return observation

    def act(self, row: np.ndarray) -> None:
        """Convert a pose to joint positions, and send them to the robot.

        Args:
            row: The action, float32 [D].

        Raises:
            NoCommand: The pose is out of reach, singular, or needs a joint to move too fast.
        """
        start, whole = self._start()
        tip = self.chain.forward(start if self._now is None else self._now)
        place, turn = self._pose(np.asarray(row, np.float64), tip.place, tip.turn)
        joints = self.chain.inverse(place, turn, start, self._weight)
        self._check(place, turn, start, joints)
        command = np.array(whole, np.float64)
        command[self._places] = joints / self._radians
        grippers = [part for part in self.action if part.form == "gripper"]
        for at, part in zip(self._others, grippers):
            command[at] = row[part.first]
        self._sent, self._now = joints, None
        self._robot.act(command.astype(np.float32))

    @property
    def needs_state(self) -> bool:
        """True if the next command depends on the robot's position in its control step.

        Delta actions depend on this position. So does the first command after a hold, because somebody may have moved
        the robot.
        """
        return self._sent is None or any(part.offset for part in self.action)

    def hold(self) -> None:
        self._sent = self._now = None
        self._robot.hold()

    def _checked(self, state: Any) -> np.ndarray:
        numbers = np.asarray(state, np.float64)
        if numbers.shape != (self._width,):
            raise RobotError(
                f"robot: expected {self._width} values ({', '.join(self.chain.joints)} and"
                f" {self._width - len(self._places)} more), got shape {list(numbers.shape)}"
            )
        return numbers

    def _encoded(self, state: Any) -> np.ndarray:
        """Convert the robot's state to the policy's state, float32.

        Raises:
            NoObservation: The state is not finite.
        """
        seen = self._checked(state)
        if not np.all(np.isfinite(seen)):
            raise NoObservation("the state is not finite")
        self._seen = seen
        self._now = self._of(self._seen)
        tip = self.chain.forward(self._now)
        return self._written(self.state, self._seen, tip.place, tip.turn)

    def _written(
        self, parts: Sequence[PosePart], whole: np.ndarray, place: np.ndarray, turn: np.ndarray
    ) -> np.ndarray:
        numbers, others = [], iter(self._others)
        for part in parts:
            if part.form == "gripper":
                at = next(others, None)
                if at is None:
                    raise RobotError(
                        "state: the pose layout needs one gripper for each of the robot's numbers besides the arm's"
                    )
                numbers.append([whole[at]])
            elif part.form == "joints":
                numbers.append(whole)
            else:
                own = place if part.form == "xyz" else _FORMS[part.form][2](turn)
                numbers.append(own / part.unit)
        return np.concatenate(numbers).astype(np.float32)

    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the arm's joints before the next command, float64 [J], and all numbers of the last observed state."""
        # A control loop observes the robot before such a command. Without a loop, observe the robot here.
        if self._now is None and self.needs_state:
            sense = facts_of(self._robot).sense
            try:
                self._encoded(sense() if sense is not None else self._robot.observe()["state"])
            except NoObservation as blind:
                raise NoCommand(str(blind)) from blind
        assert self._seen is not None
        return (self._of(self._seen) if self._sent is None else self._sent), self._seen

    def _pose(self, row: np.ndarray, place: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute the pose that an action requests.

        Args:
            row: The action, float64 [D].
            place: Present position of the tip, [3].
            turn: Present rotation matrix of the tip, [3, 3].

        Returns:
            The requested position [3] and rotation matrix [3, 3].

        Raises:
            NoCommand: The numbers of the rotation do not determine a rotation.
        """
        if self._kept is None:
            self._kept = turn
        goal, turned = place, self._kept if self.rotation == "keep" else turn
        own = self.options.offsets == "tip"
        for part in self.action:
            if part.form == "gripper":
                continue
            values = part.of(row)
            if part.form == "xyz":
                goal = place + (turn @ values if own else values) if part.offset else values
            else:
                if why := undetermined(values):
                    raise NoCommand(f"the {part.form} of an action is not a rotation", f"it has {why}")
                about = _FORMS[part.form][1](values)
                turned = (turn @ about if own else about @ turn) if part.offset else about
        return goal, turned

    def _check(self, place: np.ndarray, turn: np.ndarray, start: np.ndarray, joints: np.ndarray) -> None:
        """Check that the joints reach the pose, away from singular poses and within the velocity limits.

        Args:
            place: Requested position of the tip, [3].
            turn: Requested rotation matrix of the tip, [3, 3].
            start: Joints before the command, float64 [J].
            joints: Joints of the command, float64 [J].

        Raises:
            NoCommand: The joints must not be sent.
        """
        chain, (near, straight) = self.chain, self.options.within
        away, apart = (float(value) for value in chain.apart(place, turn, joints))
        if away > near or (apart > straight and self._weight == 1.0):
            stopped = np.flatnonzero((joints <= chain.low) | (joints >= chain.high))
            ends = (
                f", {', '.join(chain.joints[at] for at in stopped)} at an end of the range"
                if len(stopped)
                else ""
            )
            raise NoCommand(
                f"out of reach{ends}", f"[{place[0]:.3f}, {place[1]:.3f}, {place[2]:.3f}] is missed by {away:.3g} m and"
                f" {apart:.3g} rad",
            )  # fmt: skip
        after, before = (chain.singularity(q, self._weight == 1.0) for q in (joints, start))
        if after.least < min(self.options.singular, before.least):
            both = [name for name, share in zip(chain.joints, after.joints) if share > INVOLVED]
            raise NoCommand(
                f"singular pose: {', '.join(both)} would move without moving the tip",
                f"the least singular value is {after.least:.2g}, expected at least {self.options.singular:g}",
            )
        fastest = np.abs(joints - start) / self._period
        # Rounding to float32 can make the step between two commands a little longer, so SLACK is allowed.
        over = np.flatnonzero(fastest > self._velocity + SLACK / self._period)
        if len(over):
            at = int(over[np.argmax(fastest[over] / self._velocity[over])])
            raise NoCommand(
                f"{chain.joints[at]} would have to move faster than {self._velocity[at]:.4g}/s",
                f"by {fastest[at]:.3g}/s",
            )


def _grippers(parts: Sequence[PosePart]) -> int:
    return sum(part.form == "gripper" for part in parts)


def numbers_of(chain: Chain, action: Sequence[PosePart]) -> list[str]:
    """Return default names for the numbers of a robot: the joints of the chain, then one name for each gripper."""
    return [*chain.joints, *(f"gripper{i or ''}" for i in range(_grippers(action)))]


def moves_joints(policy: Mapping[str, Any], chain: Chain, joints: Mapping[str, str]) -> bool:
    """Return True if the names of a policy's state and action contain all joints of the chain.

    Args:
        policy: The policy's description.
        chain: The kinematic chain of the arm.
        joints: For each joint of the chain, the joint of the robot, if their names differ.
    """
    arm = {joints.get(name, name) for name in chain.joints}
    for what in ("state", "action"):
        names = set(policy[what].get("names") or ())
        if not arm <= names | {re.sub(r"\.pos$", "", name) for name in names}:
            return False
    return True


def _matched(chain: Chain, had: Sequence[str], renames: Mapping[str, str], spare: int | None) -> list[int]:
    """Find the joints of the chain among a robot's numbers.

    Args:
        chain: The kinematic chain of the arm.
        had: Names of the robot's numbers.
        renames: For each joint of the chain, the joint of the robot, if their names differ.
        spare: Number of values that the robot has in addition to the arm's joints; None allows any number.

    Returns:
        For each joint of the chain, its index among the robot's numbers.

    Raises:
        RobotError: A joint is missing, or the robot has another number of further values.
    """
    expected = {renames.get(name, name) for name in chain.joints}
    arm = [name for name in had if {name, f"{name}.pos", re.sub(r"\.pos$", "", name)} & expected]
    matches = match_joints(chain.joints, arm or had, renames, "kinematics")
    if spare is not None and len(had) - len(matches) != spare:
        raise RobotError(
            f"robot: expected {spare} values in addition to the arm's joints (the grippers of the action), got"
            f" {', '.join(name for name in had if name not in matches) or 'none'}"
        )
    return [list(had).index(name) for name in matches]


def _velocities(chain: Chain, limits: Any) -> np.ndarray:
    """Return the velocity limit of each joint in rad/s or m/s, float64 [J], from the options or the robot's file."""
    if limits is None:
        return np.where(np.isnan(chain.velocity), USUAL_VELOCITY, chain.velocity)
    each = list(limits) if isinstance(limits, (list, tuple)) else [limits] * len(chain.joints)
    if not _positive(each, len(chain.joints)):
        raise KinematicsError(
            f"velocity: expected a number above 0, or a list of {len(chain.joints)} such numbers, got {shown(limits)}"
        )
    return np.array(each, np.float64)


def _text(parts: Sequence[PosePart]) -> str:
    words = []
    for part in parts:
        size = f"*{part.unit:g}" if part.unit != 1.0 else ""
        words.append(f"{'d' * part.offset}{part.form}{size}")
    return ",".join(words)
