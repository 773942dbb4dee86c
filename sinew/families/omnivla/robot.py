"""Constants in OmniVLA's inference scripts, which no file of a checkpoint contains: the scale of a goal's pose and of a
path, and the control rate.

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

# The runner's metric_waypoint_spacing in m, thres_dist in m, and tick_rate in Hz.
SPACING, REACH, HZ = 0.1, 30.0, 3.0
# Height and width of the camera frames in pixels, which are in no file.
FRAME = (480, 640)
SETTINGS = {
    "waypoint_spacing": Setting(float, "length of one unit of a path in metres (default 0.1)", 1e-4, 100),
    "reach": Setting(
        float,
        "largest distance of a goal's pose in metres; farther goals are moved to it (default 30)",
        1e-3,
        1e6,
    ),
}
ACTION = VectorSpec(POSE, ("x", "y", "cos", "sin"), ("m", "m", "", ""))
State = tuple[VectorSpec, tuple[VectorStep, ...]]


def state(goals: Sequence[int], posed: bool, options: ConvertOptions) -> State:
    """Build the state and its conversion steps: the goal's pose if there is one, and the goal's number if there are
    several.

    Args:
        goals: Numbers of the supported goals.
        posed: True if the policy reads a pose.
        options: The user's options.
    """
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
    """Return the length of one unit of a path in metres."""
    return float(options.setting("waypoint_spacing", SPACING))


def path_steps(options: ConvertOptions) -> tuple[VectorStep, ...]:
    """Return the steps that convert a path to metres."""
    return (Affine((0, 1), spacing_of(options)),)


def notes(goals: Sequence[int], posed: bool, options: ConvertOptions) -> tuple[str, ...]:
    """Return notes for the user about facts that no file of the checkpoint contains."""
    is_set = "waypoint_spacing" in options.settings
    reason = (
        "as set by the user"
        if is_set
        else "the default of OmniVLA's runner; change it with --set waypoint_spacing=METRES"
    )
    lines = [
        f"{spacing_of(options):g} metres between waypoints, {reason}",
        f"goals: {', '.join(f'{goal} {GOALS[goal]}' for goal in goals)}",
    ]
    if posed:
        far = f"{options.setting('reach', REACH):g} m"
        lines.append(f"poses farther away than {far} are moved to that distance")
    return tuple(lines)
