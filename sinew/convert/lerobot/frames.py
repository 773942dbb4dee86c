"""Build the image recipe for policies that use torchvision's resize and center crop."""

from __future__ import annotations

from dataclasses import replace

from sinew.bundle.schema import ImageRecipe
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint
from sinew.core import ConvertError
from sinew.steps.image.base import ImageStep
from sinew.steps.image.crop import Crop
from sinew.steps.image.resize import Resize

Sides = tuple[int, int] | None  # (height, width) in pixels; None leaves the frame's size unchanged


def whole_frames(
    checkpoint: LeRobotCheckpoint, resized: Sides, cut: Sides, key: str = "crop_shape"
) -> ImageRecipe:
    """Return the recipe of a frame. Sinew normalises after the resize and the crop. The result is the same, because
    normalisation treats all pixels equally.

    Args:
        checkpoint: The checkpoint. Its cameras' sizes and statistics are used.
        resized: Height and width to which both sides are stretched; None leaves the size unchanged.
        cut: Height and width of the centre crop; None uses the whole frame.
        key: The configuration's name of ``cut``, for messages.

    Returns:
        The recipe.

    Raises:
        ConvertError: The crop is larger than the frame.
    """
    steps: list[ImageStep] = []
    if resized is not None:
        steps.append(Resize(*resized, method="bilinear_float"))
    if cut is not None:
        frame = resized or checkpoint.frame_size
        if not all(0 < inner <= side for inner, side in zip(cut, frame, strict=True)):
            raise ConvertError(
                f"{checkpoint.file}: {key}: expected at most {frame[0]} x {frame[1]}, got {cut[0]} x {cut[1]}; the crop"
                " must fit into the frame"
            )
        steps.append(Crop(*cut, rounded=True, floats=resized is not None))
    recipe = ImageRecipe(0, 0, tuple(steps), **checkpoint.image_scales())
    height, width = recipe.size_after(*checkpoint.frame_size)
    return replace(recipe, height=height, width=width)
