"""Models at the sizes that were published, without a checkpoint: what each family's ``published.json`` says."""

from __future__ import annotations

from typing import Any, NamedTuple

from sinew.bundle.schema import from_builtins
from sinew.core import SinewError
from sinew.models import model_class
from sinew.registry import PUBLISHED, presets


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
    """Return a preset. Raises :class:`SinewError` for a name that is none."""
    known = presets()
    if name not in known:
        raise SinewError(f"preset: expected one of {', '.join(known)}, got {name!r}")
    record = known[name].published()[name]
    kind = model_class(record["architecture"]).config_type
    config: Any = from_builtins(record["config"], kind, f"{known[name].folder / PUBLISHED}: {name}")
    return Published(config=config, **{key: value for key, value in record.items() if key != "config"})
