"""``sinew quantize``: write a bundle with low-bit weights or FP8 components, and measure the error."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from sinew.bundle.schema import DEFAULT_RECIPE
from sinew.cli import terminal
from sinew.cli.options import Count, Flag, PositiveIfAny, Whole
from sinew.core import SinewError


def quantize(
    bundle: Path,
    /,
    *,
    recipe: str = DEFAULT_RECIPE,
    out: Path,
    observations: Count = 32,
    calibration: Whole = 32,
    records: Path | None = None,
    engine: Literal["cpu", "onnx"] | None = None,
    search: Flag = False,
    budget: str = "",
    target_ms: PositiveIfAny = None,
    episodes: Whole = 20,
) -> int:
    """Store components with fewer bits and measure the effect.

    Sinew first validates the original bundle with at most eight observations, and stops if this fails. It stores
    linear layers and token tables as int8 (one scale per output channel), or as q8_0 or q4_0 (one scale per 32
    weights). The header contains the recipe, the measured error and the verification. Engine cpu computes with the
    stored weights. Engine onnx uses int8 graphs next to the new bundle. Other engines widen the weights. For fp8,
    which engine cuda uses, the weights stay as they are and the header has the scales of each layer's inputs.

    Args:
        bundle: Policy to quantise: a bundle, a checkpoint or training run, or a hub name.
        recipe: Precision of each component, as COMPONENT=PRECISION,... Components: vision, language, head.
            Precisions: int8, q8_0, q4_0, int8-rows (int8 whose inputs also get a scale per token in engine onnx,
            which makes onnx slower), fp8 (only for language) and fp32. Components that you do not name stay fp32.
        out: Bundle to write.
        engine: Engine that computes the error. Default: onnx if the recipe is int8 only, otherwise cpu.
        search: Search the recipe with the smallest error within --budget, --target-ms or both, instead of
            --recipe. Sinew measures with engine cpu.
        budget: Maximum size of all weights, for example 1.4GiB or 200MB.
        target_ms: Maximum time of vision, prefix and head of one chunk on this machine, in milliseconds. The
            fastest of all observations counts.
        observations: Number of observations over which the error is measured. fp8 uses as many others to
            compute its scales.
        calibration: Number of further observations used to round q4_0 weights (GPTQ). Random frames are never
            used. 0 rounds each weight on its own.
        records: Folder of `sinew serve --record` that provides the observations. Default: episodes of a
            built-in task that fits the policy, otherwise random frames.
        episodes: Number of episodes of the success gate (required success rate) on a built-in task that fits
            the policy. The bundle stores the outcome. 0 plays none.
    """
    from sinew.lowbit.quantization import quantize as quantized

    if search != bool(budget or target_ms):
        raise SinewError(
            "--search: pass --budget or --target-ms (or both) with it, and --search with each of these"
        )
    console = terminal.console(markup=False)
    outcome = quantized(
        bundle, out, recipe=recipe, observations=observations, calibration=calibration, records=records, engine=engine,
        budget=budget, target_ms=target_ms, episodes=episodes, say=console.print,
    )  # fmt: skip
    record, proof = outcome.record, outcome.proof
    console.print(
        f"before   {proof.engine} is within {proof.error:.1e} of eager fp32 over {proof.observations} observations"
    )
    console.print(f"recipe   {', '.join(f'{name} {kind}' for name, kind in outcome.recipe.items())}")
    for part in outcome.absent:
        console.print(f"         {part}: no linear layers or token tables in {outcome.architecture}")
    console.print(f"weights  {outcome.stored}")
    for module, error in record.weight_error.items():
        console.print(f"         {module}: relative L2 of the rounded weights {error:.2e}")
    console.print(
        f"file     {outcome.nbytes[0] / 1e6:.1f} MB, {outcome.nbytes[0] / outcome.nbytes[1]:.2f} of {outcome.source}"
        + ": nearly all of it is convolutions, or weights that the reference keeps in float32"
        * (outcome.nbytes[0] > 0.9 * outcome.nbytes[1])
    )
    console.print(
        f"error    {record.error:.2e} median, {record.error_max:.2e} largest: relative L2 of the chunk"
    )
    console.print(f"         over {record.observations} observations from {record.source}")
    console.print(f"gate     {outcome.verdict}")
    for warning in outcome.warnings:
        console.print(f"warning  {warning}")
    terminal.emit(
        {
            "out": str(out),
            **asdict(record),
            **outcome.search,
            "warnings": outcome.warnings,
            "gate": outcome.verdict,
        }
    )
    return 0 if outcome.passed else 1
