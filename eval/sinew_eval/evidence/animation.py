"""Show episodes as an animated GIF: the scene, the policy's images, and the instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CAPTION = 22  # height of each of the two text lines under the picture, in pixels
_INK, _PAPER = (30, 30, 30), (246, 246, 244)
_COLORS = {True: (0, 122, 70), False: (190, 45, 30), None: _INK}


def compose(
    scene: np.ndarray, images: Mapping[str, np.ndarray], prompt: str, status: str, success: bool | None = None
) -> Image.Image:
    """Compose one picture.

    Args:
        scene: Picture of the scene, uint8 [size, size, 3].
        images: The policy's frame of each camera, by the camera's name. They are stacked on the right.
        prompt: Instruction.
        status: Text of the second line.
        success: Outcome, which colours the second line. None while the episode runs.
    """
    size = scene.shape[0]
    side = size // max(2, len(images))
    picture = Image.new("RGB", (size + side, size + 2 * CAPTION), _PAPER)
    picture.paste(Image.fromarray(scene), (0, 0))
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default()
    for index, (camera, frame) in enumerate(images.items()):
        # Resize without smoothing, so that the policy's pixels stay visible.
        small = Image.fromarray(frame).resize((side, side), Image.Resampling.NEAREST)
        picture.paste(small, (size, index * side))
        at = (size + 4, index * side + 2)
        # The outline keeps the text readable on dark frames.
        draw.text(at, camera, fill=_INK, font=font, stroke_width=2, stroke_fill=_PAPER)
    draw.text((6, size + 5), prompt, fill=_INK, font=font)
    draw.text((6, size + CAPTION + 2), status, fill=_COLORS[success], font=font)
    return picture


def write_gif(frames: Sequence[Image.Image], path: Path, fps: float, pauses: Mapping[int, float]) -> None:
    """Write an animated GIF. The format rounds times to hundredths of a second.

    Args:
        frames: The pictures.
        path: File to write.
        fps: Pictures per second.
        pauses: For some pictures, by index: how long this picture is shown, in seconds.
    """
    palette = _palette(frames)
    indexed = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [round(1e3 * pauses.get(index, 1 / fps)) for index in range(len(frames))]
    options: dict[str, Any] = {
        "append_images": indexed[1:],
        "duration": durations,
        "loop": 0,
        "optimize": False,
    }
    indexed[0].save(path, save_all=True, **options)


def _palette(frames: Sequence[Image.Image]) -> Image.Image:
    """Choose one palette for all frames from a sample of them. Different palettes would make colours flicker."""
    chosen = [frames[i] for i in np.linspace(0, len(frames) - 1, min(8, len(frames))).astype(int)]
    width, height = chosen[0].size
    sheet = Image.new("RGB", (width * len(chosen), height))
    for index, frame in enumerate(chosen):
        sheet.paste(frame, (index * width, 0))
    return sheet.quantize(colors=256, method=Image.Quantize.MEDIANCUT)
