"""The native protocol: Protobuf messages of ``sinew_client``'s ``sinew.proto``, a superset of vla.cpp's messages.

:meth:`NativeCodec.peek` first scans a request without parsing it. The scan finds the fields that the loop needs
to route the request, and rejects requests for which the parser would allocate too much memory. ``decode`` then
parses the request and checks its form. :meth:`sinew.Policy.prepare` checks the values (finite numbers, camera
names, an instruction that is not empty) in the same way for every protocol.

vla.cpp's clients send token ids, a zero-padded state and unnamed images, and read the padded ``action_chunk``.
Sinew's own clients send names, text and the raw state, and read ``actions``.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError
from sinew_client.schema import Image, PredictRequest, PredictResponse
from sinew_client.shared import LentFrames, ReceivedFrames
from sinew_client.types import MOST_TOGETHER

from sinew.core import Moment, Observation, ObservationError, PolicySpec, RequestError, SinewError
from sinew.serve.decode.frames import MAX_IMAGES, PixelBudget, compressed_frame, raw_frame
from sinew.serve.decode.protobuf import BYTES, FIXED32, VARINT, Field, fields, nested, packed
from sinew.serve.policies import MAX_NAME as MAX_POLICY
from sinew.serve.policies import Deployment, UnknownPolicyError
from sinew.serve.request import Outcome
from sinew.serve.service import MAX_SESSION, Service
from sinew.serve.transport.listen import reachable
from sinew.serve.transport.zeromq import Peer

if TYPE_CHECKING:
    from sinew.serve.wires.streams import Streams

Payload = bytes | memoryview

# Besides images, a request contains only a state, a noise matrix and text, which take kilobytes. One byte of a
# packed field may become four or more bytes in memory, and an empty sub-message may become dozens. The scan
# runs on the only loop of the protocol, before the key is checked. Therefore these bytes and the number of
# fields are limited.
MAX_BYTES_BESIDE_IMAGES = 1 << 20
MAX_NAME = 128  # longest name of a camera, characters
MAX_KEY = 4096  # longest key, bytes
MAX_ERROR_TEXT = 1000  # longest error text, characters

_FIELD = {field.name: field.number for field in PredictRequest.DESCRIPTOR.fields}
_IMAGE_DATA = Image.DESCRIPTOR.fields_by_name["data"].number
_IMAGE_NUMBERS = {
    Image.DESCRIPTOR.fields_by_name[name].number: name for name in ("encoding", "height", "width", "offset")
}
_ACTIONS = PredictResponse.DESCRIPTOR.fields_by_name["actions"].number
_ACTION_CHUNK = PredictResponse.DESCRIPTOR.fields_by_name["action_chunk"].number
_IMAGES = _FIELD["images"]
_OBSERVATIONS = _FIELD["observations"]
_ANSWERS = PredictResponse.DESCRIPTOR.fields_by_name["answers"].number
_NAMES = {number: name for name, number in _FIELD.items()}
_OF_MESSAGES = {_FIELD[name] for name in ("request_id", "kind", "api_key", "policy", "deadline_ms")}
# Key: text field that ``peek`` reads. Value: (largest length, its unit, received value for the error message). If the
# received value is None, the error message states the received length.
_TEXTS = {
    "session": (MAX_SESSION, "characters", "more"),
    "api_key": (MAX_KEY, "bytes", None),
    "policy": (MAX_POLICY, "bytes", None),
}
_NUMBERS = {"request_id", "kind", "generation"}
_ROUTING = {_FIELD[name] for name in (*_TEXTS, *_NUMBERS, "deadline_ms", "report", "precomputed_img_emb")}
_RAW = {Image.RGB_U8: "u1", Image.F32_RGB_01: "<f4"}
_NATIVE_FIELDS = {_FIELD[name] for name in ("prompt", "camera_names", "raw_state", "policy")}


class Kind(IntEnum):
    """Kinds of requests in the native protocol. The numbers are the same as in ``PredictRequest.Kind``."""

    INFER = 0
    METADATA = 1
    HEALTH = 2
    RESET = 3
    STREAM = 4
    STREAM_END = 5
    REPORT = 6


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(slots=True)
class NativeHeader:
    """The parts of a request that the server reads first, to route the request.

    Attributes:
        native: False for vla.cpp's form.
        policy: Name of the policy.
        error: The reason why the request is rejected. If there is a reason, the other attributes have the values
            that were read before the error.
        entries: Fields of the message, so that the message is scanned only once.
        members: Requests inside a message with several observations; None for one observation.
        report: Bytes of a robot's report.
        generation: Generation of frames in shared memory; 0 without such frames.
    """

    kind: Kind = Kind.INFER
    request_id: int = 0
    session: str = ""
    native: bool = False
    deadline_ms: float | None = None
    api_key: str = ""
    policy: str = ""
    error: RequestError | None = None
    entries: Sequence[Field] | None = field(default=None, repr=False, compare=False)
    members: Sequence[memoryview] | None = field(default=None, repr=False, compare=False)
    report: Payload | None = field(default=None, repr=False, compare=False)
    generation: int = 0


class NativeCodec:
    """Reads and writes the messages of the native protocol, for all policies of one service."""

    name = "native"
    encrypts = True
    stream_kinds = (Kind.STREAM, Kind.STREAM_END)

    def __init__(self) -> None:
        # The module of streams is imported only when a client begins a stream.
        self.streams: Streams | None = None

    def bind(self, service: Service) -> None:
        self.service = service

    def open_streams(self) -> Streams:
        """Return the object that processes the messages of streams (``stream_kinds``)."""
        from sinew.serve.wires.streams import Streams

        self.streams = self.streams or Streams(self.service, self)
        return self.streams

    def peek(self, payload: Payload, default_policy: str = "") -> NativeHeader:
        """Scan a request without parsing it. This never raises an error: the header contains the reason for a
        rejection.

        Args:
            payload: The request.
            default_policy: Name of the policy for a request that names no policy.
        """
        header = NativeHeader(policy=default_policy)
        images, other_bytes, members, lone = 0, 0, list[memoryview](), ""
        buffer, entries, error = memoryview(payload), list[Field](), None
        try:
            fields(buffer, entries)
        except RequestError as refusal:
            # An error of an earlier field has precedence, so raise this error later.
            error = refusal
        try:
            for number, wire_type, value, start, end in entries:
                if number == _IMAGES:
                    images += 1
                    continue
                if number == _OBSERVATIONS and wire_type == BYTES:
                    members.append(buffer[end - value : end])
                    continue
                other_bytes += end - start
                if number not in _OF_MESSAGES:
                    lone = lone or _NAMES.get(number, f"field {number}")
                header.native = header.native or number in _NATIVE_FIELDS
                if number not in _ROUTING:
                    continue
                name = _NAMES[number]
                if wire_type == BYTES and name in _TEXTS:
                    limit, unit, got = _TEXTS[name]
                    if value > limit * (4 if unit == "characters" else 1):
                        raise RequestError(f"{name}: expected at most {limit} {unit}, got {got or value}")
                    setattr(header, name, str(buffer[end - value : end], "utf-8", "replace"))
                elif wire_type == VARINT and name in _NUMBERS:
                    setattr(header, name, value & 0xFFFFFFFFFFFFFFFF if name == "request_id" else value)
                elif name == "deadline_ms" and wire_type == FIXED32:
                    (header.deadline_ms,) = struct.unpack("<f", buffer[end - 4 : end])
                elif name == "report" and wire_type == BYTES:
                    header.report = buffer[end - value : end]
                elif name == "precomputed_img_emb":
                    raise RequestError("precomputed_img_emb: not supported; send images")
            if error is not None:
                raise error
            self._check(header, images, other_bytes, len(members), lone)
            header.kind, header.entries, header.members = _KINDS[header.kind], entries, members or None
        except RequestError as refusal:
            header.kind, header.error = Kind.INFER, refusal
        return header

    def _check(self, header: NativeHeader, images: int, other_bytes: int, members: int, lone: str) -> None:
        """Check what a request contains, before it is decoded.

        Args:
            header: The header of the request.
            images: Number of images.
            other_bytes: Number of bytes besides the images.
            members: Number of observations in the message; 0 if the message itself is the observation.
            lone: Name of a field that only a message with one observation may have; "" for none.

        Raises:
            RequestError: The request is rejected.
        """
        kind, report = header.kind, header.report
        if images > MAX_IMAGES and images > (most := self._most_images(header.policy)):
            raise RequestError(
                f"images: expected at most {most}, got {images}; send one frame per camera and observation step"
            )
        if other_bytes > MAX_BYTES_BESIDE_IMAGES:
            raise RequestError(
                f"request: expected at most {MAX_BYTES_BESIDE_IMAGES} bytes besides images, got"
                f" {other_bytes}; send frames in images"
            )
        if report is not None and kind != Kind.REPORT:
            raise RequestError(f"report: expected kind {Kind.REPORT} (REPORT) for a report, got kind {kind}")
        if members and (images or lone or kind != Kind.INFER):
            what = "images" if images else lone or f"kind {kind}"
            raise RequestError(f"{what}: move it into the entries of observations")
        if members > MOST_TOGETHER:
            raise RequestError(f"observations: expected at most {MOST_TOGETHER} in a message, got {members}")
        if kind not in _KINDS:
            raise RequestError(f"kind: expected {', '.join(f'{k} ({k.name})' for k in Kind)}, got {kind}")

    def _most_images(self, policy: str) -> int:
        """Return the largest number of images of a request. A policy with an observation history allows more
        images.
        """
        try:
            return max(MAX_IMAGES, self.service.policies.get(policy).spec.views)
        except UnknownPolicyError:  # the request is rejected later, because the policy is unknown
            return MAX_IMAGES

    def authorize(self, header: NativeHeader) -> None:
        self.service.authorize(header.api_key)

    def control(self, header: NativeHeader, peer: Peer | None = None) -> bytes | None:
        if header.kind in (Kind.INFER, Kind.STREAM, Kind.STREAM_END):
            return None
        if header.kind == Kind.METADATA:
            frames = {} if peer is None or peer.shared is None else {"frames": peer.shared.state}
            # Read the number before the description, because a hot-swap may replace the policy in between.
            number = self.service.policies.get(header.policy).number
            return self.encode_metadata(header, self.service.about(header.policy) | frames, number)
        if header.kind == Kind.HEALTH:
            return self.encode_metadata(header, self.service.health())
        if header.kind == Kind.REPORT:
            self.service.check_session(header.session)
            self.service.policies.get(header.policy)
            client = "" if peer is None else peer.address
            self.service.robots.put(self.name, client, header.session, header.policy, header.report or b"")
        else:
            self.service.reset(header.session, header.policy)
        return self.encode_metadata(header, {})

    def decoders(
        self, header: NativeHeader, payload: Payload, shared: ReceivedFrames | None = None
    ) -> Sequence[Callable[[PixelBudget], Observation]]:
        if header.members is None:
            frames = None if shared is None else LentFrames(shared, header.generation)
            return [
                partial(self.decode, payload, policy=header.policy, entries=header.entries, shared=frames)
            ]
        return [partial(self._member, each, header.policy) for each in header.members]

    def _member(self, payload: memoryview, policy: str, budget: PixelBudget) -> Observation:
        """Return one of several observations of a message.

        Raises:
            RequestError: The bytes are not a request.
            ObservationError: A field of the observation is wrong.
        """
        header = self.peek(payload, policy)
        if header.error is not None:
            raise header.error
        inside = header.kind != Kind.INFER or header.members or header.api_key or header.policy != policy
        if inside or header.deadline_ms is not None:
            raise RequestError(
                "observations: move kind, policy, api_key and deadline_ms from the entries into the message"
            )
        return self.decode(payload, budget, policy, header.entries)

    def decode(
        self,
        payload: Payload,
        budget: PixelBudget | None = None,
        policy: str = "",
        entries: Sequence[Field] | None = None,
        shared: LentFrames | None = None,
    ) -> Observation:
        """Return the observation of an INFER request that ``peek`` did not reject.

        Pixels are not copied: images are read from the message directly, because Protobuf's parser would copy them
        twice.

        Args:
            payload: The request.
            budget: Budget of pixels.
            policy: Name of the policy.
            entries: Result of ``fields`` for the request.
            shared: Shared memory that may contain its frames.

        Raises:
            RequestError: The bytes are not a request.
            ObservationError: A field is wrong.
        """
        deployment = self.service.policies.get(policy)
        spec = deployment.spec
        request, pictures = self.parse(payload, entries)
        images = [_Picture.of(picture) for picture in pictures]
        budget = budget or PixelBudget()
        keeps = shared is not None and self.service.keeps_frames(deployment)
        names, state = list(request.camera_names), _state(deployment, request)
        frame = partial(_frame, budget=budget, shared=shared, keeps=keeps)
        *earlier, newest = _moments(spec, images, names, state, frame)
        if shared is not None and shared.taken:
            shared.check()
            budget.borrowed = None if keeps else shared.check
        tokens = np.fromiter(request.lang_tokens, np.int64, len(request.lang_tokens))
        return Observation(
            images=newest.images,
            state=newest.state,
            prompt=request.prompt,
            tokens=tokens if tokens.size else None,
            noise=_noise(spec, request),
            seed=request.seed if request.HasField("seed") else None,
            solver_steps=request.solver_steps if request.HasField("solver_steps") else None,
            session=request.session,
            time=request.time if request.HasField("time") else None,
            earlier=tuple(earlier),
            subtask=request.subtask,
            question=request.question,
            text_only=request.text_only,
            text_tokens=request.text_tokens or None,
            adapter=request.adapter,
            advantage=request.advantage if request.HasField("advantage") else None,
            guidance_scale=request.guidance_scale if request.HasField("guidance_scale") else None,
            **_continuation(spec, request),
        )

    def parse(self, payload: Payload, entries: Sequence[Field] | None = None) -> tuple[Any, list[memoryview]]:
        """Return the message without its images, and the images.

        Raises:
            RequestError: The bytes are not a message of the native protocol.
        """
        buffer = memoryview(payload)
        pictures, beside = [], []
        for number, wire_type, value, start, end in fields(buffer) if entries is None else entries:
            if number == _IMAGES and wire_type == BYTES:
                pictures.append(buffer[end - value : end])
            else:
                beside.append(buffer[start:end])
        request = PredictRequest()
        try:
            request.ParseFromString(b"".join(beside))
        except (DecodeError, ValueError) as error:  # Protobuf raises ValueError for text that is not UTF-8
            raise RequestError(f"request parse failed: {error}") from error
        return request, pictures

    def encode(self, header: NativeHeader, outcomes: Sequence[Outcome], server_ms: float) -> bytes:
        if header.members is None:
            return self._encode(header, outcomes[0], server_ms)
        own = NativeHeader(native=True)
        answers = [nested(_ANSWERS, self._encode(own, each, server_ms)) for each in outcomes]
        return b"".join([PredictResponse(request_id=header.request_id).SerializeToString(), *answers])

    def _encode(self, header: NativeHeader, chunk: Outcome, server_ms: float) -> bytes:
        if isinstance(chunk, SinewError):
            return self.encode_error(header, chunk)
        timing, head_ms = chunk.timing, chunk.timing.head_ms
        reply = PredictResponse(
            request_id=header.request_id,
            latency_ms_total=timing.total_ms,
            latency_ms_inference=timing.prefix_ms + head_ms,
            latency_ms_prefill=timing.prefix_ms,
            latency_ms_denoise=head_ms,
            latency_ms_vision=timing.vision_ms,
            session=chunk.session,
            seed=chunk.seed,
            time=chunk.time,
            warnings=chunk.warnings,
            text=chunk.text,
            adapter=chunk.adapter,
            deployment=chunk.deployment,
            # One assignment is faster than ten calls of setattr.
            timing=vars(timing) | {"server_ms": server_ms},
        )
        actions = np.asarray(chunk.actions, np.float32)  # [H, dim]
        horizon, dim = actions.shape
        if chunk.context:
            reply.context = chunk.context
            return reply.SerializeToString()
        if header.native:
            reply.horizon, reply.dim = horizon, dim
            return reply.SerializeToString() + packed(_ACTIONS, actions)
        padded = np.zeros((horizon, self.service.policies.get().padded_action_dim), np.float32)
        padded[:, :dim] = actions
        reply.chunk_size, reply.action_dim = padded.shape
        return reply.SerializeToString() + packed(_ACTION_CHUNK, padded)

    def encode_error(self, header: NativeHeader | None, error: SinewError) -> bytes:
        text = str(error) or error.code
        # Shorten the text, because it may quote the request.
        if len(text) > MAX_ERROR_TEXT:
            text = text[:MAX_ERROR_TEXT] + " ..."
        request_id = 0 if header is None else header.request_id
        return PredictResponse(request_id=request_id, error=text, error_code=error.code).SerializeToString()

    def encode_metadata(self, header: NativeHeader, content: dict[str, Any], deployment: int = 0) -> bytes:
        """Return the answer to a request of the kind METADATA, HEALTH, RESET or REPORT as bytes.

        Args:
            header: Header of the request.
            content: The answer's content; {} for RESET and REPORT.
            deployment: Number of the deployment (a policy with its scheduler) that METADATA describes.
        """
        reply = PredictResponse(request_id=header.request_id, session=header.session, deployment=deployment)
        if content:
            reply.metadata = json.dumps(content)
        return reply.SerializeToString()

    def guide(self, spec: PolicySpec, address: str) -> list[str]:
        images = [
            f'        "{camera.name}": np.zeros(({camera.height}, {camera.width}, 3), np.uint8),'
            for camera in spec.cameras
        ]
        return [
            "import numpy as np",
            "from sinew_client import Client",
            "",
            "observation = {",
            '    "images": {',
            *images,
            "    },",
            f'    "state": np.zeros({spec.state.dim}, np.float32),',
            '    "prompt": "pick up the red cube",',
            "}",
            f'with Client("{reachable(address)}") as policy:',
            f"    print(policy.infer(observation).actions)  # float32 [{spec.chunk_size}, {spec.action.dim}]",
        ]


@dataclass(slots=True)
class _Picture:
    """An image of a request (the Protobuf message Image). Its data is a view of the request's bytes."""

    encoding: int = Image.JPEG
    height: int = 0
    width: int = 0
    offset: int | None = None
    data: bytes | memoryview = b""

    @classmethod
    def of(cls, message: memoryview) -> _Picture:
        picture = cls()
        for number, wire_type, value, _start, end in fields(message):
            if wire_type == BYTES and number == _IMAGE_DATA:
                picture.data = message[end - value : end]
            elif wire_type == VARINT and number in _IMAGE_NUMBERS:
                setattr(picture, _IMAGE_NUMBERS[number], value & 0xFFFFFFFF)
        return picture


