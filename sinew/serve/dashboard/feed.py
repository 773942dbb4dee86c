"""What the dashboard is told: the last answers and frames, kept only while somebody looks.

``put`` runs on the scheduler's threads, once per answer: without a viewer it returns at once, with one it keeps
references. JSON and pictures are made where they are asked for.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sinew.bundle.schema import ImageRecipe
from sinew.core import ActionChunk, BusyError, Observation, SinewError
from sinew.processing.image import prepare_frame

VIEWERS = 8  # at once; each is a connection and a few kilobytes
KEPT = 64  # answers that a viewer can be behind
MAX_TEXT = 300  # characters of a prompt, a name or an error that are shown
MAX_NUMBERS = 1 << 14  # of a chunk; a larger one is shown by its first rows
JPEG_QUALITY = 85


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was answered or refused. missed: after its deadline. ms: from arrival to answer."""

    number: int
    when: float  # seconds since the epoch
    wire: str
    client: str
    session: str
    prompt: str
    state: np.ndarray | None
    ms: float
    deadline_ms: float | None
    missed: bool
    outcome: ActionChunk | SinewError

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON; numbers that are not finite become None."""
        found: dict[str, Any] = {
            "number": self.number,
            "time": round(self.when, 3),
            "wire": self.wire,
            "client": self.client[:MAX_TEXT],
            "session": self.session[:MAX_TEXT],
            "prompt": self.prompt[:MAX_TEXT],
            "state": None if self.state is None else plain(self.state),
            "ms": round(self.ms, 3),
            "deadline_ms": self.deadline_ms,
            "missed": self.missed,
        }
        if isinstance(self.outcome, SinewError):
            return {**found, "outcome": self.outcome.code, "error": str(self.outcome)[:MAX_TEXT]}
        rows = max(1, MAX_NUMBERS // max(1, self.outcome.actions.shape[1]))
        timing = asdict(self.outcome.timing) | {"head_ms": self.outcome.timing.head_ms}
        return {
            **found,
            "outcome": "ok",
            "actions": [plain(row) for row in self.outcome.actions[:rows]],
            "timing": {name: round(float(timing[name]), 3) for name in timing if name != "step_ms"},
            "warnings": [text[:MAX_TEXT] for text in self.outcome.warnings[:10]],
        }


class Feed:
    """The last answers, for those who look. Thread-safe.

    image: the policy's resize, so that pictures show what the model sees; None: frames are shown as they came.
    """

    def __init__(self, image: ImageRecipe | None = None):
        self.image = image
        self._lock = threading.Lock()
        self._viewers = 0
        self._number = 0
        self._answers: deque[Answer] = deque(maxlen=KEPT)
        self._frames: tuple[int, Mapping[str, Any]] = (0, {})
        self._pictures: dict[str, tuple[int, bytes]] = {}
        self._making = threading.Lock()  # several viewers ask for the same picture at once
        self._bells: tuple[Callable[[], None], ...] = ()

    def ring(self, bell: Callable[[], None]) -> None:
        """Call ``bell`` after every answer that is kept, on the scheduler's thread: it must not block."""
        with self._lock:
            self._bells += (bell,)

    def put(
        self,
        wire: str,
        client: str,
        session: str,
        observation: Observation | None,
        outcome: ActionChunk | SinewError,
        seconds: float,
        deadline_s: float | None,
    ) -> None:
        """Keep an answer if somebody looks. deadline_s: the request's, from its arrival. Never blocks for long."""
        if not self._viewers:
            return
        state = None if observation is None else np.asarray(observation.state)
        with self._lock:
            if not self._viewers:
                return
            self._number += 1
            self._answers.append(
                Answer(
                    self._number,
                    time.time(),
                    wire,
                    client,
                    session,
                    "" if observation is None else str(observation.prompt),
                    state if state is not None and state.dtype.kind in "fiu" and state.size <= 1024 else None,
                    1e3 * seconds,
                    None if deadline_s is None else round(1e3 * deadline_s, 3),
                    deadline_s is not None and seconds > deadline_s,
                    outcome,
                )
            )
            if observation is not None and isinstance(outcome, ActionChunk):
                self._frames = self._number, observation.images
            bells = self._bells
        for bell in bells:
            bell()

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Somebody looks while inside. Raises BusyError for one too many."""
        with self._lock:
            if self._viewers >= VIEWERS:
                raise BusyError(f"{VIEWERS} viewers look at this server, and no more may")
            self._viewers += 1
        try:
            yield
        finally:
            with self._lock:
                self._viewers -= 1
                if not self._viewers:  # nobody: keep nothing
                    self._answers.clear()
                    self._frames, self._pictures = (0, {}), {}

    @property
    def viewers(self) -> int:
        """Return how many look."""
        return self._viewers

    @property
    def newest(self) -> int:
        """Return the number of the last answer."""
        return self._number

    def since(self, number: int) -> list[Answer]:
        """Return the kept answers after ``number``, oldest first."""
        with self._lock:
            return [answer for answer in self._answers if answer.number > number]

    def picture(self, camera: str) -> tuple[int, bytes] | None:
        """Return the last frame of a camera as the policy sees it, a JPEG file, and the number of its answer."""
        with self._making:
            with self._lock:
                number, frames = self._frames
                made = self._pictures.get(camera)
            if camera not in frames:
                return None
            if made is None or made[0] != number:
                made = number, jpeg(self._seen(np.asarray(frames[camera])))
                with self._lock:
                    if self._frames[0] == number:
                        self._pictures[camera] = made
        return made

    def _seen(self, frame: np.ndarray) -> np.ndarray:
        """A frame after the policy's resize, uint8 [H, W, 3]."""
        recipe = self.image
        if recipe is None:
            return frame if frame.dtype == np.uint8 else (frame * 255).round().clip(0, 255).astype(np.uint8)
        pixels = prepare_frame(frame, recipe)[:3]  # [3, H, W]; models of two encoders see the same twice
        mean, std = (np.asarray(v[:3], np.float32)[:, None, None] for v in (recipe.mean, recipe.std))
        return ((pixels * std + mean) * 255).round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


def plain(values: np.ndarray) -> list[float | None]:
    """Return numbers of six digits, None for those that are not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.reshape(-1).tolist()]


def jpeg(frame: np.ndarray) -> bytes:
    """Return uint8 [H, W, 3] as a JPEG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()
