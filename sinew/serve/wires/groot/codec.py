"""The Isaac-GR00T protocol: MessagePack over ZeroMQ, in the same form as GR00T's own policy server.

Three dialects of the protocol are in use, and each client gets answers in its own dialect:

* N1.5 (``gr00t/eval/service.py``): ``data`` is the observation, keys "video.x", "state.y", "annotation.z", with or
  without a batch axis. The reply is a flat mapping "action.k".
* N1.6 (``gr00t/policy/server_client.py``): ``data`` is ``{"observation", "options"}``. The observation is nested by
  modality, or flat as the simulation wrapper sends it. The reply is ``[actions, info]``.
* N1.7: the same as N1.6, with arrays as the package msgpack-numpy writes them instead of embedded ``.npy`` files.

Arrays: video uint8 [B, T, height, width, 3], state float32 [B, T, D], actions float32 [B, H, D]. T is the number of
observation steps. A policy that reads one observation step uses the last of the T steps. A policy with a history uses
all of its steps, or the newest step alone. If the policy reads only the newest state, one state is enough.
``options`` may contain ``seed`` (the noise of element i of a batch is drawn from seed + i), ``solver_steps``,
``session`` and ``deadline_ms``. GR00T's own server ignores options.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgpack
import numpy as np
from sinew_client.addresses import split_scheme
from sinew_client.untrusted import UntrustedError, named, parse_npy, raw_array, shown, unpack_msgpack

from sinew.core import (
    CONDITIONS,
    CONTINUATION,
    ActionChunk,
    Moment,
    Observation,
    ObservationError,
    PolicySpec,
    RequestError,
    SinewError,
    did_you_mean,
)
from sinew.core.rate_limited_log import LogOnce
from sinew.core.registry import hints
from sinew.processing.arrays import numbers
from sinew.serve.decode.array import dump_npy
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.request import Outcome
from sinew.serve.service import Service
from sinew.serve.transport.listen import reachable
from sinew.serve.wires.field_names import MAX_NUMBERS, frame, text
from sinew.serve.wires.groot.names import Names

logger = logging.getLogger(__name__)

MAX_BATCH = 64
# Largest number of texts of a message, which is read before its key is checked. A batch of 64 has about 300 texts.
MAX_VALUES = 2048
MAX_ERROR_TEXT = 1000
OPTIONS = (
    *("session", "deadline_ms", "seed", "solver_steps"),
    *CONTINUATION,
    *CONDITIONS,
)
FIELDS = ("endpoint", "data", "api_token")  # fields of a request
ENDPOINTS = ("get_action", "get_modality_config", "ping", "reset", "kill")
# Policy families with this hint have clients that expect the configuration of a modality (video, state ...) as JSON
# text.
JSON_TEXT = "groot: json text"


@dataclass(frozen=True, slots=True)
class GrootHeader:
    """One request, which was read but not yet compared with the inputs of the policy.

    Attributes:
        observation: The observation of get_action. Its arrays are not decoded yet.
        listed: True if the reply is ``[actions, info]`` (since N1.6).
        flat: True if the keys of actions are "action.k".
        raw: True if arrays of request and reply are in msgpack-numpy's form.
        batched: True if arrays have a batch axis B.
        policy: "" for the first policy, the only one that this protocol can name.
    """

    endpoint: str = "get_action"
    api_token: str = ""
    observation: Mapping[str, Any] = field(default_factory=dict)
    listed: bool = True
    flat: bool = False
    raw: bool = False
    batched: bool = True
    session: str = ""
    deadline_ms: float | None = None
    seed: int | None = None
    solver_steps: int | None = None
    continuation: Mapping[str, Any] = field(default_factory=dict)
    policy: str = ""
    error: SinewError | None = None


class GrootCodec:
    """Reads and writes the messages of the GR00T protocol, for the first policy. The protocol has no field for the
    names of other policies.
    """

    name = "groot"
    encrypts = False  # GR00T's clients use the ZeroMQ library without encryption
    streams = None
    stream_kinds = ()

    def open_streams(self) -> Any:
        raise AssertionError("this protocol has no messages of streams")

    def __init__(self) -> None:
        self._once = LogOnce(logger)

    def bind(self, service: Service) -> None:
        self.service = service
        self.spec, self.names = service.spec, Names.of(service.spec)
        self._modalities = _modalities(self.names, service.spec)

    def peek(self, payload: memoryview) -> GrootHeader:
        """Return the header of a request.

        The whole message is read, except its arrays, which stay undecoded. A message with too much other content
        is rejected.
        """
        header = GrootHeader()
        try:
            with RequestError.at("MessagePack", UntrustedError):
                request = unpack_msgpack(payload, max_values=MAX_VALUES)
            if not isinstance(request, dict):
                raise RequestError(f"request: expected a map, got {type(request).__name__}")
            endpoint, token = request.get("endpoint", "get_action"), request.get("api_token")
            header = replace(header, api_token=token if isinstance(token, str) else "")
            if endpoint not in ENDPOINTS:
                raise RequestError(f"endpoint: expected one of {', '.join(ENDPOINTS)}, got {shown(endpoint)}")
            if endpoint == "kill":
                raise RequestError("kill: clients cannot stop this server; stop its process on its machine")
            header = replace(header, endpoint=endpoint)
            if strange := next((key for key in request if key not in FIELDS), None):
                hint = did_you_mean(named(strange, 100), FIELDS)
                raise RequestError(
                    f"{named(strange, 100)}: expected one of {', '.join(FIELDS)}, got an unknown key{hint}"
                )
            data = request.get("data")
            if endpoint in ("get_action", "reset"):
                if not isinstance(data, (dict, type(None))):
                    raise RequestError(f"data: expected a map, got {type(data).__name__}")
                header = _read_data(header, data or {})
        except SinewError as error:
            return replace(header, error=error)
        return header

    def authorize(self, header: GrootHeader) -> None:
        self.service.authorize(header.api_token)

    def control(self, header: GrootHeader, _peer: object = None) -> bytes | None:
        if header.endpoint == "get_action":
            return None
        if header.endpoint == "get_modality_config":
            return self._modalities
        if header.endpoint == "ping":
            return msgpack.packb({"status": "ok", "message": "Server is running"})
        self.service.reset(header.session)
        return msgpack.packb({})

    def decoders(
        self, header: GrootHeader, _payload: memoryview, _shared: object = None
    ) -> Sequence[Callable[[PixelBudget], Observation]]:
        batch = self._batch(header)
        for sentence in self.names.unread(header.observation):
            self._once.warning(f"groot: {sentence}")
        return [partial(self._element, header, batch, index) for index in range(batch.size)]

    def _batch(self, header: GrootHeader) -> _Batch:
        """Return the inputs of the policy from a request: frames, parts of the state, and instructions. All arrays have
        a batch axis.
        """
        videos, states, prompts = self.names.select(header.observation)
        frames = {camera: _array(key, value) for camera, (key, value) in videos.items()}
        vectors = [_numbers(key, value) for key, value in states]
        sizes = {}
        for axes, arrays in (
            (("batch", "time", "height", "width", "3"), {videos[name][0]: a for name, a in frames.items()}),
            (("batch", "time", "dim"), {key: a for (key, _), a in zip(states, vectors, strict=True)}),
        ):
            for key, array in arrays.items():
                if array.ndim != len(axes) - (not header.batched):
                    expected_axes = axes if header.batched else axes[1:]
                    raise ObservationError(key, f"[{', '.join(expected_axes)}]", f"shape {list(array.shape)}")
                if array.shape[header.batched] < 1:
                    raise ObservationError(key, "at least one observation step", f"shape {list(array.shape)}")
                sizes[key] = array.shape[0] if header.batched else 1
        (first, size), *_ = sizes.items()
        for key, other in sizes.items():
            if other != size:
                raise ObservationError(key, f"a batch of {size}, as in {first}", str(other))
        if not 1 <= size <= MAX_BATCH:
            raise ObservationError(first, f"a batch of 1 to {MAX_BATCH}", str(size))
        if (width := sum(array.shape[-1] for array in vectors)) > MAX_NUMBERS:
            raise ObservationError("state", f"at most {MAX_NUMBERS} numbers", str(width))
        if not header.batched:
            frames = {camera: array[None] for camera, array in frames.items()}
            vectors = [array[None] for array in vectors]
        if self.spec.history > 1:
            self._check_history(
                {videos[camera][0]: array.shape[1] for camera, array in frames.items()},
                {key: array.shape[1] for (key, _), array in zip(states, vectors, strict=True)},
            )
        return _Batch(size, frames, vectors, _prompts(prompts, size))

    def _check_history(self, videos: dict[str, int], states: dict[str, int]) -> None:
        """Check that a request has the observation steps that the policy reads.

        Args:
            videos: Key of a video -> number of its steps.
            states: Key of a state -> number of its steps.

        Raises:
            ObservationError: A key has another number of steps.
        """
        (first, count), *_ = videos.items()
        if count not in (1, self.spec.history):
            raise ObservationError(first, f"1 or {self.spec.history} observation steps", str(count))
        one_is_enough = not self.spec.history_states
        for key, steps in (*videos.items(), *states.items()):
            if steps != count and not (key in states and steps == 1 and one_is_enough):
                raise ObservationError(key, f"{count} observation steps, as in {first}", str(steps))

    def _element(
        self, header: GrootHeader, batch: _Batch, index: int, budget: PixelBudget | None = None
    ) -> Observation:
        budget = budget or PixelBudget()
        steps = next(iter(batch.frames.values())).shape[1] if self.spec.history > 1 else 1
        *earlier, newest = (self._moment(batch, index, at - steps, budget) for at in range(steps))
        return Observation(
            images=newest.images,
            state=newest.state,
            earlier=tuple(earlier),
            prompt=batch.prompts[index],
            seed=None if header.seed is None else header.seed + index,
            solver_steps=header.solver_steps,
            session=header.session,
            **header.continuation,
        )

    @staticmethod
    def _moment(batch: _Batch, index: int, at: int, budget: PixelBudget) -> Moment:
        """Return one observation step of one observation in a batch.

        Args:
            batch: The batch.
            index: Index of the observation in the batch.
            at: Index of the observation step, counted from the end: -1 is the newest step.
            budget: Budget of pixels.
        """
        images = {
            camera: frame(camera, frames[index, at], budget, channels_first=False)
            for camera, frames in batch.frames.items()
        }
        # A part of the state with one step has the same values for all steps, because the policy reads only
        # the newest state.
        rows = [vector[index, max(at, -vector.shape[1])] for vector in batch.vectors]
        return Moment(images, np.concatenate(rows))

    def encode(self, header: GrootHeader, outcomes: Sequence[Outcome], server_ms: float) -> bytes:
        chunks = [outcome for outcome in outcomes if isinstance(outcome, ActionChunk)]
        if errors := [outcome for outcome in outcomes if isinstance(outcome, SinewError)]:
            return self.encode_error(header, errors[0])
        actions = np.stack([np.asarray(chunk.actions, np.float32) for chunk in chunks])  # [B, H, D]
        if not header.batched:
            actions = actions[0]
        pack = _raw if header.raw else _npy
        prefix = "action." if header.flat else ""
        actions_by_key = {
            f"{prefix}{key}": pack(actions[..., part]) for key, part in self.names.actions.items()
        }
        if not header.listed:
            return msgpack.packb(actions_by_key)
        timing = [
            {
                "queue_ms": chunk.timing.queue_ms,
                "vision_ms": chunk.timing.vision_ms,
                "prefix_ms": chunk.timing.prefix_ms,
                "head_ms": chunk.timing.head_ms,
                "total_ms": chunk.timing.total_ms,
            }
            for chunk in chunks
        ]
        info = {"server_ms": server_ms, "timing": timing, "seed": [chunk.seed for chunk in chunks]}
        if warnings := [
            *self.names.unread(header.observation),
            *(w for chunk in chunks for w in chunk.warnings),
        ]:
            info["warnings"] = list(dict.fromkeys(warnings))
        return msgpack.packb([actions_by_key, info])

    def encode_error(self, header: GrootHeader | None, error: SinewError) -> bytes:
        message = str(error)
        # Shorten the message, because it may quote the request.
        if len(message) > MAX_ERROR_TEXT:
            message = message[:MAX_ERROR_TEXT] + " ..."
        return msgpack.packb({"error": f"{error.code}: {message}"})

    def guide(self, spec: PolicySpec, address: str) -> list[str]:
        names = Names.of(spec)
        # The client puts the host into an address, so an IPv6 address keeps its brackets.
        host, _, port = split_scheme(reachable(address))[1].rpartition(":")
        # GR00T N1.5 has another client than later versions, with flat keys.
        flat = JSON_TEXT in hints(spec.architecture)
        ones, states = (f"{n}" if flat else f"1, {n}" for n in (spec.history, spec.states_read))
        video = [
            f'"{key}": np.zeros(({ones}, {camera.height}, {camera.width}, 3), np.uint8),'
            for key, camera in names.videos(spec).items()
        ]
        parts = names.state_parts or dict.fromkeys(names.states, slice(0, spec.state.dim))
        state = [
            f'"{key}": np.zeros(({states}, {part.stop - part.start}), np.float32),'
            for key, part in parts.items()
        ]
        key = 'key = os.environ.get("SINEW_API_KEY")  # if the server requires one'
        rows = f"{spec.chunk_size}, dim] under {', '.join(names.actions)}"
        if flat:
            return [
                "import os",
                "import numpy as np",
                "from gr00t.eval.robot import RobotInferenceClient",
                "",
                "observation = {",
                *(f'    "video.{line[1:]}' for line in video),
                *(f'    "state.{line[1:]}' for line in state),
                f'    "{names.prompt}": ["pick up the red cube"],',
                "}",
                key,
                f'policy = RobotInferenceClient(host="{host}", port={port}, api_token=key)',
                "print(policy.get_action(observation))  # float32 [" + rows + ", each behind action.",
            ]
        return [
            "import os",
            "import numpy as np",
            "from gr00t.policy.server_client import PolicyClient",
            "",
            "observation = {",
            '    "video": {',
            *(f"        {line}" for line in video),
            "    },",
            '    "state": {',
            *(f"        {line}" for line in state),
            "    },",
            f'    "language": {{"{names.prompt}": [["pick up the red cube"]]}},',
            "}",
            key,
            f'policy = PolicyClient(host="{host}", port={port}, api_token=key)',
            "actions, info = policy.get_action(observation)",
            "print(actions)  # float32 [1, " + rows,
        ]


@dataclass(frozen=True, slots=True)
class _Batch:
    """The observations of a batch.

    Attributes:
        size: The number of observations, B.
        frames: Camera -> frames [B, T, height, width, 3].
        vectors: The parts of the state, each [B, T, dim].
        prompts: The instruction of each observation.
    """

    size: int
    frames: dict[str, np.ndarray]
    vectors: list[np.ndarray]
    prompts: list[str]


def _read_data(header: GrootHeader, data: dict[str, Any]) -> GrootHeader:
    listed = "observation" in data or header.endpoint == "reset"
    observation = data.get("observation", {}) if listed else data
    if not isinstance(observation, dict):
        raise ObservationError("observation", "a map", type(observation).__name__)
    flat = any(key.startswith(("video.", "state.")) for key in observation)
    leaves = [leaf for part in observation.values() for leaf in (part, *_values(part))]
    states = [value for key, value in observation.items() if key.startswith("state.")]
    options = data.get("options") if listed else None
    if not isinstance(options, (dict, type(None))):
        raise RequestError(f"options: expected a map or nothing, got {type(options).__name__}")
    options = options or {}
    for known, given, where in (
        (("observation", "options"), data if listed else {}, "data"),
        (OPTIONS, options, "options"),
    ):
        for key in given:
            if key not in known:
                raise RequestError(
                    f"{where}.{key[:100]}: expected one of {', '.join(known)}, got an unknown"
                    f" key{did_you_mean(key[:100], known)}"
                )
    return replace(
        header,
        observation=observation,
        listed=listed,
        flat=flat,
        raw=any(isinstance(leaf, dict) and "nd" in leaf for leaf in leaves),
        # The rule of GR00T N1.5: the arrays have no batch axis if any state has fewer than three axes.
        batched=listed or not any(_array("state", value).ndim < 3 for value in states),
        session=_option(options, "session", str) or "",
        deadline_ms=_option(options, "deadline_ms", (int, float)),
        seed=_option(options, "seed", int),
        solver_steps=_option(options, "solver_steps", int),
        continuation=_continuation(options),
    )


def _continuation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request that make the new chunk continue the previous chunk (guidance). The option
    ``previous`` is an array [R, action_dim].
    """
    number = (int, float)
    kinds: dict[str, Any] = {"delay": int, "horizon": int, "rtc": str, "schedule": str, "beta": number}
    kinds |= {"advantage": str, "guidance_scale": number}
    values = {name: _option(options, name, kind) for name, kind in kinds.items()}
    if options.get("previous") is not None:
        values["previous"] = numbers(
            "options.previous", _array("options.previous", options["previous"]), MAX_NUMBERS
        )
    return {name: value for name, value in values.items() if value is not None}


