"""The Protobuf messages of ``sinew.proto``, built when this module is imported.

Generated ``_pb2`` modules are tied to a range of protobuf releases (code from protoc 4 refuses to
load under protobuf 3.20, code from before 3.19 under protobuf 4), and a robot has the protobuf that
its other software needs. The descriptor API is the same from 3.20 to 7, so the few messages are
described below and handed to it. ``tests/serve/test_native_wire.py`` compares this table with ``sinew.proto``.

The descriptors live in a pool of their own: vla.cpp's client registers messages with the same full
names in the default pool, and both must be able to live in one process.
"""

from __future__ import annotations

from typing import Any, Dict

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "vla"

# message -> {"enums": {name: {value: number}}, "fields": (number, name, type)}.
# A type is "[repeated|optional ]<scalar, message or enum name>".
MESSAGES: Dict[str, Dict[str, Any]] = {  # noqa: UP006 - evaluated on Python 3.8
    "Image": {
        "enums": {"Encoding": {"JPEG": 0, "RGB_U8": 1, "F32_RGB_01": 2}},
        "fields": (
            (1, "encoding", "Encoding"),
            (2, "height", "uint32"),
            (3, "width", "uint32"),
            (4, "data", "bytes"),
        ),
    },
    "PredictRequest": {
        "enums": {
            "Kind": {
                "INFER": 0,
                "METADATA": 1,
                "HEALTH": 2,
                "RESET": 3,
                "STREAM": 4,
                "STREAM_END": 5,
                "REPORT": 6,
            }
        },
        "fields": (
            (1, "images", "repeated Image"),
            (2, "lang_tokens", "repeated int32"),
            (3, "state", "repeated float"),
            (4, "noise", "repeated float"),
            (5, "request_id", "uint64"),
            (6, "precomputed_img_emb", "repeated float"),
            (7, "precomputed_img_emb_n_views", "uint32"),
            (8, "attention_mask", "repeated uint32"),
            (70, "advantage", "optional string"),
            (71, "guidance_scale", "optional double"),
            (100, "kind", "Kind"),
            (101, "prompt", "string"),
            (102, "camera_names", "repeated string"),
            (103, "raw_state", "repeated float"),
            (104, "session", "string"),
            (105, "seed", "optional uint64"),
            (106, "solver_steps", "optional uint32"),
            (107, "time", "optional double"),
            (108, "deadline_ms", "optional float"),
            (109, "api_key", "string"),
            (110, "previous", "repeated float"),
            (111, "delay", "optional uint32"),
            (112, "horizon", "optional uint32"),
            (113, "rtc", "string"),
            (114, "schedule", "string"),
            (115, "beta", "optional float"),
            (116, "rate", "optional float"),
            (117, "frame_time", "optional double"),
            (118, "interpolation", "string"),
            (119, "policy", "string"),
            (120, "text_tokens", "uint32"),
            (60, "subtask", "bool"),
            (61, "question", "string"),
            (62, "text_only", "bool"),
            (121, "adapter", "string"),
            (122, "observations", "repeated PredictRequest"),
            (123, "report", "Report"),
        ),
    },
    "Count": {"enums": {}, "fields": ((1, "name", "string"), (2, "count", "uint64"))},
    "Report": {
        "enums": {},
        "fields": (
            (1, "run", "uint64"),
            (2, "name", "string"),
            (3, "state", "string"),
            (4, "reason", "string"),
            (5, "hz", "double"),
            (6, "rate_hz", "double"),
            (7, "rows_hz", "double"),
            (8, "age_p50_ms", "optional double"),
            (9, "age_p95_ms", "optional double"),
            (10, "longest_gap_ms", "double"),
            (11, "steps", "uint64"),
            (12, "late", "uint64"),
            (13, "skipped", "uint64"),
            (14, "held", "repeated Count"),
            (15, "clipped_commands", "uint64"),
            (16, "clipped", "repeated Count"),
            (17, "limits", "repeated string"),
            (18, "failed_requests", "uint64"),
            (19, "takeovers", "uint64"),
            (20, "steps_by_hand", "uint64"),
            (21, "episodes", "optional uint64"),
            (22, "successes", "optional uint64"),
        ),
    },
    "Timing": {
        "enums": {},
        "fields": (
            (1, "preprocess_ms", "float"),
            (2, "vision_ms", "float"),
            (3, "prefix_ms", "float"),
            (4, "step_ms", "repeated float"),
            (5, "postprocess_ms", "float"),
            (6, "total_ms", "float"),
            (7, "queue_ms", "float"),
            (8, "server_ms", "float"),
            (9, "batch", "uint32"),
            (60, "text_ms", "float"),
            (61, "reused_views", "uint32"),
            (62, "reused_prefix", "bool"),
        ),
    },
    "Window": {
        "enums": {},
        "fields": (
            (1, "step", "int64"),
            (2, "sample_time", "double"),
            (3, "frame_time", "double"),
            (4, "prefix_age_ms", "float"),
            (5, "sensor_age_ms", "float"),
            (6, "head_ms", "float"),
            (7, "run", "uint64"),
            (8, "label", "string"),
            (9, "text", "string"),
            (10, "said", "string"),
        ),
    },
    "PredictResponse": {
        "enums": {},
        "fields": (
            (1, "request_id", "uint64"),
            (2, "action_chunk", "repeated float"),
            (3, "chunk_size", "uint32"),
            (4, "action_dim", "uint32"),
            (5, "latency_ms_total", "float"),
            (6, "latency_ms_inference", "float"),
            (7, "error", "string"),
            (8, "latency_ms_prefill", "float"),
            (9, "latency_ms_denoise", "float"),
            (10, "latency_ms_vision", "float"),
            (100, "actions", "repeated float"),
            (101, "horizon", "uint32"),
            (102, "dim", "uint32"),
            (103, "timing", "Timing"),
            (104, "seed", "optional uint64"),
            (105, "session", "string"),
            (106, "time", "optional double"),
            (107, "error_code", "string"),
            (108, "metadata", "string"),
            (109, "warnings", "repeated string"),
            (110, "window", "Window"),
            (60, "text", "string"),
            (111, "context", "bytes"),
            (112, "adapter", "string"),
            (113, "answers", "repeated PredictResponse"),
        ),
    },
}


