"""docs/troubleshooting.md: every message that it quotes is provoked, and says what stands there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sinew.cli import main
from sinew.serve.transport.listen import Listen
from tests import processes
from tests.cases import golden_cases
from tests.journeys.pages import ROOT, blocks
from tests.serve.puppet import desk

PAGE = "docs/troubleshooting.md"
QUOTED = [
    block.text.strip()
    for block in blocks(PAGE)
    if block.language == "text" and not block.text.startswith("ok ")  # the output of `sinew doctor`
]
SEES = ("--image", "front=frame.png", "--image", "wrist=frame.png", "--prompt", "go")
ARM = """
import numpy as np
class Arm:
    def observe(self):
        return {"images": {"camera1": np.zeros((48, 64, 3), np.uint8)}, "state": np.zeros(6, np.float32)}
    def act(self, row): pass
    def hold(self): pass
"""


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a verb in an empty folder and return what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save("frame.png")

    def run(*arguments: str) -> str:
        capfd.readouterr()
        assert main(list(arguments)) in (1, 2)
        return "".join(capfd.readouterr())

    return run


def apart(*arguments: str, **environment: str) -> str:
    """The same in a process of its own, whose hub is a port that nobody listens at."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{bound.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "sinew", *arguments]
        ran = processes.run(command, env={**os.environ, **hub, **environment}, timeout=300)
    assert ran.returncode == 1, ran
    return ran.stderr


def no_python(at: SimpleNamespace) -> str:
    made = ["make", "-C", str(ROOT), "env", "PYTHON=false", f"VENV={at.folder / 'env'}"]
    return subprocess.run(made, capture_output=True, text=True).stdout


def no_rerun(at: SimpleNamespace) -> str:
    at.patch.setitem(sys.modules, "rerun", None)
    return at.say("eval", "blocks", "--episodes", "1", "--rerun", "run.rrd")


def no_gpu(at: SimpleNamespace) -> str:
    at.patch.setattr("torch.cuda.is_available", lambda: False)
    return at.say("infer", "blocks", *SEES, "--state", "0,0,0,0", "--device", "cuda")


def misspelt_setting(at: SimpleNamespace) -> str:
    at.patch.setenv("SINEW_SERVE_QUEU", "3")
    return at.say("serve", "blocks")


def no_language_model(at: SimpleNamespace) -> str:
    (at.folder / "arm").symlink_to(golden_cases() / "smolvla-2cam" / "checkpoint")
    return apart("convert", "arm", "arm.gguf", XDG_CACHE_HOME=str(at.folder), HF_HOME=str(at.folder))


def another_family(at: SimpleNamespace) -> str:
    Path("tdmpc").mkdir()
    Path("tdmpc/config.json").write_text(json.dumps({"type": "tdmpc"}))
    return at.say("convert", "tdmpc", "out.gguf")


def there_already(at: SimpleNamespace) -> str:
    Path("out.gguf").touch()
    return at.say("convert", str(golden_cases() / "smolvla-2cam" / "checkpoint"), "out.gguf")


def truncated(at: SimpleNamespace) -> str:
    whole = (ROOT / "sinew" / "assets" / "blocks.gguf").read_bytes()
    assert len(whole) > 200_000
    Path("cut.gguf").write_bytes(whole[:200_000])
    return at.say("inspect", "cut.gguf")


def other_cameras(at: SimpleNamespace) -> str:
    at.patch.setattr(sys, "path", list(sys.path))  # the verb adds the current folder, and imports from it
    Path("my_robot.py").write_text(ARM)
    return at.say("run", "blocks", "--robot", "my_robot:Arm", "--prompt", "go", "--seconds", "5")


def no_module(at: SimpleNamespace) -> str:
    at.patch.delitem(sys.modules, "my_robot", raising=False)
    return at.say("run", "blocks", "--robot", "my_robot:Arm")


def port_in_use(at: SimpleNamespace) -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        port = bound.getsockname()[1]
        return at.say("serve", "blocks", "--wire", f"native:{port}").replace(str(port), "5555")


def nobody(at: SimpleNamespace) -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        said = at.say("bench", f"tcp://127.0.0.1:{port}", "--timeout", "1", "--runs", "1")
    return said.replace(str(port), "5555")


def no_key(at: SimpleNamespace) -> str:
    at.patch.delenv("SINEW_API_KEY", raising=False)
    with desk(api_key="a key of twenty letters") as server:
        return at.say("bench", server.native, "--runs", "1")


