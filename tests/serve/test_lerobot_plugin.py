"""packages/lerobot_policy_sinew under LeRobot's own factory and evaluation: the actions of the direct client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client

from tests import processes
from tests.serve.test_lerobot_wire import CLIENTS, ROOT, lerobot_client
from tests.serve.test_server import serving

PLUGIN = ROOT / "packages" / "lerobot_policy_sinew"
SCRIPT = Path(__file__).with_name("lerobot_plugin.py")
BLOCKS = ROOT / "sinew" / "assets" / "blocks.gguf"
PROMPT, ROWS, STEPS, SEED = "put the red block into the left bin", 3, 7, 11


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin as pip installs it, which is how LeRobot finds it, in a folder of its own."""
    if reason := lerobot_client():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("plugin")
    command = [
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    found = subprocess.run(
        [sys.executable, "-m", *command, "--target", folder, PLUGIN], capture_output=True, text=True
    )
    if found.returncode and "hatchling" in found.stderr:
        pytest.skip("hatchling is not installed here, and the plugin is not built")
    assert found.returncode == 0, found.stderr
    return folder


def lerobot(plugin: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = (plugin, ROOT, ROOT / "packages" / "sinew-client" / "src")
    return subprocess.run(
        [CLIENTS, SCRIPT, *map(str, words)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=280,
    )


def expected(address: str, seen: dict[str, Any], rows: int) -> np.ndarray:
    """The rows that a robot gets that asks the server itself, [steps, batch, action_dim]."""
    found: list[np.ndarray] = []
    asked = 0
    with Client(address) as client:
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


def test_the_plugin_acts_as_the_direct_client(plugin: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    seen = {name: rng.integers(0, 256, (STEPS, 2, 64, 64, 3), np.uint8) for name in ("front", "wrist")}
    seen["state"] = rng.uniform(-0.1, 0.1, (STEPS, 2, 4)).astype(np.float32)
    renamed = {"front": seen["front"], "hand": seen["wrist"], "state": seen["state"]}
    np.savez(tmp_path / "seen.npz", **renamed, task=PROMPT)
    with serving(tmp_path, BLOCKS, "--wire", "native:0", "--threads", 1, "--engine", "plan") as server:
        more = {"cameras": {"hand": "wrist"}, "seed": SEED, "n_action_steps": ROWS}
        remote = json.dumps({"address": server.address, **more})
        local = json.dumps({"bundle": str(BLOCKS), "engine": "plan", "compute": "cpu", **more})
        wrong = json.dumps({"address": server.address, **more, "action_shape": [7]})
        strange = json.dumps({"address": server.address, "cameras": {"hand": "wrst"}})
        done = lerobot(plugin, "factory", tmp_path / "seen.npz", remote, local, wrong, strange)
        assert done.returncode == 0, done.stderr[-3000:]
        direct = expected(server.address, seen, ROWS)
        found = np.load(tmp_path / "actions.npz")
        np.testing.assert_array_equal(found["0"], direct)
        np.testing.assert_allclose(
            found["1"], direct, rtol=0, atol=1e-5
        )  # another process, another number of threads
    assert str(found["2"]) == "action: expected (7,) as the robot or environment takes it, got [4] of blocks"
    assert str(found["3"]) == "policy.cameras: expected cameras of blocks: ['front', 'wrist'], got 'wrst'"


@pytest.mark.slow
def test_lerobots_evaluation_plays_our_task(plugin: Path, tmp_path: Path) -> None:
    """Ten episodes each, by LeRobot's evaluation through the plugin and by ours."""
    with serving(tmp_path, BLOCKS, "--wire", "native:0", "--threads", 1) as server:
        flags = (
            *("--policy.type=sinew", f"--policy.address={server.address}", "--policy.n_action_steps=8"),
            *("--env.type=sinew", "--env.task=Blocks-v0", "--eval.n_episodes=10", "--eval.batch_size=2"),
            *("--eval.use_async_envs=false", "--seed=5000", f"--output_dir={tmp_path / 'lerobot'}"),
        )
        done = lerobot(plugin, "eval", *flags)
        if "No module named 'termcolor'" in done.stderr:
            pytest.skip(
                "the clients' environment is older than packages/clients.txt; `make clients` renews it"
            )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        ours = processes.run(
            [sys.executable, "-m", "sinew", "eval", server.address, "--env", "sinew/Blocks-v0", "--episodes", "10",
             "--replan", "8", "--json", "--workers", "1"],
            check=True, timeout=280,
        )  # fmt: skip
    theirs = json.loads((tmp_path / "lerobot" / "eval_info.json").read_text())["overall"]["pc_success"]
    assert abs(theirs - 100 * json.loads(ours.stdout)["variants"][0]["success"]) <= 10
