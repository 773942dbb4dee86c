"""Make packages callable like functions: ``sinew.serve(policy)`` works although ``sinew.serve`` is a package."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def call(package: str, function: str) -> None:
    """Make a package callable like a function. The package itself calls this function during its import.

    Args:
        package: Name of the package.
        function: The function that a call of the package runs, as "MODULE:NAME". It is imported on the first call.
    """
    module = sys.modules[package]
    module.__dict__["_called"] = function
    module.__class__ = CalledPackage


class CalledPackage(ModuleType):
    """A package that can be called like a function. A call of the package calls a function in one of its modules."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the package's function with the same arguments, and return its result."""
        return self._function()(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the function that a call of the package runs, for ``help`` and completion.

        If the function is a class, the annotation of the result is this class.
        """
        function = self._function()
        signature = inspect.signature(function)
        return signature.replace(return_annotation=function) if isinstance(function, type) else signature

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the package by its name, as plain modules are pickled when a function is sent to another process."""
        return import_module, (self.__name__,)

    def _function(self) -> Any:
        module, _, name = self.__dict__["_called"].partition(":")
        return getattr(import_module(module), name)
