"""The plugin of packages/lerobot_policy_sinew, for the tests that run it in LeRobot."""

from __future__ import annotations

import subprocess
import sys
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
