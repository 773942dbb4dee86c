"""Convert camera frames to the vision tower's input in one kernel: resize, bars, scaling, normalisation and patches.

The input is uint8 frames of the camera's size. The output is pixels, channels first, or rows of patches in the order of
a convolution's weight, so that the patch embedding is a matrix product. Pillow's resize is exact to the bit before
normalisation (integer weights), the other resize to float32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinew.engine.cuda.kernels.lang import check, kernel, same_dtype, tl
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.resize_tables import PLACES, Axis, ResizeTables
from sinew.engine.cuda.kernels.tiles import tile_for


@kernel
def preprocess_kernel(
    frames,  # uint8 [V, h, w, 3]
    row_first,  # int32 [inner height]
    row_weights,  # [inner height, ROW_TAPS]
    col_first,
    col_weights,
    affine,  # float32 [3, 3]
    out,  # [V, patches, columns] or [V, 3, H, W]
    out_view,
    out_patch,  # distance between two rows of patches in elements
    h,
    w,
    top,
    left,
    inner_h,
    inner_w,
    W: tl.constexpr,
    PATCH_H: tl.constexpr,  # if the patch is the whole image, the result is pixels [3, H, W]
    PATCH_W: tl.constexpr,
    ROW_TAPS: tl.constexpr,
    COL_TAPS: tl.constexpr,
    EXACT: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    HALF: tl.constexpr = 1 << (PLACES - 1)
    y = tl.program_id(0)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    view = tl.program_id(2)
    inside = (x >= left) & (x < left + inner_w) & (y >= top) & (y < top + inner_h)
    # Outside the picture, compute the nearest pixel and drop it. No load needs a mask then.
    inner_y = tl.minimum(tl.maximum(y - top, 0), inner_h - 1)
    inner_x = tl.minimum(tl.maximum(x - left, 0), inner_w - 1)
    y_first = tl.load(row_first + inner_y)
    x_first = tl.load(col_first + inner_x)
    frame = frames + view * h * w * 3
    cell = (y % PATCH_H) * PATCH_W + x % PATCH_W
    to = out + view * out_view + ((y // PATCH_H) * (W // PATCH_W) + x // PATCH_W) * out_patch + cell
    for c in tl.static_range(3):
        if EXACT:
            value = tl.full((BLOCK,), HALF, tl.int32)
        else:
            value = tl.zeros((BLOCK,), tl.float32)
        for ty in range(ROW_TAPS):
            line = frame + tl.minimum(y_first + ty, h - 1) * w * 3 + c
            if EXACT:
                across = tl.full((BLOCK,), HALF, tl.int32)
            else:
                across = tl.zeros((BLOCK,), tl.float32)
            for tx in range(COL_TAPS):
                pixel = tl.load(line + tl.minimum(x_first + tx, w - 1) * 3)
                weight = tl.load(col_weights + inner_x * COL_TAPS + tx)
                across += pixel.to(weight.dtype) * weight
            if EXACT:
                across = tl.minimum(tl.maximum(across >> PLACES, 0), 255)
            value += across * tl.load(row_weights + inner_y * ROW_TAPS + ty)
        if EXACT:
            value = tl.minimum(tl.maximum(value >> PLACES, 0), 255)
        factor, offset = tl.load(affine + c * 3), tl.load(affine + c * 3 + 1)
        result = tl.where(inside, value.to(tl.float32) * factor + offset, tl.load(affine + c * 3 + 2))
        tl.store(to + c * PATCH_H * PATCH_W, result.to(out.dtype.element_ty), mask=x < W)


def prepare(
    frames: Tensor,
    resize: ResizeTables,
    out: Tensor,
    *,
    patch: int | None = None,
    tile: Tile | None = None,
) -> Launch:
    V = len(frames)
    H, W = resize.target
    check("frames", frames, (V, *resize.source, 3))
    same_dtype("frames", frames, torch.uint8)
    if patch is None:
        check("out", out, (V, 3, H, W), rows_apart=True)
    else:
        if H % patch or W % patch:
            raise ValueError(f"patch: expected a divisor of {H} x {W}, got {patch}")
        _check_patches(out, V, H // patch * (W // patch), 3 * patch * patch)
    tile = tile or tile_for("preprocess", (V, H, W), out.dtype, frames.device)
    arguments = {
        "frames": frames,
        "row_first": resize.rows.first,
        "row_weights": resize.rows.weights,
        "col_first": resize.columns.first,
        "col_weights": resize.columns.weights,
        "affine": resize.affine,
        "out": out,
        "out_view": out.stride(0),
        "out_patch": 0 if patch is None else out.stride(1),
        "h": resize.source[0],
        "w": resize.source[1],
        "top": resize.top,
        "left": resize.left,
        "inner_h": resize.inner[0],
        "inner_w": resize.inner[1],
        "W": W,
        "PATCH_H": patch or H,
        "PATCH_W": patch or W,
        "ROW_TAPS": resize.rows.weights.shape[1],
        "COL_TAPS": resize.columns.weights.shape[1],
        "EXACT": resize.exact,
        "PLACES": PLACES,
        "BLOCK": tile.n,
    }
    return Launch(preprocess_kernel, (H, -(-W // tile.n), V), arguments, tile)


def _check_patches(out: Tensor, views: int, patches: int, values: int) -> None:
    if out.ndim != 3 or out.shape[:2] != (views, patches) or out.shape[2] < values or out.stride(2) != 1:
        expected = f"[{views}, {patches}, {values} or more], its last axis contiguous"
        raise ValueError(
            f"out: expected {expected}, got shape {list(out.shape)}, strides {list(out.stride())}"
        )


def preprocess(
    frames: Tensor,
    resize: ResizeTables,
    *,
    dtype: torch.dtype = torch.float32,
    patch: int | None = None,
    out: Tensor | None = None,
    **options,
) -> Tensor:
    """Compute :func:`reference` with the kernel.

    Args:
        frames: uint8 [V, h, w, 3].
        resize: The tables of the resize.
        dtype: Dtype of the result if ``out`` is None.
        patch: Side p of a patch in pixels. None for pixels.
        out: Memory for the result, or None. Rows of patches may be wider than 3 p p (588 for p = 14 is not a multiple
            of 16). The values after 3 p p are not written.
        **options: ``tile`` replaces the table's tile.

    Returns:
        [V, 3, H, W], or with ``patch`` [V, (H / p) (W / p), 3 p p].
    """
    if out is None:
        H, W = resize.target
        shape = (3, H, W) if patch is None else (H // patch * (W // patch), 3 * patch * patch)
        out = frames.new_empty((len(frames), *shape), dtype=dtype)
    prepare(frames, resize, out, patch=patch, **options)()
    return out


def reference(
    frames: Tensor, resize: ResizeTables, *, dtype: torch.dtype = torch.float32, patch: int | None = None
) -> Tensor:
    """Define the kernel's result with matrix products in float64, which represents Pillow's integers exactly.

    The result is rounded once, to ``dtype``. The arguments are those of :func:`preprocess`.
    """
    columns = _matrix(resize.columns, resize.source[1])
    rows = _matrix(resize.rows, resize.source[0])
    image = _whole(torch.einsum("vhwc,xw->vhxc", frames.double(), columns), resize.exact)
    image = _whole(torch.einsum("vhxc,yh->vcyx", image, rows), resize.exact)
    factor, offset, bars = (column[:, None, None] for column in resize.affine.double().unbind(1))
    out = bars.expand(len(frames), 3, *resize.target).clone()  # [V, 3, H, W]
    bottom, right = resize.top + resize.inner[0], resize.left + resize.inner[1]
    out[:, :, resize.top : bottom, resize.left : right] = image * factor + offset
    if patch is not None:
        split = out.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [V, 3, rows, p, columns, p]
        out = split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return out.to(dtype)


def _matrix(axis: Axis, size: int) -> Tensor:
    """Return the table of one axis as a matrix, float64 [target, size]."""
    target, taps = axis.weights.shape
    at = (axis.first[:, None].long() + torch.arange(taps, device=axis.first.device)).clamp(max=size - 1)
    zeros = torch.zeros(target, size, dtype=torch.float64, device=axis.weights.device)
    return zeros.scatter_add(1, at, axis.weights.double())


def _whole(values: Tensor, exact: bool) -> Tensor:
    """Convert fixed-point numbers with PLACES binary places to the 8 bits of a pixel, if ``exact``."""
    return ((values + (1 << (PLACES - 1))) / (1 << PLACES)).floor().clamp(0, 255) if exact else values
