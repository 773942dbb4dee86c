"""``sinew doctor POLICY --observe ROBOT``: wrong wiring by its name, none of the right robot, no command."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew_client.control import NoObservation

from sinew.bundle.schema import Manifest, Normalization, Seen, SeenCamera, SeenState
from sinew.checks.wiring import CANNOT_TELL, LOOKS_WRONG, WRONG, Finding, WiringWatch, findings
from sinew.checks.wiring.joints import assignment
from sinew.checks.wiring.observe import live, recorded
from sinew.cli import main
from sinew.core import Observation, VectorSpec
from sinew.policy import open_bundle
from sinew.records.recorder import Recorder

pytest.importorskip("mujoco")

from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.robot import SimulatedRobot
from sinew_eval.sim import blocks_expert, egg, pen

TASKS: dict[str, tuple[str, Callable[[Any], np.ndarray]]] = {
    "blocks": ("sinew/Blocks-v0", lambda env: blocks_expert.act(env.world())),
    "pen": ("sinew/Pen-v0", pen.act),
    "egg": ("sinew/Egg-v0", egg.act),
}
MANIFESTS = {task: open_bundle(task).manifest for task in TASKS}
Seeing = Mapping[str, Any]
Change = Callable[[dict[str, Any]], Seeing]


class Robot:
    """A simulated robot whose observations are changed on the way, and which nobody may command."""

    def __init__(self, task: str = "blocks", seed: int = 5000, change: Change = dict):
        self._robot, self._change = SimulatedRobot(*make_env(TASKS[task][0]), seed=seed), change

    def observe(self) -> Seeing:
        seen = self._robot.observe()
        return self._change({**seen, "images": dict(seen["images"])})

    def act(self, row: np.ndarray) -> None:
        raise AssertionError("the robot was commanded")

    def hold(self) -> None:
        raise AssertionError("the robot was told to hold")


def frames(change: Callable[[np.ndarray], np.ndarray], *names: str) -> Change:
    def changed(seen: dict[str, Any]) -> Seeing:
        images = {n: change(f) if not names or n in names else f for n, f in seen["images"].items()}
        return {**seen, "images": images}

    return changed


def larger(frame: np.ndarray) -> np.ndarray:
    return np.repeat(np.repeat(frame, 4, 0), 4, 1)


def state(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda seen: {**seen, "state": np.asarray(change(seen["state"]), np.float32)}


def swapped(seen: dict[str, Any]) -> Seeing:
    names = list(seen["images"])
    return {
        **seen,
        "images": {name: seen["images"][other] for name, other in zip(names, names[::-1], strict=True)},
    }


def wrong(found: list[Finding]) -> list[tuple[str, str]]:
    """Return subject and kind of what is said to be wrong."""
    return [(each.subject, each.kind) for each in found if each.amiss]


def look(task: str, change: Change = dict, seed: int = 5000) -> list[Finding]:
    """Return what is found at one look, but for how long it took: that is this machine's."""
    found = live(Robot(task, seed, change), MANIFESTS[task], 0.0)[1]
    return [each for each in found if each.subject != "rate"]


def episode(task: str, seed: int, steps: int = 60) -> Iterator[tuple[float, Seeing]]:
    """Yield times and observations of a robot that its expert drives."""
    env, adapter = make_env(TASKS[task][0])
    raw, _ = env.reset(seed=seed)
    for step in range(steps):
        yield step / adapter.control_hz, adapter.observation(raw)
        raw, _, over, cut, _ = env.step(TASKS[task][1](env.unwrapped))
        if over or cut:
            break
    env.close()


# ----------------------------------------------------------------------------- the right robot


@pytest.mark.parametrize("task", TASKS)
def test_nothing_is_found_of_the_right_robot(task: str) -> None:
    for seed in range(5000, 5006):
        assert wrong(look(task, seed=seed)) == []
    whole = WiringWatch()
    for seed in range(6000, 6003):
        part = WiringWatch()
        for when, seen in episode(task, seed):
            for watch in (whole, part):
                watch.add({**seen, "time": seed + when})
            if part.looks == 15:
                assert wrong(findings(part, MANIFESTS[task])) == []
                part = WiringWatch()
    assert whole.looks > 90
    assert wrong(findings(whole, MANIFESTS[task])) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: (frame * 0.6).astype(np.uint8),
        lambda frame: np.clip(frame * 1.3 + 10.0, 0, 255).astype(np.uint8),
        lambda frame: frame / np.float32(255),
        lambda frame: np.repeat(np.repeat(frame, 3, 0), 3, 1),
    ],
    ids=["darker", "brighter", "floats", "larger"],
)
def test_light_and_size_are_no_finding(change: Callable[[np.ndarray], np.ndarray]) -> None:
    for task in TASKS:
        assert wrong(look(task, frames(change))) == []


