"""OpenCV's resizes by digests of its own, torch's antialiased kernels against torch itself."""

from __future__ import annotations

from functools import partial
from itertools import product
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.steps.image.resample import (
    resize_antialias,
    resize_area,
    resize_cut,
    resize_floats,
    resize_linear,
    resize_round,
)

AREA, LINEAR = 0x365677DD, 0xFB23DE12


@settings(deadline=None, max_examples=40)
@given(
    st.tuples(*[st.integers(1, 90)] * 3, st.integers(2, 90)),
    st.sampled_from(["bilinear", "bicubic"]),
    st.integers(0, 2**32),
)
def test_antialias_equals_torch(sizes, method, seed):
    """Without AVX2 torch 2.13 gives another picture of one column than with it, which no policy has."""
    height, width, to_height, to_width = sizes
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(tensor, (to_height, to_width), mode=method, antialias=True)
    found = resize_antialias(image, to_height, to_width, method)
    assert (found == expected[0].permute(1, 2, 0).numpy()).all()


@pytest.mark.parametrize(("resize", "digest"), [(resize_area, AREA), (resize_linear, LINEAR)])
def test_resizes_are_opencvs_to_the_bit(resize, digest):
    """Of 194 pairs of sizes: the digests are of what OpenCV 4.11 and 5.0 give."""
    found, axes = 0, [*product((1, 2, 7, 16, 32, 33, 48, 64), repeat=2)]
    cases = [(axis, axes[(at + shift) % 64]) for shift in (0, 3, 13) for at, axis in enumerate(axes)]
    for (h, height), (w, width) in [*cases, ((62, 94), (93, 108)), ((1, 1), (8001, 8000))]:
        image = (np.arange(h * w * 3) * 2654435761 >> 13 & 255).astype(np.uint8).reshape(h, w, 3)
        found = crc32(resize(image, height, width).tobytes(), found)
    assert found == digest


@settings(deadline=None, max_examples=40)
@given(st.tuples(*[st.integers(2, 60)] * 4), st.integers(0, 2**32))
def test_what_is_cut_or_rounded_follows_torchs_floats(sizes, seed):
    """Equal to torch but where a sum's last bit decides; a CPU that fuses products and sums decides otherwise.

    From two pixels on: torch 2.13 repeats the first row of images that are one pixel wide."""
    height, width, to_height, to_width = sizes
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None].float().contiguous() / 255
    exact = torch.nn.functional.interpolate(tensor, (to_height, to_width), mode="bilinear", antialias=True)[0]
    exact = exact.permute(1, 2, 0).double().numpy() * 255
    found = resize_cut(image, to_height, to_width)
    assert ((found <= exact + 1e-3) & (found >= exact - 1 - 1e-3)).all()
    tensor = tensor * 255
    exact = torch.nn.functional.interpolate(tensor, (to_height, to_width), mode="bicubic", antialias=True)[0]
    rounded = resize_round(image, to_height, to_width).transpose(2, 0, 1)
    assert np.abs(rounded - exact.clamp(0, 255).numpy()).max() <= 0.5 + 1e-3


@given(
    sizes=st.tuples(*(st.integers(2, 40) for _ in range(4))),  # from two on: see above
    mode=st.sampled_from(["area", "bicubic"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_resizes_of_floats_equal_torchs(sizes, mode, seed):
    height, width, *target = sizes
    image = np.random.default_rng(seed).random((height, width, 3), np.float32)
    more = {"antialias": True, "align_corners": False} if mode == "bicubic" else {}
    planes = torch.from_numpy(image.transpose(2, 0, 1).copy())[None]
    expected = torch.nn.functional.interpolate(planes, size=tuple(target), mode=mode, **more)[0]
    found = resize_floats(image, *target, mode).transpose(2, 0, 1)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6, rtol=0)


def test_a_picture_that_has_its_size_is_itself():
    image = np.zeros((3, 4, 3), np.uint8)
    ways = (
        resize_area,
        resize_linear,
        partial(resize_antialias, method="bicubic"),
        partial(resize_floats, method="area"),
    )
    assert all(resize(image, 3, 4) is image for resize in ways)
