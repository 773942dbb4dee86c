"""openpi's PyTorch checkpoints: layout, conventions, and its robots (ALOHA, DROID, LIBERO) as data.

The model itself is held against LeRobot's outputs elsewhere; here the golden weights are given openpi's
layout, and the bundle's policy is compared with the same model fed by openpi's formulas, written out.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sinew_client.control import choose

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.cli.infer import infer
from sinew.convert import convert
from sinew.core import ConvertError
from sinew.families.pi.openpi.embodiments import OPENPI_CONFIGS
from sinew.policy import Policy, load
from sinew.steps.vector.base import apply_steps
from tests.convert.openpi_layout import DIM, write_checkpoint
from tests.golden import assert_parity, integrate


@pytest.fixture
def openpi_checkpoint(golden, tmp_path):
    return lambda name: write_checkpoint(golden, tmp_path, name)


def make_policy(openpi_checkpoint, name: str) -> tuple[Policy, dict]:
    path, arch, stats = openpi_checkpoint(name)
    return load(
        convert(path, path.parent / f"{name}.gguf", arch=arch, openpi_config=name), engine="eager"
    ), stats


def observation(policy: Policy, prompt: str = "fold_the\ntowel ") -> dict:
    rng = np.random.default_rng(1)
    frames = {c.name: rng.integers(0, 255, (48, 80, 3), np.uint8) for c in policy.spec.cameras}
    state = rng.uniform(0.2, 0.6, policy.spec.state.dim)
    return {
        "images": frames,
        "state": state,
        "prompt": prompt,
        "noise": rng.standard_normal(policy.spec.noise_shape, np.float32),
    }


def as_openpi_does(policy: Policy, stats: dict, obs: dict, name: str) -> np.ndarray:
    """The chunk by openpi's own sequence of transforms, formula by formula, around the same model."""
    published, model = OPENPI_CONFIGS[name], policy.engine.model
    dim, action_dim = policy.spec.state.dim, policy.spec.action.dim
    state, aloha = obs["state"].astype(np.float64), published.embodiment.name == "aloha"
    flip = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])
    if aloha:
        state = flip * state
        linear = state[[6, 13]] * (0.05800 - 0.01844) + 0.01844
        angle = np.arcsin(np.clip((0.022**2 + linear**2 - 0.036**2) / (2 * 0.022 * linear), -1, 1))
        state[[6, 13]] = (angle - 0.5476) / (1.6296 - 0.5476)

    s, a = ({k: np.array(v) for k, v in stats[key].items()} for key in ("state", "actions"))
    if published.pi05:
        normalized = (state - s["q01"][:dim]) / (s["q99"][:dim] - s["q01"][:dim] + 1e-6) * 2.0 - 1.0
    else:
        normalized = (state - s["mean"][:dim]) / (s["std"][:dim] + 1e-6)

    prompt = obs["prompt"].strip().replace("_", " ").replace("\n", " ")
    if published.pi05 and published.state_in_prompt:
        bins = np.digitize(normalized, bins=np.linspace(-1, 1, 256 + 1)[:-1]) - 1
        text = f"Task: {prompt}, State: {' '.join(map(str, bins))};\nAction: "
    else:
        text = prompt + "\n"
    tokens = torch.tensor([policy.processor.prompter.tokenizer.encode(text).ids])

    side = policy.manifest.processing.image.height
    pixels = []
    for frame in obs["images"].values():
        h, w = frame.shape[:2]
        ratio = max(w / side, h / side)
        small = Image.fromarray(frame).resize((int(w / ratio), int(h / ratio)), resample=Image.BILINEAR)
        canvas = Image.new("RGB", (side, side), 0)
        canvas.paste(small, (int((side - small.width) / 2), int((side - small.height) / 2)))
        pixels.append(np.asarray(canvas, np.float32).transpose(2, 0, 1) / 255 * 2 - 1)
    with torch.inference_mode():
        image_tokens = model.embed_images(torch.from_numpy(np.stack(pixels))[None])
        padded = torch.zeros(1, DIM)
        padded[0, :dim] = torch.from_numpy(normalized)
        cameras = torch.ones(1, len(pixels), dtype=torch.bool)
        prefix = model.prefix(
            image_tokens, cameras, tokens, torch.ones_like(tokens, dtype=torch.bool), padded
        )
        noise = torch.from_numpy(obs["noise"])[None]
        x = integrate(lambda x, t: model.velocity(x, t, prefix), noise, 10)[0].double().numpy()

    if published.pi05:
        actions = (x + 1.0) / 2.0 * (a["q99"] - a["q01"] + 1e-6) + a["q01"]
    else:
        actions = x * (a["std"] + 1e-6) + a["mean"]
    if published.relative_actions:
        mask = {"aloha": [True] * 6 + [False] + [True] * 6 + [False], "droid": [True] * 7 + [False]}
        mask = np.array(mask.get(published.embodiment.name, [True] * 6 + [False]))
        actions[:, : len(mask)] += np.where(mask, state[: len(mask)], 0)
    actions = actions[:, :action_dim]
    if aloha:
        actions = flip * actions
        actions[:, [6, 13]] = (actions[:, [6, 13]] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
    return actions


@pytest.mark.parametrize(
    "name", ["pi0_aloha", "pi05_droid", "pi0_libero", "pi05_libero", "pi05_full_droid_finetune"]
)
def test_policy_is_openpis_sequence_of_transforms(openpi_checkpoint, name):
    policy, stats = make_policy(openpi_checkpoint, name)
    obs = observation(policy)
    assert_parity(policy.infer(obs).actions, as_openpi_does(policy, stats, obs, name).astype(np.float32))


def test_the_bundle_carries_the_robot(openpi_checkpoint):
    policy, _ = make_policy(openpi_checkpoint, "pi05_droid")
    spec = Bundle(policy.bundle.path).manifest.spec
    assert spec.embodiment == "droid"
    assert (spec.chunk_size, spec.state.dim, spec.action.dim) == (15, 8, 8)
    assert spec.keys[0].images == {
        "observation/exterior_image_1_left": "base_0_rgb",
        "observation/wrist_image_left": "left_wrist_0_rgb",
    }
    assert spec.keys[0].state == ("observation/joint_position", "observation/gripper_position")


@pytest.mark.parametrize(
    ("name", "chunk"), [("pi0_droid", 10), ("pi05_droid", 15), ("pi05_droid_finetune", 16)]
)
def test_droids_names_say_what_its_actions_are(openpi_checkpoint, name, chunk):
    """Joint velocities at 15 Hz, which no file of the checkpoint says."""
    policy, _ = make_policy(openpi_checkpoint, name)
    spec = Bundle(policy.bundle.path).manifest.spec
    assert (spec.chunk_size, spec.control_hz) == (chunk, 15.0)
    assert spec.motion is not None
    assert (spec.motion.kind, spec.motion.scale) == ("offsets", 0.2)
    assert spec.motion.action == tuple(range(7))  # the gripper is a position
    assert "actions are delta actions" in str(choose(policy=spec.to_dict()))


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("pi05_full_droid_finetune", "absolute", "aligned"),  # trained on joint positions
        ("pi05_libero", None, "the reference of the actions is unknown"),
    ],
)
def test_other_names_say_what_theirs_are_or_nothing(openpi_checkpoint, name, kind, told):
    policy, _ = make_policy(openpi_checkpoint, name)
    spec = Bundle(policy.bundle.path).manifest.spec
    assert (spec.motion and spec.motion.kind) == kind
    assert told in str(choose(policy=spec.to_dict()))


