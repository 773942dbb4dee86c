"""OFT without a head: the tokens of a whole chunk at once, against upstream's formula on the reference's own states.

The fixtures hold no run of it. What stands before the logits is the same as with a head, so that the states which the
reference computed for OFT's fixture are those that its discrete decoding reads; for a policy without a state the
language model is computed here, on the reference's image tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sinew.convert import convert
from sinew.policy import load
from tests.golden import Golden
from tests.models.test_openvla_parity import inputs, observation

END = 32000  # 32064 of the vocabulary, less pad_to_multiple_of
HEADS, EPS, THETA = 5, 1e-6, 1e4  # of the fixtures' language models
LM, LM_HEAD = "language_model.model.", "language_model.lm_head.weight"


def weights(checkpoint: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        found |= {name: tensor.float() for name, tensor in load_file(file).items()}
    return found


def checkpoint(golden: Path, case: str, out: Path, away: Tensor | None = None) -> tuple[Path, Tensor]:
    """A copy without a head, and its lm_head: OpenVLA's, with longer rows for the bins, as fine-tuning makes them.

    away: what the states have in common, which would let one token win everywhere.
    """
    path = out / case
    shutil.copytree(golden / case / "checkpoint", path)
    for file in path.glob("action_head--*"):
        file.unlink()
    table = weights(golden / "openvla-ar" / "checkpoint")[LM_HEAD]
    if away is not None:
        table -= torch.outer(table @ away, away) / away.square().sum()
    table[END - 256 : END] *= 20
    table = table.to(torch.bfloat16)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"].setdefault(LM_HEAD, "lm_head.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file((load_file(file) if file.exists() else {}) | {LM_HEAD: table}, file)
    return path, table.float()


def actions_of(states: Tensor, lm_head: Tensor, statistics: dict, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Upstream's ``_regression_or_discrete_prediction`` and ``_unnormalize_actions``: token ids, actions [H, A]."""
    logits = states.double() @ lm_head.double().T
    best = logits.topk(2, dim=-1)
    assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-3, "a tie decides nothing"
    ids = best.indices[:, 0].numpy()
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2
    values = centres[np.clip(END - ids - 1, 0, 254)].reshape(-1, dim)
    low, high, mask = (np.array(statistics["action"][name]) for name in ("q01", "q99", "mask"))
    return ids.reshape(values.shape), np.where(mask, 0.5 * (values + 1) * (high - low + 1e-8) + low, values)


@pytest.fixture(scope="module")
def oft(golden, tmp_path_factory):
    """The bundle with a state, and the reference's ids and actions."""
    out = tmp_path_factory.mktemp("discrete")
    states = Golden(golden / "openvla-oft")["action_hidden"]
    path, lm_head = checkpoint(golden, "openvla-oft", out, away=states.mean(dim=0))
    (statistics,) = json.loads((path / "dataset_statistics.json").read_text()).values()
    expected = actions_of(states, lm_head, statistics, 7)
    return convert(path, out / "oft.gguf", settings={"decoding": "parallel"}), *expected


@pytest.mark.proves(engine="eager", family="openvla_oft")
@torch.inference_mode()
def test_tokens_and_actions_are_the_references(oft, golden):
    bundle, ids, actions = oft
    assert len(np.unique(ids)) > 10
    assert ((ids >= END - 256) & (ids < END)).mean() > 0.9
    policy, g = load(bundle, dtype="float32"), Golden(golden / "openvla-oft")
    model = policy.engine.model
    pixels, cameras, tokens, mask, state = inputs(policy, g)
    context = model.read(model.embed_images(pixels), cameras, tokens, mask, state)
    np.testing.assert_array_equal(model.tokens(context)[0].numpy(), ids)
    np.testing.assert_allclose(policy.infer(observation(g)).actions, actions, rtol=0, atol=1e-6)
    notes = " ".join(policy.manifest.provenance.notes)
    assert "a whole chunk at once; the state is read" in notes


# An export takes half a minute; OFT's with a head is in test_openvla_parity.py.
@pytest.mark.proves(engine="*", family="openvla_oft")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["plan", "cuda", pytest.param("onnx", marks=pytest.mark.slow)])
def test_engines(engine, oft, golden):
    bundle, _, actions = oft
    policy = load(bundle, "cpu", "float32", engine)
    found = policy.infer(observation(Golden(golden / "openvla-oft"))).actions
    np.testing.assert_allclose(found, actions, rtol=0, atol=1e-6)


def language_model(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Llama over rows [T, C] that all see each other: final states after the last norm."""

    def norm(rows: Tensor, name: str) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * w[name]

    count, width = x.shape
    size = width // HEADS
    angle = torch.arange(count)[:, None] * THETA ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([f(angle)] * 2, dim=-1)[None] for f in (torch.cos, torch.sin))

    def turned(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat([-second, first], dim=-1) * sin

    layers = 1 + max(int(name.split(".")[3]) for name in w if name.startswith(f"{LM}layers."))
    for layer in range(layers):
        at = f"{LM}layers.{layer}."
        h = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (
            (h @ w[f"{at}self_attn.{part}_proj.weight"].T).reshape(count, HEADS, size).transpose(0, 1)
            for part in "qkv"
        )
        scores = (turned(q) @ turned(k).transpose(1, 2) / size**0.5).softmax(dim=-1)
        seen = (scores @ v).transpose(0, 1).reshape(count, width)
        x = x + seen @ w[f"{at}self_attn.o_proj.weight"].T
        h = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = (h @ w[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T
    return norm(x, f"{LM}norm.weight")


def test_without_a_state(golden, tmp_path):
    """Files like OpenVLA's own, and a chunk that has to be given."""
    case, rows = "openvla-ar", 3
    path, lm_head = checkpoint(golden, case, tmp_path)
    settings = {"decoding": "parallel", "chunk": rows, "statistics": "bounds_q99"}
    policy = load(convert(path, tmp_path / "a.gguf", settings=settings, cameras=("full_image",)))
    g, w = Golden(golden / case), {name: tensor.double() for name, tensor in weights(path).items()}
    words = w[f"{LM}embed_tokens.weight"]
    prompt, zeros = words[g["prompt_ids"]], torch.zeros(rows * 7, words.shape[1], dtype=torch.float64)
    x = torch.cat([prompt[:1], g["image_tokens"].double(), prompt[1:], zeros, words[2:3]])
    first = len(g["image_tokens"]) + len(prompt) - 1
    states = language_model(x, w)[first : first + rows * 7]
    key = policy.spec.embodiment
    table = json.loads((path / "dataset_statistics.json").read_text())[key]
    _, actions = actions_of(states, lm_head, table, 7)
    np.testing.assert_allclose(policy.infer(observation(g)).actions, actions, rtol=0, atol=1e-6)
