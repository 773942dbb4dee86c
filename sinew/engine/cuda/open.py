"""Open a bundle with the CUDA engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import torch

from sinew.bundle import Bundle
from sinew.core import DTYPES
from sinew.engine.backend import EngineOptions
from sinew.engine.cuda.calibrate import scales
from sinew.engine.cuda.device import require
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.lowbit.choice import NOTHING, choose_lowbit
from sinew.engine.cuda.lowbit.weights import keep_codes
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.loading import load_model, open_device
from sinew.engine.plan.plan import Plan
from sinew.processing.normalize import Normalizer

log = logging.getLogger(__name__)


def open_cuda(bundle: Bundle, options: EngineOptions) -> CudaEngine:
    """Return the CUDA engine for a bundle, in the precision of its recipe unless the options ignore the recipe.

    Low-bit weights are then converted to floats, and no layer multiplies in FP8.
    """
    # This engine checks the device itself, with a more precise message.
    where = open_device(options, available=False)
    chosen = None if options.recipe else CudaOptions(lowbit=())
    engine = cuda_engine(bundle, where, options.dtype, chosen, kernels=options.kernels)
    bundle.release(engine.model.parameters())
    return engine


def cuda_engine(
    bundle: Bundle,
    device: torch.device,
    dtype: str,
    options: CudaOptions | None = None,
    plan: Plan | None = None,
    kernels: Callable[[], object] | None = None,
) -> CudaEngine:
    """Return the CUDA engine for a bundle.

    FP8 components use the scales of the recipe, or the scales that ``calibrate.py`` stored for this bundle.

    Args:
        bundle: The bundle.
        device: The device.
        dtype: The precision of the weights.
        options: The options, by default :func:`cuda_options`.
        plan: The plan, by default :func:`cuda_plan`. It is not changed. With a plan, ``options.lowbit`` has no effect.
        kernels: Installs compiled products for low-bit weights.
    """
    options = options or cuda_options(bundle)
    require(device, options)  # check the device before gigabytes are read
    choice = NOTHING if plan is not None else choose_lowbit(bundle, device, options)
    for part, note in choice.notes.items():
        log.log(logging.INFO if part in choice.kept else logging.WARNING, "engine cuda: %s", note)
    plan = plan or cuda_plan(bundle, device, dtype, kernels, choice.kept)
    input_scales = scales(bundle) if options.fp8 else None
    manifest = bundle.manifest
    recipe = manifest.processing
    whole = not recipe.action_parts and manifest.spec.noise_rows == 0
    actions = Normalizer(recipe.action, manifest.spec.action.dim, "action") if whole else None
    if actions is not None and not actions.is_affine:
        actions = None  # the processor un-normalises the actions on the host
    return CudaEngine(
        plan,
        device,
        processing=manifest.processing,
        actions=actions,
        options=options,
        scales=input_scales,
        lowbit=choice,
    )


def cuda_options(bundle: Bundle) -> CudaOptions:
    """Return the options for a bundle, with the FP8 components of its recipe."""
    recipe = bundle.manifest.quantization
    return CudaOptions(fp8=() if recipe is None else recipe.fp8)


def cuda_plan(
    bundle: Bundle,
    device: torch.device,
    dtype: str,
    kernels: Callable[[], object] | None = None,
    lowbit: Collection[str] = (),
) -> Plan:
    """Load a bundle's model on a device and rewrite it for this engine.

    Args:
        bundle: The bundle.
        device: The device.
        dtype: The precision of the weights.
        kernels: Installs compiled products for low-bit weights.
        lowbit: Components whose low-bit weights stay low-bit.
    """
    model = load_model(bundle, device, dtype, lowbit=lowbit, kernels=kernels)
    # With "native", low-bit weights count as float32, as in the engines that convert them.
    keep_codes(model, torch.float32 if dtype == "native" else getattr(torch, DTYPES[dtype]))
    return Plan.of(model, rewrites=ON_CUDA)
