"""Load a bundle's tensors into a model, and open the engines that run it under PyTorch."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from sinew.bundle import Bundle
from sinew.core import BundleError, SinewError, dtype_word, machine
from sinew.core.fields import from_builtins
from sinew.engine.backend import EngineOptions
from sinew.engine.cpu.kernels.library import extension, take_kept_resize
from sinew.engine.stores import Placement, Storage
from sinew.layers.linear import hold
from sinew.layers.stores.codes import Codes
from sinew.models import build_on_meta, mismatch, model_class
from sinew.models.base import Model

log = logging.getLogger(__name__)


def say_widened(bundle: Bundle, model: Model, engine: str) -> None:
    """Warn of low-bit weights that became wide ones; those that the architecture wants so (ternary) did not."""
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in bundle.lowbit}
    widened = {kind for name, kind in bundle.lowbit.items() if not layers[name].store.coded}
    if widened:
        kinds = ", ".join(sorted(widened))
        log.warning("engine %s widens weights stored as %s; engine cpu computes on them", engine, kinds)


def open_device(options: EngineOptions, available: bool = True) -> torch.device:
    """Return the device, and set PyTorch's number of threads; None leaves its one pool as it is."""
    where = parse_device(options.device)
    if available:
        require_device(where)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if available:
        take_kept_resize()
    if where.type == "cuda":
        # cuDNN would round the factors of float32 convolutions to 10 bits unless it is told not to. Products are exact
        # by default. A process has one setting for all of its policies.
        torch.backends.cudnn.allow_tf32 = False
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
    storage: Storage = Storage(),  # noqa: B008 - frozen
) -> Model:
    """Return the bundle's architecture with its weights in precision ``dtype``, but for what stays as ``storage`` says;
    parameters are views of the memory map where they can be."""
    manifest = bundle.manifest
    cls = model_class(manifest.architecture)
    config: Any = from_builtins(manifest.config, cls.config_type, f"{bundle.path}: sinew.config")
    model = build_on_meta(manifest.architecture, config)
    placement = Placement(bundle, model, device, dtype_word(dtype), storage)
    stores = placement.stores()
    modules: dict[str, Any] = dict(model.named_modules())
    for name, store in stores.items():
        hold(modules[name], store)
    if problems := mismatch(model, placement.shapes(stores)):
        raise BundleError(f"{bundle.path}: {problems}")
    check_agreement(bundle, model)
    model.solver = manifest.spec.solver
    if device.type == "cpu" and any(isinstance(store, Codes) for store in stores.values()):
        extension()
    model.load_state_dict(placement.state(stores), strict=True, assign=True)
    return model


def said_moments(moments: tuple[int, int] | None) -> str:
    return (
        "no history of any length" if moments is None else f"1 to {moments[0]} moments of {moments[1]} views"
    )


def check_agreement(bundle: Bundle, model: Model) -> None:
    """Raise :class:`BundleError` where the bundle's records ask of the model what its weights cannot do."""
    spec, processing = bundle.manifest.spec, bundle.manifest.processing
    if (
        model.noise_shape != (spec.noise_shape[0], processing.padded_action_dim)
        or model.state_size != processing.padded_state_dim
    ):
        raise BundleError(
            f"{bundle.path}: sinew.spec or sinew.processing disagrees with sinew.config about sizes"
        )
    if model.views is not None and (spec.views != model.views or not processing.all_cameras):
        optional = "" if processing.all_cameras else ", of which some may be missing"
        raise BundleError(
            f"{bundle.path}: sinew.processing.all_cameras: expected true and {model.views} views, which the weights"
            f" fix, got {spec.views}{optional}"
        )
    moments = (spec.history, len(spec.cameras)) if spec.history_padding == "mask" else None
    if model.moments != moments:
        raise BundleError(
            f"{bundle.path}: sinew.spec: expected {said_moments(model.moments)}, as sinew.config says, got"
            f" {said_moments(moments)}"
        )
    if model.grid is not None:
        for camera in spec.cameras:
            size = processing.image.size_after(camera.height, camera.width)
            if (found := model.grid_of(*size)) != model.grid:
                raise BundleError(
                    f"{bundle.path}: sinew.config: expected the {found[0]}x{found[1]} patches of camera {camera.name},"
                    f" whose frames become {size[0]}x{size[1]} pixels, got a grid of {model.grid[0]}x{model.grid[1]}"
                )
    if spec.committed_rows and not model.times_per_row:
        raise BundleError(
            f"{bundle.path}: spec.committed_rows: expected 0 for {spec.architecture}, whose head takes one time for all"
            " rows"
        )
