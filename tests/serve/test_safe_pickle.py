"""The restricted reader of pickles: what LeRobot sends is read, and nothing else does anything."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import os
import pickle
import pickletools
import random
import re
import struct
import sys
import tracemalloc
import types
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinew.core import CameraSpec, PolicySpec, RequestError, SinewError, VectorSpec
from sinew.core.rate_limited_log import LogOnce
from sinew.serve.wires.lerobot import types as lerobot_types
from sinew.serve.wires.lerobot.features import Agreement, agree, observation
from sinew.serve.wires.lerobot.pickle.arrays import ARRAY_NAMES
from sinew.serve.wires.lerobot.pickle.machine import MAX_DEPTH, MAX_NODES, MAX_TEXT, SafePickleError, load
from sinew.serve.wires.lerobot.types import (
    HELPERS,
    OLD_HELPERS,
    _storage,
    read_observation,
    read_policy_config,
    write_actions,
)
from tests.work import lines_of

CASES = int(os.environ.get("SINEW_FUZZ_CASES", "100"))
PROTOCOLS = (2, 3, 4, 5)
FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)


# ------------------------------------------------------------------- LeRobot's classes, as pickle needs to see them


@dataclass
class TimedObservation:
    timestamp: float
    timestep: int
    observation: dict
    must_go: bool = False


@dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: Any


@dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: dict = field(default_factory=dict)


CLASSES = (TimedObservation, TimedAction, RemotePolicyConfig)


def modules(helpers: str) -> dict[str, types.ModuleType]:
    """LeRobot's module with the classes above in it, and the packages it is in."""
    parts = helpers.split(".")
    found = {".".join(parts[: end + 1]): types.ModuleType(parts[end]) for end in range(len(parts))}
    for each in CLASSES:
        setattr(found[helpers], each.__name__, each)
    return found


def as_lerobot(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL, helpers: str = HELPERS) -> bytes:
    """``pickle.dumps`` in a process where the classes above are LeRobot's."""
    with pytest.MonkeyPatch.context() as patch:
        for module_name, module in modules(helpers).items():
            patch.setitem(sys.modules, module_name, module)
        for each in CLASSES:
            patch.setattr(each, "__module__", helpers)
        return pickle.dumps(value, protocol)


def raw_observation() -> dict:
    return {
        **{f"joint{index}.pos": index / 4 for index in range(6)},
        "top": FRAME,
        "side": np.asfortranarray(FRAME),
        "task": "pick up the cube",
    }


def timed(**changes: Any) -> TimedObservation:
    return TimedObservation(
        **{"timestamp": 17.25, "timestep": 3, "observation": raw_observation(), **changes}
    )


FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (6,), "names": [f"joint{i}.pos" for i in range(6)]},
    "observation.images.camera1": {
        "dtype": "image",
        "shape": (48, 64, 3),
        "names": ["height", "width", "channels"],
    },
}


def read(data: bytes) -> Any:
    return load(data, ARRAY_NAMES)


