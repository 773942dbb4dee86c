"""Send records to a server again, and check whether the answers are the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import numpy as np
from sinew_client import Client, ServerError
from sinew_client.protocol import given

from sinew import __version__
from sinew.records import arithmetic
from sinew.records.recorder import Record

SCHEMA = "sinew.replay/2"
RESULTS = ("equal", "within", "beyond", "error", "new", "unkept")
UNSAID = "the records do not state how they were computed (an older version of Sinew wrote them)"


def replay_records(server: Client, records: Iterable[Record], deadline_ms: float | None) -> dict[str, Any]:
    """Send every record, oldest first, and compare each answer with the recorded one.

    The seed of the noise is in the record. If all settings that affect the bits are equal
    (:data:`sinew.records.arithmetic.KEYS`), the actions must be equal bit for bit. Otherwise each action may differ by
    :func:`sinew.records.arithmetic.tolerance` times its own scale in the policy's statistics. An error is a result too.
    A context is not stored in a record, so it is not requested (``unkept``).

    Args:
        server: A client of the server. If its address names no policy, the recorded policy is requested.
        records: The records.
        deadline_ms: Deadline of each request in milliseconds; None for none.

    Returns:
        The result as a JSON-ready dict.
    """
    named, settings = server.policy, dict[str, tuple[dict[str, Any], dict[str, Any]]]()
    rows: list[dict[str, Any]] = []
    unlike: dict[str, int] = {}
    allowed: dict[str, Any] = {"of": 0.0, "precision": ""}
    for record in records:
        if record.context:
            row = {"file": record.path.name, "wire": record.wire}
            rows.append(row | {"then": "context", "result": "unkept"})
            continue
        server.policy = name = named or record.policy
        if name not in settings:
            metadata = server.metadata()
            settings[name] = arithmetic.kept(metadata["server"]), metadata["policy"]["action"]
        now, action = settings[name]
        differences = arithmetic.unlike(record.server, now) if record.server else [UNSAID]
        size, precision = arithmetic.tolerance(record.server, now) if differences else (0.0, "")
        if size > allowed["of"]:
            allowed = {"of": size, "precision": precision}
        for text in differences:
            unlike[text] = unlike.get(text, 0) + 1
        rows.append(_replay(server, record, deadline_ms, action, size))
    differing = [row for row in rows if "difference" in row]
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
        "largest": max(differing, key=itemgetter("of_scale"), default=None),
        "rows": rows,
    }


def _replay(
    server: Client, record: Record, deadline_ms: float | None, action: dict[str, Any], size: float
) -> dict[str, Any]:
    """Send one record, and compare the answer.

    Args:
        server: A client of the server.
        record: The record.
        deadline_ms: Deadline of the request in milliseconds.
        action: The description of the actions in the policy's metadata.
        size: The tolerance, in units of the model's output.

    Returns:
        A row of the result. ``result`` is "equal"; "within" or "beyond" the tolerance; "error" if the server answers
        with an error; or "new" if the record has an error and the server now answers without one.
    """
    then = record.error or ("text" if record.actions is None else "actions")
    row: dict[str, Any] = {"file": record.path.name, "wire": record.wire, "then": then}
    # Send no session. Otherwise a replayed request could replace a waiting request of the same session.
    seen = record.observation
    request = replace(seen, session="", seed=None if seen.noise is not None else seen.seed)
    try:
        chunk = server.infer({**given(request), "deadline_ms": deadline_ms})
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
    """Return the largest difference of two chunks [H, D], relative to the scale of each action.

    Args:
        got: The chunk of the server.
        recorded: The recorded chunk.
        action: The description of the actions in the policy's metadata. An action without a stated scale uses its
            largest recorded number.
        size: The tolerance.

    Returns:
        The entries of a row: the difference, its place, and "within" or "beyond".
    """
    stated = action.get("scale") or [None] * recorded.shape[1]
    largest = np.abs(recorded).max(axis=0)  # [D]
    scale = np.array([own or peak or 1.0 for own, peak in zip(stated, largest, strict=True)], np.float64)
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
