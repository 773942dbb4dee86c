"""Demonstrations on disk: images in one flat file that is memory-mapped, and all other data in one ``.npz`` file.

A *run* is a sequence of frames in which the expert acted without interruption. Chunks of actions are cut from runs. A
chunk that begins at frame t is known up to the end of its run. If the run ended because the task was done, the expert
would have continued to hold, so the rest of the chunk is known too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass
class ShardWriter:
    """Writes the frames of demonstrations to a folder. ``close`` writes the index.

    Attributes:
        folder: Folder of the shard.
        fields: For each name of a field, the list with its vector for every frame.
        run_end: For each frame, the index after the last frame of its run.
        run_done: For each frame, True if its run ended because the task was done.
        episode: For each frame, the number of its episode.
    """

    folder: Path
    fields: dict[str, list[np.ndarray]] = field(default_factory=dict)
    run_end: list[int] = field(default_factory=list)
    run_done: list[bool] = field(default_factory=list)
    episode: list[int] = field(default_factory=list)
    _run_start: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._images = open(self.folder / "images.bin", "wb")  # noqa: SIM115 - the file stays open as long as the writer

    def add(self, images: np.ndarray, episode: int, **values: np.ndarray | float) -> None:
        """Append a frame.

        Args:
            images: uint8 [cameras, size, size, 3].
            episode: Number of the episode.
            **values: Further vectors of the frame.
        """
        self._shape = images.shape
        self._images.write(images.tobytes())
        self.episode.append(episode)
        for key, value in values.items():
            self.fields.setdefault(key, []).append(np.asarray(value, dtype=np.float32))

    def end_run(self, done: bool = False) -> None:
        """Mark the frames since the last call as one run. ``done`` is True if the task was done."""
        length = len(self.episode) - self._run_start
        self.run_end += [len(self.episode)] * length
        self.run_done += [done] * length
        self._run_start = len(self.episode)

    def close(self) -> None:
        self._images.close()
        np.savez(
            self.folder / "frames.npz",
            image_shape=np.array(self._shape),
            run_end=np.array(self.run_end),
            run_done=np.array(self.run_done),
            episode=np.array(self.episode),
            **{key: np.stack(values) for key, values in self.fields.items()},  # type: ignore[arg-type]
        )


class Shard:
    """A shard that is open for reading. ``shard["state"]`` is float32 [frames, D]."""

    def __init__(self, folder: Path):
        with np.load(folder / "frames.npz") as stored:  # own file: named by the person at this machine
            self._fields = {key: stored[key] for key in stored.files}
        shape = tuple(int(n) for n in self._fields.pop("image_shape"))
        self.run_end, self.run_done = self._fields.pop("run_end"), self._fields.pop("run_done")
        self.episode = self._fields["episode"]
        pixels = np.memmap(
            folder / "images.bin", np.uint8, "r"
        )  # own file: named by the person at this machine
        self.images = pixels.reshape(-1, *shape)

    def __len__(self) -> int:
        return len(self.run_end)

    def __getitem__(self, key: str) -> np.ndarray:
        return self._fields[key]

    @property
    def names(self) -> list[str]:
        return list(self._fields)

    def chunks(self, frames: np.ndarray, length: int, hold: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cut chunks of actions.

        Args:
            frames: Index of the first frame of each chunk, [B].
            length: Number of actions in a chunk.
            hold: Action of the expert after the task is done, float32 [A].

        Returns:
            Actions, float32 [B, length, A], and where they are known, bool [B, length].
        """
        index = frames[:, None] + np.arange(length)
        inside = index < self.run_end[frames][:, None]
        actions = self["action"][np.minimum(index, len(self) - 1)]
        actions = np.where(inside[..., None], actions, hold)
        return actions.astype(np.float32), inside | self.run_done[frames][:, None]


class Shards:
    """Several shards (folders with demonstrations) that are used like a single shard."""

    def __init__(self, folders: list[Path]):
        self.parts = [Shard(f) for f in folders]
        self.share = np.array([len(p) for p in self.parts], dtype=np.float64)
        self.share /= self.share.sum()

    def __len__(self) -> int:
        return sum(len(p) for p in self.parts)

    def column(self, key: str) -> np.ndarray:
        return np.concatenate([p[key] for p in self.parts])

    def sample(
        self, rng: np.random.Generator, count: int, length: int = 0, hold: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Draw frames with replacement.

        Args:
            rng: Random generator.
            count: Number of frames.
            length: Number of actions in a chunk, together with ``hold``.
            hold: Action of the expert after the task is done, float32 [A]. None for no chunks.

        Returns:
            "images", every stored field, and with ``hold`` also "chunk" and "known" (:meth:`Shard.chunks`).
        """
        rows: list[dict[str, np.ndarray]] = []
        for part, n in zip(self.parts, rng.multinomial(count, self.share), strict=True):
            frames = rng.integers(len(part), size=n)
            row = {key: part[key][frames] for key in part.names} | {"images": part.images[frames]}
            if hold is not None:
                row["chunk"], row["known"] = part.chunks(frames, length, hold)
            rows.append(row)
        return {key: np.concatenate([r[key] for r in rows]) for key in rows[0]}
