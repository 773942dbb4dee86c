"""The native wire's codec, without sockets: the schema, both request forms, and hostile bytes."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import zlib
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import sinew_client
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from sinew_client import protocol, schema
from sinew_client.schema import Image, PredictRequest, PredictResponse

from sinew.core import (
    ActionChunk,
    BusyError,
    CameraSpec,
    ObservationError,
    PolicySpec,
    RequestError,
    SinewError,
    Timing,
    VectorSpec,
)
from sinew.policy import load
from sinew.serve.decode.frames import PixelBudget, compressed_frame, raw_frame
from sinew.serve.decode.protobuf import MAX_FIELDS
from sinew.serve.wires.native import MAX_BYTES_BESIDE_IMAGES, Kind, NativeCodec, NativeHeader
from tests.serve.puppet import lone
from tests.work import lines_of

CASES = int(os.environ.get("SINEW_FUZZ_CASES", "100"))  # of each property

SPEC = PolicySpec(
    architecture="smolvla",
    name="test",
    cameras=(CameraSpec("front", 6, 8), CameraSpec("wrist", 6, 8)),
    state=VectorSpec(3),
    action=VectorSpec(2),
    chunk_size=4,
    noise_dim=5,
    solver_steps=10,
    max_prompt_tokens=16,
)


def make_codec(spec: PolicySpec, padded_state_dim: int, padded_action_dim: int) -> NativeCodec:
    codec = NativeCodec()
    codec.bind(lone(spec, padded_state_dim, padded_action_dim))
    return codec


WIRE = make_codec(SPEC, 7, 5)
RNG = np.random.default_rng(0)
FRAME = RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)


def observation(**changes) -> dict:
    return {"images": {"front": FRAME, "wrist": FRAME[::-1]}, "state": [1, 2, 3], "prompt": "go", **changes}


def encoded(frame: np.ndarray, file_format: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Pillow.fromarray(frame).save(buffer, file_format)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that ends after promising ``width`` x ``height`` pixels."""
    whole = bytearray(encoded(FRAME, "PNG"))
    whole[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    whole[29:33] = zlib.crc32(bytes(whole[12:29])).to_bytes(4, "big")
    return bytes(whole)


# ----------------------------------------------------------------------------- schema


def test_schema_is_sinew_proto(tmp_path):
    """The descriptors built at run time are what protoc makes of the shipped .proto."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    source = resources.files(sinew_client) / "sinew.proto"
    (tmp_path / "sinew.proto").write_text(source.read_text())
    out = tmp_path / "set"
    assert protoc.main(["protoc", f"-I{tmp_path}", f"--descriptor_set_out={out}", "sinew.proto"]) == 0
    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    assert schema.file_descriptor() == compiled


def test_seed_zero_is_not_no_seed():
    for seed in (None, 0, 2**64 - 1):
        payload = protocol.encode_infer(observation(seed=seed), 1)
        assert WIRE.decode(payload).seed == seed


# ----------------------------------------------------------------------------- native requests


@pytest.mark.parametrize("keep", ["noise", "tokens"])
def test_every_field_arrives(keep):
    noise = RNG.standard_normal((4, 5)).astype(np.float32)
    sent = observation(seed=7, solver_steps=3, session="arm-1", time=12.5, noise=noise)
    if keep == "tokens":
        sent = {**sent, "prompt": "", "tokens": [5, 6, 7]}
    payload = protocol.encode_infer(sent, 99)
    assert WIRE.peek(payload) == NativeHeader(Kind.INFER, 99, "arm-1", native=True)
    got = WIRE.decode(payload)
    assert list(got.images) == ["front", "wrist"]
    for name, frame in got.images.items():
        assert frame.dtype == np.uint8
        np.testing.assert_array_equal(frame, sent["images"][name])
    np.testing.assert_array_equal(got.state, np.array([1, 2, 3], np.float32))
    np.testing.assert_array_equal(got.noise, noise)
    assert (got.seed, got.solver_steps, got.session, got.time) == (7, 3, "arm-1", 12.5)
    if keep == "tokens":
        assert got.tokens.tolist() == [5, 6, 7]
    else:
        assert got.prompt == "go"
        assert got.tokens is None


def test_float_and_compressed_frames():
    smooth = np.broadcast_to(np.arange(0, 240, 30, dtype=np.uint8)[None, :, None], (6, 8, 3))
    pixels = RNG.random((6, 8, 3))  # float64
    sent = {"front": pixels, "wrist": encoded(smooth, "PNG")}
    got = WIRE.decode(protocol.encode_infer(observation(images=sent), 1)).images
    np.testing.assert_array_equal(got["front"], pixels.astype(np.float32))
    np.testing.assert_array_equal(got["wrist"], smooth)
    got = WIRE.decode(protocol.encode_infer(observation(images={"front": smooth}), 1, jpeg_quality=95)).images
    assert np.abs(got["front"].astype(int) - smooth).max() <= 8


def test_client_refuses_what_it_cannot_send():
    for changes, text in (
        ({"images": {"front": FRAME[..., 0]}}, r"images.front: .* got uint8 \[6, 8\]"),
        ({"images": {"front": FRAME.astype(np.int64)}}, "images.front: .* int64"),
        ({"images": [FRAME]}, "images: expected a dict"),
        ({"state": [[1, 2, 3]]}, "state: expected an array with 1 dimension"),
        ({"state": "abc"}, "state: expected numbers"),
        ({"state": None}, "state: expected a value"),
        ({"seed": -1}, r"seed: .* got -1$"),
        ({"seed": 1 << 64}, "seed: "),
        ({"prompt": 3}, r"prompt: .* got 3$"),
        ({"tokens": [0.5]}, "tokens: expected integers"),
        ({"task": "x"}, "task: expected one of .* got an unknown key"),
        ({"promt": "x"}, "promt: expected one of .*; did you mean 'prompt'?"),
    ):
        with pytest.raises(sinew_client.InvalidObservation, match=text):
            protocol.encode_infer(observation(**changes), 1)


# ----------------------------------------------------------------------------- vla.cpp requests


def vla_cpp_request(**changes) -> PredictRequest:
    """As vla.cpp's own client builds it for SmolVLA: nothing above field 8."""
    pixels = (FRAME / np.float32(255)).astype("<f4")
    image = Image(encoding=Image.F32_RGB_01, height=6, width=8, data=pixels.tobytes())
    fields = {
        "images": [image, image],
        "lang_tokens": [4, 5],
        "state": [1, 2, 3, 0, 0, 0, 0],
        "request_id": 12,
        **changes,
    }
    return PredictRequest(**fields)


def test_vla_cpp_request():
    payload = vla_cpp_request(noise=range(20), attention_mask=[1, 1]).SerializeToString()
    assert WIRE.peek(payload) == NativeHeader(Kind.INFER, 12, "", native=False)
    got = WIRE.decode(payload)
    assert list(got.images) == ["front", "wrist"]
    assert got.images["front"].dtype == np.float32
    np.testing.assert_array_equal(got.images["wrist"], FRAME / np.float32(255))
    assert got.state.tolist() == [1, 2, 3]
    assert got.tokens.tolist() == [4, 5]
    assert got.prompt == ""
    np.testing.assert_array_equal(got.noise, np.arange(20, dtype=np.float32).reshape(4, 5))


def test_vla_cpp_reply_is_padded():
    chunk = ActionChunk(
        np.arange(8, dtype=np.float32).reshape(4, 2),
        Timing(vision_ms=1, prefix_ms=2, step_ms=(3, 4), total_ms=11),
    )
    reply = PredictResponse.FromString(WIRE.encode(NativeHeader(request_id=12), [chunk], 12.0))
    assert (reply.request_id, reply.chunk_size, reply.action_dim, reply.error) == (12, 4, 5, "")
    rows = np.array(reply.action_chunk).reshape(4, 5)
    np.testing.assert_array_equal(rows[:, :2], chunk.actions)
    assert not rows[:, 2:].any()
    latencies = ("total", "vision", "inference", "prefill", "denoise")
    assert [getattr(reply, f"latency_ms_{name}") for name in latencies] == [11, 1, 9, 2, 7]
    assert not reply.actions


# ----------------------------------------------------------------------------- replies


def test_native_reply():
    timing = Timing(1, 2, 3, (4, 5), 6, 21, 7)
    chunk = ActionChunk(RNG.random((4, 2), dtype=np.float32), timing, seed=0, session="arm-1", time=1.5)
    payload = WIRE.encode(NativeHeader(request_id=3, native=True), [chunk], 22.0)
    got = protocol.decode_chunk(protocol.decode_reply(payload, 3))
    np.testing.assert_array_equal(got.actions, chunk.actions)
    assert got.actions.dtype == np.float32
    assert (got.seed, got.session, got.time) == (0, "arm-1", 1.5)
    assert got.timing == Timing(1, 2, 3, (4, 5), 6, 21, 7, 22)
    assert got.timing.head_ms == 9
    without = WIRE.encode(NativeHeader(request_id=3, native=True), [ActionChunk(chunk.actions)], 1.0)
    assert protocol.decode_chunk(protocol.decode_reply(without, 3)).seed is None


def test_error_reply():
    payload = WIRE.encode_error(NativeHeader(request_id=3), BusyError("the queue is full"))
    with pytest.raises(sinew_client.ServerError, match="the queue is full") as caught:
        protocol.decode_reply(payload, 3)
    assert (caught.value.code, caught.value.message) == ("busy", "the queue is full")
    assert len(WIRE.encode_error(NativeHeader(), RequestError("x" * 10**6))) < 2000


@settings(max_examples=CASES, deadline=None)
@given(st.binary(max_size=200))
def test_client_survives_any_reply(payload):
    with contextlib.suppress(sinew_client.ClientError):
        protocol.decode_chunk(protocol.decode_reply(payload, 1))


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (vla_cpp_request(images=[Image()] * 17), "at most 16, got 17"),
        (vla_cpp_request(precomputed_img_emb=[1.0]), "precomputed_img_emb: not supported"),
        (PredictRequest(kind=77), "kind: expected .* got 77"),
        (PredictRequest(prompt="x" * (MAX_BYTES_BESIDE_IMAGES + 1)), "bytes besides images"),
    ],
)
def test_peek_refuses(request_, text):
    header = WIRE.peek(request_.SerializeToString())
    with pytest.raises(RequestError, match=text):
        raise header.error


