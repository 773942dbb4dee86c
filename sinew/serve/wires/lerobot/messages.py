"""The Protobuf messages of LeRobot's ``transport/services.proto``, made when they are first wanted.

No generated code, which would tie the server to a range of protobuf releases, and a pool of our own: LeRobot
registers the same names in the default one, and both must be able to live in one process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sinew.core import RequestError

SERVICE = "transport.AsyncInference"
BEGIN, MIDDLE, END = 1, 2, 3
_PACKAGE = "transport"
_STATES = {"TRANSFER_UNKNOWN": 0, "TRANSFER_BEGIN": BEGIN, "TRANSFER_MIDDLE": MIDDLE, "TRANSFER_END": END}
_MESSAGES: dict[str, tuple[tuple[str, str], ...]] = {  # fields, numbered from 1
    "Observation": (("transfer_state", "TransferState"), ("data", "bytes")),
    "Actions": (("data", "bytes"),),
    "PolicySetup": (("data", "bytes"),),
    "Empty": (),
}


@cache
def messages() -> dict[str, Any]:
    """Message classes by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="services.proto", package=_PACKAGE, syntax="proto3")
    states = file.enum_type.add(name="TransferState")
    for name, number in _STATES.items():
        states.value.add(name=name, number=number)
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for number, (name, kind) in enumerate(fields, 1):
            field = message.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL)
            if kind == "bytes":
                field.type = kinds.TYPE_BYTES
            else:
                field.type, field.type_name = kinds.TYPE_ENUM, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def parse(name: str, data: bytes) -> Any:
    """The message ``name`` in ``data``. Raises RequestError."""
    from google.protobuf.message import DecodeError

    try:
        return messages()[name].FromString(data)
    except DecodeError as error:
        raise RequestError(f"request: expected a transport.{name}, got {len(data)} other bytes") from error


def actions_message(data: bytes) -> bytes:
    """The reply to GetActions."""
    message: bytes = messages()["Actions"](data=data).SerializeToString()
    return message
