"""The records of a bundle, their form in GGUF metadata, and the rules that the records must satisfy together.

Structured records are JSON strings under ``sinew.*`` keys. Any GGUF tool can print them. One decoder checks their types
and rejects unknown fields. The tokenizer is the whole ``tokenizer.json``, under the key that other GGUF tools use too.
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

# The components of a policy in quantisation recipes. The head is everything except vision and language.
COMPONENTS = ("vision", "language", "head")
DEFAULT_RECIPE = (
    # The head stays in float32, because its errors would add up over the solver's steps.
    "vision=int8,language=int8,head=fp32"
)
READS = (1, 2, 3)  # this version of Sinew reads bundles of these format versions, and writes the last one
ALIGNMENT = 64  # bytes of a cache line; vector loads are fastest from aligned weights

KEY_ARCHITECTURE = "general.architecture"
KEY_NAME = "general.name"
KEY_VERSION = "sinew.format_version"
KEY_TOKENIZER = "tokenizer.huggingface.json"
# The value of this key is the SHA-256 of the file before the tensors. It is computed while the value is all zeros.
KEY_HEADER = "sinew.header_sha256"
# The value of this key is a JSON table: name of each tensor -> SHA-256 of its bytes.
KEY_TENSORS = "sinew.tensor_sha256"

# The model may read at most this many pixels of all views. Camera frames may have four times as many pixels together.
MAX_PIXELS = 1 << 25
MAX_NOISE = 1 << 22
MOST_COLUMNS = 16  # a message lists at most this many columns of an action
# Key: mode of normalisation. Value: names of the statistics in `Normalization.stats` that the mode needs.
STATISTICS: dict[str, tuple[str, ...]] = {
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
    "identity": (),
}
# The modes of normalisation whose statistics are a lower and an upper bound.
PAIRS = {mode: STATISTICS[mode] for mode in ("min_max", "quantiles", "quantile10")}


@dataclass(frozen=True)
class Normalization:
    """How a vector is converted to model units and back.

    mean_std   (x - mean) / (std + eps)                          inverse: x * std + mean
    min_max    2 (x - min) / (max - min) - 1
    quantiles  2 (x - q01) / (q99 - q01) - 1                     quantile10: q10 and q90
    identity   x

    Attributes:
        mode: The formula, as above.
        stats: Name of each statistic that ``mode`` needs -> its numbers, which are exact float32 values.
        eps: A small number that avoids division by zero.
        convention: "lerobot" computes in float32, omits eps in the inverse of mean_std, and uses eps in place of a
            range only if the range is zero. "openpi" computes in float64 and adds eps everywhere. "gr00t" computes in
            float64 without eps, and gives zero where a range is zero.
        clip: True to clip model units to [-1, 1], after the normalisation of an input and before the inverse of an
            output.
        rows: Number of steps of a chunk that have their own statistics, ``rows * dim`` values, step by step; 0 if all
            steps share the statistics.
        snap: Indices of dimensions, such as a gripper, that are rounded: to 1 if the value is at least ``snap_at``,
            else to 0. This happens after the clip and before the inverse.
        snap_at: The threshold of ``snap``.
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
        """Return True if the model reads zero for every value that did not vary in training."""
        return self.convention == "gr00t"


@dataclass(frozen=True)
class VectorPart:
    """Neighbouring dimensions of a state or action vector that are normalised together, such as one group of
    joints.

    Attributes:
        name: Name of the part; it may be empty.
        dim: Number of dimensions.
        normalization: How the part is normalised.
        sin_cos: True if the model reads the sines and then the cosines of the values instead of normalised
            values.
        rotation: True if the model reads the first two columns of a rotation matrix, six numbers, in place of
            a rotation vector of three numbers.
    """

    name: MaybeWord
    dim: Side
    normalization: Normalization
    sin_cos: bool = False
    rotation: bool = False


