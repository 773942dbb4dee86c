"""The shared vocabulary: what goes into a policy, what comes out, and what can go wrong.

Every room of the project speaks in these types; they need numpy alone, so a wire, a client or a
controller can import them without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from sinew.solvers import FLOW, Solver

# ----------------------------------------------------------------------------- errors


class SinewError(Exception):
    """Base of every error a user can cause or meet. ``code`` is stable and travels on the wires."""

    code = "internal"


class BundleError(SinewError):
    """A bundle file is truncated, corrupted, hostile, or does not fit the code that reads it."""

    code = "bad_bundle"


class ConvertError(SinewError):
    """An upstream checkpoint cannot be turned into a bundle; the message says what to give."""

    code = "bad_checkpoint"


class ObservationError(SinewError):
    """One field of an observation is not what the policy expects."""

    code = "bad_observation"

    def __init__(self, name: str, expected: str, got: str):
        super().__init__(f"{name}: expected {expected}, got {got}")
        self.field, self.expected, self.got = name, expected, got


class RequestError(SinewError):
    """Bytes that are not a request, or a request that asks for something this server cannot do."""

    code = "bad_request"


class BusyError(SinewError):
    """The request queue is full; nothing was computed."""

    code = "busy"


class CancelledError(SinewError):
    """The inference was abandoned between two stages: the server is stopping or the client left."""

    code = "cancelled"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'camera1'?`` where a known name is close, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


DISTRIBUTION = "sinew-vla"  # on package indexes, where the name `sinew` is another project's

# Modules that not every installation has -> the extra of the distribution that brings them.
EXTRAS = {
    "grpc": "lerobot",
    "gymnasium": "sim",
    "huggingface_hub": "hub",
    "matplotlib": "plots",
    "mcap": "mcap",
    "mujoco": "sim",
    "onnx": "onnx-export",
    "onnxruntime": "onnx",
    "onnxscript": "onnx-export",
    "pyarrow": "dataset",
    "ray": "ray",
    "rerun": "rerun",
    "safetensors": "torch",
    "sentencepiece": "sentencepiece",
    "skimage": "photos",
    "tensorstore": "jax",
    "torch": "torch",
    "yaml": "ray",
}


def install(module: str) -> str:
    """Return the command that brings a module: the extra of this distribution, or what it is made of."""
    extra = EXTRAS.get(module.partition(".")[0])
    return (
        f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install --force-reinstall {DISTRIBUTION}"
    )


class MissingPackageError(SinewError):
    """What was asked for needs a package that is not installed; the message says how to get it."""

    code = "missing_package"

    def __init__(self, what: str, module: str, otherwise: str = ""):
        super().__init__(f"{what} needs {module}: {install(module)}{otherwise}")


# ----------------------------------------------------------------------------- precision

# The words of flags, recipes and reports -> torch's names of the types.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# The name, in a model, of a language model's table of tokens, of which only rows are read.
MAX_SIDE = 8192  # pixels of a frame's height or width that is taken from elsewhere
PROMPT_TABLE = "embed_tokens"


def dtype_word(text: str) -> str:
    """Return fp32, bf16, fp16 or native for one of these, or for torch's own name of the type."""
    words = {long: word for word, long in DTYPES.items()}
    if (word := words.get(text, text)) not in (*DTYPES, "native"):
        raise SinewError(f"dtype: expected one of {', '.join(DTYPES)}, native, got {text!r}")
    return word


def upcast_text(kind: str) -> str:
    """Return the name, for reports, of float32 arithmetic on weights of precision ``kind``."""
    return f"fp32 ({kind} weights)"


# ----------------------------------------------------------------------------- specification


@dataclass(frozen=True, slots=True)
class CameraSpec:
    """One camera slot. ``height`` and ``width`` are those of the training data, in pixels.

    Frames of other sizes are accepted where the policy resizes (``PolicySpec.resizes_frames``).
    """

    name: str
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A state or action vector in world units. ``names`` and ``units`` are empty where unknown.

    Units of an action that simulators go by: ``opening`` (a gripper from 0, closed, to 1, open), ``recorded`` (as the
    data set that it was trained on has it), ``axis-angle`` (a rotation that is no Euler angles).
    """

    dim: int
    names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Return "name [unit]" for each number, and its place where it has no name; nothing where neither is known."""
        if not self.names and not self.units:
            return ()
        names = self.names or tuple(map(str, range(self.dim)))
        units = self.units or ("",) * self.dim
        return tuple(f"{name} [{unit}]" if unit else name for name, unit in zip(names, units, strict=True))


