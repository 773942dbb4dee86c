"""The records of a bundle, their form in GGUF metadata, and the rules that they must satisfy together.

Structured records are JSON strings under ``sinew.*`` keys: any GGUF tool can show them, and one decoder checks types
and rejects unknown fields. The tokenizer is the whole ``tokenizer.json`` under the key that other GGUF tools use for
it.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from sinew_client.untrusted import named, shown

from sinew.core import MAX_HISTORY_STEPS, MAX_SIZE, SCHEDULES, BundleError, MotionSpec, PolicySpec
from sinew.core.fields import (
    MAX_NAME,
    Finite,
    MaybeWord,
    Must,
    NotBelowZero,
    Positive,
    Side,
    Width,
    from_builtins,
    parsed,
    printable,
    to_json,
    within,
)
from sinew.steps.image.base import ImageRecipe
from sinew.steps.prompt.base import PromptRecipe
from sinew.steps.vector.base import VectorStep

# Of a policy, as recipes name them; head: all that is not the others'
COMPONENTS = ("vision", "language", "head")
DEFAULT_RECIPE = "vision=int8,language=int8,head=fp32"  # the head's errors add up from step to step
READS = (1, 2, 3)  # formats that this version understands; it writes the last
ALIGNMENT = 64  # a cache line: mapped weights start where vector loads like it

KEY_ARCHITECTURE = "general.architecture"
KEY_NAME = "general.name"
KEY_VERSION = "sinew.format_version"
KEY_TOKENIZER = "tokenizer.huggingface.json"
# Hashes of the bundle itself (``reader.py``)
KEY_HEADER = "sinew.header_sha256"  # SHA-256 of the file up to the data, with this value as zeros
KEY_TENSORS = "sinew.tensor_sha256"  # JSON: name -> hash of the tensor's bytes

# Bound of the pixels of all views that the model reads, and of all camera frames times 4
MAX_PIXELS = 1 << 25
MAX_NOISE = 1 << 22
MOST_COLUMNS = 16  # columns of an action that a message lists
# What each mode of normalisation needs, by its name in ``stats``.
STATISTICS: dict[str, tuple[str, ...]] = {
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
    "identity": (),
}
PAIRS = {mode: STATISTICS[mode] for mode in ("min_max", "quantiles", "quantile10")}  # the ends of ranges


@dataclass(frozen=True)
class Normalization:
    """Vector to model units and back. ``stats`` holds the arrays that ``mode`` needs, float32 exact.

    mean_std   (x - mean) / (std + eps)                          inverse: x * std + mean
    min_max    2 (x - min) / (max - min) - 1
    quantiles  2 (x - q01) / (q99 - q01) - 1                     quantile10: q10 and q90
    identity   x

    LeRobot computes in float32, leaves eps out of the inverse of mean_std, and puts it in the place of a
    range only where that is zero. ``openpi`` computes in float64 and adds eps everywhere. ``gr00t`` computes in
    float64, without eps; where a range is zero the normalised value is zero.

    clip: model units are clipped to [-1, 1], after normalising and before its inverse. snap: these dimensions become 1
    where they are at least ``snap_at``, else 0, after that clip and before the inverse. rows: statistics are those of
    each step of a chunk, ``rows * dim`` values, step by step; 0 where all steps share them.
    """

    mode: Literal["mean_std", "min_max", "quantiles", "quantile10", "identity"]
    stats: dict[str, tuple[Finite, ...]] = field(default_factory=dict)
    eps: NotBelowZero = 1e-8
    convention: Literal["lerobot", "openpi", "gr00t"] = "lerobot"
    clip: bool = False
    rows: Width = 0
    snap: tuple[int, ...] = ()
    snap_at: Finite = 0.5

    @property
    def zero_where_flat(self) -> bool:
        """True if a value without a range in training is always read as zero."""
        return self.convention == "gr00t"


@dataclass(frozen=True)
class VectorPart:
    """Neighbouring dimensions of a vector that are normalised together, such as one joint group.

    sin_cos: the model has their sines, then their cosines, in place of normalised values. rotation: it has the first
    two columns of a matrix, six numbers, in place of a rotation vector's three.
    """

    name: MaybeWord
    dim: Side
    normalization: Normalization
    sin_cos: bool = False
    rotation: bool = False


@dataclass(frozen=True)
class Processing:
    """Everything between an observation and model inputs, and between model outputs and actions."""

    image: ImageRecipe
    prompt: PromptRecipe
    state: Normalization
    action: Normalization
    padded_state_dim: Width  # the model reads states padded with zeros to this width
    padded_action_dim: Side  # and produces actions of this width
    empty_cameras: Annotated[int, within(0, 16)] = (
        0  # masked, empty images that followed the views in training
    )
    optional_cameras: int = 0  # cameras that may stay away besides, for clients that mask views
    pad_missing_cameras: bool = False  # cameras that are not there were masked, empty images too (pi0)
    all_cameras: bool = False  # an observation without one of them is refused
    state_steps: tuple[VectorStep, ...] = ()  # before the state is normalised
    action_steps: tuple[VectorStep, ...] = ()  # after the actions are un-normalised
    state_parts: tuple[VectorPart, ...] = ()  # in place of ``state``, where parts are normalised differently
    action_parts: tuple[VectorPart, ...] = ()  # in place of ``action``
    first_row: int = 0  # row of a solution with which the chunk begins: the one of the newest observation
    compat: str = ""  # upstream version whose behaviour is followed where versions disagree


@dataclass(frozen=True)
class SourceFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """Where the numbers came from."""

    format: str  # e.g. "lerobot-smolvla", "vla.cpp-gguf"
    converter: str  # e.g. "sinew 0.1.0"
    sources: tuple[SourceFile, ...] = ()
    dropped: tuple[str, ...] = ()  # source tensors that inference never reads
    notes: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)  # what the user gave to `sinew convert`


@dataclass(frozen=True)
class Success:
    """Episodes of ``env`` that a quantised policy won, and those that the gate's record won over the same seeds."""

    env: str
    episodes: int
    wins: int
    recorded_wins: int