def test_default_prompt(openpi_checkpoint, tmp_path, capsys):
    policy, _ = make_policy(openpi_checkpoint, "pi0_aloha_towel")
    obs = observation(policy, "fold the towel")
    expected = policy.infer(obs).actions
    assert (policy.infer(obs | {"prompt": ""}).actions == expected).all()
    image = []
    for camera, frame in obs["images"].items():
        Image.fromarray(frame).save(tmp_path / f"{camera}.png")
        image.append(f"{camera}={tmp_path / camera}.png")
    assert infer(policy.bundle.path, image=image, state=",".join(map(str, obs["state"]))) == 0
    assert "prompt 'fold the towel', the bundle's default" in capsys.readouterr().out


def test_aloha_state_steps_round_trip_with_the_published_inverse():
    """A gripper at the ends of its travel lands where openpi's constants put it."""
    aloha = OPENPI_CONFIGS["pi0_aloha"].embodiment
    state = np.zeros(14)
    state[[6, 13]] = [0.0, 1.0]  # closed, open
    stepped = apply_steps(state, aloha.state_steps)
    angles = np.arcsin(
        np.clip([(0.022**2 + x**2 - 0.036**2) / (2 * 0.022 * x) for x in (0.01844, 0.058)], -1, 1)
    )
    np.testing.assert_allclose(stepped[[6, 13]], (angles - 0.5476) / (1.6296 - 0.5476), atol=1e-12)
    joints = np.arange(1.0, 15.0)
    flipped = apply_steps(joints, aloha.state_steps[:1])
    assert (np.flatnonzero(flipped < 0) == [1, 2, 8, 9]).all()
    assert (joints == np.arange(1.0, 15.0)).all()  # not in place


