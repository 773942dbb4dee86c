"""Encode observations to request bytes, and decode reply bytes to action chunks. This module opens no sockets."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from sinew_client import schema
from sinew_client.errors import ClientError, InvalidObservation, LateChunk, ServerError, UnsafeChunk
from sinew_client.robot_report import RobotReport
from sinew_client.types import (
    CONDITIONS,
    CONTINUATION,
    MOST_TOGETHER,
    WORDS,
    ActionChunk,
    Moment,
    Observation,
    Timing,
)
from sinew_client.untrusted import UntrustedError, parse_json, shown

# "deadline_ms" is a field of the request and not of the observation. Users may add it to the dict of an observation.
OBSERVATION_KEYS = (*(each.name for each in fields(Observation)), "deadline_ms")

# An answer has at most MAX_ROWS actions, unless the policy states a number. An action has at most MAX_DIM numbers.
MAX_ROWS, MAX_DIM = 1024, 1024

_KNOWN = frozenset(OBSERVATION_KEYS)
_SCALARS = frozenset(
    (
        *("prompt", "session", "seed", "solver_steps", "time", "deadline_ms", "adapter"),
        *(name for name in (*CONTINUATION, *CONDITIONS, *WORDS) if name != "previous"),
    )
)
_IMAGES = schema.PredictRequest.DESCRIPTOR.fields_by_name["images"].number
_OBSERVATIONS = schema.PredictRequest.DESCRIPTOR.fields_by_name["observations"].number
_DATA = schema.Image.DESCRIPTOR.fields_by_name["data"].number
_GENERATION = schema.PredictRequest.DESCRIPTOR.fields_by_name["generation"].number << 3


def need_pillow() -> None:
    """Check that Pillow is installed, which compresses frames to JPEG.

    Raises:
        ClientError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ClientError("jpeg_quality needs Pillow: pip install 'sinew-vla-client[jpeg]'") from error


