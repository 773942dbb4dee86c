"""Compiled calls for the parts of a transformer layer before and after its attention, and one call for a whole layer.

    project: norm(x) times the weight of each of several layers, with rotated heads of the first layers
    finish:  h = x + gate * (attended W_o), then h + gate * down(action(up(norm(h))))
    encode:  project, attention in which every row attends to every row, finish

The linear layers may have any low-bit format. Each call equals its parts in every bit: the norm and the activation of
this library, the product of ``lowbit.py``, PyTorch's rotation and sums. The references in this module are those parts,
and ``tests/engine/cpu/test_layer_kernels.py`` compares the calls with them.

A call saves the overhead between the parts: about 25 us each for PyTorch and Python, tensors that are written and read
once, and the time in which one thread works while other threads wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinew.bundle.quant import FORMATS
from sinew.engine.cpu.kernels import float_kernels
from sinew.engine.cpu.kernels.float_kernels import FloatKernels
from sinew.engine.cpu.kernels.frame_kernels import check
from sinew.layers.linear import Linear, hold
from sinew.layers.rope import Rotation
from sinew.layers.stores import lowbit
from sinew.layers.stores.codes import Codes, codes, together

# Numbers of these orders in kernels.h, after the numbers of FORMATS.
PANELS_NUMBERS = {
    lowbit.PANELS: 4,
    lowbit.FOURS: 5,
    lowbit.EIGHTS: 6,
    lowbit.BF16_PANELS: 7,
    lowbit.BF16_TILES: 8,
    lowbit.BF16_FUSED: 9,
    lowbit.BF16_ODD: 10,
}
ACTIONS = {"gelu_tanh": 2, "gelu_tanh_times": 3, "silu_times": 4}  # number of each activation in product.h


def number_of(order: str) -> int:
    """Return the number that kernels.h uses for an order of stored weights."""
    return PANELS_NUMBERS[order] if order in PANELS_NUMBERS else FORMATS[order].number


def check_codes(weight: Tensor, scale: Tensor | None, bias: Tensor | None, order: str, k: int) -> None:
    """Check that the tensors of a low-bit linear layer fit each other, for rows of ``k`` weights.

    Args:
        weight: uint8 [channels, bytes].
        scale: float32 scales, or None.
        bias: float32 [channels], or None.
        order: The order of the codes.
        k: The number of weights in a row.

    Raises:
        ValueError: The tensors do not fit.
    """
    stored, halves = FORMATS["int8" if order in PANELS_NUMBERS else order], order in lowbit.HALVES
    channels, count = len(weight), 0 if scale is None else scale.numel()
    fits = (
        weight.dtype == torch.uint8
        and weight.is_contiguous()
        and weight.shape[1] == stored.row_bytes(k) * (2 if halves else 1)
        and not (order in PANELS_NUMBERS and not lowbit.lies_in_panels(channels, k))
        and (count == 0 if stored.group or halves else count in (1, channels))
        and all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in (scale, bias))
        and (bias is None or bias.shape == (channels,))
    )
    if not fits:
        raise ValueError(
            f"{order}: expected a weight and scales for rows of {k}, got {weight.dtype} {list(weight.shape)} and"
            f" {count} scales"
        )


class _GivenLayer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("channels", "scales")),
    ]


class _GivenProduct(ctypes.Structure):
    _fields_ = [
        ("format", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("k", ctypes.c_int64),
        ("smallest", ctypes.c_float),
        ("layers", ctypes.POINTER(_GivenLayer)),
    ]


class _GivenNorm(ctypes.Structure):
    _fields_ = [
        ("there", ctypes.c_int32),
        ("centred", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class _GivenProjection(ctypes.Structure):
    _fields_ = [
        ("norm", _GivenNorm),
        ("product", _GivenProduct),
        ("turned", ctypes.c_int32),
        ("head", ctypes.c_int32),
    ]


class _GivenFinish(ctypes.Structure):
    _fields_ = [
        ("output", _GivenProduct),
        ("norm", _GivenNorm),
        ("up", _GivenProduct),
        ("down", _GivenProduct),
        ("action", ctypes.c_int32),
        ("output_gate", ctypes.c_void_p),
        ("down_gate", ctypes.c_void_p),
    ]


@dataclass(frozen=True, eq=False)
class NormOf:
    """A norm of rows.

    Attributes:
        centred: True for LayerNorm, False for RMSNorm.
        eps: The constant that is added before the root.
        weight: float32 [k], or None.
        bias: float32 [k], or None.
    """

    centred: bool
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None


class CompiledHalf:
    """The weights of one part of a transformer layer, as the kernels read them.

    A copy of this object does not contain the memory addresses of the weights.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_given": None}


