"""Mutated messages for every decoder of the server and the client, and hostile values for the code behind the
decoders.

An input is a valid message with a few bytes changed, removed, doubled or moved. Or it is a valid record with values
of other types and sizes, written as a message. The result must be a value or one of ``EXPECTED``.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from PIL import Image
from prometheus_client import generate_latest
from sinew_client import protocol, shared, zmtp
from sinew_client.robot_report import RobotReport
from sinew_client.untrusted import UntrustedError, parse_npy

from sinew.core import ActionChunk, Observation, SinewError
from sinew.policy import load
from sinew.processing.safety import Safety
from sinew.serve.decode.array import dump_npy, pack
from sinew.serve.decode.frames import PixelBudget, compressed_frame
from sinew.serve.robots import Robots
from sinew.serve.transport.listen import RemoteSettings
from sinew.serve.wires import evo1, http, openpi, vla_eval
from sinew.serve.wires.groot.codec import GrootCodec
from sinew.serve.wires.lerobot.features import agree
from sinew.serve.wires.lerobot.features import observation as lerobot_observation
from sinew.serve.wires.lerobot.pickle.machine import load as load_pickle
from sinew.serve.wires.lerobot.types import RemotePolicyConfig, read_observation, read_policy_config
from sinew.serve.wires.lerobot_remote import contract as remote
from sinew.serve.wires.lerobot_remote import envelope as remote_envelope
from sinew.serve.wires.native import NativeCodec
from tests.hostile.mutate import mutate_record
from tests.serve import test_safe_pickle as theirs
from tests.serve.puppet import FRAME, GREETING, SPEC, frame, lone, request
from tests.serve.test_safe_pickle import as_lerobot

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Make a few random changes, most of them near the beginning, which contains the structure."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        if not changed:
            break
        at = rng.randrange(min(len(changed), 300) if rng.random() < 0.7 else len(changed))
        kind = rng.randrange(5)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randrange(1, 40)]
        else:
            changed[at : at + 4] = rng.choice(
                (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x80\0\0\0")
            )
    return bytes(changed)


def image(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(FRAME).save(buffer, kind)
    return buffer.getvalue()


REPORT = RobotReport(
    run=7, state="holds", name="dry", reason="out of rows", hz=50.0, rate_hz=49.5, rows_hz=2.0, age_p50_ms=40.0,
    age_p95_ms=80.0, steps=100, late=2, skipped=1, held={"out of rows": 3, "paused": 4},
    clipped_commands=2, clipped={"a.velocity": 2}, limits=("range", "velocity"), failed_requests=1, takeovers=1,
    steps_by_hand=5, episodes=3, successes=2, arm=(0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.5, 0.0, 0.25),
)  # fmt: skip
EXPECTED = (SinewError, zmtp.ZmtpError, UntrustedError)


def targets() -> dict[str, tuple[bytes, Callable[[bytes], object]]]:
    """Return name -> (a valid message, the function that decodes it)."""
    native, groot, robots = NativeCodec(), GrootCodec(), Robots()
    native.bind(lone(SPEC, 2, 2))
    groot.bind(lone(SPEC, 2, 2))

    def read_native(data: bytes, frames: shared.ReceivedFrames | None = None) -> object:
        header = native.peek(memoryview(data))
        if header.error is not None:
            raise header.error
        if header.report is not None:
            robots.put("native", "peer", header.session, "", header.report)
            return json.dumps(robots.rows(), allow_nan=False), generate_latest(robots)
        if frames is not None:
            return [decode(PixelBudget()) for decode in native.decoders(header, memoryview(data), frames)]
        return native.decode(data)

    large = np.zeros((96, 64, 3), np.uint8)
    parts = protocol.infer_parts({"images": {"front": large}, "state": np.zeros(2), "prompt": "go"}, 1)
    ours, received = shared.SharedFrames(shared.size_of(parts)), list[shared.ReceivedFrames]()

    def offered(beside: list[Any]) -> str:
        received.append(shared.ReceivedFrames(os.dup(*struct.unpack("i", beside[0][2])), 1 << 20))
        return received[0].state

    ours.offer(offered)

    def read_groot(data: bytes) -> object:
        header = groot.peek(memoryview(data))
        if header.error is not None:
            raise header.error
        if header.endpoint != "get_action":
            return header
        return [decode(PixelBudget()) for decode in groot.decoders(header, memoryview(data))]

    def read_zmtp(data: bytes) -> object:
        framing = zmtp.Framing(1 << 16)
        found = []
        while data:
            room = framing.room()
            part = data[: len(room)]
            room[: len(part)] = part
            framing.take(len(part))
            data = data[len(part) :]
            while (message := framing.next()) is not None:
                found.append(message)
        return found

    ready = frame(b"\x05READY\x0bSocket-Type\0\0\0\x03REQ", 4)
    picture = {"__numpy__": base64.b64encode(FRAME.tobytes()).decode(), "dtype": "|u1", "shape": [48, 64, 3]}
    body = {"images": {"front": picture}, "state": [0, 0], "prompt": "go", "session": "a", "deadline_ms": 5}
    flat = {"images": {"front": FRAME}, "state": np.zeros(2), "prompt": "go", "seed": 1}
    nested = {
        "endpoint": "get_action",
        "data": {
            "observation": {
                "video": {"front": {"__ndarray_class__": True, "as_npy": dump_npy(FRAME[None, None])}},
                "state": {
                    "state": {"__ndarray_class__": True, "as_npy": dump_npy(np.zeros((1, 1, 2), np.float32))}
                },
                "language": {"annotation.human.task_description": [["go"]]},
            },
            "options": {"seed": 1},
        },
    }
    evo1_message = {
        "image": [[[[1, 2, 3]] * 3] * 2, [[[0, 0, 0]]]],
        "image_mask": [1, 0],
        "state": [0, 0],
        "action_mask": [[1, 1, 0]],
        "prompt": "go",
        "arm_key": "arm",
    }
    picture_file = {"__image__": True, "format": "png", "data": image("PNG"), "shape": [48, 64, 3]}
    benchmark = {"images": {"front": picture_file}, "states": np.zeros(2), "task_description": "go"}
    step = {"type": "observation", "payload": benchmark, "seq": 1, "timestamp": 0.0}

    def read_vla_eval(data: bytes) -> object:
        talk = vla_eval.Conversation(SPEC, {})
        message = talk.read(data)
        return vla_eval.observation(message, SPEC) if message.endpoint == "infer" else message

    return {
        "lerobot-remote": (remote_message(), read_remote),
        "lerobot-remote open": (remote_message("open"), read_remote),
        "vla-eval": (vla_eval.pack(step), read_vla_eval),
        "evo1": (json.dumps(evo1_message).encode(), lambda data: evo1.observation(evo1.read(data), SPEC)),
        "zmtp": (GREETING + ready + zmtp.message([b"", request(1)[:300]]), read_zmtp),
        "native": (request(1, session="arm", seed=3, deadline_ms=5), read_native),
        "native shared": (b"".join(ours.placed(parts)), lambda data: read_native(data, *received)),
        "report": (protocol.encode_control("REPORT", 1, "arm", report=REPORT), read_native),
        "openpi": (pack(flat), lambda data: openpi.observation(openpi.read(data), SPEC)),
        "http": (json.dumps(body).encode(), lambda data: http.observation(http.read(data, http.JSON), SPEC)),
        "act": (
            json.dumps({"full_image": picture, "instruction": "go", "state": [0, 0]}).encode(),
            lambda data: http.act_observation(http.read_act(data), SPEC),
        ),
        "groot": (msgpack.packb(nested), read_groot),
        "lerobot": (
            as_lerobot(
                theirs.TimedObservation(1.0, 3, {"a": 0.5, "b": 1.0, "top": FRAME, "task": "go"}, True)
            ),
            read_observation,
        ),
        "npy": (dump_npy(np.array(["go", "on"])), lambda data: parse_npy(memoryview(data))),
        "pickle": (
            pickle.dumps({"a.pos": 1.5, "task": "go", "n": [1, 2, (3,)]}, 4),
            lambda data: load_pickle(data, {}),
        ),
        "jpeg": (image("JPEG"), lambda data: compressed_frame("f", data, PixelBudget())),
        "png": (image("PNG"), lambda data: compressed_frame("f", data, PixelBudget())),
        "reply": (
            protocol.schema.PredictResponse(
                request_id=1, actions=[0.0] * 6, horizon=3, dim=2
            ).SerializeToString(),
            lambda data: protocol.decode_chunk(protocol.decode_reply(data, 1)),
        ),
    }


REMOTE = remote.contract(lone(SPEC, 2, 2).policies.get(), RemoteSettings())
GUIDED = replace(REMOTE, modes={"chunk": "", "rtc_guided": "guided"}, texts=("question",))


def remote_body(kind: str) -> dict[str, Any]:
    """Return a valid message body of LeRobot's remote inference. kind: open, observation or language_request."""
    if kind == "open":
        return {
            "expected_artifact": REMOTE.identity,
            "features": [each.to_dict() for each in REMOTE.features],
            "action_feature": REMOTE.action.to_dict(),
            "semantics": REMOTE.semantics,
            "action_interval": REMOTE.interval,
            "mode": "rtc_guided",
            "encoding": "raw",
        }
    body = {
        "sequence": 1,
        "artifact_identity": REMOTE.identity,
        "observation_id": "o",
        "capture_time": 12.5,
        "task": "go",
        "task_version": 0,
        "features": {
            "observation.state": np.zeros(2, np.float32),
            "observation.images.front": remote_envelope.RemoteFrame(True, 48, 64, image("JPEG")),
        },
    }
    if kind == "observation":
        rows = np.zeros((2, 2), np.float32)
        chunk = {"delay": 1, "cursor": 1, "canonical_continuation": rows, "model_continuation": rows}
        return body | chunk
    return body | {"kind": "vqa", "text": "what is it", "intent_generation": 0}


