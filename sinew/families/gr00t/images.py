"""Build the steps that convert a camera frame to the input of GR00T's vision tower, and compute the resulting size.

Source: Isaac-GR00T ``image_augmentations.py`` (N1.6, N1.7) and LeRobot ``policies/groot``. ``Grid`` is the
``smart_resize`` of the image processors of Qwen2-VL and Eagle 3.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sinew.convert.options import ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.core import ConvertError
from sinew.families.gr00t.files import NvidiaFiles
from sinew.steps.image.base import ImageRecipe, ImageStep
from sinew.steps.image.crop import Crop
from sinew.steps.image.resize import Resize
from sinew.steps.image.short_side import ShortSide
from sinew.steps.image.square import Square

# Default values of NVIDIA's processors: the side of an image in pixels, and the share of the side that a crop keeps.
DEFAULT_EDGE, DEFAULT_CROP = 256, 0.95


def image_recipe(
    files: NvidiaFiles, vision: JsonRecord, grid: ImageStep
) -> tuple[ImageRecipe, tuple[int, int]]:
    """Build the image recipe of N1.6 and N1.7.

    Args:
        files: The checkpoint's files.
        vision: preprocessor_config.json of the vision-language model.
        grid: The resize of the vision-language model's image processor, which comes after the geometric steps.

    Returns:
        The recipe, and the height and width in pixels of the frames that the recipe is made for.

    Raises:
        ConvertError: The files do not define the geometry.
    """
    processor, options = files.processor, files.options
    frames = frame_size(options) or files.frames
    letterbox = options.setting("letterbox", processor.get("letter_box_transform"))
    target, crop = processor.get("image_target_size"), processor.get("image_crop_size")
    edge = processor.content.get("shortest_image_edge", DEFAULT_EDGE) or (target or [0])[0]
    fraction = processor.content.get("crop_fraction", DEFAULT_CROP)
    if fraction is None and crop and target:
        fraction = crop[0] / target[0]
    if not edge or not fraction:
        raise ConvertError(
            f"{processor.path}: expected shortest_image_edge and crop_fraction, or image_target_size and"
            " image_crop_size"
        )
    if processor.get("use_albumentations"):
        short = ShortSide(edge=edge, method="area")
        steps: tuple[ImageStep, ...] = (short, Crop(fraction=fraction), short)
        frames = _decide(frames, letterbox, edge)
        steps = (Square(), *steps) if letterbox else steps
    else:
        transforms = options.setting("transforms", files.transforms)
        steps = _without_albumentations(processor, edge, fraction, letterbox, transforms)
        frames = frames or (edge, edge)
    return with_grid(steps, frames, grid, vision), frames


def _decide(frames: tuple[int, int] | None, squared: bool | None, edge: int) -> tuple[int, int]:
    """Decide which size the camera frames have, in pixels.

    Raises:
        ConvertError: The files do not contain the size. The message names the option that sets it.
    """
    if squared:
        return frames or (edge, edge)
    if frames is None:
        raise ConvertError(
            "this policy keeps the aspect ratio of its camera frames, and its files do not contain their size. Pass"
            " --set frames=HEIGHTxWIDTH, or --set letterbox=true if the policy was trained with black bars"
        )
    if squared is None and frames[0] != frames[1]:
        raise ConvertError(
            "the files do not record whether frames that are not square have black bars. Pass --set letterbox=true for"
            " NVIDIA's code since March 2026, or --set letterbox=false for older code and for LeRobot"
        )
    return frames


def _without_albumentations(
    processor: JsonRecord, edge: int, fraction: float, letterbox: bool | None, transforms: str
) -> tuple[ImageStep, ...]:
    target, crop = processor.get("image_target_size"), processor.get("image_crop_size")
    if transforms == "lerobot":
        crop_side, final = round(edge * fraction), (target or [edge, edge])
        steps = (
            Resize(height=edge, width=edge, method="bicubic"),
            Crop(height=crop_side, width=crop_side),
            Resize(height=final[0], width=final[1], method="bicubic"),
        )
    else:
        if not target or not crop:
            raise ConvertError(
                f"{processor.path}: image_target_size and image_crop_size are missing. Add them, or pass --set"
                " transforms=lerobot for a LeRobot policy"
            )
        steps = (
            Resize(height=target[0], width=target[1], method="bilinear"),
            Crop(height=crop[0], width=crop[1], rounded=True),
            Resize(height=target[0], width=target[1], method="bilinear"),
        )
        # NVIDIA's transforms without albumentations always add black bars.
        letterbox = True if letterbox is None else letterbox
    return (Square(), *steps) if letterbox else steps


def with_grid(
    steps: tuple[ImageStep, ...], frames: tuple[int, int], grid: ImageStep, vision: JsonRecord
) -> ImageRecipe:
    """Build the recipe from ``steps``, followed by the resize and normalisation of the vision-language model's
    processor.
    """
    mean, std = tuple(vision["image_mean"]), tuple(vision["image_std"])
    recipe = ImageRecipe(0, 0, steps=(*steps, grid), mean=mean, std=std)
    height, width = recipe.size_after(*frames)
    return replace(recipe, height=height, width=width)


def frame_size(options: ConvertOptions) -> tuple[int, int] | None:
    """Return height and width of ``--set frames=HEIGHTxWIDTH``, or None if it is not set."""
    text = options.setting("frames", None)
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", text)
    if match is None or not all(int(side) for side in match.groups()):
        raise ConvertError(f"--set frames: expected HEIGHTxWIDTH such as 480x640, got {text!r}")
    return int(match[1]), int(match[2])
