"""Workers report what one process would, and outlive one of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import processes

SUITE = {
    "conftest.py": """
from pathlib import Path
from tools.workers import Workers
def pytest_configure(config):
    config.pluginmanager.register(Workers(2))
def pytest_runtest_setup(item):
    with (Path(__file__).parent / "places").open("a") as file:
        file.write(f"{item.config._tmp_path_factory.getbasetemp().parent}\\n")
""",
    "test_dies.py": """
import os, pytest
@pytest.fixture(scope="session")
def place(tmp_path_factory):
    yield tmp_path_factory.mktemp("place")
    print("torn down in", os.environ["PYTEST_XDIST_WORKER"])
def test_before(place): (place / "file").touch()
def test_that_dies(): os._exit(3)
def test_behind(place): assert not list(place.iterdir())
""",
    "test_fails.py": """
import warnings
def test_wrong(): assert 1 == 2
def test_warning(): warnings.warn("it is old")
def test_right(tmp_path): print("shown"); assert tmp_path.exists()
""",
}


@pytest.mark.parametrize(
    ("options", "counts", "status"),
    [((), "2 failed, 4 passed, 1 warning", 1), (("-k", "behind or right"), "2 passed, 4 deselected", 0)],
)
def test_workers_report_what_comes(
    tmp_path: Path, options: tuple[str, ...], counts: str, status: int
) -> None:
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", tmp_path]
    done = processes.run([*command, *options], cwd=processes.ROOT)
    assert done.returncode == status, done.stdout + done.stderr
    assert counts in done.stdout
    assert (
        len(set((tmp_path / "places").read_text().split())) == 1
    )  # where all of a run find what one has made
    if status:
        assert "ended with 3 while this test ran" in done.stdout
        assert "assert 1 == 2" in done.stdout
        assert "UserWarning: it is old" in done.stdout


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SUITE["conftest.py"])
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(
            "".join(f"def test_wrong_{number}(): assert not {number}\n" for number in range(1, 4))
        )
    command = [sys.executable, "-m", "pytest", "-x", f"--rootdir={tmp_path}", tmp_path]
    done = processes.run(command, cwd=processes.ROOT)
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout
