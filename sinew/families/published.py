"""Models of published sizes, without a checkpoint, from each family's ``published.json``."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from sinew_client.untrusted import parse_json, read_json

from sinew.core import SinewError
from sinew.core.fields import from_builtins
from sinew.core.registry import PUBLISHED, model_class, presets

REQUIRED = ("architecture", "title", "config", "views", "side", "tokens", "steps")
MOST = 1 << 20  # largest size in a file


class Published(NamedTuple):
    """architecture: as bundles name it; title: as its authors do. views, side, tokens, steps: of a usual request; side
    in pixels, tokens with an instruction of a dozen words. width: of frames that are no squares."""

    architecture: str
    title: str
    config: Any
    views: int
    side: int
    tokens: int
    steps: int
    width: int | None = None


def published(name: str) -> Published:
    """Return a preset. Raises :class:`SinewError` for an unknown name."""
    known = presets()
    if name not in known:
        raise SinewError(f"preset: expected one of {', '.join(known)}, got {name!r}")
    record = known[name].published()[name]
    return _made(record, f"{known[name].folder / PUBLISHED}: {name}")


def described(path: Path | Traversable) -> Published:
    """Return a model of any widths from a file: one record in the form of a family's ``published.json``.

    Raises :class:`SinewError` for what is no such record, by the field's name.
    """
    try:
        if isinstance(path, Path):
            record = read_json(path)
        else:
            record = parse_json(path.read_text("utf-8"))  # own file: in an installed package
    except (OSError, ValueError) as error:
        raise SinewError(f"{path}: {error}") from None
    if not isinstance(record, dict):
        raise SinewError(f"{path}: expected a record of a model, got {type(record).__name__}")
    missing = [field for field in REQUIRED if field not in record]
    unknown = [field for field in record if field not in Published._fields]
    if missing or unknown:
        got = f"got {unknown[0]!r}" if unknown else f"got none of {missing[0]!r}"
        raise SinewError(f"{path}: expected {', '.join(REQUIRED)} and perhaps width, {got}")
    for field in ("views", "side", "tokens", "steps", "width"):
        value, least = record.get(field), int(field != "tokens")
        if field in record and not (type(value) is int and least <= value <= MOST):
            raise SinewError(f"{path}: {field}: expected {least} to {MOST}, got {value!r}")
    for field in ("architecture", "title"):
        if not isinstance(record[field], str):
            raise SinewError(f"{path}: {field}: expected a text, got {record[field]!r}")
    return _made(record, str(path))


def _made(record: dict[str, Any], where: str) -> Published:
    kind = model_class(record["architecture"]).config_type
    config: Any = from_builtins(record["config"], kind, where)
    return Published(config=config, **{key: value for key, value in record.items() if key != "config"})
