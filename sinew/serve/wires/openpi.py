"""openpi's WebSocket messages, and vLLM-Omni's dialect of these messages. This module uses no sockets.

A connection begins with the server's metadata. After that, each observation and each answer is one msgpack map.
Source: openpi ``serving/websocket_policy_server.py`` and
``openpi_client/{msgpack_numpy,websocket_client_policy}.py``. The keys ``endpoint``, ``session_id`` and ``seed``
come from vLLM-Omni's ``serving/openpi_api``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sinew.core import (
    ActionChunk,
    Moment,
    Observation,
    ObservationError,
    PolicySpec,
    RequestError,
    SinewError,
)
from sinew.serve.decode.array import pack, unpack
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.request import Outcome, WireMessage
from sinew.serve.transport.listen import reachable
from sinew.serve.transport.routes import Dialect, error_entry
from sinew.serve.wires import field_names
from sinew.serve.wires.field_names import OPTIONS, SEVERAL, members_of, number, options

NAME = "openpi"
_NOT_OBSERVED = ("endpoint", "session_id", "deadline_ms")
# Key: field that some clients always send, even if the policy does not read it. Value: why the server may ignore it.
IGNORED = {
    "observation/cartesian_position": "vLLM-Omni's and DreamZero's clients send zeros in addition to the joints"
}


def read(payload: bytes) -> WireMessage:
    """Return the message in the bytes of a WebSocket frame.

    Raises:
        RequestError: The bytes are not a valid message.
        ObservationError: An array in the message is not valid.
    """
    tree = unpack(payload)
    if not isinstance(tree, Mapping):
        raise RequestError(f"request: expected a map of observation keys, got {type(tree).__name__}")
    if SEVERAL not in tree:
        return _one(tree)
    members = [_one(each) for each in members_of(tree, ("deadline_ms",))]
    return replace(_one({key: tree[key] for key in tree if key != SEVERAL}), observations=members)


def _one(tree: Mapping[str, Any]) -> WireMessage:
    flat = field_names.flatten(tree)
    endpoint = field_names.text("endpoint", flat.get("endpoint", "infer"))
    if endpoint not in ("infer", "reset"):
        raise RequestError(f"endpoint: expected infer or reset, got {endpoint[:40]!r}")
    session = field_names.optional_text("session_id", flat.get("session_id"))
    deadline = flat.get("deadline_ms")
    kind: Any = endpoint
    return WireMessage(flat, kind, session, None if deadline is None else number("deadline_ms", deadline))


def observation(message: WireMessage, spec: PolicySpec, budget: PixelBudget | None = None) -> Observation:
    """Convert a message of an openpi client to an observation. Frames with values in [0, 1] become bytes as in
    openpi: each value is multiplied by 255 and rounded down.

    Raises:
        ObservationError: A field of the observation is missing or wrong.
    """
    flat = {key: value for key, value in message.content.items() if key not in _NOT_OBSERVED}
    seen = field_names.read_observation(
        flat, spec, NAME, budget, (*OPTIONS, *IGNORED), session=message.session, **options(flat)
    )
    *earlier, newest = (
        Moment({name: _bytes(name, frame) for name, frame in each.images.items()}, each.state)
        for each in seen.moments
    )
    return replace(seen, images=newest.images, earlier=tuple(earlier))


def answer(
    message: WireMessage, outcomes: Sequence[Outcome], server_ms: float, previous_ms: float | None
) -> bytes:
    """Return the answer to a message. Each of several observations has its own answer or error.

    Args:
        message: The message.
        outcomes: The outcome of each observation.
        server_ms: Milliseconds since the message arrived.
        previous_ms: Whole time of the connection's previous message, milliseconds; None for the first message.
    """
    answers = [
        error_entry(each) if isinstance(each, SinewError) else _answer(each, server_ms, previous_ms)
        for each in outcomes
    ]
    return pack({"answers": answers} if message.observations else answers[0])


def _answer(chunk: ActionChunk, server_ms: float, previous_ms: float | None) -> dict[str, Any]:
    """Return the answer with a chunk.

    openpi's example client prints a statistic of every value in the two timing maps, so these maps contain only
    numbers.

    Args:
        chunk: The chunk.
        server_ms: Milliseconds since the request arrived.
        previous_ms: Whole time of the connection's previous request, milliseconds; None for the first request.
    """
    timing = chunk.timing
    server = {"infer_ms": server_ms, "queue_ms": timing.queue_ms, "batch": float(timing.batch)}
    if previous_ms is not None:
        server["prev_total_ms"] = previous_ms
    policy = {
        "infer_ms": timing.total_ms,
        "preprocess_ms": timing.preprocess_ms,
        "vision_ms": timing.vision_ms,
        "prefix_ms": timing.prefix_ms,
        "head_ms": timing.head_ms,
        "postprocess_ms": timing.postprocess_ms,
    }
    reply: dict[str, Any] = {"actions": chunk.actions, "policy_timing": policy, "server_timing": server}
    if timing.reused_views:
        policy |= {"reused_views": timing.reused_views, "reused_prefix": int(timing.reused_prefix)}
    if timing.text_ms:
        policy["text_ms"], reply["text"] = timing.text_ms, chunk.text
    if chunk.seed is not None:
        reply["seed"] = chunk.seed
    if chunk.session:
        reply["session_id"] = chunk.session
    if chunk.adapter:
        reply["adapter"] = chunk.adapter
    if chunk.warnings:
        reply["warnings"] = list(chunk.warnings)
    return reply


def reset_answer() -> bytes:
    return pack({"status": "reset successful"})


def metadata(spec: PolicySpec, server: Mapping[str, Any]) -> bytes:
    """Return the first frame of a connection. The frame begins with the fields that vLLM-Omni's clients read."""
    first = spec.cameras[0]
    cameras = field_names.camera_keys(spec, NAME)
    wrists = [name for name, key in cameras.items() if "wrist" in f"{name} {key}"]
    return pack(
        {
            "action_horizon": spec.chunk_size,
            "action_dim": spec.action.dim,
            "action_keys": list(spec.action.names),
            "image_resolution": [first.height, first.width],
            "n_external_cameras": len(spec.cameras) - len(wrists),
            "needs_wrist_camera": bool(wrists),
            "needs_session_id": False,
            "image_keys": list(cameras.values()),
            "state_keys": list(field_names.state_keys(spec, NAME)),
            "prompt_key": field_names.prompt_key(spec, NAME),
            **server,
        }
    )


