"""Load a bundle's tensors into a model, and open the engines that run it under PyTorch."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from sinew import machine
from sinew.bundle import Bundle
from sinew.bundle.quant import SCALE, WEIGHT
from sinew.bundle.schema import from_builtins
from sinew.core import DTYPES, BundleError, SinewError, dtype_word
from sinew.engine.backend import Options
from sinew.engine.cpu.library import extension
from sinew.engine.lowbit import KEPT, check_codes, place, widen
from sinew.layers.quantized import QuantizedLinear, width_of
from sinew.layers.tables import is_token_table, keep_stored
from sinew.layers.upcast import HALF, upcast_layer
from sinew.models import build_on_meta, misfit, model_class
from sinew.models.base import Model

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


def say_widened(bundle: Bundle, model: Model, engine: str) -> None:
    """Warn of low-bit weights that became wide ones; those that the architecture wants so (ternary) did not."""
    widened = {
        kind for name, kind in bundle.lowbit.items() if not isinstance(model.get_submodule(name), KEPT)
    }
    if widened:
        kinds = ", ".join(sorted(widened))
        log.warning("engine %s widens weights stored as %s; engine cpu computes on them", engine, kinds)


def open_device(options: Options, available: bool = True) -> torch.device:
    """Return the device, and set PyTorch's number of threads; None leaves its one pool as it is."""
    where = parse_device(options.device)
    if available:
        require_device(where)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if where.type == "cpu" and torch.get_num_threads() > 1 and not machine.WAITING & os.environ.keys():
        log.warning(
            "%s; beside busy programs set GOMP_SPINCOUNT=0, or import sinew first", machine.spinning()
        )
    return where


def parse_device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise SinewError(f"device: expected one such as cpu, cuda or cuda:0, got {text!r}") from None


def require_device(device: torch.device) -> None:
    """Raise :class:`SinewError` for a device that this PyTorch cannot compute on."""
    if device.type in ("cpu", "meta"):
        return
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
            raise SinewError(
                f"device {device}: torch {torch.__version__} ({built}) finds no CUDA device;"
                " `sinew doctor` says more"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise SinewError(f"device {device}: expected one of {torch.cuda.device_count()} CUDA devices")
        return
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise SinewError(f"device {device}: this torch {torch.__version__} cannot use it: {reason}") from None


def load_model(
    bundle: Bundle,
    device: torch.device,
    dtype: str,
    lowbit: bool = False,
    upcast: bool = False,
    tables: bool = False,
) -> Model:
    """Return the bundle's architecture with its weights; parameters are views of the memory map where they can be.

    lowbit: compute on low-bit weights as they are stored, which needs float32 around them; else they are widened.
    upcast: compute in float32 throughout, and leave matrices in half precision where ``dtype`` or the bundle has them
    so; "fp32" then means the numbers of float32 without its copies.
    tables: leave token tables as they are stored, in the host's memory; rows become ``dtype`` as they are read, with
    the same bits. Graphs that are recorded on a device need theirs there.
    """
    manifest = bundle.manifest
    cls = model_class(manifest.architecture)
    config: Any = from_builtins(manifest.config, cls.config_type, f"{bundle.path}: sinew.config")
    model = build_on_meta(manifest.architecture, config)
    shapes, widened = place(model, bundle, keep=lowbit, tables=tables)
    if problems := misfit(model, shapes):
        raise BundleError(f"{bundle.path}: {problems}")
    spec, processing = manifest.spec, manifest.processing
    if (
        model.noise_shape != (spec.noise_shape[0], processing.padded_action_dim)
        or model.state_size != processing.padded_state_dim
    ):
        raise BundleError(
            f"{bundle.path}: sinew.spec or sinew.processing disagrees with sinew.config about sizes"
        )
    if model.views is not None and (len(spec.cameras) != model.views or not processing.all_cameras):
        optional = "" if processing.all_cameras else ", of which some may be missing"
        raise BundleError(
            f"{bundle.path}: sinew.processing.all_cameras: expected true and {model.views} cameras, which the weights"
            f" fix, got {len(spec.cameras)}{optional}"
        )

    if spec.committed_rows and not model.times_per_row:
        raise BundleError(
            f"{bundle.path}: spec.committed_rows: expected 0 for {spec.architecture}, whose head takes one time for all"
            " rows"
        )
    model.solver = spec.solver
    word = dtype_word(dtype)
    narrow = torch.float32 if word == "native" else getattr(torch, DTYPES[word])
    state = {}
    tensors = bundle.tensors("meta" if device.type == "meta" else "cpu")
    for name in shapes:
        tensor, module = tensors[name], name.removesuffix(WEIGHT).removesuffix(SCALE)
        layer = None if module == name else model.get_submodule(module)
        stored, is_weight = bundle.lowbit.get(module), name.endswith(WEIGHT)
        if stored is not None and is_weight and layer is not None:
            k = int(width_of(layer) or 0)
            if device.type != "meta":
                check_codes(tensor, stored, f"{bundle.path}: {name}")
            if module in widened:
                tensor = widen(tensors, module, stored, k)
        own = tensor.dtype if stored is None else torch.float32
        keep_wide = name.split(".")[0] in cls.float32_modules and word != "native"
        as_stored = word == "native" or (upcast and word == "fp32")
        target = own if as_stored else torch.float32 if keep_wide else narrow
        if tables and layer is not None and is_token_table(module, layer):
            rows = torch.float32 if upcast and target in HALF else target
            if is_weight and (stored is not None or rows != own or device.type == "cuda"):
                keep_stored(layer, rows, device)
            state[name] = tensor
        elif stored is not None and module not in widened:
            state[name] = tensor.to(device)
        else:
            if upcast and target in HALF and not upcast_layer(model, name):
                target = torch.float32
            state[name] = tensor.to(device=device, dtype=target)  # no copy when nothing changes
    if device.type == "cpu" and any(isinstance(module, QuantizedLinear) for module in model.modules()):
        extension()
    model.load_state_dict(state, strict=True, assign=True)
    return model
