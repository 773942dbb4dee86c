"""Write records of `sinew serve --record` as one MCAP file, which Foxglove and PlotJuggler open.

Messages are JSON with JSON schemas, so that any viewer can read them. The time of a message is the time of the
server's clock when the answer was recorded. The observation's own time (``time``) is in ``/request``, because each
robot may have its own clock.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinew.core import SinewError, VectorSpec
from sinew.core.extras import MissingPackageError
from sinew.core.scratch import FULL
from sinew.records.recorder import Record

MAX_TOPICS = 1000  # a recording has one topic per camera and three more; the MCAP format allows 65,535
NUMBER, TEXT = {"type": "number"}, {"type": "string"}
VECTOR = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": TEXT}, "values": {"type": "array", "items": NUMBER}},
}
# A viewer shows a picture if its schema has the name and the fields of Foxglove's own schema.
IMAGE = {
    "type": "object",
    "properties": {
        "timestamp": {"type": "object", "properties": {"sec": NUMBER, "nsec": NUMBER}},
        "frame_id": TEXT,
        "data": {"type": "string", "contentEncoding": "base64"},
        "format": TEXT,
    },
}
REQUEST = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("prompt", "wire", "session", "adapter", "error", "text"), TEXT),
        **dict.fromkeys(("seed", "time", "total_ms"), NUMBER),
    },
}


def write_mcap(
    records: Iterable[Record],
    out: Path,
    *,
    hz: float | None = None,
    state: VectorSpec | None = None,
    action: VectorSpec | None = None,
) -> dict[str, int]:
    """Write records to an MCAP file.

    The topics are ``/camera/NAME`` (pictures as PNG), ``/state`` and ``/action`` (vectors with joint names), and
    ``/request`` (instruction, session, adapter, seed, milliseconds, error). Numbers that are not finite are omitted,
    because JSON cannot represent them.

    Args:
        records: The records.
        out: The new file.
        hz: Control rate. Every action of a chunk is then a message at the time of its execution. None writes only the
            first action of each chunk.
        state: Names of the state's joints, from the policy's bundle.
        action: Names of the action's joints, from the policy's bundle.

    Returns:
        Topic -> number of messages.

    Raises:
        MissingPackageError: mcap is not installed.
        SinewError: The file exists already, or the records have too many cameras.
    """
    try:
        from mcap.writer import Writer
    except ImportError:
        raise MissingPackageError("MCAP", "mcap") from None
    counts: dict[str, int] = {}
    try:
        file = out.open("xb")
    except OSError as error:
        raise SinewError(f"{out}: {error.strerror}; choose a new file") from None
    try:
        with file:
            writer = Writer(file)
            writer.start(profile="", library="sinew")
            channels: dict[str, int] = {}

            def put(
                topic: str, schema: str, shape: Mapping[str, Any], when: int, message: Mapping[str, Any]
            ) -> None:
                if topic not in channels:
                    if len(channels) >= MAX_TOPICS:
                        raise SinewError(
                            f"records: expected at most {MAX_TOPICS} topics, got more at {topic}; export fewer records"
                        )
                    number = writer.register_schema(schema, "jsonschema", json.dumps(shape).encode())
                    channels[topic] = writer.register_channel(topic, "json", number)
                data = json.dumps(message, allow_nan=False).encode()
                writer.add_message(channels[topic], when, data, when, counts.get(topic, 0))
                counts[topic] = counts.get(topic, 0) + 1

            for record in records:
                _write(record, put, hz, state, action)
            writer.finish()
    except BaseException as error:
        out.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL:
            raise SinewError(f"{out}: {error.strerror}") from None
        raise
    return counts


def _write(
    record: Record, put: Any, hz: float | None, state: VectorSpec | None, action: VectorSpec | None
) -> None:
    when = round(float(record.meta["recorded"]) * 1e9)
    seen = record.observation
    for camera, frame in seen.images.items():
        put(
            f"/camera/{camera}",
            "foxglove.CompressedImage",
            IMAGE,
            when,
            _picture(camera, np.asarray(frame), when),
        )
    put("/state", "sinew.Vector", VECTOR, when, _vector(np.asarray(seen.state), state))
    if record.actions is not None:
        rows = record.actions if hz else record.actions[:1]
        for index, row in enumerate(rows):
            at = when + round(index * 1e9 / hz) if hz else when
            put("/action", "sinew.Vector", VECTOR, at, _vector(row, action))
    request = {
        "prompt": str(seen.prompt),
        "wire": record.wire,
        "session": seen.session,
        "adapter": seen.adapter or None,
        "error": record.error,
        "text": record.text or None,
        "seed": seen.seed,
        "time": seen.time,
        "total_ms": record.meta.get("total_ms"),
    }
    put(
        "/request",
        "sinew.Request",
        REQUEST,
        when,
        {
            name: value
            for name, value in request.items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        },
    )


def _picture(camera: str, frame: np.ndarray, when: int) -> dict[str, Any]:
    from PIL import Image

    if frame.dtype != np.uint8:
        frame = np.nan_to_num(frame * 255.0).round().clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(file, "PNG", compress_level=1)
    return {
        "timestamp": {"sec": when // 10**9, "nsec": when % 10**9},
        "frame_id": camera,
        "data": base64.b64encode(file.getvalue()).decode(),
        "format": "png",
    }


def _vector(values: np.ndarray, spec: VectorSpec | None) -> dict[str, Any]:
    """Return a vector for a JSON message, with the names of its joints. Numbers that are not finite become None,
    because JSON cannot represent them.
    """
    flat = [float(value) if np.isfinite(value) else None for value in values.reshape(-1)]
    names = (
        list(spec.names)
        if spec is not None and len(spec.names) == len(flat)
        else [str(i) for i in range(len(flat))]
    )
    return {"names": names, "values": flat}
