"""``sinew quantize``: a bundle with low-bit weights, or with components in FP8, and what that was measured to cost."""

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
    """Store components in fewer bits and measure what it costs. The cpu engine computes on the stored weights.

    First the bundle is validated as it is, over as many observations, at most eight: one that fails is not written. The
    proof goes into the header with the rest.

    Linear layers and token tables are stored as int8 (one scale per output channel), q8_0 or q4_0 (one per 32
    weights); the recipe and the measured error go into the header. The onnx engine follows int8, with graphs in that
    precision beside the new bundle; other engines widen the weights. For fp8, which the cuda engine follows, weights
    stay as they are and the header has the scales of its layers' inputs.

    Args:
        bundle: a bundle, a checkpoint or training run, or a name of the hub.
        recipe: COMPONENT=PRECISION,...: vision, language, head; int8, q8_0, q4_0, int8-rows (int8 that gives each
            token a scale in onnx too: slower there), fp8 or fp32; fp32 for those not named.
        out: the bundle to write.
        engine: that computes the error; absent: onnx for int8 alone, else cpu.
        search: choose the recipe of the least error within --budget, --target-ms or both, in place of --recipe;
            measured on engine cpu.
        budget: of all weights, such as 1.4GiB or 200MB.
        target_ms: of vision, prefix and head of one chunk, as measured on this machine, the best of all observations.
        observations: over which the error is measured. For fp8 as many others come before, for its scales.
        calibration: observations before those, by whose inputs q4_0 is rounded (GPTQ), but for random frames; 0 rounds
            each weight alone.
        records: folder that `sinew serve --record` wrote, to take them from; else episodes of an embedded task that the
            policy fits, else random frames.
        episodes: of the success gate of an embedded task that the policy fits; its outcome goes into the header.
            0 plays none.
    """
    from sinew.eval.quantize.quantization import quantize as quantized

    if search != bool(budget or target_ms):
        raise SinewError("expected --search together with --budget or --target-ms")
    console = terminal.console(markup=False)
    made = quantized(
        bundle, out, recipe=recipe, observations=observations, calibration=calibration, records=records, engine=engine,
        budget=budget, target_ms=target_ms, episodes=episodes, say=console.print,
    )  # fmt: skip
    record, proof = made.record, made.proof
    console.print(
        f"before   {proof.engine} is within {proof.error:.1e} of eager fp32 over {proof.observations} observations"
    )
    console.print(f"recipe   {', '.join(f'{name} {kind}' for name, kind in made.recipe.items())}")
    for part in made.absent:
        console.print(f"         {part}: no linear layers or token tables in {made.architecture}")
    console.print(f"weights  {made.stored}")
    for module, error in record.weight_error.items():
        console.print(f"         {module}: relative L2 of the rounded weights {error:.2e}")
    console.print(
        f"file     {made.nbytes[0] / 1e6:.1f} MB, {made.nbytes[0] / made.nbytes[1]:.2f} of {made.source}"
        + ": nearly all of it are convolutions, or what the reference keeps in float32"
        * (made.nbytes[0] > 0.9 * made.nbytes[1])
    )
    console.print(
        f"error    {record.error:.2e} median, {record.error_max:.2e} largest: relative L2 of the chunk"
    )
    console.print(f"         over {record.observations} observations from {record.source}")
    console.print(f"gate     {made.verdict}")
    for warning in made.warnings:
        console.print(f"warning  {warning}")
    terminal.emit(
        {"out": str(out), **asdict(record), **made.search, "warnings": made.warnings, "gate": made.verdict}
    )
    return 0 if made.passed else 1
