"""``sinew export``: a bundle as a folder for machines without torch, or as vla.cpp's file."""

from __future__ import annotations

from pathlib import Path

from sinew.cli import terminal
from sinew.core import SinewError


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
    opened, console = open_bundle(bundle), terminal.console(markup=False)
    if onnx is not None:
        from sinew.checks.validate.exported import write_reference
        from sinew.engine.onnx.opening import export_folder

        export_folder(opened, onnx, write_reference)
        size = sum(path.stat().st_size for path in onnx.iterdir())
        console.print(f"wrote {onnx} ({size / 1e6:.1f} MB); it needs onnxruntime and no torch")
        terminal.emit({"folder": str(onnx), "bytes": size})
        return 0
    assert vlacpp is not None
    from sinew.vlacpp.write import export_vlacpp

    export_vlacpp(opened, vlacpp)
    size = vlacpp.stat().st_size
    console.print(f"wrote {vlacpp} ({size / 1e6:.1f} MB) for vla.cpp")
    terminal.emit({"file": str(vlacpp), "bytes": size})
    return 0
