"""A JPEG round trip in numpy: compress a frame and decompress it again, exactly as TensorFlow does.

OpenVLA-OFT's evaluation encodes every frame with ``tf.image.encode_jpeg`` (quality 95, chroma halved both ways,
accurate forward transform). It reads the frame back with ``tf.io.decode_image``, which uses libjpeg's *fast* inverse
transform. Pillow reads with the accurate inverse transform, and its result differs in most pixels. Entropy coding is
lossless, so this module does not compute it. Every value equals TensorFlow's (fixture ``tf_preprocess``).

Source of the arithmetic: libjpeg (IJG) jccolor, jcsample, jfdctint, jcdctmgr, jddctmgr, jidctfst, jdsample, jdcolor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Literal

import numpy as np

from sinew.core.fields import within
from sinew.steps.image import compiled
from sinew.steps.image.base import ImageStep

SCALE_BITS = 16  # binary places of the colour transforms
HALF = 1 << (SCALE_BITS - 1)
# Binary places of the forward transform's constants, and of the values after its first pass.
FORWARD_BITS, PASS_BITS = 13, 2
# Binary places of the inverse transform's constants, and the bits that are removed from its result. Two of the five
# bits belong to the transform and three remove its gain of 8.
INVERSE_BITS, DESCALE_BITS = 8, 5

LUMA = np.array(  # table K.1 in Annex K of ITU-T T.81
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
)
CHROMA = np.full((8, 8), 99)  # table K.2 in the same annex
CHROMA[:4, :4] = [[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]


@dataclass(frozen=True)
class Jpeg(ImageStep):
    """Compress the frame as a JPEG image of this ``quality``, and decompress it again."""

    quality: Annotated[int, within(1, 100)] = 95
    other_sizes: bool = False
    kind: Literal["jpeg"] = field(default="jpeg", kw_only=True, repr=False)
    keeps_size = True

    def forward(self, frame: np.ndarray) -> np.ndarray:
        return jpeg_round_trip(frame, self.quality)

    def __str__(self) -> str:
        return f"JPEG {self.quality}"


def jpeg_round_trip(frame: np.ndarray, quality: int = 95) -> np.ndarray:
    """Return a frame as TensorFlow reads it back from a JPEG file: uint8 [h, w, 3] -> uint8 [h, w, 3]."""
    if not compiled.take_bytes(frame):
        return by_numpy(frame, quality)
    compiled.in_use[0].jpeg(frame, *steps(quality)[1:], out := np.empty(frame.shape, np.uint8))
    return out


def by_numpy(frame: np.ndarray, quality: int) -> np.ndarray:
    """Compute :func:`jpeg_round_trip` with numpy. Compiled kernels give the same bits."""
    (luma_steps, chroma_steps), _, (luma_factors, chroma_factors) = steps(quality)
    height, width = frame.shape[:2]
    right, bottom = -width % 16, -height % 16
    y, cb, cr = _to_ycc(np.pad(frame, ((0, 0), (0, right), (0, 0)), mode="edge").astype(np.int32))
    luma = _code(np.pad(y, ((0, bottom), (0, 0)), mode="edge"), luma_steps, luma_factors)[:height, :width]
    rows, cols = -(-height // 2), -(-width // 2)
    chroma = []
    for plane in (cb, cr):
        half = _halve(np.pad(plane, ((0, height % 2), (0, 0)), mode="edge"))
        # The bottom edge is extended after the averaging, but the right edge was extended before it, as in libjpeg.
        half = np.pad(half, ((0, -rows % 8), (0, 0)), mode="edge")
        chroma.append(_double(_code(half, chroma_steps, chroma_factors)[:rows, :cols])[:height, :width])
    return _to_rgb(luma, *chroma)


def _fixed(x: float, bits: int = SCALE_BITS) -> int:
    return int(x * (1 << bits) + 0.5)


def _to_ycc(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Convert int32 [h, w, 3] to Y, Cb and Cr, each int32 [h, w] in 0 .. 255."""
    r, g, b = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    offset = (128 << SCALE_BITS) + HALF - 1
    half = _fixed(0.5)
    return (
        (_fixed(0.299) * r + _fixed(0.587) * g + _fixed(0.114) * b + HALF) >> SCALE_BITS,
        (half * b - _fixed(0.16874) * r - _fixed(0.33126) * g + offset) >> SCALE_BITS,
        (half * r - _fixed(0.41869) * g - _fixed(0.08131) * b + offset) >> SCALE_BITS,
    )


