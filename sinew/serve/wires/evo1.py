"""Evo-1's WebSocket messages: JSON text, one object per observation, one list of actions per answer. This module
uses no sockets.

  {"image": [[[[b, g, r], ...], ...], ...], "image_mask": [1, 1, 0], "state": [...], "action_mask": [1, ..., 0],
   "prompt": "...", "arm_key": "...", "dataset_key": "..."}        the last two may be missing
  [[0.1, ...], ...]                                                actions of 24 values, padded with zeros

Pictures are whole-number pixels in the order blue, green, red, because the original server swaps the first and
the third colour. Pictures have the order of the policy's cameras. Masked pictures come last and are black.
Source: MINT-SJTU/Evo-1 ``Evo_1/scripts/Evo1_server.py`` and its clients (``Evo1_client_xarm6.py``,
``Evo1_client_aloha.py``, ``LIBERO_evaluation``, ``MetaWorld_evaluation``, ``RoboTwin_evaluation``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from sinew_client.untrusted import shown

from sinew.core import ActionChunk, Observation, ObservationError, PolicySpec, RequestError
from sinew.serve.decode.frames import MAX_IMAGES, PixelBudget
from sinew.serve.request import Outcome, WireMessage
from sinew.serve.transport.listen import reachable
from sinew.serve.transport.routes import Dialect
from sinew.serve.wires import field_names

NAME = "evo1"
WIDTH = 24  # number of values of an action in the answer, as in the original server
MAX_FIELD = 1 << 16  # largest field except the pictures, bytes
DIGITS, SPACE = b"0123456789", b" \t\r\n"
ZEROS = bytes.maketrans(DIGITS, b"0" * 10)


NULL = msgspec.Raw(b"null")


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a message. Large fields are not turned into Python lists. Evo-1's clients send no other fields."""

    image: msgspec.Raw
    state: msgspec.Raw
    prompt: msgspec.Raw
    image_mask: msgspec.Raw
    action_mask: msgspec.Raw
    arm_key: msgspec.Raw = NULL
    dataset_key: msgspec.Raw = NULL


def read(payload: bytes) -> WireMessage:
    """Return a message with undecoded content. A decode thread decodes it later, because megabytes of JSON would take
    too long on the event loop.
    """
    return WireMessage(payload)


def observation(message: WireMessage, spec: PolicySpec, budget: PixelBudget | None = None) -> Observation:
    """Convert a message of an Evo-1 client to an observation.

    Raises:
        RequestError: The message is not valid JSON.
        ObservationError: A field of the observation is missing or wrong.
    """
    text, fields = _decoded(message.content)
    _check_statistics(fields, spec)
    _check_actions(fields["action_mask"], spec.action.dim)
    state = field_names.vector("state", fields["state"])
    if len(state) > spec.state.dim and not state[spec.state.dim :].any():
        raise ObservationError(
            "state",
            f"{spec.state.dim} numbers",
            f"{len(state)}; if the client pads its state, convert with --set state_dim={len(state)}",
        )
    return Observation(
        images=_images(text, _flags("image_mask", fields["image_mask"]), spec, budget or PixelBudget()),
        state=state,
        prompt=field_names.text("prompt", fields["prompt"]),
    )


def _decoded(payload: bytes) -> tuple[bytes, dict[str, Any]]:
    """Decode a message. Return the pictures as JSON text that is not decoded yet, and the other fields as values."""
    try:
        body = msgspec.json.decode(payload, type=_Body)  # bounded: its fields stay bytes
        fields: dict[str, Any] = {}
        for name in ("state", "prompt", "image_mask", "action_mask", "arm_key", "dataset_key"):
            raw = bytes(getattr(body, name))
            if len(raw) > MAX_FIELD:
                raise ObservationError(name, f"at most {MAX_FIELD} bytes", str(len(raw)))
            fields[name] = msgspec.json.decode(raw)  # bounded: the length is checked above
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"request: not a JSON observation: {str(error)[:200]}") from None
    return bytes(body.image), fields


def _images(text: bytes, mask: list[bool], spec: PolicySpec, budget: PixelBudget) -> dict[str, np.ndarray]:
    pictures, cameras = list(_pictures(text, budget)), [camera.name for camera in spec.cameras]
    if len(mask) != len(pictures):
        raise ObservationError("image_mask", f"{len(pictures)} numbers, one per picture", str(len(mask)))
    present = sum(mask)
    if not 1 <= present <= len(cameras) or not all(mask[:present]):
        raise ObservationError(
            "image_mask",
            f"1 to {len(cameras)} ones, then zeros",
            str([int(flag) for flag in mask]),
        )
    for index, picture in enumerate(pictures[present:], present):
        if picture.any():
            raise ObservationError(
                f"image[{index}]", "a black picture, because image_mask is 0", "a picture that is not black"
            )
    return {
        name: np.ascontiguousarray(frame[..., ::-1])
        for name, frame in zip(cameras, pictures[:present], strict=False)
    }


