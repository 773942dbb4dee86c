"""Models at their published size with random weights made on the device, and what is asked of them.

Needs torch and numpy alone: no bundle is written and no tokenizer is read. Weights are as large as a trained
layer's are on average (a product keeps the size of its input), so that activations neither die out nor overflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.families.pi.model import PI0Config, PI05Config
from sinew.families.smolvla.model import SmolVLAConfig
from sinew.layers.decoder import DecoderConfig
from sinew.layers.norm import GemmaRMSNorm, RMSNorm
from sinew.layers.vit import ViTConfig
from sinew.models import build_on_meta
from sinew.models.base import Model
from sinew.processing import ModelInputs
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.letterbox import Letterbox

STEPS = 10
CAMERA = (480, 640)  # height, width of the frames that robots send
ACTIONS = 7  # of the padded action's columns
STD = 0.02  # of biases and of what lies around a norm's one
PI = {
    "vocab_size": 257152,
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "min_period": 0.004,
    "max_period": 4.0,
    "vision": ViTConfig(1152, 4304, 27, 16, 224, 14, 1e-6),
    "language": DecoderConfig(2048, 16384, 18, 8, 1, 256, 1e-6, 1e4, "gemma_rms", "gelu_tanh"),
    "expert": DecoderConfig(1024, 4096, 18, 8, 1, 256, 1e-6, 1e4, "gemma_rms", "gelu_tanh"),
}
SMOLVLA = {
    **PI,
    "vocab_size": 49280,
    "vision": ViTConfig(768, 3072, 12, 12, 512, 16, 1e-6),
    "language": DecoderConfig(960, 2560, 16, 15, 5, 64, 1e-5, 1e4),
    "expert": DecoderConfig(720, 2048, 16, 15, 5, 64, 1e-5, 1e4),
    "pixel_shuffle": 4,
    "self_attn_every_n_layers": 2,
}
TINY_PI = {
    **PI,
    "vocab_size": 64,
    "chunk_size": 6,
    "vision": ViTConfig(32, 64, 2, 2, 28, 14, 1e-6),
    "language": DecoderConfig(32, 64, 2, 2, 1, 16, 1e-6, 1e4, "gemma_rms", "gelu_tanh"),
    "expert": DecoderConfig(32, 64, 2, 2, 1, 16, 1e-6, 1e4, "gemma_rms", "gelu_tanh"),
}
TINY_SMOLVLA = {
    **SMOLVLA,
    "vocab_size": 64,
    "chunk_size": 6,
    "vision": ViTConfig(32, 64, 2, 2, 64, 16, 1e-6),
    "language": DecoderConfig(32, 64, 2, 2, 1, 16, 1e-5, 1e4),
    "expert": DecoderConfig(32, 64, 2, 2, 1, 16, 1e-5, 1e4),
}
# name -> (architecture, configuration, the same with small widths for tests without a GPU)
MODELS: dict[str, tuple[str, Any, Any]] = {
    "pi0.5": ("pi05", PI05Config(**PI), PI05Config(**TINY_PI)),
    "pi0": ("pi0", PI0Config(**PI), PI0Config(**TINY_PI)),
    "smolvla": ("smolvla", SmolVLAConfig(**SMOLVLA), SmolVLAConfig(**TINY_SMOLVLA)),
}


@dataclass(frozen=True)
class Case:
    """One question: frames of ``views`` cameras, a prompt of ``prompt`` tokens, chunks of ``chunk`` actions.

    target_ms: what is asked for at p50 on an H200, end to end.
    """

    model: str
    views: int
    chunk: int
    prompt: int
    target_ms: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.views} views, chunk {self.chunk}, prompt {self.prompt}"


TARGETS = {
    "pi0.5": Case("pi0.5", 3, 50, 200, 10.0),
    "pi0": Case("pi0", 2, 63, 0, 7.0),
    "smolvla": Case("smolvla", 2, 50, 48, 3.5),
}


def cases(model: str) -> list[Case]:
    """The target first, then 1, 2 and 3 views, chunks of 10 and of 50 (pi0: 63), prompts of 48 and 200."""
    target = TARGETS[model]
    long = 63 if model == "pi0" else 50
    grid = [
        Case(model, views, chunk, prompt)
        for prompt in (48, 200)
        for chunk in (long, 10)
        for views in (1, 2, 3)
    ]
    asked = (target.views, target.chunk, target.prompt)
    return [target, *(case for case in grid if (case.views, case.chunk, case.prompt) != asked)]


def processing(model: str, config: Any) -> Processing:
    """As the converters write it for the published policies, with statistics of a robot of seven joints."""
    side, is_pi = config.vision.image_size, model != "smolvla"
    stats = {"mean": tuple(np.linspace(-1, 1, ACTIONS)), "std": tuple(np.linspace(1, 2, ACTIONS))}
    return Processing(
        image=ImageRecipe(
            side,
            side,
            (Letterbox(side, side, *(("pil_bilinear", "center") if is_pi else ("bilinear", "top_left"))),),
        ),
        prompt=PromptRecipe(max_tokens=256, vocab_size=config.vocab_size, pad_token_id=0),
        state=Normalization("mean_std", stats),
        action=Normalization("mean_std", stats),
        padded_state_dim=config.max_state_dim,
        padded_action_dim=config.max_action_dim,
    )


@torch.no_grad()
def random_model(
    name: str, device: torch.device, *, tiny: bool = False, chunk: int | None = None, seed: int = 0
) -> Model:
    """In bfloat16, with the modules in float32 that stay so when a bundle is loaded."""
    architecture, full, small = MODELS[name]
    config = small if tiny else full
    model = build_on_meta(architecture, replace(config, chunk_size=chunk or config.chunk_size))
    generator = torch.Generator(device).manual_seed(seed)
    state = {}
    for key, parameter in model.named_parameters():
        wide = key.split(".")[0] in model.float32_modules
        dtype = torch.float32 if wide else torch.bfloat16
        std, mean = _spread(model, key, parameter)
        values = torch.empty(parameter.shape, dtype=dtype, device=device)
        state[key] = values.normal_(mean, std, generator=generator)
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def _spread(model: nn.Module, key: str, parameter: Tensor) -> tuple[float, float]:
    """(standard deviation, mean) of a parameter."""
    parent = model.get_submodule(key.rpartition(".")[0])
    if isinstance(parent, nn.Embedding):
        # Gemma multiplies its rows by the root of the width.
        return parameter.shape[1] ** -0.5 if "embed_tokens" in key else STD, 0.0
    if parameter.ndim > 1:
        return float(parameter[0].numel()) ** -0.5, 0.0
    is_scale = key.endswith(".weight")
    offset = isinstance(parent, (RMSNorm, nn.LayerNorm)) and not isinstance(parent, GemmaRMSNorm)
    return STD, 1.0 if is_scale and offset else 0.0


def in_float32(model: Model) -> Model:
    """The reference: a copy with the same weights, widened."""
    wide = build_on_meta(_architecture(model), model.config)
    wide.load_state_dict({k: v.float() for k, v in model.state_dict().items()}, strict=True, assign=True)
    return wide.eval().requires_grad_(False)


def with_chunk(model: Model, chunk: int) -> Model:
    """The same weights, asked for chunks of another length."""
    other = build_on_meta(_architecture(model), replace(model.config, chunk_size=chunk))
    other.load_state_dict(model.state_dict(), strict=True, assign=True)
    return other.eval().requires_grad_(False)


def _architecture(model: Model) -> str:
    return {"PI05": "pi05", "PI0": "pi0", "SmolVLA": "smolvla"}[type(model).__name__]


@dataclass(frozen=True)
class Sample:
    """A robot's observation, with the noise that makes the answer reproducible."""

    inputs: ModelInputs
    noise: np.ndarray


def samples(case: Case, config: Any, count: int, camera: tuple[int, int] = CAMERA) -> list[Sample]:
    """Random frames, prompts, states and noise; different in all of them."""
    return list(_samples(case, config, count, camera))


def _samples(case: Case, config: Any, count: int, camera: tuple[int, int]) -> Iterator[Sample]:
    side = config.vision.image_size
    for seed in range(count):
        rng = np.random.default_rng(seed)
        frames = tuple(rng.integers(0, 256, (*camera, 3), dtype=np.uint8) for _ in range(case.views))
        inputs = ModelInputs(
            pixels=np.empty((0, 3, side, side), np.float32),
            camera_mask=np.ones(case.views, bool),
            tokens=rng.integers(0, config.vocab_size, case.prompt),
            token_mask=np.ones(case.prompt, bool),
            state=rng.standard_normal(config.max_state_dim).astype(np.float32),
            frames=frames,
        )
        yield Sample(inputs, rng.standard_normal((case.chunk, config.max_action_dim)).astype(np.float32))
