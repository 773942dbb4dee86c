"""The folder of an export: three graphs, their weights, the tables of moments, and the record ``graphs.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sinew.bundle.schema import from_json
from sinew.core import BundleError

STAGES = ("vision", "read", "step")
COMPONENT = "sinew.component"  # metadata of every node: which of the components below it belongs to
# Metadata of a quantised graph: activations have one scale for a whole tensor, so members of a batch would share it.
ONE_SCALE = "sinew.one_scale"
FORMAT = 4
MOST = 1000  # of views, steps or bits


@dataclass(frozen=True, slots=True)
class GraphSet:
    """``graphs.json``. ``reads`` names what the read stage returns and the step stage takes, in order;
    ``views`` is the number that the read stage takes; ``steps`` are the step counts with a table; ``recipe``
    the components that are quantised, ``method`` how, and ``bits`` the bits of int8 weights (0: there are none);
    ``borrows`` the tensors of the bundle that a stage computes with, where the graphs hold no weights."""

    architecture: str
    views: int
    reads: tuple[str, ...]
    steps: tuple[int, ...]
    rewrites: tuple[str, ...]
    recipe: dict[str, str] = field(default_factory=dict)
    method: str = ""
    bits: int = 0
    borrows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    format: int = FORMAT

    def save(self, directory: Path) -> None:
        (directory / "graphs.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> GraphSet:
        """Raise :class:`BundleError` for a record that no export wrote."""
        path = directory / "graphs.json"
        try:
            text = path.read_text(encoding="utf-8")
            written = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{path}: expected the record of an export, got {error!r}") from None
        if not isinstance(written, dict) or written.get("format") != FORMAT:
            found = written.get("format") if isinstance(written, dict) else type(written).__name__
            raise BundleError(f"{path}: format {found!r}, expected {FORMAT}: export again")
        graphs: GraphSet = from_json(text, cls, str(path))
        for number in (graphs.views, graphs.bits, *graphs.steps):
            if not 0 <= number <= MOST:
                raise BundleError(f"{path}: expected whole numbers from 0 to {MOST}, got {number}")
        if unknown := set(graphs.borrows) - set(STAGES):
            raise BundleError(
                f"{path}: borrows: expected {', '.join(STAGES)}, got {', '.join(sorted(unknown))}"
            )
        if len(set(graphs.reads)) != len(graphs.reads):
            raise BundleError(f"{path}: reads: expected each name once")
        return graphs


def table_path(directory: Path, steps: int) -> Path:
    return directory / f"moments-{steps}.npy"