# ----------------------------------------------------------------------------- cameras


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda f: f[..., ::-1], "BGR"),
        (lambda f: f[::-1, ::-1], "upside down"),
        (np.rot90, "turned to the left"),
        (lambda f: np.rot90(f, -1), "turned to the right"),
        (lambda f: f[::-1, ::-1, ::-1], "upside down, BGR"),
        (lambda f: f // 64, "black"),
        (np.zeros_like, "black"),
        (lambda f: (f / 128).astype(np.uint8), "0..1 as uint8"),
        (lambda f: np.full_like(f, 130), "one colour"),
    ],
)
@pytest.mark.parametrize(("task", "camera"), [("blocks", "front"), ("pen", "now"), ("egg", "front")])
def test_a_camera_is_told_by_what_is_wrong(
    task: str, camera: str, change: Callable[[np.ndarray], np.ndarray], kind: str
) -> None:
    assert wrong(look(task, frames(change, camera))) == [(f"camera {camera}", kind)]


def test_mirrored_is_told_where_the_scene_has_sides() -> None:
    assert wrong(look("blocks", frames(lambda f: f[:, ::-1]))) == [("camera front", "mirrored left to right")]
    assert wrong(look("blocks", frames(lambda f: f[::-1]))) == [("camera front", "mirrored top to bottom")]
    found = look("egg", frames(lambda f: f[:, ::-1]))
    assert wrong(found) == []
    assert any("mirrored left to right" in each.seen for each in found if each.level == CANNOT_TELL)


def test_swapped_cameras_are_told_and_cameras_that_look_alike_are_not() -> None:
    found = look("blocks", swapped)
    assert wrong(found) == [("camera front", "swapped"), ("camera wrist", "swapped")]
    assert "--rename wrist=front --rename front=wrist" in found[0].advice
    found = look(
        "blocks", lambda seen: {**seen, "images": dict.fromkeys(("front", "wrist"), seen["images"]["wrist"])}
    )
    assert wrong(found) == [("camera front", "wrong camera")]
    found = look("pen", swapped)
    assert wrong(found) == []
    assert any("exchanged with previous" in each.seen for each in found)


def test_a_picture_of_something_else_is_unlike() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    assert wrong(look("blocks", frames(lambda f: noise, "front"))) == [("camera front", "unlike")]


def test_a_camera_that_stands_still_while_others_move_is_frozen() -> None:
    watch, first, still = WiringWatch(), None, WiringWatch()
    for when, seen in episode("blocks", 6000):
        first = seen["images"]["wrist"] if first is None else first
        watch.add({**seen, "images": {**seen["images"], "wrist": first}, "time": when})
        still.add({**seen, "images": {**seen["images"], "wrist": first}, "state": np.zeros(4), "time": 1.0})
    assert ("camera wrist", "frozen") in wrong(findings(watch, MANIFESTS["blocks"]))
    assert ("time", "stands still") in wrong(findings(still, MANIFESTS["blocks"]))
    dead = WiringWatch()
    for _ in range(30):
        dead.add(seen)
    found = findings(dead, MANIFESTS["blocks"])
    assert ("cameras", "frozen") in [(each.subject, each.kind) for each in found if each.level == CANNOT_TELL]
    assert ("camera wrist", "frozen") not in wrong(found)


# ----------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    ("task", "change", "expected"),
    [
        ("blocks", lambda s: s[::-1], [("state", "permuted")]),
        ("blocks", lambda s: np.roll(s, 1), [("state", "permuted")]),
        ("blocks", lambda s: -s, [("state.z", "negated"), ("state.opening", "negated")]),
        ("blocks", np.degrees, [("state", "degrees")]),
        ("blocks", lambda s: 1000 * s, [("state", "thousandths")]),
        ("blocks", lambda s: s + np.array([0, 0, 0.5, 0]), [("state.z", "outside")]),
        ("pen", lambda s: -s, [("state.opening", "negated")]),
        ("pen", np.degrees, [("state.opening", "degrees")]),
        ("pen", np.radians, [("state.opening", "radians")]),
        ("egg", lambda s: s[::-1], [("state", "permuted")]),
        ("egg", lambda s: s * [-1, 1], [("state.opening", "negated")]),
        ("egg", lambda s: s * [np.nan, 1], [("robot", "refused"), ("state", "not finite")]),
    ],
)
def test_a_state_is_told_by_what_is_wrong(
    task: str, change: Callable[[np.ndarray], np.ndarray], expected: list[tuple[str, str]]
) -> None:
    assert wrong(look(task, state(change))) == expected


