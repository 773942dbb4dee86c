"""`auto` follows what was measured on this machine, and not the order in which engines are tried."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sinew import checks
from sinew.bundle import Bundle
from sinew.checks import preparing
from sinew.cli import main
from sinew.cli.options import Runs
from sinew.cli.validate import validate
from sinew.convert.sources import ASSETS
from sinew.engine import backend, measured
from sinew.engine.backend import BACKENDS, choose, unmeasured
from sinew.engine.measured import Conditions, Times, store, stored

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