def test_what_is_missing_is_named(openpi_checkpoint):
    path, arch, _ = openpi_checkpoint("pi05_droid")
    out = path.parent / "out.gguf"
    with pytest.raises(
        ConvertError, match=r"--openpi-config NAME \(none was given\). Use one of: pi0_aloha, "
    ):
        convert(path, out, arch=arch)
    with pytest.raises(ConvertError, match="'pi7' is unknown"):
        convert(path, out, arch=arch, openpi_config="pi7")
    with pytest.raises(ConvertError, match="'pi05_doird' is unknown; did you mean 'pi05_droid'"):
        convert(path, out, arch=arch, openpi_config="pi05_doird")
    for name in ("pi0_fast_libero", "pi0_fast_libero_low_mem_finetune", "paligemma_binning_droid"):
        with pytest.raises(ConvertError, match=f"--openpi-config {name}: .*LeRobot's layout only") as caught:
            convert(path, out, arch=arch, openpi_config=name)
        assert "did you mean" not in str(caught.value)
    for name in (
        "pi05_libero_lora",
        "pi05_aloha_sim",
        "mine",
    ):  # other robots and models: no hint
        with pytest.raises(ConvertError, match=f"'{name}' is unknown\\). Use one of: pi0_aloha"):
            convert(path, out, arch=arch, openpi_config=name)
    with pytest.raises(ConvertError, match=r"does not fit its config: .* is missing"):
        convert(path, out, arch=arch, openpi_config="pi0_droid")  # pi0.5's weights
    with pytest.raises(ConvertError, match="does not fit its config"):
        convert(path, out, openpi_config="pi05_droid")  # full widths, tiny weights
    extra = path / "assets" / "other"
    extra.mkdir()
    shutil.copy(path / "assets" / "robot" / "norm_stats.json", extra)
    chosen = extra / "norm_stats.json"
    chosen.write_text(chosen.read_text().replace('"q99": [', '"q99": [9.0, ', 1))
    given = {"arch": arch, "openpi_config": "pi05_droid"}
    with pytest.raises(ConvertError, match=r"got other, robot; pass --stats ASSET or --stats FILE"):
        convert(path, out, **given)
    with pytest.raises(ConvertError, match=r"got other, robot; --stats othr does not match"):
        convert(path, out, stats=Path("othr"), **given)
    high = [
        Bundle(convert(path, out, stats=each, **given)).manifest.processing.state.stats["q99"][0]
        for each in (Path("other"), extra, chosen, Path("robot"))
    ]
    assert high[:3] == [9.0] * 3 != high[1:]
    chosen.write_text("{}")
    with pytest.raises(ConvertError, match=r"must have the statistics q01"):
        convert(path, out, arch=arch, openpi_config="pi05_droid", stats=chosen)
    shutil.rmtree(path / "tokenizer")
    with pytest.raises(ConvertError, match="PaliGemma's tokenizer.json"):
        convert(path, out, arch=arch, openpi_config="pi05_droid", stats=path / "assets/robot/norm_stats.json")


ROOT = Path(__file__).resolve().parents[2]
DROID = {
    "model": "pi05",
    "images": {
        "observation/exterior_image_1_left": "base_0_rgb",
        "observation/wrist_image_left": "left_wrist_0_rgb",
    },
    "state": ["observation/joint_position", "observation/gripper_position"],
    "state_dim": 8,
    "action_dim": 8,
    "delta_mask": [7, -1],
}


