"""Optional modules: the extra of this distribution that installs each module, and the error for a missing module."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

from sinew_client.untrusted import parse_json

from sinew.core import SinewError

DISTRIBUTION = "sinew-vla"  # the name on package indexes, because another project has the name `sinew`

# Optional module -> the extra of this distribution that installs it.
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
    """Return the command that installs a module: with an extra of this distribution, or by reinstalling it."""
    if module in sys.stdlib_module_names:
        return "this Python does not have it; on Windows, use Python in WSL (docs/install.md)"
    extra = EXTRAS.get(module.partition(".")[0])
    if extra:
        return f"pip install '{source()}[{extra}]'"
    return f"pip install --force-reinstall '{source()}'"


def install_package(folder: str) -> str:
    """Return the command that installs another distribution of this project. It is installed from a checkout, because
    no package index has it.

    Args:
        folder: Its folder in a checkout.
    """
    place = source()
    # Without a checkout, Sinew was installed from a wheel, so the folder of the distribution is unknown.
    if place == DISTRIBUTION:
        return f"pip install ./{folder} (in a clone of Sinew)"
    return f"pip install '{place}/{folder}'"


def source() -> str:
    """Return the argument with which pip installed this distribution: the folder of a checkout (PEP 610), or the
    distribution's name if there is no checkout.
    """
    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")  # own file: in an installed package
        record = parse_json(text or "{}")
        parts = urlsplit(record.get("url", ""))
    except (PackageNotFoundError, OSError, ValueError, AttributeError):
        return DISTRIBUTION
    return unquote(parts.path) if parts.scheme == "file" and "dir_info" in record else DISTRIBUTION


class MissingPackageError(SinewError):
    """The operation needs a package that is not installed. The message contains the command that installs it."""

    code = "missing_package"

    def __init__(self, what: str, module: str, otherwise: str = ""):
        super().__init__(f"{what} needs {module}: {install(module)}{otherwise}")