def _option(options: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = options.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        expected = "text" if kind is str else "a number"
        raise RequestError(f"options.{name}: expected {expected}, got {type(value).__name__}")
    return value


def _values(node: Any) -> Sequence[Any]:
    return list(node.values()) if isinstance(node, dict) else ()


def _array(key: str, value: Any) -> np.ndarray:
    """Return an array of a message. The message contains the array either as an embedded ``.npy`` file or in
    msgpack-numpy's form.

    Raises:
        ObservationError: The value is not an array.
    """
    if isinstance(value, dict):
        if isinstance(data := value.get("as_npy"), memoryview):
            return _checked(key, partial(parse_npy, data))
        if "nd" in value:
            dtype, shape, data = _text(value.get("type")), value.get("shape", []), value.get("data")
            sizes = isinstance(shape, list) and all(type(each) is int and each >= 0 for each in shape)
            if dtype and sizes and isinstance(data, memoryview) and not _text(value.get("kind")):
                return _checked(key, partial(raw_array, data, dtype, shape))
            raise ObservationError(key, "an array of numbers", "another kind of msgpack-numpy value")
    raise ObservationError(key, "an array", type(value).__name__)


def _checked(key: str, read: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array that ``read`` returns. An error of ``read`` becomes an ObservationError of the field ``key``."""
    try:
        return read()
    except UntrustedError as error:
        raise ObservationError(key, error.expected, error.got) from None


def _numbers(key: str, value: Any) -> np.ndarray:
    """Convert a received value to an array of numbers. Text is rejected before the conversion, because numpy would
    reserve the length of the longest text for every element.
    """
    return numbers(key, _array(key, value))


def _text(value: Any) -> str:
    """Return a dtype or kind of msgpack-numpy as text. msgpack-numpy writes a dtype as text and a kind as bytes."""
    if isinstance(value, memoryview):
        value = bytes(value[:20]).decode("latin-1")
    return value if isinstance(value, str) else ""


def _prompts(found: tuple[str, Any] | None, size: int) -> list[str]:
    """Return the instruction of each observation of a batch.

    Args:
        found: Key and value of the instruction; None without an instruction. The value is one text for all
            observations, or a list with one text for each observation.
        size: Number of observations in the batch.

    Raises:
        ObservationError: The number of instructions is not 1 or ``size``, or an instruction is not text.
    """
    if found is None:
        return [""] * size
    key, value = found
    if isinstance(value, dict):
        instructions = _array(key, value)
        if instructions.dtype.kind != "U" or instructions.size > MAX_BATCH:
            raise ObservationError(
                key,
                f"at most {MAX_BATCH} instructions",
                f"{instructions.dtype} of shape {list(instructions.shape)}",
            )
        value = instructions.tolist()
    if isinstance(value, list) and len(value) == size:
        return [text(key, each) for each in value]
    if isinstance(value, list) and len(value) != 1:
        raise ObservationError(
            key, f"{size} instructions, one for each observation of the batch", str(len(value))
        )
    return [text(key, value)] * size


def _npy(array: np.ndarray) -> dict[str, Any]:
    return {"__ndarray_class__": True, "as_npy": dump_npy(array)}


def _raw(array: np.ndarray) -> dict[bytes, Any]:
    array = np.ascontiguousarray(array)
    return {
        b"nd": True,
        b"type": array.dtype.str,
        b"kind": b"",
        b"shape": list(array.shape),
        b"data": array.tobytes(),
    }


def _modalities(names: Names, spec: PolicySpec) -> bytes:
    """Return the reply to get_modality_config: the sampled steps of each modality, counted in control steps from
    now.

    N1.7 has its own marker, and its clients accept either form. N1.5's clients require JSON text, and N1.6's
    clients require a map. A request does not show which client has sent it.
    """
    as_text = JSON_TEXT in hints(spec.architecture)
    reply = {}
    steps = [(at - spec.history + 1) * spec.history_stride for at in range(spec.history)]
    for modality, keys, moments in (
        ("video", names.cameras, steps),
        ("state", names.states, steps if spec.history_states else [0]),
        ("action", names.actions, list(range(spec.chunk_size))),
        ("language", [names.prompt], [0]),
    ):
        config = {"delta_indices": moments, "modality_keys": list(keys)}
        reply[modality] = {
            "__ModalityConfig_class__": True,
            "__ModalityConfig__": True,
            "as_json": json.dumps(config) if as_text else config,
        }
    return msgpack.packb(reply)
