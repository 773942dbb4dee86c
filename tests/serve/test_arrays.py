"""Arrays that somebody else wrote as lists: what is no number is refused by name, before memory is taken for it."""

from __future__ import annotations

import base64
import contextlib
import gc
import itertools
import json
import tracemalloc
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.sync.client import connect

from sinew.core import Observation, ObservationError, SinewError
from sinew.policy import load
from sinew.processing import given
from sinew.processing.arrays import numbers
from sinew.processing.safety import Safety
from sinew.serve.decode.array import pack
from sinew.serve.request import WireMessage
from sinew.serve.wires import evo1, field_names, http, openpi
from sinew.serve.wires.groot.codec import GrootCodec
from sinew.serve.wires.lerobot.features import Agreement
from sinew.serve.wires.lerobot.features import observation as lerobot_observation
from sinew.serve.wires.lerobot.types import TimedObservation
from tests.serve.puppet import FRAME, GOOD, SPEC, WAIT_S, desk, until

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
MIB = 1 << 20
WIDE = [*([1.0] * 5_000), "x" * 40_000]  # 93 kB of JSON were 763 MiB as an array


@contextlib.contextmanager
def at_most(mib: float) -> Iterator[None]:
    """Fail if the block takes more memory at once than that, beyond what was there."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        assert (tracemalloc.get_traced_memory()[1] - before) / MIB <= mib
    finally:
        tracemalloc.stop()


def by_http(field: str) -> Any:
    picture = {"__numpy__": base64.b64encode(FRAME).decode(), "dtype": "|u1", "shape": list(FRAME.shape)}
    body = json.dumps({"images/front": picture, "state": [0, 0], field: WIDE}).encode()
    return http.observation(http.read(body, http.JSON), SPEC)


def by_msgpack(field: str) -> Any:
    body = msgpack.packb({"images/front": msgpack.unpackb(pack(FRAME)), "state": [0, 0], field: WIDE})
    return http.observation(http.read(body, http.MSGPACK), SPEC)


def by_openpi(field: str) -> Any:
    payload = msgpack.packb({"images/front": msgpack.unpackb(pack(FRAME)), "state": [0, 0], field: WIDE})
    return openpi.observation(openpi.read(payload), SPEC)


def by_act(field: str) -> Any:
    picture = {"__numpy__": base64.b64encode(FRAME).decode(), "dtype": "|u1", "shape": list(FRAME.shape)}
    body = json.dumps({"full_image": picture, field: WIDE, "instruction": "go"}).encode()
    return http.act_observation(http.read_act(body), SPEC)


@pytest.mark.parametrize(
    ("ask", "field"),
    [(by_act, "state"), *itertools.product([by_http, by_msgpack, by_openpi], ["state", "noise", "previous"])],
)
def test_text_among_numbers_costs_nothing(ask: Callable[[str], Any], field: str):
    with (
        at_most(8),
        pytest.raises(ObservationError, match=rf"{field}: expected numbers, got text at \[5000\]"),
    ):
        ask(field)


def test_evo1s_state_has_no_text():
    fields = {
        "image": np.zeros((1, 2, 2, 3), int).tolist(),
        "state": [*([1] * 5_000), "x" * 40_000],
        "prompt": "go",
        "image_mask": [1],
        "action_mask": [1, 1],
    }
    with at_most(8), pytest.raises(ObservationError, match=r"state: expected numbers, got text at \[5000\]"):
        evo1.observation(WireMessage(json.dumps(fields).encode()), SPEC)


def test_groots_state_has_no_text_beside_numbers():
    """An array of one text of 50,000 characters, joined with one of 5,000 numbers, is 1 GB."""

    def raw(array: np.ndarray) -> dict:
        return {
            "nd": True,
            "type": array.dtype.str,
            "kind": "",
            "shape": list(array.shape),
            "data": array.tobytes(),
        }

    with desk(("groot",)) as at:
        codec: GrootCodec = at.opened["groot"].codec
        for strange in (np.full((1, 1, 1), "x" * 50_000), np.ones((1, 1, 2), bool)):
            data = {
                "video": {"front": raw(FRAME[None, None])},
                "state": {"a": raw(strange), "b": raw(np.zeros((1, 1, 5_000)))},
                "language": {"task": ["go"]},
            }
            payload = msgpack.packb({"endpoint": "get_action", "data": {"observation": data}})
            header = codec.peek(memoryview(payload))
            assert header.error is None
            codec.names = type(codec.names)(
                cameras={"front": "front"},
                states=("a", "b"),
                state_parts={},
                actions={"actions": slice(0, 2)},
                prompt="task",
                fixed=True,
            )
            with at_most(8), pytest.raises(ObservationError, match=r"state.a: expected numbers, got dtype"):
                [decode(None) for decode in codec.decoders(header, memoryview(payload))]


class Broken:
    def __array__(self, *_given: Any, **_options: Any) -> np.ndarray:
        raise ValueError("no numbers")


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([1.0, True], r"a truth value at \[1\]"),
        ([1.0, None], r"nothing at \[1\]"),
        ([[1.0, 2.0], [3.0, b"4"]], r"bytes at \[1, 1\]"),
        ([1.0, 2j], r"a complex number at \[1\]"),
        ([1.0, {}], r"dict at \[1\]"),
        ([[1.0], [2.0, 3.0]], "a ragged sequence"),
        ([[1.0], 2.0], "a ragged sequence"),
        ([1.0, [2.0]], r"list at \[1\]"),
        ([1, 10**400], "an integer beyond 64 bits"),
        ([1.0, 10**400], "an integer beyond 64 bits"),
        ([np.zeros(2), np.zeros(3)], "a ragged sequence"),
        ([np.zeros(2, np.uint8), np.zeros(2)], "several"),
        ([np.zeros(2), 1.0], "a ragged sequence"),
        ([np.zeros(2), "x"], "text"),
        ([np.ones(2, bool)], "dtype bool inside a list"),
        (Broken(), r"Broken \(no numbers\)"),
        (["x" * 40_000] * 3, r"text at \[0\]"),
        (np.ones(2, bool), "dtype bool"),
        (np.ones(2, complex), "dtype complex128"),
        (np.ma.array([0.0, 1.0], mask=[False, True]), "a masked array"),
        (True, "a truth value"),
        (None, "nothing"),
        ("1.0", "text"),
        ({"a": 1.0}, "dict"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value, got):
    with pytest.raises(ObservationError, match=rf"^state: expected [a-z ]+, got {got}"):
        numbers("state", value)


def test_numbers_arrive():
    assert numbers("n", [1, 2]).dtype == np.int64
    assert numbers("n", [1, 2.5]).dtype == numbers("n", []).dtype == np.float64
    assert numbers("n", [[[]], [[]]]).shape == (2, 1, 0)
    assert numbers("n", [np.float32(1), 2]).tolist() == [1.0, 2.0]
    assert numbers("n", [np.int32(1), 2]).dtype == np.int64
    assert numbers("n", [np.zeros((2, 3), np.uint8)] * 2).shape == (2, 2, 3)
    assert numbers("n", range(3)).tolist() == [0, 1, 2]
    assert numbers("n", 3).shape == ()
    deep: Any = 1.0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ObservationError, match="lists in at most 8 levels"):
        numbers("n", deep)
    while isinstance(deep, list):  # or its end would recurse
        deep = deep[0]
    assert numbers("n", [np.zeros(2)]).shape == (1, 2)
    assert numbers("n", [np.int32(1), 2.5]).tolist() == [1.0, 2.5]
    for many, got in (([[1, 2, 3]] * 2, "more"), (np.zeros(6), "6"), (range(6), "6")):
        assert numbers("n", many, 6).size == 6
        with pytest.raises(ObservationError, match=f"^n: expected at most 5 numbers, got {got}$"):
            numbers("n", many, 5)


@pytest.mark.parametrize(
    "state", [[True, False], np.ones(2, bool), np.ma.array([0.0, 1.0], mask=[False, True]), [1.0, "2"]]
)
def test_states_of_python_programs_are_numbers(state):
    """A gap of a masked array was taken for the number below it, and truth values for 0 and 1."""
    with pytest.raises(ObservationError, match="state: expected numbers"):
        given.observation({**GOOD, "state": state}, SPEC)


def test_limits_look_at_no_text():
    """They are asked before the observation is prepared, and made an array of whatever its state was."""
    policy = load(PEN, engine="eager", threads=1)
    frames = {each.name: FRAME for each in policy.spec.cameras}
    seen = Observation(images=frames, state=[*([1.0] * 500), "x" * 20_000], prompt="go")  # type: ignore[arg-type]
    with at_most(2):
        assert not Safety(policy.processor).check(seen)


def test_a_robots_joint_is_no_truth_value():
    agreed = Agreement(("a", "b"), (("front", "front"),), "task", None, 3, "")
    raw = {"a": np.bool_(True), "b": 0.0, "front": FRAME, "task": "go"}
    with pytest.raises(ObservationError, match="a: expected a number, got bool"):
        lerobot_observation(TimedObservation(0.0, 0, raw), agreed)


# ----------------------------------------------------------------------------- sizes before memory


def test_arrays_of_bytes_do_not_become_floats():
    """4 MiB of uint8 were 32 MiB of float64 as a state, 16 MiB of float32 as noise, 32 MiB of a list as a prompt."""
    data, said = np.zeros(4 * MIB, np.uint8), b"\xff" * (4 * MIB)
    for read in (
        lambda: field_names.vector("state", data),
        lambda: openpi.options({"noise": data}),
        lambda: field_names.text("prompt", data),
        lambda: field_names.text("prompt", said),
    ):
        with at_most(1), pytest.raises(ObservationError, match="at most 65536|expected text"):
            read()


def test_a_key_is_not_written_into_each_of_its_members():
    """A key of 1 MB over 256 others was 256 MB: their names were joined."""
    tree = {"k" * MIB: {str(number): 1 for number in range(256)}}
    with at_most(4), pytest.raises(ObservationError, match="keys of at most 512 characters"):
        field_names.flatten(tree)


def test_texts_of_a_message_are_short_in_all():
    """One strange character makes four bytes of each of the others: 60 MiB of text were 240 MiB, and waited."""
    text = "\U0001f600" + "a" * ((1 << 18) - 8)
    payload = msgpack.packb({"state": [text] * 17, "images/front": b""})
    with at_most(18), pytest.raises(SinewError, match="at most 4194304 bytes of text in all"):
        openpi.read(payload)
    for wide in (text + "a" * 8, "\u0100" + "a" * (1 << 18)):
        for body in (json.dumps({"x": wide}), json.dumps({"x": [{wide: 1}]}, ensure_ascii=False)):
            with pytest.raises(SinewError, match="at most 262144 characters of text that is not base64"):
                http.read(body.encode(), http.JSON)
    long = {"picture": "a" * (1 << 19), "prompt": "\u62ff\U0001f600"}
    assert http.read(json.dumps(long, ensure_ascii=False).encode(), http.JSON).content == long


@pytest.mark.parametrize(
    "strange",
    [
        {"__numpy__": "", "dtype": "|u1", "shape": [[int("9" * 4000)] * 100] * 100},
        {"__numpy__": "", "dtype": [int("9" * 4000)] * 10_000, "shape": []},
    ],
)
def test_a_refusal_does_not_write_out_what_came(strange):
    """Numbers of 4,000 digits, 40 MB of them, were made text for eighty characters of it."""
    content = {"images/front": strange, "state": [0, 0]}
    with (
        at_most(4),
        pytest.raises(ObservationError, match="a shape of at most|a little-endian number type") as refused,
    ):
        http.observation(WireMessage(content), SPEC)
    assert len(str(refused.value)) < 300
    content = {"unnorm_key": [int("9" * 4000)] * 10_000}
    with at_most(4), pytest.raises(ObservationError, match="unnorm_key: expected text, got list"):
        http.act_observation(http.Act(content, True, False), SPEC)


def test_two_values_of_one_key_are_refused():
    """The later one won, without a word."""
    with pytest.raises(ObservationError, match="images/front: expected one value, got two"):
        field_names.flatten({"images": {"front": 1}, "images/front": 2})
    with pytest.raises(SinewError, match="each key once, got 'state' twice"):
        openpi.read(b"\x82\xa5state\x01\xa5state\x02")


def test_numbers_of_evo1s_pictures_take_two_bytes_each():
    """They were eight bytes each until all were read: 64 MiB of text were 256 MiB beside it."""
    row = b"[" + b",".join([b"[0,0,0]"] * 512) + b"]"
    fields = b'{"image":[[%s]],"state":[0,0],"prompt":"go","image_mask":[1],"action_mask":[1,1]}'
    payload = fields % b",".join([row] * 1024)
    assert len(payload) > 4 * MIB
    with at_most(5 * len(payload) / MIB):
        assert evo1.observation(WireMessage(payload), SPEC).images["front"].shape == (1024, 512, 3)
    for value in (
        b"256",
        b"1000",
        b"65536",
        b"99999999999999999999",
        b"1e2",
        b"-1",
        b"0.5",
        b'"1"',
        b"null",
        b"true",
    ):
        with pytest.raises(ObservationError, match="image"):
            evo1.observation(WireMessage(fields % (b"[[0,0,%s]]" % value)), SPEC)


# ----------------------------------------------------------------------------- and given back


def refused_by_http(address: str, state: np.ndarray) -> None:
    body = pack({"images/front": FRAME, "state": state, "prompt": "go"})
    connection = HTTPConnection(address.removeprefix("ws://"), timeout=WAIT_S)
    connection.request("POST", "/v1/actions", body, {"Content-Type": http.MSGPACK})
    assert b"one row of numbers" in connection.getresponse().read()
    connection.close()


def refused_by_openpi(address: str, state: np.ndarray) -> None:
    with connect(address, max_size=None) as robot:
        robot.recv(WAIT_S)
        robot.send(pack({"images/front": FRAME, "state": state, "prompt": "go"}))
        assert "one row of numbers" in robot.recv(WAIT_S)


@pytest.mark.parametrize("ask", [refused_by_http, refused_by_openpi])
def test_a_refusal_gives_its_memory_back_at_once(ask):
    """Requests that were refused stayed in memory until the garbage collector came: the error knew the frames that it
    had come through, and these the error."""
    state = np.zeros((2, 1 << 15))  # 512 KiB
    with desk(("web",)) as at:
        ask(at.web, state)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(4):
                ask(at.web, state)
            until(
                lambda: tracemalloc.get_traced_memory()[0] - before < state.nbytes // 2, "memory to be free"
            )
        finally:
            tracemalloc.stop()
            gc.enable()
