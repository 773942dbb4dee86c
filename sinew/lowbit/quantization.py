"""Quantise a bundle, compare its action chunks with the reference's, and test its success in a simulated task."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle import EXPORTED, Bundle, write_bundle
from sinew.bundle.schema import COMPONENTS, DEFAULT_RECIPE, Quantization, Success, Validated
from sinew.bundle.writer import rewrite
from sinew.checks import judges
from sinew.checks.validate.observations import RANDOM
from sinew.checks.validate.observations import observations as observations_of
from sinew.checks.validate.parity import bounds_of, compare, distance, spread_of
from sinew.core import SinewError, Timing, progress, scratch
from sinew.engine.backend import BACKENDS, choose
from sinew.engine.onnx.cache import graphs_folder
from sinew.engine.watch import Watch
from sinew.lowbit.gptq import WIDEST
from sinew.lowbit.recipes import Measure, Trial, parse_bytes, parse_recipe, stored_bytes
from sinew.lowbit.sources import calibrated_rows, lowbit_sources, plan_formats, weight_errors
from sinew.policy import Policy, open_bundle
from sinew.processing import ModelInputs

SEARCHING = "cpu"  # the engine that a search measures on
PROVED = 8  # largest number of observations that compare the plan with the reference before rounding
Input = tuple[ModelInputs, np.ndarray]  # model inputs of one observation, and the solver's noise


@dataclass(frozen=True)
class Samples:
    """The observations for the comparison of a quantised policy with its reference.

    Attributes:
        count: Number of observations for the error.
        calibration: Number of earlier observations that calibrate the rounding of q4_0, unless the observations are
            random frames.
        records: A folder of recordings with the observations, or None.
    """

    count: int
    calibration: int = 0
    records: Path | None = None

    def to(self, reference: Policy) -> tuple[str, Iterator[Input]]:
        """Return the origin of the observations, and the reference's inputs and noise for each observation."""
        processor, (origin, stream) = (
            reference.processor,
            observations_of(reference, self.records, judges.observations),
        )
        return origin, ((processor.inputs(each), processor.noise(each)[0]) for each in stream)


@dataclass(frozen=True)
class Quantized:
    """The result of :func:`quantize`.

    Attributes:
        out: The new bundle.
        source: The bundle that was read.
        architecture: Name of the model family.
        recipe: The quantisation recipe: the precision of each component.
        record: The header's record of the quantisation, with the error of the chunk and the success gate.
        proof: Comparison of the source bundle with its own reference.
        absent: Components of the default recipe that contain no weights that can be quantised.
        stored: The formats of the stored weights, as text.
        verdict: Outcome of the success gate, as text.
        passed: True if the success gate was passed, or if there was no gate.
        nbytes: Sizes of the new and the old file in bytes.
        search: The recipes that a search has tried, or {} without a search.
    """

    out: Path
    source: Path
    architecture: str
    recipe: dict[str, str]
    record: Quantization
    proof: Validated
    absent: list[str]
    stored: str
    verdict: str
    passed: bool
    nbytes: tuple[int, int]
    search: dict[str, Any]

    @property
    def warnings(self) -> list[str]:
        """Return warnings for the user about the recipe of this bundle (:func:`warnings`)."""
        return warnings(self.record)


