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
from sinew.engine.base import Options
from sinew.engine.cpu import extension
from sinew.engine.cpu.compile import compile_between
from sinew.engine.eager import EagerEngine
from sinew.engine.lowbit import KEPT, check_codes, place, stored_recipe, widen
from sinew.engine.plan import Plan
from sinew.engine.plan.engine import ON_CPU, PlannedEngine
from sinew.layers.quantized import QuantizedLinear, width_of
from sinew.layers.tables import is_token_table, keep_stored
from sinew.layers.upcast import HALF, upcast_layer
from sinew.models import build_on_meta, misfit, model_class
from sinew.models.base import Model
from sinew.processing.normalize import Normalizer

if TYPE_CHECKING:
    from sinew.engine.cuda.engine import CudaEngine
    from sinew.engine.cuda.options import CudaOptions

log = logging.getLogger(__name__)


def open_eager(bundle: Bundle, options: Options) -> EagerEngine:
    """Return the reference engine over the bundle's weights."""
    where = _device(options)
    model = load_model(bundle, where, options.dtype, upcast=bool(options.storage), tables=True)
    _say_widened(bundle, model, "eager")
    bundle.release(model.parameters())
    return EagerEngine(model, where)


def open_planned(bundle: Bundle, options: Options) -> PlannedEngine:
    """Return the engine of the rewritten model."""
    where = _device(options)
    model = load_model(bundle, where, options.dtype, upcast=bool(options.storage), tables=True)
    _say_widened(bundle, model, "plan")
    rewrites = ON_CPU if where.type == "cpu" else None
    engine = PlannedEngine(Plan.of(model, bundle.manifest.spec.solver_steps, rewrites), where)
    bundle.release(engine.model.parameters())
    return engine


def open_cpu(bundle: Bundle, options: Options) -> PlannedEngine:
    """Return the engine of the rewritten model over low-bit weights as they are stored."""
    where = _device(options)
    kernels = extension()
    model = load_model(bundle, where, options.dtype, lowbit=True, upcast=bool(options.storage), tables=True)
    plan = Plan.of(model, bundle.manifest.spec.solver_steps, set(ON_CPU) - {"sigmoid-gelu"})
    recipe = stored_recipe(bundle, model)
    engine = PlannedEngine(compile_between(plan) if kernels.compiled else plan, where, recipe)
    bundle.release(engine.model.parameters())
    log.info("low-bit products by %s kernels (%s)", kernels.kernels, kernels.reason)
    return engine


def open_cuda(bundle: Bundle, options: Options) -> CudaEngine:
    """Return the CUDA engine, in the precision of the bundle's recipe unless that is ignored."""
    from sinew.engine.cuda.options import CudaOptions

    where = _device(options, available=False)  # the engine's own words say more
    engine = cuda_engine(bundle, where, options.dtype, None if options.recipe else CudaOptions())
    bundle.release(engine.model.parameters())
    return engine


def _say_widened(bundle: Bundle, model: Model, engine: str) -> None:
    """Warn of low-bit weights that became wide ones; those that the architecture wants so (ternary) did not."""
    widened = {
        kind for name, kind in bundle.lowbit.items() if not isinstance(model.get_submodule(name), KEPT)
    }
    if widened:
        kinds = ", ".join(sorted(widened))
        log.warning("engine %s widens weights stored as %s; engine cpu computes on them", engine, kinds)


def _device(options: Options, available: bool = True) -> torch.device:
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


def cuda_engine(
    bundle: Bundle,
    device: torch.device,
    dtype: str,
    options: CudaOptions | None = None,
    plan: Plan | None = None,
) -> CudaEngine:
    """options: :func:`cuda_options` if absent. plan: :func:`cuda_plan` if absent; it is left as it is. FP8 components
    use the scales of the recipe, or those that ``calibration.py`` keeps for this bundle."""
    from sinew.engine.cuda.device import require
    from sinew.engine.cuda.engine import CudaEngine
    from sinew.engine.cuda.fp8.calibrate import scales
    from sinew.engine.cuda.tune.variants import UNTUNED

    options = options or cuda_options(bundle)
    require(device, options)  # before gigabytes are read
    plan = plan or cuda_plan(bundle, device, dtype)
    found = scales(bundle) if options.fp8 else None
    manifest = bundle.manifest
    recipe = manifest.processing
    whole = not recipe.action_parts and manifest.spec.noise_rows == 0
    actions = Normalizer(recipe.action, manifest.spec.action.dim, "action") if whole else None
    if actions is not None and not actions.is_affine:
        actions = None  # the processor un-normalises
    engine = CudaEngine(
        plan, device, processing=manifest.processing, actions=actions, options=options, scales=found
    )
    if engine.options_reason == UNTUNED:
        command = f"sinew tune {bundle.path} --device {device}"
        log.warning(
            "engine cuda on %s: default tiles, as this policy was not tuned here: %s", device, command
        )
    return engine


def cuda_options(bundle: Bundle) -> CudaOptions:
    """Return options with the components in FP8 that the bundle's recipe names."""
    from sinew.engine.cuda.options import CudaOptions

    recipe = bundle.manifest.quantization
    return CudaOptions(fp8=() if recipe is None else recipe.fp8)


def cuda_plan(bundle: Bundle, device: torch.device, dtype: str) -> Plan:
    from sinew.engine.cuda.fused.fuse import ON_CUDA

    return Plan.of(load_model(bundle, device, dtype), rewrites=ON_CUDA)


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
