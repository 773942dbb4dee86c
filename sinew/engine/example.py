"""Observations as PyTorch tensors, and an artificial observation for tracing, export and measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sinew.bundle.schema import Manifest
from sinew.models.base import Context, Model
from sinew.processing import ModelInputs


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of the arrays of one observation, and the number of solver steps.

    Attributes:
        views: Number of camera views.
        height: Height of a view in pixels.
        width: Width of a view in pixels.
        tokens: Number of prompt tokens.
        steps: Number of solver steps.
    """

    views: int
    height: int
    width: int
    tokens: int
    steps: int

    @classmethod
    def of(cls, manifest: Manifest) -> Shapes:
        """Return the sizes of a bundle's largest observation: all cameras, the longest prompt."""
        spec, image = manifest.spec, manifest.processing.image
        return cls(spec.views, image.height, image.width, spec.max_prompt_tokens, spec.solver_steps)


class Inputs(NamedTuple):
    """The arguments of a model for B observations. ``embed_images`` reads the pixels, and ``read`` reads the other
    fields."""

    pixels: Tensor  # float32 [B, V, channels, height, width]
    camera_mask: Tensor  # bool [B, V]
    tokens: Tensor  # int64 [B, L]
    token_mask: Tensor  # bool [B, L]
    state: Tensor  # float32 [B, S]

    @classmethod
    def of(cls, inputs: ModelInputs, device: torch.device) -> Inputs:
        """Convert observations to tensors on a device. The observations have a batch axis
        (:func:`sinew.processing.stack`).
        """
        return cls._make([torch.from_numpy(getattr(inputs, name)).to(device) for name in cls._fields])

    @classmethod
    def example(
        cls, model: Model, shapes: Shapes, device: torch.device | str | None = None, batch: int = 1
    ) -> Inputs:
        """Return an artificial observation. All values are zeros, and all masks are True.

        Args:
            model: The model.
            shapes: The sizes of an observation.
            device: The device, by default the model's device.
            batch: Number of observations.
        """
        at = model.device if device is None else torch.device(device)
        return cls(
            torch.zeros(batch, shapes.views, model.channels, shapes.height, shapes.width, device=at),
            torch.ones(batch, shapes.views, dtype=torch.bool, device=at),
            torch.zeros(batch, shapes.tokens, dtype=torch.int64, device=at),
            torch.ones(batch, shapes.tokens, dtype=torch.bool, device=at),
            torch.zeros(batch, model.state_size, device=at),
        )

    def read(self, model: Model) -> Context:
        return model.read(model.embed_images(self.pixels), *self[1:])
