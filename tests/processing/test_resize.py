"""The bilinear resize against the plain formula, to the bit, and against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.bundle.schema import ImageRecipe
from sinew.processing.image import prepare_frame
from sinew.steps.image.bilinear import resize_bilinear, taps
from sinew.steps.image.letterbox import Letterbox

MEAN, STD, BARS = (0.48, 0.45, 0.4), (0.23, 0.22, 0.21), 0.3


def plain(frame: np.ndarray, recipe: ImageRecipe) -> np.ndarray:
    """The recipe as its definition says it, every pixel of the frame at full width, channels last."""
    image = frame.astype(np.float32) / np.float32(255) if frame.dtype == np.uint8 else frame
    (box,) = recipe.steps
    height, width = box.inner(*image.shape[:2])
    if (height, width) != image.shape[:2]:
        x0, x1, wx = taps(image.shape[1], width)
        y0, y1, wy = taps(image.shape[0], height)
        wx, wy = wx[None, :, None], wy[:, None, None]
        columns = image[:, x0] * (1 - wx) + image[:, x1] * wx
        image = columns[y0] * (1 - wy) + columns[y1] * wy
    out = np.full((recipe.height, recipe.width, 3), box.pad_value, np.float32)
    top, left = recipe.height - height, recipe.width - width
    if box.pad == "center":
        top, left = top // 2, left // 2
    out[top : top + height, left : left + width] = image
    return ((out - np.asarray(recipe.mean, np.float32)) / np.asarray(recipe.std, np.float32)).transpose(
        2, 0, 1
    )


def boxed(height, width, mean=(0.5,) * 3, std=(0.5,) * 3, **fields):
    return ImageRecipe(height, width, (Letterbox(height, width, **fields),), mean, std)


side = st.integers(1, 90)


@settings(max_examples=60, deadline=None)
@given(side, side, side, side, st.sampled_from(["center", "top_left"]), st.booleans(), st.booleans())
def test_equals_the_formula(height, width, to_height, to_width, pad, floats, strided):
    frame = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    if floats:
        frame = frame.astype(np.float32) / np.float32(255)
    if strided:
        frame = frame[::-1, ::-1]
    recipe = boxed(to_height, to_width, pad=pad, pad_value=BARS, mean=MEAN, std=STD)
    found = prepare_frame(frame, recipe)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, plain(frame, recipe))


@pytest.mark.parametrize("size", [(168, 224), (384, 512), (480, 640), (700, 33)])
def test_agrees_with_torch(size):
    frame = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    planes = torch.from_numpy(frame).permute(2, 0, 1)[None].float() / 255
    theirs = F.interpolate(planes, size=size, mode="bilinear", align_corners=False)[0].numpy()
    # Positions reach 640 in float32: an ulp of a weight is 6e-5 of a step between two pixels.
    np.testing.assert_allclose(resize_bilinear(frame, *size), theirs, rtol=0, atol=1e-5)


def test_neither_frame_nor_tables_are_changed():
    frame = np.random.default_rng(0).random((40, 50, 3), np.float32)
    frame.setflags(write=False)
    recipe = boxed(30, 31)
    first = prepare_frame(frame, recipe)
    assert np.array_equal(first, prepare_frame(frame, recipe))
    same_size = boxed(40, 50)
    assert np.array_equal(prepare_frame(frame, same_size), plain(frame, same_size))