@dataclass(frozen=True)
class Validated:
    """The check of ``sinew quantize`` before rounding: ``engine`` compared with eager float32.

    Attributes:
        engine: Name of the engine.
        observations: Number of observations.
        error: Largest relative L2 error of the actions.
    """

    engine: str
    observations: int
    error: float


@dataclass(frozen=True)
class Quantization:
    """What ``sinew quantize`` decided and measured. An engine that does not compute it refuses the bundle.

    recipe: for each of ``COMPONENTS`` "int8", "q8_0" or "q4_0", which the weights are stored as and the cpu engine
    computes on; "int8" (activations with a scale per tensor) or "int8-rows" (per row, stored as int8), which ONNX
    Runtime follows; "fp8" (e4m3), which the CUDA engine follows; or "fp32", the engine's own precision. bits: of
    the weights in ONNX graphs; 7 where products of eight bits would saturate. weight_error: relative L2 of the stored
    weights of a top-level module against those before. error: relative L2 of the chunk against float32, median
    and largest over ``observations`` observations from ``source``, computed by ``engine``. scales: of the inputs of
    FP8 layers, by the layer's name. validated: the proof of the bundle before. calibrated: observations by whose inputs
    q4_0 was rounded, or activations got scales; 0: none.
    """

    recipe: dict[str, Literal["int8", "int8-rows", "q8_0", "q4_0", "fp8", "fp32"]]
    bits: Literal[7, 8]
    error: Finite
    error_max: Finite
    observations: int
    source: str
    engine: str
    scales: dict[str, Positive] = field(default_factory=dict)
    weight_error: dict[str, float] = field(default_factory=dict)
    success: Success | None = None
    validated: Validated | None = None
    calibrated: int = 0

    @property
    def fp8(self) -> tuple[str, ...]:
        """The components in FP8."""
        return tuple(name for name, precision in self.recipe.items() if precision == "fp8")


# A thumbnail is small on purpose: it tells a camera's place, which way up it is and the order of its colours, and
# nothing of what was in the room.
SIDE = 8  # cells of a thumbnail, in both directions
CELLS = SIDE * SIDE * 3
MAX_SOURCE = 256  # characters
Colour = Annotated[float, Must("a number from 0 to 255", lambda value: 0 <= value <= 255)]


