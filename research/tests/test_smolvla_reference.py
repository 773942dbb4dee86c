"""The checkpoints that LeRobot opens contain the built-in policies."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco", reason="the modules of the built-in policies import their tasks")
from research.policies.committed import ASSETS
from research.policies.smolvla_reference import DESIGNS, write
from sinew.convert import convert
from sinew.convert.read.files import read_json
from sinew.core import SinewError
from sinew.policy import load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", DESIGNS)
def test_the_checkpoint_has_the_actions_of_the_built_in_policy(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "checkpoint")
    bundle = tmp_path / "again.gguf"
    convert(tmp_path / "checkpoint", bundle, name=name)
    rng = np.random.default_rng(0)
    with load(ASSETS / f"{name}.gguf", engine="eager") as ours, load(bundle, engine="eager") as again:
        frames = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in ours.spec.cameras}
        state = rng.normal(size=ours.spec.state.dim).astype(np.float32)
        for seed in range(3):
            asked = {"images": frames, "state": state, "prompt": "put the red block", "seed": seed}
            chunks = [each.infer(asked).actions for each in (ours, again)]
            # The checkpoint stores float32, and the bundle no wider type, so no weight is rounded.
            assert np.array_equal(*chunks)
            assert np.ptp(chunks[0]) > 0


def test_the_page_has_the_successes_of_the_result_file() -> None:
    pairs = read_json(ROOT / "benchmarks" / "results" / "lerobot_pairs.json")
    page = (ROOT / "docs" / "eval-suites.md").read_text()
    for task, env in (("blocks", "Blocks"), ("shove", "BlocksShove")):
        ours, theirs = pairs[task]["sinew"], pairs[task]["lerobot"]
        assert ours == theirs
        assert len(ours) == 200
        won = sum(steps > 0 for steps in ours)
        assert re.search(rf"{won} of 200 episodes of\s+`sinew/{env}-v0`", page)


def test_another_name_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SinewError, match="act: expected one of blocks, pen"):
        write("act", tmp_path)
