"""Observations of a simulated task and its success gate, of the package that has the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinew.core import providers

if TYPE_CHECKING:
    from sinew.core import Observation
    from sinew.policy import Policy

GROUP = "sinew.judges"  # `sinew_eval.judge` says what it has


def observations(policy: Policy) -> tuple[str, Iterator[Observation]] | None:
    """Return the embedded task that a policy fits, and the observations of its episodes without end. None if it fits no
    task, or if the package sinew-eval is not installed."""
    judge = providers.provider(GROUP)
    return None if judge is None else judge.observations(policy)


def gate_of(bundle: Path) -> tuple[Any | None, str]:
    """Return the embedded success gate whose task a bundle can play, and the reason in words. None if there is none, or
    if the package sinew-eval is not installed."""
    judge = providers.provider(GROUP)
    if judge is None:
        return None, str(providers.MissingDistributionError("the gate", providers.HOMES[GROUP]))
    gate, why = judge.gate_of(bundle)
    return gate, str(why)
