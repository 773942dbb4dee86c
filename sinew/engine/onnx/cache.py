"""Find the exported graphs of a bundle: a folder next to the bundle, with the bundle's fingerprint in its name."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sinew.core import scratch
from sinew.engine.fingerprint import fingerprint as of_bundle
from sinew.engine.onnx.graphs import FORMAT

if TYPE_CHECKING:
    from sinew.bundle import Bundle

log = logging.getLogger(__name__)


def fingerprint(path: Path) -> str:
    """Return the fingerprint that is part of the name of a bundle's graph folder.

    The fingerprint also changes with the format of the graphs.
    """
    return of_bundle(path, FORMAT)


def publish(partial: Path, folder: Path) -> None:
    """Rename a finished temporary folder, and set the file modes that the user's umask allows.

    The temporary folder and its weights were readable by their owner only.
    """
    mask = os.umask(0)
    os.umask(mask)
    for path in partial.iterdir():
        path.chmod(0o666 & ~mask)
    partial.chmod(0o777 & ~mask)
    partial.rename(folder)


def graphs_folder(bundle: Bundle) -> Path:
    """Return the folder of a bundle's graphs, which may not exist yet. The name of int8 graphs depends on the
    processor."""
    bits = usable_bits(bundle)
    variant = f"-int8x{bits}" if bits else ""
    return bundle.path.with_name(f"{bundle.path.stem}.onnx-{fingerprint(bundle.path)[:16]}{variant}")


def usable_bits(bundle: Bundle) -> int:
    """Return how many bits int8 weights may have so that this processor multiplies them exactly.

    The number is at most the recipe's number of bits, and 0 without a recipe.
    """
    recipe = bundle.manifest.quantization
    if recipe is None:
        return 0
    from sinew.engine.onnx.quantize import weight_bits

    bits, why = weight_bits()
    if bits < recipe.bits:
        log.info("int8 weights get %d bits instead of the recipe's %d: %s", bits, recipe.bits, why)
    return min(bits, recipe.bits)


def sweep(bundle: Path) -> None:
    """Remove temporary files that exports of a bundle have left next to the bundle, if their processes have ended."""
    scratch.sweep(bundle.parent, re.compile(re.escape(f".{bundle.stem}.onnx-") + r".*\.[0-9a-f]{16}\.sinew"))