@dataclass(frozen=True)
class Processing:
    """How an observation becomes model inputs, and how model outputs become actions.

    Attributes:
        image: Recipe of the camera frames.
        prompt: Recipe of the prompt.
        state: Normalisation of the state.
        action: Normalisation of the actions.
        padded_state_dim: The model reads states that are padded with zeros to this width.
        padded_action_dim: The model produces actions of this width.
        empty_cameras: Number of empty images that followed the camera views in training. A mask hid them from the
            model.
        optional_cameras: Number of further cameras that an observation may omit. This is for projects whose clients
            mask views.
        pad_missing_cameras: True if training replaced a missing camera by an empty image that a mask hid from the model
            (pi0).
        all_cameras: True if an observation must contain every camera.
        state_steps: Steps before the state is normalised.
        action_steps: Steps after the actions are converted back to robot units.
        state_parts: Parts of the state with different normalisations, in place of ``state``.
        action_parts: Parts of an action with different normalisations, in place of ``action``.
        first_row: Row of the model's output at which the chunk begins. This row is the action for the newest
            observation.
        compat: Version of the training project whose behaviour Sinew follows, if its versions behave differently.
    """

    image: ImageRecipe
    prompt: PromptRecipe
    state: Normalization
    action: Normalization
    padded_state_dim: Width
    padded_action_dim: Side
    empty_cameras: Annotated[int, within(0, 16)] = 0
    optional_cameras: int = 0
    pad_missing_cameras: bool = False
    all_cameras: bool = False
    state_steps: tuple[VectorStep, ...] = ()
    action_steps: tuple[VectorStep, ...] = ()
    state_parts: tuple[VectorPart, ...] = ()
    action_parts: tuple[VectorPart, ...] = ()
    first_row: int = 0
    compat: str = ""


