"""The types that a robot and a policy exchange: observations, action chunks, and the specification of a policy.

The module needs only numpy. The package ``sinew`` imports these types from :mod:`sinew.core`.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, Mapping, Sequence

import numpy as np

from sinew_client.errors import ClientError, ObservationError
from sinew_client.solver import FLOW, NoiseLevels, Solver
from sinew_client.untrusted import shown

MOST_TOGETHER = 64  # largest number of observations in one request


@dataclass(frozen=True)
class CameraSpec:
    """One camera of a policy.

    A robot may send frames of another size if the policy resizes frames (``PolicySpec.resizes_frames``).

    Attributes:
        name: Name of the camera in observations.
        height: Height of the training frames, pixels.
        width: Width of the training frames, pixels.
        slot: Name of the camera in the checkpoint; "" if it is the same as ``name``. Clients of the checkpoint's own
            project may use either name.
    """

    name: str
    height: int
    width: int
    slot: str = ""


@dataclass(frozen=True)
class VectorSpec:
    """A state or action vector in robot units.

    Attributes:
        dim: Number of values in the vector.
        names: Name of each value; () if unknown.
        units: Unit of each value; () if unknown. In addition to units such as "rad", simulators use three units of
            actions: ``opening`` (a gripper, 0 is closed and 1 is open), ``recorded`` (as in the training data), and
            ``axis-angle`` (a rotation vector, not Euler angles).
    """

    dim: int
    names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Label of each value for a table or a plot, such as "elbow [rad]"; () if names and units are unknown.

        If the names are unknown, a label has the index of the value.
        """
        if not self.names and not self.units:
            return ()
        names = self.names or tuple(map(str, range(self.dim)))
        units = self.units or ("",) * self.dim
        if len(names) != len(units):
            raise ValueError(f"units: expected {len(names)} units, one for each name, got {len(units)}")
        return tuple(f"{name} [{unit}]" if unit else name for name, unit in zip(names, units))


@dataclass(frozen=True)
class KeyMap:
    """The keys that clients of another protocol use for the parts of an observation.

    Attributes:
        wire: Name of the protocol, such as "openpi".
        images: For each key of a frame, the camera of the policy. The keys of nested maps are joined with "/".
        state: Keys whose values are concatenated, in this order, into the state.
        prompt: Key of the instruction.
        channels_first: True if frames have the shape [3, height, width].
        unread: Keys of frames that these clients send but the policy does not use. All other unknown keys are rejected.
    """

    wire: str
    images: dict[str, str]
    state: tuple[str, ...]
    prompt: str = "prompt"
    channels_first: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class MotionSpec:
    """What a policy's actions are relative to. ``Settings.motion`` of the control loop has the same form.

    Attributes:
        kind: "absolute": actions are targets in the units of the state. "relative": the values ``action`` of an action
            are relative to the values ``state`` of the state at the chunk's observation. "offsets": these values are
            relative to the pose in their own step (delta actions).
        action: Indices of values in an action.
        state: Index of the corresponding value in the state, for each of them.
        scale: Change of the state by one unit of a delta action.
        low: Smallest delta action; None for no limit.
        high: Largest delta action; None for no limit.
    """

    kind: Literal["absolute", "relative", "offsets"]
    action: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    scale: float = 1.0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RealTimeChunking:
    """The settings of real-time chunking for which a checkpoint was made (LeRobot's ``rtc_config``).

    Attributes:
        execution_horizon: Number of actions of a running chunk that guide the next chunk.
        schedule: Shape of the weights of these actions, one of :data:`SCHEDULES`.
        max_guidance_weight: The largest weight.
        mode: "guided", or "trained" if the policy was trained to continue the actions of a running chunk.
    """

    execution_horizon: int
    schedule: str
    max_guidance_weight: float
    mode: Literal["guided", "trained"] = "guided"


MAX_HISTORY = 16  # largest number of observation steps in an observation with a history
MAX_HISTORY_STEPS = 1024  # largest number of control steps between the oldest and the newest observation


