"""The releases of LeRobot that tests run. `make clients` installs them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from tests.processes import Nursery

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(os.environ.get("SINEW_CLIENTS", ROOT / ".venv-clients")) / "bin" / "python"
RELEASES = ("0.4.4", "0.6.1")


def lerobot_folder(release: str) -> Path | None:
    """Return the folder of a release for the import path. None if it is not installed."""
    home = CLIENTS.parents[1]
    folders = (home / f"lerobot-{release}", *home.glob("lib/python*/site-packages"))
    return next((each for each in folders if (each / f"lerobot-{release}.dist-info").exists()), None)


# LeRobot imports these modules of other packages, which takes five seconds in each process. Each process imports
# LeRobot itself.
THIRD_PARTY = (
    "tests.serve.torchvision_operators",
    *("torchvision.io", "torch._dynamo", "datasets", "pandas", "pyarrow.parquet", "av", "cv2", "accelerate"),
    *("gymnasium", "diffusers.models.autoencoders.vae", "diffusers.optimization", "deepdiff", "draccus"),
)


@cache
def nursery(release: str) -> Nursery:
    """Return the nursery for processes of a release: ``tests.processes.run(..., nursery=nursery(release))``."""
    paths = (ROOT, lerobot_folder(release))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Nursery(str(CLIENTS), THIRD_PARTY, env)


def _missing(release: str) -> pytest.MarkDecorator:
    reason = f"LeRobot {release} is not installed in {CLIENTS.parents[1].name}; run `make clients`"
    return pytest.mark.skipif(lerobot_folder(release) is None, reason=reason)


def _releases(*older: pytest.MarkDecorator) -> pytest.MarkDecorator:
    *before, newest = RELEASES
    params = [pytest.param(release, marks=[_missing(release), *older]) for release in before]
    return pytest.mark.parametrize("release", [*params, pytest.param(newest, marks=_missing(newest))])


each_release = _releases()
# the tests of older releases take minutes, so `make test` has only the newest one
older_are_slow = _releases(pytest.mark.slow)
newest_release = pytest.mark.parametrize(
    "release", [pytest.param(RELEASES[-1], marks=_missing(RELEASES[-1]))]
)
