"""Packages that can be called as a function: ``sinew.serve(policy)`` works although ``sinew.serve`` is a package."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def call(package: str, function: str) -> None:
    """Have a package that is being imported called as ``function``, MODULE:NAME, which a first call imports."""
    module = sys.modules[package]
    module.__dict__["_called"] = function
    module.__class__ = CalledPackage


class CalledPackage(ModuleType):
    """A package whose call is that of a function."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        return self._function()(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the function's, for ``help`` and completion; a class returns what it makes."""
        function = self._function()
        found = inspect.signature(function)
        return found.replace(return_annotation=function) if isinstance(function, type) else found

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it by its name, as other modules are where a function is sent to another process."""
        return import_module, (self.__name__,)

    def _function(self) -> Any:
        module, _, name = self.__dict__["_called"].partition(":")
        return getattr(import_module(module), name)
