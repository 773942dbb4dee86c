"""The folder that an export leaves and the engine runs: three graphs, their weights, the tables of moments."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sinew.core import BundleError

STAGES = ("vision", "read", "step")
COMPONENT = "sinew.component"  # metadata of every node: which of the components below it belongs to
FORMAT = 4


@dataclass(frozen=True, slots=True)
class GraphSet:
    """``graphs.json``. ``reads`` names what the read stage returns and the step stage takes, in order;
    ``views`` is the number that the read stage takes; ``steps`` are the step counts with a table; ``recipe``
    the components that are quantised, ``method`` how, and ``bits`` the bits of int8 weights (0: there are none)."""

    architecture: str
    views: int
    reads: tuple[str, ...]
    steps: tuple[int, ...]
    rewrites: tuple[str, ...]
    recipe: dict[str, str] = field(default_factory=dict)
    method: str = ""
    bits: int = 0
    format: int = FORMAT

    def save(self, directory: Path) -> None:
        (directory / "graphs.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> GraphSet:
        path = directory / "graphs.json"
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise BundleError(f"{path}: format {record['format']!r}, expected {FORMAT}: export again")
            lists = {key: tuple(record[key]) for key in ("reads", "steps", "rewrites")}
            return cls(**(record | lists))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BundleError(f"{path}: expected the record of an export, got {error!r}") from None


def table_path(directory: Path, steps: int) -> Path:
    return directory / f"moments-{steps}.npy"
