"""The decoders of the wires openpi and http alone: hostile bytes give an error of this project, and nothing else.

``SINEW_FUZZ_CASES=10000`` makes the run long.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sinew.convert import convert
from sinew.core import ObservationError, PolicySpec, RequestError, SinewError
from sinew.policy import load
from sinew.serve.decode import array as arrays
from sinew.serve.request import WireMessage
from sinew.serve.wires import field_names, http, openpi
from tests.convert.openpi_layout import write_checkpoint
from tests.serve.test_web_wires import BLOCKS, CONFIG, OBSERVED

CASES = int(os.environ.get("SINEW_FUZZ_CASES", "100"))


@pytest.fixture(scope="module")
def spec(golden, tmp_path_factory) -> PolicySpec:
    directory = tmp_path_factory.mktemp("decoders")
    path, arch, _ = write_checkpoint(golden, directory, CONFIG)
    return load(convert(path, directory / "policy.gguf", arch=arch, openpi_config=CONFIG)).spec


def test_arrays_are_checked_before_they_are_made():
    good = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(arrays.unpack(arrays.pack(good)), good)
    np.testing.assert_array_equal(arrays.from_json_numpy(arrays.to_json_numpy(good)), good)
    for data, dtype, shape in (
        (b"\0" * 4, "O", [1]),
        (b"\0" * 8, "V8", [1]),
        (b"\0" * 16, "<c16", [1]),
        (b"\0" * 8, "<M8[s]", [1]),
        (b"\0" * 8, "i4,i4", [1]),
        (b"\0" * 4, ">f4", [1]),
        (b"\0" * 4, "<f4", [1 << 40]),
        (b"\0" * 4, "<f4", [-1]),
        (b"\0" * 4, "<f4", [True]),
        (b"\0" * 4, "<f4", [1] * 7),
        (b"\0" * 4, "<f4", [2]),
        (b"\0" * 4, "<f4", "1"),
        ("text", "<f4", [1]),
        (b"\0" * 4, "<f4" * 1000, [1]),
    ):
        with pytest.raises(ObservationError):
            arrays.array("x", data, dtype, shape)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # a binary of four gigabytes
        b"\x91" * 100_000,  # a hundred thousand lists in lists
        b"\x81\xc0" * 100_000,
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(1, 0)),
    ],
)
def test_msgpack_bombs(bomb):
    with pytest.raises((RequestError, ObservationError)):
        openpi.read(bomb)


def test_a_picture_that_unpacks_to_gigabytes_is_refused(spec):
    header = io.BytesIO()
    Image.new("1", (8192, 8192)).save(header, "PNG")
    bomb = base64.b64encode(header.getvalue()).decode()
    message = {"images": {f"camera_{n}": bomb for n in range(2)}, "state": [0] * 8}
    with pytest.raises(ObservationError, match="pixels in all frames together"):
        http.observation(WireMessage(message), spec)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"advantag": "positive"}, "advantag: expected one of the keys .*did you mean 'advantage'"),
        ({"cfg_strength": 2.0}, "cfg_strength: expected one of the keys .*, got an unknown key"),
        ({"stat": [0.0]}, "stat: expected .*observation/state, prompt, seed"),
        ({"observation/stat": [0.0]}, "observation/stat: .*did you mean 'observation/state'"),
        ({"observation/imag": 1}, "observation/imag: .*did you mean 'observation/image'"),
        ({"extra": {"deep": {"er": 1}}}, "extra/deep/er: expected one of the keys"),
        ({"task": "something else"}, "task: expected one instruction, as prompt, got two"),
        ({"next.reward": 1.0}, "next.reward: expected one of the keys"),  # of no data set's row
    ],
)
def test_a_key_that_nothing_reads_is_refused_by_name(spec, changes, text):
    with pytest.raises(ObservationError, match=f"^{text}"):
        openpi.observation(openpi.read(arrays.pack({**OBSERVED, **changes})), spec)


def test_what_clients_of_the_field_send_beside_is_listed():
    """vLLM-Omni's clients send zeros of a pose to every policy; a row of a LeRobot data set has its own columns."""
    spec = load(BLOCKS).spec
    own = {"images": {each.name: np.zeros((8, 8, 3), np.uint8) for each in spec.cameras}, "state": [0.0] * 4}
    read = {"beside": (*openpi.OPTIONS, *openpi.IGNORED)}
    for key in openpi.IGNORED:
        assert field_names.read_observation(
            field_names.flatten({**own, key: np.zeros(6)}), spec, "openpi", **read
        ).images
        with pytest.raises(ObservationError, match="cartesian"):
            http.observation(WireMessage({**own, "cartesian_position": [0.0] * 6}), spec)
    row = {f"observation.images.{name}": frame for name, frame in own["images"].items()}
    row |= {"observation.state": own["state"], "task": "go", "frame_index": 3, "next.done": False}
    assert http.observation(WireMessage(row), spec).prompt == "go"
    with pytest.raises(ObservationError, match="^observation.stat: .*did you mean 'observation.state'"):
        http.observation(WireMessage({**row, "observation.stat": [0.0]}), spec)
    with pytest.raises(ObservationError, match="^observation.state: expected one state, as state, got two"):
        http.observation(WireMessage({**row, "state": [0.0] * 4}), spec)
    for key in ("advantages", "cfg_strength", "stat", "tokens"):
        with pytest.raises(ObservationError, match=f"^{key}: expected one of the keys .* unknown key"):
            http.observation(WireMessage({**own, key: 2.0}), spec)
    act = {"full_image": np.zeros((8, 8, 3), np.uint8), "state": own["state"], "instruction": "go"}
    assert http.act_observation(http.Act(act, False, False), spec).prompt == "go"
    with pytest.raises(ObservationError, match="^do_sample: expected one of the keys"):
        http.act_observation(http.Act({**act, "do_sample": True}, False, False), spec)


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8) | st.binary()
)
ARRAYS = st.fixed_dictionaries(
    {
        "__ndarray__": st.just(True),
        "data": st.binary(max_size=32) | LEAVES,
        "dtype": st.sampled_from(["<f4", "|u1", "O", "<f8", "V4", "<i8", "nonsense"]) | LEAVES,
        "shape": st.lists(st.integers(-2, 9), max_size=4) | LEAVES,
    }
)
KEYS = st.sampled_from(
    [*OBSERVED, "images", "endpoint", "session_id", "seed", "noise", "state", "full_image"]
)
TREES = st.recursive(
    LEAVES | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)


