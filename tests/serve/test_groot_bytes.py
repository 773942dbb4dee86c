"""Hostile bytes on the GR00T wire: the readers of MessagePack and of ``.npy``, and the codec that uses them.

SINEW_FUZZ_CASES sets the number of cases of each property.
"""

from __future__ import annotations

import io
import os

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.untrusted import UntrustedError, parse_npy, raw_array, unpack_msgpack
from sinew_client.untrusted.messages import MAX_TEXT, MAX_VALUES

from sinew.core import ObservationError, RequestError, SinewError
from sinew.serve.decode.array import dump_npy
from tests.serve.test_groot_wire import CODEC, decoded, encoded, flat, nested, request
from tests.work import lines_of

CASES = int(os.environ.get("SINEW_FUZZ_CASES", "100"))


ARRAYS = [
    np.zeros((1, 1, 4, 4, 3), np.uint8),
    np.arange(3, dtype="<f4"),
    np.arange(6, dtype=">f8").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((2, 0)),
    np.array(3.5),
    np.array(["ab", "c"]),
    np.array([True, False]),
]


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{array.shape}")
def test_arrays_as_numpy_reads_and_writes_them(array):
    got = parse_npy(memoryview(npy(array)))
    np.testing.assert_array_equal(got, array)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    back = np.load(io.BytesIO(dump_npy(array)), allow_pickle=False)
    np.testing.assert_array_equal(back, array)
    if array.ndim and array.flags.c_contiguous:
        assert dump_npy(array) == npy(array)


def header(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    size = 2 if version == b"\x01\x00" else 4
    return b"\x93NUMPY" + version + len(text).to_bytes(size, "little") + text.encode("latin-1") + body


def described(descr: str, shape: str, body: bytes = b"", order: str = "False") -> bytes:
    return header(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n", body)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected a .npy file of version 1, 2 or 3, got 0 bytes"),
        (b"PK\x03\x04" + bytes(60), "got 64 bytes that begin with"),  # np.load would unpack a zip file
        (b"\x80\x04\x95" + bytes(60), "expected a .npy file"),  # and, if allowed, a pickle
        (header("", version=b"\x09\x00"), "version 1, 2 or 3"),
        (header("x" * 5000), "header of at most 4096 bytes, got 5000"),
        (npy(np.zeros(3))[:100], "header of at most 4096 bytes, got 118"),
        (header("__import__('os')"), "header as numpy writes it"),
        (header("{" * 4000), "header as numpy writes it"),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1" * 3000),
            "header as numpy writes it",
        ),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1, " * 900 + ")}"), "at most 8 dim"),
        (described("'|O'", "(1,)", bytes(8)), r"expected a dtype of numbers, booleans or text, got '\|O'"),
        (described("'|V8'", "(1,)", bytes(8)), "expected a dtype of"),
        (described("'<M8'", "(1,)", bytes(8)), "expected a dtype of"),
        (described("[('a', '<f4')]", "(1,)", bytes(4)), "header as numpy writes it"),
        (described("'<f4'", "(3,)", bytes(8)), "expected 12 bytes"),
        (
            described("'<f4'", "(1000000, 1000000, 1000000)", bytes(8)),
            "a shape of at most 1 TiB, got .1000000, 1000000",
        ),
        (described("'<f4'", "(9999999999999999999, 9999999999999999999)"), "a shape of at most 1 TiB"),
        (described("'<f4'", "(-1,)", bytes(4)), "header as numpy writes it"),
        (described("'<U99999'", "(0,)"), "."),
    ],
)
def test_hostile_arrays(data, text):
    if text == ".":
        assert parse_npy(memoryview(data)).size == 0
    else:
        with pytest.raises(UntrustedError, match=text):
            lines_of(lambda: parse_npy(memoryview(data)), 10_000)


def test_hostile_messages_are_refused_early():
    """Sixty-four MiB that would become gigabytes of objects, or recursion without end."""
    size = 1 << 24
    hostile = {
        "empty lists": b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size,
        "lists of lists": (b"\xdc\x03\xe8" + b"\x90" * 1000) * (size // 1003),
        "a list that claims more": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 100,
        "a map that claims more": b"\xdf\xff\xff\xff\xff" + b"\xa1a\xc0" * 100,
        "depth": b"\x91" * size,
        "depth of maps": b"\x81\xa1a" * 100_000,
        "a long text": b"\xdb" + (1 << 23).to_bytes(4, "big") + b"a" * (1 << 23),
        "binary that claims more": b"\xc6\xff\xff\xff\xff" + bytes(10),
        "extension": b"\xc7\x01\x05x",
        "timestamp": b"\xd6\xff\0\0\0\0",
        "unused": b"\xc1",
        "a number as key": b"\x81\x01\x02",
        "leftover": b"\x80\x80",
        "nothing": b"",
        "not UTF-8": b"\xa2\xff\xfe",
    }
    for name, payload in hostile.items():
        headers: list = []
        lines_of(lambda p=payload, h=headers: h.append(CODEC.peek(memoryview(p))), 50 * MAX_VALUES)
        assert isinstance(headers[0].error, RequestError), name
    assert MAX_VALUES < 1 << 15
    assert MAX_TEXT < 1 << 19


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda children: st.lists(children, max_size=20) | st.dictionaries(st.text(), children, max_size=20),
    max_leaves=40,
)


