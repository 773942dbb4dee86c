"""One GGUF file with everything: weights, config, tokenizer, recipes, statistics, provenance."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinew.bundle.gguf_file import GGUFFile
    from sinew.bundle.reader import Bundle
    from sinew.bundle.schema import Manifest
    from sinew.bundle.writer import TensorSource, write_bundle

EXPORTED = "policy.gguf"  # the bundle without weights in a folder of graphs, as `sinew export` writes it

__all__ = ["EXPORTED", "Bundle", "GGUFFile", "Manifest", "TensorSource", "write_bundle"]

_HOME = {
    "Bundle": "reader",
    "GGUFFile": "gguf_file",
    "Manifest": "schema",
    "TensorSource": "writer",
    "write_bundle": "writer",
}


def __getattr__(name: str) -> Any:
    # The reader makes torch tensors, and the file's parser wants the gguf package; the processor and the engines
    # need neither, and also run where one of the two is not installed.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
