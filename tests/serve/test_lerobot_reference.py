"""LeRobot's own inference behind Sinew's wire: the same numbers as the bundle's from the same noise."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sinew_client import Client
from sinew_eval.episodes.policies import identity

import sinew
from tests.serve.lerobot_releases import CLIENTS, ROOT, lerobot_folder, newest_release
from tests.serve.test_lerobot_plugin import BLOCKS, SCRIPT, lerobot

# LeRobot's imports alone take 15 CPU seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextlib.contextmanager
def answering(program: str, release: str, plugin: Path, log: Path, *words: object) -> Iterator[str]:
    """Run a program that serves LeRobot's inference, and yield its address; it has to end when it is told to."""
    paths = (plugin, ROOT, ROOT / "packages" / "sinew-client" / "src", lerobot_folder(release))
    with (
        log.open("w+") as file,
        subprocess.Popen(
            [CLIENTS, SCRIPT, program, *map(str, words), "--port", "0"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            ready = next(
                (line for line in server.stdout if line.startswith("ready on ")), ""
            )  # LeRobot prints, too
            assert ready.startswith("ready on tcp://127.0.0.1:"), log.read_text()[-2000:]
            yield ready.split()[-1]
        finally:
            server.terminate()
        assert server.wait(120) == 0


def check_same(address: str, bundle: Path) -> None:
    """Compare a chunk of each."""
    rng = np.random.default_rng(0)
    with sinew.load(bundle, engine="eager") as policy, Client(address, timeout=60) as client:
        frames = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in policy.spec.cameras}
        seen = {
            "images": frames,
            "state": rng.normal(size=policy.spec.state.dim).astype(np.float32),
            "prompt": "",
        }
        theirs, ours = client.infer(seen).actions, policy.infer(seen).actions
        assert client.spec.name.endswith("LeRobot's inference")
    assert np.ptp(ours) > 0.1
    assert theirs == pytest.approx(ours, abs=1e-4)


@newest_release
def test_lerobots_inference_answers_a_client_as_the_bundle_does(
    release: str, plugin: Path, golden: Path, case_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = case_bundle("act-2cam")
    words = (golden / "act-2cam" / "checkpoint", "--bundle", bundle)
    with answering("reference", release, plugin, tmp_path / "log", *words) as address:
        assert identity(address)["dtype"] == "float32"  # what a report of `sinew eval --compare` reads
        check_same(address, bundle)


@newest_release
def test_a_policy_of_our_own_widths_is_lerobots_too(release: str, plugin: Path, tmp_path: Path) -> None:
    """The ACT of research/policies/libero.py as LeRobot's, with its backbone of groups and its smaller frames."""
    pytest.importorskip("mujoco", reason="train/ needs the sim extra")
    from research.policies.libero import ACTION, STATE, LiberoAct

    stats = {
        name: {"mean": np.zeros(dim, np.float32), "std": np.ones(dim, np.float32)}
        for name, dim in (("observation.state", STATE.dim), ("action", ACTION.dim))
    }
    task = object.__new__(LiberoAct)  # without demonstrations
    task.stats = stats
    model = task.model(tmp_path, 0)
    task.write(tmp_path / "checkpoint", model, model.state_dict())
    bundle = tmp_path / "libero-act.gguf"
    with answering("libero", release, plugin, tmp_path / "log", bundle, tmp_path / "theirs") as address:
        check_same(address, bundle)


@newest_release
def test_a_bundle_of_another_kind_is_refused(release: str, plugin: Path, golden: Path) -> None:
    done = lerobot(release, plugin, "reference", golden / "act-2cam" / "checkpoint", "--bundle", BLOCKS)
    assert done.returncode == 1
    assert "expected a bundle of the family act, as " in done.stderr
    assert done.stderr.rstrip().endswith("got smolvla")
