"""The combinations of ``make test-isa`` do what they say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sinew.engine.cpu.kernels import build
from tests import processes
from tests.isa import CHOSEN, MARKS, ROOT, TESTS, combinations
from tests.models.stages import CASES

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


def test_every_family_runs_and_no_graph_is_exported():
    """Eager of each golden case, and of the files whose tests may ask for graphs those that do not."""
    asking = ["tests/validate/test_validate.py", "tests/engine/test_quantize.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", MARKS]
    done = processes.run(
        [*command, "-k", CHOSEN, "tests/contract/test_family_engines.py", *asking], cwd=ROOT, check=True
    )
    found = [line.rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line]
    actions = "test_family_engines.py::test_the_references_actions"
    assert {f"{actions}[eager-{case}]" for case in CASES} <= {*found}
    assert {line.split("[")[1].split("-")[0] for line in found if actions in line} == {"cpu", "eager", "plan"}
    assert "test_validate.py::test_engines_pass_as_they_are[eager]" in found
    assert "test_quantize.py::test_a_recipe_in_fp8_carries_its_scales" in found
    assert not [line for line in found if "::test_one_component_alone" in line]  # each quantises graphs
