"""Packaged edge adapters in the evaluator: they fit their policy alone, go on where rows have run out, and are told
apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew.core import SinewError
from sinew.policy import open_bundle
from sinew_client.control import Adapter, AdapterError

from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.campaign import key
from sinew_eval.episodes.runner import EpisodeSettings, run_episode
from sinew_eval.episodes.settings import Latency, Task, Variant, sweep
from sinew_eval.episodes.variants import variants

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
EDGE = str(ASSETS / "blocks-edge.safetensors")


def served_of(name: str) -> dict[str, Any]:
    return open_bundle(ASSETS / f"{name}.gguf").manifest.spec.to_dict()


class Late:
    """A policy that says of itself what a packaged one does, and whose chunks say: stay, open."""

    committed_rows, motion = 0, None

    def __init__(self, name: str, row: list[float]):
        self.served = served_of(name)
        self.chunk_size = self.served["chunk_size"]
        self.chunk = np.tile(np.float32(row), (self.chunk_size, 1))

    def start(self, env: Any) -> None:
        """Do nothing."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        return self.chunk, 0.0

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("name", "other", "most"), [("blocks", "pen", 300_000), ("pen", "blocks", 150_000)])
def test_it_is_small_and_fits_its_policy_alone(name: str, other: str, most: int) -> None:
    path = ASSETS / f"{name}-edge.safetensors"
    assert path.stat().st_size <= most
    own, foreign, adapter = served_of(name), served_of(other), Adapter.read(path)
    adapter.check(own, own["control_hz"])
    rows = f"expected {own['chunk_size']}, got {foreign['chunk_size']}"
    with pytest.raises(AdapterError, match=f"edge adapter for {name}: actions per chunk: {rows}"):
        adapter.check(foreign, foreign["control_hz"])


def test_another_policys_adapter_plays_no_episode() -> None:
    env, adapter = make_env("sinew/Pen-v0")
    with pytest.raises(AdapterError, match="edge adapter for blocks: actions per chunk: expected 32, got 24"):
        run_episode(env, adapter, Late("pen", [0]), EpisodeSettings(edge_adapter=EDGE), 5000)


def test_it_catches_a_pen_that_falls_after_the_frame_of_the_chunk() -> None:
    """Answers half a second late that say what one says of a pen that hangs: stay open."""
    caught = dict.fromkeys(("", str(ASSETS / "pen-edge.safetensors")), 0)
    for edge in caught:
        for seed in range(4):
            env, adapter = make_env("sinew/Pen-v0")
            conduct = EpisodeSettings(2, Latency("30"), edge_adapter=edge)
            caught[edge] += run_episode(env, adapter, Late("pen", [0]), conduct, seed).success
    assert list(caught.values()) == [0, 4]


def test_it_goes_on_where_rows_have_run_out() -> None:
    """Chunks of 32 rows, 40 steps late: aligned stands still again when the first one has ended, at step 72."""
    pytest.importorskip("mujoco")
    played = []
    for edge in ("", EDGE, EDGE):
        env, adapter = make_env("sinew/Blocks-v0", env_options={"max_episode_steps": 76})
        conduct = EpisodeSettings(8, Latency("40"), "aligned", edge_adapter=edge)
        played.append(run_episode(env, adapter, Late("blocks", [0, 0, 0, 1]), conduct, 5000))
    plain, refined, again = played
    assert (plain.executed, plain.held) == (32, 4)
    assert (refined.executed, refined.held) == (36, 0)
    assert (refined.jerk, refined.success) == (again.jerk, again.success)
    assert refined.jerk > 0 == plain.jerk


def test_training_makes_one_for_the_policy_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two episodes: the command alone. Its demonstrations close the jaws at one moment of an episode and never while
    the pen hangs."""
    edge, shards = (
        pytest.importorskip("research.policies.edge"),
        pytest.importorskip("sinew_eval.training.shard"),
    )
    asked = ["edge", "--task", "pen", "--out", str(tmp_path), "--episodes", "2", "--cpu-seconds", "0.3"]
    monkeypatch.setattr("sys.argv", asked)
    edge.main()
    served = served_of("pen")
    Adapter.read(tmp_path / "pen-edge.safetensors").check(served, served["control_hz"])
    shard = shards.Shard(tmp_path / "demos")
    for episode in np.unique(shard.episode):
        own = shard.episode == episode
        closes, speed = shard["action"][own, 0], shard["facts"][own, 1]
        assert not closes[speed == 0].any()
        assert np.count_nonzero(np.diff(closes)) <= 1
    with np.load(tmp_path / "demos" / "chunks.npz") as stored:
        assert stored["chunks"].shape == (16, 24, 1)
    monkeypatch.setattr("sys.argv", [*asked, "--driven", "1"])
    with pytest.raises(SystemExit):
        edge.main()


def test_variants_are_told_apart_by_its_bytes(tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(EDGE).read_bytes())
    plain, edge, other = (Variant("expert", edge_adapter=name) for name in ("", EDGE, str(copy)))
    assert key(Task(), edge) == key(Task(), other) != key(Task(), plain)
    swept = sweep(Variant("expert"), [f"edge-adapter=none,{EDGE}"])
    assert [variant.edge_adapter for variant in swept] == ["", EDGE]
    assert swept[0].label(swept) == "edge_adapter none"
    for targets, labels in (
        (("runs/a.gguf", "runs/b.gguf"), ["a.gguf", "b.gguf"]),
        (
            ("a/policy.gguf", "b/policy.gguf"),
            ["a/policy.gguf", "b/policy.gguf"],
        ),  # told apart by their folders
    ):
        pair = [Variant(target) for target in targets]
        assert [each.label(pair) for each in pair] == labels
    with pytest.raises(SinewError, match="edge_adapter: .*nowhere"):
        variants(Variant("expert", edge_adapter="nowhere"))
    with pytest.raises(SinewError, match="edge_adapter: cannot be combined with a stream"):
        Variant("expert", edge_adapter=EDGE, stream="100:10")
