"""The interface of all policies: a local bundle, a server, a recording, split inference, or a scripted expert.

:func:`sinew_client.connect` opens a policy of any kind.
"""

from __future__ import annotations

from typing import Any, Mapping, Protocol

from sinew_client.types import ActionChunk, Observation, PolicySpec


class Policy(Protocol):
    """A policy computes actions from observations. Use it in a ``with`` block, which closes the policy at its end."""

    @property
    def spec(self) -> PolicySpec:
        """Inputs and outputs of the policy. A client requests it from its server once per connection."""

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Compute the actions for one observation.

        Args:
            observation: An :class:`Observation`, or a dict with its fields.
            timeout: Seconds until RequestTimeout is raised. None takes the policy's own limit, or no limit. A policy
                in this process checks the time only between two stages of the inference.

        Returns:
            The action chunk.

        Raises:
            ObservationError: A field of the observation is wrong. A server reports it as ServerError with the code
                ``bad_observation``.
            RequestTimeout: There was no answer in time.
            ClosedError: The policy is closed.
        """

    def reset(self, session: str = "") -> None:
        """Begin a new episode.

        Args:
            session: Session of the robot, as in its observations.
        """

    def close(self) -> None:
        """Release connections and weights. Safe to call twice."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc_info: Any) -> None: ...
