"""``sinew recording mcap`` and ``sinew recording rrd``: write a recording for Foxglove, PlotJuggler or Rerun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from sinew.cli import terminal
from sinew.cli.options import PositiveIfAny
from sinew.core import progress


@Parameter(name="*")
@dataclass(frozen=True)
class Named:
    """Facts that a recording does not contain.

    Attributes:
        bundle: Policy that gives the joints their names, and the control rate.
        hz: Control rate in Hz. Each action is shown at the time of its execution. Default: the bundle's rate.
            Without a rate, only the first action of each chunk is shown.
    """

    bundle: Path | None = None
    hz: PositiveIfAny = None

    def keywords(self) -> dict[str, Any]:
        """Return these options as arguments of the function that writes a recording."""
        from sinew.policy import open_bundle

        if self.bundle is None:
            return {"hz": self.hz}
        spec = open_bundle(self.bundle).manifest.spec
        return {"hz": self.hz or spec.control_hz, "state": spec.state, "action": spec.action}


NAMED = Named()


def mcap(records: Path, out: Path, /, *, named: Named = NAMED) -> int:
    """Write a recording of `sinew serve --record` as one MCAP file: pictures, states, actions, instructions and times.

    Args:
        records: Folder that --record wrote.
        out: File to write, for example OUT.mcap.
    """
    from sinew.records.viewers.mcap_file import write_mcap

    return _write(write_mcap, records, out, named, "messages")


def rrd(records: Path, out: Path, /, *, named: Named = NAMED) -> int:
    """Write a recording of `sinew serve --record` as one Rerun file: pictures, joints over time, latency and
    instructions.

    Args:
        records: Folder that --record wrote.
        out: File to write, for example OUT.rrd.
    """
    from sinew.records.viewers.rerun_records import write_rrd

    return _write(write_rrd, records, out, named, "entries")


def _write(write: Callable[..., dict[str, int]], records: Path, out: Path, named: Named, what: str) -> int:
    from sinew.records.recorder import read_records

    with progress.task(f"writing {out}"):
        counts = write(read_records(records), out, **named.keywords())
    console = terminal.console(markup=False)
    console.print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
    for name, count in counts.items():
        console.print(f"  {name}: {count}")
    terminal.emit({"file": str(out), "bytes": out.stat().st_size, what: counts})
    return 0