@settings(max_examples=CASES, deadline=None)
@given(msgpack_values)
def test_reads_what_the_library_writes(value):
    def plain(node):
        match node:
            case memoryview():
                return bytes(node)
            case list():
                return [plain(each) for each in node]
            case dict():
                return {key: plain(each) for key, each in node.items()}
        return node

    assert plain(unpack_msgpack(memoryview(msgpack.packb(value)))) == value


def take(payload: bytes) -> None:
    """What the server does with a request before it computes; only SinewError may come out."""
    view = memoryview(payload)
    found = CODEC.peek(view)
    error = found.error
    if error is None:
        if CODEC.control(found) is not None:
            return
        try:
            for decode in CODEC.decoders(found, view):
                got = decode()
                assert {frame.ndim for frame in got.images.values()} == {3}
                assert got.state.ndim == 1
        except SinewError as raised:
            error = raised
    if error is not None:
        assert isinstance(error, (RequestError, ObservationError))
        assert list(msgpack.unpackb(CODEC.encode_error(found, error))) == ["error"]


@settings(max_examples=CASES, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes(payload):
    take(payload)


VALID = [
    bytes(request(nested(), seed=1, session="s")),
    bytes(request(nested(), "n1.7")),
    bytes(encoded(flat())),
    bytes(encoded(flat(task=np.array(["go"])), api_token="t")),
    msgpack.packb({"endpoint": "reset", "data": {"options": {"session": "s"}}}),
]


def test_the_seeds_of_the_fuzzer_are_valid():
    for payload in VALID[:3]:
        assert decoded(memoryview(payload))


@settings(max_examples=CASES, deadline=None)
@given(st.data())
def test_mutated_requests(data):
    payload = bytearray(data.draw(st.sampled_from(VALID)))
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
    take(bytes(payload))


any_shape = st.lists(st.integers(0, 9) | st.integers(0, 2**63), max_size=6)
any_descr = st.sampled_from(
    ["'|u1'", "'<f4'", "'>f8'", "'<U3'", "'|O'", "'|b1'", "'<c8'", "''", "'<f3'", "{}"]
)
any_npy = st.builds(
    lambda descr, shape, body, order: described(descr, f"({', '.join(map(str, shape))},)", body, order),
    any_descr,
    any_shape,
    st.binary(max_size=40),
    st.sampled_from(["True", "False", "1"]),
) | st.sampled_from([npy(array) for array in ARRAYS])
any_array = (
    st.builds(lambda data: {"__ndarray_class__": True, "as_npy": data}, any_npy)
    | st.builds(
        lambda kind, dtype, shape, data: {
            b"nd": True,
            b"type": dtype,
            b"kind": kind,
            b"shape": shape,
            b"data": data,
        },
        st.sampled_from([b"", b"O", b"V", None]),
        st.sampled_from(["|u1", "<f4", "|O", "<U2", "", "nonsense"]) | st.lists(st.text()),
        any_shape | st.lists(st.integers(-9, 9) | st.booleans()) | st.none(),
        st.binary(max_size=40),
    )
    | msgpack_values
)
any_key = st.sampled_from(["front", "wrist", "arm", "gripper", "annotation.human.task_description", "x"])
any_modality = st.dictionaries(any_key, any_array, max_size=3) | msgpack_values
any_data = st.fixed_dictionaries(
    {"observation": st.dictionaries(st.sampled_from(["video", "state", "language"]), any_modality)},
    optional={"options": st.dictionaries(st.sampled_from(["seed", "session"]), msgpack_values) | st.none()},
) | st.dictionaries(
    st.sampled_from(["video.front", "state.arm", "state.gripper", "task", "observation"]), any_array
)


@settings(max_examples=CASES, deadline=None)
@given(any_data, st.none() | st.text(max_size=4))
def test_requests_with_any_values(data, token):
    take(msgpack.packb({"endpoint": "get_action", "data": data, "api_token": token}))


@settings(max_examples=CASES, deadline=None)
@given(any_npy | st.binary(max_size=200))
def test_any_array_bytes(data):
    try:
        got = parse_npy(memoryview(data))
    except UntrustedError:
        return
    np.testing.assert_array_equal(got, np.load(io.BytesIO(data), allow_pickle=False))


def test_raw_arrays_are_checked_like_files():
    with pytest.raises(UntrustedError, match="expected a dtype of"):
        raw_array(memoryview(bytes(8)), "O", [1])
    with pytest.raises(UntrustedError, match="expected 8 bytes"):
        raw_array(memoryview(bytes(4)), "<f4", [2])