def file_descriptor():
    """Return ``sinew.proto`` as a ``FileDescriptorProto``."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sinew.proto", package=PACKAGE, syntax="proto3")
    for message_name, described in MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for enum_name, values in described["enums"].items():
            enum = message.enum_type.add(name=enum_name)
            for value_name, number in values.items():
                enum.value.add(name=value_name, number=number)
        for number, name, declared in described["fields"]:
            label, _, type_name = declared.rpartition(" ")
            field = message.field.add(name=name, number=number, json_name=_json_name(name))
            field.label = kinds.LABEL_REPEATED if label == "repeated" else kinds.LABEL_OPTIONAL
            if type_name in described["enums"]:
                field.type = kinds.TYPE_ENUM
                field.type_name = f".{PACKAGE}.{message_name}.{type_name}"
            elif type_name in MESSAGES:
                field.type = kinds.TYPE_MESSAGE
                field.type_name = f".{PACKAGE}.{type_name}"
            else:
                field.type = getattr(kinds, "TYPE_" + type_name.upper())
            if label == "optional":  # presence in proto3 is a one-field oneof
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name="_" + name)
    return file


def _json_name(name):
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _message_class(pool, name):
    descriptor = pool.FindMessageTypeByName(f"{PACKAGE}.{name}")
    if hasattr(message_factory, "GetMessageClass"):  # protobuf >= 4.22; the factory object left in 5
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)


_pool = descriptor_pool.DescriptorPool()
# Serialised, because the C++ implementation of protobuf 3.20 takes a file in no other form.
_pool.AddSerializedFile(file_descriptor().SerializeToString())

Image = _message_class(_pool, "Image")
PredictRequest = _message_class(_pool, "PredictRequest")
Report = _message_class(_pool, "Report")
Timing = _message_class(_pool, "Timing")
PredictResponse = _message_class(_pool, "PredictResponse")
