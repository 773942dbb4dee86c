"""One GGUF file with everything: weights, config, tokenizer, recipes, statistics, provenance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinew.bundle.gguf_file import GGUFFile
from sinew.bundle.schema import Manifest
from sinew.bundle.writer import TensorSource, write_bundle

if TYPE_CHECKING:
    from sinew.bundle.reader import Bundle

__all__ = ["Bundle", "GGUFFile", "Manifest", "TensorSource", "write_bundle"]


def __getattr__(name: str) -> Any:
    # The reader makes torch tensors; the processor, which wants the schema alone, also runs without torch.
    if name == "Bundle":
        from sinew.bundle.reader import Bundle

        return Bundle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
