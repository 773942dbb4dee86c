"""Scripted expert for LIBERO's pick-and-place tasks. It uses the poses in the simulator.

The hand grasps an object from above, along the narrowest horizontal direction of its collision geometry, and the palm
must not touch surrounding objects. An object that is wider than the open fingers is grasped at its rim, on the arm's
side.

Actions are those of robosuite's operational-space controller (``controllers/config/osc_pose.json``): 1 is a
displacement by 50 mm, or a turn by 0.5 rad about an axis of the world, relative to the present pose of the hand. The
gripper closes at +1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sinew.core import SinewError
from sinew_client.rotations import from_vector, to_vector

from sinew_eval.sim.experts import Act

# An action of 1 moves the hand by this many metres, or turns it by this many radians.
METRES, RADIANS = 0.05, 0.5
OPEN, CLOSE = -1.0, 1.0
GAIN = 2.0
FINGER = 0.04  # the pads grasp an object this many metres below its top
# CLEAR: height above an obstacle, in metres. NEAR and TURNED: a target counts as reached within this distance (metres)
# and this angle (radians).
CLEAR, NEAR, TURNED = 0.04, 0.008, 0.06
WIDEST = 0.075  # distance between the open fingers, in metres
MOVING = 0.1  # an object with a larger velocity is moving, in m/s or rad/s
# Distance from a rim down to the finger pads, and from the rim's outer edge inwards to the hand, in metres.
RIM, WALL = 0.025, 0.008
TIP = 0.012  # distance from the middle of the pads to the tip of a finger, in metres
# Points below both open fingers, in metres along and across the closing direction. The gaps between the points
# are smaller than the thickness of any object's wall.
FINGERS = np.array(
    [(s * x, y) for s in (-1, 1) for x in np.linspace(0.036, 0.052, 5) for y in (-0.012, 0.012)]
)
PALM = (0.105, 0.035)  # half the length of the palm in the closing direction, and half its width, in metres
ABOVE = 0.045  # distance from the pads up to the palm, in metres
PATIENCE = 40  # a movement ends after this many control steps
# The hand is blocked if it moves less than STILL metres and turns less than STEADY radians in STALLED control
# steps in a row.
STALLED, STILL, STEADY = 6, 0.0012, 0.02
SQUEEZE = 8  # number of control steps that the fingers need to close or to open


def begin(simulator: Any) -> Act:
    """Start an episode of the expert.

    Args:
        simulator: The simulator, after a reset.

    Returns:
        A function that computes the action of each control step, float32 [1, 7].

    Raises:
        SinewError: The task is not a pick-and-place task that the expert can solve.
    """
    env = simulator.robosuite
    goals = env.parsed_problem["goal_state"]
    on = [goal[2] for goal in goals if goal[0] == "on"]
    if any(goal[0] not in ("in", "on") and not _holds(env, goal) for goal in goals):
        supported = "goals of putting objects in or on other objects"
    elif any(goal[0] == "in" and not _open(env, goal[2]) for goal in goals):
        supported = "places that are open from above"
    elif len(set(on)) < len(on):
        supported = "a separate place for each object"
    else:
        actions = _play(env, goals)
        return lambda: next(actions)[None]
    got = "; ".join(" ".join(goal) for goal in goals)
    raise SinewError(f"{simulator.current}: the scripted expert supports only {supported}, got {got}")


def _play(env: Any, goals: list[list[str]]) -> Iterator[np.ndarray]:
    hand, things = Hand(env), list(env.obj_body_id.values())
    while True:
        for goal in goals:
            # In some recorded initial states, objects are still falling.
            while np.abs(env.sim.data.cvel[things]).max() > MOVING:
                yield from hand.rest(1, OPEN)
            if not _holds(env, goal):
                yield from _put(hand, env, *goal)
        # If the episode continues after all goals, an object has fallen. Check all goals again.
        yield from hand.rest(1, OPEN)


def _holds(env: Any, goal: list[str]) -> bool:
    """Return True if the simulator reports that the goal ``goal`` (a list of words, as in LIBERO's task files) is
    reached now.
    """
    return bool(env._eval_predicate(goal))  # noqa: SLF001 - there is no public name for it


def _open(env: Any, place: str) -> bool:
    """Return True if no object is above the middle of a place."""
    _, rim = _target(env, place)
    middle = env.sim.data.get_site_xpos(place)
    return free(env.sim, middle[:2], rim, rim - middle[2])


def _put(hand: Hand, env: Any, how: str, thing: str, place: str) -> Iterator[np.ndarray]:
    body = env.obj_body_id[thing]
    points, lay = corners(env.sim, body), env.sim.data.body_xpos[body][2]
    low, high = points[:, 2].min(), points[:, 2].max()
    depth = max(high - FINGER, low + 0.4 * min(high - low, FINGER))
    beside = [corners(env.sim, body) for name, body in env.obj_body_id.items() if name != thing]
    around = np.concatenate([np.zeros((0, 3)), *beside])
    around = around[around[:, 2] > depth + ABOVE][:, :2]
    base = hand.robot.base_pos[:2]
    xy, yaw, at_rim = grasp(
        points[:, :2], hand.yaw, around, base, lambda at: free(env.sim, at, high, RIM + TIP)
    )
    depth = high - RIM if at_rim else depth
    target, rim = _target(env, place)
    # The hand may hold the object beside its middle, so shift the target by the same offset.
    target += xy - (points[:, :2].min(0) + points[:, :2].max(0)) / 2
    travel = max(rim, high) + (depth - low) + CLEAR

    yield from hand.go((*xy, max(high + 0.1, hand.over)), yaw, OPEN)
    yield from hand.go((*xy, depth), yaw, OPEN, near=NEAR / 2)
    yield from hand.rest(SQUEEZE, CLOSE)
    yield from hand.go((*xy, travel), yaw, CLOSE, near=0.03)
    # The object slipped. Open the fingers, so that the caller tries again.
    if env.sim.data.body_xpos[body][2] < lay + CLEAR / 2:
        yield from hand.rest(SQUEEZE, OPEN)
        return
    yield from hand.go((*target, travel), yaw, CLOSE, near=0.015)
    # Lower a tall object into a container before the fingers open, because the object may stick to a finger.
    # Set an object down fully if it goes on another one.
    release = depth - low if how == "on" else max(0.02, depth - low - 0.06)
    yield from hand.go((*target, rim + release), yaw, CLOSE, near=0.015)
    yield from hand.rest(SQUEEZE, OPEN)
    hand.over = max(rim, high) + CLEAR
    yield from hand.go((*target, hand.over), yaw, OPEN, near=0.015)


def _target(env: Any, place: str) -> tuple[np.ndarray, float]:
    """Find the target for an object.

    Args:
        env: LIBERO's environment.
        place: Name of the place.

    Returns:
        xy of the target, and the height that the object has to pass, in metres.
    """
    state = env.object_states_dict[place]
    body = env.obj_body_id.get(getattr(state, "parent_name", None) or place)
    # Without a body of its own, the target is a part of the table.
    if body is None:
        *xy, height = env.sim.data.get_site_xpos(place)
        return np.array(xy), height
    points = corners(env.sim, body)
    if place in env.object_sites_dict:
        return env.sim.data.get_site_xpos(place)[:2].copy(), points[:, 2].max()
    return (points[:, :2].min(0) + points[:, :2].max(0)) / 2, points[:, 2].max()


class Hand:
    def __init__(self, env: Any):
        self.robot, self.data = env.robots[0], env.sim.data
        # Orientation of the hand with the fingers down, as at the beginning of an episode.
        self.down = self.robot.controller.ee_ori_mat.copy()
        left, right = (
            self.data.body_xpos[env.sim.model.body_name2id(f"gripper0_{side}finger")]
            for side in ("left", "right")
        )
        # The minimum height of the next movement, in metres, so that the hand passes over the container that it filled
        # last.
        self.over = -np.inf
        # Closing direction of the fingers in this orientation, in radians.
        self.across = self.yaw = np.arctan2(*(left - right)[1::-1])

    def go(self, place: Any, yaw: float, grip: float, near: float = NEAR) -> Iterator[np.ndarray]:
        """Move the hand to a place.

        Args:
            place: Target of the point between the finger pads, in metres.
            yaw: Direction in which the fingers close, in radians.
            grip: Action of the gripper.
            near: Distance at which the target counts as reached, in metres.

        Yields:
            The action of each control step, float32 [7].
        """
        goal = from_vector(np.array([0.0, 0.0, yaw - self.across])) @ self.down
        self.yaw = yaw
        before, still = np.full(6, np.inf), 0
        for _ in range(PATIENCE):
            controller = self.robot.controller
            far = np.asarray(place) - controller.ee_pos
            twist = to_vector(goal @ controller.ee_ori_mat.T)
            if np.abs(far).max() < near and np.linalg.norm(twist) < TURNED:
                return
            # End a long push that moves nothing. A policy that learns from these demonstrations could not see
            # why the fingers close.
            now = np.concatenate([far / STILL, twist / STEADY])
            still = still + 1 if np.abs(now - before).max() < 1 else 0
            if still == STALLED:
                return
            before = now
            step = np.concatenate([GAIN * far / METRES, GAIN * twist / RADIANS])
            yield np.append(np.clip(step, -1, 1), grip).astype(np.float32)

    def rest(self, steps: int, grip: float) -> Iterator[np.ndarray]:
        for _ in range(steps):
            yield np.array([0, 0, 0, 0, 0, 0, grip], np.float32)


def grasp(
    points: np.ndarray, yaw: float, around: np.ndarray, base: np.ndarray, free: Callable[[np.ndarray], bool]
) -> tuple[np.ndarray, float, bool]:
    """Choose the place and direction of a grasp from above.

    The narrowest direction is best, but a direction closer to ``yaw`` may be wider by 10 mm per radian. If the palm
    would touch ``around``, the hand moves sideways as far as the fingers allow. An object that is too wide is grasped
    at its rim, preferably close to the arm's base.

    Args:
        points: Corners of the object as seen from above, [N, 2] in metres.
        yaw: Present closing direction, in radians.
        around: Points of other objects that are as high as the palm, [M, 2] in metres.
        base: Position of the arm's base, [2] in metres.
        free: Returns True if an open finger can move down at a place [2].

    Returns:
        Place of the hand [2] in metres, closing direction in radians modulo pi, and True for a grasp at the rim.

    Raises:
        SinewError: No grasp is possible.
    """
    best: tuple[float, np.ndarray, float, bool] | None = None
    narrowest = np.inf
    for turned in np.linspace(-np.pi / 2, np.pi / 2, 61):
        axes = np.array([[c := np.cos(yaw + turned), s := np.sin(yaw + turned)], [-s, c]])
        inside = points @ axes.T  # coordinates along and across the closing direction
        low, high = inside.min(0), inside.max(0)
        narrowest = min(narrowest, width := high[0] - low[0])
        middle, slack = (low + high) / 2, (WIDEST - width) / 2
        asides = (
            slack * np.array([0, -0.5, 0.5, -1, 1]) if slack >= 0 else (width / 2 - WALL) * np.array([-1, 1])
        )
        for aside in asides:
            place = middle + np.array([aside, 0.0])
            met = (np.abs(around @ axes.T - place) < PALM).all(1).any()
            cost = width + 0.01 * abs(turned) + abs(aside) + met + np.linalg.norm(place @ axes - base) / 2
            if best is not None and cost >= best[0]:
                continue
            if slack >= 0 or all(map(free, (place + FINGERS) @ axes)):
                best = float(cost), place @ axes, yaw + turned, bool(slack < 0)
    if best is None:
        raise SinewError(
            f"grasp: expected an object of at most {1e3 * WIDEST:g} mm, or a rim with free space next to it, got"
            f" {1e3 * narrowest:.0f} mm"
        )
    return best[1:]


def free(sim: Any, place: np.ndarray, high: float, depth: float) -> bool:
    """Check that a finger can move down at a place.

    Args:
        sim: The simulator.
        place: xy of the place, in metres.
        high: Height at which the object begins, in metres.
        depth: Distance below ``high`` that must be free, in metres.

    Returns:
        True if a ray from above meets no geometry.
    """
    import mujoco

    start, collides = np.array([*place, high + CLEAR]), np.array([1, 0, 0, 0, 0, 0], np.uint8)
    model, data = sim.model._model, sim.data._data  # noqa: SLF001 - mujoco's own object, which robosuite wraps
    far = mujoco.mj_ray(
        model, data, start, np.array([0.0, 0.0, -1.0]), collides, 1, -1, np.zeros(1, np.int32)
    )
    return far < 0 or far > CLEAR + depth


def corners(sim: Any, body: int) -> np.ndarray:
    """Return the corners of a body's collision geometry.

    Args:
        sim: The simulator.
        body: Index of the body.

    Returns:
        Vertices of meshes, and corners of the bounding boxes of other shapes, [N, 3] in metres in the world.
    """
    model, data = sim.model._model, sim.data  # noqa: SLF001 - mujoco's own object, which robosuite wraps
    parts = [np.zeros((0, 3))]
    for geom in range(model.ngeom):
        if (
            model.body_rootid[model.geom_bodyid[geom]] != model.body_rootid[body]
            or not model.geom_contype[geom]
        ):
            continue
        if (mesh := model.geom_dataid[geom]) >= 0:
            first = model.mesh_vertadr[mesh]
            local = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
        else:
            middle, half = model.geom_aabb[geom].reshape(2, 3)
            signs = np.array(np.meshgrid(*[(-1, 1)] * 3)).reshape(3, -1).T
            local = middle + signs * half
        parts.append(local @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
    return np.concatenate(parts)
