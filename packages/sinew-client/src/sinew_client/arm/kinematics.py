"""Forward and inverse kinematics of an arm.

A :class:`Chain` has the joints between two frames of a robot. It needs only numpy, so it runs on the robot's computer.
:func:`read_chain` reads a chain from URDF, without the meshes, or from MJCF with MuJoCo. Lengths are in metres, angles
in radians. The columns of a rotation matrix are the tip's axes in the base's frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from sinew_client.errors import ClientError
from sinew_client.rotations import from_quaternion, from_rpy, from_vector, to_vector
from sinew_client.untrusted import read_text

MAX_FILE = 1 << 24  # largest URDF or MJCF file, bytes
MAX_TURN = 0.4  # largest step of a joint in one iteration of inverse kinematics, radians or metres
ITERATIONS = 60
DAMPING = 1e-9  # smallest damping of inverse kinematics, as a fraction of the squared reach of the arm


class KinematicsError(ClientError, ValueError):
    """The URDF or MJCF file has no such chain of joints, or the chain is ambiguous. The message states the reason."""


class Tip(NamedTuple):
    """The pose of the tip.

    Attributes:
        place: float64 [..., 3], the tip's position in the base's frame.
        turn: [..., 3, 3], the tip's rotation.
        jacobian: [..., 6, J], the tip's velocity and angular velocity per unit of each joint's velocity.
        anchors: [..., J, 3], positions of the joints.
    """

    place: np.ndarray
    turn: np.ndarray
    jacobian: np.ndarray
    anchors: np.ndarray


class Singularity(NamedTuple):
    """A measure of the distance between an arm's pose and a singular pose.

    Attributes:
        least: Smallest singular value of the jacobian, with lengths in multiples of the arm's reach. It is 0 at a
            singular pose.
        joints: Share of each joint in the joint motion that moves the tip least, float64 [J], 0 to 1.
    """

    least: float
    joints: np.ndarray


@dataclass(frozen=True)
class Chain:
    """The J joints between two frames of a robot, in order from the base to the tip.

    Attributes:
        places: [J, 3], origin of each joint's frame in the frame of the previous joint.
        turns: [J, 3, 3], rotation of each joint's frame in the frame of the previous joint.
        axes: [J, 3], axis of each joint in its frame, of length 1.
        slides: bool [J], True for a prismatic joint.
        low: [J], lower end of each joint's range; -inf without one.
        high: [J], upper end of each joint's range; inf without one.
        velocity: [J], velocity limit per second; NaN if the description has none.
        tip_place: [3], origin of the tip's frame in the last joint's frame.
        tip_turn: [3, 3], rotation of the tip's frame in the last joint's frame.
    """

    joints: tuple[str, ...]
    places: np.ndarray
    turns: np.ndarray
    axes: np.ndarray
    slides: np.ndarray
    low: np.ndarray
    high: np.ndarray
    velocity: np.ndarray
    tip_place: np.ndarray
    tip_turn: np.ndarray
    base: str = ""
    tip: str = ""

    @property
    def reach(self) -> float:
        """Length of the stretched arm, from its first joint to its tip, metres."""
        parts = [*self.places[1:], self.tip_place]
        sliding = np.where(self.slides, np.maximum(np.abs(self.low), np.abs(self.high)), 0.0)
        return float(np.linalg.norm(parts, axis=1).sum() + sliding[np.isfinite(sliding)].sum()) or 1.0

    def forward(self, joints: np.ndarray) -> Tip:
        """Compute the pose of the tip (forward kinematics).

        Args:
            joints: Joint positions [..., J], radians or metres.

        Returns:
            The pose of the tip, with the jacobian and the positions of the joints.
        """
        q = np.asarray(joints, np.float64)
        turned = self.turns @ from_vector(np.where(self.slides, 0.0, q)[..., None] * self.axes)
        place, turn = np.zeros((*q.shape[:-1], 3)), np.broadcast_to(np.eye(3), (*q.shape[:-1], 3, 3))
        anchors, axes = np.empty((*q.shape, 3)), np.empty((*q.shape, 3))
        for i, slides in enumerate(self.slides):
            place = place + turn @ self.places[i]
            turn = turn @ turned[..., i, :, :]
            axes[..., i, :] = turn @ self.axes[i]
            if slides:
                place = place + axes[..., i, :] * q[..., i, None]
            anchors[..., i, :] = place
        place, turn = place + turn @ self.tip_place, turn @ self.tip_turn
        arms = np.where(self.slides[:, None], axes, _cross(axes, place[..., None, :] - anchors))
        about = np.where(self.slides[:, None], 0.0, axes)
        return Tip(place, turn, np.swapaxes(np.concatenate([arms, about], axis=-1), -1, -2), anchors)

    def inverse(
        self, place: np.ndarray, turn: np.ndarray, start: np.ndarray, weight: float = 1.0
    ) -> np.ndarray:
        """Find joints near ``start`` that bring the tip to a pose, or near the pose (inverse kinematics).

        Check the remaining distance with :meth:`apart`. The method is damped least squares within the joints' ranges.
        Each iteration solves (J^T J + d I) dq = J^T e. e is the error of the position and the rotation vector, and d is
        half of its square (Sugihara 2011, IEEE Transactions on Robotics 27, 984). So steps are small far from the pose
        and near a singular pose, and they are Newton steps near the pose. An iteration leaves out the joints that are
        at the end of their range and would move further.

        Args:
            place: [..., 3], requested position of the tip.
            turn: [..., 3, 3], requested rotation of the tip.
            start: [..., J], joints from which the search starts.
            weight: Weight of the rotation. With 1, an error of a radian counts as much as an error of the arm's reach.
                Use a smaller weight for arms with fewer than six joints. A second search then starts at this
                compromise of position and rotation, and reaches the position exactly. 0 allows any rotation.

        Returns:
            Joint positions, float64 [..., J], radians or metres.
        """
        q = np.clip(np.array(start, np.float64), self.low, self.high)
        for length in (weight,) if weight in (0.0, 1.0) else (weight, 0.0):
            q = self._descended(place, turn, q, length * self.reach)
        return q

    def _descended(self, place: np.ndarray, turn: np.ndarray, q: np.ndarray, length: float) -> np.ndarray:
        shape, size = q.shape, q.shape[-1]
        flat = q.reshape(-1, size)
        places = np.broadcast_to(place, (*shape[:-1], 3)).reshape(-1, 3)
        turns = np.broadcast_to(turn, (*shape[:-1], 3, 3)).reshape(-1, 3, 3)
        scale = np.array([1.0] * 3 + [length] * 3)
        least, unit = DAMPING * self.reach**2, np.eye(size)
        pending = np.arange(len(flat))  # indices of the poses that the arm has not reached yet
        for _ in range(ITERATIONS):
            now = flat[pending]
            tip = self.forward(now)
            error = scale * _error(places[pending], turns[pending], tip)
            jacobian = scale[:, None] * tip.jacobian
            pull = np.einsum("nij,ni->nj", jacobian, error)
            stuck = ((now <= self.low) & (pull < 0.0)) | ((now >= self.high) & (pull > 0.0))
            damping = 0.5 * (error**2).sum(-1) + least
            step = np.zeros_like(now)
            # The first pass may move joints to an end of their range. The second pass then solves without these joints.
            for _again in range(2):
                jacobian = np.where(stuck[:, None, :], 0.0, jacobian)
                normal = np.swapaxes(jacobian, -1, -2) @ jacobian + damping[:, None, None] * unit
                step = np.linalg.solve(normal, np.where(stuck, 0.0, pull)[..., None])[..., 0]
                step *= np.minimum(1.0, MAX_TURN / np.maximum(np.abs(step).max(-1, keepdims=True), 1e-12))
                ends = (now + step < self.low) | (now + step > self.high)
                if not np.any(ends & ~stuck):
                    break
                flat[pending] = np.clip(now + step, self.low, self.high)
                stuck = stuck | ends
            moved = np.clip(np.where(stuck, flat[pending], now + step), self.low, self.high)
            flat[pending] = moved
            pending = pending[np.abs(moved - now).max(-1) > 1e-8]
            if not len(pending):
                break
        return flat.reshape(shape)

    def apart(self, place: np.ndarray, turn: np.ndarray, joints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute the distance between the tip and a pose.

        Args:
            place: Position of the pose, [..., 3].
            turn: Rotation matrix of the pose, [..., 3, 3].
            joints: Joint positions, [..., J].

        Returns:
            The distance in metres [...], and the angle in radians [...].
        """
        error = _error(place, turn, self.forward(joints))
        return np.linalg.norm(error[..., :3], axis=-1), np.linalg.norm(error[..., 3:], axis=-1)

    def singularity(self, joints: np.ndarray, weight: float = 1.0) -> Singularity:
        """Measure the distance to a singular pose.

        Args:
            joints: Joint positions, float64 [J].
            weight: 0 considers only the position of the tip. Any other value considers its rotation too.

        Returns:
            The smallest singular value of the jacobian, and the joints that belong to it.
        """
        _u, values, rows = np.linalg.svd(self._moves(joints)[: 6 if weight else 3])
        return Singularity(float(values[-1]), np.abs(rows[len(values) - 1]))

    def _moves(self, joints: np.ndarray) -> np.ndarray:
        """Return the jacobian at joints [..., J], float64 [..., 6, J], with lengths in multiples of the arm's reach."""
        jacobian = self.forward(joints).jacobian
        jacobian[..., :3, :] /= self.reach
        return jacobian

    def ready(self) -> np.ndarray:
        """Return a start pose for a simulated arm, far from singular poses and from the ends of the joints' ranges.

        Returns:
            The best of 200 random poses with a fixed seed, float64 [J].
        """
        low, high = np.maximum(self.low, -math.pi / 2), np.minimum(self.high, math.pi / 2)
        low, high = np.where(low < high, low, self.low), np.where(low < high, high, self.high)
        drawn = np.random.default_rng(0).uniform(
            low + 0.1 * (high - low), high - 0.1 * (high - low), (200, len(low))
        )
        return drawn[int(np.argmax(np.linalg.svd(self._moves(drawn), compute_uv=False)[:, -1]))]


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute the cross products of vectors [..., 3]. The results equal those of np.cross, which first checks its
    arguments slowly.
    """
    after, before = [1, 2, 0], [2, 0, 1]
    return a[..., after] * b[..., before] - a[..., before] * b[..., after]


def _error(place: np.ndarray, turn: np.ndarray, tip: Tip) -> np.ndarray:
    """Return the error of the tip, [..., 6]: position in metres, and rotation vector in the base's frame.

    Args:
        place: Requested position of the tip, [..., 3].
        turn: Requested rotation matrix of the tip, [..., 3, 3].
        tip: Present pose of the tip.
    """
    return np.concatenate([place - tip.place, to_vector(turn @ np.swapaxes(tip.turn, -1, -2))], axis=-1)


@dataclass(frozen=True)
class _Joint:
    """A joint of a URDF or MJCF file, or a fixed connection (kind "fixed").

    Its coordinate frame is given relative to the frame of its parent.
    """

    name: str
    kind: str
    place: np.ndarray
    turn: np.ndarray
    axis: np.ndarray
    low: float = -math.inf
    high: float = math.inf
    velocity: float = math.nan


def read_chain(path: Path, tip: str = "", base: str = "") -> Chain:
    """Read the joints from ``base`` to ``tip`` of a robot in URDF or MJCF.

    Args:
        path: A URDF file (``.urdf``), or an MJCF file (``.xml``), which needs the package mujoco.
        tip: A link of URDF, or a site or body of MJCF. "" takes the robot's last link if it has only one.
        base: A link of URDF or a body of MJCF. "" takes the root link, or the world body.

    Returns:
        The chain.

    Raises:
        KinematicsError: The file cannot be read, or has no such chain.

    Example:
        >>> chain = read_chain(Path("arm.urdf"), tip="gripper_link")
        >>> chain.forward(np.zeros(len(chain.joints))).place  # float64 [3], metres
    """
    try:
        text = read_text(path, MAX_FILE)
    except (OSError, ValueError) as error:
        raise KinematicsError(f"{path}: {error}") from error
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise KinematicsError(
            f"{path}: expected a description without a document type; remove <!DOCTYPE> and <!ENTITY> from the file"
        )
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - the text has no entities and a limited size
    except ElementTree.ParseError as error:
        raise KinematicsError(f"{path}: {error}") from error
    if root.tag not in ("robot", "mujoco"):
        raise KinematicsError(
            f"{path}: expected a URDF file (robot) or an MJCF file (mujoco), got {root.tag!r:.40}"
        )
    try:
        links = _urdf(root, tip, base) if root.tag == "robot" else _mjcf(path, tip, base)
        return _chain(*links)
    except KinematicsError as error:
        raise KinematicsError(f"{path}: {error}") from error


def _urdf(root: Any, tip: str, base: str) -> tuple[list[_Joint], str, str]:
    """Return the joints between two links of a URDF file, from base to tip, and the names of both links.

    Args:
        root: Root element of the file's XML.
        tip: Name of the last link; "" takes the robot's only last link.
        base: Name of the first link; "" takes the root link.
    """
    # For each link: the joint that carries the link, and the parent link of this joint.
    above = {}
    for joint in root.findall("joint"):
        parent, child = (joint.find(end) for end in ("parent", "child"))
        if parent is None or child is None:
            raise KinematicsError(
                f"joint {joint.get('name')}: expected the elements parent and child, one is missing"
            )
        if parent.get("link") is None or child.get("link") is None:
            raise KinematicsError(
                f"joint {joint.get('name')}: expected the attribute link of parent and child, one is missing"
            )
        above[child.get("link")] = (joint, parent.get("link"))
    links = [link.get("name") for link in root.findall("link")]
    if None in links:
        raise KinematicsError("link: expected a name for each link, got a link without a name")
    ends = [name for name in links if name not in {parent for _, parent in above.values()}]
    tip, base = _named(tip, links, ends, "tip"), base and _named(base, links, (), "base")
    joints, at = [], tip
    while at != base and at in above:
        joint, at = above[at]
        joints.append(_urdf_joint(joint))
        if len(joints) > len(above):
            raise KinematicsError(
                f"expected a tree of links, got a cycle at {at}; correct the parent of this link"
            )
    if base and at != base:
        raise KinematicsError(f"base: expected a link between the root and {tip}, got {base}")
    return joints[::-1], at, tip


def _urdf_joint(joint: Any) -> _Joint:
    name, kind = str(joint.get("name")), str(joint.get("type"))
    if joint.find("mimic") is not None:
        raise KinematicsError(
            f"joint {name}: expected a joint that takes commands, got a joint that follows another one (mimic);"
            " choose a chain without this joint"
        )
    origin, axis, limit = (joint.find(part) for part in ("origin", "axis", "limit"))
    place = _numbers(None if origin is None else origin.get("xyz"), (0.0, 0.0, 0.0), name)
    turn = from_rpy(_numbers(None if origin is None else origin.get("rpy"), (0.0, 0.0, 0.0), name))
    way = _numbers(None if axis is None else axis.get("xyz"), (1.0, 0.0, 0.0), name)
    low, high, fastest = -math.inf, math.inf, math.nan
    if limit is not None:
        if kind != "continuous":
            low, high = (float(_numbers(limit.get(end), (0.0,), name, 1)[0]) for end in ("lower", "upper"))
        fastest = float(_numbers(limit.get("velocity"), (math.nan,), name, 1)[0])
    return _Joint(name, kind, place, turn, way, low, high, fastest if fastest > 0.0 else math.nan)


def _mjcf(path: Path, tip: str, base: str) -> tuple[list[_Joint], str, str]:
    """Return the joints between two frames of an MJCF file, from base to tip, and the names of both frames.

    MuJoCo compiles the file first, with its defaults, classes and included files.
    """
    try:
        import mujoco
    except ImportError as error:
        raise KinematicsError(f"MJCF needs the package mujoco ({error}); install it, or use URDF") from error
    try:
        model = mujoco.MjModel.from_xml_path(str(path))
    except ValueError as error:
        raise KinematicsError(f"{error!s:.300}") from error
    bodies = [model.body(i).name for i in range(model.nbody)]
    sites = [model.site(i).name for i in range(model.nsite)]
    ends = [bodies[i] for i in range(1, model.nbody) if i not in set(map(int, model.body_parentid))]
    tip = _named(tip, [*sites, *bodies], sites if len(sites) == 1 else ends, "tip")
    base = _named(base, bodies, (), "base") if base else bodies[0]
    joints, at = [], bodies.index(tip) if tip in bodies else 0
    if tip in sites:
        site = model.site(tip)
        joints.append(_Joint(tip, "fixed", site.pos.copy(), _mujoco_turn(site.quat), np.zeros(3)))
        at = int(site.bodyid[0])
    while bodies[at] != base and at != 0:
        joints += _mjcf_body(model, at)[::-1]
        at = int(model.body_parentid[at])
    if bodies[at] != base:
        raise KinematicsError(f"base: expected a body between the world and {tip}, got {base}")
    return joints[::-1], base, tip


def _mjcf_body(model: Any, at: int) -> list[_Joint]:
    """Return the fixed transform from the parent body to body number ``at``, followed by the joints of this body."""
    joints = [_Joint("", "fixed", model.body_pos[at], _mujoco_turn(model.body_quat[at]), np.zeros(3))]
    for number in range(model.body_jntadr[at], model.body_jntadr[at] + model.body_jntnum[at]):
        joint = model.joint(number)
        kind = {2: "prismatic", 3: "revolute"}.get(int(joint.type[0]), "free or ball")
        low, high = joint.range if model.jnt_limited[number] else (-math.inf, math.inf)
        anchor, away = joint.pos.copy(), float(model.qpos0[model.jnt_qposadr[number]])
        joints.append(_Joint(joint.name, kind, anchor, np.eye(3), joint.axis.copy(), low, high))
        # An MJCF body is drawn at the joint position `qpos0`, which may differ from 0. Move the body back by it.
        back = -away * joint.axis if kind == "prismatic" else np.zeros(3)
        turn = from_vector(-away * joint.axis) if kind == "revolute" else np.eye(3)
        joints.append(_Joint("", "fixed", back, turn, np.zeros(3)))
        joints.append(_Joint("", "fixed", -anchor, np.eye(3), np.zeros(3)))
    return joints


def _mujoco_turn(quaternion: np.ndarray) -> np.ndarray:
    return from_quaternion(np.roll(quaternion, -1))


def _chain(parts: list[_Joint], base: str, tip: str) -> Chain:
    """Build a chain from joints and fixed connections. Each fixed connection is merged into the next joint's frame."""
    place, turn = np.zeros(3), np.eye(3)
    moving: list[_Joint] = []
    for part in parts:
        place, turn = place + turn @ part.place, turn @ part.turn
        if part.kind == "fixed":
            continue
        if part.kind not in ("revolute", "continuous", "prismatic"):
            raise KinematicsError(
                f"joint {part.name}: expected the type revolute, continuous or prismatic, got {part.kind}"
            )
        length = float(np.linalg.norm(part.axis))
        if not (length > 0.0 and part.low <= part.high):
            raise KinematicsError(
                f"joint {part.name}: expected an axis that is not 0 and a lower limit up to the upper one, got"
                f" {part.axis.tolist()}, {part.low} to {part.high}"
            )
        moving.append(
            _Joint(part.name, part.kind, place, turn, part.axis / length, part.low, part.high, part.velocity)
        )
        place, turn = np.zeros(3), np.eye(3)
    if not moving:
        raise KinematicsError(
            f"expected joints between {base} and {tip}, got none; choose another tip or base"
        )
    return Chain(
        tuple(joint.name for joint in moving),
        *(np.array([getattr(joint, name) for joint in moving]) for name in ("place", "turn", "axis")),
        np.array([joint.kind == "prismatic" for joint in moving]),
        *(np.array([getattr(joint, name) for joint in moving]) for name in ("low", "high", "velocity")),
        place,
        turn,
        base,
        tip,
    )


def _named(name: str, frames: list[str], only: Any, what: str) -> str:
    """Choose the name of a frame.

    Args:
        name: The requested name; "" takes the only candidate.
        frames: The names of all frames, for the error message.
        only: The candidates. Without a requested name, there must be exactly one.
        what: Role of the frame, such as "tip", for the error message.

    Returns:
        The name.

    Raises:
        KinematicsError: There is no such frame, or no name was requested and there is not exactly one candidate.
    """
    if not name and len(only) == 1:
        return str(only[0])
    if name not in frames or not name:
        names = ", ".join((list(only) or frames)[:20])
        raise KinematicsError(
            f"{what}: expected {f'one of {names}' if names else 'a frame, but the file has no frames'}, got {name!r}"
        )
    return name


def _numbers(text: str | None, usual: tuple[float, ...], name: str, count: int = 3) -> np.ndarray:
    try:
        numbers = np.array(usual if text is None else [float(each) for each in text.split()], np.float64)
    except ValueError:
        numbers = np.zeros(0)
    if numbers.shape != (count,) or (text is not None and not np.all(np.isfinite(numbers))):
        raise KinematicsError(f"joint {name}: expected {count} numbers, got {text!r:.60}")
    return numbers