def test_a_training_configuration_of_ones_own(openpi_checkpoint, capsys):
    """In openpi's words it is the published one that it describes, or differs from it in what it says."""
    path, arch, stats = openpi_checkpoint("pi05_full_droid_finetune")
    own, out = path.parent / "pi05_mine.json", path.parent / "mine.gguf"

    def converted(*more: str, **record) -> Bundle | str:
        own.write_text(json.dumps(record))
        line = ["convert", path, out, "--arch", arch, "--openpi-config", own, "--force", *more]
        status = main(list(map(str, line)))
        said = capsys.readouterr().err
        return Bundle(out) if status == 0 else said.splitlines()[-1]

    published = Bundle(convert(path, path.parent / "p.gguf", arch=arch, openpi_config=path.name)).manifest
    names = {"names": published.spec.state.names}
    said = {"state": names | {"units": published.spec.state.units}, "action": names}
    mine = converted("--vectors", json.dumps(said), **DROID).manifest
    assert (mine.processing, mine.spec.keys) == (published.processing, published.spec.keys)
    as_published = replace(published.spec, name="pi05_mine", embodiment="pi05_mine", control_hz=None)
    assert replace(mine.spec, motion=published.spec.motion) == as_published
    assert [source.name for source in mine.provenance.sources if "mine" in source.name]
    assert converted(like=path.name).manifest.spec.action == published.spec.action

    absolute = converted(
        like=path.name, delta_mask=[], default_prompt="go", discrete_state_input=False
    ).manifest
    assert (absolute.processing.action_steps, absolute.spec.default_prompt) == ((), "go")
    kinds = [[step.kind for step in each.processing.prompt.steps] for each in (absolute, published)]
    assert ("state" in kinds[0], "state" in kinds[1]) == (False, True)

    file = path / "assets" / "robot" / "norm_stats.json"
    short = {key: {name: values[:7] for name, values in each.items()} for key, each in stats.items()}
    padded = {**DROID, "delta_mask": []}
    del padded["state_dim"]
    assert "state_dim is missing. Add the robot's number of dimensions" in converted(**padded)
    file.write_text(json.dumps({"norm_stats": short}))
    del padded["action_dim"]
    counted = converted(**padded).manifest.spec
    assert (counted.state.dim, counted.action.dim) == (7, 7)  # statistics that are not padded say it
    page = (ROOT / "docs" / "tutorial-openpi.md").read_text()
    told = converted(**json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])).manifest
    assert told.spec.keys[0].state == ("observation/joints", "observation/gripper")
    assert [step.dims for step in told.processing.action_steps] == [(0, 1, 2, 3, 4, 5)]

    for record, words in (
        ({**DROID, "image": {}}, "image: expected one of like, .*; did you mean 'images'"),
        ({**DROID, "images": {"a": "base"}}, "images: expected an object from .*, got {'a': 'base'}"),
        (
            {**DROID, "delta_mask": [9]},
            "delta_mask: expected at most 8 dimensions, the smaller of state and action, got 9",
        ),
        ({**DROID, "action_horizon": 15}, "action_horizon: expected 16, the value in .*config.json, got 15"),
        ({**DROID, "state_dim": True}, "state_dim: expected a whole number from 1 to 32, got True"),
        ({"like": "pi05"}, "like: expected one of pi0_aloha, .*, got 'pi05'"),
        ({"like": "pi05_aloha", "state_dim": 7}, "expected 14 and 14, because pi05_aloha converts the unit"),
        ({"images": DROID["images"]}, "model is missing"),
    ):
        assert re.search(words, converted(**record)), record


