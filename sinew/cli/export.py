"""``sinew export``: writes a bundle as a folder for machines without torch, or as a file for vla.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sinew.cli import terminal
from sinew.cli.options import CountIfAny, Flag
from sinew.core import SinewError

if TYPE_CHECKING:
    from sinew.bundle import Bundle


def export(
    bundle: Path,
    /,
    *,
    onnx: Path | None = None,
    whole: Flag = False,
    prompt: str = "",
    qdq: str = "",
    records: Path | None = None,
    observations: CountIfAny = None,
    vlacpp: Path | None = None,
) -> int:
    """Write a folder that runs without PyTorch, or a file for vla.cpp.

    The folder contains graphs for ONNX Runtime, the processing steps and the tokenizer. `sinew.load`, `sinew
    serve`, `sinew infer` and `sinew bench` take it instead of a bundle. A file for vla.cpp contains weights, sizes
    and statistics of a SmolVLA, pi0, pi0.5, OpenVLA-OFT, VLA-Adapter, BitVLA or Evo-1. vla.cpp's clients provide
    the tokenizer.

    Args:
        bundle: Policy to export, as for `sinew infer`. A bundle of `sinew quantize` gives quantised graphs.
        onnx: Folder to write. It must not exist.
        whole: Also write policy.onnx: one graph with fixed shapes, from uint8 frames, state, tokens and noise
            to actions in the robot's units. Use it for runtimes that accept one file only. Sinew compares it
            with eager.
        prompt: Fixed instruction of policy.onnx. The graph then takes no tokens.
        qdq: COMPONENT=int8,... for vision, language and head. Sinew puts QuantizeLinear and DequantizeLinear
            with fixed scales around their products in all graphs, as NPU compilers require. It lists what
            stays in floats. The exit status is 1 if the error exceeds the int8 bound of `sinew validate`.
        records: Folder of `sinew serve --record` to compute the scales from. Default: the observations that
            `sinew quantize` uses.
        observations: Number of observations to compute the scales from. The error is measured on as many
            others.
        vlacpp: GGUF file to write for vla.cpp. It must not exist.
    """
    from sinew.policy import open_bundle

    if (onnx is None) == (vlacpp is None):
        raise SinewError("expected either --onnx FOLDER or --vlacpp FILE; pass one of them")
    if whole and onnx is None:
        raise SinewError("--whole requires --onnx FOLDER; pass both flags")
    if prompt and not whole:
        raise SinewError("--prompt requires --whole; pass both flags")
    if qdq and onnx is None:
        raise SinewError("--qdq requires --onnx FOLDER; pass both flags")
    for name, value in (("records", records), ("observations", observations)):
        if value is not None and not qdq:
            raise SinewError(f"--{name} requires --qdq COMPONENT=int8,...; pass both flags")
    opened, console = open_bundle(bundle), terminal.console(markup=False)
    if onnx is not None:
        from sinew.checks.validate.exported import prove_whole, write_reference
        from sinew.engine.onnx.opening import export_folder
        from sinew.engine.onnx.whole.graph import open_whole, write_whole

        described, error, pairs = list[str](), None, list[str]()
        if qdq:
            from sinew.lowbit.quantization import paired, paired_recipe

            # Parse the recipe now, so that an invalid recipe is reported before the export begins.
            quantisation = paired_recipe(opened, qdq)

        def also(bundle: Bundle, folder: Path) -> None:
            nonlocal error
            write_reference(bundle, folder)
            if qdq:
                pairs.extend(paired(bundle, folder, quantisation, observations or 32, records))
            if whole:
                described.extend(write_whole(bundle.manifest, folder, prompt))
                error = prove_whole(bundle, folder, *open_whole(folder), prompt)

        export_folder(opened, onnx, also, folded=not qdq)
        size = sum(path.stat().st_size for path in onnx.iterdir())
        console.print(f"wrote {onnx} ({size / 1e6:.1f} MB); it needs onnxruntime and no torch")
        for line in pairs:
            console.print(line)
        if error is not None:
            console.print(f"policy.onnx is within {error:.1e} of eager fp32")
            console.print("\n".join(f"  {line}" for line in described))
        terminal.emit({"folder": str(onnx), "bytes": size, "whole": described, "error": error, "qdq": pairs})
        return 0
    assert vlacpp is not None
    from sinew.vlacpp.write import export_vlacpp

    export_vlacpp(opened, vlacpp)
    size = vlacpp.stat().st_size
    console.print(f"wrote {vlacpp} ({size / 1e6:.1f} MB) for vla.cpp")
    terminal.emit({"file": str(vlacpp), "bytes": size})
    return 0
