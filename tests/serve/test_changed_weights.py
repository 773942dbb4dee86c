"""A bundle that is changed under a server in a process of its own: never another policy's actions without a word.

A signature of the defect: overwritten in place, the same observation and seed gave other actions; truncated, the
process died of SIGBUS.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from sinew_client import Client, ConnectionLost, ServerError

from sinew.bundle import Bundle
from sinew.core import BundleError
from sinew.policy import load
from tests import processes
from tests.serve.test_server import GOOD, serving


@pytest.fixture
def bundle(smolvla_bundle, tmp_path) -> Path:
    return Path(shutil.copyfile(smolvla_bundle("smolvla-2cam"), tmp_path / "policy.gguf"))


@contextmanager
def robot(bundle: Path, tmp_path: Path, engine: str) -> Iterator[tuple[Client, str]]:
    """A client of a server that has answered once, and the address of its /healthz."""
    wires = ("--wire", "native:0", "--wire", "http:0", "--threads", 1, "--engine", engine)
    with serving(tmp_path, bundle, *wires) as server:
        line = server.log.read_text()
        web = next(word.rstrip(",;") for word in line.split() if word.startswith("http://"))
        native = next(word.rstrip(",;") for word in line.split() if word.startswith("tcp://"))
        with Client(native, timeout=60) as client:
            yield client, web
        assert server.process.poll() is None  # no signal has ended it


def health(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{address}/healthz", timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def overwrite(path: Path) -> None:
    """Other weights of the same size into the same file, as cp and scp do."""
    info = max(Bundle(path).infos.values(), key=lambda info: info.nbytes)
    with open(path, "r+b") as file:
        file.seek(info.offset)
        values = np.frombuffer(file.read(info.nbytes), np.float32)
        file.seek(info.offset)
        file.write((-values).tobytes())


@pytest.mark.parametrize(
    ("engine", "change", "message"),
    [
        ("eager", overwrite, "was written to while its weights are in use"),
        ("plan", overwrite, "was written to while its weights are in use"),
        ("eager", lambda path: os.truncate(path, 1 << 16), "was truncated from"),
    ],
    ids=["overwritten", "overwritten-plan", "truncated"],
)
def test_a_change_in_place_is_refused_before_the_next_answer(bundle, tmp_path, engine, change, message):
    with robot(bundle, tmp_path, engine) as (client, web):
        client.infer(GOOD)
        assert health(web) == (200, "OK\n")
        change(bundle)
        for _ in range(2):
            with pytest.raises(ServerError, match=message) as error:
                client.infer(GOOD)
        assert error.value.code == "bad_bundle"
        assert "rename it over the old file" in str(error.value)
        status, text = health(web)
        assert status == 503
        assert message in text
        assert client.health()["status"] == "unhealthy"


def test_a_file_that_is_truncated_during_an_inference(bundle, tmp_path):
    """Reading what is gone is a fault that nothing in the process can mend: it ends, no robot gets an answer, and
    whoever supervises it (systemd, a container) starts a server that says what is wrong with the file."""
    arguments = ("--wire", "native:0", "--threads", 1, "--engine", "eager")
    with serving(tmp_path, bundle, *arguments) as server:
        with Client(server.address, timeout=60) as client, Client(server.address, timeout=60) as other:
            client.infer(GOOD)
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(client.infer, {**GOOD, "solver_steps": 100})
                while not other.health()["running"]:
                    assert not asking.done()
                os.truncate(bundle, 1 << 16)
                error = asking.exception(60)
        if isinstance(error, ServerError):  # it read nothing more of the file, and noticed at its end
            assert error.code == "bad_bundle"
        else:
            assert isinstance(error, ConnectionLost)
            assert server.process.wait(60) == -signal.SIGBUS
            assert "Bus error" in server.log.read_text()
    again = processes.run(
        [sys.executable, "-m", "sinew", "serve", bundle, *map(str, arguments)],
        timeout=60,
    )
    assert again.returncode == 1
    assert "Traceback" not in again.stderr


def test_the_file_that_was_loaded_goes_on(bundle, tmp_path):
    """Renamed, replaced by rename, deleted: the bytes that were loaded are still there."""
    with robot(bundle, tmp_path, "eager") as (client, web):
        before = client.infer(GOOD).actions
        other = Path(shutil.copyfile(bundle, tmp_path / "new.gguf"))
        overwrite(other)
        bundle.rename(tmp_path / "elsewhere.gguf")
        np.testing.assert_array_equal(client.infer(GOOD).actions, before)
        os.replace(other, bundle)
        np.testing.assert_array_equal(client.infer(GOOD).actions, before)
        (tmp_path / "elsewhere.gguf").unlink()
        np.testing.assert_array_equal(client.infer(GOOD).actions, before)
        assert health(web) == (200, "OK\n")


def test_a_change_during_an_inference_is_noticed_at_its_end(bundle):
    policy = load(bundle, engine="eager")
    observation = policy.dummy_observation()
    policy.infer(observation)
    run = policy.engine.run

    def slow(*args, **options):
        result = run(*args, **options)
        overwrite(bundle)
        return result

    policy.engine.run = slow
    with pytest.raises(BundleError, match="was written to"):
        policy.infer(observation)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 0), "was truncated from"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), "grew from"),
        (lambda path: os.utime(path, (1, 1)), "was written to"),
    ],
)
def test_changes_are_told_apart(bundle, change, message):
    opened = Bundle(bundle)
    assert opened.file.in_use.problem() is None
    change(bundle)
    assert message in opened.file.in_use.problem()


def test_bundles_that_are_gone_hold_no_descriptors(bundle):
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    if not Path("/proc/self/fd").exists():
        pytest.skip("counts descriptors by /proc")
    before = count()
    for _ in range(20):
        assert Bundle(bundle).file.in_use.problem() is None
    assert count() <= before + 4
