"""``sinew export``: a bundle as a folder for machines without torch, or as vla.cpp's file."""

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
    """Write a folder that runs without torch (graphs for ONNX Runtime, recipes, tokenizer), or vla.cpp's file.

    `sinew.load`, `sinew serve`, `sinew infer` and `sinew bench` take the folder in place of a bundle. vla.cpp's GGUF
    holds the weights, sizes and statistics of a SmolVLA, pi0, pi0.5, OpenVLA-OFT, VLA-Adapter, BitVLA or Evo-1; its
    clients bring the tokenizer.

    Args:
        bundle: as of `sinew infer`; one from `sinew quantize` gives quantised graphs.
        onnx: the folder to write; it must not be there.
        whole: also write policy.onnx into it, one graph with fixed shapes from frames (uint8), state, tokens and noise
            to actions in the robot's units, for runtimes that take a file and nothing else; held against eager.
        prompt: the only instruction of that graph, which then takes no tokens.
        qdq: COMPONENT=int8,...: vision, language, head. Round their products come QuantizeLinear and DequantizeLinear
            with fixed scales, as compilers of NPUs want, in all graphs of the folder. What stays in floats is listed.
            Exit status 1 beyond the bound that `sinew validate` has for int8.
        records: folder that `sinew serve --record` wrote, for the scales; else as for `sinew quantize`.
        observations: that the scales are made by (32); the error is over as many others behind them.
        vlacpp: the GGUF file to write for vla.cpp; it must not be there.
    """
    from sinew.policy import open_bundle

    if (onnx is None) == (vlacpp is None):
        raise SinewError("expected either --onnx FOLDER or --vlacpp FILE")
    if whole and onnx is None:
        raise SinewError("--whole: expected --onnx FOLDER beside it, got none")
    if prompt and not whole:
        raise SinewError("--prompt: expected --whole beside it, got none")
    if qdq and onnx is None:
        raise SinewError("--qdq: expected --onnx FOLDER beside it, got none")
    for name, given in (("records", records), ("observations", observations)):
        if given is not None and not qdq:
            raise SinewError(f"--{name}: expected --qdq beside it, got none")
    opened, console = open_bundle(bundle), terminal.console(markup=False)
    if onnx is not None:
        from sinew.checks.validate.exported import prove_whole, write_reference
        from sinew.engine.onnx.opening import export_folder
        from sinew.engine.onnx.whole.graph import open_whole, write_whole

        described, error, pairs = list[str](), None, list[str]()
        if qdq:
            from sinew.eval.quantize.quantization import paired, paired_recipe

            chosen = paired_recipe(opened, qdq)  # what is refused is said before an export

        def also(bundle: Bundle, folder: Path) -> None:
            nonlocal error
            write_reference(bundle, folder)
            if qdq:
                pairs.extend(paired(bundle, folder, chosen, observations or 32, records))
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