def write_jax_params(weights: dict[str, np.ndarray], path: Path, heads: dict[str, int], value: bool) -> None:
    """PyTorch weights in orbax's layout: stacked layers, separate heads, OCDBT.

    ``heads``: head counts of "vision" and "llm". ``value``: names as training runs save them.
    """
    import tensorstore

    def get(name: str) -> np.ndarray:
        return weights[f"paligemma_with_expert.{name}"]

    def stack(name: str, depth: int, change=lambda x: x) -> np.ndarray:
        return np.stack([change(get(name.format(i))) for i in range(depth)])

    def depth_of(name: str) -> int:
        return next(i for i in range(100) if f"paligemma_with_expert.{name.format(i)}" not in weights)

    def split(count: int, axis: int):  # weight [out, in] -> kernel with heads apart
        if axis == 0:
            return lambda w: w.T.reshape(w.shape[1], count, -1)  # [C, N, H]
        return lambda w: w.T.reshape(count, -1, w.shape[0])  # [N, H, C]

    tree = {}
    tower, img = "paligemma.model.vision_tower.vision_model", "PaliGemma.img"
    tree[f"{img}.embedding.kernel"] = get(f"{tower}.embeddings.patch_embedding.weight").transpose(2, 3, 1, 0)
    tree[f"{img}.embedding.bias"] = get(f"{tower}.embeddings.patch_embedding.bias")
    tree[f"{img}.pos_embedding"] = get(f"{tower}.embeddings.position_embedding.weight")[None]
    tree[f"{img}.Transformer.encoder_norm.scale"] = get(f"{tower}.post_layernorm.weight")
    tree[f"{img}.Transformer.encoder_norm.bias"] = get(f"{tower}.post_layernorm.bias")
    tree[f"{img}.head.kernel"] = get("paligemma.model.multi_modal_projector.linear.weight").T
    tree[f"{img}.head.bias"] = get("paligemma.model.multi_modal_projector.linear.bias")
    layer, block = f"{tower}.encoder.layers.{{}}", f"{img}.Transformer.encoderblock"
    depth = depth_of(f"{layer}.layer_norm1.weight")
    for j in (0, 1):
        tree[f"{block}.LayerNorm_{j}.scale"] = stack(f"{layer}.layer_norm{j + 1}.weight", depth)
        tree[f"{block}.LayerNorm_{j}.bias"] = stack(f"{layer}.layer_norm{j + 1}.bias", depth)
        tree[f"{block}.MlpBlock_0.Dense_{j}.kernel"] = stack(
            f"{layer}.mlp.fc{j + 1}.weight", depth, np.transpose
        )
        tree[f"{block}.MlpBlock_0.Dense_{j}.bias"] = stack(f"{layer}.mlp.fc{j + 1}.bias", depth)
    n, attention = heads["vision"], f"{block}.MultiHeadDotProductAttention_0"
    for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        name = f"{layer}.self_attn.{ours}_proj"
        tree[f"{attention}.{theirs}.kernel"] = stack(f"{name}.weight", depth, split(n, 0))
        tree[f"{attention}.{theirs}.bias"] = stack(f"{name}.bias", depth, lambda b: b.reshape(n, -1))
    tree[f"{attention}.out.kernel"] = stack(f"{layer}.self_attn.out_proj.weight", depth, split(n, 1))
    tree[f"{attention}.out.bias"] = stack(f"{layer}.self_attn.out_proj.bias", depth)

    tree["PaliGemma.llm.embedder.input_embedding"] = get("paligemma.model.language_model.embed_tokens.weight")
    for ours, suffix in (("paligemma.model.language_model", ""), ("gemma_expert.model", "_1")):
        layer, llm = f"{ours}.layers.{{}}", "PaliGemma.llm"
        depth = depth_of(f"{layer}.mlp.up_proj.weight")
        attn = f"{layer}.self_attn"

        def first(count: int):  # weight [N * H, C] -> [N, C, H]
            return lambda w: w.reshape(count, -1, w.shape[1]).transpose(0, 2, 1)

        tree[f"{llm}.layers.attn.q_einsum{suffix}.w"] = stack(
            f"{attn}.q_proj.weight", depth, first(heads["llm"])
        )
        kv = [stack(f"{attn}.{x}_proj.weight", depth, first(1)) for x in "kv"]
        tree[f"{llm}.layers.attn.kv_einsum{suffix}.w"] = np.stack(kv, axis=1)
        out = stack(f"{attn}.o_proj.weight", depth, split(heads["llm"], 1))
        tree[f"{llm}.layers.attn.attn_vec_einsum{suffix}.w"] = out
        gating = [stack(f"{layer}.mlp.{x}_proj.weight", depth, np.transpose) for x in ("gate", "up")]
        tree[f"{llm}.layers.mlp{suffix}.gating_einsum"] = np.stack(gating, axis=1)
        tree[f"{llm}.layers.mlp{suffix}.linear"] = stack(f"{layer}.mlp.down_proj.weight", depth, np.transpose)
        norms = {
            f"layers.pre_attention_norm{suffix}": f"{layer}.input_layernorm",
            f"layers.pre_ffw_norm{suffix}": f"{layer}.post_attention_layernorm",
        }
        adaptive = f"paligemma_with_expert.{ours}.norm.dense.weight" in weights
        for stored, name in norms.items():
            if adaptive:
                tree[f"{llm}.{stored}.Dense_0.kernel"] = stack(f"{name}.dense.weight", depth, np.transpose)
                tree[f"{llm}.{stored}.Dense_0.bias"] = stack(f"{name}.dense.bias", depth)
            else:
                tree[f"{llm}.{stored}.scale"] = stack(f"{name}.weight", depth)
        if adaptive:
            tree[f"{llm}.final_norm{suffix}.Dense_0.kernel"] = get(f"{ours}.norm.dense.weight").T
            tree[f"{llm}.final_norm{suffix}.Dense_0.bias"] = get(f"{ours}.norm.dense.bias")
        else:
            tree[f"{llm}.final_norm{suffix}.scale"] = get(f"{ours}.norm.weight")
    for name, array in weights.items():
        if not name.startswith("paligemma_with_expert."):
            module, kind = name.rsplit(".", 1)
            tree[f"{module}.{'kernel' if kind == 'weight' else kind}"] = array.T

    ending = ".value" if value else ""
    for name, array in tree.items():
        store = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"params.{name}{ending}/"}
        metadata = {"compressor": {"id": "zstd"}}
        tensorstore.open(
            {"driver": "zarr", "kvstore": store, "metadata": metadata},
            create=True,
            dtype=array.dtype,
            shape=array.shape,
        ).result().write(array).result()
    keys = [["params", *name.split("."), *(["value"] if value else [])] for name in tree]
    record = {str(tuple(key)): {"key_metadata": [{"key": k, "key_type": 2} for k in key]} for key in keys}
    metadata = {"tree_metadata": record, "use_ocdbt": True, "use_zarr3": False}
    (path / "_METADATA").write_text(json.dumps(metadata))


