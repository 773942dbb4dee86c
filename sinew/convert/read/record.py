"""A JSON file whose entries are asked for by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinew.convert.read.files import read_json
from sinew.core import ConvertError


class JsonRecord:
    """A JSON object whose missing entries are errors that name the file."""

    def __init__(self, path: Path, content: Mapping[str, Any] | None = None, name: str = ""):
        self.path, self.name = path, name
        self.content = read_json(path) if content is None else content

    def __getitem__(self, key: str) -> Any:
        if key not in self.content:
            raise ConvertError(f"{self.path}: {self.name}{key} is missing")
        return self.content[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return an optional entry; null counts as absent."""
        found = self.content.get(key)
        return default if found is None else found

    def expect(self, **values: Any) -> None:
        """Raise ConvertError for an entry other than the only value that is implemented. Absent and null it may be."""
        for key, value in values.items():
            if (found := self.get(key, value)) != value:
                raise ConvertError(f"{self.path}: {self.name}{key}: expected {value!r}, got {found!r}")

    def filled(self, defaults: Mapping[str, Any]) -> JsonRecord:
        """Return the record with ``defaults`` for what is absent or null."""
        given = {key: value for key, value in self.content.items() if value is not None}
        return JsonRecord(self.path, {**defaults, **given}, self.name)

    def part(self, key: str) -> JsonRecord:
        """Return an entry that is an object itself."""
        found = self[key]
        if not isinstance(found, dict):
            raise ConvertError(
                f"{self.path}: {self.name}{key}: expected an object, got {type(found).__name__}"
            )
        return JsonRecord(self.path, found, f"{self.name}{key}.")