def key_in_the_clear(at: SimpleNamespace) -> str:
    at.patch.setenv("SINEW_API_KEY", "a key of twenty letters")
    return at.say("bench", "tcp://server:5555", "--runs", "1")


def untrusted_certificate(at: SimpleNamespace) -> str:
    with desk(listen=Listen(tls_cert=at.certificate[0], tls_key=at.certificate[1])) as server:
        return at.say("bench", server.native, "--runs", "1")


def no_such_policy(at: SimpleNamespace) -> str:
    with desk() as server:
        return at.say("bench", f"{server.native}/other", "--runs", "1")


def no_simulator(at: SimpleNamespace) -> str:
    at.patch.setenv("SINEW_SIMS", str(at.folder / "sims"))
    return at.say("eval", "blocks", "--env", "gym_aloha/AlohaTransferCube-v0", "--episodes", "1")


def verb(*arguments: str) -> Callable[[SimpleNamespace], str]:
    return lambda at: at.say(*arguments)


# The beginning of a message -> how it comes about.
CAUSES: dict[str, Callable[[SimpleNamespace], str]] = {
    "Python 3.11 to 3.14": no_python,
    "error: a Rerun recording": no_rerun,
    "error: device cuda": no_gpu,
    "error: unknown command": verb("sevre", "blocks"),
    "error: unknown flag": verb("serve", "blocks", "--wirre", "native"),
    "error: SINEW_SERVE_QUEU": misspelt_setting,
    "error: policy.gguf": verb("inspect", "policy.gguf"),
    "error: hf://": lambda at: apart("inspect", "lab/pick-cube", HF_HOME=str(at.folder)),
    "error: ...: expected only built-in names": no_language_model,
    "error: tdmpc": another_family,
    "error: out.gguf": there_already,
    "error: cut.gguf": truncated,
    "error: images.wrst": verb(
        "infer", "blocks", *SEES[:2], "--image", "wrst=frame.png", "--state", "0,0,0,0", "--prompt", "go"
    ),
    "error: images.wrist": verb(
        "infer", "blocks", "--image", "front=frame.png", "--state", "0,0,0,0", "--prompt", "go"
    ),
    "error: --rename": verb("serve", "blocks", "--rename", "front=camera9"),
    "error: state": verb("infer", "blocks", *SEES, "--state", "0,0,0"),
    "error: prompt": verb("infer", "blocks", *SEES[:4], "--state", "0,0,0,0"),
    "error: the policy rejected": other_cameras,
    "error: cannot listen": port_in_use,
    "error: no answer": nobody,
    "error: address": verb("run", "http://127.0.0.1:8000", "--robot", "dry", "--prompt", "go"),
    "error: this server requires": no_key,
    "error: tcp://server": key_in_the_clear,
    "error: tls://": untrusted_certificate,
    "error: policy: expected": no_such_policy,
    "error: robot my_robot": no_module,
    "error: aloha": no_simulator,
}


@pytest.mark.parametrize("message", QUOTED, ids=lambda message: message[:24])
def test_a_quoted_message_is_what_is_said(
    message: str,
    say: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    certificate: tuple[Path, Path],
) -> None:
    (cause,) = (cause for start, cause in CAUSES.items() if message.startswith(start))
    said = cause(SimpleNamespace(say=say, folder=tmp_path, patch=monkeypatch, certificate=certificate))
    expected = ".*".join(re.escape(part) for part in message.split("..."))
    assert re.search(expected, said), said


def test_at_least_twenty_are_quoted_and_none_is_provoked_in_vain() -> None:
    assert len(QUOTED) >= 20
    assert all(any(message.startswith(start) for message in QUOTED) for start in CAUSES)


def test_every_code_of_an_error_has_a_row() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8").split("## Error codes")[1].split("\n## ")[0]
    codes = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    folders = (ROOT / "sinew", ROOT / "packages" / "sinew-client" / "src")
    code = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    assert sorted(codes) == sorted(set(re.findall(r'^    code = "(\w+)"$', code, re.MULTILINE)))


def test_reasons_of_holds_are_the_loop_s() -> None:
    """The first column of the table, of which the report of a run has each."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows: list[Any] = re.findall(r"^\| (`[^|]+) \|", text.split("## It runs, and holds")[1], re.MULTILINE)
    reasons = [reason for row in rows for reason in re.findall(r"`([^`]+)`", row)]
    control = ROOT / "packages" / "sinew-client" / "src" / "sinew_client" / "control"
    code = "".join(path.read_text() for path in control.glob("*.py"))
    assert len(reasons) >= 6
    assert not [reason for reason in reasons if f'"{reason}"' not in code]
