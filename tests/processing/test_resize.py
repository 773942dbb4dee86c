"""The bilinear resize against the plain formula, to the bit, and against torch."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.bundle.schema import ImageRecipe
from sinew.core import ObservationError
from sinew.processing.image import check_frame, larger, prepare_frame
from sinew.steps.image import compiled
from sinew.steps.image.bilinear import _fit, mixing, resize_bilinear, taps
from sinew.steps.image.compiled import MOST_KEPT, scratch
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
    alone = np.full((1, 1, 3), 0.25, np.float32)
    assert (prepare_frame(alone, ImageRecipe(1, 1)) != alone).all()
    assert (alone == 0.25).all()
    same_size = boxed(40, 50)
    assert np.array_equal(prepare_frame(frame, same_size), plain(frame, same_size))


@pytest.mark.parametrize(("height", "to"), [(240, 224), (480, 224), (480, 512)])
def test_nothing_but_the_pixels_is_new_memory(height: int, to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory costs a page fault for each 4 KiB, half of the time that a camera's frame took. numpy's own buffers
    have one size, whatever the frame's; the smallest of the resize has 168 rows of 672 floats."""
    monkeypatch.setattr(compiled, "in_use", [])
    frame, recipe = np.zeros((height, height * 4 // 3, 3), np.uint8), boxed(to, to)
    prepare_frame(frame, recipe)
    tracemalloc.start()
    try:
        pixels = prepare_frame(frame, recipe)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - pixels.nbytes < 4 * 4 * np.getbufsize() < 4 * 168 * 672


NO_STEPS = "this policy does not resize: set the camera to this size, or resize as for its training data"


def test_frames_that_a_recipe_cannot_take_are_refused_by_name():
    bare, good = ImageRecipe(4, 6), np.zeros((4, 6, 3), np.uint8)
    check_frame(good, "front", bare)
    for value in (0, 1):
        check_frame(np.full((4, 6, 3), value, np.float32), "front", bare)
    for sides in ((1, 8192), (8192, 1)):
        check_frame(np.zeros((*sides, 3), np.uint8), "front", boxed(4, 6))
    low, high, none = (np.full((4, 6, 3), 0.5, np.float32) for _ in range(3))
    low[1, 2, 0], high[1, 2, 0], none[1, 2, 0] = -0.01, 1.01, np.nan
    for frame, message in (
        ([[0]], "a numpy array [height, width, 3], got list"),
        (good.astype(np.int32), "uint8 (or float32 in [0, 1]), got dtype int32"),
        (good[0], "an RGB image [height, width, 3], got shape [6, 3]"),
        (good[..., :2], "an RGB image [height, width, 3], got shape [4, 6, 2]"),
        (
            good.transpose(2, 0, 1),
            "an RGB image [height, width, 3], got shape [3, 4, 6] (channels first? transpose it to channels last)",
        ),
        (good[:3, 0], "an RGB image [height, width, 3], got shape [3, 3]"),
        (good[:0], "sides of 1 to 8192 pixels, got 0 x 6"),
        (good[:, :0], "sides of 1 to 8192 pixels, got 4 x 0"),
        (np.zeros((8193, 1, 3), np.uint8), "sides of 1 to 8192 pixels, got 8193 x 1"),
        (np.zeros((1, 8193, 3), np.uint8), "sides of 1 to 8192 pixels, got 1 x 8193"),
        (
            good[:3],
            f"exactly 4 x 6, got 3 x 6 ({NO_STEPS})",
        ),
        (low, "finite float pixels in [0, 1], got values from -0.009999999776482582 to 0.5"),
        (high, "finite float pixels in [0, 1], got values from 0.5 to 1.0099999904632568"),
        (none, "finite float pixels in [0, 1], got values from nan to nan"),
    ):
        with pytest.raises(ObservationError) as error:
            check_frame(frame, "images.front", bare)
        assert str(error.value) == f"images.front: expected {message}"


def test_two_normalisations_of_a_picture_are_groups_of_channels():
    frame = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    mean, std = (0.5, 0.25, 0.75), (0.5, 0.2, 0.125)
    found = prepare_frame(frame, ImageRecipe(4, 6, (), MEAN + mean, STD + std))
    wanted = [prepare_frame(frame, ImageRecipe(4, 6, (), *each)) for each in ((MEAN, STD), (mean, std))]
    np.testing.assert_array_equal(found, np.concatenate(wanted))


def test_larger_frames_are_said_to_be_so_with_what_they_cost():
    recipe = boxed(4, 6)
    assert larger(np.zeros((8, 11, 3), np.uint8), recipe, (0, 0)) == ""  # less than four times the pixels
    frame = np.zeros((8, 12, 3), np.uint8)
    text = "frames are 8x12 but the policy resizes them to 4x6; send 4x6 to save bandwidth"
    assert larger(frame, recipe, (4, 6)) == f"{text} (0 kB instead of 0 kB per frame)"
    assert (
        larger(frame, recipe, (8, 12))
        == f"{text} (0 kB instead of 0 kB per frame) (training frames were 8x12 too)"
    )
    square = larger(np.zeros((200, 200, 3), np.uint8), boxed(100, 100), (0, 0))
    assert square.endswith("to save bandwidth (30 kB instead of 120 kB per frame)")


def test_buffers_are_kept_up_to_a_size():
    name, (small, large) = "of a test", (scratch("of a test", (2, count), np.float32) for count in (3, 4))
    assert not np.shares_memory(small, large)
    assert np.shares_memory(large, scratch(name, (8, 4), np.uint8))  # as large
    most = scratch(name, (MOST_KEPT,), np.uint8)
    assert np.shares_memory(most, scratch(name, (3,), np.float32))
    beyond = scratch(name, (MOST_KEPT + 1,), np.uint8)
    assert len(beyond) == MOST_KEPT + 1
    assert not np.shares_memory(most, beyond)


def test_compiled_kernels_get_bytes_of_pixels_side_by_side_alone():
    frame, out, shape = np.zeros((4, 6, 3), np.uint8), np.empty((3, 2, 5), np.float32), (3, 2, 5)
    assert _fit(frame, out, shape)
    assert _fit(frame[::2], out, shape)  # lines may lie apart
    for other in (frame.astype(np.float32), frame[:, ::2], frame[..., ::-1], frame[..., :2], frame[:0]):
        assert not _fit(other, out, shape)
    for other in (out.astype(np.float64), out[:, :1], out[..., ::2]):
        assert not _fit(frame, other, shape)


@pytest.mark.parametrize("width", range(1, 12))
def test_compiled_kernels_read_no_byte_outside_of_a_line(width):
    for target in (1, 4, 9):
        made, line = mixing((2, width), (2, target)), 3 * width
        starts = made.arrays[2]
        assert starts.min() >= 0
        assert made.reach in ((8, 16) if line >= 8 else (0,))  # others are slow
        assert made.reach == 0 or starts.max() + 8 <= line
        assert made.reach < 16 or starts[:, 0].max() + 16 <= line
