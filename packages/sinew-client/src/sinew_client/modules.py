"""Things that a user names as ``module:name``: his robot, planner, adapter, environment."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from sinew_client.errors import ClientError


class ModuleError(ClientError):
    """Raised where ``module:name`` cannot be had; the message says what was searched, or what the module raised."""


def search_here() -> str:
    """Put the current folder on the module search path, first, as ``python -m`` does; return the folder."""
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    return here


def load_module(name: str, what: str) -> Any:
    """Import a module of the user's, from the current folder or what is installed. what: the flag, for messages.

    Raises :class:`ModuleError`, in one line, for a module that is not there or does not import.
    """
    here = search_here()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(missing + "."):
            raise ModuleError(
                f"{what}: no module {missing!r}; searched {here}, PYTHONPATH and the installed packages"
            ) from error
        raise ModuleError(f"{what}: {name} needs the module {missing!r}, which is not installed") from error
    except Exception as error:
        raise ModuleError(f"{what}: importing {name}: {type(error).__name__}: {error}") from error


def load_named(text: str, what: str) -> Any:
    """Return what ``module:name`` names. Raises :class:`ModuleError`."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ModuleError(f"{what}: expected module:name, got {text!r}")
    found = load_module(module, what)
    try:
        return getattr(found, name)
    except AttributeError:
        where = getattr(found, "__file__", None) or module
        raise ModuleError(f"{what}: {where} has no {name!r}") from None
