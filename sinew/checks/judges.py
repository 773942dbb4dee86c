"""Access to simulated tasks in the package sinew-eval: their observations, and their success gates (tests of the
success rate).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinew.core import providers

if TYPE_CHECKING:
    from sinew.core import Observation
    from sinew.policy import Policy

GROUP = "sinew.judges"  # the group of entry points; `sinew_eval.judge` documents the functions of an entry


def observations(policy: Policy) -> tuple[str, Iterator[Observation]] | None:
    """Return the built-in task that a policy fits, and an endless iterator of observations from its episodes. None if
    the policy fits no task, or if the package sinew-eval is not installed."""
    judge = providers.provider(GROUP)
    return None if judge is None else judge.observations(policy)


def gate_of(bundle: Path) -> tuple[Any | None, str]:
    """Return the built-in success gate (a test of the success rate on a task) that a bundle can play, and a sentence
    with the reason for this gate. The gate is None if no task fits, or if the package sinew-eval is not installed.
    """
    judge = providers.provider(GROUP)
    if judge is None:
        return None, str(providers.MissingDistributionError("the gate", providers.HOMES[GROUP]))
    gate, why = judge.gate_of(bundle)
    return gate, str(why)
