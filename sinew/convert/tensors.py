"""Objects that describe the tensors of a checkpoint, and new tensors that will be computed from them, without reading
any data.

Data is read only when the bundle is written, one tensor at a time. Transforms that move elements (split, join, pick,
transpose, reshape) work on stored bits, so bfloat16 needs no arithmetic. :func:`computed` reads float32 values and
returns float32. Consecutive rows of a tensor in a file are copied from the file directly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sinew.bundle.writer import ArraySlice, FileSlice, TensorSource
from sinew.convert.read.elements import BF16, ELEMENTS, F32
from sinew.core import ConvertError

Transform = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Transformed:
    """The bytes of a tensor that are computed from other tensors when they are needed.

    Attributes:
        inputs: The tensors from which the bytes are computed.
        transform: The function that computes an array from the arrays of ``inputs``.
        read: The function that reads one input as an array.
    """

    inputs: tuple[TensorSource, ...]
    transform: Transform
    read: Callable[[TensorSource], np.ndarray]

    def blocks(self) -> Iterable[memoryview]:
        values = self.transform(*map(self.read, self.inputs))
        yield np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def read_elements(source: TensorSource) -> np.ndarray:
    """Return the stored elements of a tensor: float32, float16, or uint16 with the bits of bfloat16."""
    raw = b"".join(bytes(block) for block in source.data.blocks())
    return np.frombuffer(raw, ELEMENTS[source.type]).reshape(source.shape)


def read_array(source: TensorSource) -> np.ndarray:
    """Return the values of a tensor as float32."""
    elements = read_elements(source)
    # bfloat16 is the upper 16 bits of float32.
    if source.type is BF16:
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32, copy=False)


def constant(name: str, array: np.ndarray) -> TensorSource:
    """Return a tensor source with the float32 values of ``array``. The values do not come from a file."""
    values = np.ascontiguousarray(array, np.float32)
    return TensorSource(name, values.shape, F32, values.nbytes, ArraySlice(values))


def moved(transform: Transform, *sources: TensorSource, shape: tuple[int, ...] | None = None) -> TensorSource:
    """Return a tensor source whose elements are ``transform(*elements of sources)``.

    Args:
        transform: A function that may only move and drop elements.
        *sources: The inputs. All have the same storage type.
        shape: Shape of the result. If None, the transform is called once to find the shape. This call needs no memory
            if the transform only makes views.

    Raises:
        ConvertError: The shapes do not fit, or the storage types differ.
    """
    first = sources[0]
    if other := next((s for s in sources if s.type is not first.type), None):
        raise ConvertError(
            f"{other.name}: expected type {first.type.name} like {first.name}, got {other.type.name}"
        )
    shape = _shape(transform, sources, ELEMENTS[first.type]) if shape is None else shape
    nbytes = math.prod(shape) * ELEMENTS[first.type].itemsize
    return replace(first, shape=shape, nbytes=nbytes, data=Transformed(sources, transform, read_elements))


def computed(
    transform: Transform, *sources: TensorSource, shape: tuple[int, ...] | None = None
) -> TensorSource:
    """Return a tensor source with the float32 values ``transform(*float32 values of sources)``.

    Args:
        transform: A function of float32 arrays.
        *sources: The inputs.
        shape: Shape of the result. If None, the transform is called once to find it, as in :func:`moved`.
    """

    def as_float32(*values: np.ndarray) -> np.ndarray:
        return np.asarray(transform(*values), np.float32)

    shape = _shape(as_float32, sources, ELEMENTS[F32]) if shape is None else shape
    data = Transformed(sources, as_float32, read_array)
    return replace(sources[0], shape=shape, type=F32, nbytes=4 * math.prod(shape), data=data)


def rounded(source: TensorSource) -> TensorSource:
    """Return a tensor source whose values are those of ``source``, rounded to the nearest bfloat16, ties to even; NaN
    stays NaN.
    """
    if source.type is BF16:
        return source

    def as_bfloat16(values: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(values), (bits >> 16) | 0x40, nearest).astype(np.uint16)

    data = Transformed((source,), as_bfloat16, read_array)
    return replace(source, type=BF16, nbytes=2 * math.prod(source.shape), data=data)


def transpose(source: TensorSource, *axes: int) -> TensorSource:
    """Return a tensor source with the axes of ``source`` in the order ``axes``. Without ``axes``, the order of the
    axes is reversed.
    """
    return moved(lambda x: x.transpose(axes or None), source)


def reshape(source: TensorSource, *shape: int) -> TensorSource:
    """Return a tensor source with the elements of ``source`` in a new shape. The row-major order stays, and one size
    may be -1.
    """
    new = _shape(lambda x: x.reshape(shape), (source,), ELEMENTS[source.type])
    return replace(source, shape=new)


def pick(source: TensorSource, *index: int) -> TensorSource:
    """Return the entry ``source[index]`` of the first axes, for example one layer of a stack."""
    if len(index) > len(source.shape) or any(
        not 0 <= i < n for i, n in zip(index, source.shape, strict=False)
    ):
        raise ConvertError(
            f"{source.name}: shape {list(source.shape)} has no index {list(index)}; use the config.json that belongs"
            " to these weights"
        )
    for i in index:
        source = replace(rows(source, i, i + 1), shape=source.shape[1:])
    return source


def rows(source: TensorSource, start: int, stop: int) -> TensorSource:
    """Return ``source[start:stop]`` along the first axis. Rows of a tensor in a file are copied from the file
    directly."""
    if not source.shape or not 0 <= start <= stop <= source.shape[0]:
        raise ConvertError(
            f"{source.name}: shape {list(source.shape)} has no rows {start} to {stop}; use the config.json that belongs"
            " to these weights"
        )
    if not isinstance(source.data, FileSlice) or source.shape[0] == 0:
        return moved(lambda x: x[start:stop], source)
    stride = source.nbytes // source.shape[0]
    nbytes = (stop - start) * stride
    data = FileSlice(source.data.path, source.data.offset + start * stride, nbytes)
    return replace(source, shape=(stop - start, *source.shape[1:]), nbytes=nbytes, data=data)


def split(source: TensorSource, sizes: Sequence[int], axis: int = 0) -> tuple[TensorSource, ...]:
    """Return consecutive parts of a tensor, for example the parts of a fused projection.

    Args:
        source: The tensor.
        sizes: Sizes of the parts along ``axis``.
        axis: The axis to split.

    Raises:
        ConvertError: The sizes do not add up to the size of the axis.
    """
    if not 0 <= axis < len(source.shape) or sum(sizes) != source.shape[axis]:
        raise ConvertError(
            f"{source.name}: shape {list(source.shape)} does not split into {list(sizes)} along axis {axis}; use the"
            " config.json that belongs to these weights"
        )
    ends = np.cumsum(sizes).tolist()
    spans = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if axis == 0:
        return tuple(rows(source, *span) for span in spans)
    before = (slice(None),) * axis
    return tuple(moved(lambda x, s=slice(*span): x[(*before, s)], source) for span in spans)


def split_qkv(source: TensorSource) -> tuple[TensorSource, ...]:
    """Return the queries, keys and values of a fused projection [3 * width, ...]."""
    size = source.shape[0] // 3 if source.shape else 0
    return split(source, (size,) * 3)


def join(*sources: TensorSource, axis: int = 0) -> TensorSource:
    """Return a tensor source that concatenates ``sources`` along ``axis``.

    Raises:
        ConvertError: The shapes do not fit.
    """
    shapes = [list(source.shape) for source in sources]
    rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(rest) > 1 or not 0 <= axis < min(map(len, shapes)):
        named = ", ".join(f"{s.name} {list(s.shape)}" for s in sources)
        raise ConvertError(
            f"{named}: these tensors cannot be joined along axis {axis}; use the files of one checkpoint"
        )
    shape = (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])
    return moved(lambda *parts: np.concatenate(parts, axis), *sources, shape=shape)


def join_conditioned(
    tensors: Mapping[str, TensorSource], layers: Sequence[str], sizes: Sequence[int]
) -> tuple[dict[str, TensorSource], list[TensorSource], TensorSource]:
    """Join the linear layers that read the same vector, and split their weights by the parts of that vector.

    Args:
        tensors: All tensors, by name.
        layers: Names of the layers, without ".weight" and ".bias".
        sizes: Size of each part of the vector, such as the time and the condition.

    Returns:
        The tensors of no such layer; the joined weight of each part; the joined bias.

    Raises:
        ConvertError: A tensor of a layer is missing.
    """
    rest = dict(tensors)

    def take(name: str) -> TensorSource:
        if name not in rest:
            raise ConvertError(f"the tensor {name} is missing in the checkpoint. Use a complete checkpoint")
        return rest.pop(name)

    weights = [split(take(f"{layer}.weight"), sizes, axis=1) for layer in layers]
    biases = [take(f"{layer}.bias") for layer in layers]
    return rest, [join(*parts) for parts in zip(*weights, strict=True)], join(*biases)


def fuse(tensors: dict[str, TensorSource], prefix: str) -> None:
    """Join queries, keys and values below ``prefix`` in place: ``q_proj``, ``k_proj``, ``v_proj`` become ``qkv``."""
    for name in [name for name in tensors if name.startswith(prefix) and ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", ".qkv.")] = join(*parts)


@dataclass(frozen=True)
class Rule:
    """A rule that renames, splits or drops the tensors whose whole name matches a pattern.

    Attributes:
        pattern: Regular expression for the whole name.
        names: Templates of the new names (``re.Match.expand``); () drops the tensors.
        make: Function from the tensor to one tensor per name; None only renames the tensor.
    """

    pattern: str
    names: tuple[str, ...] = ()
    make: Callable[[TensorSource], TensorSource | tuple[TensorSource, ...]] | None = None


def renames(theirs: str, ours: str, modules: str) -> tuple[Rule, ...]:
    """Return the rules that rename modules with all their tensors.

    Args:
        theirs: Pattern of the prefix of the checkpoint's names.
        ours: Template of the prefix of Sinew's names.
        modules: Entries ``theirs=ours``, separated by spaces, or one name for both. ``{qkv}`` in Sinew's name splits a
            joint matrix into queries, keys and values.
    """
    rules = []
    for word in modules.split():
        old, _, new = word.partition("=")
        names = [(new or old).format(qkv=each) for each in ("qkv" if "{qkv}" in new else "-")]
        end, maker = (r"[._]", split_qkv) if len(names) > 1 else (r"\.", None)
        templates = tuple(rf"{ours}{name}.\g<tensor>" for name in names)
        rules.append(Rule(rf"{theirs}{re.escape(old)}{end}(?P<tensor>.*)", templates, maker))
    return tuple(rules)


def apply(tensors: Mapping[str, TensorSource], rules: Sequence[Rule]) -> dict[str, TensorSource]:
    """Return the tensors under new names. For each tensor, the first rule that matches its name is applied. A tensor
    without a matching rule keeps its name.

    The sources keep the checkpoint's names, for messages.

    Raises:
        ConvertError: Two tensors would get the same name.
    """
    compiled = [(re.compile(rule.pattern), rule) for rule in rules]
    out: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        for pattern, rule in compiled:
            if match := pattern.fullmatch(name):
                result = rule.make(source) if rule.make and rule.names else source
                parts = result if isinstance(result, tuple) else (result,) * bool(rule.names)
                outputs = [(match.expand(t), part) for t, part in zip(rule.names, parts, strict=True)]
                break
        else:
            outputs = [(name, source)]
        for new, part in outputs:
            if new in out:
                raise ConvertError(
                    f"{source.name} and {out[new].name} would both become {new}; the checkpoint contains a weight twice"
                )
            out[new] = part
    return out


def _shape(transform: Transform, sources: Sequence[TensorSource], dtype: np.dtype) -> tuple[int, ...]:
    """Return the shape of the transform's result, computed on arrays of the sources' shapes that take no memory."""
    empty = [np.broadcast_to(np.zeros((), dtype), source.shape) for source in sources]
    try:
        return transform(*empty).shape
    except (ValueError, IndexError) as error:
        shapes = ", ".join(f"{s.name} {list(s.shape)}" for s in sources)
        raise ConvertError(f"{shapes}: {error}") from None
