"""OmniVLA and OmniVLA-edge: what their files say, which goals a bundle is made for, what is refused by one line, and
the lines that a user types."""

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
from sinew_client import Client
from sinew_client.errors import ServerError

from sinew.cli import main
from sinew.convert import convert, read
from sinew.convert.options import ConvertOptions
from sinew.core import ConvertError, ObservationError
from sinew.families.omnivla.goals import GOALS
from sinew.policy import Policy, load
from tests import processes
from tests.cases import cases
from tests.engine.cpu.test_cpu_engine import stored
from tests.golden import Golden
from tests.models.stages import navigation_observation, observation
from tests.serve.test_server import START_S, serving

FILE = "omnivla-edge.pth"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def home(golden: Path) -> Path:
    return golden / "omnivla-edge"


@pytest.fixture(scope="module")
def case(home: Path, case_bundle: Callable[[str], Path]) -> tuple[Policy, Golden]:
    return load(case_bundle("omnivla-edge"), "cpu", "float32", "eager"), Golden(home)


def given(home: Path, **settings: str) -> dict[str, Any]:
    return {"vlm": home / "clip", "settings": settings}


@pytest.fixture
def changed(home: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], Any]], Path]:
    """``changed(change) -> folder``: a copy of the file whose tensors were changed."""

    def make(change: Callable[[Tensors], Any]) -> Path:
        tensors = torch.load(home / "checkpoint" / FILE, weights_only=True, mmap=True)
        change(tensors)
        (folder := tmp_path / "changed").mkdir()
        torch.save(tensors, folder / FILE)
        return folder

    return make


@pytest.mark.parametrize("goal", range(len(GOALS)))
def test_every_goal_is_the_references(case: tuple[Policy, Golden], goal: int) -> None:
    policy, g = case
    found = policy.infer(navigation_observation(g, goal)).actions
    np.testing.assert_allclose(found, g.numpy("actions.goals")[goal], rtol=0, atol=1e-5)
    assert np.allclose(np.hypot(found[:, 2], found[:, 3]), 1, atol=1e-6)  # cosine and sine of one angle


def test_a_goal_is_one_of_those_that_the_bundle_knows(case: tuple[Policy, Golden]) -> None:
    policy, g = case
    for number in (9, 3.5, -1):
        with pytest.raises(ObservationError, match=r"state\[4\]: expected one of 0 satellite, .* got"):
            policy.infer(navigation_observation(g, number))


@pytest.mark.parametrize(
    ("goals", "cameras", "state", "said"),
    [
        ("language,pose", ("current",), ("x", "y", "cos", "sin", "goal"), True),
        ("pose", ("current",), ("x", "y", "cos", "sin"), False),
        ("image", ("current", "goal"), (), False),
        ("satellite", ("current", "satellite", "satellite_goal"), (), False),
    ],
)
def test_a_bundle_of_some_goals_reads_what_they_read_and_answers_alike(
    home: Path, tmp_path: Path, goals: str, cameras: tuple[str, ...], state: tuple[str, ...], said: bool
) -> None:
    """Towers that no goal reads are left out, and so are the rows that upstream masks: the same chunk, but for the
    order of a sum."""
    options = given(home, goals=goals) if said else {"settings": {"goals": goals}}
    policy = load(convert(home / "checkpoint", tmp_path / "some.gguf", **options), "cpu", "float32", "eager")
    assert tuple(camera.name for camera in policy.spec.cameras) == cameras
    assert policy.spec.state.names == state
    g = Golden(home)
    for goal in goals.split(","):
        number = GOALS.index(goal)
        whole = navigation_observation(g, number)
        part = {
            "images": {name: whole.images[name] for name in cameras},
            "state": whole.state[: len(state)],
            "earlier": tuple(
                type(m)({name: m.images[name] for name in cameras}, m.state[: len(state)])
                for m in whole.earlier
            ),
        }
        given_ = type(whole)(**part, prompt=whole.prompt if said else "")
        found = policy.infer(given_).actions
        np.testing.assert_allclose(found, g.numpy("actions.goals")[number], rtol=0, atol=1e-5)
    policy.infer(policy.dummy_observation())  # whose goal is the first that there is


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def channels(tensors: Tensors) -> None:
    name = "goal_encoder_img._conv_stem.weight"
    tensors[name] = tensors[name][:, :3].contiguous()