def _to_rgb(y: np.ndarray, cb: np.ndarray, cr: np.ndarray) -> np.ndarray:
    """Convert Y, Cb and Cr, int32 [h, w], to uint8 [h, w, 3]."""
    cb, cr = cb - 128, cr - 128
    red = (_fixed(1.402) * cr + HALF) >> SCALE_BITS
    green = (-_fixed(0.34414) * cb - _fixed(0.71414) * cr + HALF) >> SCALE_BITS
    blue = (_fixed(1.772) * cb + HALF) >> SCALE_BITS
    return np.clip(np.stack([y + red, y + green, y + blue], axis=-1), 0, 255).astype(np.uint8)


def _halve(plane: np.ndarray) -> np.ndarray:
    """Return the mean of each 2 x 2 square, [h / 2, w / 2].

    Even columns round halves down, and odd columns round them up.
    """
    total = plane[::2, ::2] + plane[::2, 1::2] + plane[1::2, ::2] + plane[1::2, 1::2]
    return (total + 1 + np.arange(total.shape[1]) % 2) >> 2


def _double(plane: np.ndarray) -> np.ndarray:
    """Enlarge int32 [h, w] to [2 h, 2 w] by libjpeg's "fancy" triangle filter with weights 3 and 1."""
    wide = np.pad(plane, ((1, 1), (0, 0)), mode="edge")
    rows = np.stack([3 * plane + wide[:-2], 3 * plane + wide[2:]], axis=1).reshape(-1, plane.shape[1])
    wide = np.pad(rows, ((0, 0), (1, 1)), mode="edge")
    halves = (3 * rows + wide[:, :-2] + 8) >> 4, (3 * rows + wide[:, 2:] + 7) >> 4
    return np.stack(halves, axis=2).reshape(len(rows), -1)