@dataclass(frozen=True)
class SourceFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """The origin of a bundle: from which files, by which program and with which options it was made.

    Attributes:
        format: Format of the checkpoint, e.g. "lerobot-smolvla" or "vla.cpp-gguf".
        converter: Program that wrote the bundle, e.g. "sinew 0.1.0".
        sources: The checkpoint's files.
        dropped: Tensors of the checkpoint that inference never reads.
        notes: Notes of the conversion.
        options: The options that the user passed to `sinew convert`.
    """

    format: str
    converter: str
    sources: tuple[SourceFile, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Success:
    """The success rates of a quantised policy and of the unquantised policy, in the same simulated episodes.

    Attributes:
        env: The environment, which is a simulated task.
        episodes: Number of episodes.
        wins: Episodes in which the quantised policy solved the task.
        recorded_wins: Episodes with the same seeds in which the unquantised policy solved the task.
    """

    env: str
    episodes: int
    wins: int
    recorded_wins: int


@dataclass(frozen=True)
class Validated:
    """The result of the check that ``sinew quantize`` does before it rounds the weights. The check compares the
    actions of ``engine`` with the actions of the reference, eager float32.

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
    """The decisions and measurements of ``sinew quantize``. An engine that cannot follow the recipe rejects the bundle.

    Attributes:
        recipe: Component (:data:`COMPONENTS`) -> precision. "q8_0", "q4_0" or "int8": the weights are stored so, and
            the cpu engine computes with them. "int8" (one scale per tensor of activations) or "int8-rows" (one scale
            per row, stored as int8) also apply to ONNX Runtime. "fp8" (e4m3) applies to the CUDA engine. "fp32" is the
            engine's own precision.
        bits: Bits of the weights in ONNX graphs. It is 7 if sums of 8-bit products could exceed 16 bits on this CPU.
        error: Median relative L2 error of the chunk against float32.
        error_max: Largest relative L2 error of the chunk.
        observations: Number of observations for both errors.
        source: Source of the observations.
        engine: Engine that computed both errors.
        scales: Name of an FP8 layer -> scale of its input.
        weight_error: Top-level module -> relative L2 error of its stored weights.
        success: Success rates before and after the quantisation; None if they were not measured.
        validated: Validation of the bundle before quantisation.
        calibrated: Number of observations whose inputs were used to round q4_0 weights or to choose the activations'
            scales; 0 if none were used.
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
        """Return the components whose precision is FP8."""
        return tuple(name for name, precision in self.recipe.items() if precision == "fp8")


# A thumbnail is small on purpose. It shows where a camera is, which way up, and the order of its colours, and it is too
# small to show people or objects in the room.
SIDE = 8  # a thumbnail has this many rows and columns
CELLS = SIDE * SIDE * 3
MAX_SOURCE = 256  # the text of `Seen.source` may have at most this many characters
Colour = Annotated[float, Must("a number from 0 to 255", lambda value: 0 <= value <= 255)]


def cells(text: str) -> bytes:
    """Decode the base64 text of a thumbnail (a tiny mean picture of a camera) to its bytes.

    Raises:
        ValueError: The text is not a thumbnail.
    """
    if len(text) > 2 * CELLS:
        raise ValueError(f"{len(text)} characters, expected at most {2 * CELLS}")
    try:
        thumbnail = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64 ({error})") from None
    if len(thumbnail) != CELLS:
        raise ValueError(f"{len(thumbnail)} bytes, expected {CELLS}")
    return thumbnail


def _no_thumbnail(text: str) -> str:
    """Return the reason why a text is not a thumbnail; "" if it is a thumbnail or empty."""
    try:
        return "" if not text or cells(text) else "nothing"
    except ValueError as error:
        return str(error)


Thumbnail = Annotated[
    str, Must(f"base64 of {CELLS} bytes", lambda text: not _no_thumbnail(text), _no_thumbnail)
]


@dataclass(frozen=True)
class SeenCamera:
    """Statistics of one camera over all training frames.

    Attributes:
        mean: Mean of the pixels, RGB, 0 to 255.
        std: Standard deviation of the pixels, RGB.
        thumbnail: base64 of uint8 [8, 8, 3], the mean of each cell over the frames, RGB; "" if it is not known.
        spread: base64 of uint8 [8, 8, 3], the standard deviation of each cell over the frames; "" if it is not known.
            The three channels are lightness, red minus blue, and green minus the mean of red and blue.
        farthest: Largest distance of a frame from the mean, in units of the spread
            (:func:`sinew.checks.wiring.thumbnails.distance`).
        still: Longest run of identical frames; 0 if it is not known. A simulator repeats frames. The noise of a real
            camera makes every frame different.
    """

    mean: tuple[Colour, Colour, Colour]
    std: tuple[Colour, Colour, Colour]
    thumbnail: Thumbnail = ""
    spread: Thumbnail = ""
    farthest: NotBelowZero = 0.0
    still: int = 0

    def problems(self) -> Iterator[str]:
        """Yield an error if the record has only a thumbnail or only its spread. Each of the two needs the
        other.
        """
        if bool(self.thumbnail) != bool(self.spread):
            yield f"{'thumbnail' if self.spread else 'spread'}: expected both thumbnail and spread, or neither, got ''"


@dataclass(frozen=True)
class SeenState:
    """Statistics of the robot's state in the training data. Each field has one number per state dimension, in
    robot units.
    """

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
    """A record of the cameras and joints in the training data. `sinew doctor` uses it to find a wrongly wired robot.

    Attributes:
        source: Description of the frames.
        frames: Number of frames.
        cameras: Name of the bundle's camera -> its statistics.
        state: Statistics of the state; None if they are not known.
    """

    source: Annotated[str, printable(0, MAX_SOURCE)]
    frames: Annotated[int, within(1, 1 << 53)]
    cameras: dict[str, SeenCamera] = field(default_factory=dict)
    state: SeenState | None = None

    def problems(self) -> Iterator[str]:
        """Yield an error for a run of identical frames that is longer than all frames together."""
        for name, camera in self.cameras.items():
            if not 0 <= camera.still <= self.frames:
                yield f"cameras.{named(name)}.still: expected 0 to {self.frames}, got {camera.still}"


@dataclass(frozen=True)
class AdapterBase:
    """The identity of an adapter's base.

    Attributes:
        name: Name of the base, for messages.
        weights: Hash of the base's weights (:func:`sinew.bundle.adapter.weights_hash`).
        tokenizer: SHA-256 of the base's tokenizer text.
    """

    name: str
    weights: str
    tokenizer: str


@dataclass(frozen=True)
class Manifest:
    """All of a bundle except its tensors.

    Attributes:
        architecture: Name of the architecture.
        name: Name of the policy.
        config: The architecture's own record, not yet decoded.
        spec: Inputs and outputs of the policy.
        processing: Pre- and post-processing.
        provenance: Origin of the bundle.
        tokenizer: The content of tokenizer.json; "" for an adapter, which uses its base's tokenizer.
        precision: Top-level component of the model -> storage type of its weights, e.g. "BF16".
        quantization: Record of `sinew quantize`; None if the policy is not quantised.
        seen: Record of the training data; None if it was not gathered.
        base: Identity of the base if the file is an adapter; None for a whole policy.
    """

    architecture: str
    name: str
    config: dict[str, Any]
    spec: PolicySpec
    processing: Processing
    provenance: Provenance
    tokenizer: str
    precision: dict[str, str] = field(default_factory=dict)
    quantization: Quantization | None = None
    seen: Seen | None = None
    base: AdapterBase | None = None

    def to_metadata(self) -> dict[str, str | int]:
        """Return the GGUF key-value pairs. The writer adds ``general.architecture`` and the alignment."""
        parts = {part: getattr(self, part) for part in (*_PARTS, *_OPTIONAL)}
        record: dict[str, str | int] = {
            KEY_NAME: self.name,
            KEY_VERSION: READS[-1],
            **{f"sinew.{part}": to_json(value) for part, value in parts.items() if value is not None},
        }
        return record if self.base is not None else {**record, KEY_TOKENIZER: self.tokenizer}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Manifest:
        """Decode and check the metadata of a bundle.

        Raises:
            BundleError: The metadata is not valid. The message names the key and the field.
        """
        version = metadata.get(KEY_VERSION)
        if version is None:
            architecture = metadata.get(KEY_ARCHITECTURE, "unknown")
            raise BundleError(
                f"this GGUF file (architecture {architecture!r}) is not a Sinew bundle: it has no {KEY_VERSION};"
                " import it with `sinew convert`"
            )
        if version not in READS:
            raise BundleError(
                f"bundle format {version} is not supported (this version reads {READS[0]} to {READS[-1]}); install a"
                " newer version of Sinew"
            )
        keys = {f"sinew.{part}" for part in (*_PARTS, *_OPTIONAL)}
        keys |= {KEY_VERSION, KEY_TOKENIZER, KEY_HEADER, KEY_TENSORS}
        if unknown := [key for key in metadata if key not in keys and not key.startswith("general.")]:
            raise BundleError(
                f"unknown key {unknown[0]!r}: the file is damaged, or a newer version of Sinew wrote it; convert the"
                " checkpoint again"
            )
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
        """Raise :class:`BundleError` for a value that its field does not allow, such as a bad value from a checkpoint,
        and for records that contradict each other (:meth:`check_agreement`)."""
        import msgspec

        for part, kind in (_PARTS | _OPTIONAL).items():
            if (value := getattr(self, part)) is not None:
                from_builtins(msgspec.to_builtins(value), kind, f"sinew.{part}")
        self.check_agreement()

    def check_agreement(self) -> None:
        """Raise :class:`BundleError` if records contradict each other."""
        for problem in problems(self):
            raise BundleError(f"sinew.{problem}")


# Key: name of a record of a manifest. Value: its type. _PARTS has the required records, _OPTIONAL the others.
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
            f"{key}: expected a string, got {'nothing' if value is None else type(value).__name__}; convert the bundle"
            " again"
        )
    return value


