"""What is commonly given instead of a checkpoint, for every family: one line that says what to give, and no file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sinew.convert import convert
from sinew.core import ConvertError
from tests.cases import cases

CASES = {name: case for name, case in cases().items() if case.neighbour is not None}
WEIGHTS = (
    *("model*.safetensors", "model.safetensors.index.json"),
    *("mp_rank_00_model_states.pt", "checkpoints/latest-checkpoint.pt"),
)
EMBODIED = ("groot-n15", "groot-n16", "groot-n17", "evo1-mint")
LORA = ("adapter_config.json", "adapter_model.safetensors")


def found(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


@pytest.fixture
def broken(golden, tmp_path):
    """``broken(case) -> (folder of the weights, what is given)``: links in a copy, to be replaced."""

    def make(case: str) -> tuple[Path, dict[str, Any]]:
        shutil.copytree(golden / case, tmp_path / case, copy_function=lambda a, b: Path(b).symlink_to(a))
        home = tmp_path / case
        return home / CASES[case].checkpoint, CASES[case].options(home)

    return make


def refused(path: Path, given: dict[str, Any]) -> str:
    out = path.parents[1] / "out.gguf"
    with pytest.raises(ConvertError) as caught:
        convert(path, out, **given)
    assert not out.exists()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("case", CASES)
def test_a_truncated_shard(broken, case):
    path, given = broken(case)
    file = found(path, ("model*.safetensors", "mp_rank*", "checkpoints/*.pt"))[0]
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-100])
    assert file.name in refused(path, given)


@pytest.mark.parametrize("case", [case for case, entry in CASES.items() if entry.neighbour])
def test_the_neighbours_weights(broken, golden, case):
    path, given = broken(case)
    for file in found(path, WEIGHTS):
        file.unlink()
    for file in found(golden / CASES[case].neighbour, WEIGHTS):
        (path / file.name).symlink_to(file)
    message = refused(path, given)
    causes = ("does not fit", "does not split", "is missing", "action_head")
    assert any(cause in message for cause in causes), message


@pytest.mark.parametrize("case", [case for case, entry in CASES.items() if entry.statistics])
def test_no_statistics(broken, case):
    path, given = broken(case)
    files = found(path, CASES[case].statistics)
    assert files
    for file in files:
        file.unlink()
    message = refused(path, given)
    assert "statistics" in message or any(file.name in message for file in files), message


@pytest.mark.parametrize("case", EMBODIED)
def test_an_unknown_embodiment(broken, case):
    path, given = broken(case)
    message = refused(path, {**given, "embodiment": "nobody"})
    assert "nobody" in message


@pytest.mark.parametrize("case", [case for case in CASES if case != "evo1-mint"])
def test_an_adapter_alone(broken, case):
    path, given = broken(case)
    for file in found(path, WEIGHTS):
        file.unlink()
    for name in LORA:
        (path / name).write_text("{}")
    message = refused(path, given)
    assert "adapter" in message, message
    assert "merge" in message, message
    (path / "config.json").unlink(missing_ok=True)
    assert "adapter" in refused(path, given)


def test_widths_that_are_not_the_published_ones_are_asked_for(broken):
    path, given = broken("pi05-2cam")
    message = refused(path, {name: value for name, value in given.items() if name != "arch"})
    assert "is missing (and " in message, message
    assert message.endswith("pass its widths with --arch FILE"), message