def given(observation: Observation | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of an observation as a mapping."""
    return vars(observation) if isinstance(observation, Observation) else observation


def encode_infer(*given: Any, **options: Any) -> bytes:
    """Encode an INFER request as one bytes object. The arguments are those of :func:`infer_parts`."""
    return b"".join(infer_parts(*given, **options))


def infer_parts(
    observation: Mapping[str, Any],
    request_id: int,
    jpeg_quality: int | None = None,
    api_key: str = "",
    policy: str = "",
) -> list:
    """Encode a request for actions (INFER) in parts. Parts with frames are views of the frames, without a copy.

    Args:
        observation: The fields of the observation.
        request_id: Id of the request.
        jpeg_quality: 1 to 95 compresses uint8 frames to JPEG; None sends raw pixels.
        api_key: Key of the server; "" for none.
        policy: Name of the policy; "" for the server's first policy.

    Returns:
        The parts. Their concatenation is the encoded request.

    Raises:
        InvalidObservation: A field cannot be encoded. The message names it.
    """
    for key in observation:
        if key not in _KNOWN:
            raise InvalidObservation.unknown(key, OBSERVATION_KEYS)
    for key in ("images", "state"):
        if observation.get(key) is None:
            raise InvalidObservation(key, "a value", "nothing")
    frames, states = _moments(observation)
    request = schema.PredictRequest(
        request_id=request_id, camera_names=[name for name, _ in frames], api_key=api_key, policy=policy
    )
    for state in states:
        request.raw_state.extend(state.tolist())
    if observation.get("noise") is not None:
        request.noise.extend(floats("noise", observation["noise"], 2, 3).reshape(-1).tolist())
    if observation.get("tokens") is not None:
        try:
            tokens = np.asarray(observation["tokens"])
        except ValueError as error:
            raise InvalidObservation("tokens", "integers [L]", "a ragged sequence") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidObservation("tokens", "integers [L]", _describe(tokens))
        _assign("tokens", request.lang_tokens.extend, tokens.tolist())
    if observation.get("previous") is not None:
        request.previous.extend(floats("previous", observation["previous"], 2).reshape(-1).tolist())
    for key, value in observation.items():
        if key in _SCALARS and value is not None:
            # Convert numpy scalars to Python numbers, because protobuf 3.20 does not accept all types of numpy scalars.
            value = value.item() if isinstance(value, np.generic) else value
            # Reject 0, because a protobuf message cannot distinguish 0 from an absent value.
            if key == "text_tokens" and not value:
                raise InvalidObservation(key, "1 or more", str(value))
            _assign(key, setattr, request, key, value)

    return with_frames(request, frames, jpeg_quality)


def infer_all_parts(
    observations: Sequence[Mapping[str, Any]],
    request_id: int,
    jpeg_quality: int | None = None,
    api_key: str = "",
    policy: str = "",
) -> list:
    """Encode one request for actions with several observations in parts.

    Args:
        observations: The fields of 1 to 64 observations.
        request_id: Id of the request.
        jpeg_quality: 1 to 95 compresses uint8 frames to JPEG; None sends raw pixels.
        api_key: Key of the server; "" for none.
        policy: Name of the policy; "" for the server's first policy.

    Returns:
        The parts. Their concatenation is the encoded request.

    Raises:
        InvalidObservation: A field cannot be encoded. The message names the observation and its field.
    """
    if not 0 < len(observations) <= MOST_TOGETHER:
        raise InvalidObservation("observations", f"1 to {MOST_TOGETHER}", str(len(observations)))
    parts = [schema.PredictRequest(request_id=request_id, api_key=api_key, policy=policy).SerializeToString()]
    for index, observation in enumerate(observations):
        try:
            if observation.get("deadline_ms") is not None:
                raise InvalidObservation("deadline_ms", "no deadline for one of several observations", "one")
            single = infer_parts(observation, 0, jpeg_quality)
            # Convert each FrameHead to plain bytes, so that its frame is not moved to shared memory. The length of the
            # enclosing field includes the bytes of the frame, so the frame must stay in the message.
            inner = [bytes(part) if isinstance(part, FrameHead) else part for part in single]
        except InvalidObservation as error:
            raise InvalidObservation(
                f"observations[{index}].{error.field}", error.expected, error.got
            ) from None
        parts += [_prefix(_OBSERVATIONS, sum(map(len, inner))), *inner]
    return parts


def accepted_all(reply, observations: Sequence[Mapping[str, Any]], chunk: Callable) -> list:
    """Decode the reply to a request with several observations.

    Args:
        reply: The decoded reply.
        observations: The observations of the request.
        chunk: Function (answer, observation) that returns a chunk or raises ClientError.

    Returns:
        One entry per observation, in the same order: its chunk, or its error.

    Raises:
        ClientError: The reply has another number of answers.
    """
    if len(reply.answers) != len(observations):
        raise ClientError(
            f"the reply: expected {len(observations)} answers, got {len(reply.answers)}; update the server, because"
            " old servers do not support several observations in a message"
        )

    def outcome(answer, observation: Mapping[str, Any]):
        try:
            raise_error(answer)
            return chunk(answer, observation)
        except ClientError as error:
            return error

    return [outcome(*each) for each in zip(reply.answers, observations)]


def _moments(observation: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], list[np.ndarray]]:
    """Collect the frames, each with its camera's name, and the states, float32 [D], of all observation steps.

    Raises:
        InvalidObservation: The steps differ in their cameras or in the size of their states.
    """
    earlier = observation.get("earlier")
    earlier = () if earlier is None else earlier
    if not isinstance(earlier, (list, tuple)):
        raise InvalidObservation("earlier", "a list of observation steps", str(type(earlier)))
    newest = Moment(observation["images"], observation["state"])
    frames: list[tuple[str, Any]] = []
    states: list[np.ndarray] = []
    for index, each in enumerate((*earlier, newest)):
        prefix = "" if each is newest else f"earlier[{index}]."
        if isinstance(each, Mapping) and set(each) == {"images", "state"}:
            each = Moment(**each)
        if not isinstance(each, Moment):
            raise InvalidObservation(
                prefix[:-1], "an observation step with images and state", str(type(each))
            )
        if not isinstance(each.images, Mapping):
            raise InvalidObservation(
                f"{prefix}images", "a dict of camera name to frame", str(type(each.images))
            )
        frames += [(str(name), frame) for name, frame in each.images.items()]
        states.append(floats(f"{prefix}state", each.state, 1))
        if set(each.images) != set(newest.images) or len(states[-1]) != len(states[0]):
            raise InvalidObservation(
                prefix[:-1] or "earlier",
                "the same cameras and state size in all observation steps",
                "different ones",
            )
    return frames, states


def with_frames(request, frames: Iterable[tuple[str, Any]], jpeg_quality: int | None = None) -> list:
    """Append frames to a request.

    Args:
        request: The protobuf message without frames.
        frames: Pairs of a camera's name and its frame.
        jpeg_quality: 1 to 95 compresses uint8 frames to JPEG; None sends raw pixels.

    Returns:
        The parts of the encoded request.

    Raises:
        InvalidObservation: A frame is not valid. The message names the camera.
    """
    # Append the frames by hand, because protobuf would copy them. Its serializer needs 0.4 ms for two frames of
    # 224 x 224 pixels.
    parts, encoded = [request.SerializeToString()], {}  # type: ignore[var-annotated]
    for name, frame in frames:
        # Encode each frame once, because several observation steps may share a frame, such as a goal image.
        if id(frame) not in encoded:
            encoded[id(frame)] = _encode_frame(str(name), frame, jpeg_quality)
        parts += encoded[id(frame)]
    return parts


def encode_control(
    kind: str,
    request_id: int,
    session: str = "",
    api_key: str = "",
    policy: str = "",
    report: RobotReport | None = None,
) -> bytes:
    """Encode a request without an observation.

    Args:
        kind: "METADATA", "HEALTH", "RESET" or "REPORT".
        request_id: Id of the request.
        session: Session of the robot.
        api_key: Key of the server; "" for none.
        policy: Name of the policy; "" for the server's first policy.
        report: The report of a robot's run, for "REPORT".

    Returns:
        The encoded request.
    """
    number = schema.PredictRequest.Kind.Value(kind)
    request = schema.PredictRequest(
        kind=number, request_id=request_id, session=session, api_key=api_key, policy=policy
    )
    if report is not None:
        request.report.CopyFrom(report.to_message())
    return request.SerializeToString()


def decode_reply(payload: bytes, request_id: int):
    """Decode a reply.

    Args:
        payload: The encoded reply.
        request_id: Id of the request.

    Returns:
        The protobuf message.

    Raises:
        ServerError: The reply is an error of the server.
        ClientError: The reply is not valid, or has another id.
    """
    reply = schema.PredictResponse()
    try:
        reply.ParseFromString(payload)
    except (DecodeError, ValueError) as error:
        raise ClientError(f"the reply is not a PredictResponse: {error}") from error
    raise_error(reply)
    if reply.request_id != request_id:
        raise ClientError(f"the reply: expected request id {request_id}, got {reply.request_id}")
    return reply


def raise_error(reply) -> None:
    """Raise :class:`ServerError` if a decoded reply is an error of the server."""
    if reply.error or reply.error_code:
        raise ServerError(_plain(reply.error_code) or "unknown", _plain(reply.error))


def _plain(text: str) -> str:
    """Make a server's text safe to print: at most 1,000 characters, and blanks in place of control characters."""
    return "".join(each if each.isprintable() else " " for each in text[:1000])


def reply_id(payload: bytes) -> int:
    """Read the request id of an encoded reply; 0 if the reply has no id or is not valid."""
    reply = schema.PredictResponse()
    try:
        reply.ParseFromString(payload)
    except (DecodeError, ValueError):
        return 0
    return reply.request_id


def accepted(
    reply,
    observation: Mapping[str, Any],
    asked: float,
    max_age: float | None,
    limits,
    max_rows: int = MAX_ROWS,
) -> ActionChunk:
    """Decode the chunk of a reply, and check that it may be executed.

    Args:
        reply: The decoded reply.
        observation: The observation of the request.
        asked: ``time.perf_counter()`` at the call.
        max_age: Largest age of the observation in seconds; None sets no limit.
        limits: Smallest and largest allowed action, (low, high), each a number or [D]; None sets no limits.
        max_rows: Largest number of actions.

    Returns:
        The chunk.

    Raises:
        UnsafeChunk: The observation is too old, an action is outside the limits, or the chunk was computed with
            another adapter than requested (old servers ignore the adapter).
        ClientError: The reply is not valid.
    """
    words_alone = observation.get("question") or observation.get("text_only")
    chunk = decode_chunk(reply, asked, max_rows, 0 if words_alone else 1)
    if chunk.adapter != (observation.get("adapter") or ""):
        raise UnsafeChunk(
            f"adapter: expected an answer from {observation.get('adapter') or 'the base'!r}, got an answer from"
            f" {shown(chunk.adapter) if chunk.adapter else 'the base'}; update the server, because old servers ignore"
            " adapters"
        )
    if max_age is not None:
        now, taken = time.perf_counter(), observation.get("time")
        age = now - asked + (0.0 if taken is None else max(0.0, time.time() - (now - asked) - taken))
        if age > max_age:
            raise LateChunk(f"the observation is {age:.3f} s old, which is more than max_age ({max_age:g} s)")
    if limits is not None:
        check_limits(chunk, limits)
    return chunk


def decode_rows(reply, max_rows: int, least: int = 1) -> np.ndarray:
    """Decode the actions of a reply.

    Args:
        reply: The decoded reply.
        max_rows: Largest number of actions.
        least: Smallest number of actions.

    Returns:
        The actions, float32 [H, D].

    Raises:
        ClientError: The reply is not valid.
        UnsafeChunk: The actions must not be executed: there are too many numbers, or a number is not finite.
    """
    # Check the counts before an array of this size is allocated.
    count, horizon, dim = len(reply.actions), reply.horizon, reply.dim
    if count != horizon * dim or not (least <= horizon and dim >= 1):
        raise ClientError(f"the reply has {count} numbers for {horizon} actions with {dim} values each")
    if horizon > max_rows or dim > MAX_DIM:
        raise UnsafeChunk(
            f"the reply: expected at most {max_rows} actions of at most {MAX_DIM} values, got {horizon} of {dim}"
        )
    actions = np.array(reply.actions, dtype=np.float32).reshape(horizon, dim)
    if not np.isfinite(actions).all():
        raise UnsafeChunk("the reply has actions that are not finite")
    return actions


def decode_chunk(reply, asked: float | None = None, max_rows: int = MAX_ROWS, least: int = 1) -> ActionChunk:
    """Decode the chunk of a reply.

    Args:
        reply: The decoded reply.
        asked: ``time.perf_counter()`` at the call; None leaves ``round_trip_ms`` at 0.
        max_rows: Largest number of actions.
        least: Smallest number of actions.

    Returns:
        The chunk.

    Raises:
        ClientError: The reply is not valid.
        UnsafeChunk: The actions must not be executed.
    """
    if reply.context:
        raise ClientError("the reply has a context and no actions; call Client.context for this policy")
    return ActionChunk(
        actions=decode_rows(reply, max_rows, least),
        timing=decode_timing(reply),
        seed=reply.seed if reply.HasField("seed") else None,
        session=reply.session,
        time=reply.time if reply.HasField("time") else None,
        round_trip_ms=0.0 if asked is None else 1e3 * (time.perf_counter() - asked),
        warnings=tuple(reply.warnings),
        text=reply.text,
        adapter=reply.adapter,
        deployment=reply.deployment,
    )


def decode_timing(reply) -> Timing:
    """Decode the times of a reply, in milliseconds."""
    values = {each.name: value for each, value in reply.timing.ListFields()}
    return Timing(**{**values, "step_ms": tuple(values.get("step_ms", ()))})


def check_limits(chunk: ActionChunk, limits) -> None:
    """Check that all actions of a chunk are inside the limits.

    Args:
        chunk: The chunk.
        limits: Smallest and largest allowed action, (low, high), each a number or [D].

    Raises:
        UnsafeChunk: An action is outside.
        ClientError: The limits have another number of values than the actions.
    """
    low, high = (np.asarray(each, np.float64) for each in limits)
    for each in (low, high):
        if each.ndim and each.shape != chunk.actions.shape[1:]:
            raise ClientError(
                f"limits: expected {chunk.actions.shape[1]} numbers (one per value), got {_describe(each)}"
            )
    within = (chunk.actions >= low) & (chunk.actions <= high)  # comparisons with a NaN limit are False
    outside = np.argwhere(~within)
    if outside.size:
        row, dim = outside[0]
        raise UnsafeChunk(
            f"action {row}, dimension {dim}: expected {np.broadcast_to(low, chunk.actions.shape)[row, dim]:g} to"
            f" {np.broadcast_to(high, chunk.actions.shape)[row, dim]:g}, got {chunk.actions[row, dim]:g}"
        )


def described(metadata: dict) -> dict:
    """Check that the metadata of a server describes a policy.

    Args:
        metadata: The decoded metadata.

    Returns:
        The same metadata.

    Raises:
        ClientError: There is no description of a policy, so another service may use this port.
    """
    for part, absent in (("policy", None), ("server", {})):
        if not isinstance(metadata.get(part, absent), dict):
            raise ClientError(
                f"metadata: expected a description of the {part}, got {shown(metadata.get(part))}; is another service"
                " on this port?"
            )
    return metadata


def decode_metadata(reply) -> dict:
    """Decode the JSON object with a server's description.

    Raises:
        ClientError: The object is not valid.
    """
    try:
        description = parse_json(reply.metadata)
    except UntrustedError as error:
        raise ClientError(f"the reply's metadata is not JSON: {error}") from error
    if not isinstance(description, dict):
        raise ClientError(f"the reply's metadata: expected an object, got {shown(description)}")
    return description


def _encode_frame(name: str, frame, jpeg_quality: int | None) -> tuple:
    """Encode one frame as a field ``images`` of the request.

    Args:
        name: Name of the camera, for error messages.
        frame: uint8 or float [height, width, 3], or the bytes of a JPEG or PNG file.
        jpeg_quality: 1 to 95 compresses uint8 frames to JPEG; None sends raw pixels.

    Returns:
        Two parts: the bytes before the pixels, and the pixels as bytes or as a view without a copy.

    Raises:
        InvalidObservation: The frame has another type or shape.
    """
    if isinstance(frame, (bytes, bytearray, memoryview)):
        data = bytes(frame)
        return image_head(schema.Image.JPEG, 0, 0, len(data)), data
    try:
        pixels = np.asarray(frame)
    except ValueError as error:
        raise InvalidObservation(f"images.{name}", "an array", "a ragged sequence") from error
    if pixels.ndim != 3 or pixels.shape[2] != 3 or not (pixels.dtype == np.uint8 or pixels.dtype.kind == "f"):
        raise InvalidObservation(
            f"images.{name}", "uint8 [height, width, 3] (or float in [0, 1])", _describe(pixels)
        )
    height, width = pixels.shape[:2]
    if pixels.dtype == np.uint8 and jpeg_quality is not None:
        import PIL.Image

        buffer = io.BytesIO()
        PIL.Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "JPEG", quality=jpeg_quality)
        data = buffer.getvalue()
        return image_head(schema.Image.JPEG, 0, 0, len(data)), data
    encoding = schema.Image.RGB_U8
    if pixels.dtype != np.uint8:
        encoding, pixels = schema.Image.F32_RGB_01, pixels.astype("<f4", copy=False)
    data = np.ascontiguousarray(pixels).reshape(-1).view(np.uint8).data
    head = FrameHead(image_head(encoding, height, width, len(data)))
    head.frame = encoding, height, width
    return head, data


