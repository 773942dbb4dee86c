"""The file format of an edge adapter (``adapter.py``): sizes and tensors in a safetensors file.

The file starts with the length of a JSON header in eight bytes. The header follows, with dtype, shape and byte range of
each tensor. The bytes of the tensors are last. ``__metadata__`` of the header contains the text ``sinew.adapter``, a
JSON object with the fields of :class:`Form`. Tensors are F16 or F32, little-endian. In the list of the tensors, N is
the width of the network, and V the width of its input. H, A, R and S are the form's chunk, action, rows and state.

* ``state.mean``, ``state.std`` [S]; ``rows.mean``, ``rows.std`` [A] (re-based); ``action.mean``, ``action.std`` [A];
* for each camera ``camera.NAME.I.weight`` [out, in, k, k] and ``.bias`` [out], one pair for each of its strides;
* ``input.weight`` [N, V], ``input.bias`` [N]; for each block ``block.I.norm.weight``, ``.bias`` [N],
  ``block.I.linear.weight`` [N, N], ``.bias`` [N]; ``output.norm.weight``, ``.bias`` [N], ``output.weight`` [R * A, N],
  ``output.bias`` [R * A].
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from sinew_client.errors import ClientError
from sinew_client.untrusted import UntrustedError, parse_json, shown

SCHEMA = "sinew.adapter/1"
KEY = "sinew.adapter"
_DTYPES = {"F16": "<f2", "F32": "<f4"}


class AdapterError(ClientError, ValueError):
    """The adapter cannot be read, or does not fit the policy. The message names the field and the expected value."""


@dataclass(frozen=True)
class CameraEncoder:
    """The image encoder of one camera: the size of its uint8 frames in pixels, and the stride of each convolution."""

    name: str
    height: int
    width: int
    strides: Sequence[int]


@dataclass(frozen=True)
class Form:
    """The sizes of an adapter, and the policy that it was trained for.

    Attributes:
        policy: Name of the policy whose chunks the adapter refines.
        hz: Control steps per second.
        chunk: Number of actions in a chunk (H).
        action: Number of values in an action (A).
        state: Number of values in the state (S).
        rows: Number of actions that the adapter returns, from the present step on (R).
        max_age: Largest age of a chunk in training, in control steps since the chunk's observation.
        blocks: Number of residual blocks of the network.
        cameras: The image encoder of each camera.
        motion: What actions are relative to (``motion`` of :class:`~sinew_client.control.settings.Settings`).
    """

    policy: str
    hz: float
    chunk: int
    action: int
    state: int
    rows: int
    max_age: int
    blocks: int
    cameras: Sequence[CameraEncoder]
    motion: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def parse(cls, values: Any) -> Form:
        """Parse the JSON object of a header.

        Raises:
            AdapterError: A field is missing, unknown or wrong.
        """
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            raise AdapterError(f"{KEY}: expected an object with schema {SCHEMA}, got {shown(values)}")
        names = {each.name for each in fields(cls)} | {"schema"}
        if set(values) != names:
            odd = min(set(values) ^ names)
            raise AdapterError(
                f"{KEY}: {odd}: " + ("the field is missing" if odd in names else "unknown field")
            )
        for name in ("chunk", "action", "state", "rows", "max_age", "blocks"):
            _whole(name, values[name], 1 << 12)
        if (
            isinstance(values["hz"], bool)
            or not isinstance(values["hz"], (int, float))
            or not 0 < values["hz"] <= 1e5
        ):
            raise AdapterError(f"{KEY}: hz: expected a number above 0, got {shown(values['hz'])}")
        if not isinstance(values["policy"], str) or not isinstance(values["motion"], dict):
            raise AdapterError(
                f"{KEY}: expected a text in the field policy and an object in the field motion"
            )
        cameras = values["cameras"]
        if not isinstance(cameras, list) or not cameras:
            raise AdapterError(f"{KEY}: cameras: expected a list of cameras, got {shown(cameras)}")
        settings = {name: values[name] for name in names - {"schema"}}
        return cls(**{**settings, "cameras": [_eye(each) for each in cameras]})


def _eye(values: Any) -> CameraEncoder:
    if not isinstance(values, dict) or set(values) != {"name", "height", "width", "strides"}:
        raise AdapterError(f"{KEY}: cameras: expected name, height, width and strides, got {shown(values)}")
    if (
        not isinstance(values["name"], str)
        or not isinstance(values["strides"], list)
        or not values["strides"]
    ):
        raise AdapterError(f"{KEY}: cameras: expected a name and a list of strides, got {shown(values)}")
    for name, number in (("height", values["height"]), ("width", values["width"])):
        _whole(name, number, 1 << 11)
    for stride in values["strides"]:
        _whole("strides", stride, 16)
    return CameraEncoder(**values)


def _whole(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise AdapterError(f"{KEY}: {name}: expected a whole number from 1 to {most}, got {shown(value)}")


def parse(data: bytes) -> tuple[Form, dict[str, np.ndarray]]:
    """Read the form and the tensors from the bytes of an adapter file.

    Args:
        data: The content of the file.

    Returns:
        The form, and the tensors by name.

    Raises:
        AdapterError: The bytes are not an adapter file.
    """
    header, body = _split(data)
    try:
        form = Form.parse(parse_json(header.pop("__metadata__")[KEY], finite=False))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(
            f"{KEY}: expected a JSON text with this name in __metadata__ of the file's header"
        ) from None
    return form, {name: _tensor(name, entry, body) for name, entry in header.items()}


def write(path: Path, form: Form, tensors: Mapping[str, np.ndarray]) -> None:
    """Write an adapter file, with the tensors rounded to float16."""
    half = {name: np.asarray(value, np.float32).astype("<f2") for name, value in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {KEY: json.dumps(form.to_dict())}}
    at = 0
    for name, value in half.items():
        header[name] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in half.values())
    )


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and the bytes of its tensors."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise AdapterError(f"expected a safetensors file, got {len(data)} bytes and a header of {length}")
    try:
        header = parse_json(data[8 : 8 + length])
    except UntrustedError as error:
        raise AdapterError(
            f"expected a safetensors file, got one whose header is not JSON: {error}"
        ) from None
    if not isinstance(header, dict):
        raise AdapterError(f"expected a safetensors file with an object as header, got {shown(header)}")
    return header, data[8 + length :]


def _tensor(name: str, entry: Any, body: bytes) -> np.ndarray:
    try:
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), [int(n) for n in entry["shape"]]
        begin, end = (int(n) for n in entry["data_offsets"])
        if not 0 <= begin <= end <= len(body) or any(n < 0 for n in shape):
            raise ValueError(f"bytes {begin} to {end} of {len(body)}")
        return np.frombuffer(body[begin:end], dtype).reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise AdapterError(
            f"{name}: expected dtype F16 or F32, a shape and a byte range that fits, got {error!r}"
        ) from None
