"""Describe models that have the sizes of published policies, without their checkpoints. The sizes are in the
``published.json`` of each family."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from sinew_client.untrusted import parse_json, read_json

from sinew.core import SinewError
from sinew.core.fields import from_builtins
from sinew.core.registry import PUBLISHED, model_class, presets

REQUIRED = ("architecture", "title", "config", "views", "side", "tokens", "steps")
MOST = 1 << 20  # largest number that a file may contain as a size


class Published(NamedTuple):
    """The description of a model that has the sizes of a published policy.

    Attributes:
        architecture: Name of the architecture in bundles.
        title: Name that the policy's authors use.
        config: Configuration of the model.
        views: Number of views of a typical request.
        side: Side of a frame in pixels.
        tokens: Number of prompt tokens, with an instruction of a dozen words.
        steps: Number of solver steps.
        width: Width of a frame in pixels, if frames are not square. ``side`` is then the height.
    """

    architecture: str
    title: str
    config: Any
    views: int
    side: int
    tokens: int
    steps: int
    width: int | None = None


def published(name: str) -> Published:
    """Return the description of a published policy.

    Raises:
        SinewError: The name is unknown.
    """
    table = presets()
    if name not in table:
        raise SinewError(f"preset: expected one of {', '.join(table)}, got {name!r}")
    record = table[name].published()[name]
    return _made(record, f"{table[name].folder / PUBLISHED}: {name}")


def described(path: Path | Traversable) -> Published:
    """Read the description of a model from a file. The file has one record, with the fields of an entry in
    ``published.json``.

    Raises:
        SinewError: The record is wrong. The message names the field.
    """
    try:
        if isinstance(path, Path):
            record = read_json(path)
        else:
            record = parse_json(path.read_text("utf-8"))  # own file: in an installed package
    except (OSError, ValueError) as error:
        raise SinewError(f"{path}: {error}") from None
    if not isinstance(record, dict):
        raise SinewError(
            f"{path}: expected a JSON object that describes a model, got {type(record).__name__}"
        )
    missing = [field for field in REQUIRED if field not in record]
    unknown = [field for field in record if field not in Published._fields]
    if missing or unknown:
        problem = f"unknown field {unknown[0]!r}" if unknown else f"missing field {missing[0]!r}"
        raise SinewError(f"{path}: {problem}; expected the fields {', '.join(REQUIRED)} and optionally width")
    for field in ("views", "side", "tokens", "steps", "width"):
        value, least = record.get(field), int(field != "tokens")
        if field in record and not (type(value) is int and least <= value <= MOST):
            raise SinewError(
                f"{path}: {field}: expected a whole number from {least} to {MOST}, got {value!r}"
            )
    for field in ("architecture", "title"):
        if not isinstance(record[field], str):
            raise SinewError(f"{path}: {field}: expected a text, got {record[field]!r}")
    return _made(record, str(path))


def _made(record: dict[str, Any], where: str) -> Published:
    kind = model_class(record["architecture"]).config_type
    config: Any = from_builtins(record["config"], kind, where)
    return Published(config=config, **{key: value for key, value in record.items() if key != "config"})
