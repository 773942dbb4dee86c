"""pi0 and pi0.5 against LeRobot's stored inputs and outputs; their stages are in test_stages.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError, Observation, ObservationError
from sinew.layers.attention import block_mask
from sinew.policy import Policy, load
from sinew.steps.prompt.state import State
from tests.convert.vlacpp_file import write_vlacpp_pi
from tests.engines import run_one
from tests.golden import Golden, assert_parity

CASES = ["pi0-2cam", "pi05-2cam"]


@pytest.fixture(params=CASES)
def case(request, golden, pi_bundle) -> tuple[Policy, Golden]:
    return load(
        pi_bundle(request.param), dtype="float32", engine="eager", allow_missing_cameras=True
    ), Golden(golden / request.param)


def batched(policy: Policy, g: Golden) -> tuple[torch.Tensor, ...]:
    """Model inputs as upstream pads them, with a batch axis."""
    inputs = policy.processor.inputs(Observation.from_mapping(g.observation()), padded=True)
    arrays = (inputs.pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)
    return tuple(torch.from_numpy(array)[None] for array in arrays)


def test_preprocessing_matches(case):
    policy, g = case
    pixels, _, tokens, token_mask, state = batched(policy, g)
    for view, camera in enumerate(g.cameras):
        torch.testing.assert_close(pixels[:, view], g[f"pixel_values.{camera}"], atol=1e-6, rtol=0)
    assert torch.equal(tokens, g["lang_tokens"])
    assert torch.equal(token_mask, g["lang_mask"])
    torch.testing.assert_close(state[:, : policy.spec.state.dim], g["state_normalized"], atol=1e-6, rtol=0)
    prompter = policy.processor.prompter
    assert "<bos>" + prompter.text(g.metadata["task"], g.numpy("state_normalized")[0]) == g.metadata["prompt"]


@torch.inference_mode()
def test_masks_of_the_prefix_match(case):
    policy, g = case
    model = policy.engine.model
    pixels, *rest = batched(policy, g)
    _, valid, _ = model.embed_prefix(model.embed_images(pixels), *rest)
    assert torch.equal(valid, g["prefix_pad_masks"])
    assert not g["prefix_att_masks"].any()
    one_block = torch.zeros_like(valid)
    mask = model.prefix_mask(valid, one_block)
    assert torch.equal(mask[valid], block_mask(valid, one_block)[valid])
    assert mask.stride(1) == 0  # one row of memory: engines read it as a mask of keys


def test_leaving_padding_out_changes_nothing(case):
    policy, g = case
    observation = Observation.from_mapping(g.observation())
    padded, short = (policy.processor.inputs(observation, padded=p) for p in (True, False))
    assert len(short.tokens) < len(padded.tokens) == policy.spec.max_prompt_tokens
    for inputs in (padded, short):
        chunk, _ = run_one(policy.engine, inputs, observation.noise, policy.spec.solver_steps)
        assert_parity(policy.processor.actions(chunk, observation), g.numpy("actions")[0])


# ----------------------------------------------------------------------------- variations


@pytest.fixture(params=CASES)
def checkpoint(request, golden, tmp_path) -> Path:
    """A writable copy of a golden checkpoint, with ``arch.json`` beside it."""
    source = golden / request.param
    shutil.copytree(source / "checkpoint", tmp_path / "checkpoint", copy_function=shutil.copyfile)
    shutil.copyfile(source / "arch.json", tmp_path / "arch.json")
    for directory in (tmp_path / "checkpoint", tmp_path / "checkpoint" / "tokenizer"):
        directory.chmod(0o755)
    return tmp_path / "checkpoint"


def edit(checkpoint: Path, **changes) -> dict:
    path = checkpoint / "config.json"
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(record))
    return record


def run(checkpoint: Path, **options) -> Path:
    options = {"arch": checkpoint.parent / "arch.json"} | options
    return convert(checkpoint, checkpoint.parent / "out.gguf", **options)


def golden_of(checkpoint: Path, golden: Path) -> Golden:
    return Golden(golden / f"{json.loads((checkpoint / 'config.json').read_text())['type']}-2cam")


def test_a_missing_camera_is_masked_and_costs_nothing(checkpoint, golden):
    """Three slots, two frames: upstream encodes an empty image and masks it. Same actions, two images."""
    features = json.loads((checkpoint / "config.json").read_text())["input_features"]
    features["observation.images.right_wrist_0_rgb"] = {"type": "VISUAL", "shape": [3, 480, 640]}
    edit(checkpoint, input_features=features)
    policy, g = (
        load(run(checkpoint), engine="eager", allow_missing_cameras=True),
        golden_of(checkpoint, golden),
    )
    observation = Observation.from_mapping(g.observation())
    padded = policy.processor.inputs(observation, padded=True)
    assert padded.camera_mask.tolist() == [True, True, False]
    assert len(policy.processor.inputs(observation).pixels) == 2
    chunk, _ = run_one(policy.engine, padded, observation.noise, policy.spec.solver_steps)
    assert_parity(policy.processor.actions(chunk, observation), g.numpy("actions")[0])
    assert_parity(policy.infer(observation).actions, g.numpy("actions")[0])


@pytest.mark.parametrize("views", [1, 2])
def test_padding_is_free_for_any_views_and_prompt_length(case, views):
    policy, g = case
    observation = g.observation()
    observation["images"] = dict(list(observation["images"].items())[:views])
    longest = policy.spec.max_prompt_tokens - len(policy.processor.prompter.encode("x", g.numpy("state_raw")))
    for prompt in ("go", "pick up the cube", "a" * (longest - 8)):
        one = Observation.from_mapping(observation | {"prompt": prompt})
        noise, steps = one.noise, policy.spec.solver_steps
        padded, short = (
            run_one(policy.engine, policy.processor.inputs(one, padded=p), noise, steps)[0]
            for p in (True, False)
        )
        assert_parity(short, padded)
    with pytest.raises(ObservationError, match="tokens"):
        policy.infer(observation | {"prompt": "a" * (policy.spec.max_prompt_tokens + 1)})


@pytest.mark.parametrize("case", CASES)
def test_vlacpp_files_import(golden, tmp_path, case):
    file = write_vlacpp_pi(golden / case, tmp_path / "theirs.gguf")
    g = Golden(golden / case)
    names = tuple(camera.removeprefix("observation.images.") for camera in g.cameras)
    bundle = convert(
        file, tmp_path / "ours.gguf", tokenizer=golden / case / "checkpoint" / "tokenizer", cameras=names
    )
    assert_parity(
        load(bundle, engine="eager", allow_missing_cameras=True).infer(g.observation()).actions,
        g.numpy("actions")[0],
    )


def test_openpi_names_and_tied_weights(checkpoint, golden):
    """Names without LeRobot's ``model.``, and a token table that is only there as the head."""
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    table = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights["model.paligemma_with_expert.paligemma.lm_head.weight"] = weights.pop(table)
    renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    renamed = {name.replace("action_time_mlp", "time_mlp"): tensor for name, tensor in renamed.items()}
    (checkpoint / "model.safetensors").unlink()
    save_file(renamed, checkpoint / "model.safetensors")
    g = golden_of(checkpoint, golden)
    assert_parity(
        load(run(checkpoint), engine="eager", allow_missing_cameras=True).infer(g.observation()).actions,
        g.numpy("actions")[0],
    )