def quantize(
    source: str | Path,
    out: str | Path,
    *,
    recipe: str = DEFAULT_RECIPE,
    observations: int = 32,
    calibration: int = 32,
    records: str | Path | None = None,
    engine: str | None = None,
    budget: str = "",
    target_ms: float | None = None,
    episodes: int = 20,
    say: Callable[[str], None] | None = None,
) -> Quantized:
    """Store components of a policy with fewer bits and measure how much the actions change, as ``sinew quantize`` does.

    Args:
        source: A bundle, a checkpoint or training run, or a name on the Hugging Face Hub.
        out: The bundle to write.
        recipe: The quantisation recipe, ``COMPONENT=PRECISION,...``: vision, language and head in int8, q8_0, q4_0,
            int8-rows, fp8 or fp32.
        observations: Number of observations for the error of the chunk.
        calibration: Number of earlier observations that calibrate the rounding of q4_0. With 0, each weight is rounded
            separately, as for random frames.
        records: A folder of ``sinew serve --record`` with the observations. None uses a built-in task, or random
            frames.
        engine: Engine that computes the error. None uses the engine that runs the recipe.
        budget: Largest size of the bundle, such as "500MB". Sinew then searches the recipe with the least error.
        target_ms: Longest time of an inference in ms. Sinew then searches the recipe with the least error.
        episodes: Number of episodes of the success gate, if a built-in task fits the policy. 0 for none.
        say: Called with a line of text for each step of the search.

    Returns:
        The result, with the error and the outcome of the success gate.

    Raises:
        SinewError: The bundle does not match its own reference, or does not support the recipe. No file is written
            then.
    """
    from sinew.convert.sources import resolve

    chosen, out, size = parse_recipe(recipe), Path(out), parse_bytes(budget) if budget else 0
    bundle = resolve(Path(source))
    opened = open_bundle(bundle)
    if opened.manifest.quantization is not None or not opened.infos:
        got = opened.manifest.quantization
        why = (
            f"a bundle in {_asked(got.recipe)}; pass the bundle before quantisation"
            if got
            else "a bundle without weights"
        )
        raise SinewError(f"{bundle}: expected a bundle with weights and without a recipe, got {why}")
    if out.resolve() == bundle.resolve():
        raise SinewError(f"--out {out}: this is the bundle that is read; choose another file")
    searched = bool(budget or target_ms)
    if searched and recipe != DEFAULT_RECIPE:
        raise SinewError(
            f"--recipe {recipe}: cannot be combined with --search, which chooses the recipe; omit one of the two"
        )
    if not searched and set(chosen.values()) == {"fp32"}:
        raise SinewError(f"recipe: expected at least one component with fewer bits, got {recipe}")
    if size >= stored_bytes(opened, {}) and not target_ms:
        raise SinewError(f"--budget {budget}: the bundle fits without quantisation, so no file was written")
    follows = {*BACKENDS[engine].follows, "fp32"} if engine else set()
    if engine and searched and engine != SEARCHING:
        raise SinewError(
            f"--engine {engine}: a search measures with engine {SEARCHING} only; omit --engine, or pass --engine"
            f" {SEARCHING}"
        )
    if engine and not searched and not set(chosen.values()) <= follows:
        raise SinewError(
            f"--engine {engine}: this engine supports {', '.join(sorted(follows))}, got {_asked(chosen)}"
        )
    samples = Samples(observations, calibration, None if records is None else Path(records))
    absent = [] if searched else lacking(opened, chosen)
    for part in absent:
        if recipe != DEFAULT_RECIPE:
            able = [each for each in COMPONENTS if not lacking(opened, {each: "int8"})]
            raise SinewError(
                f"recipe: {part}: no weights of this component can be quantised in {opened.manifest.architecture};"
                f" name some of: {', '.join(able) or 'no component'}"
            )
        chosen[part] = "fp32"
    with progress.task(f"validating {bundle.name} as it is"):
        proof = validated(opened, replace(samples, count=min(observations, PROVED)))
    out.parent.mkdir(parents=True, exist_ok=True)
    search: dict[str, Any] = {}
    if searched:
        from sinew.lowbit.recipe_search import search as search_recipe

        trial = trials(opened, samples)
        chosen, search["search"] = search_recipe(
            opened, budget, target_ms, out, trial, say or (lambda _: None)
        )
        engine = "cpu"
        if set(chosen.values()) == {"fp32"}:
            raise SinewError(
                f"--target-ms {target_ms:g}: the bundle is fast enough without quantisation, so no"
                " file was written"
            )
    with progress.task(f"measuring {bundle.name} in {_asked(chosen)}"):
        record, stored = quantized(opened, chosen, samples, out, engine)
    record, verdict, passed = gated(replace(record, validated=proof), out, episodes)
    rewritten(record, out)
    nbytes = out.stat().st_size, bundle.stat().st_size
    return Quantized(
        out, bundle, opened.manifest.architecture, chosen, record, proof, absent, stored, verdict, passed,
        nbytes, search,
    )  # fmt: skip


def _asked(recipe: dict[str, Any]) -> str:
    """Return a recipe as text for the option --recipe, without components in fp32."""
    return ",".join(f"{part}={kind}" for part, kind in recipe.items() if kind != "fp32")


