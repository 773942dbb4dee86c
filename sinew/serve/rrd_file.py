"""Records of `sinew serve --record` as one .rrd file, which Rerun's viewer opens with a timeline to move along."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sinew.core import MissingPackageError, SinewError, VectorSpec
from sinew.serve.recorder import Record

JPEG_QUALITY = 85  # of pictures; Rerun stores raw pixels otherwise, megabytes each


def write_rrd(
    records: Iterable[Record],
    out: Path,
    *,
    hz: float | None = None,
    state: VectorSpec | None = None,
    action: VectorSpec | None = None,
) -> dict[str, int]:
    """Write records to a Rerun recording and return how many entries each entity has.

    ``camera/NAME`` are pictures, ``state/JOINT`` and ``action/JOINT`` numbers over time, ``latency_ms``, ``prompt`` and
    ``error`` texts. Timelines: ``wall``, seconds of the server's clock, and ``answer``, the number of the record. With
    ``hz`` every row of a chunk stands where it would be executed, else the first row alone. state, action: names of
    joints. Raises :class:`MissingPackageError` without rerun-sdk, :class:`SinewError` for a file that is there already.
    """
    try:
        import rerun
    except ImportError:
        raise MissingPackageError("a Rerun recording", "rerun") from None
    if out.exists():
        raise SinewError(f"{out}: is there already")
    stream: Any = rerun.RecordingStream("sinew")
    stream.save(out)
    counts: dict[str, int] = {}

    def log(entity: str, what: Any) -> None:
        stream.log(entity, what)
        counts[entity] = counts.get(entity, 0) + 1

    try:
        for number, record in enumerate(records):
            when, seen = float(record.meta["recorded"]), record.observation
            stream.set_time("answer", sequence=number)
            stream.set_time("wall", timestamp=when)
            for camera, frame in seen.images.items():
                log(f"camera/{camera}", rerun.Image(_pixels(np.asarray(frame))).compress(JPEG_QUALITY))
            values = np.asarray(seen.state, np.float64).reshape(-1)
            for name, value in zip(_names(state, len(values)), values, strict=True):
                log(f"state/{name}", rerun.Scalars(float(value)))
            log("prompt", rerun.TextLog(str(seen.prompt)))
            if record.error:
                log("error", rerun.TextLog(record.error, level="ERROR"))
            if (total := record.meta.get("total_ms")) is not None:
                log("latency_ms", rerun.Scalars(float(total)))
            if record.actions is not None:
                rows = record.actions if hz else record.actions[:1]
                times = when + np.arange(len(rows)) / (hz or 1.0)
                for name, column in zip(_names(action, rows.shape[1]), rows.T, strict=True):
                    rerun.send_columns(
                        f"action/{name}",
                        indexes=[rerun.TimeColumn("wall", timestamp=times)],
                        columns=rerun.Scalars.columns(scalars=column.astype(np.float64)),
                        recording=stream,
                    )
                    counts[f"action/{name}"] = counts.get(f"action/{name}", 0) + len(rows)
    except BaseException:
        stream.disconnect()
        out.unlink(missing_ok=True)
        raise
    stream.disconnect()
    return counts


def _pixels(frame: np.ndarray) -> np.ndarray:
    """Return uint8 [h, w, 3]; floats are in [0, 1]."""
    return frame if frame.dtype == np.uint8 else (frame * 255).round().clip(0, 255).astype(np.uint8)


def _names(spec: VectorSpec | None, size: int) -> list[str]:
    return list(spec.names) if spec is not None and len(spec.names) == size else [str(i) for i in range(size)]
