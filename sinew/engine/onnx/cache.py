"""Exported graphs lie beside their bundle, in a folder that carries the bundle's fingerprint."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from sinew.core import SinewError, scratch
from sinew.engine.fingerprint import fingerprint as of_bundle
from sinew.engine.onnx.graphs import FORMAT


def fingerprint(path: Path) -> str:
    """Return the fingerprint of a bundle under which graphs of this format are kept."""
    return of_bundle(path, FORMAT)


def publish(partial: Path, folder: Path) -> None:
    """Give a finished temporary folder its name and the modes of any other; it and its weights were made for
    their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in partial.iterdir():
        path.chmod(0o666 & ~mask)
    partial.chmod(0o777 & ~mask)
    partial.rename(folder)


def cache_folder(bundle: Path, variant: str = "") -> Path:
    return bundle.with_name(f"{bundle.stem}.onnx-{fingerprint(bundle)[:16]}{variant}")


def sweep(bundle: Path) -> None:
    """Remove what exports of a bundle left beside it whose processes are gone."""
    scratch.sweep(bundle.parent, re.compile(re.escape(f".{bundle.stem}.onnx-") + r".*\.[0-9a-f]{16}\.sinew"))


def cached_graphs(bundle: Path, export: Callable[[Path], object], variant: str = "") -> Path:
    """Return the folder of graphs for ``bundle``; ``export`` fills it if it is not there.

    variant: a suffix of the folder's name, for graphs that depend on more than the bundle.
    """
    folder = cache_folder(bundle, variant)
    if (folder / "graphs.json").exists():
        return folder
    with contextlib.ExitStack() as held:
        try:
            partial = held.enter_context(scratch.beside(folder))
        except OSError as error:
            raise SinewError(
                f"{folder}: expected to write the exported graphs beside the bundle, got {error}"
            ) from None
        export(partial)
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted export of another day
        publish(partial, folder)
    return folder
