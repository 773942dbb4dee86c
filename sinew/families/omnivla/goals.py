"""What a goal is given by: upstream's numbers of modalities, and what each of them reads."""

from __future__ import annotations

from collections.abc import Sequence

GOALS = (  # in the order of upstream's numbers (inference/run_omnivla_edge.py, run_forward_pass)
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
POSE = 4  # numbers of a pose, and of a step of a path: x, y, cosine and sine
KINDS = ("pose", "satellite", "image", "language")  # in the order of upstream's rows


def kinds(goals: Sequence[int]) -> tuple[str, ...]:
    """Return the inputs that any of the goals reads."""
    return tuple(kind for kind in KINDS if any(kind in GOALS[goal].split("+") for goal in goals))


def table(goals: Sequence[int]) -> list[list[bool]]:
    """Return for each goal which rows of :func:`kinds` it reads. Unsupported goals are never requested."""
    return [[kind in goal.split("+") for kind in kinds(goals)] for goal in GOALS]


def check_goals(goals: Sequence[int]) -> None:
    """Raise ValueError unless these are different numbers of goals."""
    if not goals or len(set(goals)) < len(goals) or not all(0 <= goal < len(GOALS) for goal in goals):
        raise ValueError(f"goals: expected different numbers from 0 to {len(GOALS) - 1}, got {list(goals)}")
