"""The server addresses of a client: one or several, of which one is in use. This module opens no sockets."""

from __future__ import annotations

import logging
from typing import Iterator, Sequence

from sinew_client.errors import ClientError
from sinew_client.link import place_of
from sinew_client.protocol import split_address

logger = logging.getLogger("sinew_client")

# After one of these error codes, the client tries the next address, because this server accepts no more requests.
LEAVING = ("shutting_down", "unhealthy")
# A client with a single address waits between two attempts to connect. The pause doubles after each failed attempt.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0


class Addresses:
    """The server addresses of a client, in the order in which the client tries them. All servers have the same policy.

    Args:
        address: One address, or several addresses in the order in which they are tried.

    Attributes:
        all: The addresses without the policy's name.
        given: The addresses as the user wrote them.
        policy: Name of the policy at the servers; "" for each server's first policy.
        place: Index of the present address in ``all``.

    Raises:
        ClientError: There is no address, or the addresses name several policies.
    """

    def __init__(self, address: str | Sequence[str]):
        addresses = [split_address(each) for each in ([address] if isinstance(address, str) else address)]
        if len({policy for _, policy in addresses}) != 1:
            raise ClientError(
                f"address: expected one or more addresses, all with the same policy, got {address!r}"
            )
        self.all = tuple(each for each, _ in addresses)
        # `given` has the addresses as the user wrote them, with the policy's name. `all` has them without that name.
        self.given = (address,) if isinstance(address, str) else tuple(address)
        self.policy: str = addresses[0][1]
        self.place = 0
        self._places = [place_of(each) for each in self.all]

    def __len__(self) -> int:
        return len(self.all)

    @property
    def present(self) -> str:
        """The address that the client uses at present."""
        return self.all[self.place]

    @property
    def host_and_port(self) -> tuple:
        """The present address as a tuple for a socket (:func:`sinew_client.link.place_of`)."""
        return self._places[self.place]

    def move(self, place: int, why: str) -> bool:
        """Change to the next address after a failure, and log the reason.

        Args:
            place: Index of the address that failed.
            why: Reason of the failure, for the log.

        Returns:
            True if the address was changed. False if there is only one address, or if another thread has changed the
            address already.
        """
        if len(self.all) < 2 or place != self.place:
            return False
        before, self.place = self.present, (self.place + 1) % len(self.all)
        logger.warning("%s: %s; trying %s", before, why, self.present)
        return True


def pauses() -> Iterator[float]:
    """Yield the pause after each failed attempt to connect, in seconds: 0.1, 0.2, 0.4, 0.8, 1, 1 ..."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_S)
