"""Scales of activations for FP8, from the largest input of each linear layer over observations.

e4m3 is a floating-point format, so a scale that is twice as large loses only the smallest numbers. Inputs may therefore
grow to ``HEADROOM`` times the measured maximum before they saturate.

A calibration belongs to one file of weights. It is stored as ``$XDG_CACHE_HOME/sinew/fp8/<fingerprint>.json``
(``~/.cache`` by default). A calibration that is damaged, or belongs to other weights or unknown layers, is rejected.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sinew_client.untrusted import UntrustedError, read_json
from torch import Tensor, nn

from sinew.core import SinewError, machine, scratch
from sinew.engine.cuda.fp8.linear import Fp8Linear, unfit
from sinew.engine.cuda.kernels.fp8_quantize import LARGEST, SMALLEST
from sinew.engine.cuda.lowbit.weights import WeightOnly
from sinew.engine.cuda.options import check_fp8
from sinew.layers.linear import not_linear
from sinew.models.base import Model

VERSION = 1
MAX_FILE = 1 << 24  # largest accepted size of a file in bytes
HEADROOM = 2.0


@dataclass(frozen=True)
class Fp8Calibration:
    """The measured largest inputs of a bundle's layers, from which FP8 scales are computed.

    Attributes:
        fingerprint: Fingerprint of the bundle.
        amax: For each layer, the largest magnitude of its input.
        observations: Number of observations.
        source: The origin of the observations, as text.
    """

    fingerprint: str
    amax: dict[str, float]
    observations: int
    source: str

    @property
    def scales(self) -> dict[str, float]:
        """Return for each layer's name the scale of its input. A layer that did not run during the calibration is
        missing."""
        return {layer: max(amax, SMALLEST) * HEADROOM / LARGEST for layer, amax in self.amax.items()}


def linears(model: Model, parts: Iterable[str]) -> dict[str, nn.Linear]:
    """Return the linear layers of ``parts`` that can be FP8, by name, in the order of the model.

    These layers are left out:

    * modules that the model keeps in float32
    * layers that compute more than a product with their stored weight
    * layers whose sizes do not fit FP8 products

    Raises:
        SinewError: A part is unknown, it is slower in FP8, or its weights stay low-bit.
    """
    chosen = set(parts)
    check_fp8(chosen)
    for name, module in model.named_modules():
        both = chosen.intersection(_parts_of(model, name))
        if both and isinstance(store := getattr(module, "store", None), WeightOnly):
            raise SinewError(
                f"fp8: {min(both)}: these weights are stored as {store.name}, and a layer has one format; quantise the"
                f" original bundle with `sinew quantize --recipe language=fp8`, or omit fp8"
            )
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not not_linear(module)
        and not chosen.isdisjoint(_parts_of(model, name))
        and name.split(".")[0] not in model.float32_modules
        and unfit(module.weight) is None
    }


def _parts_of(model: Model, layer: str) -> set[str]:
    """Return the names of the parts that contain a layer."""
    component = model.component_of(layer)
    return {component, f"{component}.mlp"} if "mlp" in layer.split(".") else {component}


def use_fp8(
    model: nn.Module, layers: Mapping[str, nn.Linear], scales: Mapping[str, float]
) -> dict[str, nn.Linear]:
    """Replace layers of ``model`` by FP8 layers, in place, and return the layers that stay, by name.

    Args:
        model: The model.
        layers: The layers by name, from :func:`linears`.
        scales: For each layer's name, the scale of its input. A layer without a scale stays as it is.

    Raises:
        SinewError: A scale belongs to a layer that the model does not have, or no layer has a scale.
    """
    if foreign := sorted(set(scales).difference(dict(model.named_modules()))):
        raise SinewError(
            f"fp8 calibration: this model has no layer {foreign[0]}; calibrate the bundle again with"
            " `sinew quantize`"
        )
    if scales.keys().isdisjoint(layers):
        raise SinewError(
            f"fp8: none of {len(layers)} layers has a scale of its input; write a bundle with scales with"
            " `sinew quantize --recipe language=fp8`"
        )
    stay = dict(layers)
    for name in [name for name in layers if name in scales]:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Fp8Linear.of(stay.pop(name), scales[name]))
    return stay


@contextmanager
def recording(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record the largest input of each layer that runs inside the ``with`` block, as a float32 scalar on its device.

    The layers must be called as modules. The values stay on the device until the caller reads them.
    """
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            amax = arguments[0].detach().abs().amax().float()
            found[name] = torch.maximum(found[name], amax) if name in found else amax

        return record

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def calibrate(
    layers: Mapping[str, nn.Module],
    runs: Iterable[Callable[[], Any]],
    fingerprint: str,
    source: str,
) -> Fp8Calibration:
    """Run the model over observations, and return the largest input of each layer.

    Args:
        layers: The layers by name.
        runs: Each call computes one observation.
        fingerprint: Fingerprint of the bundle.
        source: The origin of the observations, as text.

    Raises:
        SinewError: No layer ran, or an input is not finite.
    """
    count = 0
    with recording(layers) as maxima:
        for run in runs:
            run()
            count += 1
    amax = {name: float(value) for name, value in maxima.items()}
    if not amax:
        raise SinewError(
            f"fp8 calibration: expected runs of {len(layers)} layers, but none ran in {count} observations"
        )
    for name, value in amax.items():
        if not math.isfinite(value):
            raise SinewError(f"fp8 calibration: expected finite inputs of {name}, got {value}")
    return Fp8Calibration(fingerprint, amax, count, source)


