"""The messages of LeRobot's remote inference: an envelope in MessagePack, with arrays and pictures as tagged maps.

The reader checks every size before it allocates memory. Arrays and pictures stay views of the message until
``Tensor.array`` and ``RemoteFrame.frame`` decode them. Source: huggingface/lerobot,
``remote_inference/{protocol,codec}.py`` at 88807eb6 and ``transport/wire`` at a8401e9b.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
from sinew_client.untrusted import UntrustedError, shown, unpack_msgpack

from sinew.core import ObservationError, SinewError
from sinew.serve.decode.frames import PixelBudget, compressed_frame, raw_frame

VERSION = 1
MAX_MESSAGE = 32 << 20  # largest message, and largest array, bytes
MAX_ARRAYS = 64 << 20  # largest size of all decoded arrays of a message, bytes
MAX_PIXELS = 4096 * 4096  # largest picture, pixels
MAX_TEXT = 16_384  # longest string, bytes
MAX_ITEMS = 4096  # largest number of entries of one list or map
MAX_NODES = 32_768  # largest number of values of one message
MAX_DEPTH = 16
MAX_SIZE = 16_384  # largest size of one dimension of an array
MAX_RANK = 8
MAX_ERROR = 2048  # longest error message, characters
MAX_COUNTER = (1 << 63) - 1  # largest generation or sequence number

MARK = "__lerobot_type__"
TYPES = ("describe", "descriptor", "open", "accepted", "control", "ack", "observation", "action",
         "language_request", "language_result", "error")  # fmt: skip
SESSION_TYPES = ("control", "ack", "observation", "action", "language_request", "language_result")
# Ids of a deployment, an instance, a session and a request.
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
DTYPES = {
    name: np.dtype(name)
    for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
                 "float16", "float32", "float64")
}  # fmt: skip
LIMITS = {  # limits that the descriptor states to robots
    "max_message_bytes": MAX_MESSAGE,
    "max_tensor_bytes": MAX_MESSAGE,
    "max_decoded_bytes": MAX_ARRAYS,
    "max_image_pixels": MAX_PIXELS,
    "max_string_bytes": MAX_TEXT,
    "max_container_items": MAX_ITEMS,
    "max_nodes": MAX_NODES,
    "max_depth": MAX_DEPTH,
}


class RemoteError(SinewError):
    """A request that is answered with an error envelope.

    Attributes:
        code: One of the protocol's codes: unsupported, malformed, busy, stale, incompatible, execution, timeout,
            protocol.
        details: Further fields of the envelope; None without such fields.
    """

    def __init__(self, code: str, message: str, details: dict[str, Any] | None = None):
        super().__init__(message)
        self.code, self.details = code, details


class UnreadableError(RemoteError):
    """Error for a message without a readable envelope (its header). The server cannot answer it, because the sender is
    unknown.
    """


def malformed(name: str, expected: str, value: object) -> RemoteError:
    """Create the error for a field whose value has the wrong type or range.

    Args:
        name: Name of the field.
        expected: Description of the allowed values.
        value: The received value.
    """
    return RemoteError("malformed", f"{name}: expected {expected}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array of a message.

    Attributes:
        dtype: Type of the values.
        shape: Shape of the array.
        big: True if the bytes are big-endian.
        data: View of the message. Its length fits ``dtype`` and ``shape``.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    big: bool
    data: memoryview | bytes

    def array(self, name: str) -> np.ndarray:
        """Return the values in this machine's byte order. The method copies the values only if the byte order
        differs.

        Args:
            name: Name of the field, for errors.

        Raises:
            ObservationError: A value is not finite.
        """
        made = np.frombuffer(self.data, self.dtype.newbyteorder(">" if self.big else "<")).reshape(self.shape)
        if made.dtype.kind == "f" and not np.isfinite(made).all():
            raise ObservationError(name, "finite numbers", "NaN or infinity")
        return made.astype(self.dtype, copy=False)


@dataclass(frozen=True, slots=True)
class RemoteFrame:
    """A camera frame of a message, uint8 RGB.

    Attributes:
        jpeg: True if ``data`` is a JPEG file. False if ``data`` has raw pixels.
        height: Height in pixels.
        width: Width in pixels.
        data: View of the message.
    """

    jpeg: bool
    height: int
    width: int
    data: memoryview | bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, 3

    def frame(self, name: str, budget: PixelBudget) -> np.ndarray:
        """Return the pixels, uint8 [height, width, 3].

        Args:
            name: Name of the feature, for errors.
            budget: Budget of pixels of all frames of the request.

        Raises:
            ObservationError: The file does not decode, or has another size or another number of colours.
        """
        if not self.jpeg:
            return raw_frame(name, self.data, self.height, self.width, "u1", budget)
        if bytes(self.data[:3]) != b"\xff\xd8\xff":
            raise ObservationError(name, "a JPEG file", f"{len(self.data)} other bytes")
        return compressed_frame(name, self.data, budget, (self.height, self.width))


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message of the protocol, with the ids in its header.

    Attributes:
        kind: Type of the message.
        instance: Id of the server's process.
        session: Id of the session; "" outside of a session.
        generation: Generation of the session.
        request: Id of the request.
        body: Plain values, :class:`Tensor` and :class:`RemoteFrame` by their names.
    """

    kind: str
    instance: str = ""
    session: str = ""
    generation: int = 0
    request: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)

    def reply(self, kind: str, body: Mapping[str, Any], **changes: Any) -> Envelope:
        """Create an answer of type ``kind``. It repeats the ids of this request, except those in ``changes``."""
        identity = {
            "instance": self.instance,
            "session": self.session,
            "generation": self.generation,
            "request": self.request,
        }
        return Envelope(kind, body=body, **{**identity, **changes})

    def error(self, error: SinewError) -> Envelope:
        """Create the error envelope that answers this request."""
        body: dict[str, Any] = {"code": code_of(error), "message": str(error)[:MAX_ERROR]}
        if isinstance(error, RemoteError) and error.details is not None:
            body["details"] = error.details
        return self.reply("error", body)


