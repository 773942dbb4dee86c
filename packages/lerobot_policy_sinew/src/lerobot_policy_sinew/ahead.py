"""Chunks that are asked for while LeRobot's loop goes on: Sinew's own loop, a tick for each control step of LeRobot's.

LeRobot's factory of inference engines knows ``sync`` and ``rtc``, and takes no other. Its ``sync`` asks the policy at
every control step, so what asks ahead, holds and goes on can be the policy: no step waits for a server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from sinew_client import Policy, PolicySpec, RequestTimeout
from sinew_client.control import SettingsError, parse_handover, parse_rule
from sinew_client.control.defaults import REPLAN, stated
from sinew_client.control.motion import parse_motion
from sinew_client.control.run import Run, RunPlan, described
from sinew_client.form import Fitted

from lerobot_policy_sinew.rtc import LONGEST, refuse_unguided, said

logger = logging.getLogger(__name__)

HZ = 30.0  # control rate in Hz that is assumed if the policy does not state one
LONGEST_ANSWER = 2.0  # after this many seconds without an answer, a request has failed and is sent again


class _Body:
    """LeRobot's robot as Sinew's loop sees it: what it was shown in this step, what it is to do."""

    concurrent_hold = False

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.row: np.ndarray | None = None

    def observe(self) -> Mapping[str, Any]:
        return {**self.seen, "time": time.monotonic()}

    def act(self, row: np.ndarray) -> None:
        self.row = row

    def hold(self) -> None:
        self.row = None


class Ahead:
    """Plays an episode. handover, replan, motion, timeout: of the policy's configuration; seed: of the first noise.

    A step that has no row repeats the last one, or moves by nothing where rows are offsets, and the log says why; steps
    before the first row wait for it. Raises ValueError for settings that are none, or that do not fit the policy.
    """

    def __init__(
        self,
        backend: Policy,
        spec: PolicySpec,
        handover: str,
        replan: str,
        motion: str,
        timeout: float,
        session: str,
        seed: int,
    ):
        self._backend, self._spec, self._timeout = backend, spec, timeout
        self._fitted = Fitted(spec.to_dict())
        self._session, self._seed, self.asked = session, seed, 0
        policy, given = spec.to_dict(), {"kind": motion} if motion else None
        says = stated(policy)
        if given and says and says != given:
            raise ValueError(
                f"policy.motion: expected nothing, as the policy {spec.name[:LONGEST]} says that its actions are"
                f" {says['kind']}, got {motion}"
            )
        if not (given or says):
            raise ValueError(
                "policy.motion: expected absolute, for goal positions as LeRobot's arms take them, got nothing, and the"
                f" policy {spec.name[:LONGEST]} does not say what its actions are measured from, so nobody knows how a"
                " robot is held that waits for a chunk"
            )
        self._still = parse_motion(given or says).still(spec.action.dim)
        try:
            parse_rule(replan or REPLAN)
        except ValueError as error:
            raise ValueError(f"policy.replan: {error}") from None
        settings = {
            "hz": float(spec.control_hz or HZ),
            "handover": handover,
            "replan": replan or REPLAN,
            "motion": given,
            "deadline": min(timeout, LONGEST_ANSWER),
            "watchdog": False,
            "rest": "hold",  # LeRobot's own loop returns the robot to its start pose
        }
        try:
            self._plan = RunPlan.of(described(backend), _Body(), settings, prompt=None)
        except SettingsError as error:
            raise ValueError(str(error)) from None
        played = parse_handover(self._plan.choice.handover)
        if played.method == "rtc":
            kind = played.guidance or ("trained" if spec.committed_rows else "guided")
            refuse_unguided(
                spec, said(backend), kind, f"policy.handover: expected one without rtc, got {handover}"
            )
        self._settings = self._plan.settings
        logger.info("sinew: %s; asks by the rule %s", self._plan.choice, self._settings.replan)
        self.begin()

    def begin(self) -> None:
        """Begin an episode: no row, no answer and no observation of the one before counts any more."""
        if hasattr(self, "_loop"):
            self.close()
        self._body, self._number = _Body(), 0
        self._loop = Run(self._plan, lambda: self._ask, robot=self._body).loop
        self._last: np.ndarray | None = None
        self._held: float | None = None  # time since which the robot holds, seconds; None while it moves

    def close(self) -> None:
        """End the request under way; its answer goes nowhere."""
        self._loop.source.cancel()
        self._loop.close()

    def step(self, images: Mapping[str, np.ndarray], state: np.ndarray, prompt: str) -> np.ndarray:
        """Return the row of one control step, float32 [A].

        Raises Refused where the very first observation is refused, and RequestTimeout where there was no row for
        ``timeout`` seconds.
        """
        self._body.seen = {"images": dict(images), "state": state, "prompt": prompt}
        while True:
            self._loop.tick(self._number)
            self._number += 1
            if self._body.row is not None:
                self._held, self._last = None, self._body.row
                return self._last
            now = time.monotonic()
            self._held = now if self._held is None else self._held
            if now - self._held > self._timeout:
                raise RequestTimeout(f"the robot held for {self._timeout:g} s: {self._loop.reason}")
            if self._last is not None:
                return np.where(np.isnan(self._still), self._last, self._still).astype(np.float32)
            time.sleep(self._settings.period)

    def _ask(self, observation: Mapping[str, Any], limit: float) -> np.ndarray:
        given = {key: value for key, value in observation.items() if key != "time"}
        if self._seed >= 0:
            given["seed"] = self._seed + self.asked
        self.asked += 1
        actions = self._backend.infer({**given, "session": self._session}, timeout=limit).actions
        self._fitted.check(self._backend)
        return actions
