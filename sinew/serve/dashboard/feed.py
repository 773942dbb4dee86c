"""The data of the dashboard: the last answers and camera frames, and counts of the last hour.

Answers and frames are stored only while a viewer is connected. Counts are always stored. ``put`` runs on the
scheduler's threads, once per answer and after the reply. Without a viewer, ``put`` only adds to the history
(``history.py``). With a viewer, ``put`` also stores references to the answer and its frames. JSON (``news.py``) and
pictures are made later, at a limited rate.
"""

from __future__ import annotations

import contextlib
import io
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sinew.bundle.schema import ImageRecipe
from sinew.core import ActionChunk, BusyError, Observation, SinewError, Timing, machine
from sinew.processing.image import prepare_frame
from sinew.serve.dashboard.history import HourHistory
from sinew.serve.dashboard.wiring import Wiring
from sinew.serve.job import Answering, ServingJob
from sinew.serve.policies import DEFAULT
from sinew.serve.service import Service

VIEWERS = 8  # largest number of viewers at once; each viewer takes a connection and a few kilobytes
KEPT = 256  # largest number of answers that are stored between two messages to the viewers
# Session of the requests that a person makes on the page. They do not count as requests of a robot.
BY_HAND = "dashboard"
PICTURES_S = 0.1  # shortest time between two pictures of a camera, seconds
# Largest fraction of the CPU cores that making pictures may use. The pause between two pictures grows accordingly.
SHARE = 0.02
MAX_TEXT = 300  # longest prompt, name or error on the page, characters
MAX_NUMBERS = 1 << 14  # largest number of values of a chunk that are shown; they come from its first actions
JPEG_QUALITY = 85
TIMES = (*(field.name for field in fields(Timing) if field.name != "step_ms"), "head_ms")
NOTHING: tuple[int, Mapping[str, Any]] = (0, {})  # The value of ``_frames`` until the first frames arrive.


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was answered or rejected.

    Attributes:
        number: Number of the answer.
        when: Time of the answer, seconds since the epoch.
        wire: Name of the protocol.
        client: Address of the peer.
        session: Session of the request.
        prompt: The instruction.
        state: The state; None if it cannot be shown.
        ms: Milliseconds from the request's arrival to the answer.
        deadline_ms: Deadline of the request; None without a deadline.
        missed: True if the answer came after the deadline.
        outcome: The chunk or the error.
    """

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

    def to_dict(self, *, actions: bool = True) -> dict[str, Any]:
        """Return the answer as values for JSON. Numbers that are not finite become None.

        Args:
            actions: True to include the chunk and the state, whose conversion takes most of the time.
        """
        record: dict[str, Any] = {
            "number": self.number,
            "time": round(self.when, 3),
            "wire": self.wire,
            "client": self.client[:MAX_TEXT],
            "session": self.session[:MAX_TEXT],
            "prompt": self.prompt[:MAX_TEXT],
            "state": None if self.state is None or not actions else plain(self.state.reshape(-1)),
            "ms": round(self.ms, 3),
            "deadline_ms": self.deadline_ms,
            "missed": self.missed,
        }
        if isinstance(self.outcome, SinewError):
            return {**record, "outcome": self.outcome.code, "error": str(self.outcome)[:MAX_TEXT]}
        timing = self.outcome.timing
        record |= {
            "outcome": "ok",
            "timing": {name: round(float(getattr(timing, name)), 3) for name in TIMES},
            "warnings": [text[:MAX_TEXT] for text in self.outcome.warnings[:10]],
        }
        if self.outcome.text:
            record["text"] = self.outcome.text[:MAX_TEXT]
        if actions and len(self.outcome.actions):
            rows = max(1, MAX_NUMBERS // max(1, self.outcome.actions.shape[1]))
            record["actions"] = plain(self.outcome.actions[:rows])
        return record


@dataclass(frozen=True, slots=True)
class AnswerPictures:
    """The camera frames of one answer as JPEG files.

    Attributes:
        number: Number of the answer.
        files: Camera -> JPEG file.
        until: Time on the clock ``time.perf_counter()`` before which no newer pictures are made.
    """

    number: int
    files: Mapping[str, bytes]
    until: float


class Feed:
    """Stores the last answers of a service for the viewers of the dashboard. Thread-safe.

    Args:
        image: The policy's preprocessing, so that pictures show the model's input; None shows the received frames.
    """

    def __init__(self, image: ImageRecipe | None = None):
        self.image = image
        self.history = HourHistory()
        # Compares robots with the training data. None if the bundle has no record of its training data.
        self.wiring: Wiring | None = None
        self._deployment: Answering | None = None  # deployment of the policy whose answers are shown
        self._following = False
        self._lock = threading.Lock()
        self._viewers = {"answers": 0, "pictures": 0}
        self._number = 0
        self._answers: deque[Answer] = deque(maxlen=KEPT)
        self._frames: tuple[int, Mapping[str, Any]] = NOTHING
        self._pictures = AnswerPictures(0, {}, 0.0)
        # Only one thread makes pictures, because several viewers may request the same pictures at once.
        self._making = threading.Lock()
        self._share = SHARE * machine.cores().logical
        self._bells: tuple[Callable[[], None], ...] = ()

    def follow(self, service: Service) -> None:
        """Store the answers of the service's first policy from now on. Only the first call has an effect."""
        with self._lock:
            following, self._following = self._following, True
        if not following:
            self._show(service.policies.get())
            service.subscribe(self._hear)

    def _show(self, deployment: Answering) -> None:
        self._deployment, manifest = deployment, deployment.manifest
        self.image = None if manifest is None else manifest.processing.image
        self.wiring = None if manifest is None else Wiring.of(manifest)

    def _hear(self, job: ServingJob, outcome: ActionChunk | SinewError, seconds: float) -> None:
        request = job.request
        if request.policy in ("", DEFAULT):
            wire, client, session, seen = request.wire, request.client, job.session, job.observation
            limit = None if job.deadline is None else job.deadline - request.arrived
            # A hot-swap may have replaced the policy.
            if job.deployment is not None and job.deployment is not self._deployment:
                self._show(job.deployment)
            self.put(wire, client, session, seen, outcome, seconds, limit)
            answered = isinstance(outcome, ActionChunk) and session != BY_HAND
            # Skip requests for an adapter, because the training record describes the base policy.
            if seen is None or seen.adapter:
                return
            if self.viewers and answered and (wiring := self.wiring) is not None:
                wiring.put(wire, client, session, seen)

    @contextlib.contextmanager
    def bell(self, ring: Callable[[], None]) -> Iterator[None]:
        """While the ``with`` block runs, call the function ``ring`` after every stored answer. ``ring`` runs on the
        scheduler's thread and must not block.
        """
        with self._lock:
            self._bells += (ring,)
        try:
            yield
        finally:
            with self._lock:
                self._bells = tuple(each for each in self._bells if each is not ring)

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
        """Count an answer, and store it if a viewer is connected. The call never blocks for long.

        Args:
            wire: Name of the protocol.
            client: Address of the peer.
            session: Session of the request.
            observation: The observation; None if it was not decoded.
            outcome: The chunk or the error.
            seconds: Seconds from the request's arrival to the answer.
            deadline_s: Deadline of the request, in seconds from its arrival; None without a deadline.
        """
        missed = deadline_s is not None and seconds > deadline_s
        if session != BY_HAND:
            self.history.put(1e3 * seconds, missed, isinstance(outcome, SinewError))
        if not any(self._viewers.values()):
            return
        state = None if observation is None else np.asarray(observation.state)
        limit_ms = None if deadline_s is None else 1e3 * deadline_s
        if isinstance(outcome, SinewError):
            outcome = _error_copy(outcome)
        with self._lock:
            if not any(self._viewers.values()):
                return
            self._number += 1
            self._answers.append(
                Answer(
                    self._number,
                    time.time(),
                    wire,
                    client[:MAX_TEXT],
                    session[:MAX_TEXT],
                    "" if observation is None else observation.prompt[:MAX_TEXT],
                    state if state is not None and state.dtype.kind in "fiu" and state.size <= 1024 else None,
                    1e3 * seconds,
                    round(limit_ms, 3) if limit_ms is not None and math.isfinite(limit_ms) else None,
                    missed,
                    outcome,
                )
            )
            if observation is not None and isinstance(outcome, ActionChunk) and session != BY_HAND:
                self._frames = self._number, observation.images
            bells = self._bells
        for ring in bells:
            ring()

    @contextlib.contextmanager
    def viewer(self, what: str = "answers") -> Iterator[None]:
        """Count a viewer of the "answers" or of the "pictures" while the ``with`` block runs.

        Raises:
            BusyError: There are too many viewers.
        """
        with self._lock:
            if self._viewers[what] >= VIEWERS:
                raise BusyError(
                    f"{VIEWERS} viewers are connected, which is the limit; close another dashboard"
                )
            self._viewers[what] += 1
        try:
            yield
        finally:
            with self._lock:
                self._viewers[what] -= 1
                # Without viewers, no answers and frames are stored.
                if not any(self._viewers.values()):
                    self._answers.clear()
                    self._frames, self._pictures = NOTHING, AnswerPictures(0, {}, 0.0)

    @property
    def viewers(self) -> int:
        """Return the number of viewers who read the answers."""
        return self._viewers["answers"]

    @property
    def newest(self) -> int:
        """Return the number of the last stored answer. Numbers grow by 1 for each answer."""
        return self._number

    @property
    def newest_frames(self) -> int:
        """Return the number of the last stored answer whose request had camera frames."""
        return self._frames[0]

    def since(self, number: int) -> list[Answer]:
        """Return the stored answers after ``number``, oldest first."""
        with self._lock:
            return [answer for answer in self._answers if answer.number > number]

    def pictures(self) -> AnswerPictures:
        """Return the last frames after preprocessing as pictures. New pictures are made if there are newer frames
        and the rate allows it.
        """
        with self._making:
            with self._lock:
                number, frames = self._frames
                pictures = self._pictures
            if pictures.number == number or time.perf_counter() < pictures.until:
                return pictures
            begun = time.thread_time()
            files = {name: jpeg(self._seen(np.asarray(frame))) for name, frame in frames.items()}
            pause = max(PICTURES_S, (time.thread_time() - begun) / self._share)
            pictures = AnswerPictures(number, files, time.perf_counter() + pause)
            with self._lock:
                if self._frames[0]:  # a viewer is still connected
                    self._pictures = pictures
        return pictures

    def _seen(self, frame: np.ndarray) -> np.ndarray:
        """Return a frame as the model sees it, after the policy's preprocessing, uint8 [H, W, 3]."""
        recipe = self.image
        if recipe is None:
            return frame if frame.dtype == np.uint8 else (frame * 255).round().clip(0, 255).astype(np.uint8)
        # The first three channels, [3, H, W]. Models with two image encoders have the same frame twice.
        pixels = prepare_frame(frame, recipe)[:3]
        mean, std = (np.asarray(v[:3], np.float32)[:, None, None] for v in (recipe.mean, recipe.std))
        return ((pixels * std + mean) * 255).round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


def _error_copy(error: SinewError) -> SinewError:
    """Return a copy of an error for viewers. The error itself would keep the frames of the request in memory."""
    shown = SinewError(str(error)[:MAX_TEXT])
    shown.code = error.code
    return shown


def plain(values: np.ndarray) -> Any:
    """Convert an array to nested lists of numbers with six significant digits, for JSON. Numbers that are not finite
    become None.
    """
    numbers = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (5 - np.floor(np.log10(np.abs(numbers))))
        rounded = np.round(numbers * scale) / scale
    # Keep zeros, and numbers that are too small to be scaled.
    rounded = np.where(np.isfinite(rounded), rounded, numbers)
    if np.isfinite(rounded).all():
        return rounded.tolist()
    rounded = rounded.astype(object)
    rounded[~np.isfinite(numbers)] = None
    return rounded.tolist()


def jpeg(frame: np.ndarray) -> bytes:
    """Compress a frame, uint8 [H, W, 3], to the bytes of a JPEG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()