def test_a_permutation_is_told_in_order() -> None:
    [found] = [each for each in look("egg", state(lambda s: s[::-1])) if each.amiss]
    turned = "number 0 (opening) looks like number 1 (force), number 1 (force) looks like number 0 (opening)"
    assert turned in found.seen
    assert found.level == LOOKS_WRONG


def arm(dim: int, **seen: tuple[float, ...]) -> Manifest:
    """The blocks' manifest with another state, which has names and these statistics."""
    found = MANIFESTS["blocks"]
    spec = replace(found.spec, state=VectorSpec(dim, tuple(f"joint{i}" for i in range(dim))))
    processing = replace(found.processing, state=Normalization("identity"), padded_state_dim=32)
    return replace(found, spec=spec, processing=processing, seen=Seen("an arm", 100, {}, SeenState(**seen)))


def states(manifest: Manifest, rows: np.ndarray) -> list[tuple[str, str]]:
    watch = WiringWatch()
    for row in rows:
        watch.add({"images": {}, "state": row})
    return wrong(findings(watch, manifest))


def test_an_arm_in_the_other_angle_unit() -> None:
    mean, std = np.array([5.0, -60.0, 70.0, 45.0, 10.0, 20.0]), np.array([20.0, 10.0, 12.0, 9.0, 25.0, 15.0])
    low, high = mean - 2.5 * std, mean + 2.5 * std
    degrees = arm(6, mean=tuple(mean), std=tuple(std), low=tuple(low), high=tuple(high))
    turned = {"mean": mean, "std": std, "low": low, "high": high}
    radians = arm(6, **{name: tuple(np.radians(row)) for name, row in turned.items()})
    rows = mean + std * np.random.default_rng(0).normal(0, 0.7, (20, 6))
    assert states(degrees, rows) == states(radians, np.radians(rows)) == []
    assert states(degrees, np.radians(rows)) == [("state", "radians")]
    assert states(radians, rows) == [("state", "degrees")]
    assert states(degrees, np.zeros((20, 6))) != [("state", "radians")]  # zero is zero in either
    gripper = rows.copy()
    gripper[:, 5] = low[5] + 0.01  # closed, within its range
    assert states(degrees, gripper) == []


def test_a_joint_that_never_moves_while_the_others_do() -> None:
    manifest = arm(3, mean=(0.0,) * 3, std=(0.5,) * 3, low=(-1.0,) * 3, high=(1.0,) * 3)
    moving = np.stack([np.linspace(-0.6, 0.6, 40), np.linspace(0.5, -0.5, 40), np.full(40, 0.1)], axis=1)
    assert states(manifest, moving) == [("state.joint2", "never moves")]
    moving[:, 1] = 0.2  # two of three stand: a motion of one joint
    assert states(manifest, moving) == []


def test_the_assignment_of_least_cost() -> None:
    import itertools

    rng = np.random.default_rng(0)
    for _ in range(60):
        size = int(rng.integers(1, 6))
        cost = rng.exponential(size=(size, size)) * 10 ** rng.uniform(-3, 4)
        least = min(sum(cost[i, p[i]] for i in range(size)) for p in itertools.permutations(range(size)))
        found = assignment(cost)
        assert sorted(found) == list(range(size))
        assert sum(cost[i, found[i]] for i in range(size)) == pytest.approx(least)


def test_without_statistics_of_frames_the_normalisation_is_compared_and_the_rest_cannot_be_told() -> None:
    manifest = replace(MANIFESTS["blocks"], seen=None)
    assert wrong(live(Robot(), manifest, 0.0)[1]) == []
    found = live(Robot(change=swapped), manifest, 0.0)[1]
    assert wrong(found) == []
    assert [each.subject for each in found if each.kind == "no statistics"] == [
        "camera front",
        "camera wrist",
    ]
    assert wrong(live(Robot(change=state(np.degrees)), manifest, 0.0)[1]) == [("state", "degrees")]
    assert wrong(live(Robot(change=frames(np.zeros_like)), manifest, 0.0)[1]) == [
        ("camera front", "black"),
        ("camera wrist", "black"),
    ]


