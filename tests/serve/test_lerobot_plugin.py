"""packages/lerobot_policy_sinew under LeRobot's own factory and evaluation: the actions of the direct client."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client

from tests import processes
from tests.control.puppet import Puppet
from tests.journeys.lerobot import ADDRESS, check_evaluation, documented, robot_line
from tests.serve.lerobot_releases import (
    CLIENTS,
    ROOT,
    lerobot_folder,
    newest_release,
    nursery,
    older_are_slow,
)
from tests.serve.lerobot_syntax import lowered
from tests.serve.test_server import serving

SCRIPT = Path(__file__).with_name("lerobot_plugin.py")
BLOCKS = ROOT / "sinew" / "assets" / "blocks.gguf"
PROMPT, ROWS, STEPS, SEED = "put the red block into the left bin", 3, 9, 11


def lerobot(
    release: str, plugin: Path, *words: object, path: Sequence[Path] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of ``lerobot_plugin.py``; ``path``: more folders to import from."""
    found = (
        *path,
        plugin,
        ROOT,
        ROOT / "eval",
        ROOT / "packages" / "sinew-client" / "src",
        lerobot_folder(release),
    )
    return processes.run(
        [CLIENTS, SCRIPT, *words],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, found)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
        timeout=900,
        nursery=nursery(release),
    )


def expected(address: str, seen: dict[str, Any], rows: int) -> np.ndarray:
    """The rows that a robot gets that asks the server itself, [steps, batch, action_dim]."""
    found: list[np.ndarray] = []
    asked = 0
    with Client(address, timeout=60.0) as client:
        for step in range(0, STEPS, rows):
            chunks = []
            for index in range(seen["state"].shape[1]):
                chunk = client.infer(
                    {
                        "images": {name: seen[name][step, index] for name in ("front", "wrist")},
                        "state": seen["state"][step, index],
                        "prompt": PROMPT,
                        "seed": SEED + asked,
                    }
                )
                asked += 1
                chunks.append(chunk.actions)
            found += list(np.stack(chunks, axis=1)[:rows])
    return np.stack(found[:STEPS])


