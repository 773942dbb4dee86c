"""The vocabulary of robot and server: what goes into a policy, what comes out, and what a policy says of itself.

numpy alone. All rooms of the project speak in these types; its own code takes them from :mod:`sinew.core`.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, Mapping, Sequence

import numpy as np

from sinew_client.errors import ClientError, ObservationError
from sinew_client.solver import FLOW, NoiseLevels, Solver
from sinew_client.untrusted import shown

MOST_TOGETHER = 64  # observations of one message

# ----------------------------------------------------------------------------- specification


@dataclass(frozen=True)
class CameraSpec:
    """One camera slot. ``height`` and ``width`` are those of the training data, in pixels.

    Frames of other sizes are accepted where the policy resizes (``PolicySpec.resizes_frames``).

    Attributes:
        name: What the robot calls it.
        slot: What the checkpoint calls it, where that is another name; clients of its own project may use either.
    """

    name: str
    height: int
    width: int
    slot: str = ""


@dataclass(frozen=True)
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
        if len(names) != len(units):
            raise ValueError(f"units: expected {len(names)}, one for each name, got {len(units)}")
        return tuple(f"{name} [{unit}]" if unit else name for name, unit in zip(names, units))


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


MAX_HISTORY = 16
MAX_HISTORY_STEPS = 1024  # control steps from the oldest moment to the newest, all of which a robot keeps


def history_problem(moments: int, stride: int) -> str:
    """Return what is wrong with so many moments, so many control steps apart; "" where nothing is."""
    if not 1 <= moments <= MAX_HISTORY:
        return f"history: expected 1 to {MAX_HISTORY}, got {moments}"
    if stride < 1 or (moments - 1) * stride > MAX_HISTORY_STEPS:
        most = MAX_HISTORY_STEPS // max(1, moments - 1)
        return f"history_stride: expected 1 to {most} control steps between {moments} moments, got {stride}"
    return ""


@dataclass(frozen=True)
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
    # Coefficient of ACT's temporal ensembling, with which the checkpoint is meant to be executed; None: without
    temporal_ensemble: float | None = None
    noise_rows: int = 0  # where the solver integrates more rows than the chunk has; 0: as many
    solver: Solver = FLOW
    committed_rows: int = (
        0  # most rows of a running chunk that the head was trained to continue; 0: it was not
    )
    motion: MotionSpec | None = None  # None where nothing says it
    history: int = 1  # T, moments that an observation has at most
    history_stride: int = 1  # control steps from one moment to the next
    history_padding: Literal["repeat", "mask"] = "repeat"  # of an episode's start, where there are fewer

    @property
    def views(self) -> int:
        """Return how many frames an observation has: one of each camera for each moment."""
        return self.history * len(self.cameras)

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Return [H, A]: what the solver starts from, and of each further noise that it draws."""
        return (self.noise_rows or self.chunk_size, self.noise_dim)

    def noises(self, solver_steps: int | None = None) -> tuple[int, ...]:
        """Return the shape of an observation's noise: [H, A], or [D, H, A] where a solution draws D of them."""
        draws = self.solver.draws(solver_steps or self.solver_steps)
        return self.noise_shape if draws == 1 else (draws, *self.noise_shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON or msgpack."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Any) -> PolicySpec:
        """Return the specification that :meth:`to_dict` gave, after any wire: what a server says of its policy.

        Keys that this version does not know are passed over: a newer server says more. Raises :class:`ClientError`
        that names the field.
        """
        found: PolicySpec = _built("policy", cls, given)
        for name, value in (("chunk_size", found.chunk_size), ("action.dim", found.action.dim)):
            if value < 1:
                raise ClientError(f"policy.{name}: expected 1 or more, got {value}")
        if problem := history_problem(found.history, found.history_stride):
            raise ClientError(f"policy.{problem}")
        for name in ("n_action_steps", "committed_rows"):
            if not 0 <= getattr(found, name) <= found.chunk_size:
                got = getattr(found, name)
                raise ClientError(f"policy.{name}: expected 0 to {found.chunk_size}, got {got}")
        return found


# ----------------------------------------------------------------------------- observation and action

RTC = ("guided", "no-jacobian", "ramp", "trained")
SCHEDULES = ("exp", "linear", "ones", "zeros")
OTHERS_WORDS = {"task": "prompt", "instruction": "prompt", "language_instruction": "prompt"}
WORDS = ("subtask", "question", "text_only", "text_tokens")  # the fields by which words are asked for


@dataclass(frozen=True)
class Moment:
    """What a robot saw and where it stood at one control step: ``images`` and ``state`` of an :class:`Observation`."""

    images: Mapping[str, np.ndarray]
    state: np.ndarray


@dataclass(frozen=True)
class Observation:
    """One moment of a robot. Raw: no resizing, no tokens, no normalisation on the client's side.

    images: camera name -> uint8 [height, width, 3] RGB (float32 in [0, 1] is accepted too).
    state:  float32 [D] in world units.
    prompt: the instruction. ``tokens`` (int [L]) replaces it for clients that tokenise themselves.
    noise:  float32 [H, noise_dim] start of the solver, or [D, H, noise_dim] where it draws more than that
            (:meth:`PolicySpec.noises`); drawn from ``seed`` when absent.
    time:   when the observation was taken, seconds of the client's clock; echoed, and compared with the server's
            clock only where that was started with ``--max-age``.
    earlier: for a policy that reads T moments (``PolicySpec.history``), the T - 1 before this one, oldest first, each
            ``history_stride`` control steps before the next. There are fewer at the start of an episode. Where
            ``history_padding`` is "repeat", the oldest stands for those before it, and each chunk carries a warning;
            where it is "mask", the policy reads those that there are, and warns where there is none.
    adapter: which of the policy's adapters computes the chunk (docs/sources.md), "" for the base.

    Real-time chunking, where a running chunk is to be continued (docs/guidance.md):
    previous: float32 [R, action_dim] in world units, the rows of the running chunk from this frame on. Row 0
              belongs to this frame; rows past R are not guided.
    delay:    rows that will have been executed when the answer arrives; they are kept as they are.
    horizon:  rows that will be executed before the next request; the guidance ends at min(H - horizon, R).
    rtc:      one of :data:`RTC`; where ``previous`` is given, "trained" for a policy that was trained to continue
              committed rows (it reads ``previous`` and ``delay`` alone), else "guided".
    schedule: one of :data:`SCHEDULES`; "exp".
    beta:     the largest weight of the guidance; 5.

    Words, of a policy that keeps its language head (docs/stream.md):
    subtask:  have it say a subtask of the prompt first, and act on that.
    question: text to be answered in words; there are no actions then, and the prompt is not read.
    text_only: of a subtask the words alone, without actions.
    text_tokens: most tokens of the text; as many as the bundle says if absent.
    Of a policy that was trained with advantages in its prompt (RECAP, docs/guidance.md):
    advantage: one of those that the policy knows, as "positive"; "" for none, the policy's own where it is absent.
    guidance_scale: how far the solution goes from what the prompt without the advantage gives to what it gives with it,
              0 to 100, and beyond (classifier-free guidance); 1, the advantage alone, where it is absent.
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
    earlier: Sequence[Moment] = ()
    subtask: bool = False
    question: str = ""
    text_only: bool = False
    text_tokens: int | None = None
    adapter: str = ""
    advantage: str | None = None
    guidance_scale: float | None = None

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Return all moments, oldest first; the last is the observation's own."""
        return (*self.earlier, Moment(self.images, self.state))

    @property
    def asks(self) -> str:
        """Return the field by which words are asked for; "" where it is actions alone."""
        for name in WORDS:
            value = getattr(self, name)
            if not (value is None or (isinstance(value, (bool, np.bool_, str)) and not value)):
                return name
        return ""

    @property
    def acts(self) -> bool:
        """Return True if actions are asked for."""
        return not (self.question or self.text_only)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Observation:
        """Build from a plain dict; an unknown or missing key is an :class:`ObservationError`."""
        known = {f.name for f in fields(cls)}
        for key in mapping:
            if key not in known:
                ours = OTHERS_WORDS.get(str(key), "")
                raise ObservationError.unknown(key, [ours] if ours else sorted(known), ours)
        for key in ("images", "state"):
            if key not in mapping:
                raise ObservationError(key, "a value", "nothing")
        return cls(**mapping)


@dataclass(frozen=True)
class Timing:
    """Where the milliseconds of one inference went. The stages, preprocess to postprocess, are parts of ``total_ms``.

    An engine that runs all of it as one graph (cuda) has no parts to time: the whole stands in ``step_ms``.
    ``text_ms``: of the words that were said before the actions, or in their place.
    ``reused_views``, ``reused_prefix``: views whose image tokens, and whether what the prefix leaves for the head, were
    kept from an earlier observation of the same bytes and not computed (docs/engines.md).
    ``batch``: how many requests were computed at once; the engine's times are those of all of them.
    """

    preprocess_ms: float = 0.0
    vision_ms: float = 0.0
    prefix_ms: float = 0.0
    step_ms: tuple[float, ...] = ()  # one entry per solver step, or one for everything
    postprocess_ms: float = 0.0
    total_ms: float = 0.0  # the policy: observation to actions
    queue_ms: float = 0.0  # in a server, waiting for earlier requests
    server_ms: float = 0.0  # everything in a server: frame received to reply ready
    batch: int = 1
    text_ms: float = 0.0
    reused_views: int = 0
    reused_prefix: bool = False

    @property
    def head_ms(self) -> float:
        return sum(self.step_ms)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON or msgpack."""
        return asdict(self)


@dataclass(frozen=True)
class ActionChunk:
    """``actions``: float32 [H, D] in world units, first row first.

    seed: reproduces the noise; None where the request carried the noise itself.
    warnings: what the policy had to do without, in sentences.
    context: what a head on the robot needs, where that was asked for; then there are no actions.
    round_trip_ms: of a server's answer, from the call to the decoded reply on the client's clock; else 0.
    text: what the language head said where words were asked for; then there may be no actions, [0, D].
    adapter: the one that computed it, "" for the base.
    deployment: number of the policy that computed it on its server, another one after a hot-swap; 0: not stated.
    """

    actions: np.ndarray
    timing: Timing = field(default_factory=Timing)
    seed: int | None = None
    session: str = ""
    time: float | None = None
    warnings: tuple[str, ...] = ()
    context: bytes = b""
    round_trip_ms: float = 0.0
    text: str = ""
    adapter: str = ""
    deployment: int = 0

    def __repr__(self) -> str:
        beside = [f"{name} {value!r}" for name in ("text", "warnings") if (value := getattr(self, name))]
        rows = f"actions float32 {list(np.shape(self.actions))}"
        return f"<ActionChunk {', '.join([rows, f'{self.timing.total_ms:.1f} ms', f'seed {self.seed}', *beside])}>"


# ----------------------------------------------------------------------------- from a wire

_FORMS: Any = {
    "str": (str, "a text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
}
_MOST = 10_000  # entries of one list or map that a server may send


def _built(path: str, kind: Any, given: Any) -> Any:
    """Return a dataclass of ``kind`` from plain containers. Raises :class:`ClientError` that names the field."""
    if not isinstance(given, Mapping):
        raise ClientError(f"{path}: expected a map, got {shown(given)}")
    found = {}
    for each in fields(kind):
        if each.name in given:
            found[each.name] = _read(f"{path}.{each.name}", str(each.type), given[each.name])
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ClientError(f"{path}.{each.name}: expected a value, got nothing")
    try:
        return kind(**found)
    except ValueError as error:
        raise ClientError(f"{path}: {error}") from error


def _read(path: str, form: str, given: Any) -> Any:
    """Return a value of a field's type, which is written as the classes above write theirs."""
    if form.endswith(" | None"):
        return None if given is None else _read(path, form[: -len(" | None")], given)
    if form in _FORMS:
        types, what = _FORMS[form]
        if not isinstance(given, types) or (isinstance(given, bool) and form != "bool"):
            raise ClientError(f"{path}: expected {what}, got {shown(given)}")
        try:
            return float(given) if form == "float" else given
        except OverflowError:  # a whole number beyond float64
            raise ClientError(f"{path}: expected a number of float64, got {shown(given)}") from None
    if form.startswith("Literal["):
        known = [word.strip(" \"'") for word in form[len("Literal[") : -1].split(",")]
        if given not in known:
            raise ClientError(f"{path}: expected one of {', '.join(known)}, got {shown(given)}")
        return given
    if form.startswith("tuple["):
        inner = form[len("tuple[") : -1]
        if not isinstance(given, (list, tuple)) or len(given) > _MOST:
            raise ClientError(f"{path}: expected a list of at most {_MOST}, got {shown(given)}")
        kinds = (
            [inner[: -len(", ...")]] * len(given) if inner.endswith(", ...") else inner.split(", ")
        )  # a row of numbers has its length written out
        if len(kinds) != len(given):
            raise ClientError(f"{path}: expected a list of {len(kinds)}, got {len(given)}")
        return tuple(_read(f"{path}[{at}]", kinds[at], each) for at, each in enumerate(given))
    if form == "dict[str, str]":
        if not isinstance(given, Mapping) or len(given) > _MOST:
            raise ClientError(f"{path}: expected a map of at most {_MOST} texts, got {shown(given)}")
        for key, value in given.items():
            _read(f"{path}.{shown(key)}", "str", value)
            _read(f"{path}: a key", "str", key)
        return dict(given)
    return _built(path, _KINDS[form], given)


_KINDS = {kind.__name__: kind for kind in (CameraSpec, VectorSpec, KeyMap, MotionSpec, NoiseLevels, Solver)}
