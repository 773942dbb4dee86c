"""TurboVLA's checkpoints: what is read of them and what is rejected; the length of an instruction."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import BundleError, ConvertError, ObservationError
from sinew.families.turbovla.text import Bert
from sinew.policy import load
from tests.cases import cases
from tests.golden import Golden, assert_parity
from tests.models.stages import arguments, observation

CASES = ("turbovla", "turbovla-3cam")
PROMPTS = [("turbovla", index) for index in range(6)] + [("turbovla-3cam", index) for index in range(3)]


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """A case with a folder of safetensors that a test may spoil."""
    shutil.copytree(golden / "turbovla-3cam", tmp_path / "case", copy_function=shutil.copyfile)
    return tmp_path / "case"


@pytest.fixture
def torch_file(golden: Path, tmp_path: Path) -> Path:
    """A case with a file of torch that a test may spoil."""
    shutil.copytree(golden / "turbovla", tmp_path / "case", copy_function=shutil.copyfile)
    return tmp_path / "case"


def run(home: Path, case: str = "turbovla-3cam", without: tuple[str, ...] = (), **options: Any) -> Bundle:
    given = {key: value for key, value in cases()[case].options(home).items() if key not in without}
    return Bundle(convert(home / "checkpoint", home / "out.gguf", **given, **options))


def changed(home: Path, **changes: Any) -> Path:
    """Change fields of config.json; ``group__field``."""
    file = home / "checkpoint" / "config.json"
    record = json.loads(file.read_text())
    for name, value in changes.items():
        group, _, field = name.partition("__")
        (record[group] if field else record)[field or group] = value
    file.write_text(json.dumps(record))
    return home


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vision__position_embedding": "learned_patch"},
            "position_embedding: expected 'view', got 'learned_patch'",
        ),
        (
            {"interaction__residual_style": "pre_norm"},
            "residual_style: expected 'normalized', got 'pre_norm'",
        ),
        (
            {"interaction__padding_strategy": "zero_fill"},
            "padding_strategy: expected 'key_padding_mask', got 'zero_",
        ),
        ({"text__sub_sentence_present": False}, "sub_sentence_present: expected True, got False"),
        ({"text__zero_padded_tokens": True}, "zero_padded_tokens: expected False, got True"),
        (
            {"text__padding_length": None},
            "padding_length: expected a whole number from 2 to max_length, got None",
        ),
        (
            {"text__padding_length": 33},
            "padding_length: expected a whole number from 2 to max_length, got 33",
        ),
        ({"name": "TurboVLA-2"}, "name: expected 'TurboVLA', got 'TurboVLA-2'"),
        ({"depth": {"enabled": True}}, 'depth={"enabled": true} is not understood'),
        (
            {"interaction__sparse": 2},
            "interaction.sparse=2 is not understood.*--set ignore=interaction.sparse$",
        ),
        ({"interaction__num_layers": 1}, r"fusion_layers.1.\S+ is not a part of the model"),
        ({"interaction__nheads": 48}, "expected multiples of 48 and 24, their numbers of heads"),
        ({"action__horizon": 4}, r"action_queries.weight has shape \[5, 64\], expected \[4, 64\]"),
        ({"vision__num_views": 2}, r"view_embedding has shape \[3, 64\], expected \[2, 64\]"),
        ({"vision__image_size": 0}, "image_size"),
    ],
)
def test_what_is_not_computed_is_rejected(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(changed(folder, **changes))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"stop": 2},
            "'stop': expected a length from 3, the number of its tokens, to padding_length 12, got 2",
        ),
        (
            {"stop": 13},
            "'stop': expected a length from 3, the number of its tokens, to padding_length 12, got 13",
        ),
        ({"stop": "9"}, "'stop': expected a text and a whole number, got '9'"),
    ],
)
def test_a_length_that_cannot_be_is_rejected(folder: Path, table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(changed(folder, text__padding_length_by_instruction=table))


@pytest.mark.parametrize(
    ("without", "options", "message"),
    [
        (("stats", "stats_key"), {}, "--stats FILE.*libero_all4_stats.json, key libero_all4_no_noops"),
        (
            ("stats_key",),
            {"stats_key": "pusht"},
            "there is no key 'pusht'. Pass --stats-key with one of: robot",
        ),
        (("settings",), {}, "--set gripper: expected sign or scaled for 6 actions and a state of 5 numbers"),
        (("arch",), {}, 'model_name_or_path: expected dinov3-vitb16, got .*--arch FILE with .*"vision"'),
        (
            (),
            {"cameras": ("front", "left")},
            "--cameras: expected 3 names, one for each view of the checkpoint, got 2",
        ),
    ],
)
def test_what_no_file_has_is_asked_for(
    folder: Path, without: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConvertError, match=message):
        run(folder, without=without, **options)


def test_statistics_of_another_size_are_rejected(folder: Path) -> None:
    file = folder / "statistics.json"
    record = json.loads(file.read_text())
    record["robot"]["action"]["min"].pop()
    file.write_text(json.dumps(record))
    with pytest.raises(ConvertError, match="robot.action.min: expected a list of 6 numbers, got 5"):
        run(folder)


@pytest.mark.parametrize("kind", ["turbovla", "turbovla_so101"])
def test_the_plugins_network_is_rejected_by_its_tensors(folder: Path, kind: str) -> None:
    name = "model.vl_interaction.layers.0.norm_vision_attn.weight"
    save_file({name: torch.ones(2)}, folder / "checkpoint" / "model.safetensors")
    (folder / "checkpoint" / "config.json").write_text(json.dumps({"type": kind, "chunk_size": 16}))
    with pytest.raises(
        ConvertError, match=f"got {name}. This is the network of a LeRobot plugin with the same name"
    ):
        run(folder)


def test_a_file_of_torch_alone(torch_file: Path) -> None:
    """The file itself, with the prefix of DistributedDataParallel, and what else training saved in it."""
    file = torch_file / "checkpoint" / "turbovla_libero.pth"
    record = torch.load(file, weights_only=True)
    assert all(name.startswith("module.") for name in record["model_state_dict"])
    torch.save(
        {**record, "optimizer_state_dict": {"state": {}}, "loss": 0.5, "more": {"x": torch.ones(2)}}, file
    )
    options = cases()["turbovla"].options(torch_file)
    manifest = Bundle(convert(file, torch_file / "out.gguf", **options)).manifest
    assert "statistics 'libero_all4_no_noops'" in manifest.provenance.notes
    assert any("model_state_dict is read, and not more" in note for note in manifest.provenance.notes)
    dropped = " ".join(manifest.provenance.dropped)
    for name in ("backbone.norm.weight", "mask_token", "pooler.dense.weight"):
        assert name in dropped


@pytest.mark.parametrize(
    ("left", "message"), [("model_state_dict", "model_config"), ("model_config", "model_state_dict")]
)
def test_a_part_of_a_file_is_rejected(torch_file: Path, left: str, message: str) -> None:
    file = torch_file / "checkpoint" / "turbovla_libero.pth"
    torch.save({left: torch.load(file, weights_only=True)[left]}, file)
    with pytest.raises(ConvertError, match=f"got no {message}. Use a file that TurboVLA's training"):
        convert(file, torch_file / "out.gguf")


def test_what_a_bundle_says(torch_file: Path) -> None:
    manifest = run(torch_file, "turbovla").manifest
    spec, processing = manifest.spec, manifest.processing
    assert [camera.name for camera in spec.cameras] == ["image", "wrist_image"]
    assert (spec.chunk_size, spec.n_action_steps, spec.noise_dim, spec.solver.kind) == (6, 6, 0, "single")
    assert not spec.resizes_frames
    assert (processing.state.mode, processing.state.eps) == ("mean_std", 1e-6)
    assert [(part.dim, part.normalization.mode) for part in processing.action_parts] == [
        (6, "min_max"),
        (1, "identity"),
    ]
    assert (processing.prompt.max_tokens, processing.prompt.whole) == (17, 17)


def test_a_gripper_is_the_sign(torch_file: Path) -> None:
    """Zero is 1, as in the reference's evaluation."""
    processor = load(run(torch_file, "turbovla").path, engine="eager", dtype="float32").processor
    chunk = np.zeros((6, 7), np.float32)
    chunk[:, 6] = [0.0, -0.0, 1e-30, -1e-30, 0.7, -1.0]
    found = processor.finish(chunk, np.zeros(8, np.float32))
    assert found[:, 6].tolist() == [1.0, 1.0, 1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize(("case", "index"), PROMPTS)
def test_every_prompt_gives_the_references_actions(
    case: str, index: int, golden: Path, case_bundle: Callable[[str], Path]
) -> None:
    """Fewer tokens than the length, exactly as many, two sub-sentences, and texts that are not in the table."""
    g = Golden(golden / case)
    policy = load(case_bundle(case), engine="eager", dtype="float32")
    given = replace(observation(case, g), prompt=json.loads(g.metadata["tasks"])[index])
    assert_parity(policy.infer(given).actions, g["prompts.actions"][index])
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    layout = model.language.layout(tokens, mask)
    assert torch.equal(layout.sees[0], g["prompts.text_sees"][index])
    assert torch.equal(layout.words[0], g["prompts.text_words"][index])
    with torch.inference_mode():
        assert_parity(model.language(tokens, layout)[0], g["prompts.text_tokens"][index])
        chunk = model.regress(model.read(model.embed_images(pixels), cameras, tokens, mask, state))
    assert_parity(chunk[0], g["prompts.chunk_normalized"][index])


def test_the_length_of_an_instruction_changes_the_actions(golden: Path, case_bundle: Any) -> None:
    """Two spellings have the same words, and the table has one of them."""
    g = Golden(golden / "turbovla")
    short, long = g["prompts.chunk_normalized"][0], g["prompts.chunk_normalized"][4]
    assert (short - long).abs().max() > 1e-3
    policy = load(case_bundle("turbovla"), engine="eager", dtype="float32")
    prompter = policy.processor.prompter
    said = [prompter.encode(json.loads(g.metadata["tasks"])[i], np.zeros(0)) for i in (0, 4)]
    words = [ids[ids < policy.engine.model.config.language.vocab_size] for ids in said]
    assert [len(ids) for ids in said] == [17, 17]
    assert [len(ids) for ids in words] == [14, 17]
    assert words[0][:12].tolist() == words[1][:12].tolist()


def test_tokens_without_their_padding_are_rejected(golden: Path, case_bundle: Any) -> None:
    g = Golden(golden / "turbovla")
    policy = load(case_bundle("turbovla"), engine="eager", dtype="float32")
    given = observation("turbovla", g)
    tokens = policy.processor.prompter.encode(given.prompt, np.zeros(0))
    whole = policy.infer(replace(given, prompt="", tokens=tokens)).actions
    assert np.array_equal(whole, policy.infer(given).actions)
    with pytest.raises(ObservationError, match="tokens: expected 17 tokens, with their padding, got 12"):
        policy.infer(replace(given, prompt="", tokens=tokens[:12]))
    with pytest.raises(ObservationError, match="prompt: expected 1 to 17 tokens, got 18"):
        policy.infer(replace(given, prompt=" ".join(["bowl"] * 16)))


def test_a_recipe_of_another_length_is_rejected(folder: Path) -> None:
    manifest = run(folder).manifest
    prompt = replace(manifest.processing.prompt, max_tokens=13)
    wrong = replace(manifest, processing=replace(manifest.processing, prompt=prompt))
    with pytest.raises(BundleError, match="max_tokens: expected the 12 tokens of every prompt, got 13"):
        wrong.check()


def test_padding_of_an_engine_changes_nothing(golden: Path, case_bundle: Any) -> None:
    """It is not that of the instruction: rows that are masked leave every other row as it is."""
    g = Golden(golden / "turbovla")
    policy = load(case_bundle("turbovla"), engine="eager", dtype="float32")
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, observation("turbovla", g))
    with torch.inference_mode():
        image_tokens = model.embed_images(pixels)
        first = model.regress(model.read(image_tokens, cameras, tokens, mask, state))
        more = (
            torch.cat([tokens, torch.full((1, 3), 5)], dim=1),
            torch.cat([mask, mask.new_zeros(1, 3)], dim=1),
        )
        second = model.regress(model.read(image_tokens, cameras, *more, state))
    assert_parity(second, first)


