"""Requests and answers of a policy, kept as ``sinew serve --record`` does, from a program of one's own."""

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
    """Asks another policy and keeps what was asked and answered. Closing it writes what waits, and nothing else."""

    def __init__(self, policy: Policy, folder: str | os.PathLike[str], *, limit_bytes: int = 8 << 30):
        self.policy = policy
        self.recorder = Recorder(Path(folder), limit_bytes)
        self.recorder.describe(policy.spec)
        describe = getattr(policy, "describe", None)
        self._server: dict[str, Any] = describe() if describe else {}

    @property
    def spec(self) -> PolicySpec:
        return self.policy.spec

    def infer(
        self,
        observation: Observation | Mapping[str, Any],
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> ActionChunk:
        """Return what the policy answers. Its errors are kept and raised; a slow disk costs records, no answers."""
        self._refuse_closed()
        # A copy, which is asked and kept: a camera may write its next frame where this one was before it is on disk.
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
        """Say that a new episode begins in ``session``."""
        self._refuse_closed()
        self.policy.reset(session)

    def _release(self) -> None:
        self.recorder.close()


def record(policy: Policy, folder: str | os.PathLike[str], *, limit_bytes: int = 8 << 30) -> RecordedPolicy:
    """Return a policy that answers as ``policy`` does and keeps every request with its answer in a folder.

    The folder is what ``sinew serve --record`` writes: the verbs of ``sinew recording`` and
    :func:`sinew.connect` take it. limit_bytes: of all files together; recording ends there with a warning. Use it in a
    ``with`` block, whose end writes what waits. Raises :class:`SinewError` for a folder that cannot be written.
    """
    return RecordedPolicy(policy, folder, limit_bytes=limit_bytes)
