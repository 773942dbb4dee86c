"""Hold an engine against the reference over observations that the policy sees when it plays (``sinew validate``)."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinew import __version__
from sinew.core import Observation, machine, progress

if TYPE_CHECKING:
    from sinew.checks.validate.observations import Episodes
    from sinew.policy import Policy

SCHEMA = "sinew.validate/1"
# Of the survey of deployment on edge GPUs, section 7: the success that a policy has to keep, over paired episodes.
SUCCESS, EPISODES = 0.95, 100
REQUIRED = f"Required is {SUCCESS:g} of the reference's success over {EPISODES} paired episodes."


def compared(
    policy: Policy, reference: Policy, count: int, episodes: Episodes, records: Path | None = None
) -> dict[str, Any]:
    """Compare over ``count`` observations and return the comparison, ready for JSON. episodes, records: where
    observations come from (:func:`sinew.checks.validate.observations.observations`)."""
    from sinew.checks.validate.observations import observations
    from sinew.checks.validate.parity import compare, report

    source, stream = observations(reference, records, episodes)
    with progress.task(f"comparing with eager fp32: {source}", count) as advance:

        def counted() -> Iterator[Observation]:
            for observation in islice(stream, count):
                yield observation
                advance("")

        return dict(report(policy, compare(policy, reference, counted()), source))


def kept_record(
    bundle: Path, parity: dict[str, Any], command: str, gate: dict[str, Any] | None = None, skipped: str = ""
) -> dict[str, Any]:
    """Return the record of a comparison, as :mod:`sinew.engine.proofs` keeps it.

    Args:
        bundle: The policy that was compared.
        parity: Of :func:`compared`.
        command: What the user typed.
        gate: Verdict of the success gate, if one was played.
        skipped: Why no gate was played.

    Returns:
        The record. ``passed``: all required bounds hold. ``weaker``: each bound that was only passed in a weaker form,
        in words.
    """
    from sinew.engine.fingerprint import fingerprint

    gate = as_required(gate) if gate is not None else {"passed": True, "skipped": skipped}
    return {
        "schema": SCHEMA,
        "bundle": str(bundle),
        "fingerprint": fingerprint(bundle),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017 - Python 3.10
        "sinew": __version__,
        "hardware": f"{machine.cpu_model()}, {platform.system()}",
        "command": command,
        "parity": parity,
        "gate": gate,
        "passed": parity["passed"] and gate["passed"],
        "weaker": weaker(parity, gate),
    }


def as_required(gate: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict of a success gate that was played, held to ``SUCCESS`` of the reference's success as well if
    it played ``EPISODES`` or more."""
    wins, least = gate["wins"], math.ceil(SUCCESS * gate["recorded_wins"])
    if gate["episodes"] < EPISODES:
        return gate
    required = f"required are {least} wins, {SUCCESS:g} of the reference's {gate['recorded_wins']}"
    failed = f"fails: {wins} wins, {required}" if wins < least else required
    return {**gate, "passed": gate["passed"] and wins >= least, "text": f"{gate['text']}; {failed}"}


def weaker(parity: dict[str, Any], gate: dict[str, Any]) -> list[str]:
    """Return, in words, each bound that the policy passed only in a weaker form than the required one."""
    from sinew.checks.validate.parity import COSINE, LARGEST

    lines = []
    beyond = [stage for stage in parity["stages"] if stage["passed"] and not stage["as_float32"]]
    if beyond:
        bounds = ", ".join(f"{stage['name']} {stage['bound']:.0e}" for stage in beyond)
        lines.append(
            f"weaker bound: relative L2 of {parity['precision']} ({bounds}). Float32 has to reach 1 - cosine"
            f" {COSINE:.0e}, and actions within {LARGEST:.0e}."
        )
    if "skipped" in gate:
        lines.append(f"weaker bound: success was {gate['skipped']}. {REQUIRED}")
    elif gate["passed"] and gate["episodes"] < EPISODES:
        lines.append(f"weaker bound: the success gate over {gate['episodes']} episodes. {REQUIRED}")
    return lines