def cells(text: str) -> bytes:
    """Return the bytes of a thumbnail. Raises ValueError for an invalid text."""
    if len(text) > 2 * CELLS:
        raise ValueError(f"{len(text)} characters")
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64 ({error})") from None
    if len(found) != CELLS:
        raise ValueError(f"{len(found)} bytes")
    return found


def _no_thumbnail(text: str) -> str:
    """Return why a text is no thumbnail; "" where it is one, or empty."""
    try:
        return "" if not text or cells(text) else "nothing"
    except ValueError as error:
        return str(error)


Thumbnail = Annotated[
    str, Must(f"base64 of {CELLS} bytes", lambda text: not _no_thumbnail(text), _no_thumbnail)
]


@dataclass(frozen=True)
class SeenCamera:
    """One camera over all frames. mean, std: of its pixels, three channels RGB, 0 to 255.

    thumbnail: base64 of uint8 [8, 8, 3], the mean of each cell over the frames, RGB. spread: base64 of uint8 [8, 8, 3],
    the standard deviation of each cell from frame to frame, in lightness, red less blue, and green less the mean of the
    two. Both are empty where only the pixels' statistics are known. farthest: the largest distance of a frame from the
    mean, in units of the spread (:func:`sinew.checks.wiring.thumbnails.distance`). still: the longest run of frames
    that were the same to the bit, as those of a simulator are; a real camera's noise makes it 1. 0: not known.
    """

    mean: tuple[Colour, Colour, Colour]
    std: tuple[Colour, Colour, Colour]
    thumbnail: Thumbnail = ""
    spread: Thumbnail = ""
    farthest: NotBelowZero = 0.0
    still: int = 0

    def problems(self) -> Iterator[str]:
        """Yield a picture without its other half."""
        if bool(self.thumbnail) != bool(self.spread):
            yield f"{'thumbnail' if self.spread else 'spread'}: expected both thumbnail and spread, or neither, got ''"


@dataclass(frozen=True)
class SeenState:
    """The state as the robot gives it, D numbers each, in its own units."""

    mean: tuple[Finite, ...]
    std: tuple[NotBelowZero, ...]
    low: tuple[Finite, ...]
    high: tuple[Finite, ...]

    def problems(self) -> Iterator[str]:
        """Yield an error if a range has low above high."""
        if any(low > high for low, high in zip(self.low, self.high, strict=False)):
            yield "low: expected at most high, got more"


@dataclass(frozen=True)
class Seen:
    """Tells what the cameras and joints of the training data looked like, by which a wrongly wired robot is found.

    source: which frames, in words. frames: how many. cameras: by the names of the bundle's cameras."""

    source: Annotated[str, printable(0, MAX_SOURCE)]
    frames: Annotated[int, within(1, 1 << 53)]
    cameras: dict[str, SeenCamera] = field(default_factory=dict)
    state: SeenState | None = None

    def problems(self) -> Iterator[str]:
        """Yield runs that are longer than all frames together."""
        for name, camera in self.cameras.items():
            if not 0 <= camera.still <= self.frames:
                yield f"cameras.{named(name)}.still: expected 0 to {self.frames}, got {camera.still}"


@dataclass(frozen=True)
class AdapterBase:
    """Says what an adapter belongs to: the base's name, for messages, and the hashes of its weights
    (:func:`sinew.bundle.adapter.weights_hash`) and of its tokenizer's text."""

    name: str
    weights: str
    tokenizer: str


