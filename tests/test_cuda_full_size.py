"""Published models at full size through the fused program, on tensors without memory: what would be launched, and
that every launch is one that the kernels accept. Nothing is computed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from sinew.bundle.schema import ImageRecipe, Normalization, Processing, PromptRecipe
from sinew.engine.cuda.fuse import ON_CUDA, fuse
from sinew.engine.cuda.graphs import Calls
from sinew.engine.cuda.launches import Kernels
from sinew.engine.cuda.program import Key, Program
from sinew.engine.kernels import tuning
from sinew.engine.kernels.tiles import ARCHITECTURES, SHARED_MEMORY
from sinew.engine.plan import Plan
from sinew.perf.program import preset

pytest.importorskip("triton")
META = torch.device("meta")
IDENTITY = Normalization("identity")


class Prepared(Kernels):
    """Makes every launch, with all of its checks, and runs none."""

    def __init__(self) -> None:
        super().__init__(META)
        self.launches: Counter[str] = Counter()
        self.rows: set[tuple[str, int]] = set()

    def launch(self, kernel, dims, like, prepare, plain, out):
        made = prepare(None)
        assert all(size > 0 for size in made.grid)
        self.launches[kernel] += 1
        self.rows.add((kernel, dims[0]))
        return out

    def preprocess(self, frames, resize, patch, out) -> None:
        self.launches["preprocess"] += 1
        assert (patch, out.shape[2]) in ((14, 592), (16, 768))


def program(
    name: str, views: int, tokens: int, side: int, ops: Prepared, dtype: torch.dtype = torch.bfloat16
) -> Program:
    model = preset(name).model
    for part, parameter in model.named_parameters():
        if part.split(".")[0] not in model.float32_modules:
            parameter.data = parameter.data.to(dtype)
    exact = "pil_bilinear" if side == 224 else "bilinear"
    processing = Processing(
        ImageRecipe(side, side, interpolation=exact, pad="center" if side == 224 else "top_left"),
        PromptRecipe(max_tokens=256, vocab_size=100, pad_token_id=0),
        IDENTITY,
        IDENTITY,
        32,
        32,
    )
    plan = fuse(Plan.of(model, rewrites=ON_CUDA), ops)
    key = Key(views, ((480, 640),) * views, tokens, 10)
    return Program(key, plan, ops, processing, Calls(), META)


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "views", "tokens", "side", "layers"),
    [("pi05", 3, 200, 224, 18), ("pi0", 2, 16, 224, 18), ("smolvla", 2, 48, 512, 16)],
)
@torch.no_grad()
def test_every_launch_of_a_chunk_is_accepted(monkeypatch, name, views, tokens, side, layers, capability):
    monkeypatch.setattr(tuning, "capability", lambda device: capability)
    tuning.choose.cache_clear()
    ops = Prepared()
    try:
        made = program(name, views, tokens, side, ops)
        made.chunk()
    finally:
        tuning.choose.cache_clear()
    assert capability in SHARED_MEMORY
    language, head = layers - 1, 10 * layers  # the last language layer leaves its keys and values alone
    assert ops.launches == {
        "preprocess": 1,
        "qkv_rope": language + 1 + head,
        "packed_attention": language + head,
        "gated_mlp": language + head,
        "splitk_linear": 2 * (language + head),
        "norm_linear": 10,
    }
    per_image = {224: 256, 512: 64}[side]
    prefix = views * per_image + tokens + (name == "smolvla")
    actions = made.model.config.chunk_size
    assert ops.rows >= {("gated_mlp", prefix), ("gated_mlp", actions + (name == "pi0"))}
    assert ("norm_linear", actions) in ops.rows


@torch.no_grad()
def test_float32_and_four_views_fit_the_workspace():
    for dtype, views in ((torch.float32, 3), (torch.bfloat16, 4)):
        ops = Prepared()
        program("pi05", views, 200, 224, ops, dtype).chunk()
        assert sum(ops.launches.values()) == 997
