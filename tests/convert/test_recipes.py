"""The search for a recipe: sizes that are those of the file, fronts, budgets, and the verb."""

from __future__ import annotations

import json

import pytest

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert.recipes import CANDIDATES, Point, all_points, best, pareto, parse_bytes, stored_bytes
from sinew.core import SinewError


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
    points = all_points(bundle, alone)
    assert len(points) == 64
    for point in points[::7]:
        assert point.nbytes == stored_bytes(bundle, point.recipe)
        rounded = sum(kind != "fp32" for kind in point.recipe.values())
        assert point.predicted == pytest.approx(0.1 * rounded**0.5)


def test_front_and_budget() -> None:
    made = [
        Point({"head": str(i)}, n, e)
        for i, (n, e) in enumerate([(100, 0.0), (50, 0.1), (60, 0.2), (20, 0.5)])
    ]
    assert [point.nbytes for point in pareto(made)] == [100, 50, 20]
    assert best(made, 99).nbytes == 50
    assert best(made, 100).nbytes == 100
    with pytest.raises(SinewError, match="expected at least 20 bytes"):
        best(made, 19)
    close = [*made, Point({"head": "close"}, 51, 0.05)]
    assert [point.nbytes for point in pareto(close, apart=0.05)] == [100, 51, 20]


def test_the_verb_finds_measures_and_writes(smolvla_bundle, tmp_path, capsys) -> None:
    path, out = smolvla_bundle("smolvla-2cam"), tmp_path / "small.gguf"
    budget = Bundle(path).weights_nbytes // 3
    arguments = ["quantize", str(path), "--search", "--observations", "1", "--out", str(out)]
    assert main([*arguments, "--budget", str(budget)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    written = Bundle(out)
    assert written.weights_nbytes <= budget
    assert written.manifest.quantization.recipe == record["recipe"]
    within = [point for point in record["search"]["pareto"] if point["bytes"] <= budget]
    assert record["recipe"] == min(within, key=lambda point: point["predicted"])["recipe"]
    assert all(point["error"] > 0 for point in within)
    assert main([*arguments, "--budget", "10"]) != 0
    assert main(arguments) != 0
