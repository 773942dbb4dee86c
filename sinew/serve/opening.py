"""Open a policy that computes in this process, by what names it: the other half of :func:`sinew_client.connect`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sinew_client.policy import Policy

from sinew.core import SinewError

EXPERT = "expert:"  # before the name of an environment


def open_policy(source: Any, split: str | None = None, api_key: str = "", **options: Any) -> Policy:
    """Open what ``source`` names.

    source: ``expert:ENV``, the scripted expert of a simulated task; a folder of records, whose chunks are answered in
    their order (options: those of :class:`sinew.serve.replay.Replay`); else what :func:`sinew.load` takes.
    split: address of the server that computes vision and prefix of the same bundle (``context.FORM``); the head runs
    here. api_key: of that server. Raises SinewError.
    """
    if isinstance(source, str) and source.startswith(EXPERT):
        from sinew.sim.experts import open_expert

        _refuse(f"{source}: an expert", options, split)
        return open_expert(source[len(EXPERT) :])
    if _is_recording(source):
        from sinew.serve.replay import Replay

        _refuse(f"{source}: a recording", {}, split)
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


def _refuse(what: str, options: dict[str, Any], split: str | None) -> None:
    names = [*options, *(["split"] if split is not None else [])]
    if names:
        raise SinewError(f"{what} takes no option {names[0]}")
