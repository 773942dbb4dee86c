"""Record the requests and answers of a policy in your own program, as ``sinew serve --record`` does."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinew_client.open_policy import OpenPolicy
from sinew_client.policy import Policy

from sinew.core import ActionChunk, Observation, PolicySpec, SinewError
from sinew.processing import given
from sinew.records.recorder import Recorder

WIRE = "python"


class RecordedPolicy(OpenPolicy):
    """A policy that forwards observations to another policy, and records requests and answers.

    ``close`` writes the waiting records. The other policy stays open.

    Args:
        policy: An open policy.
        folder: The folder for the records.
        limit_bytes: Largest size of all files together. Recording ends there with a warning.

    Raises:
        SinewError: The folder cannot be written.
    """

    def __init__(self, policy: Policy, folder: str | os.PathLike[str], *, limit_bytes: int = 8 << 30):
        self.policy = policy
        self.recorder = Recorder(Path(folder), limit_bytes)
        self.recorder.describe(policy.spec)
        describe = getattr(policy, "describe", None)
        self._server: dict[str, Any] = describe() if describe else {}

    @property
    def spec(self) -> PolicySpec:
        """The recorded policy's specification."""
        return self.policy.spec

    def infer(
        self,
        observation: Observation | Mapping[str, Any],
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> ActionChunk:
        """Return the recorded policy's chunk. Its errors are recorded and raised.

        With a slow disk, records are lost, but answers are never delayed.

        Args:
            observation: The observation, as in :meth:`sinew.Policy.infer`.
            timeout: The time limit, as in :meth:`sinew.Policy.infer`.
            cancel: An event that cancels the inference, if the recorded policy supports it.

        Returns:
            The chunk.

        Raises:
            SinewError: The recorded policy's error.
        """
        self._refuse_closed()
        # Copy the observation, because a camera may write its next frame into the same memory before this frame
        # is on disk.
        seen = copy.deepcopy(given.observation(observation, self.spec))
        outcome: ActionChunk | SinewError
        try:
            more: dict[str, Any] = {} if cancel is None else {"cancel": cancel}
            outcome = self.policy.infer(seen, timeout=timeout, **more)
        except SinewError as error:
            self.recorder.put(WIRE, seen.session, seen, error, self._server)
            raise
        self.recorder.put(WIRE, seen.session, seen, outcome, self._server)
        return outcome

    def reset(self, session: str = "") -> None:
        """Begin a new episode.

        Args:
            session: Session of the robot.
        """
        self._refuse_closed()
        self.policy.reset(session)

    def _release(self) -> None:
        self.recorder.close()


def record(policy: Policy, folder: str | os.PathLike[str], *, limit_bytes: int = 8 << 30) -> RecordedPolicy:
    """Record all requests of a policy and their answers in a folder.

    The folder has the format of ``sinew serve --record``. The commands of ``sinew recording`` and
    :func:`sinew.connect` read it. Use the result in a ``with`` block, which writes the last records at its end.

    Args:
        policy: An open policy. The policy stays open after the recording.
        folder: The folder for the records.
        limit_bytes: Largest size of all files together. Recording ends there with a warning.

    Returns:
        A policy with the same answers.

    Raises:
        SinewError: The folder cannot be written.

    Example:
        >>> with sinew.record(policy, "records") as recorded:
        ...     chunk = recorded.infer(observation)
    """
    return RecordedPolicy(policy, folder, limit_bytes=limit_bytes)
