"""The protobuf messages of ``sinew.proto``, built when this module is imported.

There is no generated ``_pb2`` module, because such a module works only with some releases of protobuf: code from protoc
4 cannot be imported with protobuf 3.20, and code older than 3.19 cannot be imported with protobuf 4. A robot has the
release that its other software needs. The descriptor API is the same from protobuf 3.20 to 7. So this module parses
``sinew.proto`` and passes the messages to that API. The result is the same as with protoc
(``tests/serve/test_native_wire.py``).

The descriptors are in a pool of their own. vla.cpp's client registers messages with the same full names in the default
pool, and both clients must be able to run in one process.
"""

from __future__ import annotations

import pkgutil
import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "vla"


def read_messages(text: str) -> dict[str, dict[str, Any]]:
    """Parse the messages of a ``.proto`` file.

    Args:
        text: The content of the file.

    Returns:
        For each message, {"enums": {name: {value: number}}, "fields": [(number, name, type)]}. A type is the name of a
        scalar, message or enum, after "repeated " or "optional " if the field is so.
    """
    text, messages = re.sub(r" *//.*", "", text), {}
    for message, body in re.findall(r"^message (\w+) {$(.*?)^}$", text, re.MULTILINE | re.DOTALL):
        enums = {
            name: {value: int(number) for value, number in re.findall(r"(\w+) = (\d+);", values)}
            for name, values in re.findall(r"^  enum (\w+) {$(.*?)^  }$", body, re.MULTILINE | re.DOTALL)
        }
        fields = re.findall(r"^  ((?:\w+ )?\w+) (\w+) = (\d+);$", body, re.MULTILINE)
        messages[message] = {
            "enums": enums,
            "fields": [(int(number), name, kind) for kind, name, number in fields],
        }
    return messages


MESSAGES = read_messages((pkgutil.get_data("sinew_client", "sinew.proto") or b"").decode())


def file_descriptor(messages: dict[str, dict[str, Any]] = MESSAGES, package: str = PACKAGE) -> Any:
    """Convert the messages of :func:`read_messages` to a ``FileDescriptorProto`` with the package name ``package``."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sinew.proto", package=package, syntax="proto3")
    for message_name, described in messages.items():
        message = file.message_type.add(name=message_name)
        for enum_name, values in described["enums"].items():
            enum = message.enum_type.add(name=enum_name)
            for value_name, number in values.items():
                enum.value.add(name=value_name, number=number)
        for number, name, declared in described["fields"]:
            label, _, type_name = declared.rpartition(" ")
            field = message.field.add(
                name=name, number=number, json_name=re.sub("_(.)", lambda match: match[1].upper(), name)
            )
            field.label = kinds.LABEL_REPEATED if label == "repeated" else kinds.LABEL_OPTIONAL
            if type_name in described["enums"]:
                field.type = kinds.TYPE_ENUM
                field.type_name = f".{package}.{message_name}.{type_name}"
            elif type_name in messages:
                field.type = kinds.TYPE_MESSAGE
                field.type_name = f".{package}.{type_name}"
            else:
                field.type = getattr(kinds, "TYPE_" + type_name.upper())
            # A descriptor of proto3 describes an optional field as a oneof with a single field.
            if label == "optional":
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name="_" + name)
    return file


def classes(file: Any) -> dict[str, Any]:
    """Create the message classes of a ``FileDescriptorProto`` in a new pool, and return the classes by name."""
    pool = descriptor_pool.DescriptorPool()
    # The C++ implementation of protobuf 3.20 accepts a file descriptor only as serialised bytes.
    pool.AddSerializedFile(file.SerializeToString())
    # Protobuf 4.22 and later have GetMessageClass. Older releases have only MessageFactory.GetPrototype, which
    # protobuf 5 removed.
    factory = getattr(message_factory, "GetMessageClass", None)
    factory = factory or message_factory.MessageFactory(pool).GetPrototype
    names = (each.name for each in file.message_type)
    return {name: factory(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in names}


_classes = classes(file_descriptor())
Image, PredictRequest, Report, Timing, PredictResponse = (
    _classes[name] for name in ("Image", "PredictRequest", "Report", "Timing", "PredictResponse")
)