def problems(manifest: Manifest) -> Iterator[str]:
    """Yield an error for each contradiction between the records of a manifest."""
    spec, processing = manifest.spec, manifest.processing
    if len(manifest.name) > MAX_NAME or not manifest.name.isprintable():
        yield f"name: expected at most {MAX_NAME} printable characters, got {shown(manifest.name)}"
    yield from _spec_problems(spec, processing)
    yield from _processing_problems(spec, processing)
    for where, recipe, what in normalizations(processing):
        if what == "state" and recipe.rows:
            yield (
                f"{where}.rows: expected 0, because only actions have statistics for each step of a chunk, got"
                f" {recipe.rows}"
            )
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
            "processing.first_row: expected a row of the solution that is followed by a whole chunk, got"
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
        for labels in (vector.names, vector.units):
            if len(labels) not in (0, vector.dim):
                got = f"{len(labels)} for {vector.dim}"
                yield f"spec.{name}: expected one name and one unit for each value of a vector, or none, got {got}"
    for keys in spec.keys:
        for camera in keys.images.values():
            if camera not in names:
                yield f"spec.keys: an image key names a camera that does not exist, got {shown(camera)}"


def _processing_problems(spec: PolicySpec, processing: Processing) -> Iterator[str]:
    state, action, image = spec.state.dim, spec.action.dim, processing.image
    if not 0 <= spec.states_read * state <= processing.padded_state_dim:
        yield f"spec.state does not fit processing.padded_state_dim {processing.padded_state_dim}, got {state}"
    if processing.padded_state_dim % spec.states_read:
        yield (
            f"processing.padded_state_dim: expected a multiple of the {spec.states_read} observation steps of"
            f" spec.history, got {processing.padded_state_dim}"
        )
    if not 1 <= action <= processing.padded_action_dim:
        yield f"spec.action does not fit processing.padded_action_dim {processing.padded_action_dim}, got {action}"
    for name, steps, parts, dim in (
        ("state", processing.state_steps, processing.state_parts, state),
        ("action", processing.action_steps, processing.action_parts, action),
    ):
        for step in steps:
            if step.reads and name == "state":
                yield f"processing.state_steps: expected steps that do not read another state, got {step.kind}"
            if not all(0 <= d < dim for d in step.dims) or not all(0 <= d < state for d in step.reads):
                yield (
                    f"processing.{name}_steps: expected dims inside the vector ({dim} numbers), got other dims in the"
                    f" step {step.kind}"
                )
        if parts and (total := sum(part.dim for part in parts)) != dim:
            yield (
                f"processing.{name}_parts: expected parts with {dim} numbers in all, like spec.{name}, got {total}"
            )
        for part in parts:
            if part.rotation and (part.dim != 3 or part.sin_cos):
                yield (
                    "processing: expected a rotation part with 3 numbers and without sin_cos, got"
                    f" {part.dim} numbers in {part.name}, sin_cos {part.sin_cos}"
                )
    if not 0 <= processing.optional_cameras < len(spec.cameras):
        yield (
            f"processing.optional_cameras: expected fewer than the policy's {len(spec.cameras)} cameras, got"
            f" {processing.optional_cameras}"
        )
    if len(image.cameras) not in (0, len(spec.cameras)):
        yield f"processing.image.cameras: expected one entry for each camera, or none, got {len(image.cameras)}"
    if len(image.sizes) not in (0, len(spec.cameras)):
        yield f"processing.image.sizes: expected one size for each camera, or none, got {len(image.sizes)}"
    # Each size may be plausible, while all views together need too much memory.
    if (read := (spec.views + processing.empty_cameras) * image.height * image.width) > MAX_PIXELS:
        yield f"processing.image: expected at most {MAX_PIXELS} pixels of all views, got {read}"
    if (frames := sum(camera.height * camera.width for camera in spec.cameras)) > 4 * MAX_PIXELS:
        yield f"spec.cameras: expected at most {4 * MAX_PIXELS} pixels of all frames, got {frames}"