@dataclass(frozen=True)
class Manifest:
    """All of a bundle except its tensors. ``config`` is the architecture's own record, undecoded.

    base: of an adapter's file, which has what changes another bundle, and no tokenizer; None of a whole policy.
    """

    architecture: str
    name: str
    config: dict[str, Any]
    spec: PolicySpec
    processing: Processing
    provenance: Provenance
    tokenizer: str  # the whole tokenizer.json
    precision: dict[str, str] = field(default_factory=dict)  # component -> storage type, e.g. "BF16"
    quantization: Quantization | None = None
    seen: Seen | None = None  # record of the training data; None if it was not gathered
    base: AdapterBase | None = None

    def to_metadata(self) -> dict[str, str | int]:
        """GGUF key-value pairs (``general.architecture`` and alignment belong to the writer)."""
        parts = {part: getattr(self, part) for part in (*_PARTS, *_OPTIONAL)}
        record: dict[str, str | int] = {
            KEY_NAME: self.name,
            KEY_VERSION: READS[-1],
            **{f"sinew.{part}": to_json(value) for part, value in parts.items() if value is not None},
        }
        return record if self.base is not None else {**record, KEY_TOKENIZER: self.tokenizer}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Manifest:
        """Decode and check; raises :class:`BundleError` that names the key and the field."""
        version = metadata.get(KEY_VERSION)
        if version is None:
            architecture = metadata.get(KEY_ARCHITECTURE, "unknown")
            raise BundleError(
                f"this GGUF file (architecture {architecture!r}) is not a Sinew bundle: it has no {KEY_VERSION};"
                " import it with `sinew convert`"
            )
        if version not in READS:
            raise BundleError(
                f"bundle format {version} is not supported (this version reads {READS[0]} to {READS[-1]})"
            )
        known = {f"sinew.{part}" for part in (*_PARTS, *_OPTIONAL)}
        known |= {KEY_VERSION, KEY_TOKENIZER, KEY_HEADER, KEY_TENSORS}
        if unknown := [key for key in metadata if key not in known and not key.startswith("general.")]:
            raise BundleError(f"unknown key {unknown[0]!r} (damaged, or written by a newer version?)")
        decoded = {}
        for part, kind in (_PARTS | _OPTIONAL).items():
            key = f"sinew.{part}"
            if part in _OPTIONAL and key not in metadata:
                continue
            raw = parsed(_text(metadata, key), key)
            if version != READS[-1]:
                from sinew.bundle.upgrade import upgraded

                raw = upgraded(part, raw, version)
            decoded[part] = from_builtins(raw, kind, key)
        manifest = cls(
            architecture=_text(metadata, KEY_ARCHITECTURE),
            name=_text(metadata, KEY_NAME),
            tokenizer="" if "base" in decoded else _text(metadata, KEY_TOKENIZER),
            **decoded,
        )
        manifest.check_agreement()
        return manifest

    def check(self) -> None:
        """Raise :class:`BundleError` for a value that its field does not hold, as a converter may have taken one from a
        checkpoint, or what :meth:`check_agreement` finds."""
        import msgspec

        for part, kind in (_PARTS | _OPTIONAL).items():
            if (value := getattr(self, part)) is not None:
                from_builtins(msgspec.to_builtins(value), kind, f"sinew.{part}")
        self.check_agreement()

    def check_agreement(self) -> None:
        """Raise :class:`BundleError` if records contradict each other."""
        for problem in problems(self):
            raise BundleError(f"sinew.{problem}")


# The records of a manifest, and those that it may have besides
_PARTS: dict[str, Any] = {
    "config": dict[str, Any],
    "spec": PolicySpec,
    "processing": Processing,
    "provenance": Provenance,
    "precision": dict[str, str],
}
_OPTIONAL: dict[str, Any] = {"quantization": Quantization, "seen": Seen, "base": AdapterBase}


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise BundleError(
            f"{key}: expected a string, got {'nothing' if value is None else type(value).__name__}"
        )
    return value


# ----------------------------------------------------------------------------- records against one another