def quantized(
    opened: Bundle, chosen: dict[str, Any], samples: Samples, out: Path, engine: str | None
) -> tuple[Quantization, str]:
    """Write a bundle in the chosen precisions, and measure how much its actions differ from the reference.

    Args:
        opened: The source bundle.
        chosen: The precision of each component, by the component's name.
        samples: Observations for the error.
        out: The new bundle.
        engine: Engine that computes the error. None uses the engine that the precisions need.

    Returns:
        The record of the quantisation, and the stored formats as text.

    Raises:
        SinewError: The precisions are not supported.
    """
    kinds = set(chosen.values())
    if "fp8" in kinds:
        return _in_fp8(opened, chosen, samples, out)
    make = _in_lowbit if engine == "cpu" or {"q8_0", "q4_0"} & kinds else _in_int8
    return make(opened, chosen, samples, out)


def validated(opened: Bundle, samples: Samples) -> Validated:
    """Compare the unquantised rewritten model (the plan), whose weights will be rounded, with the reference in float32.

    Raises:
        SinewError: The actions differ. An error in the plan must not count as a loss from fewer bits.
    """
    reference = Policy(opened, "cpu", "fp32", "eager")
    engine = "plan"
    policy = Policy(opened, "cpu", "fp32", engine)
    _, stream = observations_of(reference, samples.records, judges.observations)
    report = compare(policy, reference, islice(stream, samples.count))
    if not report.passed:
        wrong = [f"{stage.name} {stage.error:.1e}" for stage in report.stages.values() if not stage.passed]
        wrong += [
            *report.faults,
            *(f"indices of {name}" for name, same in report.indices.items() if not same),
        ]
        raise SinewError(
            f"{opened.path}: expected equal results of the engines {engine} and eager over {report.observations}"
            f" observations, got {', '.join(wrong)}; run `sinew validate {opened.path} --engine {engine}` for the"
            " details"
        )
    return Validated(engine, report.observations, float(f"{report.stages['actions'].error:.4g}"))


def warnings(record: Quantization) -> list[str]:
    """Return warnings for the user about components whose quantisation may reduce the success.

    The errors of a quantised head add up over the solver's steps (flow matching and diffusion), so other projects
    keep the head in floats. Only episodes show how much success is lost.
    """
    kind = record.recipe.get("head", "fp32")
    if kind == "fp32":
        return []
    won = record.success
    played = "no episodes were played" if won is None else f"{won.episodes} episodes were played"
    return [
        f"head in {kind}: its errors add up over the solver's steps, and {played}; keep it in fp32, or run 200 episodes"
    ]


def lacking(opened: Bundle, chosen: dict[str, Any]) -> list[str]:
    """Return the components that the recipe quantises although none of their weights can be quantised."""
    nothing = dict.fromkeys(COMPONENTS, "fp32")
    parts = [part for part, kind in chosen.items() if kind != "fp32"]
    return [part for part in parts if not plan_formats(opened, nothing | {part: "int8"})]


def gated(record: Quantization, out: Path, episodes: int) -> tuple[Quantization, str, bool]:
    """Run the success gate: test the new bundle in episodes of its task, with the engine that follows its recipe.

    Returns:
        The record with the outcome, the verdict as text, and True if the gate passed or there was no gate.
    """
    gate, why = judges.gate_of(out)
    if gate is None or not episodes:
        return record, f"not played: {why if episodes else '--episodes 0'}", True
    try:
        choice = choose(Bundle(out))
    except SinewError as error:
        return (
            record,
            f"not played: {error}; run `sinew validate {out}` on a machine that has this engine",
            True,
        )
    outcome = gate.play(out, choice, episodes)
    counts = {name: outcome[name] for name in ("env", "episodes", "wins", "recorded_wins")}
    record = replace(record, success=Success(**counts))
    delta = 100 * (outcome["wins"] - outcome["recorded_wins"]) / outcome["episodes"]
    return record, f"success {delta:+.1f} points: {outcome['text']}", outcome["passed"]


