"""The packaged edge adapter in the evaluator: it fits its policy, goes on where rows have run out, is told apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Adapter

from sinew.core import SinewError
from sinew.eval.adapters import make_env
from sinew.eval.campaign import key
from sinew.eval.runner import Conduct, run_episode
from sinew.eval.settings import Latency, Task, Variant, sweep
from sinew.policy import open_bundle

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
EDGE = str(ASSETS / "blocks-edge.safetensors")


class Late:
    """A policy whose chunks say: stay, open."""

    chunk_size, committed_rows, motion = 32, 0, None
    served: Mapping[str, Any] = {}  # what it says of itself: one moment

    def start(self, env: Any) -> None:
        """Do nothing."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        return np.tile(np.float32([0, 0, 0, 1]), (32, 1)), 0.0

    def close(self) -> None:
        """Do nothing."""


def test_it_is_small_and_fits_the_policy() -> None:
    assert Path(EDGE).stat().st_size <= 300_000
    spec = open_bundle(ASSETS / "blocks.gguf").manifest.spec
    Adapter.read(EDGE).check(spec.to_dict(), float(spec.control_hz or 0))


def test_it_goes_on_where_rows_have_run_out() -> None:
    """Chunks of 32 rows, 40 steps late: aligned stands still again when the first one has ended, at step 72."""
    pytest.importorskip("mujoco")
    played = []
    for edge in ("", EDGE, EDGE):
        env, adapter = make_env("sinew/Blocks-v0", env_options={"max_episode_steps": 76})
        conduct = Conduct(8, Latency("40"), "aligned", edge_adapter=edge)
        played.append(run_episode(env, adapter, Late(), conduct, 5000))
    plain, refined, again = played
    assert (plain.executed, plain.held) == (32, 4)
    assert (refined.executed, refined.held) == (36, 0)
    assert (refined.jerk, refined.success) == (again.jerk, again.success)
    assert refined.jerk > 0 == plain.jerk


def test_variants_are_told_apart_by_its_bytes(tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(EDGE).read_bytes())
    plain, edge, other = (Variant("expert", edge_adapter=name) for name in ("", EDGE, str(copy)))
    assert key(Task(), edge) == key(Task(), other) != key(Task(), plain)
    swept = sweep(Variant("expert"), [f"edge-adapter=none,{EDGE}"])
    assert [variant.edge_adapter for variant in swept] == ["", EDGE]
    assert swept[0].label(swept) == "edge_adapter none"
    with pytest.raises(SinewError, match="edge_adapter: .*nowhere"):
        Variant("expert", edge_adapter="nowhere")
    with pytest.raises(SinewError, match="edge_adapter: expected chunks"):
        Variant("expert", edge_adapter=EDGE, stream="100:10")
