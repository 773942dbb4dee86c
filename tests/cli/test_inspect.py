"""``sinew inspect``: what an observation costs is what ``sinew perf`` traces, and what the file holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sinew_perf.program import PublishedProgram

from sinew.bundle import Bundle
from sinew.cli import main


def inspected(bundle: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, dict[str, Any]]:
    """The table and the record."""
    assert main(["inspect", str(bundle), *flags]) == 0
    text = capsys.readouterr().out
    assert main(["inspect", str(bundle), *flags, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", ["smolvla-2cam", "bitvla"])
def test_the_cost_is_the_tracers(smolvla_bundle, openvla_bundle, capsys, case):
    path = (smolvla_bundle if case.startswith("smolvla") else openvla_bundle)(case)
    text, record = inspected(path, capsys, "--flops")
    bundle, cost = Bundle(path), record["cost"]
    program = PublishedProgram.load(path)
    wanted = {c.name: c.repeats * sum(o.flops * o.count for o in c.operators) for c in program.components()}
    assert {name: stage["flops"] for name, stage in cost["stages"].items() if name in wanted} == wanted
    assert cost["flops"] == sum(wanted.values()) > 1e6
    assert sum(stage["bytes"] for stage in cost["stages"].values()) == sum(
        t.nbytes for t in bundle.infos.values()
    )
    parameters = sum(stage["parameters"] for stage in cost["stages"].values())
    if case == "bitvla":  # two bits each, and a row is filled up to whole words
        assert parameters > sum(p.numel() for p in program.model.parameters())
    else:
        assert parameters == sum(t.numel() for t in program.model.state_dict().values())
    assert cost["stages"]["head"]["runs"] == bundle.manifest.spec.solver_steps
    for name, stage in cost["stages"].items():
        row = rf"^{name} +{stage['parameters']:,} .* {stage['flops'] / 1e9:.3f} *$"
        assert re.search(row, text, re.MULTILINE), name


def test_it_is_counted_on_request(smolvla_bundle, capsys):
    assert "cost" not in inspected(smolvla_bundle("smolvla-2cam"), capsys)[1]


def test_the_table_shows_every_number_of_the_configuration_and_short_hashes(smolvla_bundle, capsys):
    text, record = inspected(smolvla_bundle("smolvla-2cam"), capsys)
    shown = " ".join(text.split())
    for name, value in record["config"]["vision"].items():  # together longer than a text that is shown whole
        assert f"{name} {value}" in shown
    for source in record["provenance"]["sources"]:
        assert f"{source['name']}, {source['bytes']:,} bytes, sha256 {source['sha256'][:12]} " in shown