def _pictures(text: bytes, budget: PixelBudget) -> Iterator[np.ndarray]:
    """Yield uint8 [height, width, 3] for each picture in the JSON text of a list of pictures.

    The brackets alone determine the shape, and must match it exactly. The numbers are parsed in one call, because a
    picture as Python lists would take a hundred times its bytes.
    """
    brackets, digits = text.translate(None, DIGITS + SPACE), text.translate(None, b"[]" + SPACE)
    where = "pictures [height][width][3] of whole numbers from 0 to 255"
    if brackets[:1] != b"[" or brackets[-1:] != b"]":
        raise ObservationError("image", where, "another structure")
    at, shapes = 1, list[tuple[int, int, int]]()
    while at < len(brackets) - 1:
        end = brackets.find(b"]]]", at) + 3
        width = brackets[at:end].partition(b"]]")[0].count(b"[,,") if end > 2 else 0
        # The divisor is the number of brackets and commas of one row, with the comma after the row.
        height = (end - at - 1) // (5 * width + 2)
        name = f"image[{len(shapes)}]"
        if width == 0 or height == 0:
            raise ObservationError(
                name, "[height][width][3] of whole numbers from 0 to 255", "another structure"
            )
        budget.take(name, height, width)
        row = b"[" + b",".join([b"[,,]"] * width) + b"]"
        if brackets[at:end] != b"[" + b",".join([row] * height) + b"]":
            raise ObservationError(
                name, "[height][width][3] of whole numbers from 0 to 255", "another structure"
            )
        shapes.append((height, width, 3))
        if len(shapes) > MAX_IMAGES:
            raise ObservationError("image", f"at most {MAX_IMAGES} pictures", "more")
        if brackets[end : end + 1] not in (b",", b"]"):
            raise ObservationError("image", where, "another structure")
        at = end + 1
    total = sum(height * width * 3 for height, width, _ in shapes)
    if digits.count(b",") + bool(digits) != total or b"0000" in digits.translate(ZEROS):
        raise ObservationError("image", "whole numbers from 0 to 255", "other values, or too few")
    # The text now contains only commas and numbers of at most three digits, and msgspec has checked
    # that it is JSON.
    numbers = np.fromstring(digits, np.int16, sep=",")
    if len(numbers) != total:
        raise ObservationError("image", "whole numbers from 0 to 255", "other values, or too few")
    if numbers.max(initial=0) > 255:
        raise ObservationError("image", "whole numbers from 0 to 255", str(numbers.max()))
    start = 0
    for shape in shapes:
        size = shape[0] * shape[1] * 3
        yield numbers[start : start + size].astype(np.uint8).reshape(shape)
        start += size


def _flags(name: str, value: Any) -> list[bool]:
    """Convert a mask (a list of 0 and 1) to booleans. Leading axes of length 1 are dropped, because only some clients
    send them.
    """
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not all(each in (0, 1) for each in value):
        raise ObservationError(name, "a list of zeros and ones", shown(value, 60))
    return [bool(each) for each in value]


def _check_actions(value: Any, dim: int) -> None:
    """Check that the client requests exactly the values that the policy's actions have.

    Args:
        value: The client's ``action_mask``.
        dim: Number of values of the policy's actions.

    Raises:
        ObservationError: The mask requests other values.
    """
    mask = _flags("action_mask", value)
    if mask[:dim] != [True] * dim or any(mask[dim:]):
        raise ObservationError("action_mask", f"{dim} ones, then zeros", f"{sum(mask)} ones of {len(mask)}")


def _check_statistics(fields: dict[str, Any], spec: PolicySpec) -> None:
    """Raise ObservationError if the client requests other statistics than the bundle has. A bundle that names no
    statistics accepts any name.
    """
    arm, _, dataset = spec.embodiment.partition("/")
    for name, own in (("arm_key", arm), ("dataset_key", dataset)):
        requested = field_names.optional_text(name, fields[name])
        if own and requested and requested != own:
            raise ObservationError(
                name, f"{own!r}, which this policy was converted for", repr(requested[:100])
            )


def answer(
    _message: WireMessage, outcomes: Sequence[Outcome], _server_ms: float, _before: float | None
) -> str:
    (actions,) = (each.actions for each in outcomes if isinstance(each, ActionChunk))
    rows, dim = actions.shape
    padded = np.zeros((rows, max(dim, WIDTH)), np.float32)
    padded[:, :dim] = actions
    return json.dumps(padded.tolist())


def guide(spec: PolicySpec, address: str) -> list[str]:
    """Return an example program that uses the package websockets."""
    pictures = [
        f"np.zeros(({camera.height}, {camera.width}, 3), np.uint8).tolist()" for camera in spec.cameras
    ]
    return [
        "import json",
        "import numpy as np",
        "from websockets.sync.client import connect",
        "",
        "observation = {",
        '    "image": [  # blue, green, red',
        *(f"        {picture}," for picture in pictures),
        "    ],",
        f'    "image_mask": {[1] * len(pictures)},',
        f'    "state": [0.0] * {spec.state.dim},',
        f'    "action_mask": [1] * {spec.action.dim} + [0] * {max(WIDTH - spec.action.dim, 0)},',
        '    "prompt": "pick up the red cube",',
        "}",
        f'with connect("{reachable(address)}", max_size=None) as server:',
        "    server.send(json.dumps(observation))",
        f"    print(json.loads(server.recv()))  # {spec.chunk_size} rows",
    ]


DIALECT = Dialect(NAME, read, observation, answer, guide, binary=False, explains=False, ping_s=None)