def tried(steps) -> None:
    """Nothing but the errors of this project comes out."""
    with contextlib.suppress(SinewError):
        steps()


@settings(max_examples=CASES, deadline=None)
@given(st.binary(max_size=200) | st.dictionaries(KEYS, TREES, max_size=6).map(msgpack.packb))
def test_fuzz_openpi(spec, payload):
    tried(lambda: openpi.observation(openpi.read(payload), spec))


@settings(max_examples=CASES, deadline=None)
@given(st.data())
def test_fuzz_openpi_mutations(spec, data):
    payload = bytearray(arrays.pack({**OBSERVED, "seed": 1, "session_id": "a"}))
    for _ in range(data.draw(st.integers(1, 8))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    tried(lambda: openpi.observation(openpi.read(bytes(payload[:cut] if cut % 3 == 0 else payload)), spec))


def jsonable(tree):
    if isinstance(tree, bytes):
        return base64.b64encode(tree).decode()
    if isinstance(tree, dict):
        return {("__numpy__" if key == "__ndarray__" else str(key)): jsonable(v) for key, v in tree.items()}
    return [jsonable(each) for each in tree] if isinstance(tree, list) else tree


@settings(max_examples=CASES, deadline=None)
@given(
    st.binary(max_size=200)
    | st.dictionaries(KEYS, TREES, max_size=6).map(lambda t: json.dumps(jsonable(t)).encode())
)
def test_fuzz_http(spec, body):
    tried(lambda: http.observation(http.read(body, http.JSON), spec))
    tried(lambda: http.observation(http.read(body, http.MSGPACK), spec))
    tried(lambda: http.act_observation(http.read_act(body), spec))


def test_keys_without_a_map():
    assert field_names.text("prompt", np.array(["go"])) == "go"
    with pytest.raises(ObservationError, match="levels"):
        field_names.flatten({"a": {"b": {"c": {"d": {"e": 1}}}}})
    with pytest.raises(ObservationError, match="at most 256 keys"):
        field_names.flatten({str(n): n for n in range(300)})
