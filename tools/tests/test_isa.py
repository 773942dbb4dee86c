"""The combinations of ``make test-isa`` do what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from sinew.engine.cpu.kernels import build
from tests import processes
from tests.models.stages import CASES
from tests.shape_rounding import VARIABLE, RoundedByShape
from tools.isa import BATCHES, CHOSEN, MARKS, ROOT, TESTS, combinations

SHOW = """
import json, torch
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from sinew.engine.cpu.kernels.library import extension
print(json.dumps([torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), extension().kernels,
                  [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]]))
"""


def test_what_is_run_is_there():
    assert [each for each in (*TESTS, *BATCHES) if not (ROOT / each).exists()] == []


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
    assert [name for name in TESTS + BATCHES if not (ROOT / name).exists()] == []


def test_products_round_by_shape_in_every_process() -> None:
    """By one unit in the last place: in a batch, in another place of it, in gradients and half precision; the same
    batch has the same bits. In processes that tests fork, too, and nowhere once it is over."""
    torch.manual_seed(0)
    weight, bias, rows = torch.randn(32, 64), torch.randn(32), torch.randn(8, 64)
    linear, convolution = torch.nn.functional.linear, torch.nn.Conv2d(3, 4, 3).requires_grad_(False)
    pictures = torch.randn(4, 3, 8, 8)
    products = {
        "linear": (lambda x: linear(x, weight, bias), rows),
        "matmul": (lambda x: x @ weight.T, rows),
        "bmm": (lambda x: torch.bmm(x, weight.T.expand(8, 64, 32)[: len(x)]), rows[:, None]),
        "conv": (convolution, pictures),
        "bf16": (lambda x: linear(x.bfloat16(), weight.bfloat16()), rows),
    }
    before = {name: product(x) for name, (product, x) in products.items()}
    with RoundedByShape():
        for name, (product, x) in products.items():
            whole = product(x)
            assert torch.equal(whole, product(x)), name
            assert not torch.equal(whole[:2], product(x[:2])), name
            assert not torch.equal(product(x.flip(0)).flip(0), whole), name
            unit = torch.finfo(whole.dtype).eps * before[name].abs()
            assert ((whole - before[name]).abs() <= unit).all(), name
        learned = rows.clone().requires_grad_()
        assert linear(learned, weight).sum().requires_grad
    assert all(torch.equal(product(x), before[name]) for name, (product, x) in products.items())
    program = "import torch; x = torch.arange(12.0).reshape(3, 4) / 7; print(torch.equal((x @ x.T)[:1], x[:1] @ x.T))"
    for value, equal in (("1", "False"), ("", "True")):
        environment = {**os.environ, VARIABLE: value}
        done = processes.run([sys.executable, "-c", program], env=environment, check=True)
        assert done.stdout.strip() == equal or not value  # a processor may do so by itself


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
