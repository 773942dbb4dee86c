"""What is commonly given instead of a checkpoint, for every family: one line that says what to give, and no file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sinew.convert import convert
from sinew.core import ConvertError
from tests.conftest import EVO1

# case -> folder of the weights, what is given with it, the neighbour whose weights are put there instead, and what
# holds the statistics (files, to be taken away).
CASES: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "smolvla-2cam": ("checkpoint", {"vlm": "vlm"}, "pi0-2cam/checkpoint", ("*processor*.safetensors",)),
    "pi0-2cam": ("checkpoint", {"arch": "arch.json"}, "pi05-2cam/checkpoint", ("*processor*.safetensors",)),
    "pi05-2cam": ("checkpoint", {"arch": "arch.json"}, "pi0-2cam/checkpoint", ("*processor*.safetensors",)),
    "groot-n15": (
        "checkpoint",
        {"vlm": "eagle", "base": "base"},
        "groot-n16/checkpoint",
        ("policy_*processor_step*",),
    ),
    "groot-n16": (
        "checkpoint",
        {"vlm": "eagle", "settings": {"letterbox": "true"}},
        "groot-n15/base",
        ("statistics.json",),
    ),
    "groot-n17": (
        "checkpoint",
        {
            "vlm": "vlm",
            "settings": {"frames": "240x300"},
            "embodiment": "oxe_droid_relative_eef_relative_joint",
        },
        "groot-n16/checkpoint",
        ("statistics.json",),
    ),
    "evo1": ("checkpoint", {"vlm": "vlm"}, "smolvla-2cam/checkpoint", ("*processor*.safetensors",)),
    "evo1-mint": ("checkpoint", {"vlm": "vlm", **EVO1["evo1-mint"]}, "", ("norm_stats.json",)),
    "openvla-ar": ("checkpoint", {}, "vla-adapter/checkpoint", ()),
    "openvla-oft": ("checkpoint", {}, "vla-adapter/checkpoint", ()),
    "vla-adapter": ("checkpoint", {}, "openvla-oft/checkpoint", ()),
    "bitvla": ("checkpoint", {}, "openvla-oft/checkpoint", ("dataset_statistics.json",)),
    "vla-jepa": ("checkpoint", {"vlm": "vlm"}, "groot-n17/checkpoint", ("*processor*.safetensors",)),
}
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "mp_rank_00_model_states.pt")
EMBODIED = ("groot-n15", "groot-n16", "groot-n17", "evo1-mint")
LORA = ("adapter_config.json", "adapter_model.safetensors")


def found(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


@pytest.fixture
def broken(golden, tmp_path):
    """``broken(case) -> (folder of the weights, what is given)``: links in a copy, to be replaced."""

    def make(case: str) -> tuple[Path, dict[str, Any]]:
        shutil.copytree(golden / case, tmp_path / case, copy_function=lambda a, b: Path(b).symlink_to(a))
        folder, given, _, _ = CASES[case]
        home = tmp_path / case
        return home / folder, {k: home / v if k in ("vlm", "arch", "base") else v for k, v in given.items()}

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
    file = found(path, ("model*.safetensors", "mp_rank*"))[0]
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-100])
    assert file.name in refused(path, given)


@pytest.mark.parametrize("case", [case for case, entry in CASES.items() if entry[2]])
def test_the_neighbours_weights(broken, golden, case):
    path, given = broken(case)
    for file in found(path, WEIGHTS):
        file.unlink()
    for file in found(golden / CASES[case][2], WEIGHTS):
        (path / file.name).symlink_to(file)
    message = refused(path, given)
    assert "does not fit" in message or "is missing" in message or "action_head" in message, message


@pytest.mark.parametrize("case", [case for case, entry in CASES.items() if entry[3]])
def test_no_statistics(broken, case):
    path, given = broken(case)
    files = found(path, CASES[case][3])
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
    assert message.endswith("if its widths are not the published ones, --arch FILE gives them"), message