def problems(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions between the records of a manifest."""
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
    if steps not in solver.possible(steps):
        yield f"spec: solver_steps does not fit spec.solver, got {steps}"
    if spec.noise_dim != noise_dim:
        yield (
            "spec.noise_dim: expected 0 where the solver starts from zeros, else the padded action dim, here"
            f" {noise_dim}, got {spec.noise_dim}"
        )
    if spec.committed_rows and not (0 < spec.committed_rows < spec.chunk_size and solver.kind == "euler"):
        got = f"{spec.committed_rows} of {spec.chunk_size}, solver {solver.kind}"
        yield f"spec.committed_rows: expected fewer than chunk_size, and solver euler, got {got}"
    if spec.motion is not None and not _moves(spec, spec.motion):
        yield f"spec.motion: {_motion_problem(spec, spec.motion)}"
    if not 0 <= spec.n_action_steps <= spec.chunk_size:
        yield f"spec.n_action_steps: expected at most chunk_size {spec.chunk_size}, got {spec.n_action_steps}"
    if spec.temporal_ensemble is not None and not math.isfinite(spec.temporal_ensemble):
        yield f"spec.temporal_ensemble: expected a finite number or none, got {spec.temporal_ensemble}"
    if (chunking := spec.real_time_chunking) is not None:
        if not 0 <= chunking.execution_horizon <= MAX_SIZE:
            yield (
                f"spec.real_time_chunking.execution_horizon: expected 0 to {MAX_SIZE}, got"
                f" {chunking.execution_horizon}"
            )
        if chunking.schedule not in SCHEDULES:
            yield (
                f"spec.real_time_chunking.schedule: expected one of {', '.join(SCHEDULES)}, got"
                f" {shown(chunking.schedule)}"
            )
        if not 0.0 <= chunking.max_guidance_weight < math.inf:
            yield (
                "spec.real_time_chunking.max_guidance_weight: expected a finite number from 0 on, got"
                f" {chunking.max_guidance_weight}"
            )
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
    if not 0 <= spec.states_read * state <= processing.padded_state_dim:
        yield f"spec.state does not fit processing.padded_state_dim {processing.padded_state_dim}, got {state}"
    if processing.padded_state_dim % spec.states_read:
        yield f"processing.padded_state_dim: expected as much for each of spec.history {spec.states_read}"
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
    if len(image.sizes) not in (0, len(spec.cameras)):
        yield f"processing.image.sizes: expected one for each camera, or none, got {len(image.sizes)}"
    # Sizes that are believable one by one and not together
    if (read := (spec.views + processing.empty_cameras) * image.height * image.width) > MAX_PIXELS:
        yield f"processing.image: expected at most {MAX_PIXELS} pixels of all views, got {read}"
    if (frames := sum(camera.height * camera.width for camera in spec.cameras)) > 4 * MAX_PIXELS:
        yield f"spec.cameras: expected at most {4 * MAX_PIXELS} pixels of all frames, got {frames}"


def seen_problems(seen: Seen, spec: PolicySpec) -> Iterator[str]:
    """Yield the entries of the training record that do not belong to the policy's cameras and state."""
    known = ", ".join(camera.name for camera in spec.cameras)
    if set(seen.cameras) - {camera.name for camera in spec.cameras}:
        yield f"seen.cameras: a name is not in spec.cameras ({known})"
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
    """Yield the errors in the statistics of a normalisation: std must be at least 0, low at most high."""
    dims = max(map(len, recipe.stats.values()), default=0) // max(recipe.rows, 1)
    if not all(0 <= dim < dims for dim in recipe.snap):
        yield f"snap: expected dimensions below {dims}, got {', '.join(map(str, recipe.snap))}"
    if recipe.mode == "mean_std":
        for i, value in enumerate(recipe.stats.get("std", ())):
            if value < 0:
                yield f"stats.std[{i}]: expected at least 0, got {value}"
    # Upstream's statistics of each step of relative actions are taken as they are; `statistics.notes` tells of them.
    if (pair := PAIRS.get(recipe.mode)) and not recipe.rows:
        low, high = (recipe.stats.get(name, ()) for name in pair)
        for i, (a, b) in enumerate(zip(low, high, strict=False)):
            if a > b:
                yield f"stats.{pair[0]}[{i}]: expected at most {pair[1]}[{i}] = {b}, got {a}"


def _motion_problem(spec: PolicySpec, motion: MotionSpec) -> str:
    """Return the reason why a robot cannot follow a motion, and the next step for the user."""
    state, action = spec.state.dim, spec.action.dim
    if motion.kind != "absolute":
        return (
            f"{motion.kind}: expected different columns of the action, as many of the state, a scale above 0 and a"
            " range that 0 is in"
        )
    if motion != MotionSpec("absolute"):
        got = "columns, a scale or a range"
    else:
        got = f"{state} state numbers and {action} actions"
    count = min(state, action)
    columns = list(range(count)) if count <= MOST_COLUMNS else "[0, ...]"
    example = f'{{"kind": "absolute", "action": {columns}, "state": {columns}}}'
    return (
        f"absolute: expected as many state numbers as actions, and no columns, got {got}. Convert without"
        f" `--motion absolute`, and name the columns when you run the policy, such as the first"
        f" {count}: --motion '{example}'"
    )


def _moves(spec: PolicySpec, motion: MotionSpec) -> bool:
    """Return True if a robot can follow the actions of a specification."""
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
