"""What upstream's runners do to a goal's pose and to a path, and with the robot: constants that no file holds.

Source: NHirose/OmniVLA (inference/run_omnivla.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from sinew.convert.options import ConvertOptions, Setting
from sinew.core import VectorSpec
from sinew.families.omnivla.goals import GOALS, POSE
from sinew.steps.vector.affine import Affine
from sinew.steps.vector.base import VectorStep
from sinew.steps.vector.one_of import OneOf
from sinew.steps.vector.reach import Reach

SPACING, REACH, HZ = 0.1, 30.0, 3.0  # metric_waypoint_spacing, thres_dist and tick_rate
FRAME = (480, 640)  # size of the cameras' frames, which no file states
SETTINGS = {
    "waypoint_spacing": Setting(float, "metres of one unit of a path (0.1)", 1e-4, 100),
    "reach": Setting(float, "metres within which a goal's pose is taken to lie (30)", 1e-3, 1e6),
}
ACTION = VectorSpec(POSE, ("x", "y", "cos", "sin"), ("m", "m", "", ""))
State = tuple[VectorSpec, tuple[VectorStep, ...]]


def state(goals: Sequence[int], posed: bool, options: ConvertOptions) -> State:
    """Return the state and its steps: a pose where one is read, and the goal's number where there are several."""
    names: tuple[str, ...] = ()
    steps: list[VectorStep] = []
    if posed:
        names = ACTION.names
        steps.append(Reach((0, 1), float(options.setting("reach", REACH))))
        steps.append(Affine((0, 1), 1 / spacing_of(options)))
    if len(goals) > 1:
        words = tuple(GOALS[goal] for goal in goals)
        steps.append(OneOf((len(names),), tuple(map(float, goals)), words))
        names = (*names, "goal")
    units = tuple("m" if name in ("x", "y") else "" for name in names)
    return VectorSpec(len(names), names, units), tuple(steps)


def spacing_of(options: ConvertOptions) -> float:
    """Return the length of a path's unit in metres."""
    return float(options.setting("waypoint_spacing", SPACING))


def path_steps(options: ConvertOptions) -> tuple[VectorStep, ...]:
    """Return the steps that convert a path to metres."""
    return (Affine((0, 1), spacing_of(options)),)


def notes(goals: Sequence[int], posed: bool, options: ConvertOptions) -> tuple[str, ...]:
    """Return notes about facts that no file states."""
    given = "waypoint_spacing" in options.settings
    reason = "as given" if given else "as upstream's runner has it: --set waypoint_spacing=METRES"
    found = [
        f"{spacing_of(options):g} metres between waypoints, {reason}",
        f"goals: {', '.join(f'{goal} {GOALS[goal]}' for goal in goals)}",
    ]
    if posed:
        far = f"{options.setting('reach', REACH):g} m"
        found.append(f"poses further off than {far} are moved to that distance")
    return tuple(found)
