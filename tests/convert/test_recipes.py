"""The search for a recipe: sizes that are those of the file, fronts, budgets, and the verb."""

from __future__ import annotations

import json

import pytest

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.core import SinewError
from sinew.lowbit.recipes import (
    CANDIDATES,
    Point,
    all_points,
    best,
    pareto,
    parse_bytes,
    stored_bytes,
)


@pytest.mark.parametrize(
    ("text", "number"), [("123", 123), ("1.5 GiB", 3 << 29), ("900MB", 900_000_000), ("2kb", 2000)]
)
def test_sizes_are_read(text, number) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "-1GB", "1.2.3MB", "7 parsecs", "nan", "1e9"])
def test_other_texts_are_refused(text) -> None:
    with pytest.raises(SinewError, match="expected a size such as"):
        parse_bytes(text)


def test_sizes_are_those_of_the_tensors(smolvla_bundle) -> None:
    bundle = Bundle(smolvla_bundle("smolvla-2cam"))
    assert stored_bytes(bundle, {}) == bundle.weights_nbytes
    alone = {part: dict.fromkeys(CANDIDATES[1:], 0.1) for part in ("vision", "language", "head")}
    times = {(part, kind): 2.0 + (kind == "q4_0") for part in alone for kind in CANDIDATES}
    points = all_points(bundle, alone, times)
    assert len(points) == 64
    assert {point.milliseconds for point in points} == {6.0, 7.0, 8.0, 9.0}
    for point in points[::7]:
        assert point.nbytes == stored_bytes(bundle, point.recipe)
        rounded = sum(kind != "fp32" for kind in point.recipe.values())
        assert point.predicted == pytest.approx(0.1 * rounded**0.5)


def test_front_and_budget() -> None:
    made = [
        Point({"head": str(i)}, n, e, ms)
        for i, (n, e, ms) in enumerate([(100, 0.0, 9.0), (50, 0.1, 5.0), (60, 0.2, 4.0), (20, 0.5, 6.0)])
    ]
    assert [point.nbytes for point in pareto(made)] == [100, 50, 20]
    assert best(made, 99).nbytes == 50
    assert best(made, 100).nbytes == 100
    with pytest.raises(SinewError, match="the smallest recipe needs 20 bytes"):
        best(made, 19)
    assert best(made, target_ms=4.5).nbytes == 60
    assert best(made, 55, 6.0).nbytes == 50
    assert best(made, 49, 6.0).nbytes == 20
    with pytest.raises(
        SinewError, match=r"target: the fastest recipe takes 5\.0 ms on this machine, got 4\.5"
    ):
        best(made, 55, 4.5)
    close = [*made, Point({"head": "close"}, 51, 0.05, 5.0)]
    assert [point.nbytes for point in pareto(close, apart=0.05)] == [100, 51, 20]


@pytest.mark.slow
def test_the_verb_finds_measures_and_writes(smolvla_bundle, tmp_path, capsys, monkeypatch) -> None:
    path, out = smolvla_bundle("smolvla-2cam"), tmp_path / "small.gguf"
    budget = Bundle(path).weights_nbytes // 3
    arguments = ["quantize", str(path), "--search", "--observations", "1", "--out", str(out)]
    assert main([*arguments, "--budget", str(budget), "--target-ms", "1e6", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    written = Bundle(out)
    assert written.weights_nbytes <= budget
    assert written.manifest.quantization.recipe == record["recipe"]
    within = [point for point in record["search"]["pareto"] if point["bytes"] <= budget]
    assert record["recipe"] == min(within, key=lambda point: point["predicted"])["recipe"]
    assert all(point["error"] > 0 for point in within)
    assert all(point["ms"] > 0 and 0 < point["predicted_ms"] < 1e6 for point in within)
    assert set(record["search"]["stages_ms"]) >= {"vision int8", "vision fp32", "head q4_0", "head fp32"}
    monkeypatch.setattr("sinew.lowbit.quantization.measure", None)  # not called
    assert main([*arguments, "--budget", "10"]) == 1
    assert "budget: the smallest recipe needs" in capsys.readouterr().err
    assert main(arguments) != 0
    assert main([*arguments, "--target-ms", "0"]) != 0