def _frame(
    camera: str, image: _Picture, budget: PixelBudget, shared: LentFrames | None, keeps: bool
) -> np.ndarray:
    name, data = f"images.{camera}", image.data
    if image.encoding == Image.JPEG and image.offset is None:
        return compressed_frame(name, data, budget)
    if image.encoding in _RAW:
        dtype = _RAW[image.encoding]
        if image.offset is None:
            return raw_frame(name, data, image.height, image.width, dtype, budget)
        if shared is None or len(data):
            nowhere = f"the position {image.offset} in shared memory, but the connection has none"
            got = "both" if len(data) else nowhere
            raise ObservationError(name, "pixels in the message or in shared memory", got)
        size = image.height * image.width * 3 * np.dtype(dtype).itemsize
        pixels = shared.pixels(name, image.offset, size)
        view = raw_frame(name, pixels, image.height, image.width, dtype, budget)
        return view.copy() if keeps else view
    raise ObservationError(
        name,
        "encoding JPEG, RGB_U8 or F32_RGB_01; only the last two may use shared memory",
        f"{image.encoding}" + ("" if image.offset is None else " in shared memory"),
    )


def _vector(values: Collection[float]) -> np.ndarray:
    return np.fromiter(values, np.float32, len(values))


def _continuation(spec: PolicySpec, request: Any) -> dict[str, Any]:
    """Return the fields of a request that concern real-time chunking (a chunk that continues the previous chunk)."""
    options: dict[str, Any] = {}
    for name in ("delay", "horizon", "beta"):
        if request.HasField(name):
            options[name] = getattr(request, name)
    for name in ("rtc", "schedule"):
        if value := getattr(request, name):
            options[name] = value
    if count := len(request.previous):
        dim = spec.action.dim
        if count % dim:
            raise ObservationError("previous", f"rows of {dim} numbers", f"{count} numbers")
        options["previous"] = np.array(request.previous, np.float32).reshape(-1, dim)
    return options


