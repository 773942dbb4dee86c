"""A robot of joints that takes poses: for a policy of end-effector actions, by way of the arm's kinematics.

The policy gets the pose of the tip, and its actions become joints that bring the tip there. A pose is rejected if it
is out of reach, singular, or needs a joint to move too fast. The robot then holds with the reason.
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

LARGEST = sys.float_info.max  # a whole number may be larger, and is no float
USUAL_VELOCITY = math.pi  # velocity limit of a joint, per second, if neither description nor options have one
SOFT = 0.01  # weight of a rotation that is only approached
INVOLVED = 0.3  # share from which a joint is named where a pose is singular
SLACK = 1e-5  # radians or metres
_FORMS: dict[str, tuple[int, Any, Any]] = {  # numbers, to a matrix and back
    "xyz": (3, None, None),
    "rpy": (3, from_rpy, to_rpy),
    "rotvec": (3, from_vector, to_vector),
    "quat": (4, from_quaternion, to_quaternion),
    "wxyz": (4, lambda x: from_quaternion(np.roll(x, -1)), lambda m: np.roll(to_quaternion(m), 1)),
    "rot6d": (6, from_6d, to_6d),
    "gripper": (1, None, None),
    "joints": (0, None, None),  # as many as the robot has
}
_NAMED = {  # names of a pose's numbers in bundles
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
    """Some numbers of a vector: a place, a rotation, a gripper or joints.

    Attributes:
        form: Their form, such as "xyz" or "rotvec".
        first: Index of the first one.
        count: How many there are.
        unit: Factor from the numbers to metres or radians.
        offset: True if they count from the tip's pose instead of the base.
    """

    form: str
    first: int
    size: int
    unit: float = 1.0
    offset: bool = False

    def of(self, vector: np.ndarray) -> np.ndarray:
        """Return these numbers of a vector, in metres or radians."""
        return self.unit * np.asarray(vector, np.float64)[self.first : self.first + self.size]


def parse_parts(
    text: str, units: Sequence[str] = (), what: str = "action", joints: int = 0
) -> tuple[PosePart, ...]:
    """Read the parts of a pose.

    Args:
        text: Parts separated by commas: ``xyz``, ``rpy`` (about fixed axes), ``rotvec``, ``quat`` (x, y, z, w),
            ``wxyz``, ``rot6d``, ``gripper`` and ``joints``. ``d`` before one of the first three makes it a delta.
            ``*SIZE`` after a part is the size of one unit, such as ``dxyz*0.02``.
        units: Unit of each number, as bundles state them. ``20 mm`` makes a unit 0.02 m. A unit that is neither
            length nor angle is rejected.
        what: Prefix of error messages.
        joints: Numbers of the part ``joints``.

    Returns:
        The parts.

    Raises:
        KinematicsError: The text or a unit is not valid.
    """
    found, first = [], 0
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
        found.append(PosePart(form, first, count, unit, offset))
        first += count
    forms = [part.form for part in found if part.form != "gripper"]
    turns = [form for form in forms if form not in ("xyz", "joints")]
    if len(turns) > 1 or len(set(forms)) < len(forms):
        raise KinematicsError(f"{what}: expected one place and one rotation, got {text!r:.80}")
    return tuple(found)


def _unit(given: Sequence[str], form: str, field: str) -> float:
    """Return the size of one unit in metres or radians, from the units of a bundle; 1 if it states none."""
    if form in ("gripper", "joints") or not any(given):
        return 1.0
    sizes = set()
    for text in given:
        match = _UNIT.fullmatch(text)
        length = match is not None and match[2] in ("m", "cm", "mm")
        angle = match is not None and not length
        if (form == "xyz" and length) or (form in ("rpy", "rotvec") and angle):
            assert match is not None
            sizes.add(float(match[1] or 1.0) * _SIZES[match[2]])
        elif form in ("quat", "wxyz", "rot6d") and text in ("", "1"):
            sizes.add(1.0)
        else:
            wanted = {"xyz": "m, cm or mm", "rpy": "rad or deg", "rotvec": "rad or deg"}.get(form, "none")
            raise KinematicsError(f"{field}: expected the unit {wanted}, the policy states {text!r:.40}")
    if len(sizes) > 1:
        raise KinematicsError(
            f"{field}: expected one unit for all numbers, the policy states {', '.join(given)}"
        )
    return sizes.pop()


def _size(text: str, field: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0.0 < size < math.inf:
        raise KinematicsError(f"{field}: expected a size above 0 behind *, got {text!r:.40}")
    return size


def parts_of(names: Sequence[str], offsets: Sequence[int] = ()) -> str:
    """Return the parts that the names of a vector imply; "" if they imply none. offsets: numbers that are delta
    actions.
    """
    short = [re.split(r"[./ ]", name.lower())[-1] for name in names]
    short = [re.sub(r"^(ee|eef|tcp|delta|d)_", "", name) for name in short]
    found, at = [], 0
    while at < len(short):
        form = next((form for form, own in _NAMED.items() if tuple(short[at : at + len(own)]) == own), "")
        if form:
            found.append("d" * (at in offsets) + form)
            at += len(_NAMED[form])
        elif any(word in short[at] for word in _GRIPPERS):
            found.append("gripper")
            at += 1
        else:
            return ""
    return ",".join(found)


@dataclass(frozen=True)
class KinematicsOptions:
    """How a policy's poses become joints.

    Attributes:
        tip: Frame of the robot's description (:func:`~sinew_client.arm.kinematics.read_chain`).
        base: Frame of the robot's description.
        action: Parts of the policy's action (:func:`parse_parts`); "" follows from the names of its numbers.
        state: Parts of the policy's state; "" likewise.
        unit: Unit of the robot's joints, "rad" or "deg".
        offsets: Frame of delta actions: "base" or "tip".
        rotation: "exact", "near" (as near as the place allows, for arms with fewer than six joints), "keep" (as at
            the first command) or "free". "" chooses: with six joints or more, exact if the action has a rotation and
            keep if not; with fewer, near or free.
        within: Metres and radians by which the tip may miss a pose.
        singular: Smallest singular value of the jacobian, with lengths in reaches of the arm. A pose with a smaller
            one is rejected.
        velocity: Limit of each joint per second, or one for all; None takes those of the description.
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
        """Return the options of an object. Raises :class:`KinematicsError` that names the field."""
        if given is not None and not isinstance(given, Mapping):
            raise KinematicsError(f"options: expected an object, got {shown(given)}")
        values = dict(given or {})
        known = {field.name: field.type for field in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise KinematicsError(f"{named(name)}: unknown; known are {', '.join(known)}")
            if known[name] == "str" and not isinstance(value, str):
                raise KinematicsError(f"{name}: expected a text, got {shown(value)}")
        found = cls(**values)
        for name, choices in (
            ("unit", ("", "rad", "deg")),
            ("offsets", ("base", "tip")),
            ("rotation", ("", "exact", "near", "keep", "free")),
        ):
            if getattr(found, name) not in choices:
                raise KinematicsError(
                    f"{name}: expected one of {', '.join(filter(None, choices))}, got {getattr(found, name)!r:.40}"
                )
        for name, count in (("within", 2), ("singular", 0)):
            if not _positive(getattr(found, name), count):
                raise KinematicsError(
                    f"{name}: expected {count or 'one'} number{'s' * (count > 1)} above 0, got"
                    f" {shown(getattr(found, name))}"
                )
        return found

    def parts(self, policy: Mapping[str, Any], what: str, joints: int = 0) -> tuple[PosePart, ...]:
        """Return the parts of a policy's state or action. joints: how many numbers the robot has."""
        given: str = getattr(self, what)
        about = policy[what]
        names, motion = about.get("names") or (), policy.get("motion") or {}
        offsets = motion.get("action") or () if what == "action" and motion.get("kind") == "offsets" else ()
        text = given or parts_of(names, tuple(offsets))
        if not text:
            raise KinematicsError(
                f"{what}: the policy's names ({', '.join(names) or 'none'}) do not tell the parts of its pose;"
                f" set them, such as"
                f""" --kinematics-options '{{"{what}": "xyz,rotvec,gripper"}}'"""
            )
        found = parse_parts(text, about.get("units") or (), what, joints)
        wrong = [part for part in found if part.form == "joints" if what == "action"]
        if wrong or (what == "state" and any(part.offset for part in found)):
            raise KinematicsError(f"{what}: expected {'poses' if wrong else 'no offsets'}, got {text!r:.80}")
        size = found[-1].first + found[-1].size
        if size != int(about["dim"]):
            raise KinematicsError(
                f"{what}: expected {about['dim']} numbers, as the policy has, got {size} of {text!r}"
            )
        return found


def _positive(given: Any, count: int) -> bool:
    """Return True for a finite number above 0, or for ``count`` of them."""
    each = given if count else [given]
    return (
        isinstance(each, (list, tuple))
        and len(each) == (count or 1)
        and all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0.0 < x <= LARGEST for x in each)
    )


