"""GR00T checkpoints: pixels, tokens, state and actions of the bundle against the reference; wrong checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sinew_client.typed_names import UntypedNameError

from sinew.bundle import Bundle
from sinew.bundle.facts import words
from sinew.convert import convert
from sinew.convert.read.bpe import bpe_tokenizer
from sinew.core import ConvertError, Moment, Observation, ObservationError
from sinew.policy import load
from sinew.processing import Processor
from sinew.processing.image import apply_image_steps
from tests.golden import Golden, assert_parity

TAG = "oxe_droid_relative_eef_relative_joint"
CASES = ("groot-n17", "groot-n16", "groot-n15")


def observation(g: Golden, **changes) -> Observation:
    """The fixture's observation; N1.6 stores its state key by key."""
    if "state_raw" in g.tensors:
        state = g.numpy("state_raw")
    else:
        keys = json.loads(g.metadata["state_keys"])
        state = np.concatenate([g.numpy(f"state_raw.{key}") for key, _ in keys])
    images = {camera: g.numpy(f"frame.{camera}") for camera in g.cameras}
    given = {"images": images, "state": state, "prompt": g.metadata["task"], "noise": g.numpy("noise")[0]}
    return Observation.from_mapping({**given, **changes})


def reference_pixels(g: Golden) -> np.ndarray:
    """The reference's pixels, [V, 3, H, W]; N1.7 stores patches: blocks of 2 x 2, every frame twice."""
    if "image_grid_thw" not in g.tensors:
        if "pixel_values" in g.tensors:
            return g.numpy("pixel_values")
        return np.stack([g.numpy(f"pixel_values.{camera}") for camera in g.cameras])
    views, start = [], 0
    for _, rows, cols in g.numpy("image_grid_thw"):
        patches = g.numpy("pixel_values")[start : start + rows * cols]
        start += rows * cols
        patches = patches.reshape(rows // 2, cols // 2, 2, 2, 3, 2, 16, 16)
        assert (patches[:, :, :, :, :, 0] == patches[:, :, :, :, :, 1]).all()
        pixels = patches[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6)
        views.append(pixels.reshape(3, rows * 16, cols * 16))
    return np.stack(views)


@pytest.fixture(params=CASES)
def case(request, golden, groot_bundle) -> tuple[Processor, Golden]:
    return Processor(Bundle(groot_bundle(request.param)).manifest), Golden(golden / request.param)


def test_processing_equals_the_reference(case):
    processor, g = case
    given = observation(g)
    processor.check(given)
    inputs = processor.inputs(given)
    assert inputs.tokens.tolist() == g.numpy("input_ids")[0].tolist()
    np.testing.assert_allclose(inputs.pixels, reference_pixels(g), atol=1e-7, rtol=0)
    np.testing.assert_allclose(inputs.state, g.numpy("state_normalized")[0, 0], atol=1e-6, rtol=0)
    actions = processor.actions(g.numpy("action_pred")[0], given)
    np.testing.assert_allclose(actions, g.numpy("actions")[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["groot-n17", "groot-n16"])
def test_every_pixel_after_the_geometry(golden, groot_bundle, name):
    """The uint8 picture before the image processor's own resize."""
    recipe, g = Bundle(groot_bundle(name)).manifest.processing.image, Golden(golden / name)
    geometry = replace(recipe, steps=recipe.steps[:-1])
    for camera in g.cameras:
        found = apply_image_steps(g.numpy(f"frame.{camera}"), geometry)
        assert (found == g.numpy(f"image_uint8.{camera}").transpose(1, 2, 0)).all()


@pytest.mark.parametrize(
    ("name", "settings", "changes", "alternative"),
    [
        ("groot-n17", {"letterbox": "true"}, {}, "area_letterbox"),
        ("groot-n17", {"transforms": "lerobot"}, {"use_albumentations": False}, "torch"),
        (
            "groot-n17",
            {"transforms": "lerobot", "letterbox": "true"},
            {"use_albumentations": False},
            "torch_letterbox",
        ),
        ("groot-n16", {"letterbox": "false", "frames": "150x200"}, {}, "no_letterbox"),
    ],
)
def test_other_geometries_of_the_files(golden, tmp_path, name, settings, changes, alternative):
    source = copy(golden / name / "checkpoint", tmp_path)
    if changes:
        changes = changes | {"crop_fraction": 86 / 96}
        edit(source / "processor_config.json", lambda record: record["processor_kwargs"].update(changes))
    recipe = converted(golden / name, source, tmp_path, settings=settings).processing.image
    g = Golden(golden / name)
    geometry = replace(recipe, steps=recipe.steps[:-1])
    for camera in g.cameras:
        found = apply_image_steps(g.numpy(f"frame.{camera}"), geometry)
        assert (found == g.numpy(f"alt.{alternative}.{camera}").transpose(1, 2, 0)).all()


def test_the_crop_of_nvidias_n15_configurations(golden, groot_bundle):
    manifest = Bundle(groot_bundle("groot-n15-nvidia")).manifest
    g = Golden(golden / "groot-n15")
    for camera in g.cameras:
        found = apply_image_steps(g.numpy(f"frame.{camera}"), manifest.processing.image)
        assert (found == g.numpy(f"alt.nvidia_crop.{camera}").transpose(1, 2, 0)).all()
    assert "['" not in Processor(manifest).prompter.text("pick it up", np.zeros(9))  # LeRobot's own
    assert any("assuming min_max" in note for note in manifest.provenance.notes)


@pytest.mark.parametrize("other", ["groot-n15", "groot-n15-nvidia"])
def test_both_layouts_of_n15_hold_the_same_weights(groot_bundle, other):
    """The file tied to the embedding differs: one layout keeps lm_head, the other embed_tokens."""
    first, second = Bundle(groot_bundle("groot-n15")), Bundle(groot_bundle(other))
    assert set(first.infos) == set(second.infos)
    for name in first.infos:
        assert torch.equal(first.tensors()[name], second.tensors()[name]), name


def test_renamed_cameras_of_a_fine_tune_keep_the_models_order(golden, tmp_path):
    """LeRobot renames frames first, and sorts them by the names that the model has for them."""
    home = golden / "groot-n15"
    source = copy(home / "checkpoint", tmp_path)
    first, second = sorted(
        key for key in json.loads((source / "config.json").read_text())["input_features"] if "image" in key
    )

    def change(record):
        step = next(s for s in record["steps"] if s["registry_name"] == "rename_observations_processor")
        step["config"]["rename_map"] = {"observation.images.zed": first}

    edit(source / "policy_preprocessor.json", change)
    found = converted(home, source, tmp_path, base=home / "base")
    assert [c.name for c in found.spec.cameras] == ["zed", second.removeprefix("observation.images.")]


# ----------------------------------------------------------------------------- observations


def test_frames_that_become_another_size_are_refused(case):
    processor, g = case
    if processor.recipe.image.steps[-1].kind == "resize" or processor.recipe.image.steps[0].kind == "square":
        pytest.skip("any frame fits")
    wide = {camera: np.zeros((100, 300, 3), np.uint8) for camera in g.cameras}
    with pytest.raises(ObservationError, match="becomes 96 x 128, got 100 x 300, which becomes"):
        processor.check(observation(g, images=wide))
    twice = {camera: np.zeros((480, 600, 3), np.uint8) for camera in g.cameras}
    processor.check(observation(g, images=twice))


def test_all_cameras_are_needed(case):
    processor, g = case
    first, second = g.cameras
    with pytest.raises(ObservationError, match=f"images.{second}: expected a frame"):
        processor.check(observation(g, images={first: g.numpy(f"frame.{first}")}))


def test_no_instruction_adds_an_image_token(golden, groot_bundle):
    processor, g = Processor(Bundle(groot_bundle("groot-n15")).manifest), Golden(golden / "groot-n15")
    with pytest.raises(ObservationError, match=r"prompt: expected 32 image tokens \(282\), got 33"):
        processor.check(observation(g, prompt="pick <IMG_CONTEXT> up"))
    with pytest.raises(ObservationError, match="tokens: expected 32 image tokens"):
        processor.check(observation(g, prompt="", tokens=np.arange(20)))


def test_an_empty_instruction_of_n17_is_lerobots(golden, groot_bundle):
    processor, g = Processor(Bundle(groot_bundle("groot-n17")).manifest), Golden(golden / "groot-n17")
    empty, said = (
        processor.inputs(observation(g, prompt=p)).tokens.tolist() for p in ("", "Perform the task.")
    )
    assert empty == said


# ----------------------------------------------------------------------------- wrong checkpoints


def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "checkpoint"))


