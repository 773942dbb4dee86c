"""The plugin in packages/lerobot_policy_sinew, for the tests that run it in LeRobot."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.lerobot_releases import ROOT

PLUGIN = ROOT / "packages" / "lerobot_policy_sinew"
INSTALL = (
    "pip",
    "--disable-pip-version-check",
    "install",
    "-q",
    "--no-deps",
    "--no-index",
    "--no-build-isolation",
)


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and unpack the plugin in its own folder, as pip installs it, so that LeRobot finds it."""
    folder = tmp_path_factory.mktemp("plugin")
    found = subprocess.run(
        [sys.executable, "-m", *INSTALL, "--target", folder, PLUGIN], capture_output=True, text=True
    )
    if found.returncode and "hatchling" in found.stderr:
        pytest.skip("hatchling is not installed, so the plugin cannot be built")
    assert found.returncode == 0, found.stderr
    return folder


@pytest.fixture(autouse=True)
def recorders_end_whole() -> Iterator[None]:
    """A recorder that is closed writes all that it has, also on a machine whose disk or processor is busy for 5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinew.records.background_writer.CLOSE_S", 60.0)
        yield


@pytest.fixture(autouse=True)
def suite_stays_frozen() -> Iterator[None]:
    """Exclude the objects of the test suite from the garbage collection of a hot-swap.

    A hot-swap collects garbage among all objects that existed when the server started. In a test worker, these are
    two million objects, which take more than a CPU second for each hot-swap. Objects of the test itself are still
    collected.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setattr(gc, "freeze", lambda: None)
        yield
