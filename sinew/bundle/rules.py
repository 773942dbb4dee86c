"""Hold what the records of a manifest say against one another, before anything is built from it.

Each for itself: `core/fields.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sinew_client.given import shown

from sinew.core import MAX_HISTORY_STEPS, MotionSpec
from sinew.core.fields import MAX_NAME

if TYPE_CHECKING:
    from sinew.bundle.schema import Manifest, Normalization, Processing
    from sinew.bundle.seen import Seen
    from sinew.core import PolicySpec

# Of all views that the model reads, or of all frames that cameras are said to give, times 4
MAX_PIXELS = 1 << 25
MAX_NOISE = 1 << 22
MAX_UNITS = 1e9  # of a state or an action, in whatever unit: encoders and micrometres stay below
# What each mode of normalisation needs, by its name in ``stats``.
STATISTICS: dict[str, tuple[str, ...]] = {
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
    "identity": (),
}
PAIRS = {mode: STATISTICS[mode] for mode in ("min_max", "quantiles", "quantile10")}  # the ends of ranges


def problems(manifest: Manifest) -> Iterator[str]:
    """Yield what the records of a manifest, each right in itself, do not say together."""
    spec, processing = manifest.spec, manifest.processing
    if len(manifest.name) > MAX_NAME or not manifest.name.isprintable():
        yield f"name: expected at most {MAX_NAME} printable characters, got {shown(manifest.name)}"
    yield from _spec_problems(spec, processing)
    yield from _processing_problems(spec, processing)
    for where, recipe, what in normalizations(processing):
        if what == "state" and recipe.rows:
            yield f"{where}.rows: expected 0, as only chunks have statistics of each row, got {recipe.rows}"
        for problem in statistics_problems(recipe):
            yield f"{where}.{problem}"
    if manifest.seen is not None:
        yield from seen_problems(manifest.seen, spec)


def _spec_problems(spec: PolicySpec, processing: Processing) -> Iterator[str]:
    names, solver, steps = [camera.name for camera in spec.cameras], spec.solver, spec.solver_steps
    rows, span = spec.noise_shape[0], (spec.history - 1) * spec.history_stride
    noise_dim = 0 if solver.noise == "zeros" else processing.padded_action_dim
    if len(set(names)) != len(names):
        yield f"spec.cameras: expected 1 to 16 different names, got {', '.join(names)}"
    if rows < spec.chunk_size:
        yield f"spec.noise_rows: expected 0, or at least the {spec.chunk_size} rows of a chunk, got {rows}"
    if (numbers := math.prod(spec.noise_shape)) > MAX_NOISE:
        yield f"spec.noise_dim: expected at most {MAX_NOISE} numbers of noise in all, got {numbers}"
    if not 0 <= processing.first_row <= rows - spec.chunk_size:
        yield (
            "processing.first_row: expected a row of the solution with a whole chunk behind it, got"
            f" {processing.first_row} of {rows}"
        )
    if span > MAX_HISTORY_STEPS:
        yield f"spec.history_stride: expected 1 or more, {MAX_HISTORY_STEPS} control steps in all, got {span}"
    if spec.history > 1 and (processing.empty_cameras or not processing.all_cameras):
        yield f"spec.history: expected 1 unless processing.all_cameras is true, got {spec.history}"
    levels = solver.levels
    if solver.fixed_steps not in (None, steps) or (
        levels is not None and steps not in levels.possible(steps)
    ):
        yield f"spec: solver_steps does not fit spec.solver, got {steps}"
    if spec.noise_dim != noise_dim:
        yield (
            "spec.noise_dim: expected 0 where the solver starts from zeros, else the padded action dim, here"
            f" {noise_dim}, got {spec.noise_dim}"
        )
    if spec.committed_rows and not (0 < spec.committed_rows < spec.chunk_size and solver.kind == "euler"):
        got = f"{spec.committed_rows} of {spec.chunk_size}, solver {solver.kind}"
        yield f"spec.committed_rows: expected fewer than chunk_size, and solver euler, got {got}"
    if not _moves(spec):
        yield (
            "spec.motion: expected absolute for as many actions as the state has numbers, without columns; else"
            " different columns of the action, as many of the state, a scale above 0 and a range that 0 is in, got"
            f" {shown(spec.motion)}"
        )
    if not 0 <= spec.n_action_steps <= spec.chunk_size:
        yield f"spec.n_action_steps: expected at most chunk_size {spec.chunk_size}, got {spec.n_action_steps}"
    for name, vector in (("state", spec.state), ("action", spec.action)):
        for given in (vector.names, vector.units):
            if len(given) not in (0, vector.dim):
                got = f"{len(given)} for {vector.dim}"
                yield f"spec.{name}: expected one name and one unit for each value of a vector, or none, got {got}"
    for keys in spec.keys:
        for camera in keys.images.values():
            if camera not in names:
                yield f"spec.keys: an image key names a camera that is not there, got {shown(camera)}"


def _processing_problems(spec: PolicySpec, processing: Processing) -> Iterator[str]:
    state, action, image = spec.state.dim, spec.action.dim, processing.image
    if not 0 <= spec.history * state <= processing.padded_state_dim:
        yield f"spec.state does not fit processing.padded_state_dim {processing.padded_state_dim}, got {state}"
    if processing.padded_state_dim % spec.history:
        yield f"processing.padded_state_dim: expected as much for each of spec.history {spec.history}"
    if not 1 <= action <= processing.padded_action_dim:
        yield f"spec.action does not fit processing.padded_action_dim {processing.padded_action_dim}, got {action}"
    for name, steps, parts, dim in (
        ("state", processing.state_steps, processing.state_parts, state),
        ("action", processing.action_steps, processing.action_parts, action),
    ):
        for step in steps:
            if step.reads and name == "state":
                yield f"processing.state_steps: expected steps that read no state, got {step.kind}"
            if not all(0 <= d < dim for d in step.dims) or not all(0 <= d < state for d in step.reads):
                yield f"processing: a step's dims are outside its vector, got those of {step.kind} in {name}_steps"
        if parts and (total := sum(part.dim for part in parts)) != dim:
            yield f"processing: the parts of a vector do not add up to it: {name}_parts: expected {dim}, got {total}"
        for part in parts:
            if part.rotation and (part.dim != 3 or part.sin_cos):
                yield f"processing: a rotation has 3 numbers, and no sines of them, got {part.dim} of {part.name}"
    if not 0 <= processing.optional_cameras < len(spec.cameras):
        yield f"processing.optional_cameras: expected fewer than there are, got {processing.optional_cameras}"
    if len(image.cameras) not in (0, len(spec.cameras)):
        yield f"processing.image.cameras: expected one for each camera, or none, got {len(image.cameras)}"
    # Sizes that are believable one by one and not together
    if (read := (spec.views + processing.empty_cameras) * image.height * image.width) > MAX_PIXELS:
        yield f"processing.image: expected at most {MAX_PIXELS} pixels of all views, got {read}"
    if (frames := sum(camera.height * camera.width for camera in spec.cameras)) > 4 * MAX_PIXELS:
        yield f"spec.cameras: expected at most {4 * MAX_PIXELS} pixels of all frames, got {frames}"


def seen_problems(seen: Seen, spec: PolicySpec) -> Iterator[str]:
    """Yield what a record says of cameras and a state that are not those of the policy."""
    known = ", ".join(camera.name for camera in spec.cameras)
    if set(seen.cameras) - {camera.name for camera in spec.cameras}:
        yield f"seen.cameras: expected names of spec.cameras ({known}), got another one"
    rows = () if seen.state is None else (seen.state.mean, seen.state.std, seen.state.low, seen.state.high)
    if any(len(row) != spec.state.dim for row in rows):
        yield f"seen.state: expected {spec.state.dim} numbers each, got {', '.join(str(len(row)) for row in rows)}"


def normalizations(processing: Processing) -> Iterator[tuple[str, Normalization, str]]:
    """Yield every normalisation that is in use: its place in the record, itself, and what it normalises."""
    for what, whole, parts in (
        ("state", processing.state, processing.state_parts),
        ("action", processing.action, processing.action_parts),
    ):
        if parts:
            for part in parts:
                yield f"processing.{what}_parts.{part.name}", part.normalization, what
        else:
            yield f"processing.{what}", whole, what


def statistics_problems(recipe: Normalization) -> Iterator[str]:
    """Yield what is wrong with the statistics that a normalisation reads: std >= 0, low <= high."""
    dims = max(map(len, recipe.stats.values()), default=0) // max(recipe.rows, 1)
    if not all(0 <= dim < dims for dim in recipe.snap):
        yield f"snap: expected dimensions below {dims}, got {', '.join(map(str, recipe.snap))}"
    if recipe.mode == "mean_std":
        for i, value in enumerate(recipe.stats.get("std", ())):
            if value < 0:
                yield f"stats.std[{i}]: expected at least 0, got {value}"
    # Upstream's statistics of each step of relative actions are taken as they are; `range_notes` tells of them.
    if (pair := PAIRS.get(recipe.mode)) and not recipe.rows:
        low, high = (recipe.stats.get(name, ()) for name in pair)
        for i, (a, b) in enumerate(zip(low, high, strict=False)):
            if a > b:
                yield f"stats.{pair[0]}[{i}]: expected at most {pair[1]}[{i}] = {b}, got {a}"


def range_notes(processing: Processing) -> list[str]:
    """Return a sentence for each normalisation with values that do not vary (a zero std, a range of zero), and for
    statistics of each step whose range is upside down."""
    found = []
    for where, recipe, what in normalizations(processing):
        low, high = (recipe.stats.get(name, ()) for name in PAIRS.get(recipe.mode, ("", "")))
        if turned := sum(a > b for a, b in zip(low, high, strict=False)):
            found.append(f"{where}: {turned} ranges are upside down, which turns these values around")
        if flat := _flat(recipe):
            effect = "is magnified wherever it differs from training"
            if what == "action" or recipe.convention == "gr00t":  # which reads zero there
                effect = "is always the same"
            found.append(f"{where}: value {', '.join(map(str, flat))} did not vary in training and {effect}")
    return found


def odd_statistics(processing: Processing) -> list[str]:
    """Return a sentence for statistics that a file may have and that no robot can be meant by: actions that are always
    the same, and numbers beyond those of any unit."""
    found = []
    actions = [recipe for _where, recipe, what in normalizations(processing) if what == "action"]
    sizes = [max(map(len, recipe.stats.values()), default=0) for recipe in actions]
    if sum(sizes) and all(len(_flat(recipe)) == size for recipe, size in zip(actions, sizes, strict=True)):
        found.append("processing.action: no value varied in training, so every chunk is the same")
    for where, recipe, what in normalizations(processing):
        largest = max((abs(value) for values in recipe.stats.values() for value in values), default=0.0)
        if recipe.mode != "identity" and largest > MAX_UNITS:
            effect = (
                "limits of actions follow from them" if what == "action" else "every state is alike to them"
            )
            found.append(f"{where}: statistics up to {largest:g}, expected at most {MAX_UNITS:g}; {effect}")
    return found


def _flat(recipe: Normalization) -> list[int]:
    """Return the values that did not vary in training."""
    if recipe.mode == "mean_std":
        return [i for i, value in enumerate(recipe.stats.get("std", ())) if value == 0]
    low, high = (recipe.stats.get(name, ()) for name in PAIRS.get(recipe.mode, ("", "")))
    return [i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a == b]


def _moves(spec: PolicySpec) -> bool:
    """Return whether a robot can follow what a spec says of its actions."""
    motion = spec.motion
    if motion is None:
        return True
    if motion.kind == "absolute":
        return motion == MotionSpec("absolute") and spec.action.dim == spec.state.dim
    columns = ((motion.action, spec.action.dim), (motion.state, spec.state.dim))
    low = -math.inf if motion.low is None else motion.low
    high = math.inf if motion.high is None else motion.high
    plain = motion.scale == 1.0 and motion.low is None and motion.high is None
    return (
        0 < len(motion.action) == len(motion.state)
        and all(len(set(taken)) == len(taken) and all(0 <= i < dim for i in taken) for taken, dim in columns)
        and (plain if motion.kind == "relative" else 0 < motion.scale < math.inf and low < 0 < high)
    )
