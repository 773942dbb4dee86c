"""Write data sets in LeRobot's layout, version 3.0, which LeRobot 0.4 and 0.5 can read and train with.

All episodes are rows of ``data/chunk-000/file-000.parquet`` and further files. Images are stored in them as lossless
PNG. LeRobot's own recordings contain videos, and its reader supports both. ``meta/`` describes the data. Layout:
lerobot 0.4.4, ``datasets/lerobot_dataset.py`` and ``datasets/utils.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sinew.core import SinewError, progress, scratch
from sinew.core.extras import MissingPackageError

from sinew_eval.dataset.statistics import Statistics

VERSION = "v3.0"
FILE_BYTES = 100 << 20  # a new parquet file begins when a file reaches this size in bytes, as in LeRobot
FILES_PER_CHUNK = 1000
MAX_FPS = 10_000
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
INTERVENTION = "intervention"
INDICES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


@dataclass(frozen=True)
class DatasetFrame:
    """One control step. If the first frame has an optional value, all frames must have it.

    Attributes:
        images: The frame of each camera, by the camera's name, uint8 [height, width, 3].
        state: State of the robot, [S].
        action: Action, [A].
        task: Instruction.
        human: True if a person drove (LeRobot's ``intervention``). None if it is unknown.
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    task: str
    human: bool | None = None


class DatasetWriter:
    """Writes a data set, one episode after another. The folder ``out`` appears when :meth:`close` has finished.

    Args:
        out: New folder.
        fps: Control steps per second, a whole number.
        state: Names of the values in the state.
        action: Names of the values in an action.
        robot: Type of the robot.

    Raises:
        MissingPackageError: pyarrow is missing.
        SinewError: An argument is invalid, or the folder exists.
    """

    def __init__(
        self,
        out: Path,
        fps: float,
        *,
        state: Sequence[str] = (),
        action: Sequence[str] = (),
        robot: str = "unknown",
    ):
        try:
            import pyarrow.parquet
        except ImportError:
            raise MissingPackageError("a LeRobot data set", "pyarrow") from None
        if not float(fps).is_integer() or not 1 <= fps <= MAX_FPS:
            raise SinewError(
                f"fps: expected a whole number of frames per second from 1 to {MAX_FPS}, which LeRobot requires, got"
                f" {fps:g}"
            )
        self._refuse_existing(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        self._beside = contextlib.ExitStack()
        self._folder = self._beside.enter_context(scratch.beside(out))
        self.out, self.fps, self._robot = out, int(fps), robot
        self._names = {STATE: list(state), ACTION: list(action)}
        self._arrow, self._parquet = pyarrow, pyarrow.parquet
        self._features: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._statistics = Statistics()
        self._frames = self._file = 0
        self._closed = False
        self._writer: Any = None

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        """Close the writer. After an error, the complete episodes become a valid data set."""
        if kind is None or self._closed:
            return
        if self._episodes:
            self.close()
            progress.say(f"{self.out}: contains the {len(self._episodes)} complete episodes")
        else:
            self._end()

    def add(self, frames: Sequence[DatasetFrame], success: bool | None = None) -> None:
        """Append an episode.

        Args:
            frames: Control steps of the episode.
            success: Outcome. None if it is unknown. If the first episode has an outcome, all episodes must have one.
        """
        if not frames:
            return
        if not self._features:
            self._features = self._describe(frames[0], success is not None)
        for frame in frames:
            _refuse_odd_text(frame.task)
        number, count = len(self._episodes), len(frames)
        columns: dict[str, Any] = {
            "timestamp": np.arange(count, dtype=np.float32) / self.fps,
            "frame_index": np.arange(count),
            "episode_index": np.full(count, number),
            "index": np.arange(self._frames, self._frames + count),
            "task_index": np.array([self._tasks.setdefault(each.task, len(self._tasks)) for each in frames]),
            "next.done": np.arange(count) == count - 1,
        }
        if "next.success" in self._features:
            columns["next.success"] = columns["next.done"] & bool(success)
        if INTERVENTION in self._features:
            columns[INTERVENTION] = np.array([bool(each.human) for each in frames])
        elif any(each.human is not None for each in frames):
            raise SinewError(
                f"{INTERVENTION}: expected no value, because the first frame has none; set `human` in all frames or in"
                " none"
            )
        for key in (STATE, ACTION):
            name = "state" if key == STATE else "action"
            columns[key] = np.stack([self._vector(key, getattr(frame, name)) for frame in frames])
        pictures = {camera: [self._picture(camera, each) for each in frames] for camera in self._cameras}
        statistics = Statistics()
        for key, values in columns.items():
            statistics.vectors(key, values.reshape(count, -1))
        for camera, seen in pictures.items():
            for picture in seen:
                statistics.picture(IMAGES + camera, picture)
        self._write(columns, pictures, number)
        self._statistics.merge(statistics)
        self._episodes.append(
            {
                "episode_index": number,
                "tasks": sorted({frame.task for frame in frames}, key=self._tasks.__getitem__),
                "length": count,
                "data/chunk_index": self._file // FILES_PER_CHUNK,
                "data/file_index": self._file % FILES_PER_CHUNK,
                "dataset_from_index": self._frames,
                "dataset_to_index": self._frames + count,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
                **{
                    f"stats/{key}/{name}": value
                    for key, found in statistics.table().items()
                    for name, value in found.items()
                },
            }
        )
        self._frames += count
        if self._path.stat().st_size >= FILE_BYTES:
            self._end_file()

    def close(self) -> dict[str, int]:
        """Write the description of the data, and rename the folder to its final name. Returns the number of episodes,
        frames and tasks.
        """
        self._closed = True
        try:
            self._end_file()
            if not self._episodes:
                raise SinewError(
                    f"{self.out}: no data set was written, because no episode was complete; record a whole episode"
                )
            self._describe_all()
            self._refuse_existing(self.out)
            self._folder.chmod(0o777 & ~_umask())
            self._folder.rename(self.out)
        finally:
            self._end()
        return {"episodes": len(self._episodes), "frames": self._frames, "tasks": len(self._tasks)}

    def _describe_all(self) -> None:
        """Write the folder ``meta`` of the data set."""
        arrow = self._arrow
        path = self._folder / EPISODES
        path.parent.mkdir(parents=True)
        self._parquet.write_table(arrow.Table.from_pylist(self._episodes), path)
        # LeRobot finds a task by the index of a pandas table, so store the names of the tasks as that index.
        tasks = arrow.table(
            {"task_index": list(self._tasks.values()), "__index_level_0__": list(self._tasks)}
        )
        columns = [
            {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": stored, "metadata": None}
            for name, field, kind, stored in (
                ("task_index", "task_index", "int64", "int64"),
                (None, "__index_level_0__", "unicode", "object"),
            )
        ]
        index = {"index_columns": ["__index_level_0__"], "column_indexes": [], "pandas_version": "2.0"}
        about = {**index, "columns": columns}
        tasks = tasks.replace_schema_metadata({"pandas": json.dumps(about)})
        self._parquet.write_table(tasks, self._folder / "meta" / "tasks.parquet")
        info = {
            "codebase_version": VERSION,
            "robot_type": self._robot,
            "total_episodes": len(self._episodes),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": FILE_BYTES >> 20,
            "video_files_size_in_mb": 200,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA,
            "video_path": None,
            "features": self._features,
        }
        meta = self._folder / "meta"
        (meta / "info.json").write_text(json.dumps(info, indent=4))
        (meta / "stats.json").write_text(json.dumps(self._statistics.table(), indent=4))

    def _end(self) -> None:
        """Close open files, and remove the temporary folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._beside.close()

    @staticmethod
    def _refuse_existing(out: Path) -> None:
        if os.path.lexists(out):
            raise SinewError(f"{out}: the folder already exists; choose a new one")

    @property
    def _cameras(self) -> list[str]:
        return [key.removeprefix(IMAGES) for key in self._features if key.startswith(IMAGES)]

    @property
    def _path(self) -> Path:
        chunk, file = divmod(self._file, FILES_PER_CHUNK)
        return self._folder / DATA.format(chunk_index=chunk, file_index=file)

    def _describe(self, frame: DatasetFrame, judged: bool) -> dict[str, dict[str, Any]]:
        """Return LeRobot's ``features`` (the description of the columns), derived from the first frame of the data set.

        Args:
            frame: The first frame.
            judged: True if the episodes have an outcome (success or failure).
        """
        features: dict[str, dict[str, Any]] = {}
        for camera, picture in frame.images.items():
            if not camera.isprintable() or not camera.strip(". ") or "/" in camera or "\\" in camera:
                raise SinewError(
                    f"images: expected printable camera names without slashes, got {camera[:80]!r}"
                )
            shape = np.shape(picture)
            if np.asarray(picture).dtype != np.uint8 or len(shape) != 3 or shape[2] != 3 or not all(shape):
                raise SinewError(
                    f"images.{camera}: expected uint8 [height, width, 3], got {np.asarray(picture).dtype} {list(shape)}"
                )
            names = ["height", "width", "channels"]
            features[IMAGES + camera] = {"dtype": "image", "shape": list(np.shape(picture)), "names": names}
        for key, values in ((STATE, frame.state), (ACTION, frame.action)):
            size = int(np.size(values))
            if not size:
                raise SinewError(f"{key}: expected one number or more, got none")
            names = self._names[key] if len(self._names[key]) == size else [f"{key}.{i}" for i in range(size)]
            features[key] = {"dtype": "float32", "shape": [size], "names": names}
        marked = () if frame.human is None else (INTERVENTION,)
        for name in (*marked, *("next.done", "next.success")[: 2 if judged else 1]):
            features[name] = {"dtype": "bool", "shape": [1], "names": None}
        return {**features, **{k: {"dtype": v, "shape": [1], "names": None} for k, v in INDICES.items()}}

    def _vector(self, key: str, values: Any) -> np.ndarray:
        if np.asarray(values).dtype.kind not in "fiub":
            raise SinewError(f"{key}: expected numbers, got {np.asarray(values).dtype}")
        # Do not warn about an overflow, because infinite values are rejected below.
        with np.errstate(over="ignore"):
            vector = np.asarray(values, np.float32).reshape(-1)
        if list(vector.shape) != self._features[key]["shape"] or not np.all(np.isfinite(vector)):
            size = self._features[key]["shape"][0]
            raise SinewError(f"{key}: expected {size} finite numbers as in the first frame, got {vector}")
        return vector

    def _picture(self, camera: str, frame: DatasetFrame) -> np.ndarray:
        pixels = np.asarray(frame.images.get(camera, ()))
        shape = self._features[IMAGES + camera]["shape"]
        if pixels.dtype != np.uint8 or list(pixels.shape) != shape or len(frame.images) != len(self._cameras):
            raise SinewError(
                f"images.{camera}: expected uint8 {shape} as in the first frame, got {pixels.dtype}"
                f" {list(pixels.shape)} with the cameras {', '.join(frame.images)}"
            )
        return pixels

    def _write(self, columns: Mapping[str, np.ndarray], pictures: Mapping[str, list], number: int) -> None:
        arrow = self._arrow
        table = {}
        for camera, seen in pictures.items():
            cells = [
                {"bytes": _png(picture), "path": f"episode-{number:06d}-frame-{index:06d}.png"}
                for index, picture in enumerate(seen)
            ]
            kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
            table[IMAGES + camera] = arrow.array(cells, kind)
        for key, values in columns.items():
            if values.ndim == 2:
                flat = arrow.array(np.ascontiguousarray(values).reshape(-1))
                table[key] = arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
            else:
                table[key] = arrow.array(values)
        rows = arrow.table({key: table[key] for key in self._features})
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = self._parquet.ParquetWriter(self._path, rows.schema)
        self._writer.write_table(rows)

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._file = None, self._file + 1


def _refuse_odd_text(task: str) -> None:
    try:
        task.encode()
    except UnicodeEncodeError:
        raise SinewError(f"task: expected a valid Unicode text, got {task[:80]!r}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(file, "PNG", compress_level=1)
    return file.getvalue()