def reference_layout(ids: list[int], delimiters: tuple[int, ...]) -> tuple[np.ndarray, list[int]]:
    """Return which columns attend to each other, and their positions, column by column."""
    sees, position, before = np.eye(len(ids), dtype=bool), [0] * len(ids), 0
    for column, token in enumerate(ids):
        if token not in delimiters:
            continue
        if 0 < column < len(ids) - 1:
            block = range(before + 1, column + 1)
            for row in block:
                position[row] = row - before - 1
                sees[row, block] = True
        before = column
    return sees, position


def test_sub_sentences_of_any_tokens(golden: Path, case_bundle: Any) -> None:
    policy = load(case_bundle("turbovla"), engine="eager", dtype="float32")
    model: Any = policy.engine.model
    bert: Bert = model.language
    delimiters, behind, rng = bert.config.delimiters, bert.config.vocab_size, np.random.default_rng(3)
    for _ in range(200):
        length, rows = int(rng.integers(2, 18)), 17
        ids = [int(token) for token in rng.choice([*delimiters, 8, 9, 10, 0], length)]
        tokens = torch.tensor([ids + [behind] * (rows - length)])
        found = bert.layout(tokens, torch.ones_like(tokens, dtype=torch.bool))
        sees, position = reference_layout(ids, delimiters)
        assert np.array_equal(found.sees[0, :length, :length], sees), ids
        assert np.array_equal(found.sees[0, length:], np.eye(rows, dtype=bool)[length:])
        assert found.position[0, :length].tolist() == position, ids