def test_a_policy_of_many_moments_takes_as_many_images() -> None:
    """Six moments of three cameras are 18 images."""
    wire = make_codec(replace(SPEC, history=9), 9 * 3, 4)
    refused = {
        count: wire.peek(vla_cpp_request(images=[Image()] * count).SerializeToString()).error
        for count in (18, 19)
    }
    assert refused[18] is None
    assert (
        str(refused[19])
        == "images: expected at most 18, got 19; send one frame per camera and observation step"
    )
    other = wire.peek(vla_cpp_request(images=[Image()] * 18, policy="other").SerializeToString()).error
    assert str(other) == "images: expected at most 16, got 18; send one frame per camera and observation step"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state": [1, 2]}, r"state: expected 7 \(padded\) or 3 values, got 2"),
        ({"raw_state": [1, 2, 3]}, "raw_state: expected either raw_state or state"),
        ({"noise": [0.0] * 19}, "noise: expected 0 or 20 values"),
        ({"camera_names": ["front"]}, "camera_names: expected 2 names, one per image, got 1"),
        ({"camera_names": ["front", "front"]}, "camera_names: expected each camera once"),
        ({"images": [Image()] * 3}, r"images: expected at most 2 \(front, wrist\), got 3"),
        ({"images": [Image(encoding=5)]}, "images.front: expected encoding JPEG"),
        ({"images": [Image(data=b"x")]}, "images.front: expected a JPEG or PNG file, got 1 bytes"),
        ({"images": [Image(encoding=1, height=2, width=2, data=b"x")]}, "expected 12 bytes .* got 1 bytes"),
        ({"images": [Image(encoding=2, height=2, width=2, data=b"x" * 12)]}, "expected 48 bytes .* got 12"),
        ({"images": [Image(encoding=1, height=0, width=2)]}, "height and width from 1 to 8192"),
        ({"images": [Image(encoding=1, height=1, width=2**32 - 1)]}, "height and width from 1 to 8192"),
    ],
)
def test_decode_refuses(changes, text):
    with pytest.raises((RequestError, ObservationError), match=text):
        WIRE.decode(vla_cpp_request(**changes).SerializeToString())