def remote_message(kind: str = "observation", **changes: Any) -> bytes:
    return remote_envelope.encode(
        remote_envelope.Envelope(kind, "i", "s", 0, "r", remote_body(kind) | changes)
    )


def read_remote(data: bytes) -> object:
    """Decode a message of LeRobot's remote inference up to the observation, as the server does."""
    remote_envelope.envelope_of(data)
    message = remote_envelope.decode(data)
    if message.kind == "open":
        return remote.agree(message.body, GUIDED)
    agreed = remote.Agreed(GUIDED, "rtc_guided", "append")
    read = remote.read_language if message.kind == "language_request" else remote.read_observation
    return remote.observation(read(message.body, agreed), GUIDED, "s", PixelBudget())


# ----------------------------------------------------------------------------- values


def replaced(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a copy of a record with a few values of other types, sizes and signs, including arrays."""
    found: dict[str, Any] = mutate_record(record, rng, rng.choice((1, 1, 2, 3)))
    for key in list(found):
        if rng.random() < 0.03:
            found[key] = odd_array(rng)
        elif rng.random() < 0.01:  # this value would give an array of 40 MB
            found[key] = [*([1.0] * 500), "x" * 20_000]
        elif isinstance(found[key], dict) and found[key] and rng.random() < 0.2:
            found[key][rng.choice(list(found[key]))] = odd_array(rng)
    return found


def odd_array(rng: random.Random) -> np.ndarray:
    """Return a small array of any number type. Its shape may contain zeros or many axes."""
    kind = rng.choice(("u1", "i1", "<i8", ">f4", "f2", "f4", "f8", "?", "U3", "S2", "u8", "c8"))
    shape = rng.choice(
        ((), (0,), (2,), (3,), (1, 2), (48, 64, 3), (3, 48, 64), (1, 0, 3), (2,) * 6, (0, 9, 3))
    )
    made = np.zeros(shape, kind)
    if made.dtype.kind in "fc" and made.size:
        with np.errstate(over="ignore"):
            made.flat[rng.randrange(made.size)] = rng.choice((np.nan, np.inf, -1.0, 1e30, 65504))
    return made


def values() -> dict[str, Callable[[random.Random], object]]:
    """Return name -> a function that writes a hostile record as a message, decodes it, and prepares it as a server
    does."""
    policy = load(PEN, engine="eager", threads=1)
    spec, processor = policy.spec, policy.processor
    safety, codec = Safety(processor), GrootCodec()
    codec.bind(lone(spec, spec.state.dim, spec.action.dim))
    frames = {each.name: np.zeros((48, 64, 3), np.uint8) for each in spec.cameras}
    state = [0.0] * spec.state.dim
    beside = {"seed": 1, "solver_steps": 1, "session": "a", "time": 12.5, "deadline_ms": 5.0}
    rows = np.zeros((3, spec.action.dim), np.float32)
    chunk = {"previous": rows, "delay": 1, "horizon": 2, "rtc": "guided", "beta": 1.0}
    noise = {"noise": np.zeros(spec.noise_shape, np.float32)}
    plain = {"images": frames, "state": state, "prompt": "go", **beside, **chunk, **noise}
    pictures = {
        name: {"__numpy__": base64.b64encode(FRAME.tobytes()).decode(), "dtype": "|u1", "shape": [48, 64, 3]}
        for name in frames
    }
    joints = [f"joint{number}.pos" for number in range(spec.state.dim)]
    features = {
        "observation.state": {"dtype": "float32", "shape": [len(joints)], "names": joints},
        **{
            f"observation.images.{name}": {"dtype": "image", "shape": [48, 64, 3], "names": ["height"]}
            for name in frames
        },
    }
    asked = {
        "policy_type": spec.architecture,
        "pretrained_name_or_path": spec.name,
        "lerobot_features": features,
        "actions_per_chunk": 3,
    }
    agreement = agree(RemotePolicyConfig(**asked), spec)
    raw = {**dict.fromkeys(joints, 0.5), **frames, "task": "go"}

    def ready(observation: Observation) -> object:
        """Process an observation as the decode thread does, and check the reply."""
        safety.check(observation)
        prepared = processor.prepare(observation)
        actions = np.zeros((spec.chunk_size, spec.action.dim), np.float32)
        return prepared, safety.enforce(ActionChunk(actions, seed=1), observation)

    def openpi_values(rng: random.Random) -> object:
        record = {"session_id" if key == "session" else key: value for key, value in plain.items()}
        return ready(openpi.observation(openpi.read(written(replaced(record, rng))), spec))

    def http_values(rng: random.Random) -> object:
        record = {
            "images": pictures,
            "state": state,
            "prompt": "go",
            **beside,
            **chunk,
            "previous": rows.tolist(),
        }
        record = mutate_record(record, rng, rng.choice((1, 1, 2, 3)))
        return ready(http.observation(http.read(json.dumps(record).encode(), http.JSON), spec))

    def act_values(rng: random.Random) -> object:
        first, second = pictures.values()
        record = {"full_image": first, "wrist_image": second, "instruction": "go", "state": state}
        record = mutate_record(record, rng, rng.choice((1, 1, 2)))
        return ready(http.act_observation(http.read_act(json.dumps(record).encode()), spec))

    def groot_values(rng: random.Random) -> object:
        nested = {
            "endpoint": "get_action",
            "data": {
                "observation": {
                    "video": {name: frame[None, None] for name, frame in frames.items()},
                    "state": {"state": np.array(state, np.float32)[None, None]},
                    "language": {"annotation.human.task_description": [["go"]]},
                },
                "options": {"seed": 1, **chunk},
            },
        }
        record = mutate_record(nested, rng, rng.choice((1, 1, 2, 3)))
        if rng.random() < 0.3:
            with contextlib.suppress(KeyError, TypeError):
                record["data"]["observation"][rng.choice(("video", "state"))] = {"state": odd_array(rng)}
        payload = memoryview(written(record, as_npy))
        header = codec.peek(payload)
        if header.error is not None:
            raise header.error
        return [
            ready(decode(PixelBudget()))
            for decode in (codec.decoders(header, payload) if header.endpoint == "get_action" else ())
        ]

    def remote_values(rng: random.Random) -> object:
        kind = rng.choice(("open", "observation", "language_request"))
        record = replaced(remote_body(kind), rng)
        try:
            message = remote_envelope.encode(remote_envelope.Envelope(kind, "i", "s", 0, "r", record))
        except (OverflowError, ValueError, TypeError) as error:
            raise UnwritableError(str(error)) from None
        return read_remote(message)

    def native_values(rng: random.Random) -> object:
        record = replaced(plain, rng)
        payload = protocol.encode_infer(record, 1)
        native = NativeCodec()
        native.bind(lone(spec, spec.state.dim, spec.action.dim))
        header = native.peek(memoryview(payload))
        if header.error is not None:
            raise header.error
        return ready(native.decode(payload))

    def lerobot_values(rng: random.Random) -> object:
        if rng.random() < 0.5:
            record = as_lerobot(theirs.RemotePolicyConfig(**{**asked, **plain_values(replaced(asked, rng))}))
            return agree(read_policy_config(mutate(rng, record) if rng.random() < 0.2 else record), spec)
        moment = {"timestamp": 1.0, "timestep": 3, "observation": raw, "must_go": True}
        record = as_lerobot(theirs.TimedObservation(**{**moment, **plain_values(replaced(moment, rng))}))
        timed = read_observation(mutate(rng, record) if rng.random() < 0.2 else record)
        return ready(lerobot_observation(timed, agreement))

    def plain_values(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if key in asked or key in ("timestamp", *moments)}

    moments = ("timestep", "observation", "must_go")

    local = {key: value for key, value in plain.items() if key != "deadline_ms"}

    def observations(rng: random.Random) -> object:
        given = {**local, "prompt": "", "tokens": [1, 2, 3]} if rng.random() < 0.3 else local
        return ready(Observation.from_mapping(replaced(given, rng)))

    return {
        "openpi values": openpi_values,
        "http values": http_values,
        "act values": act_values,
        "groot values": groot_values,
        "native values": native_values,
        "lerobot values": lerobot_values,
        "lerobot-remote values": remote_values,
        "observations": observations,
    }


class UnwritableError(SinewError):
    """The protocol cannot transmit this record."""


def as_npy(array: np.ndarray) -> dict[str, Any]:
    """Encode an array as GR00T's clients do."""
    if not isinstance(array, np.ndarray):
        raise TypeError(type(array).__name__)
    return {"__ndarray_class__": True, "as_npy": dump_npy(array)}


def as_openpi(array: np.ndarray) -> dict[bytes, Any]:
    """Encode an array as openpi's clients do."""
    if not isinstance(array, np.ndarray):
        raise TypeError(type(array).__name__)
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": array.shape,
    }


def written(record: Any, array: Callable[[np.ndarray], dict[Any, Any]] = as_openpi) -> bytes:
    """Encode a record with arrays as msgpack."""
    try:
        return bytes(msgpack.packb(record, default=array))
    except (OverflowError, ValueError, TypeError) as error:
        raise UnwritableError(str(error)) from None