def shorter(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("obs_encoder._blocks.15.")]:
        del tensors[name]


def odd(tensors: Tensors) -> None:
    tensors["action_predictor.0.weight"] = tensors["action_predictor.0.weight"][:30].contiguous()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop("local_goal.0.weight"), r"does not fit its config: .*pose_proj"),
        (
            drop("decoder.positional_encoding.pos_enc"),
            "pos_enc is missing; use omnivla-edge.pth",
        ),
        (
            drop("goal_encoder._blocks.3._bn1.running_var"),
            r"goal_encoder._blocks.3._bn1.running_var is missing",
        ),
        (channels, r"goal_encoder_img: expected 6 channels .*, got 3. Sinew does not support late fusion"),
        (shorter, "obs_encoder: expected the 16 blocks of efficientnet-b0, got 15"),
        (odd, "action_predictor.0: expected a multiple of 4 rows, got 30"),
    ],
)
def test_damaged_files_are_refused(
    home: Path, tmp_path: Path, changed: Callable[..., Path], change: Callable[[Tensors], Any], said: str
) -> None:
    folder = changed(change)
    with pytest.raises(ConvertError, match=said) as caught:
        convert(folder, tmp_path / "out.gguf", **given(home))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"goals": "language+image"},
            r"--set goals: expected a goal that the policy was trained for \(use satellite, .*",
        ),
        ({"goals": "pose,pose"}, "--set goals: expected each goal once"),
        ({"reach": "0"}, "--set reach"),
        ({"steps": "3"}, "--set steps: expected a setting of omnivla-edge"),
    ],
)
def test_settings_that_are_refused(home: Path, settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConvertError, match=said):
        convert(home / "checkpoint", home / "out.gguf", **given(home, **settings))


def test_other_text_encoders_are_refused(home: Path, tmp_path: Path) -> None:
    clip = Path(shutil.copytree(home / "clip", tmp_path / "clip"))
    record = json.loads((clip / "config.json").read_text())
    for change, said in (
        ({"hidden_act": "gelu"}, "hidden_act: expected 'quick_gelu', got 'gelu'"),
        ({"num_attention_heads": 4}, "num_attention_heads: expected 2, got 4"),
    ):
        text = {**record["text_config"], **change}
        (clip / "config.json").write_text(json.dumps({**record, "text_config": text}))
        with pytest.raises(ConvertError, match=said):
            read(home / "checkpoint", ConvertOptions(vlm=clip))
    with pytest.raises(ConvertError, match="--vlm .*: not a directory"):
        read(home / "checkpoint", ConvertOptions(vlm=tmp_path / "none"))


