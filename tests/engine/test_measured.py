"""`auto` follows what was measured on this machine, and not the order in which engines are tried."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sinew import checks
from sinew.bundle import Bundle
from sinew.checks import preparing
from sinew.cli import main
from sinew.cli.options import Runs
from sinew.cli.validate import validate
from sinew.convert.sources import ASSETS
from sinew.engine import backend, measured
from sinew.engine.backend import BACKENDS, candidates, choose, unmeasured
from sinew.engine.measured import Conditions, Times, store, stored
from tests.engine.test_choose import needs_kernels, stored_in_int8

ENGINES = '''
import time
from dataclasses import dataclass
from sinew.engine.plan.backend import Planned
from sinew.engine.plan.engine import PlannedEngine, open_planned


class Waiting(PlannedEngine):
    def solve(self, *arguments, **options):
        spin(0.02)
        return super().solve(*arguments, **options)


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def open_slow(bundle, options):
    engine = open_planned(bundle, options)
    engine.__class__ = Waiting
    return engine


class Slow(Planned):
    """Its products, and so its chunks, are slow on this machine, whatever its place in the order."""
    name, opens = "slow", "planted_engines:open_slow"

    def product(self, bundle, options):
        return lambda: spin(0.005)


class Fast(Planned):
    name, opens = "fast", "sinew.engine.plan.engine:open_planned"

    def product(self, bundle, options):
        return lambda: None


SLOW, FAST = Slow(), Fast()
'''


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two engines of another distribution, which are tried before all others, the slow one first."""
    about = tmp_path / "site" / "planted-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    points = "[sinew.engines]\nslow = planted_engines:SLOW\nfast = planted_engines:FAST\n"
    (about / "entry_points.txt").write_text(points)
    (about.parent / "planted_engines.py").write_text(ENGINES)
    monkeypatch.syspath_prepend(about.parent)
    for each in (backend._added, backend._backend):
        each.cache_clear()
    yield
    for each in (backend._added, backend._backend):
        each.cache_clear()


@pytest.fixture
def act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copy(ASSETS / "act.gguf", tmp_path / "act.gguf"))


def validated(bundle: Path, engine: str) -> None:
    """Run `sinew validate`, whose flags were read before the engine was planted."""
    runs = Runs(engine=engine, device="cpu")  # type: ignore[arg-type]
    assert validate(bundle, runs=runs, observations=1, episodes=0) == 0


