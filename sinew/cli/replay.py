"""``sinew client --replay``: recorded requests once more, and whether the server answers as it did then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from sinew_client import Client, ServerError
from sinew_client.control import repeat, watched
from sinew_client.protocol import CONTINUATION_KEYS

from sinew import __version__
from sinew.cli import terminal
from sinew.core import Observation
from sinew.serve.recorder import Record

SCHEMA = "sinew.replay/1"


def replay_journal(path: Path) -> dict[str, Any]:
    """Repeat the decisions of a ``sinew run --record`` file; no server is asked."""
    found = repeat(path)
    console = terminal.console()
    for line in found.differences[:20]:
        console.print(line, soft_wrap=True)
    differ = len(found.differences)
    console.print(f"{found.commands} decisions repeated ({found.held} holds), {differ} differ")
    result = {"schema": SCHEMA, "commands": found.commands, "held": found.held, "differ": differ}
    if (fit := watched(path)) is not None:
        console.print(fit.advice(), soft_wrap=True, markup=False)
        result["motion"] = asdict(fit)
    return result


def replay_records(server: Client, records: Iterable[Record], deadline_ms: float | None) -> dict[str, Any]:
    """Send every record, oldest first. The seed that drew the noise is in the record, so the same
    bundle, device and dtype give the same actions, bit for bit.

    An error that the server answers is a result.
    """
    rows = [_replay(server, record, deadline_ms) for record in records]
    counts = {
        name: sum(row["result"] == name for row in rows) for name in ("equal", "differ", "error", "new")
    }
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sinew": __version__,
        "records": len(rows),
        **counts,
        "rows": rows,
    }


def _replay(server: Client, record: Record, deadline_ms: float | None) -> dict[str, Any]:
    """result: equal or differ; error: the server answers with one; new: there was an error then, and none now."""
    row: dict[str, Any] = {"file": record.path.name, "wire": record.wire, "then": record.error or "actions"}
    try:
        chunk = server.infer(as_mapping(record.observation, deadline_ms))
    except ServerError as error:
        return row | {"result": "error", "now": str(error)}
    row |= {"round_trip_ms": round(chunk.round_trip_ms, 3)}
    if record.actions is None:
        return row | {"result": "new"}
    if chunk.actions.shape != record.actions.shape:
        shapes = f"shape {list(chunk.actions.shape)}, recorded {list(record.actions.shape)}"
        return row | {"result": "differ", "now": shapes}
    if np.array_equal(chunk.actions, record.actions):
        return row | {"result": "equal"}
    return row | {
        "result": "differ",
        "max_abs_difference": float(np.abs(chunk.actions - record.actions).max()),
    }


def as_mapping(observation: Observation, deadline_ms: float | None) -> dict[str, Any]:
    """For ``Client.infer``. Without the session: nothing else waits that a replayed request could replace."""
    names = (
        "images",
        "state",
        "prompt",
        "tokens",
        "noise",
        "solver_steps",
        "time",
        "previous",
        *CONTINUATION_KEYS,
    )
    found = {name: getattr(observation, name) for name in names}
    found["seed"] = None if observation.noise is not None else observation.seed
    return {**found, "deadline_ms": deadline_ms}


def print_replay(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['records']} records replayed at {result['address']}")
    for name in ("record", "wire", "then", "now"):
        table.add_column(name, overflow="fold")
    for row in result["rows"]:
        if row["result"] == "equal":
            continue
        worst = row.get("max_abs_difference")
        now = row.get("now") or (f"differs by up to {worst:.3g}" if worst is not None else "actions")
        table.add_row(row["file"], row["wire"], row["then"], now)
    console = terminal.console()
    if table.row_count:
        console.print(table)
    console.print(
        f"{result['records']} records: {result['equal']} equal, {result['differ']} differ,"
        f" {result['error']} answered with an error, {result['new']} that had failed gave actions",
        highlight=False,
        soft_wrap=True,
    )
