"""The operating modes of examples/modes: each file drives a robot, with real servers of the demo's policy."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Stopped

from sinew.cli import main
from sinew.policy import Policy, load
from sinew.processing.safety import Safety
from sinew.serve import contexts
from sinew.serve.deploy import PolicyHost
from tests.serve.puppet import WAIT_S, desk

ROOT = Path(__file__).resolve().parents[2]
MODES = ROOT / "examples" / "modes"
BLOCKS = ROOT / "sinew" / "assets" / "blocks.gguf"


class Arm:
    """Sees noise, and ends the run after so many commands."""

    def __init__(self, commands: int = 3):
        self._left = commands
        self._images = {
            name: np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
            for name in ("front", "wrist")
        }

    def observe(self) -> dict[str, Any]:
        return {"images": self._images, "state": np.array([0.0, 0.0, 0.12, 0.03])}

    def act(self, row: np.ndarray) -> None:
        self._left -= 1
        if self._left <= 0:
            raise Stopped("enough commands")

    def hold(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load(BLOCKS, engine="plan", threads=1)


@pytest.fixture(scope="module")
def server(policy: Policy) -> Iterator[SimpleNamespace]:
    padded = {"padded_state_dim": policy.padded_state_dim, "padded_action_dim": policy.padded_action_dim}
    host = PolicyHost()
    with desk(policy=policy, safety=Safety(policy.processor), **padded) as at:
        at.service.policies.get().metadata["server"] = policy.describe()
        contexts.add(at.service, ("bf16",), host)
        yield at
        for scheduler in host.begun:
            scheduler.stop()
            assert scheduler.join(WAIT_S)


def drive(
    mode: str,
    target: str,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    monkeypatch.chdir(ROOT)
    robot = ("--robot", f"{__name__}:Arm", "--prompt", "put the red block into the left bin", "--hz", "20")
    config = ("--config", str(MODES / f"{mode}.toml"))
    capsys.readouterr()
    # The machine of a test may be busy for seconds; the robot ends by itself.
    assert (
        main(["run", target, *robot, "--seconds", "600", "--timeout", "60", *config, *flags, "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    asked = tomllib.loads((MODES / f"{mode}.toml").read_text())["run"]
    for name in ("handover", "replan", "max_age", "finish"):
        if (wanted := asked.get(name.replace("_", "-"))) is not None:
            assert found["settings"][name] == wanted
    assert found["executed"] >= 2
    return found


def test_onboard(capsys, monkeypatch):
    drive("onboard", str(BLOCKS), [], capsys, monkeypatch)


def test_edge_server(server, capsys, monkeypatch):
    drive("edge-server", server.native, [], capsys, monkeypatch)


def test_cloud_asks_for_every_command(server, capsys, monkeypatch):
    found = drive("cloud", server.native, [], capsys, monkeypatch)
    assert found["chunks"] >= found["executed"]


def test_cloud_with_an_adapter(server, capsys, monkeypatch):
    found = drive("cloud-adapter", server.native, ["--set", "stale=60"], capsys, monkeypatch)
    assert found["settings"]["refine"] == 240


def test_a_policy_here_with_assistance(server, capsys, monkeypatch):
    found = drive("assist", str(BLOCKS), ["--set", f"assist={server.native}"], capsys, monkeypatch)
    assert found["assist"]["asked"]["every"] >= 1
    assert found["assist"]["chunks"]["near"] + found["assist"]["chunks"]["far"] >= found["chunks"]


@pytest.mark.slow  # tests/serve/test_split.py has the rest
def test_split(server, capsys, monkeypatch):
    drive("split", str(BLOCKS), ["--set", f"split={server.native}/context.bf16"], capsys, monkeypatch)


def test_every_mode_is_here():
    assert {path.stem for path in MODES.glob("*.toml")} == {
        "onboard", "edge-server", "cloud", "cloud-adapter", "assist", "split"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--set", "split=tcp://127.0.0.1:1"],
            "split: expected a bundle, because the action head runs in this process",
        ),
        (["--set", "assist=tcp://127.0.0.1:1"], "assist: expected a policy in this process"),
        (["--set", "edge_adapter=nowhere.safetensors"], "nowhere.safetensors: No such file"),
        (["--set", f"edge_adapter={BLOCKS}"], "expected a safetensors file"),
    ],
)
def test_what_does_not_fit_is_named(server, flags, message, capsys):
    assert main(["run", server.native, "--prompt", "go", "--hz", "20", "--seconds", "1", *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow  # loads a policy to refuse it
def test_a_context_that_a_server_does_not_have_says_how_it_comes_there(server, capsys):
    split = ["--set", f"split={server.native}/context.int8", "--engine", "plan"]
    assert main(["run", str(BLOCKS), "--prompt", "go", "--hz", "20", "--seconds", "1", *split]) == 1
    said = capsys.readouterr().err
    assert "expected one of default, context.bf16, got 'context.int8'" in said
    assert "(a server has contexts where it is started with --context)" in said


def test_an_assistance_that_nobody_understands_is_refused(capsys):
    flags = ["--prompt", "go", "--hz", "20", "--seconds", "1", "--set", "assist=tcp://127.0.0.1:1"]
    assert main(["run", str(BLOCKS), *flags, "--set", "assist_when=often"]) == 1
    assert "assist_when: assist: expected every:SECONDS" in capsys.readouterr().err