# ------------------------------------------------------------------- what is read


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_observation_in_every_protocol(protocol):
    values = {
        **raw_observation(),
        "scalar": np.float32(2.5),
        "tensor": torch.arange(12.0).reshape(3, 4).T,
        "flags": torch.tensor([True, False]),
        "halves": torch.tensor([1.5], dtype=torch.float16),
        "big endian": np.arange(3, dtype=">i4"),
        "none at all": np.zeros((0, 3)),
        "nested": {"list": [1, -5, 1 << 40, -(1 << 70)], "tuple": (None, True, 0.5)},
        "ordered": collections.OrderedDict(a=1),
        "long": "ü" * 1000,
        "bytes": b"",
    }
    found = read_observation(as_lerobot(timed(observation=values, must_go=True), protocol))
    assert (found.timestamp, found.timestep, found.must_go) == (17.25, 3, True)
    assert list(found.observation) == list(values)
    for key, value in values.items():
        got = found.observation[key]
        if isinstance(value, (np.ndarray, torch.Tensor)):
            value = np.asarray(value)
            assert (got.dtype, got.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(got, value, err_msg=key)
    if protocol > 2:  # 2 has no bytes: frames are decoded there
        assert not found.observation["top"].flags.owndata


@pytest.mark.parametrize("helpers", [HELPERS, OLD_HELPERS])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_policy_instructions_in_every_protocol(protocol, helpers):
    config = RemotePolicyConfig("smolvla", "user/model", FEATURES, 50, "cuda", {"a": "b"})
    found = read_policy_config(as_lerobot(config, protocol, helpers))
    assert (found.policy_type, found.pretrained_name_or_path, found.device) == (
        "smolvla",
        "user/model",
        "cuda",
    )
    assert (found.lerobot_features, found.actions_per_chunk, found.rename_map) == (FEATURES, 50, {"a": "b"})
    assert found.helpers == helpers


def test_fields_of_later_versions_are_told_once_and_missing_ones_named(caplog, monkeypatch):
    monkeypatch.setattr(lerobot_types, "_once", LogOnce(lerobot_types.logger))
    late = timed()
    late.rtc_delay = 5
    for _ in range(2):
        assert read_observation(as_lerobot(late)).timestep == 3
    assert caplog.messages == ["lerobot: TimedObservation.rtc_delay is not read"]
    for name, value, got in (
        ("timestep", "3", "str"),
        ("timestep", True, "bool"),
        ("timestep", 1 << 90, str(1 << 90)),
        ("timestamp", float("nan"), "nan"),
        ("observation", [1], "list"),
        ("must_go", 1, "1"),
    ):
        with pytest.raises(SafePickleError, match=f"TimedObservation.{name}: expected .*, got {got}"):
            read_observation(as_lerobot(timed(**{name: value})))
    bare = timed()
    del bare.timestep
    with pytest.raises(SafePickleError, match="TimedObservation.timestep: expected a value, got nothing"):
        read_observation(as_lerobot(bare))
    with pytest.raises(SafePickleError, match="expected a TimedObservation, got dict"):
        read_observation(pickle.dumps({}))


@pytest.mark.parametrize("helpers", [HELPERS, OLD_HELPERS])
def test_the_reply_is_what_pickle_makes_timed_actions_of(helpers, monkeypatch):
    for module_name, module in modules(helpers).items():
        monkeypatch.setitem(sys.modules, module_name, module)
    actions = np.random.default_rng(1).standard_normal((50, 7)).astype(np.float32)
    reply = write_actions(actions[:, :6], 1000.5, (1 << 40) - 1, 1 / 30, helpers)
    found = pickle.loads(reply)
    assert [type(each) for each in found] == [TimedAction] * 50
    assert [each.timestep for each in found[:2]] == [(1 << 40) - 1, 1 << 40]
    assert [each.timestamp for each in found] == [1000.5 + index * (1 / 30) for index in range(50)]
    rows = torch.stack([each.action for each in found])
    assert rows.dtype == torch.float32
    np.testing.assert_array_equal(rows.numpy(), actions[:, :6])
    found[0].action += 1  # rows do not overlap
    np.testing.assert_array_equal(found[1].action.numpy(), actions[1, :6])


@pytest.mark.parametrize("count", [1, 255, 256, 65535, 65536])
def test_a_storage_is_written_as_torch_writes_it(count):
    numbers = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    storage = torch.from_numpy(numbers).__reduce_ex__(2)[1][0]
    (theirs,) = storage.__reduce__()[1]
    key = re.search(rb"X....(\d+)q\x02", theirs, re.DOTALL)[1]  # the address; ours has a fixed name there
    assert _storage(numbers) == theirs.replace(struct.pack("<I", len(key)) + key, struct.pack("<I", 1) + b"0")


# ------------------------------------------------------------------- what is refused


class Calls:
    """Pickled as a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


VICTIM = Path("written-by-a-pickle")
STORAGE = torch.arange(6.0).__reduce_ex__(2)[1][0].__reduce__()[1][0]


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def raw_bytes(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b"\x80\x04" + opening * depth + b"N" + closing * depth + b"."


def doubled(levels: int) -> bytes:
    """An expression for a tuple of twice the tuple before, and so on: 2 ** levels values."""
    return b"K\x01" + b"".join(b"\x94h" + bytes([index]) + b"\x86" for index in range(levels))


def object_array_of_bytes() -> bytes:
    """An array whose dtype is object and whose data are plain bytes: pointers, for a careless reader."""
    state = pickle.dumps(np.zeros(1), 3).replace(b"f8", b"O8")
    assert b"O8" in state
    return state


def torch_storage(**changes: bytes) -> bytes:
    data = STORAGE
    for old, new in changes.values():
        assert old in data
        data = data.replace(old, new)
    return b"\x80\x04" + name("torch.storage", "_load_from_bytes") + raw_bytes(data) + b"\x85R."


def rebuilt(offset: int, size: tuple, stride: tuple) -> bytes:
    """A tensor of the storage of six numbers."""
    load_storage = name("torch.storage", "_load_from_bytes") + raw_bytes(STORAGE) + b"\x85R"
    parts = b"".join(pickle.dumps(each, 2)[2:-1] for each in (offset, size, stride))
    return (
        b"\x80\x04" + name("torch._utils", "_rebuild_tensor_v2") + b"(" + load_storage + parts + b"\x89}tR."
    )


COMMAND = f"touch {VICTIM}"
EVIL = pickle.dumps(Calls(os.system, COMMAND))
ATTACKS = {
    # The eight classes of the reference.
    "builtins.eval": (pickle.dumps(Calls(eval, f"open({str(VICTIM)!r}, 'w')")), "the global builtins.eval"),
    "posix.system": (EVIL, "the global posix.system"),
    "builtins.getattr": (pickle.dumps(Calls(getattr, {}, "get")), "the global builtins.getattr"),
    "object array, pickled": (pickle.dumps(np.array([{}, Calls(os.system, COMMAND)], object)), "is not allowed"),
    "object array, of bytes": (object_array_of_bytes(), "numpy.dtype 'O8'"),
    "structured dtype": (pickle.dumps(np.zeros(2, [("a", "f4"), ("b", "O")])), "numpy.dtype 'V12'"),
    "in a torch storage": (
        b"\x80\x04" + name("torch.storage", "_load_from_bytes") + raw_bytes(EVIL) + b"\x85R.",
        "the global posix.system",
    ),
    "dotted name": (b"\x80\x04" + name("numpy", "ndarray.__init__") + b")R.", "the global numpy.ndarray.__init__"),
    "allocation": (
        pickle.dumps(Calls(np.ndarray((0,)).__reduce__()[0], np.ndarray, (1 << 40,), b"b")),
        "numpy _reconstruct is allowed only",
    ),
    # Names.
    "numpy.load": (pickle.dumps(Calls(np.load, "/etc/passwd")), "the global numpy"),
    "torch.load": (b"\x80\x04" + name("torch", "load") + b")R.", "the global torch.load"),
    "storage class outside": (b"\x80\x04" + name("torch", "FloatStorage") + b")R.", "the global torch.Float"),
    "import by name": (pickle.dumps(Calls(__import__, "os")), "the global builtins.__import__"),
    "global in lines": (b"\x80\x02cos\nsystem\n)R.", "the global os.system"),
    "an endless name": (b"\x80\x02c" + b"a" * 5000 + b"\n", "expected a name of at most 128 bytes"),
    "a name of numbers": (b"\x80\x04K\x01K\x02\x93.", "expected a module and a name as short text"),
    "a class as data": (b"\x80\x04" + name("numpy", "ndarray") + b".", "expected data, got numpy.ndarray"),
    "calling what may not be": (b"\x80\x04" + name("numpy", "ndarray") + b")R.", "may not be called"),
    "calling a number": (b"\x80\x04K\x01)R.", "may not be called"),
    "state for a dict": (b"\x80\x04}}b.", "without a state"),
    "new object of a name": (b"\x80\x04" + name("numpy", "ndarray") + b")\x81.", "NEWOBJ"),
    "wrong arguments": (b"\x80\x04" + name("numpy", "dtype") + b")R.", "invalid content"),
    # Opcodes.
    "INST": (b"\x80\x02(ios\nsystem\n.", "opcode 0x69"),
    "OBJ": (b"\x80\x02(cos\nsystem\no.", "the global os.system"),
    "NEWOBJ_EX": (b"\x80\x04)}\x92.", "opcode 0x92"),
    "EXT1": (b"\x80\x02\x82\x01.", "opcode 0x82"),
    "EXT2": (b"\x80\x02\x83\x01\x00.", "opcode 0x83"),
    "EXT4": (b"\x80\x02\x84\x01\x00\x00\x00.", "opcode 0x84"),
    "PERSID": (b"\x80\x02Pabc\n.", "opcode 0x50"),
    "BINPERSID": (b"\x80\x02K\x01Q.", "persistent id at byte 5 is not allowed"),
    "NEXT_BUFFER": (b"\x80\x05\x97.", "opcode 0x97"),
    "text integer": (b"\x80\x02I" + b"9" * 10_000 + b"\n.", "opcode 0x49"),
    "text float": (b"\x80\x02F1.5\n.", "opcode 0x46"),
    "set": (b"\x80\x04\x8f.", "opcode 0x8f"),
    "protocol 0": (pickle.dumps([1], 0), "expected protocol 2 to 5"),
    "protocol 1": (pickle.dumps([1], 1), "expected protocol 2 to 5"),
    "protocol 6": (b"\x80\x06N.", "expected protocol 2 to 5"),
    "nothing": (b"", "expected protocol 2 to 5"),
    "JSON": (b'{"a": 1}', "expected protocol 2 to 5"),
    "two pickles": (pickle.dumps(1) * 2, "no bytes after the end of the pickle"),
    "no end": (b"\x80\x04N", "it ends at byte 3"),
    "empty stack": (b"\x80\x04.", "one value at the end of the pickle"),
    "two values": (b"\x80\x04NN.", "one value at the end of the pickle"),
    "open mark": (b"\x80\x04N(.", "one value at the end of the pickle"),
    "no mark": (b"\x80\x04t.", "no mark"),
    "below the mark": (b"\x80\x04K\x01(\x85.", "the stack is empty"),
    "append to a tuple": (b"\x80\x04)Na.", "expected a list"),
    "items of a list": (b"\x80\x04](NNu.", "expected a dict"),
    "odd items": (b"\x80\x04}(Nu.", "a key without a value"),
    "a tuple as key": (b"\x80\x04}" + doubled(60) + b"Ns.", "expected text of at most 256 bytes as keys, got tuple"),
    # Sizes.
    "long integer": (b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".", "at most 16 bytes, got 255"),
    "longer integer": (b"\x80\x02\x8b\xff\xff\xff\x7f", "opcode 0x8b"),
    "frame": (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "a frame of 18446744073709551615 bytes"),
    "bytes": (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00.", "expected 72057594037927935 more"),
    "bytearray": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "more bytes at byte 11"),
    "unicode": (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x00.", "more bytes at byte 11"),
    "text": (b"\x80\x04" + text("a" * (MAX_TEXT + 1)) + b".", f"at most {MAX_TEXT} bytes, got {MAX_TEXT + 1}"),
    "not UTF-8": (b"\x80\x04X\x02\x00\x00\x00\xff\xff.", "invalid content"),
    "surrogates": (b"\x80\x04X\x03\x00\x00\x00\xed\xa0\x80.", "invalid content"),
    "not UTF-8, long": (b"\x80\x04X\x00\x04\x00\x00" + b"\xff" * 1024 + b".", "invalid content"),
    "unknown memo": (b"\x80\x04h\x07.", "the memo has no entry 7"),
    "memo of nothing": (b"\x80\x04\x94.", "the stack is empty"),
    "many opcodes": (b"\x80\x04" + b"N" * 30_000 + b".", "at most 20000 opcodes"),
    "deep lists": (nested(b"]", b"a", 5000), f"at most {MAX_DEPTH} levels"),
    "deep tuples": (nested(b"", b"\x85", 15_000), f"at most {MAX_DEPTH} levels"),
    "a list in itself": (b"\x80\x04]\x94h\x00a.", f"at most {MAX_DEPTH} levels"),
    "a dict in itself": (b"\x80\x04}\x94\x8c\x01ah\x00s.", f"at most {MAX_DEPTH} levels"),
    "doubling tuples": (b"\x80\x04" + doubled(60) + b".", f"at most {MAX_DEPTH} levels"),
    "wide repetition": (
        b"\x80\x04((" + b"N" * 200 + b"t\x94" + b"h\x00" * 200 + b"t.",
        f"at most {MAX_NODES} values",
    ),
    # numpy.
    "array without state": (
        b"\x80\x04" + name("numpy._core.multiarray", "_reconstruct") + name("numpy", "ndarray")
        + b"K\x00\x85C\x01b\x87R.",
        "a numpy.ndarray has no state",
    ),
    "dtype as data": (pickle.dumps(np.dtype("f4")), "expected data, got numpy.dtype"),
    "dtype with metadata": (pickle.dumps(np.zeros(1, np.dtype("f4", metadata={"a": 1}))), "numpy writes|flags"),
    "datetime": (pickle.dumps(np.zeros(1, "M8[s]")), "numpy.dtype 'M8'"),
    "unicode array": (pickle.dumps(np.array(["a"])), "numpy.dtype 'U1'"),
    "complex": (pickle.dumps(np.zeros(1, complex)), "numpy.dtype 'c16'"),
    "array too short": (pickle.dumps(np.zeros(4), 4).replace(b"K\x04\x85", b"K\x05\x85"), "expected 40 bytes"),
    "negative shape": (
        pickle.dumps(np.zeros(4), 4).replace(b"K\x04\x85", b"J\xfc\xff\xff\xff\x85"),
        "numbers from 0",
    ),
    "matrix": (pickle.dumps(np.asmatrix(np.zeros(2))), "the global numpy"),
    # torch.
    "torch zip file": (
        b"\x80\x04" + name("torch.storage", "_load_from_bytes") + raw_bytes(b"PK\x03\x04" + bytes(64)) + b"\x85R.",
        "expected protocol 2 to 5",
    ),
    "storage as data": (torch_storage(), "expected data, got torch storage"),
    "storage, more announced": (torch_storage(a=(b"K\x06N", b"K\x7fN")), "expected 127 numbers"),
    "storage, more in the file": (
        torch_storage(a=(struct.pack("<q", 6), struct.pack("<q", 1 << 40))),
        "expected 6 numbers in a torch storage .1099511627776 in its file., got 6",
    ),
    "storage of objects": (torch_storage(a=(b"FloatStorage", b"UntypedStorage")), "the global torch.Untyped"),
    "storage, no magic": (torch_storage(a=(b"\x8a\nl", b"\x8a\nm")), "format of pickle.dumps"),
    "tensor past its storage": (rebuilt(0, (7,), (1,)), r"shape \[7\] ends after the end of its storage"),
    "tensor from past its storage": (rebuilt(6, (1,), (1,)), "ends after the end of its storage"),
    "expanded tensor": (rebuilt(0, (1 << 30, 1 << 30), (0, 0)), "ends after the end of its storage"),
    "negative stride": (rebuilt(5, (6,), (-1,)), "torch stride: expected numbers from 0"),
    "tensor without storage": (
        b"\x80\x04" + name("torch._utils", "_rebuild_tensor_v2") + b"(NNNNNNtR.",
        "a torch tensor has no storage",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTACKS)
def test_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    payload, message = ATTACKS[case]
    payload = unframed(payload)
    error, peak = measured(payload, read)
    assert isinstance(error, SafePickleError), error
    assert re.search(message, str(error)), str(error)
    assert list(tmp_path.iterdir()) == []
    assert peak < (4 << 20) + 4 * len(payload)
    assert bounded(payload)


def unframed(payload: bytes) -> bytes:
    """Attacks that were edited keep their frame's old length; frames are not what they are about."""
    if payload[:1] == b"\x80" and payload[2:3] == b"\x95" and payload[3:11] != b"\xff" * 8:
        return payload[:2] + payload[11:]
    return payload


def bounded(payload: bytes) -> bool:
    """Return True if reading the payload takes no more lines of Python than its opcodes and their budget allow."""

    def call() -> None:
        with contextlib.suppress(Exception):
            read(payload)

    return lines_of(call, 2_000_000) > 0


def measured(payload: bytes, reader: Any) -> tuple[Exception | None, int]:
    """Return what reading the payload raised, and the most bytes that it allocated."""
    tracemalloc.start()
    try:
        reader(payload)
        error = None
    except Exception as caught:  # noqa: BLE001 - the kind is what the tests are about
        error = caught
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return error, peak


def test_the_attacks_are_real():
    """Python's own pickle would have run them: one of them, in a place of its own, to be sure of the others."""
    assert pickle.loads(pickle.dumps(Calls(eval, "6 * 7"))) == 42


@pytest.mark.parametrize(
    "payload",
    [
        # A memo index that makes the C unpickler allocate 64 GiB.
        b"\x80\x04Nr\xff\xff\xff\xff.",
        # One megabyte of text, encoded again and again.
        b"\x80\x02" + name("_codecs", "encode") + b"q\x00" + text("a" * (1 << 20)) + text("latin1") + b"\x86q\x01"
        + b"R" + b"".join(b"h\x00h\x01R\x86" for _ in range(4000)) + b".",
    ],
    ids=["memo index", "encoding"],
)  # fmt: skip
def test_memory_stays_near_the_size_of_the_message(payload):
    error, peak = measured(payload, read)
    assert error is None or isinstance(error, SafePickleError)
    assert peak < (4 << 20) + 3 * len(payload)
    assert bounded(payload)


def test_arrays_are_not_copied():
    data = np.zeros(1 << 20, np.uint8)
    many = pickle.dumps([data[:] for _ in range(20)], 4)
    error, peak = measured(many, read)
    assert error is None
    assert peak < 1 << 20  # 20 MiB came, none were copied


def test_the_extension_registry_is_not_consulted():
    copyreg.add_extension("os", "system", 77)
    try:
        with pytest.raises(SafePickleError, match="opcode 0x82"):
            read(pickle.dumps(os.system, 2).replace(b"cposix\nsystem\n", b"\x82\x4d"))
    finally:
        copyreg.remove_extension("os", "system", 77)


def test_nested_storages_share_the_budget_of_opcodes():
    storage = name("torch.storage", "_load_from_bytes") + b"\x94" + raw_bytes(STORAGE) + b"\x85\x94R"
    payload = b"\x80\x04" + storage + b"h\x00h\x01R\x86" * 6000 + b"."
    error, _peak = measured(payload, read)
    assert "at most 20000 opcodes" in str(error)
    assert bounded(payload)


# ------------------------------------------------------------------- fuzzing

SMALL = {**raw_observation(), "top": FRAME[:2, :2], "side": FRAME[:2, :2]}  # most of the bytes are structure
TENSORS = {**SMALL, "joint1.pos": torch.tensor([0.5]), "joint0.pos": np.float32(1)}
CONFIG = RemotePolicyConfig("smolvla", "model", FEATURES, 50)
VALUES = [TENSORS["joint1.pos"], FRAME[:2, :2], np.float32(1), "text", {"key": (1, 2.5, None)}]
GOOD = {
    kind: [unframed(as_lerobot(value, protocol)) for value in values for protocol in PROTOCOLS]
    for kind, values in {
        "values": [VALUES],
        "observation": [timed(observation=SMALL), timed(observation=TENSORS)],
        "instructions": [CONFIG],
    }.items()
}
ALL = [data for each in GOOD.values() for data in each]
BAD = [payload for payload, _message in ATTACKS.values() if len(payload) < 4000]
OPCODES = sorted(ord(info.code) for info in pickletools.opcodes)
SPEC = PolicySpec(
    "smolvla", "model", (CameraSpec("camera1", 48, 64),), VectorSpec(6), VectorSpec(6),
    chunk_size=50, noise_dim=32, solver_steps=10, max_prompt_tokens=48,
)  # fmt: skip
AGREEMENT = Agreement(
    tuple(f"joint{index}.pos" for index in range(6)), (("top", "camera1"),), "task", None, 50, HELPERS
)


def parts(data: bytes) -> list[bytes]:
    """A pickle, cut into its operations."""
    at = [position for _opcode, _argument, position in pickletools.genops(data)]
    return [data[start:end] for start, end in zip(at, [*at[1:], len(data)], strict=True)]


PARTS = {data: parts(data) for data in ALL}
BY_OPCODE: dict[int, list[bytes]] = collections.defaultdict(list)
for _part in sorted({part for each in PARTS.values() for part in each}):
    BY_OPCODE[_part[0]].append(_part)


def rearranged(good: list[bytes], seed: int) -> bytes:
    """A real pickle with operations exchanged for others of the same opcode, moved, repeated or left out."""
    rng = random.Random(seed)
    pieces = list(PARTS[rng.choice(good)])
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(1, len(pieces)), rng.randrange(1, len(pieces))
        match rng.randrange(8):
            case 0:
                del pieces[at]
            case 1:
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 2:
                pieces[at:at] = pieces[other : other + rng.randint(1, 5)]
            case _:
                pieces[at] = rng.choice(BY_OPCODE[pieces[at][0]])
    return b"".join(pieces)


def mutated(good: list[bytes], seed: int) -> bytes:
    """A pickle, often a refused one, with bytes changed, opcodes put in, stretches cut, repeated, or from another.

    From a generator of its own: hypothesis prefers small numbers, and would edit little but the first bytes.
    """
    rng = random.Random(seed)
    data = bytearray(rng.choice(good if rng.random() < 0.75 else BAD))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(10):
            case 0:
                data[at:at] = bytes(rng.choices(OPCODES, k=rng.randint(1, 4)))
            case 1:
                del data[at : at + rng.randint(1, 16)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 64)] * rng.randint(1, 20)
            case 3:
                other = rng.choice(ALL + BAD)
                start = rng.randrange(len(other) + 1)
                data[at:at] = other[start : start + rng.randint(1, 200)]
            case 4:
                data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4)])
            case _:
                data[at : at + 1] = rng.randbytes(1)
    return bytes(data)