def test_the_lines_that_a_user_types(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    frame, out = tmp_path / "frame.png", tmp_path / "edge.gguf"
    Image.fromarray(np.full((48, 64, 3), 90, np.uint8)).save(frame)
    line = ["convert", str(home / "checkpoint" / FILE), str(out), "--set", "goals=language,pose"]
    assert main(line) == 1  # no CLIP beside it
    assert "--vlm" in " ".join(capsys.readouterr().err.split())
    assert main([*line, "--vlm", str(home / "clip"), "--set", "waypoint_spacing=0.25"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "0.25 metres between waypoints, as set by the user" in told
    assert "goals: 4 pose, 7 language" in told
    ask = ["infer", str(out), "--image", str(frame), "--prompt", "the bin", "--engine", "eager"]
    assert main([*ask, "--state", "1,0,1,0,7", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert np.array(answer["actions"]).shape == (8, 4)
    assert any("uses 6 observation steps and got 1" in warning for warning in answer["warnings"])
    assert main([*ask, "--state", "1,0,1,0,6"]) == 1
    assert "state[4]: expected one of 4 pose, 7 language, got 6" in " ".join(capsys.readouterr().err.split())


# ----------------------------------------------------------------------------- OmniVLA


@pytest.fixture(scope="module")
def seven(golden: Path, case_bundle: Callable[[str], Path]) -> tuple[Policy, Golden]:
    return load(case_bundle("omnivla"), "cpu", "float32", "eager"), Golden(golden / "omnivla")


@pytest.mark.parametrize("index", range(5))
def test_goals_of_the_large_model_are_the_references(seven: tuple[Policy, Golden], index: int) -> None:
    """Pose, pose and picture, picture, words, words and pose; without words the sentence is another one."""
    policy, g = seven
    given_ = observation("omnivla", g)
    state = np.array([*given_.state[:4], index + 4], np.float32)
    found = policy.infer(replace(given_, state=state)).actions
    np.testing.assert_allclose(found, g.numpy("actions.goals")[index], rtol=0, atol=1e-5)


def test_the_large_model_is_given_no_satellite_pictures(seven: tuple[Policy, Golden]) -> None:
    policy, g = seven
    given_ = observation("omnivla", g)
    with pytest.raises(ObservationError, match=r"state\[4\]: expected one of 4 pose, .* got 0"):
        policy.infer(replace(given_, state=np.zeros(5, np.float32)))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("action_head--120000_checkpoint.pt", r"no action_head--\*_checkpoint.pt next to the weights"),
        ("pose_projector--120000_checkpoint.pt", r"no pose_projector--\*_checkpoint.pt next to the weights"),
        ("model.safetensors", "model.safetensors is missing"),
        ("preprocessor_config.json", "preprocessor_config.json: No such file"),
    ],
)
def test_a_directory_without_one_of_its_files(golden: Path, tmp_path: Path, file: str, said: str) -> None:
    source, run = golden / "omnivla" / "checkpoint", tmp_path / "run"
    shutil.copytree(source, run, copy_function=lambda a, b: Path(b).symlink_to(a))
    (run / file).unlink()
    with pytest.raises(ConvertError, match=said):
        convert(run, tmp_path / "out.gguf", **cases()["omnivla"].options(golden / "omnivla"))
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.slow
@pytest.mark.proves(engine="cpu", precision="int8", family="omnivla")
def test_low_bits_of_the_large_model(seven: tuple[Policy, Golden], tmp_path: Path) -> None:
    """The head, as of other families: these random towers and layers turn errors of one in a hundred into other paths.

    Two errors apart: the weights', eager against eager, and the products', cpu against eager on the same weights."""
    policy, g = seven
    recipe = {"vision": "fp32", "language": "fp32", "head": "int8"}
    small = stored(policy.bundle.path, recipe, tmp_path / "small.gguf")
    asked = observation("omnivla", g)
    exact = policy.infer(asked).actions
    eager, cpu = (load(small, "cpu", "float32", engine).infer(asked).actions for engine in ("eager", "cpu"))
    size = np.linalg.norm(exact)
    assert 1e-6 < np.linalg.norm(eager - exact) / size < 0.1
    assert 1e-8 < np.linalg.norm(cpu - eager) / size < 0.1


@pytest.mark.slow  # a server that starts
@pytest.mark.proves(wire="native", family="omnivla_edge")
def test_a_server_answers_what_the_policy_does(case: tuple[Policy, Golden], tmp_path: Path) -> None:
    """Six moments of four pictures in a request; a goal that is none is refused there, too."""
    policy, g = case
    port = processes.free_port()
    with (
        serving(tmp_path, policy.bundle.path, "--wire", f"native:{port}", "--threads", 1),
        Client(f"tcp://127.0.0.1:{port}", timeout=START_S) as client,
    ):
        for goal in (8, 2):
            asked = navigation_observation(g, goal)
            found = client.infer(asked).actions
            np.testing.assert_allclose(found, policy.infer(asked).actions, atol=1e-5, rtol=0)
        with pytest.raises(ServerError, match=r"state\[4\]: expected one of 0 satellite"):
            client.infer(navigation_observation(g, 9))
