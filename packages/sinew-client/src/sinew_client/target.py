"""Parse the text with which a user names a policy, and open the policy.

========================  ==============================================================
text                      kind
========================  ==============================================================
``tcp://host:port``       ``address``: a server; ``tls://``, ``ipc://`` and a list ``A,B`` as well
``vla-eval://host:port``  ``model-server``: a model server of another project
``expert``                ``expert``: the scripted expert of a simulated task
``expert:ENV``            ``expert``: the scripted expert of this environment
anything else             ``local``: a bundle, a checkpoint, a hub name or recordings
========================  ==============================================================

This package can open only addresses. For all other kinds, another package must be installed that has an entry point
``sinew.targets`` with the name of the kind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Sequence

from sinew_client.addresses import split_list, split_scheme
from sinew_client.errors import ClientError
from sinew_client.policy import Policy
from sinew_client.untrusted import named

ADDRESS, MODEL_SERVER, EXPERT, LOCAL = "address", "model-server", "expert", "local"
# An entry point of this group has the name of a kind. It is a function (place, **options) that returns an open policy.
GROUP = "sinew.targets"
# Schemes of the texts that do not name a server of Sinew.
_MODEL_SERVER, _HUB = "vla-eval", "hf"


@dataclass(frozen=True)
class Target:
    """The policy that a text names.

    Attributes:
        kind: "address", "model-server", "expert" or "local".
        text: The text as the user wrote it. Several addresses are joined by commas.
        place: The text without the prefix of its kind, such as ``vla-eval://``.
    """

    kind: str
    text: str
    place: str

    @classmethod
    def parse(cls, source: Any) -> Target:
        """Parse a text, a path or a list of addresses. This opens no file and no connection.

        Args:
            source: The text, path or list.

        Returns:
            The target.

        Raises:
            ClientError: A list contains something that is not an address.
        """
        if isinstance(source, (list, tuple)):
            parts = [cls.parse(each) for each in source]
            if not parts or any(part.kind != ADDRESS for part in parts):
                raise ClientError(f"policy: expected a list of addresses, got {named(source)}")
            text = ",".join(part.text for part in parts)
            return cls(ADDRESS, text, text)
        text = os.fspath(source)
        scheme, rest = split_scheme(text)
        if scheme == _MODEL_SERVER:
            return cls(MODEL_SERVER, text, rest)
        if scheme and scheme != _HUB:
            return cls(ADDRESS, text, text)
        if text == EXPERT or text.startswith(f"{EXPERT}:"):
            return cls(EXPERT, text, text[len(EXPERT) + 1 :])
        return cls(LOCAL, text, text)

    @property
    def remote(self) -> bool:
        """True if another process computes the actions: a Sinew server, or a model server of another project."""
        return self.kind in (ADDRESS, MODEL_SERVER)

    @property
    def addresses(self) -> list[str]:
        """Addresses of the servers in the order in which they are tried; [] if the target is no server."""
        return split_list(self.place) if self.kind == ADDRESS else []

    def open(self, **options: Any) -> Policy:
        """Open the policy.

        Args:
            **options: Arguments of :class:`sinew_client.Client` for an address, else arguments of the kind's opener,
                such as :func:`sinew.load`.

        Returns:
            The open policy. Close it, or use it in a ``with`` block.

        Raises:
            SinewError: The policy cannot be opened, or the package that opens this kind is not installed.
        """
        if self.kind == ADDRESS:
            from sinew_client.client import Client

            return Client(self.addresses, **options)
        opener = _opener(self.kind)
        if opener is None:
            if self.kind == MODEL_SERVER:
                raise ClientError(
                    f"{named(self.text)}: only `sinew eval` supports model servers of other projects"
                )
            package = "sinew-vla-eval" if self.kind == EXPERT else "sinew-vla"
            raise ClientError(
                f"{named(self.text)}: expected tcp://HOST:PORT; to open anything else, install the package {package}"
            )
        policy: Policy = opener(self.place, **options)
        return policy


def _opener(kind: str) -> Any:
    """Find the function that opens a kind of policy; None if no installed package has such a function."""
    points = metadata.entry_points()
    # Before Python 3.10, entry_points() returns a dict from the groups to their entry points.
    group = points.select(group=GROUP) if hasattr(points, "select") else points.get(GROUP, ())
    return next((point.load() for point in group if point.name == kind), None)


def addresses_of(source: Any) -> list[str]:
    """Return the addresses of servers that a source names; [] for anything else, such as a bundle or an open policy."""
    if not isinstance(source, (str, list, tuple)):
        return []
    try:
        return Target.parse(source).addresses
    except (ClientError, TypeError):
        return []


def connect(source: str | os.PathLike | Sequence[str], **options: Any) -> Policy:
    """Open the policy that a text names.

    Args:
        source: The address of a server, or a list of addresses, which are tried in order. With the package sinew-vla,
            it may also be a bundle, a checkpoint, a hub name, a folder of recordings, or ``expert:ENV``.
        **options: Arguments of :class:`sinew_client.Client` for an address, else arguments of the kind's opener, such
            as :func:`sinew.load`.

    Returns:
        The open policy. Close it, or use it in a ``with`` block.

    Raises:
        SinewError: The policy cannot be opened.

    Example:
        >>> with sinew_client.connect("tcp://server:5555") as policy:
        ...     chunk = policy.infer(observation)
    """
    return Target.parse(source).open(**options)