def test_means_of_pixels_alone_tell_exchanged_colours() -> None:
    warm = Seen("stats.json", 9, {"front": SeenCamera((150.0, 120.0, 90.0), (40.0, 40.0, 40.0))})
    manifest = replace(MANIFESTS["blocks"], seen=warm)

    def shown(rgb: tuple[int, int, int]) -> list[tuple[str, str]]:
        watch, rng = WiringWatch(), np.random.default_rng(0)
        frame = (rng.integers(-20, 20, (48, 64, 3)) + np.array(rgb)).clip(0, 255).astype(np.uint8)
        watch.add({"images": {"front": frame}, "state": [0.0, 0.0, 0.1, 0.05]})
        return wrong(findings(watch, manifest))

    assert shown((140, 120, 95)) == shown((110, 110, 110)) == []
    assert shown((92, 120, 148)) == [("camera front", "BGR")]


# ----------------------------------------------------------------------------- time, rate, and robots that fail


def test_clocks_and_rates() -> None:
    manifest = MANIFESTS["blocks"]

    def found(**changes: Any) -> list[tuple[str, str]]:
        watch = WiringWatch()
        for number in range(12):
            seen = {"images": {}, "state": [0.0, 0.0, 0.1, 0.05], "time": 100.0 + number / 20}
            now, took = changes.get("now", 100.01) + number / 20, changes.get("took", 0.002)
            watch.add({**seen, **changes.get("seen", {})}, now, took)
        return wrong(findings(watch, manifest, manifest.spec.control_hz))

    assert found() == []
    assert found(now=-1e9) == [("time", "another clock")]
    assert found(now=101.0) == [("time", "stale")]
    assert found(seen={"time": float("nan")}) == [("time", "not finite")]
    assert found(seen={"time": 100.0}) == [("time", "stands still")]
    assert found(took=0.2) == [("rate", "slow")]


def test_a_robot_that_raises_is_blind_or_blocks_is_said_to() -> None:
    def raises(seen: dict[str, Any]) -> Seeing:
        raise OSError("bus: no answer of motor 3")

    def blind(seen: dict[str, Any]) -> Seeing:
        raise NoObservation("front: no frame")

    free = threading.Event()

    def blocks(seen: dict[str, Any]) -> Seeing:
        free.wait(60)
        return seen

    manifest = MANIFESTS["blocks"]
    looks, found = live(Robot(change=raises), manifest, 0.0)
    assert (looks, wrong(found)) == (0, [("robot", "raises")])
    assert found[0].level == WRONG
    assert "OSError: bus: no answer of motor 3" in found[0].seen
    assert "front: no frame" in live(Robot(change=blind), manifest, 0.0)[1][0].seen
    looks, found = live(Robot(change=blocks), manifest, 0.0, patience=0.05)
    free.set()
    assert (looks, wrong(found)) == (0, [("robot", "blocks")])
    assert wrong(live(SimpleNamespace(observe=lambda: None), manifest, 0.0)[1]) == [("robot", "raises")]


def test_a_robot_that_the_policy_refuses() -> None:
    found = look("blocks", lambda seen: {**seen, "images": {"front": seen["images"]["front"], "cam1": 3}})
    assert wrong(found)[0] == ("robot", "refused")
    assert found[0].advice == "map the cameras by name, for example --rename cam1=wrist"
    assert ("camera cam1", "no frame") in wrong(found)
    found = look("blocks", lambda seen: {**seen, "state": seen["state"][:3]})
    assert wrong(found) == [("robot", "refused")]
    assert "4 numbers of state" in found[0].expected
    assert not found[0].advice  # its cameras are right


# ----------------------------------------------------------------------------- the verb, records, and what is learnt