def rewritten(record: Quantization, out: Path) -> None:
    """Replace the quantisation record in the header of a bundle, and keep its tensors.

    The folder of the bundle's exported graphs is renamed, because its name contains the bundle's fingerprint, which
    changes.
    """
    graphs = graphs_folder(Bundle(out))
    write(Bundle(out), record, out)
    if graphs.exists():
        graphs.rename(graphs_folder(Bundle(out)))


def paired_recipe(opened: Bundle, recipe: str) -> dict[str, Any]:
    """Parse the recipe for an export with static int8 scales ("pairs"): return the precision of each component.

    Raises:
        SinewError: The recipe has precisions other than int8 and fp32, or the bundle is quantised already.
    """
    if opened.manifest.quantization is not None or not opened.infos:
        raise SinewError(f"--qdq: expected a bundle with weights and without a recipe, got {opened.path}")
    chosen = parse_recipe(recipe)
    if not {"int8"} <= set(chosen.values()) <= {"int8", "fp32"}:
        raise SinewError(f"--qdq: expected int8 for some components and fp32 for the others, got {recipe}")
    return chosen


def paired(
    opened: Bundle, folder: Path, chosen: dict[str, Any], count: int, records: Path | None = None
) -> list[str]:
    """Convert the graphs of an export to int8 with static scales ("pairs"), in place, and measure the error.

    Args:
        opened: The bundle.
        folder: The export.
        chosen: The precision of each component, from :func:`paired_recipe`.
        count: Number of observations that calibrate the scales of activations. The same number of later observations
            measures the error, which is written into the folder's header with the recipe.
        records: A folder of recordings with the observations, or None.

    Returns:
        The results of the comparison, in lines of text.

    Raises:
        SinewError: Actions differ by more than `sinew validate` allows for int8.
    """
    from sinew.engine.onnx.providers import runtime
    from sinew.engine.onnx.quantize import weight_bits
    from sinew.engine.onnx.whole.pairs import write_pairs

    wide, (bits, why) = Policy(open_bundle(folder), "cpu", engine="onnx"), weight_bits()
    origin, stream = observations_of(wide, records, judges.observations)
    calibration, test = list(islice(stream, count)), list(islice(stream, count))
    if not test:
        raise SinewError(
            f"{origin}: {len(calibration)} observations are needed for the calibration and none is left to measure"
            " the error; add recordings"
        )
    expected, spread = [wide.infer(each).actions for each in test], spread_of(wide)
    runs = [(wide.processor.inputs(each), wide.processor.noise(each)[0]) for each in calibration]
    pairs = write_pairs(folder, chosen, bits, opened.manifest.spec.solver, runs)

    def headed(errors: list[float]) -> None:
        record = _record(chosen, bits, errors, origin, f"onnxruntime {runtime().__version__}")
        record = replace(record, observations=len(test), calibrated=len(calibration))
        write_bundle(folder / EXPORTED, lambda: replace(opened.manifest, quantization=record), ())

    headed([0.0])
    narrow = Policy(open_bundle(folder), "cpu", engine="onnx")
    got, bound = [narrow.infer(each).actions for each in test], bounds_of(narrow)["actions"]
    errors = [distance(a / spread, b / spread) for a, b in zip(got, expected, strict=True)]
    if not max(errors) <= bound:  # the negation also rejects NaN
        raise SinewError(
            f"--qdq: expected actions within {bound:.0e} of float32 over {len(test)} observations from {origin}, got"
            f" an error of {max(errors):.1e}; keep components in fp32, or calibrate with more --observations or"
            " with --records"
        )
    headed(errors)
    furthest = max(float(np.abs((a - b) / spread).max()) for a, b in zip(got, expected, strict=True))
    parts = ", ".join(f"{part} {number}" for part, number in pairs.products.items())
    left = ", ".join(f"{number} {kind}" for kind, number in pairs.left.most_common())
    return [
        f"int8     {pairs.products.total()} products between pairs: {parts}; weights of {bits} bits: {why}",
        f"float    on an NPU with integers alone, another processor computes: {left}; and the solver",
        f"error    {np.median(errors):.1e} median, {max(errors):.1e} largest: relative L2 of actions over their spread",
        f"         the largest error of an action is {furthest:.1%} of its range",
        f"         {len(test)} observations from {origin}, after {len(calibration)} for the calibration; on the CPU",
    ]


