"""HTTP messages: ``POST /v1/actions`` for all clients, ``/vqa`` and ``/subtask`` for text, ``POST /act`` for
OpenVLA's clients. This module uses no sockets.

``/v1/actions`` takes JSON, or the same maps in msgpack with arrays as openpi sends them:

    {"images": {"front": "<base64 of a JPEG or PNG file>"}, "state": [0.1, ...], "prompt": "pick up the cube",
     "seed": 1, "solver_steps": 10, "noise": [[...]], "session": "arm-1", "deadline_ms": 100, "time": 12.5,
     "policy": "default", "adapter": "kitchen", "subtask": false, "text_tokens": 48}

Frames may also be ``{"__numpy__": base64, "dtype": "|u1", "shape": [h, w, 3]}``. Answers:

    {"actions": [[...], ...], "seed": 1, "session": "arm-1", "time": 12.5, "timing": {"total_ms": ..., ...}}
    {"error": {"code": "bad_observation", "message": "state: expected ..., got ...", "field": "state"}}

With ``"subtask": true`` the answer also has the subtask, as ``text``. ``/vqa`` takes the same map with an additional
``question``. ``/subtask`` takes the same map without additions. Both answer with ``text`` in place of the actions.

``/act`` has two forms, both as plain JSON and as ``{"encoded": text}``. In OpenVLA-OFT's form
(``vla-scripts/deploy.py``), a request has ``full_image``, keys with "wrist", ``state`` and ``instruction``, and the
answer is a list of actions. In OpenVLA's form, a request has ``image`` and ``instruction``, and the answer is one
action.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np
from sinew_client.untrusted.messages import MAX_VALUES

from sinew.core import ActionChunk, Observation, ObservationError, PolicySpec, RequestError, SinewError
from sinew.serve.decode.array import from_base64, from_json_numpy, pack, to_json_numpy, unpack
from sinew.serve.decode.frames import PixelBudget, compressed_frame
from sinew.serve.request import Outcome, WireMessage
from sinew.serve.transport.listen import reachable
from sinew.serve.transport.routes import JSON, error_entry
from sinew.serve.wires import field_names
from sinew.serve.wires.field_names import OPTIONS, SEVERAL, members_of, number, options

NAME = "http"
MSGPACK = "application/msgpack"
MAX_WIDE = 1 << 18  # longest text that is not base64, characters


def read(body: bytes | bytearray, content_type: str) -> WireMessage:
    """Return the message in the body of an HTTP request.

    Raises:
        RequestError: The body is not valid JSON or msgpack.
        ObservationError: An array in the body is not valid.
    """
    tree = unpack(body) if content_type == MSGPACK else _json(body)
    if not isinstance(tree, Mapping):
        raise RequestError(
            f"request: expected an object with the keys of an observation, got {type(tree).__name__}"
        )
    if SEVERAL in tree:
        members = [_message(each) for each in members_of(tree, ("deadline_ms", "policy"))]
        return replace(_message({key: tree[key] for key in tree if key != SEVERAL}), observations=members)
    return _message(tree)


def _message(tree: Mapping[str, Any]) -> WireMessage:
    deadline = tree.get("deadline_ms")
    return WireMessage(
        tree,
        session=field_names.optional_text("session", tree.get("session")),
        deadline_ms=None if deadline is None else number("deadline_ms", deadline),
        policy=field_names.optional_text("policy", tree.get("policy")),
    )


def observation(message: WireMessage, spec: PolicySpec, budget: PixelBudget | None = None) -> Observation:
    """Convert a message of an HTTP client to an observation.

    Raises:
        ObservationError: A field of the observation is missing or wrong.
    """
    flat = field_names.flatten(_arrays(message.content))
    budget = budget or PixelBudget()
    for key, value in flat.items():
        if (
            isinstance(value, str)
            and key not in (*field_names.PROMPT_KEYS, "question", "session", "policy", "adapter")
            and len(value) > 64
        ):
            flat[key] = compressed_frame(key, from_base64(key, value), budget)
        elif isinstance(value, bytes):
            flat[key] = compressed_frame(key, value, budget)
    beside = (*OPTIONS, "session", "deadline_ms", "policy")
    return field_names.read_observation(
        flat, spec, NAME, budget.again(), beside, session=message.session, **options(flat)
    )


def with_question(observation: Observation) -> Observation:
    """Check and return the observation of a ``/vqa`` request.

    Raises:
        ObservationError: The request contains no question.
    """
    if not observation.question:
        raise ObservationError("question", "text", "nothing")
    return observation


def subtask(observation: Observation) -> Observation:
    """Return the observation of a ``/subtask`` request, with ``subtask`` set to True.

    Raises:
        ObservationError: The request contains a question, which belongs to ``/vqa``.
    """
    if observation.question:
        raise ObservationError(
            "question", "no question in a request for a subtask", "a question; send questions to /vqa"
        )
    return replace(observation, subtask=True, text_only=True)


def answer(message: WireMessage, outcomes: Sequence[Outcome], server_ms: float, content_type: str) -> bytes:
    """Return the answer to a message. Each of several observations has its own answer or error.

    Args:
        message: The message.
        outcomes: The outcome of each observation.
        server_ms: Milliseconds since the message arrived.
        content_type: Content type of the request, which is also the content type of the answer.
    """
    answers = [
        error_entry(each) if isinstance(each, SinewError) else _answer(each, server_ms, content_type)
        for each in outcomes
    ]
    reply = {"answers": answers} if message.observations else answers[0]
    return pack(reply) if content_type == MSGPACK else json.dumps(reply).encode()


def _answer(chunk: ActionChunk, server_ms: float, content_type: str) -> dict[str, Any]:
    timing = asdict(chunk.timing) | {"server_ms": server_ms}
    reply: dict[str, Any] = {"timing": timing}
    if len(chunk.actions):
        actions = chunk.actions if content_type == MSGPACK else chunk.actions.tolist()
        reply |= {"actions": actions, "seed": chunk.seed}
    # Text was generated if it took time, even if the text is empty.
    if timing["text_ms"]:
        reply["text"] = chunk.text
    reply |= {"session": chunk.session, "time": chunk.time, "warnings": list(chunk.warnings)}
    if chunk.adapter:
        reply["adapter"] = chunk.adapter
    return reply


@dataclass(frozen=True, slots=True)
class Act:
    """A request of OpenVLA's clients.

    Attributes:
        content: The observation.
        single: True for OpenVLA's form, which is answered with one action; False for OpenVLA-OFT's.
        encoded: True if the client wrapped its JSON in JSON.
    """

    content: Mapping[str, Any]
    single: bool
    encoded: bool


def read_act(body: bytes | bytearray) -> Act:
    """Return the request of an OpenVLA client in the body of an HTTP request.

    Raises:
        RequestError: The body is not valid JSON.
        ObservationError: An array in the body is not valid.
    """
    tree = _json(body)
    encoded = isinstance(tree, dict) and isinstance(tree.get("encoded"), str)
    if encoded:
        tree = _json(tree["encoded"].encode())
    if not isinstance(tree, dict):
        raise RequestError(
            f"request: expected an object with the keys of an observation, got {type(tree).__name__}"
        )
    return Act(tree, "full_image" not in tree, encoded)


def act_observation(act: Act, spec: PolicySpec, budget: PixelBudget | None = None) -> Observation:
    """Return the observation of a request of OpenVLA's clients.

    The bundle's key map for the protocol "openvla" names the cameras. Without a key map, the full image belongs
    to the policy's first camera, and the wrist images belong to the other cameras, in the order of the message.
    A policy without a state ignores the client's state, as OpenVLA's server does.

    Raises:
        ObservationError: An input is missing or wrong.
    """
    flat = field_names.flatten(_arrays(act.content))
    unnorm_key = field_names.optional_text("unnorm_key", flat.pop("unnorm_key", None))
    # LIBERO's name may end in _no_noops, as in the original server.
    if unnorm_key and spec.embodiment not in (
        "",
        unnorm_key,
        f"{unnorm_key}_no_noops",
    ):
        raise ObservationError(
            "unnorm_key", f"{spec.embodiment}, the statistics of this bundle", unnorm_key[:100]
        )
    if not field_names.key_maps(spec, "openvla"):
        names = ["image" if act.single else "full_image", *(key for key in flat if "wrist" in key)]
        cameras = [camera.name for camera in spec.cameras]
        if len(names) > len(cameras):
            raise ObservationError(
                "images", f"at most {len(cameras)} ({', '.join(cameras)})", f"{len(names)}"
            )
        if names[0] not in flat:
            raise ObservationError(names[0], "a frame", "nothing")
        flat = {key: value for key, value in flat.items() if key not in names} | {
            f"images/{camera}": flat[name] for camera, name in zip(cameras, names, strict=False)
        }
        # OpenVLA's clients send no state.
        if spec.state.dim == 0 or ("state" not in flat and act.single):
            flat["state"] = np.zeros(spec.state.dim)
    return field_names.read_observation(flat, spec, "openvla", budget)


def act_answer(chunk: ActionChunk, act: Act) -> bytes:
    rows = [to_json_numpy(row) for row in chunk.actions]
    text = json.dumps(rows[0] if act.single else rows)
    return (json.dumps(text) if act.encoded else text).encode()


def guide(spec: PolicySpec, address: str) -> list[str]:
    """Return an example program that needs only the standard library and Pillow."""
    images = [
        f'    "{key}": picture({camera.width}, {camera.height}),'
        for key, camera in zip(field_names.camera_keys(spec, NAME).values(), spec.cameras, strict=False)
    ]
    return [
        "import base64, io, json, os, urllib.request",
        "from PIL import Image",
        "",
        "def picture(width, height):",
        '    file = io.BytesIO(); Image.new("RGB", (width, height)).save(file, "PNG")',
        "    return base64.b64encode(file.getvalue()).decode()",
        "",
        "observation = {",
        *images,
        f'    "{field_names.state_keys(spec, NAME)[0]}": [0.0] * {spec.state.dim},',
        f'    "{field_names.prompt_key(spec, NAME)}": "pick up the red cube",',
        "}",
        f'request = urllib.request.Request("{reachable(address)}/v1/actions", json.dumps(observation).encode(),',
        f'                                 {{"Content-Type": "{JSON}"}})',
        'if key := os.environ.get("SINEW_API_KEY"):  # if the server requires one',
        '    request.add_header("Authorization", f"Bearer {key}")',
        'print(json.load(urllib.request.urlopen(request))["actions"])',
    ]


def _json(body: bytes | bytearray) -> Any:
    """Decode a JSON text, within limits.

    Values are counted before they are made, because sixty megabytes of empty objects become gigabytes of Python
    objects. Long texts must be base64, because one wide character makes Python store every character of its text in
    four bytes.

    Raises:
        RequestError: The text is not valid JSON, or is too large.
    """
    if sum(body.count(mark) for mark in b",[{") > MAX_VALUES:
        raise RequestError(f"JSON: expected at most {MAX_VALUES} values; send frames as base64 text")
    try:
        tree = msgspec.json.decode(body)  # bounded: the values are counted above
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"request: not valid JSON: {str(error)[:200]}") from None
    if len(body) > MAX_WIDE and (not body.isascii() or b"\\u" in body):
        _refuse_wide(tree)
    return tree


def _refuse_wide(tree: Any) -> None:
    """Raise RequestError for a long text in which a character takes more than a byte."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            nodes += [*node.keys(), *node.values()]
        elif isinstance(node, list):
            nodes += node
        elif isinstance(node, str) and len(node) > MAX_WIDE and not node.isascii():
            raise RequestError(
                f"JSON: expected at most {MAX_WIDE} characters of text that is not base64, got {len(node)};"
                " send frames as base64 text"
            )


def _arrays(content: Mapping[str, Any]) -> Mapping[str, Any]:
    tree = from_json_numpy(content)
    if not isinstance(tree, Mapping):
        raise ObservationError("observation", "an object with the keys of an observation", "an array")
    return tree