def history_problem(moments: int, stride: int) -> str:
    """Check the size of an observation history.

    Args:
        moments: Number of observation steps (T).
        stride: Number of control steps from one observation step to the next.

    Returns:
        The error text; "" if the numbers are valid.
    """
    if not 1 <= moments <= MAX_HISTORY:
        return f"history: expected 1 to {MAX_HISTORY}, got {moments}"
    if stride < 1 or (moments - 1) * stride > MAX_HISTORY_STEPS:
        most = MAX_HISTORY_STEPS // max(1, moments - 1)
        return f"history_stride: expected 1 to {most} control steps between {moments} observation steps, got {stride}"
    return ""


@dataclass(frozen=True)
class PolicySpec:
    """The inputs and outputs of a policy: everything that a client needs to build a valid observation.

    Attributes:
        architecture: Name of the model family, such as "smolvla".
        name: Name of this policy.
        cameras: The cameras that an observation has.
        state: The state vector.
        action: The action vector.
        chunk_size: Number of actions per chunk (H).
        noise_dim: Width of the noise that starts the solver; 0 if the solver starts from zeros.
        solver_steps: Default number of solver steps; 1 for heads with a single pass.
        max_prompt_tokens: Largest number of tokens in a prompt.
        resizes_frames: True if frames may have any size.
        control_hz: Rate of the actions, Hz; None if the checkpoint does not state it.
        embodiment: Name of the robot, such as "droid"; "" if the checkpoint does not state it.
        keys: The keys that clients of other protocols use.
        default_prompt: Instruction for observations without an instruction.
        n_action_steps: Number of actions that the training project executes before the next inference; 0 if not stated.
        temporal_ensemble: Coefficient of ACT's temporal ensembling, if the policy should run with it; else None.
        real_time_chunking: Settings of real-time chunking, if the policy should run with it; else None.
        noise_rows: Number of rows of the noise, if it is larger than the number of actions; 0 means ``chunk_size``.
        solver: The method by which the action head computes actions.
        committed_rows: Longest action prefix that the action head was trained to continue (real-time chunking); 0
            without such training.
        motion: What actions are relative to; None if unknown.
        history: Largest number of observation steps in one observation (T).
        history_stride: Number of control steps between two observation steps.
        history_padding: Content of missing observation steps at the start of an episode: "repeat" (the oldest step
            again) or "mask".
        history_states: True if the policy reads the state of each observation step. False if it reads only the newest
            state.

    Example:
        >>> spec = client.spec
        >>> [camera.name for camera in spec.cameras], spec.state.dim
        (['front', 'wrist'], 6)
    """

    architecture: str
    name: str
    cameras: tuple[CameraSpec, ...]
    state: VectorSpec
    action: VectorSpec
    chunk_size: int
    noise_dim: int
    solver_steps: int
    max_prompt_tokens: int
    resizes_frames: bool = True
    control_hz: float | None = None
    embodiment: str = ""
    keys: tuple[KeyMap, ...] = ()
    default_prompt: str = ""
    n_action_steps: int = 0
    temporal_ensemble: float | None = None
    real_time_chunking: RealTimeChunking | None = None
    noise_rows: int = 0
    solver: Solver = FLOW
    committed_rows: int = 0
    motion: MotionSpec | None = None
    history: int = 1
    history_stride: int = 1
    history_padding: Literal["repeat", "mask"] = "repeat"
    history_states: bool = True

    @property
    def states_read(self) -> int:
        """Number of observation steps whose state the policy reads."""
        return self.history if self.history_states else 1

    @property
    def views(self) -> int:
        """Number of frames in an observation: one frame per camera and observation step."""
        return self.history * len(self.cameras)

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape [H, A] of each noise that the solver uses."""
        return (self.noise_rows or self.chunk_size, self.noise_dim)

    def noises(self, solver_steps: int | None = None) -> tuple[int, ...]:
        """Return the shape that the field ``noise`` of an observation must have.

        Args:
            solver_steps: Number of solver steps; None for the policy's default.

        Returns:
            (H, A), or (D, H, A) if the solver uses D noises.
        """
        draws = self.solver.draws(solver_steps or self.solver_steps)
        return self.noise_shape if draws == 1 else (draws, *self.noise_shape)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON or msgpack."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Any) -> PolicySpec:
        """Build a specification from plain values, as a server sends them.

        Args:
            given: The output of :meth:`to_dict`. Unknown keys are ignored, so that newer servers work.

        Returns:
            The specification.

        Raises:
            ClientError: A field is missing or has a wrong value. The message names it.
        """
        spec: PolicySpec = _built("policy", cls, given)
        for name, value in (("chunk_size", spec.chunk_size), ("action.dim", spec.action.dim)):
            if value < 1:
                raise ClientError(f"policy.{name}: expected 1 or more, got {value}")
        if problem := history_problem(spec.history, spec.history_stride):
            raise ClientError(f"policy.{problem}")
        for name in ("n_action_steps", "committed_rows"):
            if not 0 <= getattr(spec, name) <= spec.chunk_size:
                got = getattr(spec, name)
                raise ClientError(f"policy.{name}: expected 0 to {spec.chunk_size}, got {got}")
        return spec


RTC = ("guided", "no-jacobian", "ramp", "trained")
SCHEDULES = ("exp", "linear", "ones", "zeros")
OTHERS_WORDS = {"task": "prompt", "instruction": "prompt", "language_instruction": "prompt"}


@dataclass(frozen=True)
class ContinuationRequest:
    """The actions that a new chunk continues (real-time chunking). :class:`Observation` has the same fields, flat."""

    previous: np.ndarray | None = None
    delay: int | None = None
    horizon: int | None = None
    rtc: str | None = None
    schedule: str | None = None
    beta: float | None = None


CONTINUATION = tuple(each.name for each in fields(ContinuationRequest))
WORDS = ("subtask", "question", "text_only", "text_tokens")  # fields that request text from the language head
# Fields that the policy uses as extra conditions when it computes the chunk.
CONDITIONS = ("advantage", "guidance_scale")


@dataclass(frozen=True)
class Moment:
    """The frames and the state of one earlier observation step.

    Attributes:
        images: Frame of each camera, as in :class:`Observation`.
        state: float32 [D] in robot units.
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray


