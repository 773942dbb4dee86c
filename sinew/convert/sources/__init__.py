"""Resolve the source that a command receives (a bundle, an exported folder, a checkpoint, a name on the hub) to a file
that can be loaded.

Checkpoints are converted once, into a cache (:mod:`.cache`). torch is imported only if a checkpoint must be converted.
"""

from __future__ import annotations

import re
from pathlib import Path

from sinew_client.typed_names import UntypedNameError

from sinew.bundle import EXPORTED
from sinew.convert.lerobot.folder import resolve as model_folder
from sinew.convert.sources import cache
from sinew.core import BundleError, ConvertError, did_you_mean

ASSETS = Path(__file__).resolve().parents[2] / "assets"


def embedded() -> dict[str, Path]:
    """Return name -> file of the trained policies of this package: blocks, pen, egg ... A file or folder with the same
    name in the current folder takes precedence over them."""
    return {path.stem: path for path in sorted(ASSETS.glob("*.gguf"))}


def resolve(source: str | Path) -> Path:
    """Return the bundle, or the folder of ``sinew export``, for a source.

    Downloads, conversions and hits of the cache are reported through :mod:`sinew.core.progress`.

    Args:
        source: A bundle file; the name of a policy of this package (:func:`embedded`); a folder of ``sinew export``;
            a checkpoint folder that ``sinew convert`` reads without further options; a LeRobot training run or one of
            its checkpoints; ``org/name`` or ``hf://org/name[@revision][/file.gguf]`` on the Hugging Face hub.

    Returns:
        The path.

    Raises:
        BundleError: There is no such source.
        ConvertError: The checkpoint cannot be converted.
    """
    path = Path(source)
    if path.is_dir():
        return _folder(path, str(source))
    if path.exists():
        return path
    if str(source) in (own := embedded()):
        return own[str(source)]
    from sinew.convert.sources import hub  # imported here, because local policies do not need the hub

    name = hub.parse(str(source))
    if name is None:
        hint = did_you_mean(str(source), own)
        if re.fullmatch(r"[\w.-]+:\d+", str(source)):
            hint = f"; did you mean 'tcp://{source}'?"
        raise BundleError(f"{source}: no such file or folder{hint}")
    fetched = hub.fetch(name)
    return fetched if fetched.is_file() else _folder(fetched, str(name), name.repository.split("/")[-1])


def _folder(path: Path, typed: str, name: str = "") -> Path:
    """Return the bundle or the exported folder for a folder. ``typed`` is the source as the user typed it, for
    messages; ``name`` is the policy's name on the hub."""
    if (path / EXPORTED).is_file():
        return path
    checkpoint = model_folder(path)
    try:
        return cache.converted(checkpoint, typed, name)
    except cache.NoCheckpointError as error:
        raise BundleError(
            f"{typed}: expected a bundle, a checkpoint, or a folder of `sinew export` with {EXPORTED}, got {error}"
        ) from None
    except UntypedNameError as error:  # it ends with the flags to add
        raise UntypedNameError(
            f"{error} to `sinew convert {typed} policy.gguf`, and use policy.gguf instead of {typed}"
        ) from error
    except ConvertError as error:
        hint = "" if "sinew convert" in str(error) else f"; `sinew convert {typed} policy.gguf` takes options"
        raise ConvertError(f"{error}{hint}") from error
