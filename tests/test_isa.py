"""The combinations of ``make test-isa`` do what they say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sinew.engine.cpu.kernels import build
from tests.isa import ROOT, TESTS, combinations

SHOW = """
import json, torch
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from sinew.engine.cpu.kernels.library import extension
print(json.dumps([torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), extension().kernels,
                  [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]]))
"""


@pytest.mark.slow  # the lowest is run beside `make test`
@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
def test_the_lowest_is_the_lowest_and_native_is_what_is_here():
    found = {}
    for each in combinations():
        if each.name in ("lowest", "native-2"):
            done = subprocess.run(
                [sys.executable, "-c", SHOW], cwd=ROOT, env=each.environment(), capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            found[each.name] = json.loads(done.stdout.splitlines()[-1])
    assert found["lowest"] == ["DEFAULT", 1, "portable", []]
    assert found["native-2"][:2] != ["DEFAULT", 1]
    assert found["native-2"][1] == 2


def test_what_runs_is_there():
    assert [name for name in TESTS if not (ROOT / name).exists()] == []