@pytest.mark.parametrize(("name", "value"), [("pi0_aloha", True), ("pi05_droid", False)])
def test_jax_checkpoints_give_the_same_bundle(openpi_checkpoint, name, value):
    path, arch, _ = openpi_checkpoint(name)
    reference = Bundle(convert(path, path.parent / "torch.gguf", arch=arch, openpi_config=name))
    weights = {k: v.numpy() for k, v in load_file(path / "model.safetensors").items() if "lm_head" not in k}
    (path / "model.safetensors").unlink()
    (path / "config.json").unlink()  # JAX checkpoints have none
    widths = json.loads(arch.read_text())
    heads = {
        "vision": widths["vision"]["num_attention_heads"],
        "llm": widths["language"]["num_attention_heads"],
    }
    write_jax_params(weights, path / "params", heads, value)
    kept = {"lm_head": "true"}  # which JAX's files have as the token table alone
    bundle = Bundle(convert(path, path.parent / "jax.gguf", arch=arch, openpi_config=name, settings=kept))
    assert (reference.manifest.config["lm_head"], bundle.manifest.config["lm_head"]) == ("", "tied")
    assert any("it adds no bytes" in note for note in bundle.manifest.provenance.notes)
    assert bundle.infos.keys() == reference.infos.keys()
    for tensor in bundle.infos:
        assert torch.equal(bundle.tensor(tensor), reference.tensor(tensor)), tensor
    step = path.rename(path.parent / "29999")
    (path / "mine").mkdir(parents=True)
    (path / "mine" / "29999").symlink_to(step)
    for given, told in ((path / "mine", path / "mine" / "29999"), (step / "params", step)):
        with pytest.raises(
            ConvertError, match=f"expected the folder of one training step; use one of: {told}$"
        ):
            convert(given, step.parent / "no.gguf", arch=arch, openpi_config=name)
    path = step
    other = {"pi0_aloha": "pi05_aloha", "pi05_droid": "pi0_droid"}[name]
    with pytest.raises(ConvertError, match="the checkpoint has no"):
        convert(path, path.parent / "no.gguf", arch=arch, openpi_config=other)


def test_jax_checkpoints_without_the_extra_say_how_to_go_on(tmp_path, golden, monkeypatch):
    (tmp_path / "params").mkdir()
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "norm_stats.json").write_text("{}")
    tokenizer = golden / "pi05-2cam" / "checkpoint" / "tokenizer"
    with pytest.raises(ConvertError, match="_METADATA: No such file"):
        convert(tmp_path, tmp_path / "out.gguf", openpi_config="pi05_droid", tokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ConvertError, match=r"JAX checkpoint.*\[jax\].*convert_jax_model_to_pytorch.py"):
        convert(tmp_path, tmp_path / "out.gguf", openpi_config="pi05_droid", tokenizer=tokenizer)
