"""Open a bundle in ONNX Runtime. Missing graphs are exported first, and only the export needs torch."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from sinew.bundle import EXPORTED, Bundle
from sinew.core import BundleError, SinewError, machine, progress, scratch
from sinew.core.extras import install
from sinew.engine.backend import EngineOptions, recipe
from sinew.engine.onnx.borrowed import shipped
from sinew.engine.onnx.cache import graphs_folder, publish, usable_bits
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.graphs import GraphSet
from sinew.engine.onnx.providers import choose

log = logging.getLogger(__name__)

# An export needs this many times the memory of the float32 weights: the weights, folded copies and transposed copies.
ROOM = 3


def open_onnx(bundle: Bundle, options: EngineOptions) -> OnnxEngine:
    """Open a bundle with the ONNX engine.

    The graphs are the folder of an export, the graphs next to the bundle, or the graphs of a built-in policy that
    come with Sinew. Missing graphs are exported next to the bundle.
    """
    # Report a missing provider before the export, which may take minutes.
    choose(options.providers)
    folder = options.graphs or graphs_of(bundle, borrowed=not options.providers)
    check_bits(folder)
    engine = OnnxEngine(
        folder, options.providers, options.threads, solver=bundle.manifest.spec.solver, bundle=bundle
    )
    if engine.graphs.architecture != bundle.manifest.architecture:
        raise BundleError(
            f"{engine.directory}: expected graphs of {bundle.manifest.architecture},"
            f" got {engine.graphs.architecture}; remove the folder, or export it again"
        )
    # Weights in other low-bit formats were converted to float32 before the export.
    expected = {part: kind for part, kind in recipe(bundle).items() if kind in ("int8", "int8-rows")}
    if engine.facts.recipe != expected:
        raise BundleError(
            f"{engine.directory}: expected graphs with the recipe {expected or 'none'} of the bundle,"
            f" got {dict(engine.facts.recipe) or 'none'}; remove the folder, or export it again"
        )
    return engine


def graphs_of(bundle: Bundle, borrowed: bool = True) -> Path:
    """Return the folder of the bundle's graphs, quantised by its recipe. Missing graphs are exported.

    Args:
        bundle: The bundle.
        borrowed: True also accepts graphs that come with Sinew and use the bundle's weights. Not every provider
            supports such graphs.
    """
    folder = graphs_folder(bundle)
    if (folder / "graphs.json").exists():
        return folder
    if borrowed and (ours := shipped(bundle.path)):
        return ours
    with contextlib.ExitStack() as stack:
        try:
            partial = stack.enter_context(scratch.beside(folder))
        except OSError as error:
            raise SinewError(
                f"{folder}: cannot write the exported graphs next to the bundle: {error}; move the bundle to a folder"
                " in which you may write"
            ) from None
        write_graphs(bundle, partial, folder)
        # Remove the rest of an interrupted export.
        shutil.rmtree(folder, ignore_errors=True)
        publish(partial, folder)
    return folder


def check_bits(folder: Path) -> None:
    """Check that this processor multiplies the int8 weights of an export exactly.

    Raises:
        SinewError: The weights have more bits than this processor multiplies without saturation.
    """
    from sinew.engine.onnx.quantize import weight_bits

    bits, why = weight_bits()
    stored_bits = GraphSet.load(folder).bits
    if stored_bits > bits:
        raise SinewError(
            f"{folder}: expected int8 weights of at most {bits} bits on this processor ({why}), got {stored_bits};"
            " export the bundle again on this machine"
        )


def export_folder(
    bundle: Bundle, folder: Path, also: Callable[[Bundle, Path], None] = lambda *_: None, folded: bool = True
) -> None:
    """Export a bundle to a new folder with graphs, recipes and tokenizer. The folder runs without torch.

    Args:
        bundle: The bundle.
        folder: The folder.
        also: Writes more files into the folder before it is renamed.
        folded: See :func:`write_graphs`.

    Raises:
        SinewError: The folder exists already.
    """
    if folder.exists():
        raise SinewError(f"--onnx {folder}: the folder already exists; choose a new one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch.beside(folder) as partial:
        write_folder(bundle, partial, folder, folded)
        also(bundle, partial)
        publish(partial, folder)


def write_folder(bundle: Bundle, folder: Path, where: Path | None = None, folded: bool = True) -> None:
    """Write the graphs of a bundle, and the bundle's header as a GGUF file without tensors.

    Args:
        bundle: The bundle.
        folder: The folder to write into.
        where: The later name of the folder, for messages.
        folded: See :func:`write_graphs`.
    """
    from sinew.bundle import write_bundle

    cached = graphs_folder(bundle)
    if folded and (cached / "graphs.json").exists():
        shutil.copytree(cached, folder, dirs_exist_ok=True)
    else:
        write_graphs(bundle, folder, where, folded=folded)
    write_bundle(folder / EXPORTED, lambda: bundle.manifest, ())


def write_graphs(bundle: Bundle, folder: Path, where: Path | None = None, *, folded: bool = True) -> None:
    """Export the bundle's model to ONNX graphs in ``folder``, quantised by the bundle's recipe.

    Args:
        bundle: The bundle.
        folder: The folder to write into.
        where: The later name of the folder, for messages.
        folded: True multiplies the weights of norms into the weights of the next layers, which saves operations.
            False leaves them out of the other weights. The graphs can then use the bundle's weights, or have smaller
            rounding errors.
    """
    where = where or folder
    try:
        from sinew.engine.loading import load_model, parse_device
        from sinew.engine.onnx.export import ON_ONNX, export_graphs
        from sinew.engine.plan.plan import Plan
    except ImportError as error:
        raise SinewError(
            f"{bundle.path}: the graphs are not exported yet, and an export needs {error.name}"
            f" ({install(error.name or 'torch')}); run `sinew export BUNDLE --onnx DIR` on a machine that has"
            " it, and load DIR"
        ) from None
    manifest = bundle.manifest
    image, steps = manifest.processing.image, manifest.spec.solver_steps
    model = load_model(bundle, parse_device("cpu"), "fp32")
    wide = sum(4 * math.prod(info.shape) for info in bundle.infos.values())
    rewrites, unfolded = ON_ONNX, tuple(name for name in ON_ONNX if name != "fold-norms")
    if not folded:
        rewrites = unfolded
    elif ROOM * wide > machine.memory()[1]:
        log.info(
            "norms are not folded, because copies of the weights do not fit the memory (a step is 1 % slower)"
        )
        rewrites = unfolded
    elif "int8" in bundle.lowbit.values() and usable_bits(bundle) == 8:
        log.info(
            "norms are not folded, so that int8 weights are used as they are stored and not rounded again"
        )
        rewrites = unfolded
    with progress.task(f"exporting {bundle.path.name} for ONNX Runtime to {where}, once"):
        export_graphs(
            Plan.of(model, steps, rewrites),
            folder,
            architecture=manifest.architecture,
            views=manifest.spec.views,
            height=image.height,
            width=image.width,
            steps=(steps,),
        )
    bundle.release(())
    if manifest.quantization is not None:
        from sinew.engine.onnx.quantize import quantize_graphs

        with progress.task(f"quantising the graphs of {bundle.path.name}"):
            quantize_graphs(folder, folder, manifest.quantization.recipe, usable_bits(bundle))