def test_text_that_is_not_utf8():
    tag, name = 101 << 3 | 2, b"\xff\xfe"
    payload = bytes([tag & 0x7F | 0x80, tag >> 7, len(name)]) + name
    with pytest.raises(RequestError, match="parse failed"):
        WIRE.decode(payload)


def test_request_id_is_known_even_when_refused():
    payload = vla_cpp_request(precomputed_img_emb=[1.0]).SerializeToString()
    assert WIRE.peek(payload).request_id == 12


# ----------------------------------------------------------------------------- frames


def test_sizes_are_checked_before_pixels_are_read():
    with pytest.raises(ObservationError, match="from 1 to 8192, got height 9000"):
        compressed_frame("f", png_header(9000, 9000), PixelBudget())
    with pytest.raises(ObservationError, match="decompression bomb"):  # Pillow's own limit comes first
        compressed_frame("f", png_header(60000, 60000), PixelBudget())
    budget = PixelBudget(100)
    raw_frame("a", bytes(48 * 3), 6, 8, "u1", budget)
    with pytest.raises(ObservationError, match="in all frames together"):
        compressed_frame("b", encoded(np.zeros((8, 8, 3), np.uint8)), budget)


def test_image_files_that_are_not_taken():
    deep = Pillow.fromarray(np.zeros((4, 4), np.uint16))
    buffer = io.BytesIO()
    deep.save(buffer, "PNG")
    with pytest.raises(ObservationError, match="8-bit"):
        compressed_frame("f", buffer.getvalue(), PixelBudget())
    for data in (encoded(FRAME, "GIF"), encoded(FRAME)[:-30], encoded(FRAME, "PNG")[:60], b""):
        with pytest.raises(ObservationError, match="f: expected a JPEG or PNG file"):
            compressed_frame("f", data, PixelBudget())


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_colour_modes_become_rgb(mode):
    buffer = io.BytesIO()
    Pillow.fromarray(FRAME).convert(mode).save(buffer, "JPEG" if mode == "CMYK" else "PNG")
    frame = compressed_frame("f", buffer.getvalue(), PixelBudget())
    assert frame.shape == FRAME.shape
    assert frame.dtype == np.uint8


