"""Join several prepared observations into one batch, which the model computes together.

A model computes every row of a batch independently. Requests of different robots, instructions, states and noise may
therefore share a batch. Properties that determine which operations run, or the shapes of the arrays, must be equal.
:class:`BatchKey` contains these properties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sinew.bundle.schema import PromptRecipe
from sinew.core import SinewError
from sinew.processing.processor import ModelInputs, Prepared

BUCKET = 16  # prompts whose lengths are in the same bucket of this many tokens may share a batch


class BatchKey(NamedTuple):
    """The properties that the members of a batch share.

    Attributes:
        steps: Steps of the solver.
        views: Shape of the camera views, [V, channels, H, W], or the shape of each frame if the engine resizes frames.
            An observation with a missing frame has fewer views, so it goes into another batch.
        prompt: Length of the prompt in units of :data:`BUCKET` tokens, rounded up.
        guidance: (kind, beta) of real-time chunking; None without it. Other requests go into other batches, because
            they need no gradients.
        adapter: Name of the adapter that changes the weights.
        scaled: True for requests with two prompts (classifier-free guidance, with any scale). Other requests go into
            other batches, because they need only one prompt.
    """

    steps: int
    views: tuple[int, ...] | tuple[tuple[int, ...], ...]
    prompt: int
    guidance: tuple[str, float] | None
    adapter: str
    scaled: bool


def batch_key(prepared: Prepared) -> BatchKey:
    """Return the properties that other requests must share with this request to be computed together with it."""
    continuation = prepared.continuation
    return BatchKey(
        prepared.steps,
        tuple(frame.shape for frame in prepared.inputs.frames) or prepared.inputs.pixels.shape,
        -(-len(prepared.inputs.tokens) // BUCKET),
        None if continuation is None else (continuation.kind, continuation.beta),
        prepared.adapter,
        prepared.unconditional is not None,
    )


def stack(members: Sequence[ModelInputs], prompt: PromptRecipe) -> ModelInputs:
    """Join observations into a batch with a leading axis. Shorter prompts are padded with masked tokens.

    Args:
        members: The observations.
        prompt: The prompt recipe, for the padding.

    Raises:
        SinewError: The shapes of the views or frames differ.
    """
    if len(members) == 1:
        return members[0].batched()
    shapes = {(member.pixels.shape, *(frame.shape for frame in member.frames)) for member in members}
    if len(shapes) != 1:
        raise SinewError(
            f"a batch: expected views and frames of one shape, got {sorted(shapes)}; compute these one by one"
        )
    length = max(len(member.tokens) for member in members)

    def padded(rows: np.ndarray, value: int) -> np.ndarray:  # [L] -> [length]
        spare = length - len(rows)
        sides = (spare, 0) if prompt.padding_side == "left" else (0, spare)
        return np.pad(rows, sides, constant_values=value)

    return ModelInputs(
        np.stack([member.pixels for member in members]),
        np.stack([member.camera_mask for member in members]),
        np.stack([padded(member.tokens, prompt.pad_token_id) for member in members]),
        np.stack([padded(member.token_mask, False) for member in members]),
        np.stack([member.state for member in members]),
        tuple(frame for member in members for frame in member.frames),
    )


def stack_prompts(members: Sequence[Prepared], prompt: PromptRecipe) -> ModelInputs:
    """Join observations into a batch. If they have a second prompt, without the advantage, the second prompts follow
    after all first prompts. Both prompts of an observation use the same views. The batch then has [B] pixels, and
    two rows of all other inputs for each of B observations.

    Args:
        members: The observations.
        prompt: The prompt recipe, for the padding.

    Raises:
        SinewError: As in :func:`stack`.
    """
    rows = [member.inputs for member in members]
    rows += [
        replace(member.inputs, tokens=tokens, token_mask=np.ones(len(tokens), bool))
        for member in members
        if (tokens := member.unconditional) is not None
    ]
    whole = stack(rows, prompt)
    if len(rows) == len(members):
        return whole
    return replace(whole, pixels=whole.pixels[: len(members)])