@older_are_slow
def test_the_plugin_acts_as_the_direct_client(release: str, plugin: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    seen = {name: rng.integers(0, 256, (STEPS, 2, 64, 64, 3), np.uint8) for name in ("front", "wrist")}
    seen["state"] = rng.uniform(-0.1, 0.1, (STEPS, 2, 4)).astype(np.float32)
    renamed = {"front": seen["front"], "hand": seen["wrist"], "state": seen["state"]}
    np.savez(tmp_path / "seen.npz", **renamed, task=PROMPT)
    with serving(tmp_path, BLOCKS, "--wire", "native:0", "--threads", 1, "--engine", "plan") as server:
        given = {"cameras": {"hand": "wrist"}, "seed": SEED, "n_action_steps": ROWS}
        address = {"address": server.address}
        wanted = (
            {**given, **address},
            {**given, "bundle": str(BLOCKS), "engine": "plan", "compute": "cpu"},
            {**given, **address, "action_shape": [7]},
            {**address, "cameras": {"hand": "wrst"}},
            {**given, **address, "n_action_steps": 33},
            {**given, **address, "n_action_steps": 0},
            {**address, "spec": {**SPEC, "name": "other", "chunk_size": 50, "n_action_steps": 10}},
        )
        done = lerobot(release, plugin, "factory", tmp_path / "seen.npz", *map(json.dumps, wanted))
        assert done.returncode == 0, done.stderr[-3000:]
        direct = expected(server.address, seen, ROWS)
        found = np.load(tmp_path / "actions.npz")
        np.testing.assert_array_equal(found["0"], direct)
        np.testing.assert_array_equal(found["saved"], direct)
        np.testing.assert_allclose(
            found["1"], direct, rtol=0, atol=1e-5
        )  # another process, another number of threads
        # Of rows to execute this checkpoint names no number, so they are a quarter of its chunk; another names one.
        np.testing.assert_array_equal(found["5"], expected(server.address, seen, 32 // 4))
        assert found["6"] == 10
    assert (
        str(found["2"]) == "action: expected shape (7,), as the robot or environment has, got [4] from blocks"
    )
    assert str(found["3"]) == "policy.cameras: expected cameras of blocks (front, wrist), got 'wrst'"
    assert (
        str(found["4"])
        == "policy.n_action_steps: expected at most 32, the actions of a chunk of blocks, got 33"
    )


@older_are_slow
def test_what_an_episode_is_begun_with(release: str, plugin: Path) -> None:
    """LeRobot's marker changes nothing, another key of its own is told, and one that no task knows is refused."""
    options = [{}, {"lerobot_new_rollout": True}, {"lerobot_scene": 3}, {"color": "blue"}, {"colour": "blue"}]
    done = lerobot(release, plugin, "resets", *map(json.dumps, options))
    assert done.returncode == 0, done.stderr[-3000:]
    plain, marked, unknown, blue, misspelt = json.loads(done.stdout.splitlines()[-1])
    assert plain == marked
    assert plain["warnings"] == []
    assert unknown.pop("warnings") == [
        "options: the only supported option of LeRobot is lerobot_new_rollout, got lerobot_scene=3, which is ignored"
    ]
    assert unknown == {key: plain[key] for key in unknown}
    assert "blue" in blue["task"]
    assert misspelt["error"] == "options: expected color, side, phrasing or switch, got ['colour']"


SPEC = {
    "architecture": "puppet",
    "name": "puppet",
    "noise_dim": 0,
    "solver_steps": 1,
    "max_prompt_tokens": 8,
    "cameras": [{"name": "front", "height": 8, "width": 8}],
    "state": {"dim": 2},
    "action": {"dim": 2},
    "chunk_size": 20,
}
CHUNK = "ValueError: actions: expected shape [20, 2], as the policy puppet states, got "
FAR = "tcp://198.51.100.7:5555"  # nobody's; it is refused before anybody is asked


@older_are_slow
def test_what_neither_a_server_nor_a_folder_may_do(release: str, plugin: Path, tmp_path: Path) -> None:
    """Chunks of another form than was agreed, metadata that is none, frames that do not go together, and a folder
    whose configuration sends the key to a machine that its user did not name."""
    several = tmp_path / "several"
    several.mkdir()
    for folder, address in ((tmp_path, FAR), (several, f"{FAR},tcp://127.0.0.1:5555")):
        config = {"type": "sinew", "address": address, "input_features": {}, "output_features": {}}
        (folder / "config.json").write_text(json.dumps(config))
    good = {"policy": SPEC}
    metadata = (
        {},
        {"policy": [1]},
        {"policy": {**SPEC, "chunk_size": -1}},
        {"policy": {**SPEC, "action": {"dim": "2"}}},
        {"policy": {**SPEC, "cameras": ["front"]}},
        {"policy": {**SPEC, "n_action_steps": -3}},
        {"policy": {**SPEC, "n_action_steps": 21}},
    )
    with contextlib.ExitStack() as stack:

        def puppet(**given: Any) -> str:
            return f"tcp://127.0.0.1:{stack.enter_context(Puppet(delay=0, **given)).port}"

        fine = puppet(metadata=good)
        two = stack.enter_context(Puppet(delay=0, metadata={"policy": {**SPEC, "history": 2}}))
        wanted = [
            *({"address": puppet(metadata=each)} for each in metadata),
            *(
                {"address": puppet(metadata=good, rows=r, dim=d)}
                for r, d in ((20, 3), (20, 1), (1, 2), (21, 2))
            ),
            {"address": fine, "batch": {"frames": 1, "states": 2, "tasks": 2}},
            {"address": fine, "batch": {"frames": 2, "states": 2, "tasks": 1}},
            {"address": fine, "batch": {"frames": 0, "states": 0, "tasks": 0}},
            {"address": fine, "batch": {"value": 200.0}},
            {"address": fine, "batch": {"value": float("nan")}},
            *({"folder": str(folder)} for folder in (tmp_path, several)),
            {"address": fine},
            {"address": f"tcp://127.0.0.1:{two.port}", "steps": 7, "n_action_steps": 3},
        ]
        done = lerobot(release, plugin, "refusals", *map(json.dumps, wanted), SINEW_API_KEY="secret")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    told, chunks, frames, folders = found[:7], found[7:11], found[11:16], found[16:18]
    assert [each.partition(", got ")[0] for each in told] == [
        f"ClientError: {what}"
        for what in (
            *["metadata: expected a description of the policy"] * 2,
            "policy.chunk_size: expected 1 or more",
            "policy.action.dim: expected a whole number",
            "policy.cameras[0]: expected a map",
            *["policy.n_action_steps: expected 0 to 20"] * 2,
        )
    ]
    assert chunks == [f"{CHUNK}{shape}" for shape in ("[20, 3]", "[20, 1]", "[1, 2]", "[21, 2]")]
    assert frames == [
        "ValueError: observation.images.front: expected 2 frames, one for each state, got 1",
        "ValueError: task: expected 2 instructions, one for each state, got 1",
        "ValueError: observation.state: expected [B, D] with B of 1 or more, got [0, 2]",
        "ValueError: observation.images.front: expected floats in [0, 1], got 200 to 200",
        "ValueError: observation.images.front: expected floats in [0, 1], got nan to nan",
    ]
    # One of several addresses is enough, because the client tries all of them.
    assert folders == [
        f"ValueError: policy.address: {far} comes from the configuration of {folder}, so SINEW_API_KEY is not sent"
        f" there. If you trust this address, pass --policy.type=sinew --policy.address={far}. Otherwise"
        " unset SINEW_API_KEY"
        for far, folder in ((FAR, tmp_path), (f"{FAR},tcp://127.0.0.1:5555", several))
    ]
    assert found[18:] == [[1, 2], [1, 2]]
    # Of two moments, an episode's first stands for the one before it: of control steps, and not of requests.
    assert [tuple(asked.raw_state[::2]) for asked in two.asked] == [(0, 0), (2, 3), (5, 6)]
    assert [list(asked.camera_names) for asked in two.asked] == 3 * [["front", "front"]]


@newest_release
def test_what_lerobots_rollout_may_not_ask_for(release: str, plugin: Path) -> None:
    """Settings that do not go together, and those that the policy, or what runs it, does not take."""
    moves = {**SPEC, "motion": {"kind": "absolute"}}
    with contextlib.ExitStack() as stack:

        def puppet(policy: dict[str, Any], **server: Any) -> dict[str, str]:
            found = stack.enter_context(Puppet(delay=0, metadata={"policy": policy, "server": server}))
            return {"address": f"tcp://127.0.0.1:{found.port}"}

        plain, sure = puppet(SPEC), puppet(moves)
        relative = {**SPEC, "motion": {"kind": "relative", "action": [0, 1], "state": [0, 1]}}
        wanted: list[dict[str, Any]] = [
            {**puppet({**SPEC, "history": 2}), "rtc": {}},
            {**puppet(SPEC, unguided="expected a velocity, got single"), "rtc": {}},
            {**puppet(SPEC, engine="onnx", guidance=["guided"]), "rtc": {}},
            {**plain, "rtc": {"debug": True}},
            {**sure, "handover": "auto", "rtc": {}},
            {**plain, "handover": "auto"},
            {**puppet(moves, unguided="expected a velocity, got single"), "handover": "rtc"},
            {**sure, "handover": "sideways"},
            {**sure, "handover": "auto", "replan": "never"},
            {**plain, "replan": "4"},
            {**sure, "handover": "auto", "n_action_steps": 4},
            {**plain, "handover": "auto", "motion": "offsets"},
            {**plain, "compile_model": True},
            {**sure, "handover": "auto", "batch": {"frames": 2, "states": 2, "tasks": 2}},
            {"bundle": str(BLOCKS.with_name("act.gguf")), "engine": "eager", "rtc": {}},
            # And what they take: unguided, without guidance; a policy that is told what it does.
            {**puppet(SPEC, unguided="expected a velocity, got single"), "rtc": {"enabled": False}},
            {**plain, "handover": "auto", "motion": "absolute", "steps": 30},
            {**sure, "handover": "auto", "steps": 3},
            {**puppet(relative), "handover": "auto", "motion": "absolute"},
            # Relative to the state of its frame, which is its step: a robot of LeRobot's takes goals.
            {**puppet(relative), "n_action_steps": 2, "steps": 4, "row": True},
        ]
        done = lerobot(release, plugin, "refusals", *map(json.dumps, wanted))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    cannot, why = "the policy puppet cannot continue a running chunk", "expected a velocity, got single"
    refused = f"ValueError: inference.rtc.enabled: expected false, got true: {cannot}"
    assert found[:3] + found[6:7] == [
        (
            "ValueError: inference.type: expected sync, got rtc: the policy puppet needs the observations"
            " of 2 control steps, and LeRobot's rtc engine provides only those of its requests"
        ),
        f"{refused}: {why}",
        f"{refused}: engine onnx does not support the guidance no-jacobian",
        f"ValueError: policy.handover: expected a method other than rtc, got rtc: {cannot}: {why}",
    ]
    assert [each.partition(", got ")[0].partition(", so it is")[0] for each in found[3:6] + found[7:14]] == [
        "ValueError: inference.rtc.debug: expected false, because the solver runs in the server",
        (
            "ValueError: policy.handover: cannot be combined with --inference.type=rtc, which merges chunks itself;"
            " omit one of them"
        ),
        "ValueError: policy.motion: the policy puppet does not state what its actions are relative to",
        "ValueError: handover: expected one of freeze, naive, aligned, ensemble, aggregate, rtc",
        "ValueError: policy.replan: expected STEPS, full, queue:FRACTION or disagreement:LIMIT,STEPS",
        "ValueError: policy.replan: needs policy.handover",
        "ValueError: policy.n_action_steps: cannot be combined with policy.handover",
        "ValueError: policy.motion: expected absolute or nothing",
        "ValueError: use_torch_compile: expected false, because the policy has no torch model here",
        "ValueError: observation.state: expected one robot with policy.handover",
    ]
    assert found[14].startswith(
        "ValueError: inference.rtc.enabled: expected false, got true: the policy act cannot"
    )
    assert found[15:18] == 3 * [[1, 2]]
    assert found[18].endswith("states that its actions are relative, got absolute; omit --policy.motion")
    assert found[19] == [100 + 1 + 2] * 2


@newest_release
def test_lerobots_rtc_engine_gets_nothing_of_before_a_reset(release: str, plugin: Path) -> None:
    """An observation that may be of before, an answer that is, and a robot that shows the same for ever."""
    with Puppet(delay=0.6, metadata={"policy": SPEC}) as server:
        done = lerobot(release, plugin, "episodes", f"tcp://127.0.0.1:{server.port}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == [0, 0, 20, 20, 0, 20, 0]
    assert found["last"] == 20
    assert found["waited"] >= 1


@newest_release
def test_chunks_are_asked_for_while_the_robot_moves(release: str, plugin: Path) -> None:
    """Each row belongs to its step, so a chunk that comes late is entered late; of an episode nothing gets into the
    next. The state is the number of the step, and so the server knows which one it was shown."""
    with Puppet(delay=0.1, metadata={"policy": SPEC}) as server:
        done = lerobot(release, plugin, "ahead", f"tcp://127.0.0.1:{server.port}")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    # By number of the answer; of a reset, which this server answers like everything else, nothing was shown.
    shown = [round(asked.raw_state[0]) if len(asked.raw_state) else None for asked in server.asked]
    entered, before, held = [], -1, False
    assert len(rows) == 80
    for step, (row, same) in enumerate(rows):
        assert row == same
        if step in (0, 40):
            before, held = -1, False
        if row == before:
            held = True  # nothing has come in time, and what passes meanwhile is not left out
            continue
        number, index = divmod(round(row), 100)
        assert shown[number] is not None
        assert shown[number] >= (40 if step >= 40 else 0)
        assert index <= step - shown[number] if held else index == step - shown[number]
        if before >= 0 and round(before) // 100 != number:
            entered.append(index)
        before = row
    assert len(entered) >= 4
    assert any(index > 0 for index in entered), entered


@newest_release
def test_a_server_continues_chunks_as_lerobots_own_policies_do(release: str, plugin: Path) -> None:
    """A toy head of twelve rows through LeRobot's processor, and through what the plugin asks a server for."""
    shortest = {"execution_horizon": 6, "used": 1, "delay": 2}
    cases: list[dict[str, Any]] = [
        *({"schedule": name, **shortest} for name in ("LINEAR", "EXP", "ONES", "ZEROS")),
        {
            "schedule": "LINEAR",
            "execution_horizon": 8,
            "used": 7,
            "delay": 3,
        },  # five rows are left, and three zeros
        {"schedule": "EXP", "execution_horizon": 30, "used": 4, "delay": 0, "max_guidance_weight": 3.0},
        {
            "schedule": "ZEROS",
            "execution_horizon": 6,
            "used": 9,
            "delay": 300,
        },  # LeRobot's largest delay ever
        {"schedule": "LINEAR", "execution_horizon": 8, "used": 12, "delay": 3},  # the queue was empty
        {"schedule": "LINEAR", **shortest, "committed": 1},  # of a policy that was trained for less
        {"schedule": "LINEAR", **shortest, "committed": 2},
    ]
    done = lerobot(release, plugin, "guidance", *map(json.dumps, cases))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop()[2] == "trained"  # which is no guidance of LeRobot's
    for case, (difference, guided, kind) in zip(cases[:-1], found, strict=True):
        assert difference < 1e-6, case
        assert (guided > 0.1, kind) == ((True, "no-jacobian") if case["used"] != 12 else (False, ""))


def test_type_parameters_are_written_as_python_3_11_has_them() -> None:
    source = """
class Base: ...
type Pair = tuple[int, int]
def seen(kind):
    kind.seen = True
    return kind
@seen
class Box[T](Base):
    def held(self, value: T) -> Pair: return (value, value)
class Bag[A, B]:
    pass
def same[T: Base](value: T) -> T:
    return value
"""
    found: dict[str, Any] = {}
    exec(compile(lowered(source), "lowered", "exec", dont_inherit=True), found)
    assert found["Box"][int]().held(3) == (3, 3)
    assert found["Box"].seen
    assert issubclass(found["Box"], found["Base"])
    assert found["Bag"].__parameters__ == (found["A"], found["B"])
    assert found["same"](found["Box"]) is found["Box"]
    assert "[T" not in lowered(source).replace("Generic[T]", "")


@pytest.mark.slow  # `make lerobot` plays it, too
@older_are_slow
@pytest.mark.parametrize("form", ["address", "bundle"])
def test_lerobots_evaluation_plays_our_task(release: str, form: str, plugin: Path, tmp_path: Path) -> None:
    """The README's lines by LeRobot's evaluation: four episodes, at least three of them successes; `make lerobot` plays
    the ten that they say."""
    line = next(line for line in documented("lerobot-eval") if f"--policy.{form}=" in line)
    line = line.replace("n_episodes=10", "n_episodes=4")
    with contextlib.ExitStack() as stack:
        if form == "address":
            server = stack.enter_context(serving(tmp_path, BLOCKS, "--wire", "native:0", "--threads", 1))
            line = line.replace(ADDRESS, server.address)
        line = line.replace("sinew/assets/blocks.gguf", str(BLOCKS))
        done = lerobot(release, plugin, *shlex.split(line), f"--output_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_evaluation(tmp_path / "out", 4, 3)
    assert f"lerobot {release}" in done.stderr


@pytest.mark.slow
@newest_release
def test_lerobots_evaluation_records_our_task(release: str, plugin: Path, tmp_path: Path) -> None:
    """One rollout, as many episodes as environments: a data set for each, its columns of the features' names."""
    policy = ("--policy.type=sinew", f"--policy.bundle={BLOCKS}", "--env.type=sinew", "--env.task=Blocks-v0")
    count = ("--eval.recording=true", "--eval.n_episodes=2", "--eval.batch_size=2")
    done = lerobot(release, plugin, "lerobot-eval", *policy, *count, f"--output_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for each in ("env_0", "env_1"):
        info = json.loads((tmp_path / f"out/recordings/sinew_0/{each}/meta/info.json").read_text())
        assert info["total_episodes"] == 1
        assert set(info["features"]) >= {
            "action",
            "agent_pos",
            "observation.images.front",
            "observation.images.wrist",
        }


@newest_release  # `make lerobot LEROBOT=0.4.4` has lerobot-record, which imports 300 MB of rerun
def test_lerobots_rollout_drives_a_robot(release: str, plugin: Path, tmp_path: Path) -> None:
    """The README's line with a simulated gantry in place of the arm: the block lies in its bin."""
    words = shlex.split(robot_line(release, BLOCKS, tmp_path))
    settings = {"ROBOT_LOG": str(tmp_path / "robot.json"), "HF_LEROBOT_HOME": str(tmp_path / "data")}
    done = lerobot(release, plugin, *words, path=[tmp_path], **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "robot.json").read_text())["success"], done.stderr[-3000:]