def trials(opened: Bundle, samples: Samples) -> Measure:
    """Return a function that quantises the bundle by a recipe and measures the error of the actions.

    The function uses the same observations for every recipe.
    """
    reference = Policy(opened, "cpu", engine="eager")
    inputs = list(islice(samples.to(reference)[1], samples.count))

    def trial(bundle: Bundle, recipe: dict[str, str], scratch: Path) -> Trial:
        whole = dict.fromkeys(COMPONENTS, "fp32") | recipe
        manifest = bundle.manifest
        write_bundle(scratch, lambda: manifest, lowbit_sources(bundle, plan_formats(bundle, whole)))
        rounded = Policy(Bundle(scratch), "cpu", engine="cpu")
        timings: list[Timing] = []
        error = float(np.median(measure(reference, rounded.engine, inputs, timings)))
        stages = {"vision": "vision_ms", "language": "prefix_ms", "head": "head_ms"}
        return error, {part: min(getattr(each, name) for each in timings) for part, name in stages.items()}

    return trial


def _in_int8(opened: Bundle, chosen: dict[str, Any], samples: Samples, out: Path) -> tuple[Quantization, str]:
    from sinew.engine.onnx.providers import runtime
    from sinew.engine.onnx.quantize import weight_bits

    bits, why = weight_bits()
    record, _ = _measured(opened, chosen, samples, out, "onnx", bits, f"onnxruntime {runtime().__version__}")
    return record, f"graphs of {bits} bits per output channel: {why}"


def _in_lowbit(
    opened: Bundle, chosen: dict[str, Any], samples: Samples, out: Path
) -> tuple[Quantization, str]:
    from sinew.engine.cpu.kernels.library import extension

    by = f"cpu, {extension().kernels} kernels"
    record, rounded = _measured(opened, chosen, samples, out, "cpu", 8, by)
    return (
        record,
        f"multiplied as they are stored ({extension().kernels} kernels: {extension().reason}){rounded}",
    )


def _measured(
    opened: Bundle, chosen: dict[str, Any], samples: Samples, out: Path, engine: str, bits: Any, by: str
) -> tuple[Quantization, str]:
    """Write the bundle, and measure the error of ``engine`` on the written file.

    Graphs are exported from the stored weights, as any other machine would do it, and stay next to the bundle.

    Returns:
        The record with the error, and how q4_0 was rounded, as text.
    """
    with scratch.beside(out) as folder:
        unmeasured = folder / out.name
        reference = Policy(opened, "cpu", engine="eager")
        origin, stream = samples.to(reference)
        formats = plan_formats(opened, chosen)
        made, calibrated, rounded = _calibrated(opened, formats, reference, samples, origin, stream, folder)
        record = replace(_record(chosen, bits, [0.0], "", ""), calibrated=calibrated)
        manifest = replace(opened.manifest, quantization=record)
        write_bundle(unmeasured, lambda: manifest, lowbit_sources(opened, formats, made))
        lost = {name: float(f"{error:.4g}") for name, error in weight_errors(opened, unmeasured).items()}
        errors = measure(
            reference, Policy(Bundle(unmeasured), "cpu", engine=engine).engine, islice(stream, samples.count)
        )
        if not errors:
            raise SinewError(
                f"{origin}: {calibrated} observations were used for the calibration and none is left to"
                " measure the error; add recordings, or lower --calibration"
            )
        record = _record(chosen, bits, errors, origin, by)
        record = replace(record, weight_error=lost, calibrated=calibrated)
        write(Bundle(unmeasured), record, out)
        if BACKENDS[engine].runs_graphs:
            graphs = graphs_folder(Bundle(out))
            shutil.rmtree(graphs, ignore_errors=True)  # remove graphs of an earlier run for the same bundle
            graphs_folder(Bundle(unmeasured)).rename(graphs)
    return record, rounded


