"""One GGUF file with everything: weights, config, tokenizer, recipes, statistics, provenance."""

from sinew.bundle.gguf_file import GGUFFile
from sinew.bundle.reader import Bundle
from sinew.bundle.schema import Manifest
from sinew.bundle.writer import TensorSource, write_bundle

__all__ = ["Bundle", "GGUFFile", "Manifest", "TensorSource", "write_bundle"]
