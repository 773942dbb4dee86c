"""``sinew mcap``: a recording for people, in Foxglove or PlotJuggler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from sinew import progress
from sinew.cli import terminal


def mcap(
    records: Path,
    out: Path,
    /,
    *,
    bundle: Path | None = None,
    hz: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
) -> int:
    """Write what `sinew serve --record` kept as one MCAP file: pictures, states, actions, instructions, times.

    Args:
        records: the folder that --record wrote.
        out: the file to write, OUT.mcap.
        bundle: of the policy; gives the joints their names, and the rate.
        hz: control rate: every row of a chunk is shown when it would be executed; the bundle's if absent, and the
            first rows alone where that has none.
    """
    from sinew.policy import open_bundle
    from sinew.serve.mcap_file import write_mcap
    from sinew.serve.recorder import read_records

    spec = None if bundle is None else open_bundle(bundle).manifest.spec
    with progress.task(f"writing {out}"):
        counts = write_mcap(
            read_records(records),
            out,
            hz=hz or (None if spec is None else spec.control_hz),
            state=None if spec is None else spec.state,
            action=None if spec is None else spec.action,
        )
    console = terminal.console(markup=False)
    console.print(f"{out}: {out.stat().st_size / 1e6:.2f} MB", soft_wrap=True)
    for topic, count in counts.items():
        console.print(f"  {topic}: {count}")
    terminal.emit({"file": str(out), "bytes": out.stat().st_size, "messages": counts})
    return 0