def _calibrated(
    opened: Bundle,
    formats: dict[str, str],
    reference: Policy,
    samples: Samples,
    origin: str,
    stream: Iterator[Input],
    folder: Path,
) -> tuple[dict[str, Path], int, str]:
    """Round the weights in q4_0 with the inputs that their layers have for the calibration's observations.

    Returns:
        Three values: the file with the rounded weights of each layer, the number of observations, and a text about how
        q4_0 was rounded.
    """
    if not samples.calibration or "q4_0" not in formats.values():
        return {}, 0, ""
    # Calibration with random frames gives a third more error than rounding each weight separately.
    if origin == RANDOM:
        return (
            {},
            0,
            f"; q4_0: each weight was rounded separately; {RANDOM} cannot calibrate, so pass --records",
        )
    seen, steps = list(islice(stream, samples.calibration)), reference.spec.solver_steps

    def runs() -> Iterator[Callable[[], object]]:
        return (partial(reference.engine.run, inputs.batched(), noise[None], steps) for inputs, noise in seen)

    made, alone = calibrated_rows(opened, formats, reference.engine.model, runs, folder)
    others = f", except {alone} layers without inputs or with more than {WIDEST} inputs" if alone else ""
    return made, len(seen), f"; q4_0 calibrated with {len(seen)} observations{others}"


def _in_fp8(opened: Bundle, chosen: dict[str, Any], samples: Samples, out: Path) -> tuple[Quantization, str]:
    import torch

    from sinew.engine.cuda.calibrate import calibrate
    from sinew.engine.cuda.engine import CudaEngine
    from sinew.engine.cuda.fused.fuse import ON_CUDA
    from sinew.engine.cuda.options import CudaOptions
    from sinew.engine.plan.plan import Plan

    reference = Policy(opened, "cpu", engine="eager")
    model = reference.engine.model
    origin, stream = samples.to(reference)
    made, _ = calibrate(opened, model, islice(stream, samples.count), origin)
    options = CudaOptions(fp8=tuple(name for name, kind in chosen.items() if kind == "fp8"))
    scales = {name: float(f"{scale:.6g}") for name, scale in made.scales.items()}
    scales = {name: scale for name, scale in scales.items() if model.component_of(name) in options.fp8}
    if still := set(options.fp8) - {model.component_of(name) for name in scales}:
        raise SinewError(
            f"fp8: {', '.join(sorted(still))}: a request runs no linear layers of this component; keep it in fp32"
        )
    processing, plan = opened.manifest.processing, Plan.of(model, rewrites=ON_CUDA)
    engine = CudaEngine(plan, torch.device("cpu"), processing=processing, options=options, scales=scales)
    errors = measure(reference, engine, islice(stream, samples.count))
    record = _record(
        chosen, 8, errors, origin, f"the kernels' references in float32, torch {torch.__version__}"
    )
    record = replace(record, scales=scales)
    write(opened, record, out)
    return (
        record,
        f"8 bits, e4m3; the inputs of {len(scales)} layers have scales from the same number of earlier observations",
    )


def _record(recipe: dict[str, Any], bits: Any, errors: list[float], origin: str, engine: str) -> Quantization:
    median, largest = (float(f"{value:.4g}") for value in (np.median(errors), np.max(errors)))
    return Quantization(recipe, bits, median, largest, len(errors), origin, engine)


def measure(
    reference: Policy, engine: Any, observations: Iterable[Input], timings: list[Timing] | None = None
) -> list[float]:
    """Return the relative L2 error of the engine's chunk for each observation, without padded columns.

    Chunks are compared in model units (normalised actions).

    Args:
        reference: The reference policy.
        engine: The engine to measure.
        observations: Inputs and noise of each observation.
        timings: A list that receives the times of ``engine``.
    """
    steps, width = reference.spec.solver_steps, reference.spec.action.dim
    errors = []
    for inputs, noise in observations:
        (expected,) = reference.engine.run(inputs.batched(), noise[None], steps)
        watch = Watch()
        (got,) = engine.run(inputs.batched(), noise[None], steps, watch=watch)
        if timings is not None:
            timings.append(watch.timing())
        expected, got = expected[:, :width], got[:, :width]
        # An invalid token sequence gives a chunk of zeros, whose norm is 0. Use 1.0 instead, to prevent a division by
        # zero.
        size = float(np.linalg.norm(expected)) or 1.0
        errors.append(float(np.linalg.norm(got - expected)) / size)
    return errors


def write(bundle: Bundle, record: Quantization, out: Path) -> None:
    """Write the bundle's tensors, byte for byte, with a header that contains the quantisation record."""
    rewrite(bundle, replace(bundle.manifest, quantization=record), out)
