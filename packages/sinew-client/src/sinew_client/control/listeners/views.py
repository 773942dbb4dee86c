"""A listener that sends a camera's older frame again while its newest frame is not needed.

A policy that stores the features of repeated frames (`sinew serve --reuse`) then computes fewer views. The rule is
opt-in, because the policy sees an older picture, and because some tasks fail without the newest one.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np

from sinew_client.control.listeners.listener import LoopListener
from sinew_client.errors import ClientError

BLOCK = 8  # pixels on a side that are averaged before two frames are compared, so that noise does not count
KINDS = ("every", "change", "never")


class ViewRule:
    """Decides whether a request contains a camera's newest frame, or the frame that was used last.

    Args:
        text: ``CAMERA:every:N`` uses each N-th request's frame. ``CAMERA:change:LIMIT`` uses the newest frame if it
            differs from the used one by more than LIMIT of 255, as the mean over blocks of 8 x 8 pixels.
            ``CAMERA:never`` uses the first frame of an episode.

    Raises:
        ClientError: The text has another form.
    """

    def __init__(self, text: str) -> None:
        camera, _, rest = text.strip().partition(":")
        kind, colon, number = rest.partition(":")
        try:
            limit = float(number) if colon else 0.0
        except ValueError:
            limit = -1.0
        valid = limit == 0.0 if kind == "never" else limit >= 1 if kind == "every" else 0 <= limit <= 255
        if not camera or kind not in KINDS or not valid or (kind == "every" and limit != int(limit)):
            raise ClientError(
                f"refresh: expected CAMERA:every:N, CAMERA:change:LIMIT (0 to 255) or CAMERA:never, got {text!r}"
            )
        self.camera, self.kind, self.limit = camera, kind, limit
        self.requests = self.repeated = 0
        self._since = 0  # number of requests since the last frame that was used
        self._used: np.ndarray | None = None

    def reset(self) -> None:
        """Begin an episode: its first request contains the newest frame."""
        self._used = None

    def frame(self, newest: np.ndarray) -> np.ndarray:
        """Return the frame of the next request. ``newest`` is uint8 [height, width, 3]."""
        self.requests += 1
        self._since += 1
        if self._used is None or self._used.shape != newest.shape or self._is_due(newest):
            self._used, self._since = np.array(newest), 0
        else:
            self.repeated += 1
        return self._used

    def _is_due(self, newest: np.ndarray) -> bool:
        if self.kind == "never":
            return False
        if self.kind == "every":
            return self._since >= self.limit
        return float(np.abs(_coarse(newest) - _coarse(self._used)).mean()) > self.limit


class ViewRefresh(LoopListener):
    """Replaces the frames of each request by older ones, as its rules state.

    Args:
        rules: The rules, at most one for each camera.
    """

    def __init__(self, rules: list[ViewRule]) -> None:
        self.rules = rules

    @classmethod
    def parse(cls, text: str) -> ViewRefresh:
        """Read rules, separated by commas.

        Raises:
            ClientError: A rule has another form.
        """
        rules = [ViewRule(part) for part in text.split(",")]
        cameras = [rule.camera for rule in rules]
        if len(set(cameras)) < len(cameras):
            raise ClientError(f"refresh: expected one rule for each camera, got {text!r}")
        return cls(rules)

    def check(self, cameras: Sequence[str]) -> None:
        """Check that the policy has the camera of each rule.

        Raises:
            ClientError: The policy does not have a camera.
        """
        for rule in self.rules:
            if rule.camera not in cameras:
                raise ClientError(
                    f"refresh: expected one of the cameras {', '.join(cameras)}, got {rule.camera!r}"
                )

    def request(self, step: int, fields: dict[str, Any]) -> None:
        images: Mapping[str, np.ndarray] = fields.get("images") or self.loop.observer.images
        used = dict(images)
        for rule in self.rules:
            if rule.camera in used:
                used[rule.camera] = rule.frame(used[rule.camera])
        fields["images"] = used

    def restarted(self) -> None:
        for rule in self.rules:
            rule.reset()

    def text(self) -> str:
        """Return how many requests contained an older frame of each camera."""
        return ", ".join(
            f"{rule.camera}: an older frame in {rule.repeated} of {rule.requests} requests"
            for rule in self.rules
        )


def _coarse(frame: np.ndarray | None) -> np.ndarray:
    """Return the mean colour of each block, float32 [rows, columns, 3]. Small frames stay as they are."""
    assert frame is not None
    rows, columns = frame.shape[0] // BLOCK, frame.shape[1] // BLOCK
    if not (rows and columns):
        return np.asarray(frame, np.float32)
    cut = np.asarray(frame[: rows * BLOCK, : columns * BLOCK], np.float32)
    return np.asarray(cut.reshape(rows, BLOCK, columns, BLOCK, 3).mean((1, 3)))