def test_the_first_layout_of_lerobots_pi0(golden, tmp_path):
    """Before August 2025: other tensor names and config keys, statistics as buffers, bars at top and left."""
    from safetensors.torch import load_file, save_file

    source = golden / "pi0-2cam"
    current = load(
        convert(source / "checkpoint", tmp_path / "new.gguf", arch=source / "arch.json"), engine="eager"
    )
    g, old = Golden(source), tmp_path / "old"
    old.mkdir()
    shutil.copytree(source / "checkpoint" / "tokenizer", old / "tokenizer", copy_function=shutil.copyfile)
    inner = "model.paligemma_with_expert.paligemma."
    renames = {
        f"{inner}lm_head": f"{inner}language_model.lm_head",
        f"{inner}model.language_model": f"{inner}language_model.model",
        f"{inner}model.": inner,
    }
    weights = {}
    for name, tensor in load_file(source / "checkpoint" / "model.safetensors").items():
        start = next((prefix for prefix in renames if name.startswith(prefix)), "")
        weights[renames.get(start, "") + name[len(start) :]] = tensor
    for module, feature in (("normalize_inputs", "observation.state"), ("unnormalize_outputs", "action")):
        for stat in ("mean", "std"):
            weights[f"{module}.buffer_{feature.replace('.', '_')}.{stat}"] = g[f"stats.{feature}.{stat}"]
    save_file(weights, old / "model.safetensors")
    config = json.loads((source / "checkpoint" / "config.json").read_text())
    kept = (
        "type",
        "input_features",
        "output_features",
        "normalization_mapping",
        "chunk_size",
        "n_action_steps",
    )
    kept += ("max_state_dim", "max_action_dim", "empty_cameras", "tokenizer_max_length")
    early = {
        "proj_width": 1024,
        "num_steps": 10,
        "resize_imgs_with_padding": [56, 56],
        "adapt_to_pi_aloha": False,
    }
    (old / "config.json").write_text(json.dumps({key: config[key] for key in kept} | early))
    policy = load(
        convert(old, tmp_path / "old.gguf", arch=source / "arch.json"),
        engine="eager",
        allow_missing_cameras=True,
    )

    observation = g.observation()
    square = {name: frame[:56, :56] for name, frame in observation["images"].items()}
    expected = current.infer(observation | {"images": square}).actions
    assert (policy.infer(observation | {"images": square}).actions == expected).all()
    assert policy.manifest.processing.image.steps[0].pad == "top_left"


