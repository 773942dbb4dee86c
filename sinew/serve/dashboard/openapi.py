"""Create ``/openapi.json``: a description of a port's routes for programs, with the policy's own cameras and sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sinew import __version__
from sinew.core import PolicySpec

# Key: path. Value: (HTTP method, summary, True if the route takes an observation and answers with a chunk).
ROUTES: dict[str, tuple[str, str, bool]] = {
    "/healthz": ("get", "State whether the server can answer: 200, or 503 with the problems.", False),
    "/metrics": ("get", "Return counters and latencies in Prometheus' text format.", False),
    "/v1/metadata": (
        "get",
        "Return the description of the server and its policy, and the server's health.",
        False,
    ),
    "/v1/actions": ("post", "Answer an observation with a chunk of actions.", True),
    "/v1/try": ("post", "Answer an observation that a person sends on the dashboard of this server.", True),
    "/v1/history": (
        "get",
        "Return counts and latencies of the last hour, one point for every ten seconds.",
        False,
    ),
}


def describe(spec: PolicySpec, paths: Iterable[str], keyed: bool) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document.

    Args:
        spec: The policy's specification.
        paths: The routes of the port. Routes without a description are left out.
        keyed: True if the server requires a key.
    """
    picture = {"type": "string", "contentEncoding": "base64", "description": "a JPEG or PNG file"}
    cameras = [camera.name for camera in spec.cameras]
    observation = {
        "type": "object",
        "required": ["images", "state"],
        "properties": {
            "images": {
                "type": "object",
                "properties": dict.fromkeys(cameras, picture),
                "required": cameras,
                "additionalProperties": False,
            },
            "state": _vector(spec.state.dim, spec.state.labels),
            "prompt": {"type": "string"},
            "seed": {"type": "integer"},
            "session": {"type": "string"},
            "deadline_ms": {"type": "number", "exclusiveMinimum": 0},
        },
    }
    rows = {
        "type": "array",
        "maxItems": spec.chunk_size,
        "items": _vector(spec.action.dim, spec.action.labels),
    }
    chunk = {
        "type": "object",
        "properties": {"actions": rows, "timing": {"type": "object"}, "seed": {"type": "integer"}},
    }
    here = set(paths)
    routes: dict[str, Any] = {}
    for path, (method, summary, asks) in ROUTES.items():
        if path not in here:
            continue
        answer: dict[str, Any] = {"description": "the answer"}
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": answer}}
        if asks:
            operation["requestBody"] = {"required": True, "content": _json("Observation")}
            answer["content"] = _json("Chunk")
            operation["responses"]["400"] = {
                "description": "a field of the request is wrong; the error names the field"
            }
            operation["responses"]["503"] = {
                "description": "the server is busy or stops, or the deadline has passed"
            }
        if path in ("/healthz", "/metrics"):
            operation["security"] = []
        routes[path] = {method: operation}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"Sinew: {spec.name}", "version": __version__},
        "paths": routes,
        "components": {"schemas": {"Observation": observation, "Chunk": chunk}},
    }
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _vector(dim: int, labels: tuple[str, ...]) -> dict[str, Any]:
    description = {"description": ", ".join(labels)} if labels else {}
    return {"type": "array", "items": {"type": "number"}, "minItems": dim, "maxItems": dim, **description}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
