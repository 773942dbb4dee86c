"""The messages of LeRobot's asynchronous inference: the content of its pickles, and the reply as a pickle.

This module does not need LeRobot. The client's dataclasses are read into the dataclasses below, and the reply is
written so that ``pickle.loads`` in the client makes the client's own ``TimedAction`` with torch tensors.

Source: ``lerobot/async_inference/helpers.py`` of LeRobot 0.4.4, the same at 0.6.1; before 0.4 the module was
``lerobot/scripts/server/helpers.py``.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
from sinew_client.untrusted import named

from sinew.core.rate_limited_log import LogOnce
from sinew.serve.wires.lerobot.pickle.arrays import ARRAY_NAMES
from sinew.serve.wires.lerobot.pickle.machine import BuiltObject, Machine, PickledName, SafePickleError, load

logger = logging.getLogger(__name__)
_once = LogOnce(logger)

HELPERS = "lerobot.async_inference.helpers"
OLD_HELPERS = "lerobot.scripts.server.helpers"  # module of LeRobot's classes before version 0.4
T = TypeVar("T")
_FEATURE_TYPES = ("STATE", "VISUAL", "ENV", "ACTION", "REWARD", "LANGUAGE")


@dataclass(frozen=True, slots=True)
class RemotePolicyConfig:
    """The policy that the client requests.

    Attributes:
        policy_type: Name of the policy's class in LeRobot, such as "act".
        pretrained_name_or_path: The checkpoint that the client names.
        lerobot_features: The robot's features: name -> description.
        actions_per_chunk: Number of actions that the client wants of each chunk.
        device: The device that the client names.
        rename_map: Name of a feature on the robot -> name in the policy.
        helpers: The module of the client's classes.
    """

    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict[str, Any]
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: dict[str, Any] = field(default_factory=dict)
    helpers: str = HELPERS


@dataclass(frozen=True, slots=True)
class TimedObservation:
    """A robot's raw observation.

    Attributes:
        timestamp: Time on the client's clock, seconds.
        timestep: Step of the client's control loop.
        observation: Raw key -> value.
        must_go: True if the client requires a chunk for this observation.
    """

    timestamp: float
    timestep: int
    observation: dict[str, Any]
    must_go: bool = False


@dataclass(frozen=True, slots=True)
class PolicyFeature:
    """A feature of the robot. LeRobot may send this class in place of a dictionary.

    Attributes:
        type: Kind of the feature, such as "STATE".
        shape: Shape of the feature's array.
    """

    type: str
    shape: tuple[int, ...]


class _Instance(BuiltObject):
    """An object of a class of this module, made from the ``__dict__`` of the client's object."""

    def __init__(self, kind: type, **known: Any):
        self._kind = kind
        self._known = known
        self._state: dict[Any, Any] = {}

    def build(self, state: Any) -> None:
        if type(state) is not dict:
            raise SafePickleError(f"pickle: expected a dictionary with the fields of {self._kind.__name__}")
        self._state = state

    def finish(self, plain: Callable[[Any], Any]) -> Any:
        """Return the instance. Unknown fields are ignored and logged once, because later versions may add fields.

        The protocol cannot reject a field without rejecting the client.
        """
        values = dict(self._known)
        for each in fields(self._kind):
            if each.name in self._known:
                continue
            name = f"{self._kind.__name__}.{each.name}"
            if each.name in self._state:
                values[each.name] = _checked(name, str(each.type), plain(self._state[each.name]))
            elif each.default is MISSING and each.default_factory is MISSING:
                raise SafePickleError(f"{name}: expected a value, got nothing")
        for name in self._state:
            if name not in values:
                _once.warning(f"lerobot: {self._kind.__name__}.{named(name, 60)} is not read")
        return self._kind(**values)


def _checked(name: str, wanted: str, value: Any) -> Any:
    """Return ``value`` if it has the required type.

    Args:
        name: Name of the field, for errors.
        wanted: The annotation of the field.
        value: The value.

    Raises:
        SafePickleError: The value has another type.
    """
    if wanted == "float" and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if wanted == "int" and type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    kinds = {"str": str, "bool": bool, "dict[str, Any]": dict, "tuple[int, ...]": tuple}
    if wanted in kinds and type(value) is kinds[wanted]:
        return value
    got = f"{value}" if type(value) in (int, float) else type(value).__name__
    raise SafePickleError(f"{name}: expected {wanted.partition('[')[0]}, got {got}")


def _feature_type(_machine: Machine, name: Any) -> str:
    if type(name) is not str or name not in _FEATURE_TYPES:
        raise SafePickleError(f"pickle: expected a FeatureType, one of {', '.join(_FEATURE_TYPES)}")
    return name