CODES = {
    "busy": "busy",
    "superseded": "busy",
    "deadline": "timeout",
    "bad_observation": "malformed",
    "bad_request": "malformed",
}


def code_of(error: SinewError) -> str:
    """Return the protocol's code for an error."""
    return error.code if isinstance(error, RemoteError) else CODES.get(error.code, "execution")


def decode(payload: bytes | memoryview) -> Envelope:
    """Read the envelope in a message, and check its body against every limit.

    Args:
        payload: The message. The arrays and pictures of the result are views of the message.

    Raises:
        UnreadableError: The message has no envelope, or exceeds a limit. The server cannot answer it.
        RemoteError: The envelope is readable, but the body is not. ``envelope_of`` returns the envelope for an
            answer.
    """
    envelope, body = _read(payload)
    room = _Room()
    return replace(envelope, body={key: _value(key, value, room) for key, value in body.items()})


def envelope_of(payload: bytes | memoryview) -> Envelope | None:
    """Return the envelope of a message without its body, which may be damaged; None if there is no envelope."""
    try:
        return _read(payload)[0]
    except UnreadableError:
        return None


def _read(payload: bytes | memoryview) -> tuple[Envelope, Mapping[str, Any]]:
    if len(payload) > MAX_MESSAGE:
        raise UnreadableError(
            "protocol", f"message: expected at most {MAX_MESSAGE} bytes, got {len(payload)}"
        )
    try:
        tree = unpack_msgpack(payload, max_values=MAX_NODES, max_depth=MAX_DEPTH, max_text=MAX_TEXT)
    except UntrustedError as error:
        raise UnreadableError("protocol", f"MessagePack: {error}") from None
    if not isinstance(tree, dict) or MARK in tree:
        raise UnreadableError("protocol", "message: expected a map with an envelope, got a value without one")
    version, kind, body = tree.get("version"), tree.get("message_type"), tree.get("body")
    if type(version) is not int or version != VERSION:
        raise UnreadableError("protocol", f"version: expected {VERSION}, got {shown(version)}")
    if not isinstance(kind, str) or kind not in TYPES:
        raise UnreadableError("protocol", f"message_type: expected a type of the protocol, got {shown(kind)}")
    names = [tree.get(name) for name in ("instance_id", "session_id", "request_id")]
    for each in names:
        if not isinstance(each, str) or (each and not IDENTIFIER.fullmatch(each)):
            raise UnreadableError(
                "protocol", f"identifier: expected at most 128 letters, digits and _.-, got {shown(each)}"
            )
    generation = tree.get("generation")
    if type(generation) is not int or not 0 <= generation <= MAX_COUNTER:
        raise UnreadableError(
            "protocol", f"generation: expected a whole number of 0 or more, got {shown(generation)}"
        )
    if not isinstance(body, dict) or MARK in body:
        raise UnreadableError("protocol", f"body: expected a map, got {shown(body)}")
    if kind in SESSION_TYPES and "" in names:
        raise UnreadableError(
            "protocol", f"{kind}: expected ids of an instance, a session and a request, got an empty id"
        )
    instance, session, request = map(str, names)
    return Envelope(kind, instance, session, generation, request), body


