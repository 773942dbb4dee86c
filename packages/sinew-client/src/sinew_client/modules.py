"""Import the Python objects that a user names as ``module:name``, such as a robot or a planner."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from sinew_client.errors import ClientError


class ModuleError(ClientError):
    """``module:name`` cannot be imported. The message has the searched folders, or the error of the module."""


def search_here() -> str:
    """Put the current folder first on ``sys.path``, as ``python -m`` does. Return the folder."""
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    return here


def load_module(name: str, what: str) -> Any:
    """Import a module of the user from the current folder or an installed package.

    Args:
        name: Name of the module.
        what: The option that names the module, for error messages.

    Returns:
        The module.

    Raises:
        ModuleError: The module is missing or cannot be imported. The message is one line.
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
        raise ModuleError(f"{what}: {name} needs the module {missing!r}; install it") from error
    except Exception as error:
        raise ModuleError(f"{what}: importing {name} failed: {type(error).__name__}: {error}") from error


def load_named(text: str, what: str) -> Any:
    """Import an object that the user names.

    Args:
        text: ``module:name``.
        what: The option that names the object, for error messages.

    Returns:
        The object.

    Raises:
        ModuleError: The module cannot be imported, or has no such name.

    Example:
        >>> load_named("math:floor", "--robot")(1.5)
        1
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ModuleError(f"{what}: expected module:name, got {text!r}")
    imported = load_module(module, what)
    try:
        return getattr(imported, name)
    except AttributeError:
        where = getattr(imported, "__file__", None) or module
        raise ModuleError(f"{what}: {where} has no {name!r}") from None
