"""Find the bundle for a source that the user typed: a bundle, an exported folder, a checkpoint or a name on the hub.

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
    """Return a dict: name -> file of each policy that is part of this package: blocks, pen, egg ... A file or folder
    with the same name in the current folder takes precedence."""
    return {path.stem: path for path in sorted(ASSETS.glob("*.gguf"))}


def resolve(source: str | Path) -> Path:
    """Return the bundle, or the folder of ``sinew export``, for a source.

    Downloads, conversions and the use of an earlier conversion are reported through :mod:`sinew.core.progress`.

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
    # Import the hub only here, because policies on this machine do not need it.
    from sinew.convert.sources import hub

    name = hub.parse(str(source))
    if name is None:
        hint = did_you_mean(str(source), own)
        if re.fullmatch(r"[\w.-]+:\d+", str(source)):
            hint = f"; did you mean 'tcp://{source}'?"
        raise BundleError(f"{source}: no such file or folder{hint}")
    fetched = hub.fetch(name)
    return fetched if fetched.is_file() else _folder(fetched, str(name), name.repository.split("/")[-1])


def _folder(path: Path, typed: str, name: str = "") -> Path:
    """Return the bundle in a folder or its converted checkpoint, or the folder itself if `sinew export` wrote it.

    Args:
        path: The folder.
        typed: The source as the user typed it, for messages.
        name: The policy's name on the hub; "" for a local folder.
    """
    if (path / EXPORTED).is_file():
        return path
    checkpoint = model_folder(path)
    try:
        return cache.converted(checkpoint, typed, name)
    except cache.NoCheckpointError as error:
        raise BundleError(
            f"{typed}: expected a bundle, a checkpoint, or a folder of `sinew export` with {EXPORTED}, got {error}"
        ) from None
    except UntypedNameError as error:
        # The message of the error ends with the flags that the user must add.
        raise UntypedNameError(
            f"{error} to `sinew convert {typed} policy.gguf`, and use policy.gguf instead of {typed}"
        ) from error
    except ConvertError as error:
        hint = (
            ""
            if "sinew convert" in str(error)
            else f"; to pass options, run `sinew convert {typed} policy.gguf`"
        )
        raise ConvertError(f"{error}{hint}") from error
