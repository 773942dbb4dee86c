"""Create the model for the architecture name in a bundle, and check that it fits the bundle's tensors and spec."""

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
    """Create the model of a registered architecture without memory for its weights (:func:`on_meta`)."""
    return on_meta(model_class(architecture), config)


def on_meta(cls: Any, config: Any) -> Model:
    """Create a model of the class ``cls`` without memory for its weights.

    Use it to read shapes, or to assign weights later.

    Raises:
        SinewError: The class reads the values of a tensor in its constructor.
    """
    # Import torch here, because exported graphs run without torch and import the solvers of this package.
    import torch

    try:
        with torch.device("meta"):
            model: Model = cls(config)
            return model
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise SinewError(
            f"the constructor of {cls.__name__} reads the values of a tensor, but Sinew creates models without memory"
            f' first. Create that tensor with device="cpu" ({error})'
        ) from error


def mismatch(
    model: Model, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str] | None = None
) -> str | None:
    """Describe the differences between a set of tensors, such as those of a bundle, and the tensors of the
    model.

    Args:
        model: The model.
        shapes: Name of each tensor -> shape.
        aliases: The model's name of a tensor -> the name that the user knows, for tensors whose two names
            differ.

    Returns:
        The differences as text; None if the tensors are equal.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names = aliases or {}
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [
        f"{names.get(name, name)} is not a part of the model" for name in shapes if name not in expected
    ]
    problems += [
        f"{names.get(name, name)} has shape {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if not problems:
        return None
    return "; ".join(problems[:5]) + (f" (and {len(problems) - 5} more)" if len(problems) > 5 else "")


def check_agreement(path: Path, manifest: Any, model: Model) -> None:
    """Check that the model has all features and sizes that a bundle's manifest requires.

    Raises:
        BundleError: The model lacks a feature, or has another size.
    """
    if problem := next(_disagreements(manifest.spec, manifest.processing, model), ""):
        raise BundleError(f"{path}: {problem}")


def _disagreements(spec: PolicySpec, processing: Any, model: Model) -> Iterator[str]:
    sizes = spec.noise_shape[0], processing.padded_action_dim, processing.padded_state_dim
    if (*model.noise_shape, model.state_size) != sizes:
        yield "sinew.spec or sinew.processing disagrees with sinew.config about sizes; convert the checkpoint again"
    # Without this check the actions of a single-pass head would be added to noise, without an error.
    if type(model).solver.kind == "single" and spec.solver.kind != "single":
        yield (
            f"spec.solver: expected single, because {spec.architecture} computes its actions in one pass, got"
            f" {spec.solver.kind}"
        )
    if model.views is not None and (spec.views != model.views or not processing.all_cameras):
        optional = "" if processing.all_cameras else ", of which some may be missing"
        expected = f"expected true and {model.views} views, as the weights require"
        yield f"sinew.processing.all_cameras: {expected}, got {spec.views}{optional}"
    moments = (spec.history, len(spec.cameras)) if spec.history_padding == "mask" else None
    if model.moments != moments:
        expected, got = (
            f"an observation history of 1 to {each[0]} steps with {each[1]} views each"
            if each
            else "no variable history"
            for each in (model.moments, moments)
        )
        yield f"sinew.spec: sinew.config requires {expected}, got {got}"
    yield from _frame_disagreements(spec, processing.image, model)
    if spec.committed_rows and not model.times_per_row:
        expected = f"0, because the head of {spec.architecture} accepts only one time for all actions"
        yield f"spec.committed_rows: expected {expected}, got {spec.committed_rows}"


def _frame_disagreements(spec: PolicySpec, image: ImageRecipe, model: Model) -> Iterator[str]:
    pictures = tuple(image.of_camera(index).picture for index in range(len(spec.cameras)))
    if image.sizes and not model.frames:
        yield f"sinew.processing.image.sizes: must be absent, because all views of {spec.architecture} have one size"
    elif model.frames and pictures != model.frames:
        expected, got = (", ".join(f"{h}x{w}" for h, w in sizes) for sizes in (model.frames, pictures))
        yield f"sinew.processing.image.sizes: sinew.config requires {expected}, got {got}"
    for index, camera in enumerate(spec.cameras if model.grid is not None else ()):
        size = image.of_camera(index).size_after(camera.height, camera.width)
        frames = f"camera {camera.name}, whose frames become {size[0]}x{size[1]} pixels"
        if model.frames:
            if size != pictures[index]:
                expected = "x".join(map(str, pictures[index]))
                yield f"sinew.processing.image.sizes: expected the size of {frames}, got {expected}"
        elif (patches := model.grid_of(*size)) != model.grid:
            got = "x".join(map(str, model.grid or ()))
            yield (
                f"sinew.config: expected a grid of {patches[0]}x{patches[1]} patches, as {frames} need, got {got}"
            )
