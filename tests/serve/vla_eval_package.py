"""vla-eval as its wheel contains it. `make clients` installs it."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.processes import PRELOAD, Nursery
from tests.serve.lerobot_releases import CLIENTS, ROOT

RELEASE = "0.8.0"
FOLDER = CLIENTS.parents[1] / f"vla-eval-{RELEASE}"
installed = pytest.mark.skipif(
    not (FOLDER / f"vla_eval-{RELEASE}.dist-info").exists(),
    reason=f"vla-eval {RELEASE} is not installed in {CLIENTS.parents[1].name}; run `make clients`",
)


def environment() -> dict[str, str]:
    """Return the environment variables with which this interpreter finds the package in addition to ours."""
    here = os.pathsep.join(map(str, (ROOT, ROOT / "packages" / "sinew-client" / "src", FOLDER)))
    return {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}


@cache
def nursery() -> Nursery:
    """Return the nursery for processes that use the package."""
    theirs = ("vla_eval.connection", "vla_eval.orchestrator", "vla_eval.model_servers.serve")
    return Nursery(sys.executable, (*PRELOAD, *theirs), environment())


def recorded() -> Path:
    """Return messages that the package has written: a msgpack list of bytes (tests/serve/test_vla_eval_wire.py)."""
    return ROOT / "tests" / "serve" / f"vla-eval-{RELEASE}.msgpack"