class KnownArm:
    """A robot of joints with a known arm. It is driven by joints, and others can show where its arm is.

    Args:
        names: Names of the policy's numbers.
        units: Units of these, as a policy states them.
        unit: Unit of the robot's joints, "rad" or "deg"; "" takes the robot's own (``joint_unit``), or that of
            ``units``.
        joints: Joint of the chain -> joint of the robot, if they have other names.
        spare: Numbers of the robot besides the arm's; None for any.

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
                f"robot: expected joints in radians or degrees, got {unit}; LeRobot's arms have degrees with"
                """ --robot-options '{"use_degrees": true}'"""
            )
        self._radians = np.where(chain.slides, 1.0, math.pi / 180 if unit == "deg" else 1.0)
        self._seen: np.ndarray | None = None  # all numbers of the robot's state, as they were seen last

    def observe(self) -> dict[str, Any]:
        found = dict(self._robot.observe())
        self._seen = np.asarray(found["state"], np.float64)
        return found

    def arm_points(self) -> np.ndarray | None:
        """Return the last known points of the arm: base, joints and tip, float64 [J + 2, 3], metres; None before the
        first.

        May be called from any thread.
        """
        if (seen := self._seen) is None:
            return None
        tip = self.chain.forward(self._of(seen))
        return np.concatenate([np.zeros((1, 3)), tip.anchors, tip.place[None]])

    def text(self) -> str:
        """One line that tells what the description is used for."""
        chain = self.chain
        return (
            f"kinematics: {len(chain.joints)} joints from {chain.base} to {chain.tip}, to show the arm; the policy's"
            " actions are joints"
        )

    def _of(self, whole: np.ndarray) -> np.ndarray:
        """Return the chain's joints, radians or metres, of the robot's numbers."""
        return np.asarray(whole)[self._places] * self._radians

    def facts(self) -> RobotFacts:
        """Return the facts of the robot itself, with the points of its arm."""
        return replace(facts_of(self._robot), points=self.arm_points)

    def act(self, row: np.ndarray) -> None:
        self._robot.act(row)

    def hold(self) -> None:
        self._robot.hold()


class EndEffector(KnownArm):
    """A robot whose numbers are poses of its tip.

    ``act`` raises :class:`~sinew_client.control.interfaces.NoCommand` for a rejected pose.

    Args:
        robot: A robot of joints, with their names (``joints``), or with the numbers of the chain and the grippers, in
            that order.
        policy: The policy's description, with its state, action and motion.
        hz: Commands per second, for the limits of velocity.
        joints: Joint of the chain -> joint of the robot, if they have other names.

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
                f"state: expected at most {len(self._others)} grippers, as the robot has, got {_text(self.state)}"
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
                f"rotation: expected a rotation in the action for {self.rotation}, got none"
            )
        self._weight = {"free": 0.0, "near": SOFT}.get(self.rotation, 1.0)
        if self.rotation == "exact" and not whole:
            raise KinematicsError(
                f"rotation: expected at least 6 joints for exact, {chain.base} to {chain.tip} has {size}; near brings"
                " the tip to its place with the rotation as near as it can be"
            )
        self._now: np.ndarray | None = None  # joints as they were seen since the last command or hold
        self._sent: np.ndarray | None = None  # joints of the last command, None after a hold
        self._kept: np.ndarray | None = None  # the rotation that is kept

    @property
    def motion(self) -> dict[str, Any] | None:
        """The motion "absolute" if action and state have the same parts, else None."""
        return {"kind": "absolute"} if self.action == self.state else None

    def text(self) -> str:
        """One line that tells how the policy's numbers are used."""
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

    # ------------------------------------------------------------------------- the robot's methods

    def facts(self) -> RobotFacts:
        """Return the facts of the robot itself, except that its numbers are poses and it bounds its own speed."""
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
        """Return the policy's numbers of a pose of the robot's joints."""
        names = facts_of(self._robot).names("action")
        whole = self._checked([pose[name] for name in names] if isinstance(pose, Mapping) else pose)
        tip = self.chain.forward(self._of(whole))
        return self._written(self.action, whole, tip.place, tip.turn)

    def between(self, start: np.ndarray, goal: np.ndarray, share: float) -> np.ndarray:
        """Return the pose at a share of the way between two, float64 [D]. The tip turns about one axis."""
        found = np.array(start, np.float64) + share * (np.asarray(goal, np.float64) - start)
        for part in self.action:
            if part.form not in ("xyz", "gripper", "joints"):
                _, read, write = _FORMS[part.form]
                first, last = (read(part.of(vector)) for vector in (start, goal))
                turned = from_vector(share * to_vector(last @ first.T)) @ first
                found[part.first : part.first + part.size] = write(turned) / part.unit
        return found

    def observe(self) -> dict[str, Any]:
        seen = dict(self._robot.observe())
        found = {**seen, "state": self._encoded(seen["state"])}
        did = found.pop("action", None)
        if did is not None and not any(part.offset for part in self.action):  # the command of another driver
            whole = self._checked(did)
            tip = self.chain.forward(self._of(whole))
            found["action"] = self._written(self.action, whole, tip.place, tip.turn)
        return found

    def act(self, row: np.ndarray) -> None:
        """Send the joints of a pose. Raises :class:`~sinew_client.control.interfaces.NoCommand`."""
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
        """True if the next command counts from the robot's position in its control step.

        That is so for delta actions, and after a hold, in which the robot may have been moved.
        """
        return self._sent is None or any(part.offset for part in self.action)

    def hold(self) -> None:
        self._sent = self._now = None
        self._robot.hold()

    # ------------------------------------------------------------------------- poses

    def _checked(self, state: Any) -> np.ndarray:
        found = np.asarray(state, np.float64)
        if found.shape != (self._width,):
            raise RobotError(
                f"robot: expected {self._width} numbers, {', '.join(self.chain.joints)} and"
                f" {self._width - len(self._places)} more, got shape {list(found.shape)}"
            )
        return found

    def _encoded(self, state: Any) -> np.ndarray:
        """Return the policy's state, float32, of the robot's."""
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
        """Return the joints that a command begins from, and all numbers of the robot."""
        if self._now is None and self.needs_state:  # not observed yet, so no loop drives it
            sense = facts_of(self._robot).sense
            try:
                self._encoded(sense() if sense is not None else self._robot.observe()["state"])
            except NoObservation as blind:
                raise NoCommand(str(blind)) from blind
        assert self._seen is not None
        return (self._of(self._seen) if self._sent is None else self._sent), self._seen

    def _pose(self, row: np.ndarray, place: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pose of an action. place, turn: the tip's present pose."""
        if self._kept is None:
            self._kept = turn
        wanted, turned = place, self._kept if self.rotation == "keep" else turn
        own = self.options.offsets == "tip"
        for part in self.action:
            if part.form == "gripper":
                continue
            given = part.of(row)
            if part.form == "xyz":
                wanted = place + (turn @ given if own else given) if part.offset else given
            else:
                if why := undetermined(given):
                    raise NoCommand(f"the {part.form} of a row is no rotation", f"it has {why}")
                about = _FORMS[part.form][1](given)
                turned = (turn @ about if own else about @ turn) if part.offset else about
        return wanted, turned

    def _check(self, place: np.ndarray, turn: np.ndarray, start: np.ndarray, joints: np.ndarray) -> None:
        """Raise :class:`NoCommand` where joints may not be sent."""
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
        found, before = (chain.singularity(q, self._weight == 1.0) for q in (joints, start))
        if found.least < min(self.options.singular, before.least):
            both = [name for name, share in zip(chain.joints, found.joints) if share > INVOLVED]
            raise NoCommand(
                f"singular: {', '.join(both)} would move without the tip",
                f"the least singular value is {found.least:.2g}, expected at least {self.options.singular:g}",
            )
        fastest = np.abs(joints - start) / self._period
        # Commands are float32, so the way from one to the next may be that much more.
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
    """Return the names of the numbers of a robot with an arm's joints and a number for each gripper."""
    return [*chain.joints, *(f"gripper{i or ''}" for i in range(_grippers(action)))]


def moves_joints(policy: Mapping[str, Any], chain: Chain, joints: Mapping[str, str]) -> bool:
    """Return True where state and action of a policy are joints, those of the chain among them. joints: as KnownArm."""
    wanted = {joints.get(name, name) for name in chain.joints}
    for what in ("state", "action"):
        names = set(policy[what].get("names") or ())
        if not wanted <= names | {re.sub(r"\.pos$", "", name) for name in names}:
            return False
    return True


def _matched(chain: Chain, had: Sequence[str], given: Mapping[str, str], spare: int | None) -> list[int]:
    """Return the index of each of the chain's joints among a robot's numbers. spare: number of the others."""
    wanted = {given.get(name, name) for name in chain.joints}
    arm = [name for name in had if {name, f"{name}.pos", re.sub(r"\.pos$", "", name)} & wanted]
    found = match_joints(chain.joints, arm or had, given, "kinematics")
    if spare is not None and len(had) - len(found) != spare:
        raise RobotError(
            f"robot: expected {spare} numbers besides the arm's (the action's grippers), got"
            f" {', '.join(name for name in had if name not in found) or 'none'}"
        )
    return [list(had).index(name) for name in found]


def _velocities(chain: Chain, given: Any) -> np.ndarray:
    """Return the limit of each joint, per second."""
    if given is None:
        return np.where(np.isnan(chain.velocity), USUAL_VELOCITY, chain.velocity)
    each = list(given) if isinstance(given, (list, tuple)) else [given] * len(chain.joints)
    if not _positive(each, len(chain.joints)):
        raise KinematicsError(
            f"velocity: expected one number above 0, or {len(chain.joints)}, got {shown(given)}"
        )
    return np.array(each, np.float64)


def _text(parts: Sequence[PosePart]) -> str:
    words = []
    for part in parts:
        size = f"*{part.unit:g}" if part.unit != 1.0 else ""
        words.append(f"{'d' * part.offset}{part.form}{size}")
    return ",".join(words)
