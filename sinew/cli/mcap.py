"""``sinew mcap`` and ``sinew rrd``: a recording for people, in Foxglove, PlotJuggler or Rerun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators

from sinew import progress
from sinew.cli import terminal

Rate = Annotated[float | None, Parameter(validator=validators.Number(gt=0))]


def mcap(records: Path, out: Path, /, *, bundle: Path | None = None, hz: Rate = None) -> int:
    """Write what `sinew serve --record` kept as one MCAP file: pictures, states, actions, instructions, times.

    Args:
        records: the folder that --record wrote.
        out: the file to write, OUT.mcap.
        bundle: of the policy; gives the joints their names, and the rate.
        hz: control rate: every row of a chunk is shown when it would be executed; the bundle's if absent, and the
            first rows alone where that has none.
    """
    from sinew.records.mcap_file import write_mcap

    return _write(write_mcap, records, out, bundle, hz, "messages")


def rrd(records: Path, out: Path, /, *, bundle: Path | None = None, hz: Rate = None) -> int:
    """Write what `sinew serve --record` kept as one Rerun recording: pictures, joints over time, latency, instructions.

    Args:
        records: the folder that --record wrote.
        out: the file to write, OUT.rrd.
        bundle: of the policy; gives the joints their names, and the rate.
        hz: control rate: every row of a chunk is shown when it would be executed; the bundle's if absent, and the
            first rows alone where that has none.
    """
    from sinew.records.rerun_records import write_rrd

    return _write(write_rrd, records, out, bundle, hz, "entries")


def _write(
    write: Callable[..., dict[str, int]],
    records: Path,
    out: Path,
    bundle: Path | None,
    hz: float | None,
    what: str,
) -> int:
    from sinew.policy import open_bundle
    from sinew.records.recorder import read_records

    spec: Any = None if bundle is None else open_bundle(bundle).manifest.spec
    with progress.task(f"writing {out}"):
        counts = write(
            read_records(records),
            out,
            hz=hz or (None if spec is None else spec.control_hz),
            state=None if spec is None else spec.state,
            action=None if spec is None else spec.action,
        )
    console = terminal.console(markup=False)
    console.print(f"{out}: {out.stat().st_size / 1e6:.2f} MB", soft_wrap=True)
    for name, count in counts.items():
        console.print(f"  {name}: {count}")
    terminal.emit({"file": str(out), "bytes": out.stat().st_size, what: counts})
    return 0
