"""Open policies that run in this process: bundles, checkpoints, hub names, recordings and split policies.

The entry point ``local`` of the group ``sinew.targets`` refers to this module (:mod:`sinew_client.target`).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sinew_client.policy import Policy

from sinew.core import SinewError


def open_local(source: Any, split: str | None = None, api_key: str = "", **options: Any) -> Policy:
    """Open a policy that runs in this process.

    Args:
        source: A folder of recordings, whose chunks are replayed in order, or any source that :func:`sinew.load`
            accepts.
        split: Address of a server that runs the vision tower and the prefix of the same bundle (``context.FORM``). Only
            the action head then runs in this process.
        api_key: API key of that server.
        **options: Options of :func:`sinew.load`. For a folder of recordings, options of
            :class:`sinew.serve.replay.Replay`.

    Returns:
        The open policy.

    Raises:
        SinewError: The policy cannot be opened.
    """
    if _is_recording(source):
        from sinew.serve.replay import Replay

        if split is not None:
            raise SinewError(f"{source}: a recording does not support the option split; omit split")
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
        split_policy = SplitPolicy(policy, client, whole=True)
        opened.pop_all()
    return split_policy


def _is_recording(source: Any) -> bool:
    """Return True if ``source`` is a folder of recordings, which ``sinew serve --record`` wrote."""
    path = Path(source)
    return path.is_dir() and next(path.glob("*.npz"), None) is not None