def test_the_choice_follows_the_measurement(act: Path, planted: None, monkeypatch, capsys) -> None:
    monkeypatch.setattr(preparing, "LONG_ENOUGH_S", 0)
    assert [*BACKENDS][:2] == ["slow", "fast"]
    opened = Bundle(act)
    assert choose(opened, device="cpu").engine == "plan"  # neither of them is verified
    validated(act, "slow")
    # The slow one comes first, is verified now, and its product was timed at once.
    choice = choose(opened, device="cpu")
    assert choice.engine == "plan"
    words = (
        "the fastest verified engine for act on cpu, by measurements on this machine; ms of a small product,"
        " measured on"
    )
    assert choice.engine_reason.startswith(words)
    validated(act, "fast")
    for threads in (None, 1, 2):
        assert choose(opened, device="cpu", threads=threads).engine == "fast"
    assert unmeasured(opened, choose(opened, device="cpu")) == ["slow", "plan"]

    capsys.readouterr()
    assert main(["prepare", str(act), "--device", "cpu", "--observations", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"].keys() >= {"slow", "fast", "plan", "eager"}
    assert told["seconds"]["slow"] > told["seconds"]["fast"]
    for prepared in (False, True):
        choice = choose(opened, device="cpu", prepared=prepared)
        assert choice.engine != "slow"
        assert "; processor ms of a chunk, measured on this machine: " in choice.engine_reason
    assert unmeasured(opened, choose(opened, device="cpu", prepared=True)) == []
    (shown,) = (each.detail for each in checks.bundle(act, {"device": "cpu"}) if each.name == "bundle engine")
    assert "processor ms of a chunk, measured on this machine: " in shown
    # With two threads, what was measured with one counts until it is measured with two
    assert choose(opened, device="cpu", threads=2).engine != "slow"
    assert "slow" in unmeasured(opened, choose(opened, device="cpu", threads=2))


LISTED = "processor ms of a chunk, measured on this machine: "


def times_in(text: str) -> dict[str, float]:
    """Return the times that a text lists once: engine -> ms."""
    assert text.count(LISTED) == 1, text
    listing = re.split(r" \(load average|;|\)", text.partition(LISTED)[2])[0]
    return {name: float(ms) for name, ms in (each.split() for each in listing.split(", "))}


def printed(act: Path, tmp_path: Path, capsys, *words: str) -> tuple[str, dict[str, Any]]:
    """Run `sinew prepare`. Returns the last line that it prints, and its JSON output."""
    out = tmp_path / "prepared.json"
    capsys.readouterr()
    arguments = [str(act), "--device", "cpu", "--observations", "1", *words]
    assert main(["prepare", *arguments, "--json", str(out)]) == 0
    return capsys.readouterr().out.strip().splitlines()[-1], json.loads(out.read_text())


def test_the_last_line_has_the_times_of_all_engines(
    act: Path, tmp_path: Path, planted, monkeypatch, capsys
) -> None:
    """An engine that was refused first, or measured after the choice, is in it: with planted times, everything else as
    it is."""
    seconds = {"slow": 0.009, "fast": 0.001, "onnx": 0.003, "plan": 0.004, "eager": 0.005}

    def fastest(policies: dict[str, Any], clock: object) -> dict[str, float]:
        factor = 2.0 if "onnx" in policies else 1.0  # the machine is slower while onnx is measured
        return {name: factor * seconds[name] for name in policies}

    monkeypatch.setattr(preparing, "fastest", fastest)
    assert [each.engine for each in candidates(Bundle(act), choose(Bundle(act), device="cpu"))] == [
        "slow",
        "fast",
        "onnx",
    ]
    line, told = printed(act, tmp_path, capsys)
    assert line == f"{told['text']}; --engine auto takes fast from now on"
    ratios = {name: ms / times_in(line)["fast"] for name, ms in times_in(line).items()}
    assert ratios == pytest.approx({name: each / seconds["fast"] for name, each in seconds.items()})
    assert {name: 1e3 * took for name, took in told["seconds"].items()} == pytest.approx(times_in(line))
    for name in ("slow", "onnx"):
        assert f"; engine {name} is not taken: it is not 5% faster; proved: " in line
    # `sinew doctor` and the next run print the same times.
    (shown,) = (each.detail for each in checks.bundle(act, {"device": "cpu"}) if each.name == "bundle engine")
    assert times_in(shown) == times_in(line)
    assert times_in(printed(act, tmp_path, capsys)[0]) == times_in(line)

    # If no engine is faster, the line states which one stays. Measured again, nothing of before is in it.
    seconds |= {"slow": 0.009, "fast": 0.008, "onnx": 0.007}
    monkeypatch.setattr(BACKENDS["slow"].__class__, "packages", ("no_such_package",))
    line, told = printed(act, tmp_path, capsys, "--again")
    assert told["taken"] is False
    assert f"; --engine auto keeps plan: {LISTED}" in line
    assert times_in(line) == pytest.approx(
        {name: 1e3 * seconds[name] for name in ("plan", "fast", "onnx", "eager")}
    )


@needs_kernels
def test_engines_of_a_recipe_are_all_in_the_last_line(tmp_path: Path, monkeypatch, capsys) -> None:
    """The bundle is in int8, and its engines are cpu, onnx, plan and eager. The test leaves out the export and the
    comparison."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = stored_in_int8(tmp_path / "small.gguf")
    (graphs,) = tmp_path.glob("small.onnx-*")
    shutil.rmtree(graphs)
    seconds = {"cpu": 0.01, "onnx": 0.02, "plan": 0.03, "eager": 0.04}
    form = lambda bundle, candidate: contextlib.nullcontext((bundle.path, lambda: None))  # noqa: E731
    monkeypatch.setattr(preparing, "_form", form)
    monkeypatch.setattr(preparing, "_prove", lambda *given: ("", "proved: for a test"))
    monkeypatch.setattr(preparing, "_open", lambda *given: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(
        preparing, "fastest", lambda policies, clock: {name: seconds[name] for name in policies}
    )
    for again in ([], ["--again"]):
        line, told = printed(bundle.path, tmp_path, capsys, *again)
        assert line.startswith(
            "engine onnx is not taken: it is not 5% faster; proved: for a test; --engine auto keeps cpu: "
        )
        assert times_in(line) == pytest.approx({name: 1e3 * took for name, took in seconds.items()})
        assert told["seconds"] == pytest.approx(seconds)


def test_times_of_engines_that_were_not_measured_again_follow_the_machine(act: Path) -> None:
    under = Conditions(act, "cpu", "fp32")
    assert measured.add(under, "plan", {"plan": 1.0, "cpu": 2.0}).chunks == {"plan": 1.0, "cpu": 2.0}
    assert measured.add(under, "plan", {"plan": 3.0, "onnx": 1.0}).chunks == {
        "plan": 3.0,
        "onnx": 1.0,
        "cpu": 6.0,
    }
    # Times that were never compared with this engine say nothing about it.
    assert measured.add(under, "eager", {"eager": 1.0, "fast": 2.0}).chunks == {"eager": 1.0, "fast": 2.0}


def test_another_machine_s_measurement_is_not_trusted(act: Path, monkeypatch) -> None:
    opened, under = Bundle(act), Conditions(act, "cpu", "fp32")
    times = store(under, chunks={"plan": 2.0, "eager": 1.0})
    assert stored(under) == times
    assert choose(opened, device="cpu").engine == "eager"
    record = json.loads(under.path.read_text())
    for other in (
        {"hardware": "another processor"},
        {"sinew": "0.0"},
        {"libraries": {}},
        {"chunks": {"plan": -1}},
        {"chunks": {"plan": float("nan")}},
        {"chunks": [1]},
    ):
        under.path.write_text(json.dumps({**record, **other}))
        assert stored(under) == Times()
        assert choose(opened, device="cpu").engine == "plan"
    under.path.write_text(json.dumps(record))
    for name, value in (("SINEW_CPU_KERNELS", "portable"), ("ATEN_CPU_CAPABILITY", "avx2")):
        with monkeypatch.context() as held:
            held.setenv(name, value)
            assert stored(under) == Times(), name
    assert choose(opened, device="cpu").engine == "eager"
    # It counts for its precision alone, and for more threads until those are measured
    assert choose(opened, device="cpu", dtype="bf16").engine_reason.count("measured") == 0
    assert choose(opened, device="cpu", threads=2).engine == "eager"
    store(Conditions(act, "cpu", "fp32", 2), chunks={"plan": 1.0, "eager": 1.0}, unit="ms")
    choice = choose(opened, device="cpu", threads=2)
    assert choice.engine == "plan"
    assert "; ms of a chunk, measured on this machine with 2 threads: plan 1e+03" in choice.engine_reason


def test_small_differences_leave_the_order(act: Path) -> None:
    times = Times(
        chunks={"plan": 1.0, "onnx": 0.96, "cpu": 0.9}, products={"cpu": 1.0, "plan": 0.7, "cuda": 0.5}
    )
    assert not times.faster("onnx", than="plan")
    assert times.faster("cpu", than="plan")  # by chunks, whatever the products say
    assert times.faster("cuda", than="cpu")
    assert not times.faster("cuda", than="plan")
    assert not times.faster("eager", than="plan")
    store(Conditions(act, "cpu", "fp32"), chunks={"plan": 1.0, "eager": 0.9})
    assert choose(Bundle(act), device="cpu").engine == "plan"  # the reference has the same products


def test_products_are_timed_in_turn() -> None:
    calls: list[str] = []
    found = measured.time_products(
        {"one": lambda: calls.append("one"), "two": lambda: calls.append("two")}, 1
    )
    assert found.keys() == {"one", "two"}
    assert all(seconds > 0 for seconds in found.values())
    assert calls == ["one", "two"] * (measured.TRIES + 1)
