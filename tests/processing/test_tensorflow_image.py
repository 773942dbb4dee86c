"""Frames as TensorFlow's functions change them, equal in every value. The fixture says which version was recorded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.steps.image.jpeg import _inverse, jpeg_round_trip, steps
from sinew.steps.image.tensorflow import (
    centre_crop,
    crop_and_resize,
    resize_lanczos3,
    sinf,
    to_uint8,
)
from tests.processing.tensorflow_frames import AREA, QUALITY, RECORDED, SIDE, SIZES, frame, sha256


@pytest.mark.parametrize("image", range(len(SIZES)))
def test_every_stage(image):
    given = frame(image)
    decoded = jpeg_round_trip(given, QUALITY)
    floats = resize_lanczos3(decoded, SIDE, SIDE)
    resized = to_uint8(floats)
    found = {
        "frame": given,
        "jpeg_decoded": decoded,
        "resized_float": floats,
        "resized_u8": resized,
        "crop_float": crop_and_resize(resized, AREA, SIDE, SIDE),
        "cropped_u8": centre_crop(resized, AREA, SIDE, SIDE),
    }
    assert {name: sha256(array) for name, array in found.items()} == json.loads(RECORDED.read_text())[
        "stages"
    ][str(image)]


def test_a_block_beyond_white_or_black_is_cut():
    ends = np.zeros((8, 8, 2), np.int32)
    ends[0, 0] = -100_000, 100_000
    assert (_inverse(ends) == [0, 255]).all()


def test_a_correct_sine_is_not_the_one():
    """The sine matters: the correctly rounded one gives other float weights somewhere in these ranges."""
    x = np.linspace(0, 9.5, 1_000_001, dtype=np.float32)
    correct = np.sin(x.astype(np.float64)).astype(np.float32)
    differs = sinf(x) != correct
    assert differs.any()
    steps = np.abs(sinf(x).view(np.int32).astype(np.int64) - correct.view(np.int32))[differs]
    assert steps.max() <= 1


@settings(max_examples=30, deadline=None)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    seed=st.integers(0, 1 << 32),
    level=st.integers(0, 255),
)
def test_any_size(height, width, seed, level):
    """Sides that are no multiple of a block, down to one pixel; a flat frame stays flat through every stage."""
    frame = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    assert jpeg_round_trip(frame).shape == frame.shape
    assert to_uint8(resize_lanczos3(frame, 8, 9)).shape == (8, 9, 3)
    assert centre_crop(frame, AREA, 8, 9).shape == (8, 9, 3)
    flat = np.full_like(frame, level)
    assert np.abs(jpeg_round_trip(flat).astype(int) - level).max() <= 1
    assert (to_uint8(resize_lanczos3(flat, 8, 9)) == level).all()
    assert (centre_crop(flat, AREA, 8, 9) == level).all()


def test_a_frame_that_is_not_cropped_is_itself():
    frame = np.random.default_rng(0).integers(0, 256, (3, 4, 3), np.uint8)
    np.testing.assert_allclose(crop_and_resize(frame, 1.0, 3, 4), frame / np.float32(255), atol=1e-6)


def test_a_crop_whose_last_row_is_rounded_past_the_frame():
    """383 steps of 479 / 383 end behind row 479 in float32; TensorFlow extrapolates there, with zero."""
    frame = np.full((480, 20, 3), 200, np.uint8)
    cropped = centre_crop(frame, 1.0, 384, 20)
    assert (cropped[-1] == 0).all()
    assert (cropped[:-1] == cropped[0, 0]).all()
    assert (centre_crop(frame.transpose(1, 0, 2), 1.0, 20, 384) == cropped.transpose(1, 0, 2)).all()


@pytest.mark.parametrize("quality", [1, 50, 75, 100])
def test_quality_of_jpeg(quality):
    """A lower quality strays further; Pillow's own encoder and decoder stay close at each."""
    from io import BytesIO

    from PIL import Image

    y, x = np.mgrid[:48, :64]
    frame = np.stack([4 * x, 5 * y, 2 * (x + y)], axis=-1).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(frame).save(file, "jpeg", quality=quality)
    read = Image.open(file)
    tables = steps(quality)[0].reshape(2, 64).tolist()
    assert tables == [read.quantization[0], read.quantization[1]]  # as libjpeg writes them
    pillow = np.asarray(read).astype(int)
    assert np.abs(jpeg_round_trip(frame, quality).astype(int) - pillow).mean() < 1.5