def seen_problems(seen: Seen, spec: PolicySpec) -> Iterator[str]:
    """Yield an error for each entry of the training record that does not fit the policy's cameras and state."""
    names = ", ".join(camera.name for camera in spec.cameras)
    if set(seen.cameras) - {camera.name for camera in spec.cameras}:
        yield f"seen.cameras: a name is not in spec.cameras ({names})"
    rows = () if seen.state is None else (seen.state.mean, seen.state.std, seen.state.low, seen.state.high)
    if any(len(row) != spec.state.dim for row in rows):
        yield f"seen.state: expected {spec.state.dim} numbers each, got {', '.join(str(len(row)) for row in rows)}"


def normalizations(processing: Processing) -> Iterator[tuple[str, Normalization, str]]:
    """Yield (name in the record, recipe, "state" or "action") for every normalisation that the policy uses.

    The name is the field of :class:`Processing`, such as "processing.action".
    """
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
    """Yield the errors in the statistics of a normalisation: a standard deviation must be at least 0, and a lower bound
    must be at most its upper bound."""
    dims = max(map(len, recipe.stats.values()), default=0) // max(recipe.rows, 1)
    if not all(0 <= dim < dims for dim in recipe.snap):
        yield f"snap: expected dimensions below {dims}, got {', '.join(map(str, recipe.snap))}"
    if recipe.mode == "mean_std":
        for i, value in enumerate(recipe.stats.get("std", ())):
            if value < 0:
                yield f"stats.std[{i}]: expected at least 0, got {value}"
    # Per-step statistics of relative actions are accepted unchecked, as upstream does. `statistics.notes` reports them.
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
    """Return True if a robot can follow the actions of a specification with this motion (the reference of the
    actions, such as absolute).
    """
    if motion.kind == "absolute":
        return motion == MotionSpec("absolute") and spec.action.dim == spec.state.dim
    columns = ((motion.action, spec.action.dim), (motion.state, spec.state.dim))
    low = -math.inf if motion.low is None else motion.low
    high = math.inf if motion.high is None else motion.high
    plain = motion.scale == 1.0 and motion.low is None and motion.high is None
    return (
        0 < len(motion.action) == len(motion.state)
        and all(len(set(dims)) == len(dims) and all(0 <= i < dim for i in dims) for dims, dim in columns)
        and (plain if motion.kind == "relative" else 0 < motion.scale < math.inf and low < 0 < high)
    )