def path_of(fingerprint: str) -> Path:
    if not re.fullmatch(r"[0-9a-f]{8,128}", fingerprint):
        raise SinewError(f"fp8 calibration: expected a hexadecimal fingerprint, got {fingerprint!r}")
    return machine.cache_folder("fp8") / f"{fingerprint[:32]}.json"


def store(calibration: Fp8Calibration) -> Path:
    path = path_of(calibration.fingerprint)
    document = {"version": VERSION, "headroom": HEADROOM, **asdict(calibration)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # The replacement is atomic, so another process reads the old file or the new file.
    with scratch.beside(path) as made:
        written = made / path.name
        written.write_text(json.dumps(document, indent=1, sort_keys=True), encoding="utf-8")
        written.replace(path)
    return path


def load(fingerprint: str) -> Fp8Calibration | None:
    """Return the stored calibration of these weights, or None.

    Raises:
        SinewError: The file is damaged or belongs to other weights.
    """
    path = path_of(fingerprint)
    try:
        raw = read_json(path, MAX_FILE)
    except FileNotFoundError:
        return None
    except (OSError, UntrustedError) as error:
        raise SinewError(
            f"{path}: expected an fp8 calibration, got {error}; remove the file and calibrate again"
        ) from None
    if wrong := _wrong(raw, fingerprint):
        raise SinewError(f"{path}: {wrong}; remove the file and calibrate again with `sinew quantize`")
    return Fp8Calibration(raw["fingerprint"], raw["amax"], raw["observations"], raw["source"])


def _wrong(raw: Any, fingerprint: str) -> str | None:
    if not isinstance(raw, dict):
        return f"expected an object, got {type(raw).__name__}"
    if raw.get("version") != VERSION:
        return f"version: expected {VERSION}, got {raw.get('version')!r}"
    if raw.get("fingerprint") != fingerprint:
        return f"fingerprint: expected {fingerprint}, got {raw.get('fingerprint')!r}"
    amax = raw.get("amax")
    if not isinstance(amax, dict) or not amax:
        return "amax: expected values by layer, got none"
    for name, value in amax.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            return f"amax.{name}: expected a finite number of at least 0, got {value!r}"
    if type(raw.get("observations")) is not int or raw["observations"] < 1:
        return f"observations: expected 1 or more, got {raw.get('observations')!r}"
    if not isinstance(raw.get("source"), str):
        return f"source: expected text, got {type(raw.get('source')).__name__}"
    return None
