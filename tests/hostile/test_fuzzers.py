"""The fuzzers over texts and small files, short; what `make fuzz` counts as a finding."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest
import torch

from sinew.core import SinewError
from tests.hostile import meter, more_readers, readers
from tests.hostile.meter import Memory, gave, measure

NAMES = (
    *(
        "recordings",
        "contexts",
        "stream messages",
        "journals",
        "contracts",
        "fleets",
        "limits json",
        "limits toml",
    ),
    *(
        "config toml",
        "hardware toml",
        "settings",
        "statistics",
        "adapters",
        "caches",
        "exported json",
        "hub names",
    ),
    "metadata",
)
MORE = (
    *("bounded texts", "bounded lines", "bounded archives", "bounded messages", "arms"),
    *("own records", "gates", "farm plans", "episode logs", "reports", "success surfaces"),
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_every_input_is_a_value_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a fuzzer sets it too
    if name == "recordings":
        pytest.importorskip("mcap")
    if name == "exported json":
        pytest.importorskip("onnxruntime")
    case = (readers.targets(tmp_path) | more_readers.targets(tmp_path))[name]()
    for number in range(60):
        with contextlib.suppress(*readers.EXPECTED):
            case(random.Random(f"{name} {number}"))


def test_no_reader_is_left_out(tmp_path: Path) -> None:
    assert set(readers.targets(tmp_path)) == set(NAMES)
    assert set(more_readers.targets(tmp_path)) == set(MORE)


def test_what_counts_as_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exceptions of others, memory out of proportion to an input, and inputs that do not end."""
    monkeypatch.setattr(meter, "ENDLESS_S", 0.05)

    def case(number: int) -> None:
        gave(b"abc")
        if number == 1:
            raise SinewError("own")
        if number == 2:
            raise KeyError("theirs")
        if number == 3:
            b"\1" * (3 * meter.ROOM)  # the system may take other pages from the process meanwhile
        while number == 4:
            time.time()

    found = measure("some", case, range(5), (SinewError,))
    large = int(Memory().exact)  # else peaks are not those of one input
    assert (found.taken, found.refused, found.unexpected.total(), found.large) == (2, 1, 2, large)
    assert found.bad == 2 + large
    said = capsys.readouterr().out
    assert "some, number 2: KeyError" in said
    assert "some, number 4: EndlessError" in said
