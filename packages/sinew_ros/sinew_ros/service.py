"""The service ``GetActionChunk`` of ``sinew_msgs``: an observation in the request, a trajectory in the response."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from sinew_client import Client, ClientError, ServerError
from sinew_client.auth import key_from_environment

from sinew_ros import messages

logger = logging.getLogger(__name__)

NAME, KIND = "/sinew/get_action_chunk", "sinew_msgs/srv/GetActionChunk"


class ChunkService:
    """Answers the calls of the service one after another, with the chunks of a policy server.

    Args:
        server: Address of the server, for the native protocol.
        hz: Control rate; None uses the policy's rate.
        timeout: Time limit of each call, seconds.

    Raises:
        ClientError: No control rate is known, or the policy needs an observation history, which a call does not
            have.
    """

    def __init__(self, server: str, hz: float | None = None, timeout: float = 2.0):
        self._client = Client(server, timeout=timeout, api_key=key_from_environment())
        policy = self._client.metadata(timeout=10.0)["policy"]
        rate = hz or policy.get("control_hz")
        if not rate:
            raise ClientError("--hz: the policy states no control rate; pass --hz RATE")
        if int(policy.get("history") or 1) > 1:
            raise ClientError(
                "this policy needs an observation history, which a call does not have; use `sinew-ros run`"
            )
        self._period = 1.0 / float(rate)
        self._prompt = str(policy.get("default_prompt") or "")
        dim = int(policy["action"]["dim"])
        self._joints = list(policy["action"].get("names") or (str(index) for index in range(dim)))
        self.answered = self.failed = 0

    def answer(self, request: Any) -> dict[str, Any]:
        """Return the fields of the response to a call. An error is sent as a field of the response, because ROS
        services have no other way to report it.
        """
        try:
            response = self._answer(request)
            self.answered += 1
        except Exception as error:  # the caller waits for a response, whatever the error is
            self.failed += 1
            code = "" if isinstance(error, ServerError) else f" [{type(error).__name__}]"
            expected = isinstance(error, (ClientError, messages.Refused))
            logger.warning("a call was rejected: %s", error, exc_info=not expected)
            empty = {"header": messages.header(0.0), "joint_names": [], "points": []}
            response = {"error": f"{error}{code}", "trajectory": empty, "server_ms": 0.0}
        return response

    def close(self) -> None:
        self._client.close()

    def _answer(self, request: Any) -> dict[str, Any]:
        if len(request.cameras) != len(request.images):
            raise messages.Refused(
                f"cameras: expected one name for each of {len(request.images)} images, got {len(request.cameras)}"
            )
        frames = dict(zip(request.cameras, map(messages.compressed, request.images)))
        observation: dict[str, Any] = {
            "images": frames,
            "state": np.asarray(request.state, np.float32),
            "prompt": request.prompt or self._prompt,
        }
        if request.seed >= 0:
            observation["seed"] = int(request.seed)
        chunk = self._client.infer(observation)
        trajectory = messages.points(self._joints, chunk.actions.astype(np.float64), self._period)
        return {"error": "", "trajectory": trajectory, "server_ms": float(chunk.timing.server_ms)}
