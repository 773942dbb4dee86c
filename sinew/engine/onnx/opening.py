"""From a bundle to the ONNX Runtime engine. Needs torch only where the graphs are not there yet."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from sinew import machine
from sinew.bundle import Bundle
from sinew.core import BundleError, SinewError
from sinew.engine.onnx.cache import cached_graphs
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.graphs import GraphSet

log = logging.getLogger(__name__)

ROOM = 3  # times the weights in float32: they, their folded copies, and the exporter's transposed ones


def open_onnx(
    bundle: Bundle,
    device: str = "cpu",
    dtype: str = "float32",
    graphs: Path | None = None,
    threads: int | None = None,
    providers: Sequence[str] = (),
) -> OnnxEngine:
    """``graphs``: a folder that was exported before; None for the one beside the bundle, made on first use."""
    if device != "cpu" or dtype != "float32":
        raise SinewError(
            f"engine 'onnx' runs float32 on cpu, not {dtype} on {device};"
            " other hardware is chosen with a provider, less precision with `sinew quantize`"
        )
    recipe = bundle.manifest.quantization
    if recipe is not None and recipe.fp8:
        raise SinewError(
            f"{bundle.path}: its recipe has {', '.join(recipe.fp8)} in fp8, which engine 'onnx' does not compute;"
            " engine 'cuda' does"
        )
    folder = graphs or graphs_of(bundle)
    check_bits(folder)
    engine = OnnxEngine(folder, providers, threads, bundle.manifest.spec.solver)
    if engine.graphs.architecture != bundle.manifest.architecture:
        raise BundleError(
            f"{engine.directory}: expected graphs of {bundle.manifest.architecture},"
            f" got {engine.graphs.architecture}"
        )
    return engine


def graphs_of(bundle: Bundle) -> Path:
    """The folder of graphs beside the bundle, quantised as the bundle says; exported if it is not there."""
    return cached_graphs(
        bundle.path, lambda folder: write_graphs(bundle, folder), variant(usable_bits(bundle))
    )


def variant(bits: int) -> str:
    """Return the suffix of a cache folder whose int8 weights have ``bits`` bits: they depend on the processor."""
    return f"-int8x{bits}" if bits else ""


def usable_bits(bundle: Bundle) -> int:
    """Return the bits of int8 weights that this processor multiplies exactly, at most the recipe's; 0 without one."""
    recipe = bundle.manifest.quantization
    if recipe is None:
        return 0
    from sinew.engine.onnx.quantize import weight_bits

    bits, why = weight_bits()
    if bits < recipe.bits:
        log.info("int8 weights get %d bits instead of the recipe's %d: %s", bits, recipe.bits, why)
    return min(bits, recipe.bits)


def check_bits(folder: Path) -> None:
    """Raise :class:`SinewError` for graphs whose int8 products would saturate on this processor."""
    from sinew.engine.onnx.quantize import weight_bits

    bits, why = weight_bits()
    found = GraphSet.load(folder).bits
    if found > bits:
        raise SinewError(
            f"{folder}: expected int8 weights of at most {bits} bits on this processor ({why}), got {found};"
            " export the bundle again on this machine"
        )


def write_graphs(bundle: Bundle, folder: Path) -> None:
    """Export the bundle's model to ``folder``, quantised as the bundle says."""
    try:
        from sinew.engine.loading import load_model, parse_device
        from sinew.engine.onnx.export import ON_ONNX, export_graphs
        from sinew.engine.plan import Plan
    except ImportError as error:
        raise SinewError(
            f"{bundle.path}: the graphs are not exported yet, which needs {error.name};"
            " run `sinew export BUNDLE --onnx DIR` where it is installed, and load DIR"
        ) from None
    manifest = bundle.manifest
    image, steps = manifest.processing.image, manifest.spec.solver_steps
    log.info("exporting %s to %s; this takes a minute, once", bundle.path, folder)
    model = load_model(bundle, parse_device("cpu"), "float32")
    wide = sum(4 * math.prod(info.shape) for info in bundle.infos.values())
    rewrites = ON_ONNX
    if ROOM * wide > machine.memory()[1]:
        log.info("memory is short: norms are not folded, which copies most weights and gains a step 1 %%")
        rewrites = tuple(name for name in ON_ONNX if name != "fold-norms")
    export_graphs(
        Plan.of(model, steps, rewrites),
        folder,
        architecture=manifest.architecture,
        views=len(manifest.spec.cameras),
        height=image.height,
        width=image.width,
        steps=(steps,),
    )
    bundle.release(())
    if manifest.quantization is not None:
        from sinew.engine.onnx.quantize import quantize_graphs

        quantize_graphs(folder, folder, manifest.quantization.recipe, usable_bits(bundle))