# ----------------------------------------------------------------------------- fuzzing


@pytest.fixture(scope="module")
def policy(smolvla_bundle):
    return load(smolvla_bundle("smolvla-2cam"), allow_missing_cameras=True)


def take(wire: NativeCodec, policy, payload: bytes) -> None:
    """What the server does with a request before it computes; only SinewError may come out."""
    header = wire.peek(payload)
    if header.error is not None:
        assert isinstance(header.error, RequestError)
        return
    try:
        got = wire.decode(payload)
        policy.check(got)
    except SinewError as error:
        assert isinstance(error, (RequestError, ObservationError))  # noqa: PT017
        wire.encode_error(header, error)


@pytest.fixture(scope="module")
def policy_wire(policy) -> NativeCodec:
    return make_codec(policy.spec, policy.padded_state_dim, policy.padded_action_dim)


@settings(max_examples=CASES, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes(policy_wire, policy, payload):
    take(policy_wire, policy, payload)


def valid_payloads() -> list[bytes]:
    both = {"camera1": FRAME, "camera2": encoded(FRAME)}
    sent = {"images": both, "state": np.zeros(6), "prompt": "go", "seed": 1, "session": "s", "time": 1.0}
    vla_cpp = vla_cpp_request(state=[0.0] * 32, noise=[0.1] * 1600)
    return [
        protocol.encode_infer(sent, 5),
        protocol.encode_infer({**sent, "images": {"camera1": encoded(FRAME, "PNG")}}, 5),
        vla_cpp.SerializeToString(),
        protocol.encode_control("RESET", 1, "session"),
    ]


def test_the_seeds_of_the_fuzzer_are_valid(policy_wire, policy):
    for payload in valid_payloads()[:3]:
        assert policy_wire.peek(payload).error is None
        policy.check(policy_wire.decode(payload))


@settings(max_examples=CASES, deadline=None)
@given(st.data())
def test_mutated_requests(policy_wire, policy, data):
    payload = bytearray(data.draw(st.sampled_from(valid_payloads())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(payload) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "repeat"])):
            case "flip" if payload:
                payload[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del payload[at:]
            case "insert":
                payload[at:at] = data.draw(st.binary(max_size=12))
            case "remove":
                del payload[at : at + data.draw(st.integers(1, 12))]
            case "repeat":
                payload[at:at] = payload[at : at + data.draw(st.integers(1, 64))]
    take(policy_wire, policy, bytes(payload))


any_float = st.floats(width=32)
any_image = st.builds(
    Image,
    encoding=st.integers(0, 4),
    height=st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1)),
    width=st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1)),
    data=st.one_of(st.binary(max_size=60), st.just(encoded(FRAME))),
)
any_request = st.builds(
    PredictRequest,
    images=st.lists(any_image, max_size=3),
    lang_tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
    state=st.one_of(st.just([0.0] * 32), st.lists(any_float, max_size=8)),
    noise=st.lists(any_float, max_size=3),
    kind=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3),
    prompt=st.text(max_size=20),
    camera_names=st.lists(st.sampled_from(["camera1", "camera2", "", "é"]), max_size=3),
    raw_state=st.one_of(st.just([]), st.lists(any_float, min_size=6, max_size=6)),
    session=st.text(max_size=5),
    seed=st.none() | st.integers(0, 2**64 - 1),
    solver_steps=st.none() | st.integers(0, 2**32 - 1),
    time=st.none() | st.floats(),
)


