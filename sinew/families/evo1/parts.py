"""The fields that are read from both layouts of Evo-1 checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sinew.bundle.schema import Normalization
from sinew.bundle.writer import TensorSource
from sinew.core import CameraSpec, RealTimeChunking, VectorSpec
from sinew.steps.image.base import ImageStep
from sinew.steps.vector.base import VectorStep

IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


@dataclass(frozen=True)
class Parts:
    """The parts that both layouts have.

    Attributes:
        vlm: Name of InternVL's repository.
        layers: Layers of its language model; 0 for all.
        category: Row of the head's weights, if it has them per category.
        max_tokens: Longest prompt.
        resize: Steps that resize frames.
        every_row: True if the head reads masked rows.
        sizes: Sizes of the head and its vectors, with the names of ``Evo1Config``.
        optional_cameras: As in ``Processing``.
        solver_steps: Default number of solver steps.
    """

    format: str
    name: str
    vlm: str
    layers: int
    views: int
    category: int
    max_tokens: int
    side: int
    resize: ImageStep
    every_row: bool
    sizes: dict[str, int]
    cameras: tuple[CameraSpec, ...]
    state: VectorSpec
    action: VectorSpec
    state_normalization: Normalization
    action_normalization: Normalization
    action_steps: tuple[VectorStep, ...]
    solver_steps: int
    n_action_steps: int
    control_hz: float | None
    embodiment: str
    optional_cameras: int
    tensors: dict[str, TensorSource]
    files: list[Path]
    notes: tuple[str, ...] = ()
    real_time_chunking: RealTimeChunking | None = None
