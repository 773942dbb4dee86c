"""``sinew recording replay``: repeat recorded requests or decisions, and compare the results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text
from sinew_client import Client
from sinew_client.auth import api_key_of
from sinew_client.control import is_journal, repeat, watched
from sinew_client.documentation import page

from sinew.cli import terminal
from sinew.cli.options import PositiveIfAny
from sinew.core import SinewError
from sinew.records.comparison import replay_records
from sinew.records.recorder import read_records

SHOWN = 20  # the table has at most this many rows


def replay(
    recording: Path,
    address: str | None = None,
    /,
    *,
    timeout: PositiveIfAny = None,
    deadline_ms: PositiveIfAny = None,
    api_key_file: Path | None = None,
) -> int:
    """Send a recording of `sinew serve --record` to a server again, or repeat the decisions of a robot's decision log.

    Sinew compares the actions with the recorded ones. They must be equal in every bit if the server computes as it
    did then. Otherwise a tolerance applies, which is printed. Commands of a decision log are compared in the same
    way. The exit status is 1 if a difference exceeds the tolerance, or if a decision differs.

    Args:
        recording: Folder of records, or a decision log of `sinew run --record`. A decision log needs no
            server.
        address: Address of the server. Default: tcp://127.0.0.1:5555.
        timeout: Seconds to wait for each answer. Default: 60.
        deadline_ms: The server rejects a request that would begin later than this after its arrival, in
            milliseconds.
        api_key_file: File with the server's key. Default: SINEW_API_KEY in the environment.
    """
    if is_journal(recording):
        options = {
            "address": address, "--timeout": timeout, "--deadline-ms": deadline_ms, "--api-key-file": api_key_file,
        }  # fmt: skip
        if (flag := next((name for name, value in options.items() if value is not None), None)) is not None:
            raise SinewError(
                f"{flag}: expected none, because the decision log {recording} needs no server; omit this flag"
            )
        result = replay_journal(recording)
        terminal.emit(result)
        return 0 if result["differ"] == 0 else 1
    key, address = api_key_of(api_key_file), address or "tcp://127.0.0.1:5555"
    records = read_records(recording)
    with Client(address, timeout=timeout or 60.0, api_key=key) as server:
        about = server.metadata()["server"]
        result = replay_records(server, records, deadline_ms)
    result |= {"command": terminal.typed(), "address": address, "server": about}
    print_replay(result)
    terminal.emit(result)
    return 0 if result["beyond"] == result["lost"] == 0 else 1


def replay_journal(path: Path) -> dict[str, Any]:
    """Repeat the decisions of a decision log (``sinew run --record``), without a server. Return the result."""
    repeated = repeat(path)
    console = terminal.console()
    for line in repeated.differences[:20]:
        console.print(line)
    differ = len(repeated.differences)
    torn = (
        "; the last line is incomplete (the process was killed, or the disk was full)"
        if repeated.torn
        else ""
    )
    rounded = (
        f", {repeated.rounded} differ only in their last digits, because another machine wrote the decision log"
        if repeated.rounded
        else ""
    )
    console.print(
        f"{repeated.commands} decisions repeated ({repeated.held} holds), {differ} differ{rounded}{torn}"
    )
    for move in repeated.abrupt:
        text = "step {step} ({seconds:.2f} s): {joint} changes by {change:+.3g}, {times:.1f} times its usual: {why}"
        console.print(text.format(**move), markup=False)
    result = {
        "schema": "sinew.replay/1",
        "commands": repeated.commands,
        "held": repeated.held,
        "differ": differ,
    }
    result["rounded"] = repeated.rounded
    result |= {"torn": repeated.torn, "abrupt": list(repeated.abrupt)}
    if (fit := watched(path)) is not None:
        console.print(fit.advice(), markup=False)
        result["motion"] = asdict(fit)
    return result


def print_replay(result: dict[str, Any]) -> None:
    title = f"{result['records']} records replayed at {result['address']}"
    table = terminal.table(title, "record", "wire", "then", "now")
    notable = [row for row in result["rows"] if row["result"] in ("beyond", "new", "error")]
    for row in notable[:SHOWN]:
        now = row.get("now") or (f"differs by {_where(row)}" if "difference" in row else "actions")
        # Text instead of str, because an error contains its code in brackets, which rich would read as markup.
        table.add_row(row["file"], row["wire"], Text(row["then"]), Text(now))
    console = terminal.console()
    if table.row_count:
        console.print(table)
    lines = [f"and {len(notable) - SHOWN} more: --json has all"] if len(notable) > SHOWN else []
    if result["unlike"]:
        tolerance, count = result["tolerance"], result["records"]
        changes = "; ".join(f"{text} ({n} of {count})" for text, n in result["unlike"].items())
        lines.append(f"the conditions of the recording have changed: {changes}")
        lines.append(
            f"so the tolerance is {tolerance['of']:.2g} of each action's scale, for sums in another order in"
            f" {tolerance['precision']} (see {page('recordings')})"
        )
    else:
        lines.append(
            "computed under the recorded conditions (engine, threads, precision, machine, versions): every bit must be"
            " equal"
        )
    worst = result["largest"]
    largest = f" (largest {_where(worst)} of {worst['file']})" if worst else ""
    lines.append(
        f"{result['records']} records: {result['equal']} equal to the bit, {result['within']} within the tolerance,"
        f" {result['beyond']} beyond{largest}; {result['error']} answered with an error,"
        f" {result['new']} that had failed gave actions"
        + (f"; {result['unkept']} not sent: records contain no contexts" if result["unkept"] else "")
    )
    console.print("\n".join(lines), markup=False)


def _where(row: dict[str, Any]) -> str:
    return f"{row['difference']:.3g}, {row['of_scale']:.2g} of the scale, in row {row['row']}, joint {row['joint']}"
