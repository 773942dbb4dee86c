"""Open what a person names and this package computes: bundles, checkpoints, hub names, recordings, split policies.

The entry point ``local`` of the group ``sinew.targets`` leads here (:mod:`sinew_client.target`).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sinew_client.policy import Policy

from sinew.core import SinewError


def open_local(source: Any, split: str | None = None, api_key: str = "", **options: Any) -> Policy:
    """Open a policy that computes in this process.

    Args:
        source: A folder of recordings, whose chunks are answered in their order (options: those of
            :class:`sinew.serve.replay.Replay`), or anything that :func:`sinew.load` takes.
        split: Address of the server that computes vision and prefix of the same bundle (``context.FORM``). The head
            then runs here.
        api_key: Key of that server.
        **options: Of :func:`sinew.load`.

    Raises:
        SinewError: The policy cannot be opened.
    """
    if _is_recording(source):
        from sinew.serve.replay import Replay

        if split is not None:
            raise SinewError(f"{source}: a recording takes no option split")
        return Replay(Path(source), **options)
    from sinew.policy import load

    policy = load(source, **options)
    if split is None:
        return policy
    from sinew_client import Client

    from sinew.stream.split import SplitPolicy

    with ExitStack() as opened:
        opened.callback(policy.close)
        client = opened.enter_context(Client(split, api_key=api_key))
        found = SplitPolicy(policy, client, whole=True)
        opened.pop_all()
    return found


def _is_recording(source: Any) -> bool:
    """Return True for a folder of what ``sinew serve --record`` wrote."""
    path = Path(source)
    return path.is_dir() and next(path.glob("*.npz"), None) is not None
