"""What a policy is, wherever it computes: a bundle here, a server, one of several, a recording, two halves in two
places, an expert. :func:`sinew_client.connect` opens any of them.
"""

from __future__ import annotations

from typing import Any, Mapping, Protocol

from sinew_client.types import ActionChunk, Observation, PolicySpec


class Policy(Protocol):
    """Observation to actions. A context manager, which closes it."""

    @property
    def spec(self) -> PolicySpec:
        """What it reads and writes. A server is asked for it, once a connection."""

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Return the actions for one observation.

        timeout: seconds, after which RequestTimeout is raised; its own, or none, if absent. What computes here looks at
        the clock between two stages. Raises ObservationError, or a server's ``bad_observation``, that names a field
        which it cannot take, and ClosedError after :meth:`close`.
        """

    def reset(self, session: str = "") -> None:
        """Say that a new episode begins in ``session``."""

    def close(self) -> None:
        """Let go of what it holds: connections, weights. Once is enough; twice is no error."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc_info: Any) -> None: ...