def guide(spec: PolicySpec, address: str) -> list[str]:
    """Return an example program that uses the package openpi-client."""
    maps = field_names.key_maps(spec, NAME)
    first = maps[0].channels_first if maps else False
    fields: list[tuple[str, str]] = []
    for camera, key in field_names.camera_keys(spec, NAME).items():
        size = next(each for each in spec.cameras if each.name == camera)
        shape = f"3, {size.height}, {size.width}" if first else f"{size.height}, {size.width}, 3"
        fields.append((key, f"np.zeros(({shape}), np.uint8)"))
    state = field_names.state_keys(spec, NAME)
    sizes = (
        [spec.state.dim] if len(state) == 1 else [spec.state.dim - len(state) + 1] + [1] * (len(state) - 1)
    )
    fields += [(key, f"np.zeros({size})") for key, size in zip(state, sizes, strict=True)]
    fields.append((field_names.prompt_key(spec, NAME), '"pick up the red cube"'))
    address = reachable(address)
    return [
        "import os",
        "import numpy as np",
        "from openpi_client.websocket_client_policy import WebsocketClientPolicy",
        "",
        "observation = {",
        *_nested(fields),
        "}",
        'key = os.environ.get("SINEW_API_KEY")  # if the server requires one',
        f'policy = WebsocketClientPolicy("{address}", port=None, api_key=key)',
        f'print(policy.infer(observation)["actions"])  # float32 [{spec.chunk_size}, {spec.action.dim}]',
    ]


def _nested(fields: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines of an observation as openpi's robots send it: flat, except for ALOHA's nested ``images``."""
    lines, images = (
        [],
        [(key.removeprefix("images/"), value) for key, value in fields if key.startswith("images/")],
    )
    if images:
        lines += ['    "images": {', *(f'        "{key}": {value},' for key, value in images), "    },"]
    return lines + [f'    "{key}": {value},' for key, value in fields if not key.startswith("images/")]


def _bytes(name: str, frame: np.ndarray) -> np.ndarray:
    """Return a frame as uint8. Floats in [0, 1] are multiplied by 255 and rounded down, as in openpi.

    Raises:
        ObservationError: A value of the frame is not in [0, 1].
    """
    if frame.dtype == np.uint8:
        return frame
    if not np.isfinite(frame).all() or frame.min(initial=0) < 0 or frame.max(initial=0) > 1:
        raise ObservationError(f"images.{name}", "floats in [0, 1]", "values outside of this range")
    return (255 * frame).astype(np.uint8)


DIALECT = Dialect(NAME, read, observation, answer, guide, greet=metadata, reset=reset_answer)
