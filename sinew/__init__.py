"""Sinew: a real-time inference runtime for vision-language-action robot policies."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinew_client.target import connect

    from sinew.convert import convert
    from sinew.driving import run
    from sinew.lowbit.quantization import Quantized, quantize
    from sinew.policy import Policy, load
    from sinew.serve.recorded import RecordedPolicy, record
    from sinew.serve.wires.server import Server
    from sinew.serve.wires.server import Server as serve  # noqa: N813 - the package is called as it

# OpenMP threads that wait in a loop use CPU time that other programs need (measured in research/log). So let waiting
# threads sleep, unless the user has set one of these variables. Set them before torch is imported, because its OpenMP
# runtime (GNU's on Linux, LLVM's or Intel's elsewhere) reads the environment only once, when it is loaded.
WAITING = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})
if "torch" not in sys.modules and not WAITING & os.environ.keys():
    os.environ |= {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}

__version__ = "0.1.0"
# Key: public name. Value: the module that defines it, imported on first use. `import sinew` must be fast, and the
# command line's help, clients and controllers do not need torch.
_LATER = {
    "Policy": "sinew.policy",
    "Quantized": "sinew.lowbit.quantization",
    "RecordedPolicy": "sinew.serve.recorded",
    "Server": "sinew.serve.wires.server",
    "connect": "sinew_client.target",
    "convert": "",  # a subpackage, which can also be called like a function: `sinew.convert(...)`
    "load": "sinew.policy",
    "quantize": "sinew.lowbit.quantization",
    "record": "sinew.serve.recorded",
    "run": "sinew.driving",
    "serve": "",  # a subpackage, which can also be called like a function: `sinew.serve(...)`
}
# Public names that the package sinew-eval provides through its entry points in the group `sinew.names`. `from sinew
# import *` does not import them.
_OF_EVAL = ("Episode", "Evaluation", "Exploration", "RolloutPolicy", "RolloutSample", "evaluate")
__all__ = [
    "Policy",
    "Quantized",
    "RecordedPolicy",
    "Server",
    "__version__",
    "connect",
    "convert",
    "load",
    "quantize",
    "record",
    "run",
    "serve",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *_OF_EVAL})


def __getattr__(name: str) -> Any:
    if name not in _LATER and name not in _OF_EVAL:
        this = sys.modules[__name__]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=this)
    try:
        if name in _OF_EVAL:
            from sinew.core.providers import required

            return required("sinew.names", f"sinew.{name}", name)
        if not _LATER[name]:
            return import_module(f"{__name__}.{name}")
        return getattr(import_module(_LATER[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("sinew", "sinew_eval"):
            raise
        from sinew.core.extras import MissingPackageError

        raise MissingPackageError(f"sinew.{name}", error.name) from None
