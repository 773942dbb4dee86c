"""The goals of OmniVLA: the numbers of the training project, and the kinds of inputs that each goal reads."""

from __future__ import annotations

from collections.abc import Sequence

# The index of a goal in this tuple is its number in OmniVLA's script (inference/run_omnivla_edge.py, run_forward_pass).
GOALS = (
    "satellite",
    "pose+satellite",
    "satellite+image",
    "pose+satellite+image",
    "pose",
    "pose+image",
    "image",
    "language",
    "language+pose",
)
# Number of values in a pose and in a step of a path: x, y, and cosine and sine of the heading.
POSE = 4
# The kinds of inputs, in the order of OmniVLA's tokens.
KINDS = ("pose", "satellite", "image", "language")


def kinds(goals: Sequence[int]) -> tuple[str, ...]:
    """Return the kinds of inputs that at least one of the goals reads."""
    return tuple(kind for kind in KINDS if any(kind in GOALS[goal].split("+") for goal in goals))


def table(goals: Sequence[int]) -> list[list[bool]]:
    """Return one list for each goal in ``GOALS``: for each of the result of ``kinds(goals)``, True if the goal reads
    this kind.

    Rows of unsupported goals are not used, because clients cannot request these goals.
    """
    return [[kind in goal.split("+") for kind in kinds(goals)] for goal in GOALS]


def check_goals(goals: Sequence[int]) -> None:
    """Raise ValueError if a number is not the index of a goal, or occurs twice."""
    if not goals or len(set(goals)) < len(goals) or not all(0 <= goal < len(GOALS) for goal in goals):
        raise ValueError(f"goals: expected different numbers from 0 to {len(GOALS) - 1}, got {list(goals)}")