@dataclass(frozen=True, slots=True)
class KeyMap:
    """How one kind of client names the parts of an observation on its wire.

    images: wire key -> camera; nested containers are joined with "/". state: wire keys whose values,
    concatenated in order, are the state. ``channels_first``: frames come as [3, height, width].
    unread: keys of frames that such clients send too and the policy does not read; others are refused.
    """

    wire: str  # e.g. "openpi"
    images: dict[str, str]
    state: tuple[str, ...]
    prompt: str = "prompt"
    channels_first: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MotionSpec:
    """States what a policy's actions are measured from, as the robot's settings take it (``sinew_client.control``).

    kind: absolute (targets in the numbers of the state), relative (the columns ``action`` to the numbers ``state`` of
    the state at the chunk's frame) or offsets (those columns from the pose of their own step). scale: what one unit of
    an offset moves the state by. low, high: range of an offset.
    """

    kind: Literal["absolute", "relative", "offsets"]
    action: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    scale: float = 1.0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What a policy reads and writes: enough for a client to build a valid observation."""

    architecture: str
    name: str
    cameras: tuple[CameraSpec, ...]
    state: VectorSpec
    action: VectorSpec
    chunk_size: int  # H, actions per chunk
    noise_dim: int  # width of the noise that starts the solver; 0 where it starts from zeros
    solver_steps: int  # default number of solver steps; 1 for single-pass heads
    max_prompt_tokens: int
    resizes_frames: bool = True
    control_hz: float | None = None
    embodiment: str = ""  # e.g. "droid"; empty where the checkpoint does not say
    keys: tuple[KeyMap, ...] = ()
    default_prompt: str = ""  # used when an observation has none
    n_action_steps: int = 0  # rows that upstream executes before it infers again; 0 where it does not say
    noise_rows: int = 0  # where the solver integrates more rows than the chunk has; 0: as many
    solver: Solver = FLOW
    committed_rows: int = (
        0  # most rows of a running chunk that the head was trained to continue; 0: it was not
    )
    motion: MotionSpec | None = None  # None where nothing says it

    @property
    def noise_shape(self) -> tuple[int, int]:
        return (self.noise_rows or self.chunk_size, self.noise_dim)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON or msgpack."""
        return asdict(self)


# ----------------------------------------------------------------------------- observation and action

RTC = ("guided", "no-jacobian", "ramp", "trained")
SCHEDULES = ("exp", "linear", "ones", "zeros")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One moment of a robot. Raw: no resizing, no tokens, no normalisation on the client's side.

    images: camera name -> uint8 [height, width, 3] RGB (float32 in [0, 1] is accepted too).
    state:  float32 [D] in world units.
    prompt: the instruction. ``tokens`` (int [L]) replaces it for clients that tokenise themselves.
    noise:  float32 [H, noise_dim] start of the solver; drawn from ``seed`` when absent.
    time:   when the observation was taken, seconds of the client's clock; echoed, and compared with the server's
            clock only where that was started with ``--max-age``.

    Real-time chunking, where a running chunk is to be continued (docs/control.md):
    previous: float32 [R, action_dim] in world units, the rows of the running chunk from this frame on. Row 0
              belongs to this frame; rows past R are not guided.
    delay:    rows that will have been executed when the answer arrives; they are kept as they are.
    horizon:  rows that will be executed before the next request; the guidance ends at min(H - horizon, R).
    rtc:      one of :data:`RTC`; where ``previous`` is given, "trained" for a policy that was trained to continue
              committed rows (it reads ``previous`` and ``delay`` alone), else "guided".
    schedule: one of :data:`SCHEDULES`; "exp".
    beta:     the largest weight of the guidance; 5.
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    prompt: str = ""
    tokens: np.ndarray | None = None
    noise: np.ndarray | None = None
    seed: int | None = None
    solver_steps: int | None = None
    session: str = ""
    time: float | None = None
    previous: np.ndarray | None = None
    delay: int | None = None
    horizon: int | None = None
    rtc: str | None = None
    schedule: str | None = None
    beta: float | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Observation:
        """Build from a plain dict; an unknown or missing key is an :class:`ObservationError`."""
        known = {f.name for f in fields(cls)}
        for key in mapping:
            if key not in known:
                raise ObservationError(str(key), f"one of {sorted(known)}", "an unknown key")
        for key in ("images", "state"):
            if key not in mapping:
                raise ObservationError(key, "a value", "nothing")
        return cls(**mapping)


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the milliseconds of one inference went. ``queue_ms`` is filled in by a server.

    An engine that runs all of it as one graph (cuda) has no parts to time: the whole stands in ``step_ms``.
    ``batch``: how many requests were computed at once; the engine's times are those of all of them.
    """

    preprocess_ms: float = 0.0
    vision_ms: float = 0.0
    prefix_ms: float = 0.0
    step_ms: tuple[float, ...] = ()  # one entry per solver step, or one for everything
    postprocess_ms: float = 0.0
    total_ms: float = 0.0
    queue_ms: float = 0.0
    batch: int = 1

    @property
    def head_ms(self) -> float:
        return sum(self.step_ms)


@dataclass(frozen=True, slots=True)
class ActionChunk:
    """``actions``: float32 [H, D] in world units, first row first. ``seed`` reproduces the noise
    (None when the caller gave the noise itself). ``warnings``: what the policy had to do without, in sentences.
    ``context``: what a head on the robot needs, where that was asked for; then there are no actions."""

    actions: np.ndarray
    timing: Timing = field(default_factory=Timing)
    seed: int | None = None
    session: str = ""
    time: float | None = None
    warnings: tuple[str, ...] = ()
    context: bytes = b""
