"""How a failed request is answered over HTTP: a status, and what went wrong as JSON."""

from __future__ import annotations

import json

from sinew.core import ObservationError, SinewError

JSON = "application/json"
_STATUS = {
    "bad_request": 400,
    "bad_observation": 400,
    "unauthorized": 401,
    "unknown_policy": 404,
    "superseded": 409,
    "busy": 429,
    "cancelled": 499,
    "unhealthy": 503,
    "shutting_down": 503,
    "deadline": 504,
}


def error_entry(error: SinewError) -> dict[str, dict[str, str]]:
    """Return what is said of an error, ready for JSON and msgpack."""
    entry = {"code": error.code, "message": str(error)[:1000]}
    if isinstance(error, ObservationError):
        entry["field"] = error.field[:100]
    return {"error": entry}


def error_answer(error: SinewError) -> tuple[int, bytes]:
    """(status, body)"""
    return _STATUS.get(error.code, 500), json.dumps(error_entry(error)).encode()