_NAMES = {
    **ARRAY_NAMES,
    ("lerobot.configs.types", "PolicyFeature"): PickledName(
        "PolicyFeature", new=partial(_Instance, PolicyFeature)
    ),
    ("lerobot.configs.types", "FeatureType"): PickledName("FeatureType", _feature_type),
}
for _helpers in (HELPERS, OLD_HELPERS):
    _NAMES[_helpers, "TimedObservation"] = PickledName(
        "TimedObservation", new=partial(_Instance, TimedObservation)
    )
    _NAMES[_helpers, "RemotePolicyConfig"] = PickledName(
        "RemotePolicyConfig", new=partial(_Instance, RemotePolicyConfig, helpers=_helpers)
    )


def read_policy_config(data: bytes) -> RemotePolicyConfig:
    """Return the configuration that a client sends with SendPolicyInstructions, a pickle.

    Raises:
        SafePickleError: The pickle is not valid or not allowed.
    """
    return _read(data, RemotePolicyConfig)


def read_observation(data: bytes) -> TimedObservation:
    """Return the observation that a client sends with SendObservations, a pickle. Its arrays and bytes are views of
    ``data``.

    Raises:
        SafePickleError: The pickle is not valid or not allowed.
    """
    return _read(data, TimedObservation)


def _read(data: bytes, kind: type[T]) -> T:
    value = load(data, _NAMES)
    if not isinstance(value, kind):
        raise SafePickleError(f"pickle: expected a {kind.__name__}, got {type(value).__name__}")
    return value


def write_actions(
    actions: np.ndarray, timestamp: float, timestep: int, interval_s: float, helpers: str = HELPERS
) -> bytes:
    """Return the reply to GetActions: a ``list[TimedAction]``, one per action, in pickle protocol 3.

    The actions become tensors that share one storage, as in LeRobot's own server. Action ``i`` is for ``timestep
    + i`` at ``timestamp + i * interval_s``.

    Args:
        actions: The chunk, float32 [H, D].
        timestamp: Time of the observation, seconds.
        timestep: Step of the observation.
        interval_s: Seconds between two actions.
        helpers: Module of the client's classes.
    """
    rows, width = actions.shape
    out = bytearray(b"\x80\x03")
    out += _global(helpers, "TimedAction") + b"q\x00"
    out += _global("torch._utils", "_rebuild_tensor_v2") + b"q\x01"
    out += _global("collections", "OrderedDict") + b"q\x02"
    out += _global("torch.storage", "_load_from_bytes") + _bytes(_storage(actions)) + b"\x85Rq\x03"
    shape = b"(" + _integer(width) + b"tq\x04"
    # Remove the five objects from the pickle's stack. They stay in its memo, so that later opcodes can use them.
    out += shape + b"0" * 5
    out += b"]("
    for row in range(rows):
        tensor = (
            b"h\x01(h\x03" + _integer(row * width) + b"h\x04" + b"K\x01\x85" + b"\x89" + b"h\x02)R" + b"tR"
        )
        out += b"h\x00)\x81}("
        out += _text("timestamp") + b"G" + struct.pack(">d", timestamp + row * interval_s)
        out += _text("timestep") + _integer(timestep + row)
        out += _text("action") + tensor
        out += b"ub"
    return bytes(out + b"e.")


# The bytes that torch writes before a storage: a magic number, the protocol, and the kind of machine.
_PREAMBLE = (
    b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
    b"\x80\x02M\xe9\x03."
    b"\x80\x02}q\x00(X\x10\x00\x00\x00protocol_versionq\x01M\xe9\x03X\r\x00\x00\x00little_endianq\x02\x88"
    b"X\n\x00\x00\x00type_sizesq\x03}q\x04(X\x05\x00\x00\x00shortq\x05K\x02X\x03\x00\x00\x00intq\x06K\x04"
    b"X\x04\x00\x00\x00longq\x07K\x04uu."
)


def _storage(numbers: np.ndarray) -> bytes:
    """Return a torch FloatStorage as a file in the format of ``torch.serialization._legacy_save``.

    The bytes are written here, so that this protocol needs no torch. A test compares them with the bytes that
    torch writes.
    """
    flat = np.ascontiguousarray(numbers, "<f4").reshape(-1)
    key = _text("0") + b"q"  # name of the storage in the file; torch uses a memory address as the name
    described = (
        b"\x80\x02(" + _text("storage") + b"q\x00" + _global("torch", "FloatStorage") + b"q\x01"
        + key + b"\x02" + _text("cpu") + b"q\x03" + _short(flat.size) + b"Ntq\x04Q."
    )  # fmt: skip
    keys = b"\x80\x02]q\x00" + key + b"\x01a."
    return _PREAMBLE + described + keys + struct.pack("<q", flat.size) + flat.tobytes()


def _short(value: int) -> bytes:
    """Return the pickle opcode of an integer, in the shortest of its forms, as Python's pickle writes it."""
    if value < 1 << 8:
        return b"K" + bytes([value])
    return b"M" + struct.pack("<H", value) if value < 1 << 16 else _integer(value)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode("ascii")


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def _bytes(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data