@dataclass(frozen=True)
class Observation:
    """One unprocessed observation of a robot. The policy resizes, tokenises and normalises it, and clients do not.

    Attributes:
        images: Frame of each camera by its name, uint8 [height, width, 3] RGB, or float32 in [0, 1].
        state: float32 [D] in robot units.
        prompt: The instruction.
        tokens: int [L], the tokens of the instruction in place of ``prompt``, for clients that tokenise themselves.
        noise: Noise of the solver, float32 [H, noise_dim], or [D, H, noise_dim] if the solver uses D noises
            (:meth:`PolicySpec.noises`). None draws the noise from ``seed``.
        seed: Seed of the noise; None lets the policy choose one.
        solver_steps: Number of solver steps; None for the policy's default.
        session: Name of the robot or episode. A newer request replaces a waiting request of the same session.
        time: Time of the observation, seconds on the client's clock. The server returns it in the chunk. The server
            compares it with its own clock only if it was started with ``--max-age``.
        previous: Real-time chunking: the actions of the running chunk from this observation on,
            float32 [R, action_dim] in robot units. Action 0 belongs to this observation. Actions after R are not
            guided.
        delay: Real-time chunking: number of actions of ``previous`` that will have been executed when the answer
            arrives. The new chunk begins with exactly these actions.
        horizon: Real-time chunking: number of actions that will be executed before the next request. The guidance ends
            at min(H - horizon, R).
        rtc: Real-time chunking: one of :data:`RTC`. With ``previous``, None is "trained" for a policy that was
            trained to continue an action prefix (it reads only ``previous`` and ``delay``), else "guided".
        schedule: Real-time chunking: one of :data:`SCHEDULES`; None is "exp".
        beta: Real-time chunking: largest weight of the guidance; None is 5.
        earlier: For a policy with a history of T steps (``PolicySpec.history``): the T - 1 observation steps before
            this observation, oldest first, ``history_stride`` control steps apart. At the start of an episode, there
            are fewer steps. With ``history_padding`` "repeat", the oldest step is repeated, and the chunk has a
            warning. With "mask", the policy reads only the existing steps, and warns if there are none.
        subtask: True lets the language head first generate a subtask of the prompt. The actions then follow the
            subtask (the page "Streams: react between two frames").
        question: Question for the language head. The answer is text without actions, and the prompt is not read.
        text_only: With ``subtask``: True generates only the text, without actions.
        text_tokens: Largest number of text tokens; None takes the bundle's number.
        adapter: Name of the adapter (LoRA) that computes the chunk; "" takes the base policy.
        advantage: Advantage label for a policy that was trained with such labels (RECAP), such as
            "positive". "" sends no label, None takes the policy's default.
        guidance_scale: Classifier-free guidance between the prompt without the advantage (0) and the prompt with it
            (1). At most 100; None is 1.

    Example:
        >>> observation = Observation({"front": frame}, state, prompt="stack the cups")
        >>> chunk = policy.infer(observation)
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
        """All observation steps, oldest first. The last step is this observation itself."""
        return (*self.earlier, Moment(self.images, self.state))

    @property
    def continuation(self) -> ContinuationRequest | None:
        """The actions to continue; None if no field of real-time chunking is set."""
        values = [getattr(self, name) for name in CONTINUATION]
        return None if all(value is None for value in values) else ContinuationRequest(*values)

    @property
    def asks(self) -> str:
        """Name of the field that requests text; "" if only actions are requested."""
        for name in WORDS:
            value = getattr(self, name)
            if not (value is None or (isinstance(value, (bool, np.bool_, str)) and not value)):
                return name
        return ""

    @property
    def acts(self) -> bool:
        """True if actions are requested."""
        return not (self.question or self.text_only)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Observation:
        """Build an observation from a plain dict.

        Args:
            mapping: The fields by name. "images" and "state" are required.

        Returns:
            The observation. The values are not checked.

        Raises:
            ObservationError: A key is unknown or missing.
        """
        names = {f.name for f in fields(cls)}
        for key in mapping:
            if key not in names:
                ours = OTHERS_WORDS.get(str(key), "")
                raise ObservationError.unknown(key, [ours] if ours else sorted(names), ours)
        for key in ("images", "state"):
            if key not in mapping:
                raise ObservationError(key, "a value", "nothing")
        return cls(**mapping)


@dataclass(frozen=True)
class Timing:
    """Times of one inference, in milliseconds. ``total_ms`` includes all stages from preprocess to postprocess.

    Attributes:
        preprocess_ms: Time to check, tokenise, normalise and resize the inputs.
        vision_ms: Time of the vision encoder.
        prefix_ms: Time to compute the context of the language model.
        step_ms: Time of each solver step. An engine that runs all steps as one graph (cuda) has a single entry.
        postprocess_ms: Time to convert the actions to robot units.
        total_ms: Time of the policy, from observation to actions.
        queue_ms: In a server: time that the request waited for earlier requests.
        server_ms: In a server: time from the received message to the reply.
        batch: Number of requests in the batch. The times of the stages are the times of the whole batch.
        text_ms: Time of text generation, before the actions or in place of them.
        reused_views: Number of views whose image tokens were reused from an earlier observation with the same bytes
            (the page "Engines").
        reused_prefix: True if the computed context of the language model was reused as well.
    """

    preprocess_ms: float = 0.0
    vision_ms: float = 0.0
    prefix_ms: float = 0.0
    step_ms: tuple[float, ...] = ()
    postprocess_ms: float = 0.0
    total_ms: float = 0.0
    queue_ms: float = 0.0
    server_ms: float = 0.0
    batch: int = 1
    text_ms: float = 0.0
    reused_views: int = 0
    reused_prefix: bool = False

    @property
    def head_ms(self) -> float:
        """Time of the action head: the sum over all solver steps."""
        return sum(self.step_ms)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON or msgpack."""
        return asdict(self)


