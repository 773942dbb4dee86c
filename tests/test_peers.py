"""The table beside other projects: its command with Sinew's engines alone, and how vla.cpp's server is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers
from sinew.policy import load
from tests.serve.test_serving import desk


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.peers", str(out), "--peer", sys.executable, *words]


@pytest.mark.slow  # 20 CPU seconds of imports, a conversion and a recipe
def test_engines_are_compared_in_rounds(tmp_path: Path) -> None:
    words = ("--inside", "smolvla", "--tiny", "--rounds", "3", "--requests", "1", "--threads", "1")
    asked = ("--reference", "eager", "--at-once", "2", "--engines", "plan", "cpu int8")
    done = subprocess.run(command(tmp_path, *words, *asked), capture_output=True, text=True, check=True)
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert [line.split("|")[1].strip() for line in table[2:]] == ["eager", "plan", "cpu int8"]
    assert list(found["part"]) == ["plan", "cpu int8"]
    assert all(0 < low <= median <= high for median, low, high in found["part"].values())
    assert found["relative_error"]["plan"] < 1e-5 < found["relative_error"]["cpu int8"] < 0.1
    assert min(found["peak_mib"].values()) > 50
    assert not (tmp_path / "lerobot").exists()  # nobody asked for it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--inside", "act", "--engines", "vla.cpp bf16"), "expected lerobot, eager, plan, onnx, cpu int8"),
        (
            ("--inside", "smolvla", "--engines", "vla.cpp bf16"),
            "--vlacpp: pass the path of vla-server to run",
        ),
        (
            ("--inside", "act", "--vlacpp", sys.executable),
            "--vlacpp: expected a file and --inside smolvla",
        ),
        (("--inside", "smolvla", "--at-once", "1"), "--at-once: expected 2 or more, got 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", command(tmp_path, *words)[2:])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_vlacpps_messages_carry_the_whole_request(smolvla_bundle: Callable[..., Path]) -> None:
    """Its server is not here; ours takes its clients, by tokens, a padded state and noise."""
    bundle = smolvla_bundle()
    policy = load(bundle, "cpu", engine="eager", threads=1)
    spec, rng = policy.spec, np.random.default_rng(3)
    observation = {
        "images": {
            each.name: rng.integers(0, 256, (each.height, each.width, 3), np.uint8) for each in spec.cameras
        },
        "state": rng.uniform(-1, 1, spec.state.dim).astype(np.float32),
        "prompt": "pick up the red cube",
        "noise": rng.standard_normal((spec.chunk_size, spec.noise_dim), dtype=np.float32),
    }
    with desk(policy) as served:
        found = peers.VlaCpp(served.native, bundle)(observation)
    np.testing.assert_array_equal(found, policy.infer(observation).actions)
