"""Open a bundle with the CUDA engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sinew.bundle import Bundle
from sinew.engine.backend import EngineOptions
from sinew.engine.cuda.calibrate import scales
from sinew.engine.cuda.device import require
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.loading import load_model, open_device
from sinew.engine.plan.plan import Plan
from sinew.processing.normalize import Normalizer


def open_cuda(bundle: Bundle, options: EngineOptions) -> CudaEngine:
    """Return the CUDA engine for a bundle, in the precision of its recipe unless the options ignore the recipe."""
    # This engine checks the device itself, with a more precise message.
    where = open_device(options, available=False)
    chosen = None if options.recipe else CudaOptions()
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
        plan: The plan, by default :func:`cuda_plan`. It is not changed.
        kernels: Installs compiled products for low-bit weights.
    """
    options = options or cuda_options(bundle)
    require(device, options)  # check the device before gigabytes are read
    plan = plan or cuda_plan(bundle, device, dtype, kernels)
    input_scales = scales(bundle) if options.fp8 else None
    manifest = bundle.manifest
    recipe = manifest.processing
    whole = not recipe.action_parts and manifest.spec.noise_rows == 0
    actions = Normalizer(recipe.action, manifest.spec.action.dim, "action") if whole else None
    if actions is not None and not actions.is_affine:
        actions = None  # the processor un-normalises the actions on the host
    return CudaEngine(
        plan, device, processing=manifest.processing, actions=actions, options=options, scales=input_scales
    )


def cuda_options(bundle: Bundle) -> CudaOptions:
    """Return the options for a bundle, with the FP8 components of its recipe."""
    recipe = bundle.manifest.quantization
    return CudaOptions(fp8=() if recipe is None else recipe.fp8)


def cuda_plan(
    bundle: Bundle, device: torch.device, dtype: str, kernels: Callable[[], object] | None = None
) -> Plan:

    return Plan.of(load_model(bundle, device, dtype, kernels=kernels), rewrites=ON_CUDA)
