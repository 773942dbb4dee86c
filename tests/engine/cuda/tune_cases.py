"""What the tests of tuning share: a cache of their own, a device that is taken for a GPU, tiny engines, even times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.models import Case, processing, random_model, samples
from benchmarks.gpu.rungs import cuda_engine, plan_of
from sinew.engine.cuda.kernels import choices, tuning
from sinew.engine.cuda.kernels.tiles import candidates
from sinew.engine.cuda.tune import tuner

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuner, "STREAMED", 1)
    tuning.choose.cache_clear()
    choices.choose.cache_clear()
    yield tmp_path
    tuning.choose.cache_clear()
    choices.choose.cache_clear()


@pytest.fixture
def gpu(cache, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that tuning takes for a GPU: what is tested is what is kept for it, not the timing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return torch.device("cuda:0")


def even(calls) -> float:
    """All take as long, so that the first is kept. What is timed has run even before, to be compared."""
    assert calls
    return 1.0


@pytest.fixture
def one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda *problem: candidates(*problem)[:1])


@pytest.fixture
def two_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    monkeypatch.setattr(tuning, "candidates", lambda *problem: candidates(*problem)[:2])


def tiny(name: str, **options):
    """(engine, what it is asked, its rung) of a random model."""
    model = random_model(name, CPU, tiny=True)
    engine = cuda_engine(plan_of(model), processing(name, model.config), CPU, graph=False, **options)
    (sample,) = samples(Case(name, 1, 6, 5), model.config, 1, (24, 32))
    return engine, sample
