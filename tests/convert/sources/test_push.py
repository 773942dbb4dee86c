"""`sinew hub push` and `sinew hub pull` against a hub on loopback, and the card that is written."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert.sources import card as cards
from sinew.core import SinewError
from sinew.engine import proofs
from sinew.engine.fingerprint import fingerprint
from tests import processes
from tests.convert.sources.fake_hub import fake_hub

PARITY = {
    "passed": True,
    "engine": "plan",
    "dtype": "fp32",
    "device": "cpu",
    "observations": 8,
    "source": "random | frames",
    "stages": [{"name": "actions", "error": 1.5e-6, "bound": 1e-4}],
    "faults": [],
}
GATE = {"env": "sinew/Blocks-v0", "episodes": 20, "wins": 19, "text": "passes: 19/20 against 20/20"}


def validation(bundle: Path) -> dict[str, Any]:
    """A record as `sinew validate` writes it."""
    return {
        "schema": cards.VALIDATION,
        "fingerprint": fingerprint(bundle),
        "hardware": "a processor",
        "sinew": "0.1.0",
        "date": "2026-11-22T00:00:00+00:00",
        "parity": PARITY,
        "gate": GATE,
        "passed": True,
    }


def evaluation(digest: str) -> dict[str, Any]:
    """What the card reads of report.json of `sinew eval`."""
    row = {"label": "int8", "wins": 87, "episodes": 100, "policy": {"kind": "bundle", "id": digest}}
    return {"schema": cards.EVALUATION, "task": {"env": "sinew/Pen-v0"}, "variants": [row]}


@pytest.fixture
def bundle(smolvla_bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return smolvla_bundle("smolvla-2cam")


def sinew(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its environment when it is imported, so in a process of its own."""
    command = [sys.executable, "-m", "sinew", *map(str, words)]
    return processes.run(command, env={**os.environ, **environment}, timeout=240)


@pytest.mark.slow
def test_a_bundle_is_pushed_and_pulled(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    proofs.keep(bundle, "plan", "cpu", validation(bundle))
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    report = tmp_path / "report.json"
    report.write_text(json.dumps(evaluation(digest)))
    with fake_hub({}, tmp_path / "repositories") as server:
        environment = {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": server.token,
            "HF_HUB_DISABLE_XET": "1",
        }
        words = (
            "hub",
            "push",
            bundle,
            "lab/pick",
            "--report",
            report,
            "--license",
            "mit",
            "--base-model",
            "lab/base",
            "--json",
        )
        pushed = sinew(*words, **environment)
        assert pushed.returncode == 0, pushed.stderr
        found = json.loads(pushed.stdout)
        assert found["commit"].startswith(f"{server.url}/lab/pick/commit/")
        assert (found["sha256"], found["records"]) == (digest, 2)
        assert server.commits[0]["summary"] == "smolvla-2cam: bundle and card"
        assert (tmp_path / "repositories" / "lab/pick" / "policy.gguf").read_bytes() == bundle.read_bytes()
        text = (tmp_path / "repositories" / "lab/pick" / "README.md").read_text()
        _, header, body = text.split("---\n", 2)
        assert yaml.safe_load(header) == {
            "library_name": "sinew",
            "pipeline_tag": "robotics",
            "tags": ["sinew", "robotics", "vla", "smolvla"],
            "license": "mit",
            "base_model": "lab/base",
        }
        for words in (
            "sinew serve hf://lab/pick",
            "camera `camera1`",
            f"`{digest}`",
            "model.safetensors |",
            "Engine plan, fp32 on cpu",
            "random \\| frames",
            "| actions | 1.5e-06 | 1e-04 |",
            "19 of 20 episodes (95 % interval 76.4 to 99.1 %)",
            "sinew/Pen-v0, int8: 87 of 100 episodes (95 % interval 79.0 to 92.2 %)",
        ):
            assert words in body

        out = tmp_path / "fetched.gguf"
        pulled = sinew("hub", "pull", "lab/pick", "--out", out, **environment)
        assert pulled.returncode == 0, pulled.stderr
        assert "every tensor is unchanged" in pulled.stdout
        assert out.read_bytes() == bundle.read_bytes()

        refused = sinew("hub", "push", bundle, "lab/pick", **{**environment, "HF_TOKEN": "another"})
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: hf://lab/pick: the hub answers: ")
        assert "Traceback" not in refused.stderr
    gone = sinew("hub", "push", bundle, "lab/pick", **environment)
    assert gone.returncode == 1
    assert f"not uploaded to {server.url}" in gone.stderr


def test_nothing_measured_is_said(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hub", "push", str(bundle), "lab/pick", "--dry"]) == 0
    text = capsys.readouterr().out
    assert "Not measured: `sinew validate` was not run with this file." in text
    assert "Not measured: neither a gate nor `sinew eval` was run" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.update(fingerprint="0" * 64), "one of another bundle (0000000000000000)"),
        (lambda record: record.update(schema="sinew.gate/1"), "expected schema sinew.validate/1 or"),
        (lambda record: record.pop("parity"), "KeyError: 'parity'"),
        (lambda record: record.update(parity=3), "TypeError"),
        (lambda record: record.pop("schema"), "KeyError: 'schema'"),
    ],
)
def test_reports_that_do_not_fit(
    bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    record = validation(bundle)
    change(record)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(record))
    with pytest.raises(SinewError) as error:
        cards.records_of(bundle, [path], "")
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_a_report_of_another_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(evaluation("1" * 64)))
    with pytest.raises(SinewError, match="one of another bundle"):
        cards.records_of(bundle, [path], "2" * 64)
    path.write_text("{")
    with pytest.raises(SinewError, match="expected report.json"):
        cards.records_of(bundle, [path], "2" * 64)


def test_text_of_a_bundle_is_no_markup() -> None:
    assert cards._cell("a|b\n<img src=x> [x](y) `c`") == r"a\|b \<img src=x\> \[x\](y) \`c\`"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hub", "push", "{bundle}", "nowhere"], "nowhere: expected ORG/NAME"),
        (
            ["hub", "push", "{bundle}", "hf://lab/pick/policy.gguf"],
            "expected a repository, got a file in a repository",
        ),
        (
            ["hub", "push", "{bundle}", "lab/pick", "--dry", "--card", "{bundle}"],
            "this is the bundle; choose another file for the card",
        ),
        (["hub", "pull", "nowhere"], "nowhere: expected ORG/NAME"),
        (["hub", "pull", "lab/pick", "--out", "{bundle}"], "the file exists; choose another name"),
    ],
)
def test_what_cannot_be_asked(
    words: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(bundle=bundle) for word in words]) == 1
    assert message in capsys.readouterr().err


def test_the_card_shows_what_a_bundle_says(bundle: Path) -> None:
    text = cards.card(Bundle(bundle), "0" * 64, [], "lab/pick", {})
    spec = Bundle(bundle).manifest.spec
    assert f"float32 [{spec.chunk_size}, {spec.action.dim}]" in text
    assert "license" not in text
