"""Conditions of a chunk other than its instruction: an advantage in the prompt, and its guidance scale."""

from __future__ import annotations

import math

import numpy as np

from sinew.core import Observation, ObservationError
from sinew.steps.prompt.base import PromptRecipe

MAX_SCALE = 100.0
MAX_SHOWN = 8  # advantages in a message


def advantage_of(observation: Observation, recipe: PromptRecipe) -> str:
    """Return the advantage whose words go into the prompt, "" for none. Raises :class:`ObservationError` for one that
    the prompt has no words for."""
    known, given = recipe.advantages, observation.advantage
    if given is None:
        return recipe.usual_advantage
    if not isinstance(given, str):
        raise ObservationError("advantage", "text", type(given).__name__)
    if not known:
        raise ObservationError(
            "advantage", "none for this policy, whose prompt has no place for it", given[:80]
        )
    if observation.tokens is not None:
        raise ObservationError(
            "advantage", "no advantage together with tokens; send `prompt` instead", given[:80]
        )
    if given and given not in known:
        shown = ", ".join(known[:MAX_SHOWN]) + (", ..." if len(known) > MAX_SHOWN else "")
        raise ObservationError("advantage", f"one of {shown}, or an empty text for none", repr(given[:80]))
    return given


def scale_of(observation: Observation, recipe: PromptRecipe, advantage: str) -> float:
    """Return the scale of classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598, as a multiple of the
    difference); 1 for the advantage alone. Raises :class:`ObservationError`."""
    scale = observation.guidance_scale
    if scale is None:
        return 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.integer, np.floating)):
        raise ObservationError("guidance_scale", "a number", type(scale).__name__)
    if not 0.0 <= scale <= MAX_SCALE:  # which no NaN is
        got = f"{scale:g}" if isinstance(scale, float) and not math.isnan(scale) else str(scale)[:80]
        raise ObservationError("guidance_scale", f"a number from 0 to {MAX_SCALE:g}", got)
    if not recipe.advantages:
        expected = "none for this policy, whose prompt has no place for an advantage"
        raise ObservationError("guidance_scale", expected, f"{scale:g}")
    if observation.tokens is not None:
        expected = "none beside tokens, of which there is one prompt"
        raise ObservationError("guidance_scale", expected, f"{scale:g}")
    if not advantage:
        shown = ", ".join(recipe.advantages[:MAX_SHOWN])
        raise ObservationError("guidance_scale", f"an advantage with it, such as {shown}", "none")
    return float(scale)