ARGUMENTS = st.one_of(
    st.just(b""), st.binary(max_size=9), st.sampled_from([b"h\x00", b"\x94", b"(", b")R", b"b"])
)
PROGRAMS = st.lists(st.tuples(st.sampled_from(OPCODES), ARGUMENTS), max_size=60).map(
    lambda parts: b"\x80\x04" + b"".join(bytes([code]) + argument for code, argument in parts) + b"."
)
BYTES = st.binary(max_size=300)


def hostile(good: list[bytes]) -> st.SearchStrategy[bytes]:
    seeds = st.integers(0, 1 << 64)
    changed, moved = seeds.map(partial(mutated, good)), seeds.map(partial(rearranged, good))
    return st.one_of(
        moved, moved, changed, changed, PROGRAMS, BYTES.map(lambda data: b"\x80\x04" + data), BYTES
    )


FUZZ = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)


def decoded(data: bytes) -> None:
    observation(read_observation(data), AGREEMENT)


def configured(data: bytes) -> None:
    agree(read_policy_config(data), SPEC)


@pytest.mark.parametrize(
    ("kind", "reader", "errors"),
    [
        ("values", read, SafePickleError),
        ("observation", read_observation, SafePickleError),
        ("observation", decoded, SinewError),
        ("instructions", configured, SinewError),
    ],
    ids=["load", "observation", "observation and keys", "instructions and agreement"],
)
def test_fuzz(kind, reader, errors, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    outcomes: collections.Counter = collections.Counter()
    worst = [0]

    @FUZZ
    @given(hostile(GOOD[kind]))
    def run(data: bytes) -> None:
        error, peak = measured(data, reader)
        assert error is None or isinstance(error, errors), f"{type(error).__name__}: {error}"
        assert peak < (8 << 20) + 4 * len(data)
        worst[0] = max(worst[0], peak)
        outcomes["read" if error is None else type(error).__name__] += 1

    run()
    assert list(tmp_path.iterdir()) == []
    assert (
        outcomes["SafePickleError"] > outcomes["read"] > 0
    )  # the edits neither spoil everything nor nothing
    print(
        f"fuzz {request.node.callspec.id}: {sum(outcomes.values())} cases {dict(outcomes)},"
        f" largest {worst[0] / 1024:.0f} KiB"
    )


def test_an_error_is_a_request_error():
    assert issubclass(SafePickleError, RequestError)
    assert SafePickleError.code == "bad_request"
