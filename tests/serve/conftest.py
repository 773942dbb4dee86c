"""The plugin of packages/lerobot_policy_sinew, for the tests that run it in LeRobot."""

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
    """The plugin as pip installs it, which is how LeRobot finds it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("plugin")
    found = subprocess.run(
        [sys.executable, "-m", *INSTALL, "--target", folder, PLUGIN], capture_output=True, text=True
    )
    if found.returncode and "hatchling" in found.stderr:
        pytest.skip("hatchling is not installed here, and the plugin is not built")
    assert found.returncode == 0, found.stderr
    return folder


@pytest.fixture(autouse=True)
def suite_stays_frozen() -> Iterator[None]:
    """An exchange of policies searches for garbage in everything that was there when the server began.

    In a worker that is the whole suite: two million objects, more than a CPU second for each exchange. What a test
    makes itself is not frozen, and is searched.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setattr(gc, "freeze", lambda: None)
        yield
