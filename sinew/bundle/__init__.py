"""A bundle is one GGUF file with everything that a policy needs: weights, configuration, tokenizer, processing
recipes, statistics, and a record of its origin."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinew.bundle.gguf_file import GGUFFile
    from sinew.bundle.reader import Bundle
    from sinew.bundle.schema import Manifest
    from sinew.bundle.writer import TensorSource, write_bundle

# `sinew export` writes the bundle without weights under this name, next to the graphs.
EXPORTED = "policy.gguf"

__all__ = ["EXPORTED", "Bundle", "GGUFFile", "Manifest", "TensorSource", "write_bundle"]

_HOME = {
    "Bundle": "reader",
    "GGUFFile": "gguf_file",
    "Manifest": "schema",
    "TensorSource": "writer",
    "write_bundle": "writer",
}


def __getattr__(name: str) -> Any:
    # Import these modules on first use. The reader needs torch, and the GGUF parser needs the gguf package. Processing
    # and the engines also import this package, and must work if torch or gguf is not installed.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