@dataclass(eq=False)
class Projection(CompiledHalf):
    """The part of a layer before its attention.

    Attributes:
        norm: The norm of the input, or None.
        layers: The layers that read the norm, such as the projections of queries, keys and values.
        turned: Heads are rotated (rotary positions) in this many of ``layers``, counted from the first layer.
        head: The number of channels of a head.
    """

    norm: NormOf | None
    layers: Sequence[Linear]
    turned: int = 0
    head: int = 0
    _given: Any = field(default=None, repr=False)

    def fill(self) -> tuple[_GivenProjection, list[Any]]:
        """Return the C struct, and the objects that must exist as long as the struct."""
        owners: list[Any] = []
        product = _product(self.layers, owners)
        struct = _GivenProjection(_norm(self.norm, product.k, owners), product, self.turned, self.head)
        return struct, owners


@dataclass(eq=False)
class Finish(CompiledHalf):
    """The part of a layer after its attention.

    Attributes:
        output: The attention's output layer.
        norm: The norm before the MLP.
        up: The MLP's first layer, or its gate and up layers.
        action: The MLP's activation, a name in :data:`ACTIONS`.
        down: The MLP's last layer.
        output_gate: Factors of the attention's output, float32 [channels], or None.
        down_gate: Factors of the MLP's output, float32 [channels], or None.
    """

    output: Linear
    norm: NormOf
    up: Sequence[Linear]
    action: str
    down: Linear
    output_gate: Tensor | None = None
    down_gate: Tensor | None = None
    _given: Any = field(default=None, repr=False)

    def fill(self) -> tuple[_GivenFinish, list[Any]]:
        """Return the C struct, and the objects that must exist as long as the struct."""
        owners: list[Any] = []
        up = _product(self.up, owners)
        struct = _GivenFinish(
            _product([self.output], owners),
            _norm(self.norm, up.k, owners),
            up,
            _product([self.down], owners),
            ACTIONS[self.action],
            _gate(self.output_gate, self.output, owners),
            _gate(self.down_gate, self.down, owners),
        )
        return struct, owners


def _address(tensor: Tensor | None, held: list[Any]) -> int | None:
    if tensor is None:
        return None
    held.append(tensor)
    return tensor.data_ptr()


def _gate(gate: Tensor | None, layer: Linear, held: list[Any]) -> int | None:
    if gate is not None and (gate.shape != (len(layer.weight),) or gate.dtype != torch.float32):
        raise ValueError(f"gate: expected float32 [{len(layer.weight)}], got {gate.dtype} {list(gate.shape)}")
    return _address(None if gate is None else gate.contiguous(), held)


def _norm(norm: NormOf | None, width: int, held: list[Any]) -> _GivenNorm:
    if norm is None:
        return _GivenNorm()
    if any(
        t is not None and (t.shape != (width,) or t.dtype != torch.float32) for t in (norm.weight, norm.bias)
    ):
        shapes = [None if t is None else list(t.shape) for t in (norm.weight, norm.bias)]
        raise ValueError(f"norm: expected a float32 weight and bias of shape [{width}], got {shapes}")
    return _GivenNorm(1, norm.centred, norm.eps, _address(norm.weight, held), _address(norm.bias, held))


def _product(layers: Sequence[Linear], held: list[Any]) -> _GivenProduct:
    structs = (_GivenLayer * len(layers))()
    store = layers[0].store
    assert isinstance(store, Codes)
    for at, layer in zip(structs, layers, strict=True):
        bias = None if layer.bias is None else layer.bias.float()
        check_codes(layer.weight, layer.scale, bias, store.order, store.width)
        at.weight, at.scale, at.bias = (_address(t, held) for t in (layer.weight, layer.scale, bias))
        at.channels, at.scales = len(layer.weight), 0 if layer.scale is None else layer.scale.numel()
    held.append(structs)
    return _GivenProduct(number_of(store.order), len(layers), store.width, store.smallest, structs)


