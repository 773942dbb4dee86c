"""Optional modules: which extra of this pip distribution installs each module, and the error for a missing module."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

from sinew_client.documentation import page
from sinew_client.untrusted import parse_json

from sinew.core import SinewError

DISTRIBUTION = "sinew-vla"  # Sinew's name on PyPI, because another project already has the name `sinew`

# Key: name of an optional module. Value: the extra of this pip distribution that installs the module.
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
    """Return the command that a user types to install a Python module.

    The command installs an extra of this pip distribution. If no extra contains the module, it reinstalls Sinew.
    """
    if module in sys.stdlib_module_names:
        return f"this Python does not have it; on Windows, use Python in WSL (see {page('install')})"
    extra = EXTRAS.get(module.partition(".")[0])
    if extra:
        return f"pip install '{source()}[{extra}]'"
    return f"pip install --force-reinstall '{source()}'"


def install_package(folder: str) -> str:
    """Return the command that installs another distribution of this project. It is installed from a checkout, because
    no package index has it.

    Args:
        folder: Folder of the distribution in a checkout of this git repository.
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
