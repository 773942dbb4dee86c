"""Convert a bundle's linear layers, convolutions over rows and token tables to low-bit weights, by component."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from torch import nn

from sinew.bundle import Bundle, TensorSource
from sinew.bundle.quant import FORMATS, SCALE, WEIGHT, Format, quantize
from sinew.bundle.writer import FileSlice
from sinew.core import BundleError, SinewError
from sinew.core.fields import from_builtins
from sinew.core.registry import model_class
from sinew.layers.linear import width_of
from sinew.layers.stores.lowbit import dequantize
from sinew.lowbit.gptq import WIDEST, gptq, portions, second_moments
from sinew.models import on_meta

# Key: a precision in a recipe. Value: the format of the stored weights.
STORED = {
    "int8": "int8",
    "int8-rows": "int8",
    "q8_0": "q8_0",
    "q4_0": "q4_0",
}
OTHERWISE = "int8"  # format of weights whose rows cannot be divided into groups


@dataclass(frozen=True)
class Rounded:
    """The bytes of a low-bit weight, or of its scales. They are computed only when they are written to a file.

    Attributes:
        bundle: The source bundle.
        name: Name of the weight.
        format: The low-bit format.
        scales: True for the scales, False for the weight.
        made: File with these bytes, if they were computed before.
    """

    bundle: Bundle
    name: str
    format: str
    scales: bool
    made: Path | None = None

    def blocks(self) -> Iterable[memoryview]:
        if self.made is not None:
            made = np.load(self.made, mmap_mode="r")  # own file: written by this process
            yield made.reshape(-1).data
            return
        weights = self.bundle.tensor(self.name).float().flatten(1).numpy()
        try:
            made = quantize(weights, self.format)[self.scales]
        except ValueError as error:
            raise BundleError(f"{self.bundle.path}: {self.name}: {error}") from None
        self.bundle.release(())
        yield np.ascontiguousarray(made).reshape(-1).view(np.uint8).data


def plan_formats(bundle: Bundle, recipe: Mapping[str, str]) -> dict[str, str]:
    """Return the low-bit format of each layer and token table that ``recipe`` (component -> precision) rounds.

    Modules that the reference keeps in float32, and tables of positions, are not rounded. Rows whose length is not a
    multiple of the group size are stored as int8 with one scale per row.
    """
    cls = model_class(bundle.manifest.architecture)
    config: Any = from_builtins(bundle.manifest.config, cls.config_type, f"{bundle.path}: sinew.config")
    formats = {}
    model = on_meta(cls, config)
    for module, layer in model.named_modules():
        component = model.component_of(module)
        name, k = STORED.get(recipe[component]), width_of(layer)
        is_positions = isinstance(layer, nn.Embedding) and component != "language"
        if name is None or k is None or is_positions or module.partition(".")[0] in cls.float32_modules:
            continue
        formats[module] = name if not (FORMATS[name].group and k % FORMATS[name].group) else OTHERWISE
    return formats


def calibrated_rows(
    bundle: Bundle,
    formats: Mapping[str, str],
    model: nn.Module,
    runs: Callable[[], Iterable[Callable[[], object]]],
    folder: Path,
) -> tuple[dict[str, Path], int]:
    """Round the linear layers that ``formats`` stores as q4_0, calibrated with their inputs (:mod:`sinew.lowbit.gptq`).

    Args:
        bundle: The bundle.
        formats: The low-bit format of each layer, by the layer's name.
        model: The bundle's model with float weights.
        runs: Returns calls that compute the model, with the same observations each time. It is called several times if
            the moments of all layers do not fit the memory at once.
        folder: The folder for the rounded rows.

    Returns:
        Layer -> file with its rows, and the number of layers that could not be calibrated because they are unused or
            too wide. Their weights are rounded separately.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if formats.get(name) == "q4_0" and not isinstance(layer, nn.Embedding)
    }
    narrow = {name: layer for name, layer in layers.items() if (width_of(layer) or 0) <= WIDEST}
    files: dict[str, Path] = {}
    for some in portions(narrow):
        for name, moments in second_moments(some, runs()).items():
            files[name] = folder / f"{len(files)}.npy"
            try:
                np.save(files[name], gptq(bundle.tensor(name + WEIGHT).float().flatten(1).numpy(), moments))
            except ValueError as error:
                raise BundleError(f"{bundle.path}: {name}: {error}") from None
            bundle.release(())
    return files, len(layers) - len(files)


def lowbit_sources(
    bundle: Bundle, formats: Mapping[str, str], made: Mapping[str, Path] | None = None
) -> list[TensorSource]:
    """Return the bundle's tensors in their order, with rounded weights for the layers in ``formats``.

    Args:
        bundle: The bundle.
        formats: The low-bit format of each layer, by the layer's name.
        made: For each layer that was rounded before, the file with its rows.

    Raises:
        SinewError: The bundle has low-bit weights already. Rounding twice would hide an error.
    """
    if bundle.lowbit:
        raise SinewError(
            f"{bundle.path}: expected float weights, got {', '.join(sorted(set(bundle.lowbit.values())))}; pass the"
            " bundle before quantisation"
        )
    sources = []
    for info in sorted(bundle.infos.values(), key=lambda info: info.offset):
        name = formats.get(info.name.removesuffix(WEIGHT)) if info.name.endswith(WEIGHT) else None
        if name is None:
            same = FileSlice(bundle.path, info.offset, info.nbytes)
            sources.append(TensorSource(info.name, info.shape, info.type, info.nbytes, same))
            continue
        stored: Format = FORMATS[name]
        rows, k = info.shape[0], math.prod(info.shape[1:])
        shape = stored.stored_shape(rows, k)
        nbytes = rows * stored.row_bytes(k)
        sources.append(
            TensorSource(
                info.name,
                shape,
                stored.type,
                nbytes,
                Rounded(bundle, info.name, name, False, (made or {}).get(info.name.removesuffix(WEIGHT))),
            )
        )
        if not stored.group:
            scale = info.name.removesuffix(WEIGHT) + SCALE
            data = Rounded(bundle, info.name, name, True)
            sources.append(TensorSource(scale, (rows,), GGMLQuantizationType.F32, 4 * rows, data))
    return sources


def weight_errors(before: Bundle, after: Path) -> dict[str, float]:
    """Return the relative L2 error of each top-level module's low-bit weights in ``after``, relative to ``before``."""
    opened = Bundle(after)
    squares: dict[str, tuple[float, float]] = {}
    for module, name in opened.lowbit.items():
        expected = before.tensor(module + WEIGHT).float().flatten(1)
        scale = opened.tensor(module + SCALE) if module + SCALE in opened.infos else None
        got = dequantize(opened.tensor(module + WEIGHT), scale, name, expected.shape[1])
        part = module.partition(".")[0]
        far, size = squares.get(part, (0.0, 0.0))
        size += float(expected.square().sum())
        squares[part] = far + float((got - expected).square().sum()), size
        before.release(())
    return {part: math.sqrt(far / size) if size else 0.0 for part, (far, size) in squares.items()}
