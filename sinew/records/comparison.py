"""Records that are sent to a server again: whether it answers each as it did then."""

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
UNSAID = "the records do not say how they were computed (an older sinew wrote them)"


def replay_records(server: Client, records: Iterable[Record], deadline_ms: float | None) -> dict[str, Any]:
    """Send every record, oldest first, and compare each answer with the recorded one.

    The seed that drew the noise is in the record. Where all that decides the bits is the same now as then
    (:data:`sinew.records.arithmetic.KEYS`), so must be the actions; else each may differ by
    :func:`sinew.records.arithmetic.tolerance` times its own scale in the policy's statistics. The policy that was asked
    then is asked now, or the address's own. An error is a result. A context is not kept, so none is asked (``unkept``).
    """
    named, said = server.policy, dict[str, tuple[dict[str, Any], dict[str, Any]]]()
    rows: list[dict[str, Any]] = []
    unlike: dict[str, int] = {}
    allowed: dict[str, Any] = {"of": 0.0, "precision": ""}
    for record in records:
        if record.context:
            row = {"file": record.path.name, "wire": record.wire}
            rows.append(row | {"then": "context", "result": "unkept"})
            continue
        server.policy = name = named or record.policy
        if name not in said:
            metadata = server.metadata()
            said[name] = arithmetic.kept(metadata["server"]), metadata["policy"]["action"]
        now, action = said[name]
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
    """Return a row. result: equal; within: the tolerance; beyond: it; error: the server answers with one; new: there
    was an error then, and none now.

    action: of the policy's metadata. size: the tolerance, in units of the model's output.
    """
    then = record.error or ("text" if record.actions is None else "actions")
    row: dict[str, Any] = {"file": record.path.name, "wire": record.wire, "then": then}
    seen = record.observation  # without its session: nothing else waits that a replayed request could replace
    asked = replace(seen, session="", seed=None if seen.noise is not None else seen.seed)
    try:
        chunk = server.infer({**given(asked), "deadline_ms": deadline_ms})
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
    """Return the largest difference of two chunks [H, D], relative to the scale of each action, and whether it is
    within ``size``.

    An action without a stated scale uses its largest recorded number.
    """
    stated = action.get("scale") or [None] * recorded.shape[1]
    largest = np.abs(recorded).max(axis=0)  # [D]
    scale = np.array([known or own or 1.0 for known, own in zip(stated, largest, strict=True)], np.float64)
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