def _moments(
    spec: PolicySpec,
    images: list[_Picture],
    names: list[str],
    state: np.ndarray,
    frame: Callable[[str, _Picture], np.ndarray],
) -> list[Moment]:
    """Return the observation steps, oldest first.

    Without ``camera_names``, images belong to the cameras in the order of the specification. A repeated name begins
    the next step, and ``state`` has the numbers of all steps.
    """
    count = len(images)
    cameras = [camera.name for camera in spec.cameras]
    if not names:
        if count > len(cameras):
            raise ObservationError("images", f"at most {len(cameras)} ({', '.join(cameras)})", f"{count}")
        names = cameras[:count]
    if len(names) != count:
        raise ObservationError("camera_names", f"{count} names, one per image", f"{len(names)}")
    for name in names:
        if len(name) > MAX_NAME:
            raise ObservationError("camera_names", f"names of at most {MAX_NAME} characters", f"{len(name)}")
    # Each camera has one frame, so the request has one observation step. This is the usual case.
    if len(set(names)) == count:
        return [Moment({name: frame(name, each) for name, each in zip(names, images, strict=True)}, state)]
    times = Counter(names)
    moments = max(times.values())
    if moments > spec.history or len(set(times.values())) > 1:
        expected = (
            "once" if spec.history == 1 else f"once for each of at most {spec.history} observation steps"
        )
        raise ObservationError("camera_names", f"each camera {expected}", ", ".join(names))
    if len(state) % moments:
        raise ObservationError(
            "raw_state", f"a state for each of {moments} observation steps", f"{len(state)} numbers"
        )
    steps: list[dict[str, np.ndarray]] = [{} for _ in range(moments)]
    for name, image in zip(names, images, strict=True):
        next(frames for frames in steps if name not in frames)[name] = frame(name, image)
    return [Moment(frames, part) for frames, part in zip(steps, np.split(state, moments), strict=True)]


def _state(deployment: Deployment, request: PredictRequest) -> np.ndarray:
    if request.raw_state and request.state:
        raise RequestError("raw_state: expected either raw_state or state, got both; send raw_state")
    if request.raw_state or not request.state:
        return _vector(request.raw_state)
    state, dim = _vector(request.state), deployment.spec.state.dim
    if len(state) not in (dim, deployment.padded_state_dim):
        raise ObservationError(
            "state", f"{deployment.padded_state_dim} (padded) or {dim} values", f"{len(state)}"
        )
    return state[:dim]


def _noise(spec: PolicySpec, request: PredictRequest) -> np.ndarray | None:
    if not request.noise:
        return None
    shape = spec.noises(request.solver_steps if request.HasField("solver_steps") else None)
    # One call of np.array is faster than an iterator for hundreds of numbers.
    noise = np.array(request.noise, np.float32)
    if noise.size != math.prod(shape) or not noise.size:
        raise ObservationError(
            "noise", f"0 or {math.prod(shape)} values ({' x '.join(map(str, shape))})", f"{noise.size}"
        )
    return noise.reshape(shape)
