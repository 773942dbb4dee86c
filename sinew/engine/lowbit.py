"""Low-bit weights on their way from a bundle into a model: kept, or widened for engines without a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sinew.bundle import Bundle
from sinew.bundle.quant import FORMATS, SCALE, WEIGHT
from sinew.bundle.schema import COMPONENTS
from sinew.core import BundleError
from sinew.layers.lowbit import dequantize
from sinew.layers.quantized import QuantizedEmbedding, QuantizedLinear, quantized_twin, width_of
from sinew.layers.tables import is_token_table
from sinew.models.base import Model

BLOCK = 1 << 20  # bytes that are checked at once
KEPT = (QuantizedLinear, QuantizedEmbedding)


def place(
    model: nn.Module, bundle: Bundle, keep: bool, tables: bool = False
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Prepare ``model`` (on the meta device) for the bundle's tensors, in place.

    keep: give low-bit weights the layers that compute on them; tables: token tables at least. Layers that the
    architecture itself makes so (ternary) stay what they are either way. Returns the shape of each tensor as the model
    should have it, and the modules whose weights have to be widened. Raises :class:`BundleError` for weights that do
    not fit their layer.
    """
    shapes = {name: tuple(info.shape) for name, info in bundle.infos.items()}
    widened = set()
    for module, name in bundle.lowbit.items():
        rows, row_bytes = bundle.tensor(module + WEIGHT).shape
        layer = _layer(model, module)
        k = None if layer is None else width_of(layer)
        if layer is None or k is None:
            raise BundleError(
                f"{bundle.path}: {module + WEIGHT} is stored as {name}: expected a linear layer or a table there"
            )
        if row_bytes != _row_bytes(bundle, module, name, k):
            raise BundleError(
                f"{bundle.path}: {module + WEIGHT}: expected rows of {k} weights in {name}, got {row_bytes} bytes"
            )
        scale = bundle.infos.get(module + SCALE)
        scales = 0 if scale is None else _scales(bundle, module, scale.shape, rows)
        if not isinstance(layer, KEPT) and not (keep or (tables and is_token_table(module, layer))):
            shapes[module + WEIGHT] = (rows, k)
            shapes.pop(module + SCALE, None)
            widened.add(module)
            continue
        if not isinstance(layer, KEPT):
            parent, _, attribute = module.rpartition(".")
            with torch.device("meta"):
                setattr(model.get_submodule(parent), attribute, quantized_twin(layer, name, scales))
        shapes[module + WEIGHT] = (rows, row_bytes)
    return shapes, widened


def stored_recipe(bundle: Bundle, model: Model) -> dict[str, str]:
    """Return the formats that each component's low-bit weights are stored in, most first."""
    found: dict[str, Counter[str]] = {}
    for module, name in bundle.lowbit.items():
        found.setdefault(model.component_of(module), Counter())[name] += bundle.infos[module + WEIGHT].nbytes
    return {
        component: "+".join(name for name, _ in found[component].most_common())
        for component in COMPONENTS
        if component in found
    }


def widen(tensors: Mapping[str, Tensor], module: str, name: str, k: int) -> Tensor:
    """Return the weight of ``module`` as float32 [rows, k]."""
    return dequantize(tensors[module + WEIGHT], tensors.get(module + SCALE), name, k)


def check_codes(weight: Tensor, name: str, where: str) -> None:
    """Raise :class:`BundleError` for codes that stand for no weight: the sums of kernels are proved for the others.

    A byte of four ternary codes has a 3 where both bits of a pair are set. Copies are bounded by a block of bytes.
    """
    if name != "ternary":
        return
    for block in weight.view(-1).split(BLOCK):
        if bool((block & (block >> 1) & 0b01010101).any()):
            raise BundleError(f"{where}: expected ternary codes 0, 1 and 2, got 3")


def _layer(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _row_bytes(bundle: Bundle, module: str, name: str, k: int) -> int:
    try:
        return FORMATS[name].row_bytes(k)
    except ValueError as error:
        raise BundleError(f"{bundle.path}: {module + WEIGHT}: {error}") from None


def _scales(bundle: Bundle, module: str, shape: tuple[int, ...], rows: int) -> int:
    if shape not in ((1,), (rows,)):
        raise BundleError(f"{bundle.path}: {module + SCALE}: expected 1 or {rows} scales, got {list(shape)}")
    return shape[0]
