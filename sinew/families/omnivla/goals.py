"""The goals of OmniVLA: the numbers of the training project, and the kinds of inputs that each goal reads."""

from __future__ import annotations

from collections.abc import Sequence

# The index of a goal is its number in OmniVLA's runner (inference/run_omnivla_edge.py, run_forward_pass).
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
# Size of a pose and of a step of a path: x, y, cosine and sine.
POSE = 4
# The kinds of inputs, in the order of OmniVLA's tokens.
KINDS = ("pose", "satellite", "image", "language")


def kinds(goals: Sequence[int]) -> tuple[str, ...]:
    """Return the kinds of inputs that any of the goals reads."""
    return tuple(kind for kind in KINDS if any(kind in GOALS[goal].split("+") for goal in goals))


def table(goals: Sequence[int]) -> list[list[bool]]:
    """Return for each goal a list that tells which of :func:`kinds` it reads. Clients never request unsupported
    goals.
    """
    return [[kind in goal.split("+") for kind in kinds(goals)] for goal in GOALS]


def check_goals(goals: Sequence[int]) -> None:
    """Raise ValueError unless the numbers are different and belong to goals."""
    if not goals or len(set(goals)) < len(goals) or not all(0 <= goal < len(GOALS) for goal in goals):
        raise ValueError(f"goals: expected different numbers from 0 to {len(GOALS) - 1}, got {list(goals)}")
