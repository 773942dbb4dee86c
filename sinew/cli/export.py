"""``sinew export``: a bundle as a folder for machines without torch, or as vla.cpp's file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sinew import scratch
from sinew.cli import terminal
from sinew.core import SinewError

if TYPE_CHECKING:
    from sinew.bundle import Bundle


def export(bundle: Path, /, *, onnx: Path | None = None, vlacpp: Path | None = None) -> int:
    """Write a folder that runs without torch (graphs for ONNX Runtime, recipes, tokenizer), or vla.cpp's file.

    `sinew.load`, `sinew serve`, `sinew infer` and `sinew bench` take the folder in place of a bundle. vla.cpp's GGUF
    holds the weights, sizes and statistics of a SmolVLA, pi0, pi0.5, OpenVLA-OFT, VLA-Adapter, BitVLA or Evo-1; its
    clients bring the tokenizer.

    Args:
        bundle: as of `sinew infer`; one from `sinew quantize` gives quantised graphs.
        onnx: the folder to write; it must not be there.
        vlacpp: the GGUF file to write for vla.cpp; it must not be there.
    """
    from sinew.policy import open_bundle

    if (onnx is None) == (vlacpp is None):
        raise SinewError("expected either --onnx FOLDER or --vlacpp FILE")
    opened = open_bundle(bundle)
    if onnx is not None:
        return _export_onnx(opened, onnx)
    assert vlacpp is not None
    from sinew.vlacpp.write import export_vlacpp

    export_vlacpp(opened, vlacpp)
    size = vlacpp.stat().st_size
    terminal.console(markup=False).print(f"wrote {vlacpp} ({size / 1e6:.1f} MB) for vla.cpp")
    terminal.emit({"file": str(vlacpp), "bytes": size})
    return 0


def _export_onnx(opened: Bundle, onnx: Path) -> int:
    from sinew.checks.validate.exported import write_reference
    from sinew.engine.onnx.cache import publish

    if onnx.exists():
        raise SinewError(f"--onnx {onnx}: expected a new folder, got one that is there")
    onnx.parent.mkdir(parents=True, exist_ok=True)
    with scratch.beside(onnx) as partial:
        write_folder(opened, partial, onnx)
        write_reference(opened, partial)
        publish(partial, onnx)
    size = sum(path.stat().st_size for path in onnx.iterdir())
    console = terminal.console(markup=False)
    console.print(f"wrote {onnx} ({size / 1e6:.1f} MB); it needs onnxruntime and no torch")
    terminal.emit({"folder": str(onnx), "bytes": size})
    return 0


def write_folder(bundle: Bundle, folder: Path, where: Path | None = None) -> None:
    """Graphs, and the bundle's header as a GGUF file without tensors. where: the folder's later name."""
    from sinew.bundle import write_bundle
    from sinew.engine.onnx.cache import cache_folder
    from sinew.engine.onnx.opening import usable_bits, variant, write_graphs
    from sinew.sources import EXPORTED

    cached = cache_folder(bundle.path, variant(usable_bits(bundle)))
    if (cached / "graphs.json").exists():
        shutil.copytree(cached, folder, dirs_exist_ok=True)
    else:
        write_graphs(bundle, folder, where)
    write_bundle(folder / EXPORTED, lambda: bundle.manifest, ())