def _code(plane: np.ndarray, quant: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Compress and decompress one colour plane: transform it, quantise it, and compute the plane again.

    The plane is int32 [h, w] in 0 .. 255. Both sides must be multiples of 8.
    """
    height, width = plane.shape
    # The layout [v, u, blocks] makes each operation of a pass one operation on long rows.
    blocks = (plane - 128).reshape(height // 8, 8, width // 8, 8).transpose(1, 3, 0, 2).reshape(8, 8, -1)
    scaled = _forward(blocks.astype(np.float64)) / (8 * quant[:, :, None])
    # Round to the nearest integer, halves away from zero.
    levels = (scaled + np.copysign(0.5, scaled)).astype(np.int32)
    values = _inverse(levels * factors[:, :, None])
    values = values.reshape(8, 8, height // 8, width // 8).transpose(2, 0, 3, 1)
    return values.reshape(height, width)


@lru_cache
def steps(quality: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the quantisation steps of luma and chroma for a JPEG quality, three arrays [2, 8, 8].

    Returns:
        The quantiser's steps (``jpeg_quality_scaling`` of libjpeg), float32 inverses of 8 times these steps, and int32
            steps of the dequantiser with the factors that the fast inverse leaves out of its butterflies.
    """
    scale = 200 - 2 * quality if quality >= 50 else 5000 // quality
    quantiser = np.clip((np.stack([LUMA, CHROMA]) * scale + 50) // 100, 1, 255)
    gain = np.sqrt(2) * np.cos(np.arange(8) * np.pi / 16)
    gain[0] = 1.0
    factors = np.rint(np.outer(gain, gain) * (1 << 14)).astype(np.int64)
    return (
        quantiser,
        (1 / (8 * quantiser)).astype(np.float32),
        ((quantiser * factors + (1 << 11)) >> 12).astype(np.int32),
    )


@lru_cache
def _forward_matrix() -> np.ndarray:
    """Return the accurate forward transform of eight values before its rounding, float64 [8, 8] of integers.

    libjpeg factors the transform into butterflies (Loeffler, Ligtenberg and Moschytz 1989) with constants of 13 bits.
    Before the rounding at the end, all operations are exact integer arithmetic. One matrix product therefore gives the
    same transform.
    """
    c = partial(_fixed, bits=FORWARD_BITS)
    eye = np.eye(8)
    s0, s1, s2, s3 = (eye[i] + eye[7 - i] for i in range(4))
    d0, d1, d2, d3 = (eye[i] - eye[7 - i] for i in range(4))
    one = 1 << FORWARD_BITS
    z1 = (s1 - s2 + s0 - s3) * c(0.541196100)
    z5 = (d3 + d1 + d2 + d0) * c(1.175875602)
    a, b = -(d3 + d0) * c(0.899976223), -(d2 + d1) * c(2.562915447)
    e, f = z5 - (d3 + d1) * c(1.961570560), z5 - (d2 + d0) * c(0.390180644)
    return np.stack(
        [
            (s0 + s3 + s1 + s2) * one,
            d0 * c(1.501321110) + a + f,
            z1 + (s0 - s3) * c(0.765366865),
            d1 * c(3.072711026) + b + e,
            (s0 + s3 - s1 - s2) * one,
            d2 * c(2.053119869) + b + f,
            z1 - (s1 - s2) * c(1.847759065),
            d3 * c(0.298631336) + a + e,
        ]
    )


def _forward(blocks: np.ndarray) -> np.ndarray:
    """Compute the forward transform of blocks of integers. Return the coefficients times 8, float64 [8, 8, n].

    Rows are transformed first, then columns. The result is exact below 2^53.
    """
    matrix = _forward_matrix()
    rows = np.matmul(matrix, blocks)  # sums over u: [8 v, 8, n]
    rows = np.floor(rows * 2.0 ** (PASS_BITS - FORWARD_BITS) + 0.5)
    columns = np.matmul(matrix, rows.reshape(8, -1)).reshape(blocks.shape)
    return np.floor(columns * 2.0 ** (-PASS_BITS - FORWARD_BITS) + 0.5)


def _inverse(c: np.ndarray) -> np.ndarray:
    """Compute the fast inverse transform (Arai, Agui and Nakajima 1988) of int32 [8, 8, n], columns then rows, to 0 ..
    255.

    Products keep eight binary places and are cut, not rounded. The accurate inverse rounds them.
    """
    columns = _butterflies(*c)  # eight arrays [8 u, n]
    rows = _butterflies(*np.stack(columns).transpose(1, 0, 2))  # eight arrays [8 v, n], indexed by u
    return np.clip((np.stack(rows, axis=1) >> DESCALE_BITS) + 128, 0, 255)


def _butterflies(*c: np.ndarray) -> list[np.ndarray]:
    def times(x: np.ndarray, factor: float) -> np.ndarray:
        return (x * _fixed(factor, INVERSE_BITS)) >> INVERSE_BITS

    a, b, d = c[0] + c[4], c[0] - c[4], c[2] + c[6]
    e = times(c[2] - c[6], 1.414213562) - d
    even = a + d, b + e, b - e, a - d
    z13, z10, z11, z12 = c[5] + c[3], c[5] - c[3], c[1] + c[7], c[1] - c[7]
    z5 = times(z10 + z12, 1.847759065)
    o7 = z11 + z13
    o6 = times(-z10, 2.613125930) + z5 - o7
    o5 = times(z11 - z13, 1.414213562) - o6
    o4 = times(z12, 1.082392200) - z5 + o5
    pairs = list(zip(even, (o7, o6, o5, -o4), strict=True))
    return [x + y for x, y in pairs] + [x - y for x, y in reversed(pairs)]
