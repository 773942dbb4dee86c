"""Hold an engine against the reference over observations that the policy sees when it plays (``sinew validate``)."""

from __future__ import annotations

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


def kept_record(bundle: Path, parity: dict[str, Any], command: str, skipped: str = "") -> dict[str, Any]:
    """Return the record of a comparison, as :mod:`sinew.engine.proofs` keeps it. skipped: why no gate was played."""
    from sinew.engine.fingerprint import fingerprint

    return {
        "schema": SCHEMA,
        "bundle": str(bundle),
        "fingerprint": fingerprint(bundle),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017 - Python 3.10
        "sinew": __version__,
        "hardware": f"{machine.cpu_model()}, {platform.system()}",
        "command": command,
        "parity": parity,
        "gate": {"passed": True, "skipped": skipped},
        "passed": parity["passed"],
    }
