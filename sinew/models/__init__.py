"""Models by the name that a bundle gives: made without memory, and compared with the tensors that are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sinew.core import BundleError, SinewError
from sinew.core.registry import model_class

if TYPE_CHECKING:
    from pathlib import Path

    from sinew.core import PolicySpec
    from sinew.models.base import Model
    from sinew.steps.image.base import ImageRecipe


def build_on_meta(architecture: str, config: Any) -> Model:
    """Return :func:`on_meta` of the class that the registry has for an architecture."""
    return on_meta(model_class(architecture), config)


def on_meta(cls: Any, config: Any) -> Model:
    """Return a model of a class without memory for its weights: for shapes, and to have weights assigned.

    Raises :class:`SinewError` for a class that computes with values when it is made.
    """
    import torch  # here: exported graphs are run without, and read solvers of this folder

    try:
        with torch.device("meta"):
            model: Model = cls(config)
            return model
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise SinewError(
            f"{cls.__name__} reads the values of a tensor while it is made, on a device without memory: make that"
            f' tensor with device="cpu" ({error})'
        ) from error


def mismatch(
    model: Model, found: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str] | None = None
) -> str | None:
    """Return the differences between a set of tensors (name -> shape) and the model's; None if they fit.

    aliases: The user's names of tensors, if they differ from the model's.
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


def check_agreement(path: Path, manifest: Any, model: Model) -> None:
    """Raise :class:`BundleError` where a bundle's manifest asks of the model what it cannot do."""
    if problem := next(_disagreements(manifest.spec, manifest.processing, model), ""):
        raise BundleError(f"{path}: {problem}")


def _disagreements(spec: PolicySpec, processing: Any, model: Model) -> Iterator[str]:
    sizes = spec.noise_shape[0], processing.padded_action_dim, processing.padded_state_dim
    if (*model.noise_shape, model.state_size) != sizes:
        yield "sinew.spec or sinew.processing disagrees with sinew.config about sizes"
    # Else a head's actions would be added to noise, without a word
    if type(model).solver.kind == "single" and spec.solver.kind != "single":
        yield f"spec.solver: expected single of {spec.architecture}, which answers at once, got {spec.solver.kind}"
    if model.views is not None and (spec.views != model.views or not processing.all_cameras):
        optional = "" if processing.all_cameras else ", of which some may be missing"
        wanted = f"expected true and {model.views} views, which the weights fix"
        yield f"sinew.processing.all_cameras: {wanted}, got {spec.views}{optional}"
    moments = (spec.history, len(spec.cameras)) if spec.history_padding == "mask" else None
    if model.moments != moments:
        wanted, got = (
            f"1 to {each[0]} moments of {each[1]} views" if each else "no history of any length"
            for each in (model.moments, moments)
        )
        yield f"sinew.spec: expected {wanted}, as sinew.config says, got {got}"
    yield from _frame_disagreements(spec, processing.image, model)
    if spec.committed_rows and not model.times_per_row:
        wanted = f"0 for {spec.architecture}, whose head takes one time for all rows"
        yield f"spec.committed_rows: expected {wanted}, got {spec.committed_rows}"


def _frame_disagreements(spec: PolicySpec, image: ImageRecipe, model: Model) -> Iterator[str]:
    pictures = tuple(image.of_camera(index).picture for index in range(len(spec.cameras)))
    if image.sizes and not model.frames:
        yield f"sinew.processing.image.sizes: expected none, as {spec.architecture} reads views of one size"
    elif model.frames and pictures != model.frames:
        wanted, got = (", ".join(f"{h}x{w}" for h, w in sizes) for sizes in (model.frames, pictures))
        yield f"sinew.processing.image.sizes: expected {wanted}, as sinew.config says, got {got}"
    for index, camera in enumerate(spec.cameras if model.grid is not None else ()):
        size = image.of_camera(index).size_after(camera.height, camera.width)
        frames = f"camera {camera.name}, whose frames become {size[0]}x{size[1]} pixels"
        if model.frames:
            if size != pictures[index]:
                wanted = "x".join(map(str, pictures[index]))
                yield f"sinew.processing.image.sizes: expected that of {frames}, got {wanted}"
        elif (found := model.grid_of(*size)) != model.grid:
            got = "x".join(map(str, model.grid or ()))
            yield f"sinew.config: expected the {found[0]}x{found[1]} patches of {frames}, got a grid of {got}"
