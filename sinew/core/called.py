"""Packages that are called as a function: ``sinew.serve(policy)`` beside ``import sinew.serve.wires``."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any


class CalledPackage(ModuleType):
    """A package whose call is that of a function, which ``_CALLED`` names as MODULE:NAME and a first call imports."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        return self._function()(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the function's, for ``help`` and completion."""
        return inspect.signature(self._function())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it by its name, as other modules are where a function is sent to another process."""
        return import_module, (self.__name__,)

    def _function(self) -> Any:
        module, _, name = self.__dict__["_CALLED"].partition(":")
        return getattr(import_module(module), name)