def test_an_observation_is_the_same_in_a_batch(golden: Path, case_bundle: Any) -> None:
    g = Golden(golden / "turbovla")
    policy = load(case_bundle("turbovla"), engine="eager", dtype="float32")
    given = observation("turbovla", g)
    tasks = json.loads(g.metadata["tasks"])
    members = [given, replace(given, state=-given.state, prompt=tasks[1]), replace(given, prompt=tasks[2])]
    every = policy.run_batch([policy.prepare(member) for member in members])
    for chunk, member in zip(every, members, strict=True):
        np.testing.assert_allclose(chunk.actions, policy.infer(member).actions, rtol=0, atol=1e-5)


def test_half_precision_weights_get_keys_without_a_bias(folder: Path) -> None:
    """DINOv3's keys have none: the zeros of theirs have the type of the weights."""
    file = folder / "checkpoint" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    policy = load(run(folder).path, engine="plan", dtype="float32")
    stored = Bundle(folder / "out.gguf").file.tensors
    assert stored["vision.layers.0.attn.k_proj.bias"].type.name == "BF16"
    g = Golden(folder)
    chunk = policy.infer(observation("turbovla-3cam", g))
    assert np.abs(chunk.actions - g["actions"][0].numpy()).max() < 0.1


def test_a_field_may_be_ignored(folder: Path) -> None:
    settings = {"gripper": "scaled", "ignore": "interaction.sparse"}
    changed(folder, interaction__sparse=2)
    notes = run(folder, without=("settings",), settings=settings).manifest.provenance.notes
    assert "config.json: ignored because of --set ignore: interaction.sparse" in notes
