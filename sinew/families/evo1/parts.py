"""The result of reading an Evo-1 checkpoint. The readers of both checkpoint layouts return this record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sinew.bundle.schema import Normalization
from sinew.bundle.writer import TensorSource
from sinew.core import CameraSpec, RealTimeChunking, VectorSpec
from sinew.steps.image.base import ImageStep
from sinew.steps.vector.base import VectorStep

IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # pixel statistics of ImageNet


@dataclass(frozen=True)
class Parts:
    """Facts and tensors of an Evo-1 checkpoint, in the same form for both checkpoint layouts.

    Attributes:
        format: Name of the checkpoint's layout. The bundle records it as its origin.
        name: Name of the policy.
        vlm: Name of InternVL's repository.
        layers: Number of layers of its language model that are used. 0 for all layers.
        views: Number of views in the prompt.
        category: Index of the weights to use, if the head has separate weights for each category of robots.
        max_tokens: Largest number of tokens in a prompt.
        side: Side of an image in pixels.
        resize: Step that resizes frames.
        every_row: True if the head also reads tokens that are masked, such as padding.
        sizes: Name of a field of ``Evo1Config`` -> its value, for the sizes of the head and its vectors.
        cameras: The cameras.
        state: Names of the state's values.
        action: Names of an action's values.
        state_normalization: Normalisation of the state.
        action_normalization: Normalisation of an action.
        action_steps: Conversions of the actions after the normalisation.
        solver_steps: Default number of solver steps.
        n_action_steps: Number of actions of a chunk that are executed. 0 for all actions.
        control_hz: Rate of the robot in Hz, or None.
        embodiment: Name of the robot.
        optional_cameras: Number of cameras that an observation may omit, as in ``Processing``.
        tensors: The tensors by their names in the checkpoint.
        files: The files that were read.
        notes: Notes for the user.
        real_time_chunking: Options of real-time chunking, or None.
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
