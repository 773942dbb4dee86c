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
from sinew_client.protocol import CONDITION_KEYS, CONTINUATION_KEYS
from sinew_client.types import WORDS

from sinew import __version__
from sinew.cli import terminal
from sinew.core import Observation
from sinew.records import arithmetic
from sinew.records.recorder import Record

SCHEMA = "sinew.replay/2"
JOURNAL_SCHEMA = "sinew.replay/1"
RESULTS = ("equal", "within", "beyond", "error", "new")
UNSAID = "the records do not say how they were computed (an older sinew wrote them)"
SHOWN = 20  # rows of the table


def replay_journal(path: Path) -> dict[str, Any]:
    """Repeat the decisions of a ``sinew run --record`` file; no server is asked."""
    found = repeat(path)
    console = terminal.console()
    for line in found.differences[:20]:
        console.print(line, soft_wrap=True)
    differ = len(found.differences)
    console.print(f"{found.commands} decisions repeated ({found.held} holds), {differ} differ")
    result = {"schema": JOURNAL_SCHEMA, "commands": found.commands, "held": found.held, "differ": differ}
    if (fit := watched(path)) is not None:
        console.print(fit.advice(), soft_wrap=True, markup=False)
        result["motion"] = asdict(fit)
    return result


def replay_records(server: Client, records: Iterable[Record], deadline_ms: float | None) -> dict[str, Any]:
    """Send every record, oldest first, and compare each answer with the recorded one.

    The seed that drew the noise is in the record. Where all that decides the bits is the same now as then
    (:data:`sinew.records.arithmetic.KEYS`), so must be the actions; else each may differ by
    :func:`sinew.records.arithmetic.tolerance` times its own scale in the policy's statistics. An error that the server
    answers is a result.
    """
    metadata = server.metadata()
    now = arithmetic.kept(metadata["server"])
    action = metadata["policy"]["action"]
    rows: list[dict[str, Any]] = []
    unlike: dict[str, int] = {}
    allowed: dict[str, Any] = {"of": 0.0, "precision": ""}
    for record in records:
        differences = arithmetic.unlike(record.server, now) if record.server else [UNSAID]
        size, precision = arithmetic.tolerance(record.server, now) if differences else (0.0, "")
        if size > allowed["of"]:
            allowed = {"of": size, "precision": precision}
        for text in differences:
            unlike[text] = unlike.get(text, 0) + 1
        rows.append(_replay(server, record, deadline_ms, action, size))
    counts = {name: sum(row["result"] == name for row in rows) for name in RESULTS}
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sinew": __version__,
        "records": len(rows),
        **counts,
        "lost": sum(row["result"] == "error" and row["then"] in ("actions", "text") for row in rows),
        "tolerance": allowed,
        "unlike": unlike,
        "largest": max((row for row in rows if "difference" in row), key=_size, default=None),
        "rows": rows,
    }


def _replay(
    server: Client, record: Record, deadline_ms: float | None, action: dict[str, Any], size: float
) -> dict[str, Any]:
    """Return a row. result: equal; within: the tolerance; beyond: it; error: the server answers with one; new: there
    was an error then, and none now.

    action: of the policy's metadata. size: the tolerance, in units of the model's output.
    """
    then = record.error or ("text" if record.actions is None else "actions")
    row: dict[str, Any] = {"file": record.path.name, "wire": record.wire, "then": then}
    try:
        chunk = server.infer(as_mapping(record.observation, deadline_ms))
    except ServerError as error:
        return row | {"result": "error", "now": str(error)}
    row |= {"round_trip_ms": round(chunk.round_trip_ms, 3)}
    if record.error:
        return row | {"result": "new"}
    if chunk.text != record.text:
        return row | {"result": "beyond", "now": f"{chunk.text!r:.80}, recorded {record.text!r:.80}"}
    if record.actions is None:
        return row | {"result": "equal"}
    if chunk.actions.shape != record.actions.shape:
        shapes = f"shape {list(chunk.actions.shape)}, recorded {list(record.actions.shape)}"
        return row | {"result": "beyond", "now": shapes}
    if np.array_equal(chunk.actions, record.actions):
        return row | {"result": "equal"}
    return row | _difference(chunk.actions, record.actions, action, size)


def _difference(got: np.ndarray, recorded: np.ndarray, action: dict[str, Any], size: float) -> dict[str, Any]:
    """Return where two chunks [H, D] differ most by the scale of each action, and whether that is within ``size``.

    A server that does not state a scale, or none of an action, has the largest recorded number of it in its place.
    """
    stated = action.get("scale") or [None] * recorded.shape[1]
    largest = np.abs(recorded).max(axis=0)  # [D]
    scale = np.array([given or own or 1.0 for given, own in zip(stated, largest, strict=True)], np.float64)
    difference = np.abs(got.astype(np.float64) - recorded)
    shares = difference / scale
    step, joint = (int(index) for index in np.unravel_index(shares.argmax(), shares.shape))
    names = action.get("names") or [str(index) for index in range(recorded.shape[1])]
    return {
        "result": "within" if shares[step, joint] <= size else "beyond",
        "difference": float(difference[step, joint]),
        "of_scale": float(shares[step, joint]),
        "row": step,
        "joint": names[joint],
    }


def _size(row: dict[str, Any]) -> float:
    return row["of_scale"]


def as_mapping(observation: Observation, deadline_ms: float | None) -> dict[str, Any]:
    """For ``Client.infer``. Without the session: nothing else waits that a replayed request could replace."""
    names = (
        "images",
        "state",
        "earlier",
        "prompt",
        "tokens",
        "noise",
        "solver_steps",
        *WORDS,
        "time",
        "previous",
        "adapter",
        *CONTINUATION_KEYS,
        *CONDITION_KEYS,
    )
    found = {name: getattr(observation, name) for name in names}
    found["seed"] = None if observation.noise is not None else observation.seed
    return {**found, "deadline_ms": deadline_ms}


def print_replay(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['records']} records replayed at {result['address']}")
    for name in ("record", "wire", "then", "now"):
        table.add_column(name, overflow="fold")
    told = [row for row in result["rows"] if row["result"] in ("beyond", "new", "error")]
    for row in told[:SHOWN]:
        now = row.get("now") or (f"differs by {_where(row)}" if "difference" in row else "actions")
        table.add_row(row["file"], row["wire"], row["then"], now)
    console = terminal.console()
    if table.row_count:
        console.print(table)
    lines = [f"and {len(told) - SHOWN} more: --json has all"] if len(told) > SHOWN else []
    if result["unlike"]:
        tolerance, count = result["tolerance"], result["records"]
        lines.append(
            f"not computed as then: {'; '.join(f'{text} ({n} of {count})' for text, n in result['unlike'].items())}"
        )
        lines.append(
            f"so the tolerance is {tolerance['of']:.2g} of each action's scale, for sums in another order in"
            f" {tolerance['precision']} (docs/wires.md)"
        )
    else:
        lines.append(
            "computed as then (engine, threads, precision, machine, versions): every bit is demanded"
        )
    worst = result["largest"]
    largest = f" (largest {_where(worst)} of {worst['file']})" if worst else ""
    lines.append(
        f"{result['records']} records: {result['equal']} equal to the bit, {result['within']} within the tolerance,"
        f" {result['beyond']} beyond{largest}; {result['error']} answered with an error,"
        f" {result['new']} that had failed gave actions"
    )
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _where(row: dict[str, Any]) -> str:
    return f"{row['difference']:.3g}, {row['of_scale']:.2g} of the scale, in row {row['row']}, joint {row['joint']}"
