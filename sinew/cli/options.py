"""Flags that several verbs share: which engine runs a bundle, and how that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from sinew.policy import Policy

Engine = Literal["eager", "plan", "onnx", "cuda"]
Providers = Annotated[tuple[str, ...], Parameter(name="--provider", negative="")]


def precision(policy: Policy) -> str:
    """What the policy computes in: its dtype, and the components that are quantised below it."""
    parts = [f"{component} {kind}" for component, kind in policy.recipe.items()]
    return f"{policy.dtype} ({', '.join(parts)})" if parts else policy.dtype