def test_the_token_table_wins_over_a_head_that_differs(checkpoint, golden):
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    weights[head] = torch.zeros_like(weights[head])
    (checkpoint / "model.safetensors").unlink()
    save_file(weights, checkpoint / "model.safetensors")
    g = golden_of(checkpoint, golden)
    assert_parity(
        load(run(checkpoint), engine="eager", allow_missing_cameras=True).infer(g.observation()).actions,
        g.numpy("actions")[0],
    )


def test_lerobot_04_behaviour_is_an_option(checkpoint):
    """Bars of -3 after scaling, and (pi0.5) a state padded to 32 values in the prompt."""
    policy = load(run(checkpoint, compat="lerobot-0.4"), engine="eager", allow_missing_cameras=True)
    assert policy.manifest.processing.compat == "lerobot-0.4"
    camera = policy.spec.cameras[0].name
    frame = np.full((10, 40, 3), 255, np.uint8)
    observation = Observation(
        images={camera: frame}, state=np.zeros(policy.spec.state.dim, np.float32), prompt="go"
    )
    pixels = policy.processor.inputs(observation).pixels[0]
    assert set(np.unique(pixels)) == {-3.0, 1.0}
    assert (pixels[:, 0] == -3).all()
    assert (pixels[:, -1] == -3).all()
    text = policy.processor.prompter.text("pick_up\nit ", np.zeros(policy.spec.state.dim, np.float32))
    if policy.spec.architecture == "pi05":
        assert text == "Task: pick up it, State: " + " ".join(["128"] * 32) + ";\nAction: "
    else:
        assert text == "pick_up\nit \n"


def test_checkpoints_that_cannot_be_served_say_so(checkpoint):
    original = (checkpoint / "config.json").read_text()
    cases = {
        "expected a square, which the SigLIP tower requires": {"image_resolution": [56, 70]},
        "expected the same num_layers": {},
    }
    for message, change in cases.items():
        arch = json.loads((checkpoint.parent / "arch.json").read_text())
        if not change:
            arch["expert"]["num_hidden_layers"] += 1
        file = checkpoint.parent / "other.json"
        file.write_text(json.dumps(arch))
        edit(checkpoint, **change)
        with pytest.raises(ConvertError, match=message):
            run(checkpoint, arch=file)
        (checkpoint / "config.json").write_text(original)
    with pytest.raises(ConvertError, match="does not fit its config"):  # full widths, tiny tensors
        run(checkpoint, arch=None)
    edit(checkpoint, paligemma_variant="gemma_27b")
    with pytest.raises(ConvertError, match=r"'gemma_27b' is unknown. Use one of gemma_300m, gemma_2b"):
        run(checkpoint, arch=None)
    (checkpoint / "config.json").write_text(original)
    (checkpoint / "tokenizer").rename(checkpoint / "gone")
    with pytest.raises(ConvertError, match="PaliGemma's tokenizer.json with --tokenizer"):
        run(checkpoint)


def test_each_family_is_told_from_the_other(checkpoint):
    """A pi0 config over pi0.5 weights, and the other way round, names what does not fit."""
    other = {"pi0": "pi05", "pi05": "pi0"}[json.loads((checkpoint / "config.json").read_text())["type"]]
    edit(checkpoint, type=other)
    with pytest.raises(ConvertError, match=r"does not fit its config: .* is missing|not understood"):
        run(checkpoint)


# ----------------------------------------------------------------------------- discrete choices


def test_state_bins_are_numpy_digitize_on_float32(pi_bundle):
    """Bins of the state in the prompt are picked by comparison; edges and their neighbours decide it."""
    steps = Bundle(pi_bundle("pi05-2cam")).manifest.processing.prompt.steps
    (state,) = (step for step in steps if isinstance(step, State))
    edges = np.linspace(-1, 1, 257)[:-1].astype(np.float32)
    around = np.concatenate([edges, np.nextafter(edges, np.float32(-2)), np.nextafter(edges, np.float32(2))])
    extremes = np.float32([-1, 1, -1.0000001, 1.5, -7, 0, 1e-9, -1e-9])
    for value in np.concatenate([around, extremes]):
        exact = sum(float(value) >= -1 + 2 * k / 256 for k in range(256)) - 1
        assert state.numbers(np.float32([value]))[0] == exact


def test_an_instruction_cannot_inject_the_state(pi_bundle):
    prompter = load(pi_bundle("pi05-2cam"), engine="eager", allow_missing_cameras=True).processor.prompter
    text = prompter.text("put {state} into {prompt}", np.zeros(7, np.float32))
    assert text == "Task: put {state} into {prompt}, State: 128 128 128 128 128 128 128;\nAction: "


def test_quantile_statistics_are_kept(pi_bundle, golden):
    g, recipe = Golden(golden / "pi05-2cam"), Bundle(pi_bundle("pi05-2cam")).manifest.processing.action
    assert recipe.mode == "quantiles"
    for stat in ("q01", "q99"):
        assert np.array_equal(np.float32(recipe.stats[stat]), g.numpy(f"stats.action.{stat}"))
