"""The messages of LeRobot's remote inference: their bytes, their limits, and what robot and server agree on."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from sinew.core import CameraSpec, ObservationError, VectorSpec
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.transport.listen import RemoteSettings
from sinew.serve.wires.lerobot_remote import contract as remote
from sinew.serve.wires.lerobot_remote.contract import agree, read_language, read_observation
from sinew.serve.wires.lerobot_remote.envelope import (
    MARK,
    MAX_ITEMS,
    MAX_MESSAGE,
    Envelope,
    RemoteError,
    RemoteFrame,
    Tensor,
    UnreadableError,
    decode,
    encode,
    envelope_of,
)
from tests.hostile.decoders import GUIDED, REMOTE, image, remote_body
from tests.serve.puppet import FRAME, SPEC, lone


def written(**changes: Any) -> bytes:
    """Return a message with fields of the envelope changed; None leaves one out."""
    tree = {
        "version": 1, "message_type": "observation", "instance_id": "i", "session_id": "s",
        "generation": 0, "request_id": "r", "body": {},
    } | changes  # fmt: skip
    return msgpack.packb({key: value for key, value in tree.items() if value is not ...})


def test_the_bytes_of_describe_are_those_of_the_reference() -> None:
    message = encode(Envelope("describe", request="00112233445566778899aabbccddeeff"))
    assert len(message) == 120
    assert message == bytes.fromhex("87a776657273696f6e01ac6d6573736167655f74797065a86465736372696265") + (
        b"\xabinstance_id\xa0\xaasession_id\xa0\xaageneration\x00\xaarequest_id\xd9\x20"
        b"00112233445566778899aabbccddeeff\xa4body\x80"
    )


def test_the_bytes_of_arrays_and_pictures_are_those_of_the_reference() -> None:
    message = encode(Envelope("action", "i", "s", 0, "r", {"x": np.array([1, -2], np.float32)}))
    tensor = (
        b"\x85\xb0__lerobot_type__\xa6tensor\xa5dtype\xa7float32\xa5shape\x91\x02\xaaendianness\xa6little"
        b"\xa4data\xc4\x08" + struct.pack("<2f", 1, -2)
    )
    assert len(tensor) == 80
    assert message.endswith(b"\xa4body\x81\xa1x" + tensor)
    message = encode(Envelope("action", "i", "s", 0, "r", {"x": RemoteFrame(False, 1, 2, bytes(6))}))
    picture = (
        b"\x86\xb0__lerobot_type__\xa3rgb\xa8encoding\xa3raw\xa5shape\x93\x01\x02\x03\xa5dtype\xa5uint8"
        b"\xadchannel_order\xa3RGB\xa4data\xc4\x06" + bytes(6)
    )
    assert len(picture) == 88
    assert message.endswith(picture)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "uint32", "int64", "uint64", "float16", "float64"]
)
def test_arrays_of_either_byte_order_are_read(dtype: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype)
    orders: tuple[tuple[str, Any], ...] = (("little", "<"), ("big", ">"))
    for endianness, order in orders:
        record = {
            "data": values.astype(values.dtype.newbyteorder(order)).tobytes(),
            "endianness": endianness,
            "shape": [2, 3],
            "dtype": dtype,
            MARK: "tensor",
        }
        read = decode(written(body={"x": record}, another="key"[:3])).body["x"].array("x")
        assert read.dtype == values.dtype
        np.testing.assert_array_equal(read, values)


def tensor(**changes: Any) -> dict[str, Any]:
    return {
        MARK: "tensor",
        "dtype": "float32",
        "shape": [2],
        "endianness": "little",
        "data": bytes(8),
    } | changes


def picture(**changes: Any) -> dict[str, Any]:
    record = {
        MARK: "rgb", "encoding": "raw", "shape": [1, 2, 3], "dtype": "uint8", "channel_order": "RGB",
        "data": bytes(6),
    }  # fmt: skip
    return record | changes


@pytest.mark.parametrize(
    "record",
    [
        tensor(data=bytes(7)), tensor(shape=[3]), tensor(shape=[0]), tensor(shape=[2, True]), tensor(shape=[1] * 9),
        tensor(shape=[1 << 15]), tensor(shape=2), tensor(dtype="complex64"), tensor(dtype="object"), tensor(dtype=4),
        tensor(endianness="native"), tensor(endianness=None), tensor(data="text"), tensor(dtype=">f4"),
        tensor(dtype="bool", data=b"\0\2"), {MARK: "other"} | tensor(**{MARK: "other"}), {MARK: "tensor"},
        picture(shape=[1, 2, 4]), picture(shape=[1, 3, 3]), picture(shape=[8192, 8192, 3], encoding="jpeg"),
        picture(encoding="png"), picture(channel_order="BGR"), picture(dtype="float32"), picture(shape=[2, 3]),
        [1.0, float("nan")], {"deep": float("inf")}, list(range(MAX_ITEMS + 1)),
        {str(key): 0 for key in range(MAX_ITEMS + 1)},
    ],
)  # fmt: skip
def test_a_body_beyond_the_limits_is_rejected_and_its_sender_can_be_answered(record: Any) -> None:
    message = written(body={"x": record})
    with pytest.raises(RemoteError) as caught:
        decode(message)
    assert caught.value.code == "malformed"
    assert not isinstance(caught.value, UnreadableError)
    found = envelope_of(message)
    assert found is not None
    assert found.request == "r"


def test_arrays_of_one_message_have_a_limit_together() -> None:
    small = image("JPEG")
    sizes = {f"{index}": RemoteFrame(True, 3000, 3000, small) for index in range(3)}  # 81 MB once decoded
    with pytest.raises(RemoteError, match="in all arrays"):
        decode(encode(Envelope("observation", "i", "s", 0, "r", sizes)))


@pytest.mark.parametrize(
    "message",
    [
        b"", b"\xc1", b"\x80", msgpack.packb(3), written()[:-1], written() + b"\0", written(version=2),
        written(version=True), written(version="1"), written(version=...), written(message_type="other"),
        written(message_type=7), written(instance_id="a/b"), written(instance_id="*"), written(session_id="a" * 129),
        written(session_id=""), written(request_id=...), written(request_id=5), written(request_id="ok\n"),
        written(generation=-1), written(generation=1 << 63), written(generation=True), written(generation=1.0),
        written(body=[]), written(body=...), written(body={"x": msgpack.ExtType(5, b"")}),
        written(body={"x": "a" * 16_385}), written(body={MARK: "tensor"}), msgpack.packb({MARK: "tensor"}),
        written(body={"x": [[0] * 200] * 200}), b"\x82\xa1a\x00\xa1a\x00", bytes(MAX_MESSAGE + 1),
        written(body={"x": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}),
    ],
)  # fmt: skip
def test_a_message_without_a_readable_envelope_answers_nobody(message: bytes) -> None:
    with pytest.raises(UnreadableError):
        decode(message)
    assert envelope_of(message) is None


def test_a_picture_must_have_the_size_that_its_record_states() -> None:
    for record, expected in (
        (RemoteFrame(True, 48, 63, image("JPEG")), "48 x 63"),
        (RemoteFrame(True, 48, 64, image("PNG")), "a JPEG file"),
        (RemoteFrame(True, 48, 64, image("JPEG")[:200]), "JPEG"),
    ):
        with pytest.raises(ObservationError, match=expected):
            record.frame("f", PixelBudget())
    np.testing.assert_array_equal(RemoteFrame(True, 48, 64, image("JPEG")).frame("f", PixelBudget()), FRAME)
    with pytest.raises(ObservationError, match="finite"):
        Tensor(np.dtype("float32"), (1,), False, struct.pack("<f", np.nan)).array("x")


# ----------------------------------------------------------------------------- contract


def test_the_capabilities_have_the_keys_that_the_client_knows() -> None:
    """The client makes a record of them, in which an unknown key is an error."""
    assert set(REMOTE.capabilities()) == {
        "modes", "prediction_steps", "execution_steps", "action_interval", "features", "action_feature",
        "language", "training_max_delay", "rtc_horizon",
    }  # fmt: skip
    assert [each.name for each in REMOTE.features] == ["observation.state", "observation.images.front"]
    assert REMOTE.action.names == ("a", "b")
    assert REMOTE.identity.startswith("sha256:")


def test_modes_are_those_that_the_policy_can_compute() -> None:
    deployed = lone(replace(SPEC, committed_rows=2), 2, 2).policies.get()
    deployed.metadata["server"] = {
        "guidance": ["guided", "no-jacobian", "ramp", "trained"],
        "says": ["question"],
    }
    offered = remote.contract(deployed, RemoteSettings())
    assert offered.modes == {"chunk": "", "rtc_guided": "no-jacobian", "rtc_trained": "trained"}
    assert offered.capabilities()["training_max_delay"] == 2
    assert offered.capabilities()["language"] is True
    assert list(REMOTE.modes) == ["chunk"]


def test_settings_of_the_operator_are_part_of_the_contract() -> None:
    spec = replace(
        SPEC, cameras=(CameraSpec("front", 48, 64),), state=VectorSpec(2, ("a", "b"), ("rad", "rad"))
    )
    deployed = lone(spec, 2, 2).policies.get()
    assert remote.contract(deployed, RemoteSettings()).semantics == "state:rad"
    offered = remote.contract(
        deployed, RemoteSettings(semantics="so101-degrees-v1", camera_sizes=(("front", (480, 640)),))
    )
    assert offered.features[1].shape == (480, 640, 3)
    assert {each.semantics for each in (*offered.features, offered.action)} == {"so101-degrees-v1"}
    with pytest.raises(Exception, match="one of the cameras front, got top"):
        remote.contract(deployed, RemoteSettings(camera_sizes=(("top", (480, 640)),)))
    fixed = lone(replace(spec, resizes_frames=False), 2, 2).policies.get()
    with pytest.raises(Exception, match="does not resize frames"):
        remote.contract(fixed, RemoteSettings(camera_sizes=(("front", (480, 640)),)))


def opened(**changes: Any) -> dict[str, Any]:
    return remote_body("open") | {"mode": "chunk"} | changes


def feature(index: int, **changes: Any) -> list[dict[str, Any]]:
    features = [each.to_dict() for each in REMOTE.features]
    features[index] |= changes
    return features


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"required_capabilities": ["teleport"]}, "unsupported", "required_capabilities"),
        ({"required_capabilities": "no list"}, "malformed", "required_capabilities"),
        ({"required_capabilities": ["chunk_alignment_v2"]}, "incompatible", "required_capabilities"),
        ({"chunk_settings": {"chunk_merge": "aligned"}}, "incompatible", "required_capabilities"),
        ({"chunk_settings": {"chunk_merge": "other"}}, "incompatible", "chunk_settings"),
        ({"chunk_settings": {"chunk_merge": "append", "blend_steps": 2}}, "incompatible", "chunk_settings"),
        ({"chunk_settings": 3}, "incompatible", "chunk_settings"),
        ({"expected_artifact": "sha256:other"}, "incompatible", "expected_artifact"),
        ({"semantics": "degrees"}, "incompatible", "semantics"),
        ({"mode": "rtc_trained"}, "unsupported", "mode: expected chunk, got 'rtc_trained'"),
        ({"mode": "fly"}, "malformed", "mode"),
        ({"mode": ["chunk"]}, "malformed", "mode"),
        ({"action_interval": 0.05}, "incompatible", "action_interval"),
        ({"action_interval": True}, "malformed", "action_interval"),
        ({"encoding": "png"}, "unsupported", "encoding"),
        ({"features": feature(0)[::-1]}, "incompatible", "features"),
        ({"features": feature(0, names=["b", "a"])}, "incompatible", "observation.state.names"),
        ({"features": feature(0, semantics="degrees")}, "incompatible", "observation.state.semantics"),
        ({"features": feature(1, shape=[64, 48, 3])}, "incompatible", "front.shape"),
        ({"features": feature(1)[:1]}, "incompatible", "features"),
        ({"features": None}, "malformed", "features"),
        ({"action_feature": REMOTE.action.to_dict() | {"names": ["x", "y"]}}, "incompatible", "action.names"),
        ({"action_feature": 1}, "malformed", "action_feature"),
    ],
)
def test_an_open_request_that_differs_is_rejected_by_the_name_of_its_field(
    changes: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(RemoteError, match=words.replace("'", ".")) as caught:
        agree(opened(**changes), REMOTE)
    assert caught.value.code == code


def test_an_open_request_that_agrees_is_taken() -> None:
    assert agree(opened(), REMOTE).merge == "append"
    assert agree(opened(expected_artifact=None, unknown=1), REMOTE).mode == "chunk"
    merge = {"chunk_settings": {"chunk_merge": "aligned"}, "required_capabilities": ["chunk_alignment_v2"]}
    assert agree(opened(**merge), REMOTE).aligned
    assert agree(opened(mode="rtc_guided"), GUIDED).mode == "rtc_guided"


def seen(mode: str = "chunk", merge: str = "append", of: str = "observation", **changes: Any) -> Any:
    body = decode(encode(Envelope(of, "i", "s", 0, "r", remote_body(of) | changes))).body
    read = read_language if of == "language_request" else read_observation
    return read(body, remote.Agreed(GUIDED, mode, merge))


ROWS = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        *(({"sequence": value}, "malformed") for value in (-1, True, 1.0, None, 1 << 63)),
        ({"artifact_identity": "sha256:other"}, "incompatible"),
        ({"artifact_identity": None}, "incompatible"),
        ({"observation_id": ""}, "malformed"),
        ({"capture_time": "now"}, "malformed"),
        ({"capture_time": True}, "malformed"),
        ({"task": 3}, "malformed"),
        ({"task": "a" * 4097}, "malformed"),
        ({"task_version": True}, "malformed"),
        ({"delay": 4}, "malformed"),
        ({"delay": True}, "malformed"),
        ({"cursor": -1}, "malformed"),
        ({"features": 3}, "malformed"),
        ({"features": {}}, "incompatible"),
        ({"features": remote_body("observation")["features"] | {"more": 1}}, "incompatible"),
        ({"features": remote_body("observation")["features"] | {"observation.state": np.zeros(3, np.float32)}},
         "incompatible"),
        ({"features": remote_body("observation")["features"] | {"observation.state": np.zeros(2)}}, "incompatible"),
        ({"features": remote_body("observation")["features"]
          | {"observation.images.front": RemoteFrame(False, 2, 2, bytes(12))}}, "incompatible"),
        ({"features": remote_body("observation")["features"] | {"observation.images.front": FRAME}}, "incompatible"),
        ({"canonical_continuation": np.zeros((2, 3), np.float32)}, "malformed"),
        ({"canonical_continuation": np.zeros((4, 2), np.float32)}, "malformed"),
        ({"canonical_continuation": np.zeros((2, 2))}, "malformed"),
        ({"canonical_continuation": np.full((2, 2), np.nan, np.float32)}, "malformed"),
        ({"canonical_continuation": [0, 0]}, "malformed"),
        ({"canonical_continuation": ROWS[:1]}, "malformed"),
        ({"canonical_continuation": None}, "malformed"),
        ({"model_continuation": np.zeros((2, 5), np.float32)}, "malformed"),
    ],
)  # fmt: skip
def test_an_observation_that_does_not_fit_is_rejected(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(RemoteError) as caught:
        seen("rtc_guided", **changes)
    assert caught.value.code == code


def test_a_chunk_mode_ignores_continuations_and_echoes_its_cursors() -> None:
    assert seen(model_continuation=np.zeros((2, 5), np.float32)).options == {}
    assert seen(canonical_continuation=None).options == {}
    assert seen(merge="aligned", observation_cursor=1, cursor=3).echo["observation_cursor"] == 1
    cases: tuple[dict[str, Any], ...] = (
        {"observation_cursor": 2, "cursor": 1},
        {"observation_cursor": True, "cursor": 1},
        {},
    )
    for wrong in cases:
        with pytest.raises(RemoteError, match="observation_cursor"):
            seen(merge="aligned", **wrong)


def test_an_rtc_mode_continues_the_rows_of_the_robot() -> None:
    options = seen("rtc_guided", canonical_continuation=ROWS + 1).options
    assert (options["rtc"], options["delay"]) == ("guided", 1)
    np.testing.assert_array_equal(options["previous"], ROWS + 1)
    assert seen("rtc_guided", canonical_continuation=None, model_continuation=None).options == {}


def test_a_request_for_text_is_checked_as_an_observation() -> None:
    asked = seen(of="language_request")
    assert asked.options == {"question": "what is it"}
    assert asked.echo["intent_generation"] == 0
    for changes, code in (
        ({"kind": "next_subtask"}, "unsupported"),
        ({"kind": "sing"}, "unsupported"),
        ({"kind": 3}, "unsupported"),
        ({"text": " "}, "malformed"),
        ({"text": "a" * 4097}, "malformed"),
        ({"intent_generation": -1}, "malformed"),
        ({"artifact_identity": ""}, "incompatible"),
    ):
        with pytest.raises(RemoteError) as caught:
            seen(of="language_request", **changes)
        assert caught.value.code == code
