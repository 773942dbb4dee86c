"""The Protobuf messages of ``sinew.proto``, built when this module is imported.

Generated ``_pb2`` modules are tied to a range of protobuf releases (code from protoc 4 refuses to
load under protobuf 3.20, code from before 3.19 under protobuf 4), and a robot has the protobuf that
its other software needs. The descriptor API is the same from 3.20 to 7, so the few messages are read
from the file, whose form this module knows, and handed to it: as protoc does
(``tests/serve/test_native_wire.py``).

The descriptors live in a pool of their own: vla.cpp's client registers messages with the same full
names in the default pool, and both must be able to live in one process.
"""

from __future__ import annotations

import pkgutil
import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "vla"


def read_messages(text: str) -> dict[str, dict[str, Any]]:
    """Return message -> {"enums": {name: {value: number}}, "fields": [(number, name, type)]} of a ``.proto`` file.

    A type is "[repeated|optional ]<scalar, message or enum name>".
    """
    text, found = re.sub(r" *//.*", "", text), {}
    for message, body in re.findall(r"^message (\w+) {$(.*?)^}$", text, re.MULTILINE | re.DOTALL):
        enums = {
            name: {value: int(number) for value, number in re.findall(r"(\w+) = (\d+);", values)}
            for name, values in re.findall(r"^  enum (\w+) {$(.*?)^  }$", body, re.MULTILINE | re.DOTALL)
        }
        fields = re.findall(r"^  ((?:\w+ )?\w+) (\w+) = (\d+);$", body, re.MULTILINE)
        found[message] = {
            "enums": enums,
            "fields": [(int(number), name, kind) for kind, name, number in fields],
        }
    return found


MESSAGES = read_messages((pkgutil.get_data("sinew_client", "sinew.proto") or b"").decode())


def file_descriptor(messages: dict[str, dict[str, Any]] = MESSAGES, package: str = PACKAGE) -> Any:
    """Return messages that were read as a ``FileDescriptorProto``."""
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
                name=name, number=number, json_name=re.sub("_(.)", lambda found: found[1].upper(), name)
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
            if label == "optional":  # presence in proto3 is a one-field oneof
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name="_" + name)
    return file


def classes(file: Any) -> dict[str, Any]:
    """Return the message classes of a ``FileDescriptorProto`` by name, in a pool of their own."""
    pool = descriptor_pool.DescriptorPool()
    # Serialised, because the C++ implementation of protobuf 3.20 takes a file in no other form.
    pool.AddSerializedFile(file.SerializeToString())
    made = getattr(message_factory, "GetMessageClass", None)  # protobuf >= 4.22; the factory object left in 5
    made = made or message_factory.MessageFactory(pool).GetPrototype
    names = (each.name for each in file.message_type)
    return {name: made(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in names}


_classes = classes(file_descriptor())
Image, PredictRequest, Report, Timing, PredictResponse = (
    _classes[name] for name in ("Image", "PredictRequest", "Report", "Timing", "PredictResponse")
)
