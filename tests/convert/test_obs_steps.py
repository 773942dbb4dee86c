"""``n_obs_steps`` of LeRobot's configurations: of these families the newest observation is read, whatever it says.

Nothing but the configuration's own file names it in LeRobot, and the observations that a data set gives for training
are those of the present step all the same: a checkpoint that says 3 is one that says 1. ACT refuses it, as LeRobot
does, and Diffusion Policy reads so many moments (test_act.py, test_diffusion.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinew.bundle import Bundle
from sinew.convert import convert
from tests import processes
from tests.cases import cases
from tests.serve.lerobot_releases import CLIENTS, lerobot_folder, nursery, older_are_slow

CASES = (
    *("smolvla-2cam", "pi0-2cam", "pi05-2cam", "pi05-mem", "pi0fast-2cam"),
    *("xvla-auto", "vla-jepa", "evo1", "groot-n15"),
)
TYPES = ("smolvla", "pi0", "pi05", "pi0_fast", "xvla", "vla_jepa", "evo1", "groot")
SCRIPT = """
import importlib, json, pathlib, sys
import lerobot.policies
from lerobot.configs.policies import PreTrainedConfig
home, found = pathlib.Path(lerobot.policies.__file__).parent, {}
for name in sys.argv[1:]:
    folder = home / name
    if not folder.is_dir():
        continue
    importlib.import_module(f"lerobot.policies.{name}.configuration_{name}")
    kind = PreTrainedConfig.get_choice_class(name)
    said = [path.name for path in folder.rglob("*.py") if "n_obs_steps" in path.read_text()]
    indices = []
    for steps in (1, 3):
        config = kind(n_obs_steps=steps, device="cpu")
        indices.append(config.observation_delta_indices)
    found[name] = [said, indices]
print(json.dumps(found))
"""


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_more_steps_is_the_same_policy(
    case: str, golden: Path, case_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    entry, home = cases()[case], tmp_path / "case"
    shutil.copytree(golden / entry.home, home, copy_function=shutil.copyfile)
    for folder in (home, *(path for path in home.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    config = home / entry.checkpoint / "config.json"
    record = json.loads(config.read_text())
    assert record["n_obs_steps"] == 1
    config.write_text(json.dumps(record | {"n_obs_steps": 3}))
    ours, other = (
        Bundle(path)
        for path in (
            case_bundle(case),
            convert(home / entry.checkpoint, tmp_path / "other.gguf", name=case, **entry.options(home)),
        )
    )
    for part in ("config", "spec", "processing", "tokenizer"):
        assert getattr(ours.manifest, part) == getattr(other.manifest, part)
    assert ours.manifest.spec.history == (3 if case == "pi05-mem" else 1)


@older_are_slow
def test_lerobot_reads_the_newest_observation_whatever_it_says(release: str) -> None:
    folder = lerobot_folder(release)
    done = processes.run(
        [CLIENTS, "-c", SCRIPT, *TYPES],
        env={"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "HOME": "/nonexistent"},
        nursery=nursery(release),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 5
    for name, (files, (one, three)) in found.items():
        assert set(files) <= {f"configuration_{name}.py"}, name
        assert one == three, name
        assert one is None or 0 in one, name
