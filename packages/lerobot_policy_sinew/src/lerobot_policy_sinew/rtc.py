"""LeRobot's real-time chunking (``--inference.type=rtc``) as fields of an observation, and what it may not play.

LeRobot's engine asks ``predict_action_chunk`` on a thread of its own, with the rows that are left of the running chunk.
The server does what LeRobot's own policies do with them: guidance without the Jacobian, by LeRobot's settings.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from sinew_client import PolicySpec
from sinew_client.control.defaults import stated
from sinew_client.control.motion import Relative, parse_motion
from sinew_client.types import Moment

logger = logging.getLogger(__name__)

LONGEST = 300  # longest text of a server in error messages, characters
AGAIN_S = 0.01  # seconds between two checks for a newer observation, as in LeRobot's own engine
SAME_S = 1.0  # after this many seconds, an observation that has not changed by a bit counts as new


def said(backend: Any) -> Mapping[str, Any]:
    """Return a policy's description of its engine: a server's is in its metadata."""
    if hasattr(backend, "metadata"):
        found = backend.metadata().get("server")
    else:
        found = backend.describe() if hasattr(backend, "describe") else None
    return found if isinstance(found, Mapping) else {}


def refuse_unguided(spec: PolicySpec, about: Mapping[str, Any], kind: str, refused: str) -> None:
    """Raise ValueError where the policy, or what runs it, cannot continue a running chunk by this kind of guidance.

    about: what runs it says (:func:`said`); one that says nothing is asked as it comes. refused: the setting, what was
    expected and what it is.
    """
    why, known = about.get("unguided"), about.get("guidance")
    if not why and isinstance(known, (list, tuple)) and kind not in known:
        why = f"engine {about.get('engine')} has no guidance {kind}"
    if why:
        raise ValueError(
            f"{refused}: the policy {spec.name[:LONGEST]} cannot continue a running chunk: {str(why)[:LONGEST]}"
        )


def left_over(given: np.ndarray, chunk: np.ndarray | None) -> slice:
    """Return which rows of the last chunk LeRobot still has, and says so with ``prev_chunk_left_over`` [R, D].

    It cuts them to its execution horizon, or fills them up to it with zeros, which are no actions and are left away;
    of a queue that is empty nothing else is there. Raises ValueError for rows of another chunk.
    """
    rows = np.zeros((0, given.shape[1]), given.dtype) if chunk is None else chunk
    for start in range(len(rows) + 1):
        end = min(start + len(given), len(rows))
        if np.array_equal(given[: end - start], rows[start:end]) and not given[end - start :].any():
            return slice(start, end)
    raise ValueError(
        "prev_chunk_left_over: expected rows of the chunk before, filled up with zeros, got others"
    )


class Continued:
    """Keeps what stands between two requests of LeRobot's engine. Its thread and the loop's call it at once.

    settings: LeRobot's ``RTCConfig``. Raises ValueError for a policy that cannot be played so.
    """

    def __init__(self, settings: Any, spec: PolicySpec, about: Mapping[str, Any]):
        if spec.history > 1:
            raise ValueError(
                f"inference.type: expected sync, got rtc: the policy {spec.name[:LONGEST]} reads {spec.history}"
                " moments, one of each control step, and LeRobot's rtc engine shows it those of its requests"
            )
        if settings.debug:
            raise ValueError(
                "inference.rtc.debug: expected false, got true: the steps of the solver are the server's"
            )
        self._kind = ""  # kind of the guidance; "" executes one chunk after another without guidance
        if settings.enabled:
            self._kind = "trained" if spec.committed_rows else "no-jacobian"
            refuse_unguided(spec, about, self._kind, "inference.rtc.enabled: expected false, got true")
        self._settings, self._spec = settings, spec
        self._motion = parse_motion(stated(spec.to_dict()))
        self._lock, self._told = threading.Lock(), False
        self.begin()

    def begin(self) -> None:
        """Begin an episode: what was seen and answered before it counts no more."""
        with self._lock:
            self.episode = getattr(self, "episode", 0) + 1
            self._first: Moment | None = None
            self._shown, self._fresh = 0.0, False
            self._chunk: np.ndarray | None = None
            self._targets: np.ndarray | None = None

    def fresh(self, seen: Moment, episode: int) -> bool:
        """Return whether an observation [1, ...] is of this episode.

        After a reset LeRobot's engine may infer at once from what it was shown last, which was before a correction or
        a reset of the scene. So the first observation is not acted on until another one has come, or the same one
        again for a second: a camera never gives a frame twice.
        """
        with self._lock:
            if episode != self.episode or self._fresh:
                return episode == self.episode
            if self._first is None:
                self._first, self._shown = seen, time.monotonic()
            elif not _same(self._first, seen) or time.monotonic() - self._shown > SAME_S:
                self._fresh = True
            return self._fresh

    def fields(self, given: np.ndarray | None, delay: int | None, state: np.ndarray) -> dict[str, Any]:
        """Return the fields of real-time chunking for an observation of ``state`` [D]; {} if there is no chunk to
        continue.

        given: ``prev_chunk_left_over``, float [R, A]. delay: Actions that LeRobot expects to execute until the
        answer, at most the remaining ones.
        """
        if not self._kind or given is None:
            return {}
        with self._lock:
            kept = left_over(given, self._chunk)
            if self._targets is None or kept.start == kept.stop:
                return {}
            rows = self._motion.rows(self._targets[kept], state)
        found = {
            "previous": rows,
            "delay": min(int(delay or 0), len(rows)),
            "rtc": self._kind_for(delay, len(rows)),
        }
        if found["rtc"] != "trained":
            found |= {
                "horizon": max(0, self._spec.chunk_size - int(self._settings.execution_horizon)),
                "schedule": self._settings.prefix_attention_schedule.value.lower(),
                "beta": float(self._settings.max_guidance_weight),
            }
        return found

    def _kind_for(self, delay: int | None, left: int) -> str:
        """Return the guidance of one request: a policy that was trained to continue fewer rows than are under way is
        guided as LeRobot guides others."""
        most = self._spec.committed_rows
        if self._kind != "trained" or min(int(delay or 0), left) <= most:
            return self._kind
        if not self._told:
            self._told = True
            logger.warning(
                "sinew: %s rows pass until an answer comes, and %s was trained to continue %d: guided instead",
                delay,
                self._spec.name[:LONGEST],
                most,
            )
        return "no-jacobian"

    def answered(self, chunk: np.ndarray, state: np.ndarray, episode: int) -> bool:
        """Keep a chunk [H, A] for an observation of ``state``; return False for one of an episode before."""
        # For relative actions, the plugin has already converted the chunk to targets for LeRobot.
        goals = isinstance(self._motion, Relative)
        targets = chunk if goals else self._motion.targets(chunk, state)
        with self._lock:
            if episode != self.episode:
                return False
            self._chunk, self._targets = chunk, targets
            return True

    def skipped(self) -> None:
        """Take note that LeRobot's queue holds nothing now."""
        with self._lock:
            self._chunk = self._targets = None


def _same(one: Moment, other: Moment) -> bool:
    return np.array_equal(one.state, other.state) and all(
        np.array_equal(frame, other.images[name]) for name, frame in one.images.items()
    )
