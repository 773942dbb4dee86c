"""Optional modules: the extra of this distribution that installs each, and the error for a missing one."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

from sinew_client.untrusted import parse_json

from sinew.core import SinewError

DISTRIBUTION = "sinew-vla"  # on package indexes, where the name `sinew` is another project's

# Modules that not every installation has -> the extra of the distribution that brings them.
EXTRAS = {
    "grpc": "lerobot",
    "gymnasium": "sim",
    "huggingface_hub": "hub",
    "matplotlib": "plots",
    "mcap": "mcap",
    "mujoco": "sim",
    "onnx": "onnx-export",
    "onnxruntime": "onnx",
    "onnxscript": "onnx-export",
    "pyarrow": "dataset",
    "ray": "ray",
    "rerun": "rerun",
    "safetensors": "torch",
    "sentencepiece": "sentencepiece",
    "tensorstore": "jax",
    "torch": "torch",
    "yaml": "ray",
    "zenoh": "lerobot-remote",
}


def install(module: str) -> str:
    """Return the command that brings a module: the extra of this distribution, or what it is made of."""
    if module in sys.stdlib_module_names:
        return "this Python has none, on Windows only that of WSL has (docs/install.md)"
    extra = EXTRAS.get(module.partition(".")[0])
    if extra:
        return f"pip install '{source()}[{extra}]'"
    return f"pip install --force-reinstall '{source()}'"


def install_package(folder: str) -> str:
    """Return the command that brings another distribution of this project, from a checkout, because no package index
    has it.

    Args:
        folder: Its folder in a checkout.
    """
    place = source()
    if place == DISTRIBUTION:  # installed from a wheel: no checkout is known
        return f"pip install ./{folder} (in a clone of Sinew)"
    return f"pip install '{place}/{folder}'"


def source() -> str:
    """Return the argument that installed this distribution with pip: the folder of a checkout (PEP 610), else its
    name.
    """
    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")  # own file: in an installed package
        record = parse_json(text or "{}")
        parts = urlsplit(record.get("url", ""))
    except (PackageNotFoundError, OSError, ValueError, AttributeError):
        return DISTRIBUTION
    return unquote(parts.path) if parts.scheme == "file" and "dir_info" in record else DISTRIBUTION


class MissingPackageError(SinewError):
    """The operation needs a package that is not installed; the message has the command that installs it."""

    code = "missing_package"

    def __init__(self, what: str, module: str, otherwise: str = ""):
        super().__init__(f"{what} needs {module}: {install(module)}{otherwise}")
