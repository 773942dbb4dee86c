"""Two inputs of a request besides its instruction: an advantage, which is a text in the prompt that states how good
the actions should be, and the scale of its guidance."""

from __future__ import annotations

import math

import numpy as np

from sinew.core import Observation, ObservationError
from sinew.steps.prompt.base import PromptRecipe

MAX_SCALE = 100.0
MAX_SHOWN = 8  # a message lists at most this many advantages


def advantage_of(observation: Observation, recipe: PromptRecipe) -> str:
    """Return the name of the advantage whose text is added to the prompt; "" if there is none.

    Raises:
        ObservationError: The policy's prompt has no such advantage.
    """
    names, requested = recipe.advantages, observation.advantage
    if requested is None:
        return recipe.usual_advantage
    if not isinstance(requested, str):
        raise ObservationError("advantage", "text", type(requested).__name__)
    if not names:
        raise ObservationError(
            "advantage", "none for this policy, because its prompt contains no advantage", requested[:80]
        )
    if observation.tokens is not None:
        raise ObservationError(
            "advantage", "no advantage together with tokens; send `prompt` instead", requested[:80]
        )
    if requested and requested not in names:
        shown = ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
        raise ObservationError(
            "advantage", f"one of {shown}, or an empty text for none", repr(requested[:80])
        )
    return requested


def scale_of(observation: Observation, recipe: PromptRecipe, advantage: str) -> float:
    """Return the scale of classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598).

    The scale multiplies the difference between the results with and without the advantage in the prompt.

    Args:
        observation: The observation.
        recipe: The prompt recipe.
        advantage: The advantage in the prompt; "" if there is none.

    Returns:
        The scale. With scale 1, the result is that of the prompt with the advantage.

    Raises:
        ObservationError: The scale is invalid, or the request has no advantage.
    """
    scale = observation.guidance_scale
    if scale is None:
        return 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.integer, np.floating)):
        raise ObservationError("guidance_scale", "a number", type(scale).__name__)
    # NaN fails this comparison too.
    if not 0.0 <= scale <= MAX_SCALE:
        got = f"{scale:g}" if isinstance(scale, float) and not math.isnan(scale) else str(scale)[:80]
        raise ObservationError("guidance_scale", f"a number from 0 to {MAX_SCALE:g}", got)
    if not recipe.advantages:
        expected = "none for this policy, because its prompt contains no advantage"
        raise ObservationError("guidance_scale", expected, f"{scale:g}")
    if observation.tokens is not None:
        expected = "none together with tokens, which are only one prompt; send `prompt` instead"
        raise ObservationError("guidance_scale", expected, f"{scale:g}")
    if not advantage:
        shown = ", ".join(recipe.advantages[:MAX_SHOWN])
        raise ObservationError("guidance_scale", f"an advantage with it, such as {shown}", "none")
    return float(scale)
