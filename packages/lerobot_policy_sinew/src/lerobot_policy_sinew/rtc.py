"""Support LeRobot's real-time chunking (``--inference.type=rtc``): convert its arguments to fields of an observation.

LeRobot's engine calls ``predict_action_chunk`` on its own thread, with the remaining actions of the running chunk. The
server then does the same as LeRobot's own policies: guidance without the Jacobian, with LeRobot's settings.
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

LONGEST = 300  # error messages contain at most this many characters of a server's text
AGAIN_S = 0.01  # seconds between two checks for a newer observation, as in LeRobot's own engine
SAME_S = 1.0  # after this many seconds, an observation that has not changed by a bit counts as new


def said(backend: Any) -> Mapping[str, Any]:
    """Return the description of the engine that runs a policy; {} if there is none.

    A server sends it in its metadata.
    """
    if hasattr(backend, "metadata"):
        description = backend.metadata().get("server")
    else:
        description = backend.describe() if hasattr(backend, "describe") else None
    return description if isinstance(description, Mapping) else {}


def refuse_unguided(spec: PolicySpec, about: Mapping[str, Any], kind: str, refused: str) -> None:
    """Check that the engine of a policy supports a kind of guidance for real-time chunking.

    Args:
        spec: The specification of the policy.
        about: Description of the engine (:func:`said`). An engine without a description is not checked.
        kind: The kind of guidance, such as "no-jacobian".
        refused: Beginning of the error message: the setting with its expected and its actual value.

    Raises:
        ValueError: The engine does not support this guidance.
    """
    why, kinds = about.get("unguided"), about.get("guidance")
    if not why and isinstance(kinds, (list, tuple)) and kind not in kinds:
        why = f"engine {about.get('engine')} does not support the guidance {kind}"
    if why:
        raise ValueError(
            f"{refused}: the policy {spec.name[:LONGEST]} cannot continue a running chunk: {str(why)[:LONGEST]}"
        )


def left_over(given: np.ndarray, chunk: np.ndarray | None) -> slice:
    """Find in the last chunk the actions that still wait in LeRobot's queue.

    LeRobot cuts the remaining actions to its execution horizon, or fills them with zeros up to this horizon. The zeros
    are not actions, so they are not part of the result.

    Args:
        given: ``prev_chunk_left_over`` of LeRobot, float [R, D].
        chunk: The last chunk, float [H, D]; None if there is none.

    Returns:
        The indices of the remaining actions in the chunk.

    Raises:
        ValueError: The actions do not belong to the last chunk.
    """
    rows = np.zeros((0, given.shape[1]), given.dtype) if chunk is None else chunk
    for start in range(len(rows) + 1):
        end = min(start + len(given), len(rows))
        if np.array_equal(given[: end - start], rows[start:end]) and not given[end - start :].any():
            return slice(start, end)
    raise ValueError(
        "prev_chunk_left_over: expected actions of the last chunk, filled up with zeros, got other actions"
    )


class Continued:
    """Stores the running chunk and the episode between two requests of LeRobot's rtc engine. It is thread-safe.

    Args:
        settings: LeRobot's ``RTCConfig``.
        spec: The specification of the policy.
        about: Description of the engine (:func:`said`).

    Attributes:
        episode: Number of the present episode.

    Raises:
        ValueError: The policy does not support LeRobot's rtc engine or its settings.
    """

    def __init__(self, settings: Any, spec: PolicySpec, about: Mapping[str, Any]):
        if spec.history > 1:
            raise ValueError(
                f"inference.type: expected sync, got rtc: the policy {spec.name[:LONGEST]} needs the observations of"
                f" {spec.history} control steps, and LeRobot's rtc engine provides only those of its requests"
            )
        if settings.debug:
            raise ValueError(
                "inference.rtc.debug: expected false, because the solver runs in the server, got true"
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
        """Begin an episode. Observations and answers of the last episode are dropped."""
        with self._lock:
            self.episode = getattr(self, "episode", 0) + 1
            self._first: Moment | None = None
            self._shown, self._fresh = 0.0, False
            self._chunk: np.ndarray | None = None
            self._targets: np.ndarray | None = None

    def fresh(self, seen: Moment, episode: int) -> bool:
        """Check that an observation belongs to the present episode.

        After a reset, LeRobot's engine may use an observation from before the reset. So the first observation counts
        only after another observation has arrived, or after it has stayed the same for a second. A real camera never
        returns the same frame twice.

        Args:
            seen: The observation, with a batch dimension of 1.
            episode: Number of the episode when the request began.

        Returns:
            True if the observation may be used.
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
        """Compute the fields of real-time chunking for a request.

        Args:
            given: ``prev_chunk_left_over`` of LeRobot, float [R, A]; None if there is no running chunk.
            delay: Number of actions that LeRobot expects to execute until the answer arrives.
            state: State of the observation, float [D].

        Returns:
            The fields; {} if there is no chunk to continue.

        Raises:
            ValueError: The remaining actions do not belong to the last chunk.
        """
        if not self._kind or given is None:
            return {}
        with self._lock:
            remaining = left_over(given, self._chunk)
            if self._targets is None or remaining.start == remaining.stop:
                return {}
            rows = self._motion.rows(self._targets[remaining], state)
        request_fields = {
            "previous": rows,
            "delay": min(int(delay or 0), len(rows)),
            "rtc": self._kind_for(delay, len(rows)),
        }
        if request_fields["rtc"] != "trained":
            request_fields |= {
                "horizon": max(0, self._spec.chunk_size - int(self._settings.execution_horizon)),
                "schedule": self._settings.prefix_attention_schedule.value.lower(),
                "beta": float(self._settings.max_guidance_weight),
            }
        return request_fields

    def _kind_for(self, delay: int | None, left: int) -> str:
        """Choose the kind of guidance for one request.

        If the delay is longer than the action prefix that the policy was trained to continue, the policy is guided like
        an untrained policy.

        Args:
            delay: Number of actions that LeRobot expects to execute until the answer arrives.
            left: Number of remaining actions.
        """
        most = self._spec.committed_rows
        if self._kind != "trained" or min(int(delay or 0), left) <= most:
            return self._kind
        if not self._told:
            self._told = True
            logger.warning(
                "sinew: the answer arrives after %s actions, but %s was trained to continue at most %d; the chunks are"
                " guided instead",
                delay,
                self._spec.name[:LONGEST],
                most,
            )
        return "no-jacobian"

    def answered(self, chunk: np.ndarray, state: np.ndarray, episode: int) -> bool:
        """Store a chunk.

        Args:
            chunk: The actions as LeRobot gets them, float [H, A].
            state: State of the observation, float [D].
            episode: Number of the episode when the request began.

        Returns:
            False if the chunk belongs to an earlier episode.
        """
        # For relative actions, the plugin has already converted the chunk to targets for LeRobot.
        goals = isinstance(self._motion, Relative)
        targets = chunk if goals else self._motion.targets(chunk, state)
        with self._lock:
            if episode != self.episode:
                return False
            self._chunk, self._targets = chunk, targets
            return True

    def skipped(self) -> None:
        """Record that LeRobot's queue is empty, so that there is no chunk to continue."""
        with self._lock:
            self._chunk = self._targets = None


def _same(one: Moment, other: Moment) -> bool:
    return np.array_equal(one.state, other.state) and all(
        np.array_equal(frame, other.images[name]) for name, frame in one.images.items()
    )
