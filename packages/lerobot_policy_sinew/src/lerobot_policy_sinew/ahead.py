"""Request chunks in advance inside LeRobot: run Sinew's control loop, with one tick per control step of LeRobot.

LeRobot has only the inference engines ``sync`` and ``rtc``, and a plugin cannot add another one. The engine ``sync``
calls the policy in every control step. So the policy itself can run Sinew's loop, which requests the next chunk in
time and holds the robot without actions. No control step waits for a server.
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
    """A substitute for the robot in Sinew's loop. It passes LeRobot's observation to the loop, and stores the loop's
    command for LeRobot.

    Attributes:
        seen: The observation of the present control step.
        row: The command of the present control step, float32 [A]; None if the robot must hold.
    """

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
    """Runs Sinew's control loop inside LeRobot's loop.

    If a control step has no action, the last action is repeated. Delta actions are then 0. The log states the reason.
    The first control step waits until the first action has arrived.

    Args:
        backend: The open policy.
        spec: The specification of the policy.
        handover: The method of chunk merging, such as "auto".
        replan: The rule for the next request; "" for the default.
        motion: "absolute", or "" for the policy's own motion.
        timeout: Seconds that the robot may hold before RequestTimeout is raised.
        session: Session of the requests.
        seed: Seed of the first chunk's noise, which grows by one per chunk. A negative number lets the policy choose.

    Attributes:
        asked: Number of requests so far.

    Raises:
        ValueError: A setting is not valid, or does not fit the policy.
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
        policy, user_motion = spec.to_dict(), {"kind": motion} if motion else None
        says = stated(policy)
        if user_motion and says and says != user_motion:
            raise ValueError(
                f"policy.motion: the policy {spec.name[:LONGEST]} states that its actions are {says['kind']}, got"
                f" {motion}; omit --policy.motion"
            )
        if not (user_motion or says):
            raise ValueError(
                f"policy.motion: the policy {spec.name[:LONGEST]} does not state what its actions are relative to, so"
                " it is unknown how to hold the robot while it waits for a chunk. If actions are goal positions, as for"
                " LeRobot's arms, pass --policy.motion=absolute"
            )
        self._still = parse_motion(user_motion or says).still(spec.action.dim)
        try:
            parse_rule(replan or REPLAN)
        except ValueError as error:
            raise ValueError(f"policy.replan: {error}") from None
        settings = {
            "hz": float(spec.control_hz or HZ),
            "handover": handover,
            "replan": replan or REPLAN,
            "motion": user_motion,
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
                spec,
                said(backend),
                kind,
                f"policy.handover: expected a method other than rtc, got {handover}",
            )
        self._settings = self._plan.settings
        logger.info("sinew: %s; rule for the next request: %s", self._plan.choice, self._settings.replan)
        self.begin()

    def begin(self) -> None:
        """Begin an episode. Actions, answers and observations of the last episode are dropped."""
        if hasattr(self, "_loop"):
            self.close()
        self._body, self._number = _Body(), 0
        self._loop = Run(self._plan, lambda: self._ask, robot=self._body).loop
        self._last: np.ndarray | None = None
        self._held: float | None = None  # time since which the robot holds, seconds; None while it moves

    def close(self) -> None:
        """Cancel the request in progress, and drop its answer."""
        self._loop.source.cancel()
        self._loop.close()

    def step(self, images: Mapping[str, np.ndarray], state: np.ndarray, prompt: str) -> np.ndarray:
        """Return the action of one control step.

        Args:
            images: Frame of each camera, uint8 [height, width, 3].
            state: State of the robot, float [S].
            prompt: The instruction.

        Returns:
            The action, float32 [A].

        Raises:
            Refused: The policy rejects the first observation.
            RequestTimeout: There was no action for ``timeout`` seconds.
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
        fields = {key: value for key, value in observation.items() if key != "time"}
        if self._seed >= 0:
            fields["seed"] = self._seed + self.asked
        self.asked += 1
        actions = self._backend.infer({**fields, "session": self._session}, timeout=limit).actions
        self._fitted.check(self._backend)
        return actions