@settings(max_examples=CASES, deadline=None)
@given(any_request)
def test_requests_with_any_values(policy_wire, policy, request_):
    take(policy_wire, policy, request_.SerializeToString())


@settings(max_examples=CASES, deadline=None)
@given(st.data())
def test_mutated_image_files(data):
    payload = bytearray(encoded(FRAME, data.draw(st.sampled_from(["JPEG", "PNG"]))))
    for _ in range(data.draw(st.integers(1, 5))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame = compressed_frame("f", bytes(payload), PixelBudget(10**6))
    except ObservationError:
        return
    assert frame.ndim == 3
    assert frame.dtype == np.uint8


def test_what_would_expand_in_the_parser_is_refused_early():
    """Two bytes on the wire become a message object; the parser must not see millions of them."""
    hostile = {
        "empty images": b"\x0a\x00" * (1 << 20),
        "empty names": bytes([102 << 3 & 0x7F | 0x82, 102 >> 4, 0]) * (1 << 20),
        "packed tokens": b"\x12" + _varint(4 << 20) + b"\x01" * (4 << 20),
        "unpacked noise": b"\x25\0\0\0\0" * (1 << 20),
    }
    for name, payload in hostile.items():
        headers: list = []
        lines_of(lambda payload=payload, headers=headers: headers.append(WIRE.peek(payload)), 50 * MAX_FIELDS)
        assert headers[0].error is not None, name
    assert WIRE.peek(b"\x0a\x00" * (MAX_FIELDS + 1)).error is not None


def _varint(value: int) -> bytes:
    groups = list(itertools.takewhile(lambda rest: rest, (value >> shift for shift in range(0, 70, 7))))
    return bytes([group & 0x7F | 0x80 for group in groups[:-1]] + [groups[-1] & 0x7F])
