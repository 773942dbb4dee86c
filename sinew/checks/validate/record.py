"""Compare an engine with the reference over observations from a played task or a recording (``sinew validate``)."""

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
# The survey of deployment on edge GPUs, section 7, requires this share of the reference's success over paired episodes.
SUCCESS, EPISODES = 0.95, 100
REQUIRED = f"Required is {SUCCESS:g} of the reference's success over {EPISODES} paired episodes."


def compared(
    policy: Policy, reference: Policy, count: int, episodes: Episodes, records: Path | None = None
) -> dict[str, Any]:
    """Compare a policy with a reference over ``count`` observations.

    Args:
        policy: The policy.
        reference: The same policy in eager float32.
        count: Number of observations.
        episodes: Plays a task to get observations; see
            :func:`sinew.checks.validate.observations.observations`.
        records: A folder of recorded observations; None to play a task.

    Returns:
        The comparison as a JSON-ready dict.
    """
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
    """Build the record of a comparison in the form that :mod:`sinew.engine.proofs` stores.

    Args:
        bundle: The policy that was compared.
        parity: The result of :func:`compared`.
        command: The command that the user typed.
        gate: Verdict of the success gate (a test of the success rate); None if no gate was played.
        skipped: Why no gate was played.

    Returns:
        The record. ``passed`` is True if all required bounds are met. ``weaker`` has a sentence for each bound that
        was met only in a weaker form.
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
    """Return the verdict of a success gate (a test of the success rate on a task). If the gate played ``EPISODES`` or
    more, the policy must also reach ``SUCCESS`` of the reference's success.
    """
    wins, least = gate["wins"], math.ceil(SUCCESS * gate["recorded_wins"])
    if gate["episodes"] < EPISODES:
        return gate
    required = f"required are {least} wins, {SUCCESS:g} of the reference's {gate['recorded_wins']}"
    failed = f"fails: {wins} wins, {required}" if wins < least else required
    return {**gate, "passed": gate["passed"] and wins >= least, "text": f"{gate['text']}; {failed}"}


def weaker(parity: dict[str, Any], gate: dict[str, Any]) -> list[str]:
    """Return a sentence for each required bound that the policy has met only in a weaker form.

    Args:
        parity: The result of :func:`compared`.
        gate: Verdict of the success gate (a test of the success rate on a task).
    """
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