@dataclass(frozen=True)
class ActionChunk:
    """The actions that a policy computed for one observation.

    Attributes:
        actions: float32 [H, D] in robot units, first action first. [0, D] if only text was requested.
        timing: Times of the inference.
        seed: Seed that reproduces the noise; None if the request contained the noise itself.
        session: Session of the observation.
        time: Time of the observation.
        warnings: One sentence for each input that the policy expected but did not get.
        context: Context for an action head on the robot (split inference), if it was requested. The chunk then has no
            actions.
        round_trip_ms: Time from the call to the decoded reply, on the client's clock, ms. 0 without a server.
        text: Text of the language head, if it was requested.
        adapter: Adapter that computed the chunk; "" for the base policy.
        deployment: Number of the policy on its server, which changes with a hot-swap. 0 if the server states no number.
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


_FORMS: Any = {
    "str": (str, "a text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
}
_MOST = 10_000  # a list or map from a server may have at most this many entries


def _built(path: str, kind: Any, given: Any) -> Any:
    """Build a dataclass of type ``kind`` from a mapping.

    Args:
        path: Name of the value in error messages, such as "policy.state".
        kind: The dataclass.
        given: The fields by name.

    Returns:
        The instance.

    Raises:
        ClientError: A field is missing or has a wrong value. The message names the field.
    """
    if not isinstance(given, Mapping):
        raise ClientError(f"{path}: expected a map, got {shown(given)}")
    values = {}
    for each in fields(kind):
        if each.name in given:
            values[each.name] = _read(f"{path}.{each.name}", str(each.type), given[each.name])
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ClientError(f"{path}.{each.name}: expected a value, got nothing")
    try:
        return kind(**values)
    except ValueError as error:
        raise ClientError(f"{path}: {error}") from error


def _read(path: str, form: str, given: Any) -> Any:
    """Check a value against the annotated type of a field.

    Args:
        path: Name of the field in error messages.
        form: The annotation, such as "int" or "tuple[str, ...]".
        given: The value.

    Returns:
        The value, converted to the annotated type.

    Raises:
        ClientError: The value has another type. The message names the field.
    """
    if form.endswith(" | None"):
        return None if given is None else _read(path, form[: -len(" | None")], given)
    if form in _FORMS:
        types, what = _FORMS[form]
        if not isinstance(given, types) or (isinstance(given, bool) and form != "bool"):
            raise ClientError(f"{path}: expected {what}, got {shown(given)}")
        try:
            return float(given) if form == "float" else given
        except OverflowError:  # the integer is too large for float64
            raise ClientError(
                f"{path}: expected a number that fits into float64, got {shown(given)}"
            ) from None
    if form.startswith("Literal["):
        choices = [word.strip(" \"'") for word in form[len("Literal[") : -1].split(",")]
        if given not in choices:
            raise ClientError(f"{path}: expected one of {', '.join(choices)}, got {shown(given)}")
        return given
    if form.startswith("tuple["):
        inner = form[len("tuple[") : -1]
        if not isinstance(given, (list, tuple)) or len(given) > _MOST:
            raise ClientError(f"{path}: expected a list of at most {_MOST} values, got {shown(given)}")
        # The annotation is either tuple[T, ...] for any length, or lists the type of each element.
        kinds = [inner[: -len(", ...")]] * len(given) if inner.endswith(", ...") else inner.split(", ")
        if len(kinds) != len(given):
            raise ClientError(f"{path}: expected a list of {len(kinds)} values, got {len(given)}")
        return tuple(_read(f"{path}[{at}]", kinds[at], each) for at, each in enumerate(given))
    if form == "dict[str, str]":
        if not isinstance(given, Mapping) or len(given) > _MOST:
            raise ClientError(f"{path}: expected a map of at most {_MOST} texts, got {shown(given)}")
        for key, value in given.items():
            _read(f"{path}.{shown(key)}", "str", value)
            _read(f"{path}: a key", "str", key)
        return dict(given)
    return _built(path, _KINDS[form], given)


_KINDS = {
    kind.__name__: kind
    for kind in (CameraSpec, VectorSpec, KeyMap, MotionSpec, NoiseLevels, RealTimeChunking, Solver)
}
