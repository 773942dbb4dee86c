"""Connect a control loop to one of several servers, with a new connection after each failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinew_client.addresses import split_list
from sinew_client.client import Client
from sinew_client.control.frames import Frames
from sinew_client.control.settings import LARGEST_CHUNK
from sinew_client.errors import RequestTimeout
from sinew_client.form import TAKEN, Fitted
from sinew_client.policy import Policy
from sinew_client.protocol import MAX_ROWS


class Servers:
    """Opens connections to one of several servers, for a :class:`~sinew_client.control.requester.Requester`.

    A new connection first tries the server that answered last. So a lost server costs its time limit only once.

    Args:
        addresses: Addresses of the servers, as for :class:`Client`.
        api_key: Key of the servers.
        without: Fields of an observation that are not sent, such as ``time`` if the server has another clock.
        max_rows: Largest number of actions in an answer, as for :class:`Client`. None takes the chunk size in
            ``policy``, but at least 1,024 and at most 8,192.
        frames: Encoding of the frames.
        policy: Description of the policy. None takes the description of the first server that answers. Chunks of
            another policy are rejected.
        parts: Names of the parts of the description that must be equal (:func:`sinew_client.form.form`).

    Attributes:
        present: Address of the server that answered last; at the start, the first address.

    Example:
        >>> servers = Servers(["tcp://gpu1:5555", "tcp://gpu2:5555"])
        >>> loop = Loop(robot, servers, Settings(hz=30), dim=7)
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        api_key: str = "",
        without: Sequence[str] = (),
        max_rows: int | None = None,
        frames: Frames | None = None,
        policy: Mapping[str, Any] | None = None,
        parts: Sequence[str] = TAKEN,
    ):
        self.addresses = split_list(addresses)
        self._key, self._without = api_key, tuple(without)
        size = int((policy or {}).get("chunk_size") or 0)
        self._max_rows = max(MAX_ROWS, min(size, LARGEST_CHUNK)) if max_rows is None else max_rows
        self.frames = frames or Frames()
        self.fitted = Fitted(policy, parts)
        # The address of the server that answered last. Before the first answer, it is the first address.
        self.present = self.addresses[0]

    def __call__(self) -> Call:
        return Call(self)

    def client(self) -> Client:
        """Create a client that knows the addresses of all servers, and connects to the first server that answers."""
        return Client(self.addresses, api_key=self._key, max_rows=self._max_rows)

    def left_at(self, place: int) -> None:
        """Move the address with index ``place`` to the front, so that the next connection tries it first."""
        self.addresses = self.addresses[place:] + self.addresses[:place]
        self.present = self.addresses[0]

    def sent(self, observation: Mapping[str, Any]) -> dict:
        """Return an observation without the fields that are not sent."""
        return {name: value for name, value in observation.items() if name not in self._without}


class PolicyCall:
    """A connection to any open policy. Calling it with (observation, seconds) returns actions, float32 [H, D]."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def __call__(self, observation: Mapping[str, Any], limit: float) -> np.ndarray:
        return self.policy.infer(observation, timeout=limit).actions

    def close(self) -> None:
        self.policy.close()


class Call(PolicyCall):
    """A connection to one of several servers: the first server that answers."""

    policy: Client

    def __init__(self, servers: Servers):
        super().__init__(servers.client())
        self._servers, self._places = servers, tuple(servers.addresses)

    def __call__(self, observation: Mapping[str, Any], limit: float) -> np.ndarray:
        frames = self._servers.frames
        self.policy.jpeg_quality = frames.quality
        try:
            chunk = self.policy.infer(self._servers.sent(observation), timeout=limit)
        except RequestTimeout:
            frames.took(1e3 * limit)
            raise
        self._servers.fitted.check(self.policy)
        self._servers.present = self._places[self.policy.place]
        frames.took(max(0.0, chunk.round_trip_ms - chunk.timing.server_ms))
        return chunk.actions

    def close(self) -> None:
        self._servers.left_at(self.policy.place)
        super().close()
