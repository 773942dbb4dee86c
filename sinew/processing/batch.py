"""Several prepared observations as one: what they must have in common, and how their arrays are joined.

A model computes every row of a batch apart from the others, so requests of different robots, instructions, states and
noise may share one. What fixes the program or the shapes has to be equal, and is the :class:`BatchKey`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sinew.bundle.schema import PromptRecipe
from sinew.core import SinewError
from sinew.processing.processor import ModelInputs, Prepared

BUCKET = 16  # prompt tokens: lengths within one such step are padded to the longest, others are not mixed


class BatchKey(NamedTuple):
    """The properties that the members of a batch share.

    Attributes:
        steps: Steps of the solver.
        views: [V, channels, H, W]. A missing frame makes another batch.
        prompt: Bucket of the prompt's length.
        guidance: (kind, beta) of real-time chunking; None without, so that other requests do not pay for its
            gradients.
        adapter: The adapter that changes the weights.
        scaled: True with two prompts (classifier-free guidance) of any scale, so that other requests do not pay for a
            second prompt.
    """

    steps: int
    views: tuple[int, ...]
    prompt: int
    guidance: tuple[str, float] | None
    adapter: str
    scaled: bool


def batch_key(prepared: Prepared) -> BatchKey:
    """Return the properties that requests must share to be computed together with this one."""
    wanted = prepared.continuation
    return BatchKey(
        prepared.steps,
        prepared.inputs.pixels.shape,
        -(-len(prepared.inputs.tokens) // BUCKET),
        None if wanted is None else (wanted.kind, wanted.beta),
        prepared.adapter,
        prepared.unconditional is not None,
    )


def stack(members: Sequence[ModelInputs], prompt: PromptRecipe) -> ModelInputs:
    """Return the observations with a leading batch axis, shorter prompts padded with masked tokens. A single one may
    have frames.

    Raises :class:`SinewError` for members whose views differ, and for frames, which an engine resizes one by one.
    """
    if len(members) == 1:
        return members[0].batched()
    shapes = {member.pixels.shape for member in members}
    if len(shapes) != 1 or any(member.frames for member in members):
        raise SinewError(f"a batch: expected prepared views of one shape, got {sorted(shapes)}")
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
    )


def stack_prompts(members: Sequence[Prepared], prompt: PromptRecipe) -> ModelInputs:
    """Return the observations as a batch, and behind them, where they have one, their unconditional prompts over the
    same views, which are there once: [B] pixels, and two rows of all else for each of B.

    Raises :class:`SinewError` as :func:`stack`.
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
