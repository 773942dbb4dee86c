"""Models at their published size with random weights that are made on the GPU, and the cases that are measured.

This module needs only torch and numpy. It writes no bundle and reads no tokenizer. The random weights have the average
size of trained weights: a product keeps the size of its input. So activations neither vanish nor overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.core.registry import model_class, presets
from sinew.layers.norm import GemmaRMSNorm, RMSNorm
from sinew.models import build_on_meta
from sinew.models.base import Model
from sinew.processing import ModelInputs
from sinew.steps.image.base import ImageRecipe, ImageStep
from sinew.steps.image.crop import Crop
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.image.short_side import ShortSide
from sinew.steps.image.square import Square

CAMERA = (480, 640)  # height and width of the camera frames of the robots, in pixels
ACTIONS = 7  # columns of the padded action that the robot uses
STD = 0.02  # standard deviation of biases, and of the scales of norms around one


class Measured(NamedTuple):
    """One model architecture.

    Attributes:
        architecture: Name of the architecture.
        full: Configuration at the published size.
        tiny: Configuration with small widths, for tests without a GPU.
        steps: Number of solver steps.
    """

    architecture: str
    full: Any
    tiny: Any
    steps: int


def _sizes(preset: str, **small: Any) -> Measured:
    """Return the published sizes of a preset.

    Args:
        preset: Name of the preset.
        small: Values that the tiny configuration changes. A dict changes the fields of a part of the configuration.
    """
    record = presets()[preset].published()[preset]
    full = _record(model_class(record["architecture"]).config_type, record["config"])
    return Measured(record["architecture"], full, _changed(full, small), record["steps"])


def _record(kind: type, plain: dict[str, Any]) -> Any:
    """Build a configuration from plain dicts and lists.

    The strict reader of these files needs msgspec, which the machine with the GPU may lack. A test compares both.
    """
    kinds = get_type_hints(kind)

    def value(name: str, raw: Any) -> Any:
        if isinstance(raw, dict):
            return _record(kinds[name], raw)
        return tuple(raw) if isinstance(raw, list) else raw

    return kind(**{name: value(name, raw) for name, raw in plain.items()})


def _changed(config: Any, small: dict[str, Any]) -> Any:
    return replace(
        config,
        **{
            name: _changed(getattr(config, name), value) if isinstance(value, dict) else value
            for name, value in small.items()
        },
    )


WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
DECODER = {**WIDTHS, "num_kv_heads": 1, "head_dim": 16}
EXPERT = {
    "vocab_size": 64,
    "chunk_size": 6,
    "vision": {**WIDTHS, "image_size": 28},
    "language": DECODER,
    "expert": DECODER,
}
GROOT = {
    "vocab_size": 64,
    "image_token": 63,
    "chunk_size": 6,
    "rows": 1,
    "cols": 1,
    "vision": {"blocks": {**WIDTHS, "image_size": 64}, "output_size": 32, "taps": (0,)},
    "language": DECODER,
    "position_sections": (4, 2, 2),
    "head": {
        "dit": {
            "num_layers": 4,
            "num_heads": 2,
            "head_dim": 16,
            "output_size": 16,
            "context_size": 32,
            "is_cross": (True, False) * 2,
        },
        "hidden_size": 16,
        "positions": 64,
        "refine_layers": 1,
        "refine_heads": 2,
        "refine_head_dim": 16,
    },
}
MODELS = {
    "pi0.5": _sizes("pi0.5", **EXPERT),
    "pi0": _sizes("pi0", **EXPERT),
    "smolvla": _sizes("smolvla", **EXPERT | {"vision": {**WIDTHS, "image_size": 64}}),
    "groot": _sizes("gr00t-n1.7", **GROOT),
}


@dataclass(frozen=True)
class Case:
    """One measured case: the shape of the observation and of the chunk.

    Attributes:
        model: Key of ``MODELS``.
        views: Number of cameras.
        chunk: Number of actions in a chunk.
        prompt: Number of tokens of the prompt's words. For models that put placeholders of views into the prompt, the
            placeholders are added (:func:`length`).
        target_ms: Target for the p50 of the whole inference on an H200.
    """

    model: str
    views: int
    chunk: int
    prompt: int
    target_ms: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.views} views, chunk {self.chunk}, prompt {self.prompt}"

    @property
    def steps(self) -> int:
        return MODELS[self.model].steps


TARGETS = {
    "pi0.5": Case("pi0.5", 3, 50, 200, 10.0),
    "pi0": Case("pi0", 2, 63, 0, 7.0),
    "smolvla": Case("smolvla", 2, 50, 48, 3.5),
    "groot": Case("groot", 2, 40, 23, 6.0),
}


def side(config: Any) -> int:
    """Return the height and width of the square image that a model reads, in pixels."""
    if (blocks := getattr(config.vision, "blocks", None)) is None:
        return int(config.vision.image_size)
    return int(config.rows * config.vision.merge * blocks.patch_size)


def length(case: Case, config: Any) -> int:
    """Return the number of tokens in the prompt of a case, including the placeholders of views."""
    placeholders = config.rows * config.cols if hasattr(config, "image_token") else 0
    return case.prompt + case.views * int(placeholders)


def processing(model: str, config: Any) -> Processing:
    """Return the processing that the converters write for the published policy, with statistics of a robot with seven
    joints."""
    size, steps = side(config), IMAGE_STEPS[model]
    stats = {"mean": tuple(np.linspace(-1, 1, ACTIONS)), "std": tuple(np.linspace(1, 2, ACTIONS))}
    return Processing(
        image=ImageRecipe(size, size, steps(size)),
        prompt=PromptRecipe(max_tokens=256, vocab_size=config.vocab_size, pad_token_id=0),
        state=Normalization("mean_std", stats),
        action=Normalization("mean_std", stats),
        padded_state_dim=config.max_state_dim,
        padded_action_dim=config.max_action_dim,
    )


def _pi_steps(size: int) -> tuple[ImageStep, ...]:
    return (Letterbox(size, size, "pil_bilinear", "center"),)


def _groot_steps(size: int) -> tuple[ImageStep, ...]:
    short = ShortSide(size, "area")
    return (Square(), short, Crop(fraction=0.95), short)


IMAGE_STEPS: dict[str, Callable[[int], tuple[ImageStep, ...]]] = {
    "pi0.5": _pi_steps,
    "pi0": _pi_steps,
    "smolvla": lambda size: (Letterbox(size, size, "bilinear", "top_left"),),
    "groot": _groot_steps,
}


@torch.no_grad()
def random_model(
    name: str, device: torch.device, *, tiny: bool = False, chunk: int | None = None, seed: int = 0
) -> Model:
    """Return a model with random weights on ``device``. The other arguments are those of :func:`weightless`."""
    model = weightless(name, chunk, tiny)
    generator = torch.Generator(device).manual_seed(seed)
    state = {}
    for key, parameter in model.named_parameters():
        std, mean = _spread(model, key, parameter)
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        state[key] = values.normal_(mean, std, generator=generator)
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def weightless(name: str, chunk: int | None = None, tiny: bool = False) -> Model:
    """Return a model without memory for weights, on the meta device. It is bfloat16, except for the modules that are
    also float32 in a loaded bundle.
    """
    known = MODELS[name]
    config = known.tiny if tiny else known.full
    model = build_on_meta(known.architecture, replace(config, chunk_size=chunk or config.chunk_size))
    for key, parameter in model.named_parameters():
        wide = key.split(".")[0] in model.float32_modules
        parameter.data = parameter.data.to(torch.float32 if wide else torch.bfloat16)
    return model.eval().requires_grad_(False)


def _spread(model: nn.Module, key: str, parameter: Tensor) -> tuple[float, float]:
    """Return the standard deviation and the mean for the random values of a parameter."""
    parent = model.get_submodule(key.rpartition(".")[0])
    if isinstance(parent, nn.Embedding):
        # Gemma multiplies the rows of this table by the root of the width.
        return parameter.shape[1] ** -0.5 if "embed_tokens" in key else STD, 0.0
    if parameter.ndim > 1:
        return float(parameter[0].numel()) ** -0.5, 0.0
    is_scale = key.endswith(".weight")
    offset = isinstance(parent, (RMSNorm, nn.LayerNorm)) and not isinstance(parent, GemmaRMSNorm)
    return STD, 1.0 if is_scale and offset else 0.0


def in_float32(model: Model) -> Model:
    """Return the reference: a copy in float32 with the same values of the weights."""
    wide = build_on_meta(_architecture(model), model.config)
    wide.load_state_dict({k: v.float() for k, v in model.state_dict().items()}, strict=True, assign=True)
    return wide.eval().requires_grad_(False)


def with_chunk(model: Model, chunk: int) -> Model:
    """Return a model with the same weights that computes chunks of another length."""
    other = build_on_meta(_architecture(model), replace(model.config, chunk_size=chunk))
    other.load_state_dict(model.state_dict(), strict=True, assign=True)
    return other.eval().requires_grad_(False)


def _architecture(model: Model) -> str:
    return next(m.architecture for m in MODELS.values() if model_class(m.architecture) is type(model))


@dataclass(frozen=True)
class Sample:
    """An observation of a robot, the noise that makes the answer reproducible, and the number of solver steps."""

    inputs: ModelInputs
    noise: np.ndarray
    steps: int


def samples(case: Case, config: Any, count: int, camera: tuple[int, int] = CAMERA) -> list[Sample]:
    """Return ``count`` samples with random frames, prompts, states and noise. Each sample is different."""
    return list(_samples(case, config, count, camera))


def _samples(case: Case, config: Any, count: int, camera: tuple[int, int]) -> Iterator[Sample]:
    size, placeholders = side(config), length(case, config) - case.prompt
    words = config.vocab_size - 1  # the last token of the vocabulary is a placeholder
    for seed in range(count):
        rng = np.random.default_rng(seed)
        frames = tuple(rng.integers(0, 256, (*camera, 3), dtype=np.uint8) for _ in range(case.views))
        tokens = rng.integers(0, words, placeholders + case.prompt)
        tokens[:placeholders] = words
        inputs = ModelInputs(
            pixels=np.empty((0, 3, size, size), np.float32),
            camera_mask=np.ones(case.views, bool),
            tokens=tokens,
            token_mask=np.ones(len(tokens), bool),
            state=rng.standard_normal(config.max_state_dim).astype(np.float32),
            frames=frames,
        )
        noise = rng.standard_normal((case.chunk, config.max_action_dim)).astype(np.float32)
        yield Sample(inputs, noise, case.steps)