class _Room:
    """Counts how many bytes the decoded arrays of one message may still use."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_ARRAYS

    def take(self, name: str, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise RemoteError(
                "malformed", f"{name[:80]}: expected at most {MAX_ARRAYS} bytes in all arrays, got more"
            )


def _value(name: str, node: Any, room: _Room) -> Any:
    if isinstance(node, dict):
        if len(node) > MAX_ITEMS:
            raise malformed(name[:80], f"a map of at most {MAX_ITEMS} entries", len(node))
        if MARK in node:
            return _record(name, node, room)
        return {key: _value(key, value, room) for key, value in node.items()}
    if isinstance(node, list):
        if len(node) > MAX_ITEMS:
            raise malformed(name[:80], f"a list of at most {MAX_ITEMS} values", len(node))
        return [_value(name, value, room) for value in node]
    if isinstance(node, float) and not math.isfinite(node):
        raise malformed(name[:80], "a finite number", node)
    return node


def _record(name: str, node: Mapping[str, Any], room: _Room) -> Tensor | RemoteFrame:
    name, kind, data = name[:80], node[MARK], node.get("data")
    if not isinstance(data, memoryview):
        raise malformed(f"{name}.data", "bytes", data)
    shape = node.get("shape")
    if not (
        isinstance(shape, list)
        and len(shape) <= MAX_RANK
        and all(type(size) is int and 1 <= size <= MAX_SIZE for size in shape)
    ):
        raise malformed(f"{name}.shape", f"at most {MAX_RANK} sizes from 1 to {MAX_SIZE}", shape)
    if kind == "tensor":
        return _tensor(name, node, tuple(shape), data, room)
    if kind != "rgb":
        raise malformed(f"{name}.{MARK}", "tensor or rgb", kind)
    for key, expected in (("dtype", "uint8"), ("channel_order", "RGB")):
        if node.get(key) != expected:
            raise malformed(f"{name}.{key}", expected, node.get(key))
    encoding = node.get("encoding")
    if encoding not in ("raw", "jpeg"):
        raise malformed(f"{name}.encoding", "raw or jpeg", encoding)
    if len(shape) != 3 or shape[2] != 3 or shape[0] * shape[1] > MAX_PIXELS:
        raise malformed(f"{name}.shape", f"[height, width, 3] of at most {MAX_PIXELS} pixels", shape)
    room.take(name, size := math.prod(shape))
    if encoding == "raw" and len(data) != size:
        raise RemoteError("malformed", f"{name}.data: expected {size} bytes, got {len(data)}")
    return RemoteFrame(encoding == "jpeg", shape[0], shape[1], data)


def _tensor(
    name: str, node: Mapping[str, Any], shape: tuple[int, ...], data: memoryview, room: _Room
) -> Tensor:
    text, endianness = node.get("dtype"), node.get("endianness")
    dtype = DTYPES.get(text) if isinstance(text, str) else None
    if dtype is None:
        raise malformed(f"{name}.dtype", f"one of {', '.join(DTYPES)}", text)
    if endianness not in ("little", "big"):
        raise malformed(f"{name}.endianness", "little or big", endianness)
    size = math.prod(shape) * dtype.itemsize
    if size != len(data):
        raise RemoteError(
            "malformed", f"{name}.data: expected {size} bytes ({list(shape)} {text}), got {len(data)}"
        )
    room.take(name, size)
    if text == "bool" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise RemoteError(
            "malformed", f"{name}.data: expected only the bytes 0 and 1 for booleans, got other bytes"
        )
    return Tensor(dtype, shape, endianness == "big", data)


def encode(envelope: Envelope) -> bytes:
    """Return a message as bytes. numpy arrays in the body become tensors in little-endian byte order."""
    tree = {
        "version": VERSION,
        "message_type": envelope.kind,
        "instance_id": envelope.instance,
        "session_id": envelope.session,
        "generation": envelope.generation,
        "request_id": envelope.request,
        "body": envelope.body,
    }
    return bytes(msgpack.packb(tree, use_bin_type=True, default=_tagged))


def _tagged(value: Any) -> dict[str, Any]:
    if isinstance(value, RemoteFrame):
        return {
            MARK: "rgb",
            "encoding": "jpeg" if value.jpeg else "raw",
            "shape": list(value.shape),
            "dtype": "uint8",
            "channel_order": "RGB",
            "data": bytes(value.data),
        }
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a message cannot contain a value of type {type(value).__name__}")
    dense = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(value.shape)
    return {
        MARK: "tensor",
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "endianness": "little",
        "data": dense.tobytes(),
    }