class FrameHead(bytes):
    """The bytes before the raw pixels of a frame.

    Attributes:
        frame: Encoding, height, width.
    """

    frame: tuple


# Cache the results, because the frames of a robot have only a few different sizes.
@functools.lru_cache(maxsize=64)
def image_head(encoding: int, height: int, width: int, length: int, offset: int | None = None) -> bytes:
    """Encode the beginning of a field ``images``: all bytes before the pixels.

    Args:
        encoding: Encoding of the pixels (``schema.Image``).
        height: Height of the frame, pixels.
        width: Width of the frame, pixels.
        length: Size of the pixels in the message, bytes.
        offset: Position of the pixels in shared memory; None if they are in the message.
    """
    head = schema.Image(encoding=encoding, height=height, width=width, offset=offset).SerializeToString()
    if offset is None:
        head += _prefix(_DATA, length)
    return _prefix(_IMAGES, len(head) + length) + head


def kept(parts: Sequence) -> list:
    """Return the parts of a request, with a copy of each part that is a view of a frame."""
    copies = {id(each): each if isinstance(each, bytes) else bytes(each) for each in parts}
    return [copies[id(each)] for each in parts]


def generation(number: int) -> bytes:
    """Encode the field with the generation number of a request's frames in shared memory."""
    return _varint(_GENERATION) + _varint(number)


def _prefix(number: int, length: int) -> bytes:
    """Encode the tag of protobuf field ``number`` and the length of its content in bytes."""
    return _varint(number << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def floats(name: str, value, *ndim: int) -> np.ndarray:
    """Convert a field of an observation to float32.

    Args:
        name: Name of the field, for error messages.
        value: The numbers.
        *ndim: The allowed numbers of dimensions.

    Returns:
        The array.

    Raises:
        InvalidObservation: The value is not numeric, or has another number of dimensions.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:  # the rows of a ragged sequence have different lengths
        raise InvalidObservation(name, "numbers", str(type(value))) from error
    if array.dtype.kind not in "fiub":
        raise InvalidObservation(name, "numbers", _describe(array))
    if array.dtype != np.float32:
        # Numbers that are too large for float32 become infinite here. The server rejects them.
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    if array.ndim not in ndim:
        expected = " or ".join(map(str, ndim))
        raise InvalidObservation(name, f"an array with {expected} dimension(s)", _describe(array))
    return array


def _assign(name: str, setter, *arguments) -> None:
    try:
        setter(*arguments)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidObservation(
            name, f"a value that fits the field ({error})", shown(arguments[-1])
        ) from error


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"
