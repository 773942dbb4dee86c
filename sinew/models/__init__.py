"""Models by the name that a bundle gives: made without memory, and compared with the tensors that are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sinew.core import SinewError
from sinew.core.registry import model_class

if TYPE_CHECKING:
    from sinew.models.base import Model


def build_on_meta(architecture: str, config: Any) -> Model:
    """Return the model without memory for its weights: for shapes, and to have weights assigned.

    Raises :class:`SinewError` for a class that computes with values when it is made.
    """
    import torch  # here: exported graphs are run without, and read solvers of this folder

    cls = model_class(architecture)
    try:
        with torch.device("meta"):
            return cls(config)
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise SinewError(
            f"architecture {architecture!r}: {cls.__name__} reads the values of a tensor while it is made, on a device"
            f' without memory: make that tensor with device="cpu" ({error})'
        ) from error


def mismatch(
    model: Model, found: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str] | None = None
) -> str | None:
    """Return what is wrong with a set of tensors (name -> shape) for ``model``, naming them; None if they fit.

    ``aliases`` gives the names that the user knows, where these are not the model's.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    known = aliases or {}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [
        f"{known.get(name, name)} is not a part of the model" for name in found if name not in wanted
    ]
    problems += [
        f"{known.get(name, name)} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if not problems:
        return None
    return "; ".join(problems[:5]) + (f" (and {len(problems) - 5} more)" if len(problems) > 5 else "")