LARGE = (
    r"frames are 256x256 but the policy resizes them to 64x64; send 64x64 to save bandwidth \(12 kB instead"
)
WIRED = """
from tests.cli.test_observe import Robot, frames, larger, state, swapped


class Right(Robot):
    pass


class Large(Robot):
    def __init__(self):
        super().__init__(change=frames(larger, "front"))


class Swapped(Robot):
    def __init__(self):
        super().__init__(change=swapped)
"""


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wired_for_observe.py").write_text(WIRED)
    monkeypatch.chdir(tmp_path)
    short = ("--seconds", "0.1", "--no-effects")
    assert main(["doctor", "blocks", "--observe", "wired_for_observe:Right", *short, "--json"]) == 0
    found = last_json(capsys)
    assert found["ok"]
    assert {check["status"] for check in found["checks"]} == {"ok"}
    told = ("--json", "told.json")
    assert main(["doctor", "blocks", "--observe", "wired_for_observe:Swapped", *short, *told]) == 1
    assert "it was not commanded" in capsys.readouterr().out
    found = json.loads(Path("told.json").read_text())
    assert not found["ok"]
    assert [check["kind"] for check in found["checks"] if check["status"] == "fail"] == ["swapped"] * 2
    assert main(["doctor", "blocks", "--observe", "wired_for_observe:Large", *short]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"more than needed camera front {LARGE}", said)
    assert said.count("more than needed") == 1
    exchanged = ("--rename", "front=wrist", "--rename", "wrist=front")
    assert main(["doctor", "blocks", "--observe", "wired_for_observe:Swapped", *short, *exchanged]) == 0
    assert main(["doctor", "egg", "--observe", "egg", *short]) == 0
    assert main(["doctor", "egg", "--observe", "blocks", *short]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--observe", "blocks"], "expected a policy"),
        (["blocks", "--observe", "toaster"], "--robot: expected dry"),
        (["blocks", "--observe", "blocks", "--verify"], "without --verify"),
        (["blocks", "--learn", "records"], "--learn: pass --out FILE too"),
        (["blocks", "--observe", "no_such_module_here:Robot"], "no_such_module_here"),
    ],
)
def test_what_the_verb_refuses(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["doctor", *arguments]) == 1
    assert message in "".join(capsys.readouterr())


def record(folder: Path, task: str, seeds: range, change: Change = dict) -> Path:
    """Write episodes as a server records them, one session each."""
    recorder, put = Recorder(folder), 0
    for seed in seeds:
        for when, seen in episode(task, seed, 40):
            shown = change({**seen, "images": dict(seen["images"])})
            given = Observation(
                images=shown["images"],
                state=shown["state"],
                prompt="go",
                time=seed + when,
                session=f"arm{seed}",
            )
            recorder.put("http", f"arm{seed}", given, _ANSWER)
            put += 1
            while recorder.stats()["written"] < put:  # a slow disk drops nothing here
                time.sleep(0.001)
    recorder.close()
    return folder


_ANSWER: Any = SimpleNamespace(
    actions=np.zeros((1, 4), np.float32), seed=1, context=b"", timing=SimpleNamespace(total_ms=1.0)
)


@pytest.mark.slow
def test_records_are_looked_at_after_the_fact_and_learnt_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = record(tmp_path / "right", "blocks", range(6000, 6003))
    turned = record(tmp_path / "bgr", "blocks", range(6003, 6004), frames(lambda f: f[..., ::-1], "front"))
    manifest = MANIFESTS["blocks"]
    count, found = recorded(right, manifest)
    assert count > 90
    assert wrong(found) == []
    assert main(["doctor", "blocks", "--observe", str(right), "--no-effects"]) == 0
    assert main(["doctor", "blocks", "--observe", str(turned), "--json"]) == 1
    assert [check["kind"] for check in last_json(capsys)["checks"] if check["status"] == "fail"] == ["BGR"]
    for number, name in enumerate(sorted(path.name for path in turned.glob("*.npz"))):
        (turned / name).rename(right / f"{9000 + number:08d}.npz")
    assert wrong(recorded(right, manifest)[1]) == [("camera front of session arm6003", "BGR")]
    # What a bundle lacks is learnt from records, and then tells.
    own, out = record(tmp_path / "own", "pen", range(6000, 6003)), tmp_path / "pen.gguf"
    assert main(["doctor", "pen", "--learn", str(own), "--out", str(out)]) == 0
    learnt = open_bundle(out).manifest
    assert learnt.seen is not None
    assert (learnt.seen.source, list(learnt.seen.cameras)) == ("120 recorded requests", ["now", "previous"])
    assert wrong(live(Robot("pen"), learnt, 0.0)[1]) == []
    bgr = live(Robot("pen", change=frames(lambda f: f[..., ::-1])), learnt, 0.0)[1]
    assert wrong(bgr) == [("camera now", "BGR"), ("camera previous", "BGR")]
    assert main(["doctor", "blocks", "--learn", str(own), "--out", str(tmp_path / "no.gguf")]) == 1
    assert "expected frames of front, wrist, got 'now'" in "".join(capsys.readouterr())
    assert main(["doctor", str(out), "--learn", str(own), "--out", str(out)]) == 1