def _given(half: Projection | Finish, weights: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Return the C struct of a part, and the Python objects that must stay alive as long as the struct.

    The function makes a new struct if a weight was replaced.
    """
    cached = half._given  # noqa: SLF001 - it is made here
    if cached is None or any(now is not then for now, then in zip(weights, cached[2], strict=True)):
        cached = half._given = (*half.fill(), weights)  # noqa: SLF001
    return cached[0], cached[1]


def norm_reference(norm: NormOf, x: Tensor) -> Tensor:
    """Return the norm of each row of x, float32 [..., k], computed by PyTorch."""
    if norm.centred:
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    out = out if norm.weight is None else out * norm.weight
    return out if norm.bias is None else out + norm.bias


def project_reference(half: Projection, x: Tensor, rotate: Rotation | None = None) -> list[Tensor]:
    """Return the output of each linear layer for x, computed by separate PyTorch operations (norm, product, rotation).

    Args:
        half: The layers.
        x: float32 [B, L, k].
        rotate: The rotation, or None.

    Returns:
        [B, L, channels] for each layer.
    """
    h = x if half.norm is None else _on_cpu[0].norm(half.norm, x)
    parts = together(half.layers, h)
    if rotate is not None:
        for i, part in enumerate(parts[: half.turned]):
            parts[i] = rotate(part.unflatten(-1, (-1, half.head))).flatten(-2)
    return parts


def finish_reference(half: Finish, x: Tensor, attended: Tensor) -> Tensor:
    """Return the layer's output, [B, L, width], computed by separate PyTorch operations.

    Args:
        half: The part after the attention.
        x: The layer's input, [B, L, width].
        attended: The attention's result, [B, L, k].
    """
    branch = half.output(attended)
    h = x + (branch if half.output_gate is None else branch * half.output_gate)
    inner = together(half.up, _on_cpu[0].norm(half.norm, h))
    if half.action == "silu_times":
        float_kernels.silu_times_(inner[0], inner[1])
    else:
        float_kernels.gelu_(inner[0])
    if half.action == "gelu_tanh_times":
        inner[0].mul_(inner[1])
    branch = half.down(inner[0])
    return h + (branch if half.down_gate is None else branch * half.down_gate)


def encode_reference(
    before: Projection, behind: Finish, x: Tensor, rotate: Rotation | None = None, rounded: bool = False
) -> Tensor:
    """Return the output, [B, L, width], of a layer without attention mask, computed by separate PyTorch operations.

    Args:
        before: The projections of queries, keys and values.
        behind: The part after the attention.
        x: The layer's input, [B, L, width].
        rotate: The rotation, or None.
        rounded: Allows rounded attention, as in :func:`.attend_reference`.
    """
    q, k, v = (part.unflatten(-1, (-1, before.head)) for part in _on_cpu[0].project(before, x, rotate))
    return _on_cpu[0].finish(behind, x, float_kernels.attend(q, k, v, None, rounded))


@dataclass(frozen=True)
class LayerKernels:
    """One implementation of each function of this module: compiled kernels or PyTorch references."""

    norm: Callable[[NormOf, Tensor], Tensor] = norm_reference
    project: Callable[..., list[Tensor]] = project_reference
    finish: Callable[[Finish, Tensor, Tensor], Tensor] = finish_reference
    encode: Callable[..., Tensor] = encode_reference

    @classmethod
    def compiled(cls, library: Any, kernels: int) -> LayerKernels:
        """Return the kernels of a loaded library (:func:`sinew.engine.cpu.kernels.library.load`)."""
        declare(library)
        return cls(
            partial(_compiled_norm, library, kernels),
            partial(_compiled_project, library, kernels),
            partial(_compiled_finish, library, kernels),
            partial(_compiled_encode, library, kernels),
        )


def declare(library: Any) -> None:
    integer, long, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    library.lowbit_norm.argtypes = [
        *(integer, pointer, long, long, integer),
        *(ctypes.c_float, pointer, pointer, pointer, integer),
    ]
    library.lowbit_project.argtypes = [integer, pointer, pointer, long, *[pointer] * 3, long, integer]
    library.lowbit_encode.argtypes = [
        *(integer, pointer, pointer, pointer, long, long),
        *(pointer, pointer, pointer, long, integer, integer),
    ]
    library.lowbit_finish.argtypes = [integer, pointer, pointer, pointer, long, pointer, integer]


def _dense(x: Tensor, width: int, what: str) -> Tensor:
    """Return x, or a copy of x with contiguous rows.

    Raises:
        ValueError: x is not float32 [..., width] on the CPU.
    """
    if x.dtype != torch.float32 or x.shape[-1] != width or x.device.type != "cpu":
        raise ValueError(
            f"{what}: expected float32 [..., {width}] on cpu, got {x.dtype} {list(x.shape)} on {x.device}"
        )
    return x.contiguous()


def _compiled_norm(library: Any, kernels: int, norm: NormOf, x: Tensor) -> Tensor:
    x = _dense(x, x.shape[-1], "norm")
    out, k = torch.empty_like(x), x.shape[-1]
    owners: list[Any] = []
    struct = _norm(norm, k, owners)
    status = library.lowbit_norm(
        *(kernels, x.data_ptr(), x.numel() // k, k, struct.centred, struct.eps, struct.weight, struct.bias),
        *(out.data_ptr(), torch.get_num_threads()),
    )
    check("norm", status)
    return out


def _tables(
    half: Projection, rotate: Rotation | None, rows: int, period: int
) -> tuple[tuple[int | None, int | None, int], Any]:
    """Return the tables of a rotation for the kernels.

    Returns:
        The memory addresses of the cosines and of the sines, the number of rows after which the tables repeat, and the
        tensors at these addresses.
    """
    if rotate is None:
        return (None, None, 0), None
    cosines, sines = rotate.cos.contiguous(), rotate.sin.contiguous()
    there = cosines.numel() // max(half.head // 2, 1)
    fits = (
        cosines.dtype == sines.dtype == torch.float32
        and cosines.shape == sines.shape
        and cosines.shape[-1] * 2 == half.head
        and there in (rows, period)
    )
    if not fits:
        raise ValueError(
            f"projection: expected a rotation with {rows} or {period} rows for heads of {half.head} channels,"
            f" got {list(cosines.shape)}"
        )
    return (cosines.data_ptr(), sines.data_ptr(), there), (cosines, sines)


def _compiled_project(
    library: Any, kernels: int, half: Projection, x: Tensor, rotate: Rotation | None = None
) -> list[Tensor]:
    struct, _ = _given(half, tuple(layer.weight for layer in half.layers))
    x = _dense(x, struct.product.k, "projection")
    shape = x.shape[:-1]
    rows = x.numel() // struct.product.k
    results = [torch.empty(*shape, len(layer.weight)) for layer in half.layers]
    tables, _held = _tables(half, rotate, rows, x.shape[-2])
    addresses = (ctypes.c_void_p * len(results))(*[y.data_ptr() for y in results])
    status = library.lowbit_project(
        *(kernels, ctypes.addressof(struct), x.data_ptr(), rows, ctypes.addressof(addresses), *tables),
        torch.get_num_threads(),
    )
    check("projection", status)
    return results


def _compiled_finish(library: Any, kernels: int, half: Finish, x: Tensor, attended: Tensor) -> Tensor:
    weights = (half.output.weight, *(layer.weight for layer in half.up), half.down.weight)
    struct, _ = _given(half, weights)
    attended = _dense(attended, struct.output.k, "finish")
    x = _dense(x, struct.up.k, "finish")
    if x.shape[:-1] != attended.shape[:-1]:
        raise ValueError(
            f"finish: expected the same rows in both inputs, got {list(x.shape)} and {list(attended.shape)}"
        )
    out = torch.empty_like(x)
    status = library.lowbit_finish(
        *(kernels, ctypes.addressof(struct), x.data_ptr(), attended.data_ptr(), x.numel() // struct.up.k),
        *(out.data_ptr(), torch.get_num_threads()),
    )
    check("finish", status)
    return out


def _compiled_encode(
    library: Any,
    kernels: int,
    before: Projection,
    behind: Finish,
    x: Tensor,
    rotate: Rotation | None = None,
    rounded: bool = False,
) -> Tensor:
    struct, _ = _given(before, tuple(layer.weight for layer in before.layers))
    weights = (behind.output.weight, *(layer.weight for layer in behind.up), behind.down.weight)
    rest, _ = _given(behind, weights)
    x = _dense(x, struct.product.k, "layer")
    if x.ndim != 3 or rest.up.k != struct.product.k:
        raise ValueError(f"layer: expected an input of shape [B, L, {rest.up.k}], got {list(x.shape)}")
    batch, rows, _ = x.shape
    tables, _held = _tables(before, rotate, batch * rows, rows)
    out = torch.empty_like(x)
    status = library.lowbit_encode(
        *(kernels, ctypes.addressof(struct), ctypes.addressof(rest), x.data_ptr(), batch, rows),
        *(out.data_ptr(), *tables, rounded, torch.get_num_threads()),
    )
    check("layer", status)
    return out


REFERENCES = LayerKernels()


def differs(kernels: LayerKernels, floats: FloatKernels, multiply_all: lowbit.MultiplyAll) -> str:
    """Return the name of the first operation of ``kernels`` with a wrong result, or "" if all results are right.

    The norm is compared with PyTorch's norm, within 1e-5. The other calls are compared in every bit with this norm and
    the operations of ``floats`` and ``multiply_all``.
    """
    random = torch.Generator().manual_seed(0)
    width, inner, rows = 64, 96, 7

    def layer(out: int, k: int) -> Linear:
        made = Linear(k, out)
        hold(made, codes("int8", k, out))
        stored = torch.randint(0, 256, (out, k), generator=random, dtype=torch.uint8)
        made.weight, made.scale = nn.Parameter(stored, False), nn.Parameter(torch.rand(out) / 2000, False)
        return made

    def times(x: Tensor, *layers: Any) -> list[Tensor]:
        weights, scales, biases = (
            [getattr(layer, name) for layer in layers] for name in ("weight", "scale", "bias")
        )
        made = multiply_all(x.view(-1, x.shape[-1]), weights, scales, biases, "int8", lowbit.TINY)
        return [each.view(1, rows, -1) for each in made]

    x = torch.randn(1, rows, width, generator=random)
    rotate = Rotation.at(torch.arange(rows)[None], 16, 100.0)
    with torch.no_grad():
        norm = NormOf(True, 1e-6, *torch.rand(2, width, generator=random).unbind())
        if not torch.allclose(kernels.norm(norm, x), norm_reference(norm, x), rtol=1e-5, atol=1e-5):
            return "norm"
        before = Projection(norm, [layer(width, width), layer(32, width)], 1, 16)
        q, k = times(kernels.norm(norm, x), *before.layers)
        turned = rotate(q.unflatten(-1, (-1, 16))).flatten(-2)
        if not all(map(torch.equal, kernels.project(before, x, rotate), (turned, k))):
            return "projection"
        behind = Finish(layer(width, width), norm, [layer(inner, width)], "gelu_tanh", layer(width, inner))
        h = x + times(x, behind.output)[0]
        (up,) = times(kernels.norm(norm, h), *behind.up)
        floats.gelu(up)
        expected = h + times(up, behind.down)[0]
        return "" if torch.equal(kernels.finish(behind, x, x), expected) else "finish"


_on_cpu: list[LayerKernels] = [REFERENCES]  # one entry: the kernels that the functions below call


def install(kernels: LayerKernels) -> None:
    """Set the kernels that layers use on CPUs."""
    _on_cpu[:] = [kernels]


def usable(x: Tensor) -> bool:
    """Return True if a compiled call accepts x: a float32 tensor on a CPU, for which no gradient is needed."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not x.requires_grad


def project(half: Projection, x: Tensor, rotate: Rotation | None = None) -> list[Tensor]:
    return _on_cpu[0].project(half, x, rotate)


def finish(half: Finish, x: Tensor, attended: Tensor) -> Tensor:
    return _on_cpu[0].finish(half, x, attended)


def encode(
    before: Projection, behind: Finish, x: Tensor, rotate: Rotation | None = None, rounded: bool = False
) -> Tensor:
    return _on_cpu[0].encode(before, behind, x, rotate, rounded)
