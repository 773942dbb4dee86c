"""Convert the context of one observation to bytes and back, so that another machine can run the action head.

The context is the result of the vision tower and the language model for one observation. The bytes are a header
(msgpack: the form and shape of each tensor) and then the tensors.

* ``fp32`` keeps every bit of a float32 context.
* ``bf16`` rounds floats to eight bits of mantissa.
* ``int8`` rounds floats to 255 steps up to the largest magnitude of each row along the last axis. The float32 scales
  of the rows precede the steps.

Masks and indices are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import torch
from sinew_client.untrusted import UntrustedError, unpack_msgpack
from torch import Tensor
from torch.utils import _pytree as pytree

from sinew.core import SinewError

FORMS = ("fp32", "bf16", "int8")
LIMIT = 1 << 30  # largest accepted size of a context in bytes
MAX_TENSORS = 4096
_WHOLE = {torch.bool: "bool", torch.int64: "int64", torch.int32: "int32"}
_DTYPES = {name: dtype for dtype, name in _WHOLE.items()}
_SIZES = {"bool": 1, "int64": 8, "int32": 4, "fp32": 4, "bf16": 2, "int8": 1}


def pack(context: Any, form: str) -> bytes:
    """Return a context as bytes.

    Args:
        context: A tree of tensors and None.
        form: The form of floats: "fp32", "bf16" or "int8".

    Raises:
        SinewError: The context contains objects other than tensors of floats, integers or masks.
    """
    heads: list[list[Any] | None] = []
    parts: list[bytes] = []
    for leaf in pytree.tree_leaves(context):
        if leaf is None:
            heads.append(None)
        elif not isinstance(leaf, Tensor):
            raise SinewError(f"context: expected only tensors, got an object of type {type(leaf).__name__}")
        elif leaf.is_floating_point():
            heads.append([form, list(leaf.shape)])
            parts += _PACK[form](leaf.detach().float().cpu().contiguous())
        elif leaf.dtype in _WHOLE:
            heads.append([_WHOLE[leaf.dtype], list(leaf.shape)])
            parts.append(leaf.cpu().contiguous().numpy().tobytes())
        else:
            raise SinewError(f"context: expected floats, integers or masks, got {leaf.dtype}")
    head: bytes = msgpack.packb(heads)
    return b"".join([len(head).to_bytes(4, "little"), head, *parts])


def unpack(data: bytes, template: Any, device: torch.device, longer: Any = None) -> Any:
    """Convert bytes of :func:`pack` to a context with the structure of ``template``.

    Sizes are compared and added up before memory is allocated. A context of other sizes might broadcast, and would
    silently give other actions.

    Args:
        data: The bytes from :func:`pack`.
        template: A context of this model with any values.
        device: The device for the tensors.
        longer: A context like ``template`` for a prompt with one more token. Axes in which the two contexts differ
            may be shorter in ``data``, all by the same number of tokens. All other sizes must be equal to the
            template's.

    Raises:
        SinewError: The bytes are not a context, or are the context of another model.
    """
    leaves, tree = pytree.tree_flatten(template)
    steps = _growth(leaves, leaves if longer is None else pytree.tree_leaves(longer))
    heads, at = _heads(data, len(leaves))
    kinds: list[tuple[str, list[int]] | None] = []
    missing: int | None = None  # how many tokens the prompt is shorter than the template's prompt
    for number, (head, leaf, grows) in enumerate(zip(heads, leaves, steps, strict=True)):
        if (head is None) != (leaf is None):
            raise SinewError(f"context: tensor {number}: expected {_told(leaf)}, got {head}")
        if head is None:
            kinds.append(None)
            continue
        kind, shape = _checked(number, head)
        floats = leaf.is_floating_point()
        fits = (
            (kind in FORMS) == floats and (floats or _DTYPES[kind] == leaf.dtype) and len(shape) == leaf.ndim
        )
        for size, whole, step in zip(shape, leaf.shape, grows, strict=False):
            short = (whole - size) / step if step else None
            if short is not None and missing is None and short >= 0 and short == int(short):
                missing = int(short)
            fits = fits and (size == whole if short is None else short == missing)
        if not fits:
            raise SinewError(f"context: tensor {number}: expected {_told(leaf)}, got {kind} {shape}")
        kinds.append((kind, shape))
    size = at + sum(_nbytes(*each) for each in kinds if each is not None)
    if size != len(data):
        raise SinewError(
            f"context: expected {size} bytes, got {len(data)}; use the same bundle on both machines"
        )
    tensors: list[Any] = []
    for each, leaf in zip(kinds, leaves, strict=True):
        if each is None:
            tensors.append(None)
            continue
        end = at + _nbytes(*each)
        tensors.append(_read(*each, memoryview(data)[at:end]).to(device, leaf.dtype))
        at = end
    return pytree.tree_unflatten(tensors, tree)


def _growth(leaves: list[Any], longer: list[Any]) -> list[tuple[int, ...]]:
    """Return for each axis of each tensor by how many entries it becomes longer if the prompt has one more token."""
    return [
        () if leaf is None else tuple(more - size for size, more in zip(leaf.shape, other.shape, strict=True))
        for leaf, other in zip(leaves, longer, strict=True)
    ]


def _bf16(x: Tensor) -> list[bytes]:
    return [x.to(torch.bfloat16).view(torch.int16).numpy().tobytes()]


def _int8(x: Tensor) -> list[bytes]:
    """Round a tensor to int8 with one float32 scale per row.

    Returns:
        The bytes of the scales, and the bytes of the int8 numbers.
    """
    scale = x.abs().amax(-1, keepdim=True) / 127 if x.numel() else x[..., :1]
    steps = torch.where(scale > 0, x / scale, torch.zeros_like(x)).round().clamp(-127, 127).to(torch.int8)
    return [scale.numpy().tobytes(), steps.numpy().tobytes()]


_PACK: dict[str, Callable[[Tensor], list[bytes]]] = {
    "fp32": lambda x: [x.numpy().tobytes()],
    "bf16": _bf16,
    "int8": _int8,
}


def _nbytes(kind: str, shape: list[int]) -> int:
    count = math.prod(shape)
    scales = 4 * (count // shape[-1] if shape and shape[-1] else 0 if shape else 1) if kind == "int8" else 0
    return count * _SIZES[kind] + scales


def _read(kind: str, shape: list[int], data: memoryview) -> Tensor:
    count = math.prod(shape)
    if not count:
        tensor = torch.zeros(shape)
    elif kind == "int8":
        scale = np.frombuffer(data[: len(data) - count], np.float32).reshape(
            [*shape[:-1], 1] if shape else []
        )
        steps = np.frombuffer(data[len(data) - count :], np.int8).reshape(shape)
        tensor = torch.from_numpy(steps.astype(np.float32)) * torch.from_numpy(scale.copy())
    elif kind == "bf16":
        bits = torch.from_numpy(np.frombuffer(data, np.int16).reshape(shape).copy())
        tensor = bits.view(torch.bfloat16).float()
    else:
        dtype = {"fp32": np.float32, "bool": np.bool_, "int64": np.int64, "int32": np.int32}[kind]
        tensor = torch.from_numpy(np.frombuffer(data, np.uint8).copy().view(dtype).reshape(shape))
    if kind in FORMS and not bool(torch.isfinite(tensor).all()):
        raise SinewError("context: expected finite numbers, got NaN or infinity")
    return tensor


def _heads(data: bytes, count: int) -> tuple[list[Any], int]:
    """Read the header of a packed context.

    Return a description of each tensor, and the position of the first tensor in ``data``.
    """
    if len(data) > LIMIT:
        raise SinewError(f"context: expected at most {LIMIT} bytes, got {len(data)}")
    end = 4 + int.from_bytes(data[:4], "little")
    try:
        heads = unpack_msgpack(data[4:end], max_values=16 * MAX_TENSORS)
    except UntrustedError:
        heads = None
    if not isinstance(heads, list):
        raise SinewError(
            "context: the bytes do not begin with a list of tensors; use the same version of Sinew on both machines"
        )
    if len(heads) != count:
        raise SinewError(
            f"context: expected {count} tensors for this model, got {len(heads)}; use the same bundle on both machines"
        )
    return heads, end


def _checked(number: int, head: Any) -> tuple[str, list[int]]:
    if isinstance(head, list) and len(head) == 2:
        kind, shape = head
        whole = isinstance(shape, list) and all(type(each) is int and 0 <= each <= LIMIT for each in shape)
        if (
            isinstance(kind, str)
            and kind in _SIZES
            and whole
            and len(shape) <= 8
            and math.prod(shape) <= LIMIT
        ):
            return kind, shape
    raise SinewError(
        f"context: tensor {number}: expected a form (such as fp32) and a shape, got {str(head)[:80]}"
    )


def _told(leaf: Tensor | None) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype} {list(leaf.shape)} (fewer with a shorter prompt)"
