"""What a bundle says about itself, and how that travels in GGUF metadata.

Structured records are JSON strings under ``sinew.*`` keys: any GGUF tool can show them, and one decoder
checks types and refuses unknown fields. The tokenizer is the whole ``tokenizer.json`` under the key that
the ggml world already uses for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from sinew.bundle.adapter import AdapterBase
from sinew.bundle.hashes import KEY_HEADER, KEY_TENSORS
from sinew.bundle.rules import problems
from sinew.bundle.seen import Seen
from sinew.core import BundleError, PolicySpec
from sinew.core.fields import (
    Finite,
    MaybeWord,
    NotBelowZero,
    Positive,
    Side,
    Width,
    from_builtins,
    parsed,
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
    first_row: int = 0  # of a solution: that of the newest moment, with which the chunk begins
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
    """Hold what ``sinew quantize`` saw before it rounded anything: ``engine`` against eager float32 over
    ``observations`` observations; error: the worst relative L2 of the actions."""

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
    seen: Seen | None = None  # None where nobody gathered it
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
        """Raise :class:`BundleError` where the records, each right in itself, do not say the same."""
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