def edit(path: Path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def converted(home: Path, source: Path, tmp_path: Path, **options):
    given = {"settings": {"frames": "240x300"}, "embodiment": TAG} if home.name == "groot-n17" else {}
    given["vlm"] = home / ("vlm" if home.name == "groot-n17" else "eagle")
    if home.name == "groot-n15":
        given["base"] = home / "base"
    out = tmp_path / "out.gguf"
    convert(source, out, **{**given, **options})
    return Bundle(out).manifest


def drop_statistics(source: Path) -> None:
    (source / "statistics.json").unlink()


def drop_key_statistics(source: Path) -> None:
    edit(source / "statistics.json", lambda record: record[TAG]["relative_action"].pop("eef_9d"))


def truncate(source: Path) -> None:
    shard = source / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


def lose_shard(source: Path) -> None:
    (source / "model-00003-of-00004.safetensors").unlink()


def keep_adapter_only(source: Path) -> None:
    for file in source.glob("model*"):
        file.unlink()
    (source / "adapter_model.safetensors").write_bytes(b"")


def ask_for_history(source: Path, modality: str, offsets: list[int], **changes: object) -> None:
    def change(record):
        for configured in record["processor_kwargs"]["modality_configs"].values():
            configured[modality].update(delta_indices=offsets, **changes)

    edit(source / "processor_config.json", change)


def reference_elsewhere(source: Path) -> None:
    def change(record):
        action = record["processor_kwargs"]["modality_configs"][TAG]["action"]
        action["action_configs"][0]["state_key"] = "gripper_position"

    edit(source / "processor_config.json", change)


def swap_weights(source: Path) -> None:
    edit(source / "config.json", lambda record: record.update(action_horizon=9, hidden_size=40))


@pytest.mark.parametrize(
    ("break_it", "options", "message"),
    [
        (drop_statistics, {}, "statistics.json is missing"),
        (drop_key_statistics, {}, "the statistics relative_action.eef_9d.min of 'oxe_droid"),
        (
            None,
            {"embodiment": ""},
            r"several robots. Choose one with --embodiment TAG: new_embodiment, oxe_droid",
        ),
        (
            None,
            {"embodiment": "gr1"},
            r"--embodiment gr1: unknown in .*. Use one of: new_embodiment, oxe_droid",
        ),
        (truncate, {}, "model-00002-of-00004.safetensors"),
        (lose_shard, {}, "model-00003-of-00004.safetensors"),
        (keep_adapter_only, {}, "LoRA adapter only. To merge it"),
        *(
            (
                partial(ask_for_history, modality="video", offsets=offsets),
                {},
                r"video.delta_indices: expected at most 16 steps at equal distances, of which the last is 0 .*, got \["
                + ", ".join(map(str, offsets)),
            )
            for offsets in ([-20, -3, 0], [-20], [0, 20], [0, 0], [-2000, 0], list(range(-16, 1)))
        ),
        (
            partial(ask_for_history, modality="state", offsets=[-1, 0]),
            {},
            r"state.delta_indices: expected \[0\], got \[-1, 0\]; Sinew does not support a history of the state",
        ),
        (
            reference_elsewhere,
            {},
            "action 'eef_9d': expected as many values as the state 'gripper_position'",
        ),
        (swap_weights, {}, "the checkpoint does not fit its config: .*expected"),
        (None, {"settings": {}}, "--set frames=HEIGHTxWIDTH"),
        (None, {"settings": {"frames": "wide"}}, "expected HEIGHTxWIDTH such as 480x640, got 'wide'"),
        (None, {"settings": {"frames": "240x300", "chunk": "11"}}, "--set chunk=11: expected at most 10"),
        (None, {"vlm": None}, "pass a directory with its config.json and tokenizer.json with --vlm DIR"),
    ],
)
def test_wrong_checkpoints_say_what_to_give(golden, tmp_path, break_it, options, message):
    home = golden / "groot-n17"
    source = home / "checkpoint"
    if break_it:
        source = copy(source, tmp_path)
        break_it(source)
    with pytest.raises(ConvertError, match=message) as caught:
        converted(home, source, tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()


def test_a_history_of_n16_is_rejected(golden, tmp_path):
    """Upstream's order of pictures and text is another one, and nobody has published such a robot."""
    home = golden / "groot-n16"
    source = copy(home / "checkpoint", tmp_path)
    ask_for_history(source, "video", [-20, 0])
    with pytest.raises(ConvertError, match=r"video.delta_indices: expected \[0\], got \[-20, 0\]"):
        converted(home, source, tmp_path, settings={"frames": "200x200"})


@pytest.fixture(scope="module")
def two_steps(golden, tmp_path_factory) -> Path:
    """N1.7 of one camera at [-20, 0], as NVIDIA's REAL_G1 reads it.

    The reference puts the pictures of all steps into one list, step after step. So its pictures of one camera at two
    steps are those of two cameras at one step, and the stored outputs are those of this policy too.
    """
    home, tmp_path = golden / "groot-n17", tmp_path_factory.mktemp("two-steps")
    source = copy(home / "checkpoint", tmp_path)
    ask_for_history(source, "video", [-20, 0], modality_keys=[Golden(home).cameras[0]])
    converted(home, source, tmp_path)
    return tmp_path / "out.gguf"


def moved(g: Golden) -> Observation:
    """The fixture's second picture as the newest of the first camera. The old state is another one: it is not read."""
    given = observation(g)
    first, second = (given.images[camera] for camera in g.cameras)
    earlier = Moment({g.cameras[0]: first}, given.state + np.float32(0.5))
    return replace(given, images={g.cameras[0]: second}, earlier=(earlier,))


def test_a_history_of_frames_equals_the_reference(two_steps, golden):
    policy, g = load(two_steps, "cpu", "float32", "eager"), Golden(golden / "groot-n17")
    spec = policy.spec
    assert (spec.history, spec.history_stride, spec.history_padding, spec.history_states) == (
        2,
        20,
        "repeat",
        False,
    )
    assert "2 observation steps, 20 control steps apart" in words(policy.bundle)["cameras"]
    given = moved(g)
    inputs = policy.processor.inputs(given)
    assert inputs.tokens.tolist() == g.numpy("input_ids")[0].tolist()
    np.testing.assert_allclose(inputs.pixels, reference_pixels(g), atol=1e-7, rtol=0)
    np.testing.assert_allclose(inputs.state, g.numpy("state_normalized")[0, 0], atol=1e-6, rtol=0)
    assert_parity(policy.infer(given).actions, g["actions"][0])


def test_the_first_frame_of_an_episode_stands_for_the_one_before(two_steps, golden):
    policy, g = load(two_steps, "cpu", "float32", "eager"), Golden(golden / "groot-n17")
    given = moved(g)
    alone, twice = (
        policy.infer(replace(given, earlier=earlier))
        for earlier in ((), (Moment(given.images, given.state),))
    )
    assert np.array_equal(alone.actions, twice.actions)
    assert "the policy uses 2 observation steps and got 1; the oldest step is repeated" in alone.warnings[0]
    assert np.abs(alone.actions - policy.infer(given).actions).max() > 1e-3


@pytest.mark.parametrize("engine", ["plan", pytest.param("onnx", marks=pytest.mark.slow), "cuda"])
def test_a_history_of_frames_on_other_engines(engine, two_steps, golden):
    policy, g = load(two_steps, "cpu", "float32", engine), Golden(golden / "groot-n17")
    assert_parity(policy.infer(moved(g)).actions, g["actions"][0])


def test_two_cameras_of_two_steps_come_step_after_step(golden, tmp_path):
    """As the reference reshapes [B, T, V, height, width, 3]."""
    home, g = golden / "groot-n17", Golden(golden / "groot-n17")
    source = copy(home / "checkpoint", tmp_path)
    ask_for_history(source, "video", [-3, 0])
    manifest = converted(home, source, tmp_path)
    given = observation(g)
    turned = dict(zip(g.cameras, reversed(given.images.values()), strict=True))
    inputs = Processor(manifest).inputs(replace(given, earlier=(Moment(turned, given.state),)))
    np.testing.assert_allclose(inputs.pixels, reference_pixels(g)[[1, 0, 0, 1]], atol=1e-7, rtol=0)
    image = manifest.config["image_token"]
    assert (inputs.tokens == image).sum() == 2 * (g.numpy("input_ids")[0] == image).sum()


def test_frames_that_may_have_got_bars_need_a_word(golden, tmp_path):
    """N1.6 files do not say it, and NVIDIA's code changed its mind."""
    home = golden / "groot-n16"
    with pytest.raises(ConvertError, match="--set letterbox=true .* or --set letterbox=false"):
        converted(home, home / "checkpoint", tmp_path, settings={"frames": "150x200"})
    square = converted(home, home / "checkpoint", tmp_path, settings={"frames": "200x200"})
    assert square.processing.image.steps[0].kind == "short_side"


def test_the_neighbours_vision_language_model_is_refused(golden, tmp_path):
    home = golden / "groot-n17"
    with pytest.raises(ConvertError, match="vision_config: hidden|is missing|--vlm names another model"):
        converted(home, home / "checkpoint", tmp_path, vlm=golden / "groot-n16" / "eagle")


def test_the_base_of_a_fine_tune(golden, tmp_path):
    home = golden / "groot-n15"
    with pytest.raises(UntypedNameError, match="model base.* add: --base base"):
        converted(home, copy(home / "checkpoint", tmp_path), tmp_path, base=None)
    with pytest.raises(ConvertError, match="expected the base model of a GR00T N1.5 fine-tune"):
        converted(home, home / "checkpoint", tmp_path, base=golden / "groot-n16" / "checkpoint")
    for given in ({}, {"embodiment": "so100"}):
        with pytest.raises(
            ConvertError,
            match=r"so100 is unknown. Pass the number of the training with --set embodiment_id=N.*31 of new_embodiment",
        ):
            converted(home, home / "base", tmp_path, base=None, **given)
    with pytest.raises(ConvertError, match="--embodiment my_arm: unknown in .*. Use one of: so100$"):
        converted(home, home / "base", tmp_path, base=None, embodiment="my_arm")


def test_a_tokenizer_of_vocabulary_and_merges(tmp_path):
    """NVIDIA's Eagle folders have no tokenizer.json."""
    vocab = {chr(c): i for i, c in enumerate(range(ord("a"), ord("z") + 1))} | {"Ġ": 26, "ab": 27, "Ġab": 28}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    record = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {"29": {"content": "<img>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(bpe_tokenizer(tmp_path))
    assert tokenizer.encode("<img>ab abc").ids == [29, 27, 28, 2]
    record["added_tokens_decoder"] = {"40": {"content": "<img>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(record))
    with pytest.raises(ConvertError, match="'<img>' has id 40"):
        bpe_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(ConvertError, match="a Qwen2Tokenizer; got the files of 'LlamaTokenizer'"):
        bpe_tokenizer(tmp_path)
