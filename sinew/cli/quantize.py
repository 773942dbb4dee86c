"""``sinew quantize``: a bundle with low-bit weights, or with components in FP8, and what that was measured to cost."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from sinew import progress
from sinew.cli import terminal
from sinew.cli.options import Count, Flag, PositiveIfAny, Whole
from sinew.cli.validate import USUAL
from sinew.core import SinewError

DEFAULT = "vision=int8,language=int8,head=fp32"


def quantize(
    bundle: Path,
    /,
    *,
    recipe: str = DEFAULT,
    out: Path,
    observations: Count = 32,
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
        observations: over which the error is measured, from episodes of an embedded task where the policy fits
            one, else random frames. For fp8 as many others come before, for its scales.
        episodes: of the success gate of an embedded task that the policy fits; its outcome goes into the header.
            0 plays none.
    """
    from sinew.engine.onnx.quantize import parse_recipe
    from sinew.eval.report import quantization
    from sinew.policy import open_bundle
    from sinew.sources import resolve

    if search != bool(budget or target_ms):
        raise SinewError("expected --search together with --budget or --target-ms")
    chosen = parse_recipe(recipe)
    bundle = resolve(bundle)
    opened = open_bundle(bundle)
    if opened.manifest.quantization is not None or not opened.infos:
        raise SinewError(f"{bundle}: expected a bundle with weights and without a recipe")
    if out.resolve() == bundle.resolve():
        raise SinewError(f"--out {out}: expected another file than the bundle that is read")
    absent = [] if search else quantization.lacking(opened, chosen)
    for part in absent:
        if recipe != DEFAULT:
            raise SinewError(
                f"recipe: {part}: expected linear layers or token tables, got none in {opened.manifest.architecture}"
            )
        chosen[part] = "fp32"
    console = terminal.console(markup=False)
    with progress.task(f"validating {bundle.name} as it is"):
        proof = quantization.validated(opened, min(observations, USUAL))
    out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if search:
        from sinew.eval.report.recipe_search import search as search_recipe

        trial = quantization.trials(opened, observations)
        chosen, found["search"] = search_recipe(opened, budget, target_ms, out, trial, console.print)
        engine = "cpu"
        if set(chosen.values()) == {"fp32"}:
            asked = f"--budget {budget}" if budget else f"--target-ms {target_ms:g}"
            raise SinewError(f"{asked}: the bundle fits as it is; nothing was written")
    asked = ",".join(f"{part}={kind}" for part, kind in chosen.items() if kind != "fp32")
    with progress.task(f"measuring {bundle.name} in {asked}"):
        record, why = quantization.quantized(opened, chosen, observations, out, engine)
    record, verdict, passed = quantization.gated(replace(record, validated=proof), out, episodes)
    quantization.rewritten(record, out)
    found["warnings"] = quantization.warnings(record)
    console.print(
        f"before   {proof.engine} is within {proof.error:.1e} of eager fp32 over {proof.observations} observations"
    )
    console.print(f"recipe   {', '.join(f'{name} {kind}' for name, kind in chosen.items())}")
    for part in absent:
        console.print(f"         {part}: no linear layers or token tables in {opened.manifest.architecture}")
    console.print(f"weights  {why}")
    for module, error in record.weight_error.items():
        console.print(f"         {module}: relative L2 of the rounded weights {error:.2e}")
    sizes = out.stat().st_size, bundle.stat().st_size
    console.print(f"file     {sizes[0] / 1e6:.1f} MB, {sizes[0] / sizes[1]:.2f} of {bundle}")
    console.print(
        f"error    {record.error:.2e} median, {record.error_max:.2e} largest: relative L2 of the chunk",
    )
    console.print(f"         over {record.observations} observations from {record.source}")
    console.print(f"gate     {verdict}")
    for warning in found["warnings"]:
        console.print(f"warning  {warning}")
    terminal.emit({"out": str(out), **asdict(record), **found, "gate": verdict})
    return 0 if passed else 1
