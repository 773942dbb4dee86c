"""Low-bit formats: equal to the ``gguf`` package where it has them, and small errors where it has not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from sinew.bundle.quant import FORMATS, pack_ternary, quantize
from sinew.layers.stores.lowbit import codes, dequantize

GROUPED = [name for name, each in FORMATS.items() if each.group]
floats = st.floats(-1e4, 1e4, width=32)


def widened(weights: np.ndarray, name: str) -> np.ndarray:
    rows, scale = quantize(weights, name)
    scales = None if scale is None else torch.from_numpy(scale)
    return dequantize(torch.from_numpy(rows), scales, name, weights.shape[1]).numpy()


@pytest.mark.parametrize("name", GROUPED)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_grouped_types_are_those_of_gguf_bit_for_bit(name, data) -> None:
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda n: 32 * n)))
    weights = data.draw(st_np.arrays(np.float32, shape, elements=floats))
    rows, scale = quantize(weights, name)
    wanted = gguf_quantize(weights, FORMATS[name].type)
    assert scale is None
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_array_equal(widened(weights, name), gguf_dequantize(wanted, FORMATS[name].type))


@pytest.mark.parametrize("name", GROUPED)
def test_any_stored_bytes_are_read_as_gguf_reads_them(name) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (40, FORMATS[name].row_bytes(96)), dtype=np.uint8)
    got = dequantize(torch.from_numpy(rows), None, name, 96).numpy()
    np.testing.assert_array_equal(got, gguf_dequantize(rows, FORMATS[name].type))


@given(weights=st_np.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 150)), elements=floats))
@settings(deadline=None, max_examples=60)
def test_int8_is_within_half_a_step_of_every_channel(weights) -> None:
    steps = np.abs(weights).max(axis=1, keepdims=True) / 127
    allowed = np.where(
        steps < np.finfo(np.float32).tiny, 128 * steps, 0.5001 * steps
    )  # the first become zeros
    assert (np.abs(widened(weights, "int8") - weights) <= allowed + np.finfo(np.float32).tiny).all()


@given(
    values=st_np.arrays(
        np.int8, st.tuples(st.integers(1, 6), st.integers(1, 200)), elements=st.integers(-1, 1)
    )
)
@settings(deadline=None, max_examples=60)
def test_ternary_rows_come_back(values) -> None:
    packed = pack_ternary(values)
    assert packed.shape == (len(values), FORMATS["ternary"].row_bytes(values.shape[1]))
    np.testing.assert_array_equal(codes(torch.from_numpy(packed), "ternary", values.shape[1]).numpy(), values)


def test_ternary_weights_are_bitnets() -> None:
    weights = np.random.default_rng(1).standard_normal((7, 70)).astype(np.float32)
    mean = np.float32(np.abs(weights).mean(dtype=np.float32))
    wanted = np.clip(np.rint(weights * (np.float32(1) / mean)), -1, 1) * mean
    np.testing.assert_array_equal(widened(weights, "ternary"), wanted.astype(np.float32))
    assert quantize(np.zeros((2, 64), np.float32), "ternary")[1] == np.float32(1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_stored_is_refused(name) -> None:
    weights = np.ones((2, 64), np.float32)
    weights[1, 3] = np.inf
    with pytest.raises(ValueError, match="not finite"):
        quantize(weights, name)
    if FORMATS[name].group:
        with pytest.raises(ValueError, match="rows of 33 weights do not divide"):
            quantize(np.ones((2, 33), np.float32), name)
