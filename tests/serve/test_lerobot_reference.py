"""LeRobot's own inference behind Sinew's wire: the same numbers as the bundle's from the same noise."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sinew_client import Client

import sinew
from sinew.eval.policies import identity
from tests.serve.lerobot_releases import CLIENTS, ROOT, lerobot_folder, newest_release
from tests.serve.test_lerobot_plugin import BLOCKS, SCRIPT, lerobot

# LeRobot's imports alone take 15 CPU seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@newest_release
def test_lerobots_inference_answers_a_client_as_the_bundle_does(
    release: str, plugin: Path, golden: Path, case_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = case_bundle("act-2cam")
    paths = (plugin, ROOT, ROOT / "packages" / "sinew-client" / "src", lerobot_folder(release))
    words = ["reference", golden / "act-2cam" / "checkpoint", "--bundle", bundle, "--port", 0]
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(
            [CLIENTS, SCRIPT, *map(str, words)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
        sinew.load(bundle, engine="eager") as policy,
    ):
        try:
            assert server.stdout is not None
            ready = next(
                (line for line in server.stdout if line.startswith("ready on ")), ""
            )  # LeRobot prints, too
            assert ready.startswith("ready on tcp://127.0.0.1:"), (tmp_path / "log").read_text()[-2000:]
            rng = np.random.default_rng(0)
            frames = {
                c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in policy.spec.cameras
            }
            seen = {
                "images": frames,
                "state": rng.normal(size=policy.spec.state.dim).astype(np.float32),
                "prompt": "",
            }
            address = ready.split()[-1]
            assert identity(address)["dtype"] == "float32"  # what a report of `sinew eval --compare` reads
            with Client(address, timeout=60) as client:
                theirs, ours = client.infer(seen).actions, policy.infer(seen).actions
                assert client.spec.name.endswith("LeRobot's inference")
        finally:
            server.terminate()
        assert server.wait(120) == 0
    assert np.ptp(ours) > 0.1
    assert theirs == pytest.approx(ours, abs=1e-4)


@newest_release
def test_a_bundle_of_another_kind_is_refused(release: str, plugin: Path, golden: Path) -> None:
    done = lerobot(release, plugin, "reference", golden / "act-2cam" / "checkpoint", "--bundle", BLOCKS)
    assert done.returncode == 1
    assert "expected a bundle of act as " in done.stderr
    assert done.stderr.rstrip().endswith("got smolvla")
