"""What comes back after a failure: clients whose server was killed, children of a fork, recorders, LeRobot's client."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from sinew_client import Client, ConnectionLost, RequestTimeout, UnsafeChunk, protocol, schema

from sinew.core import ActionChunk, BusyError, Observation, SinewError
from sinew.records import background_writer
from sinew.records.recorder import Recorder, read_records
from sinew.serve.access_log import access_logging
from sinew.serve.process import DESCRIPTORS, HOPELESS, connections_within, raise_descriptor_limit
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import parse, servers
from sinew.serve.wires.lerobot.agreements import Agreements, fitting
from sinew.serve.wires.lerobot.features import Agreement
from sinew.serve.wires.lerobot.sessions import Sessions, Waiting
from tests.serve.puppet import FRAME, GOOD, SPEC, WAIT_S, desk, until
from tests.serve.puppet import connect as plain
from tests.serve.test_server import serving

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
OBSERVATION = Observation(images={"front": FRAME}, state=np.zeros(2), prompt="go")
CHUNK = ActionChunk(np.zeros((3, 2), np.float32), seed=1)


# ----------------------------------------------------------------------------- the client


def test_a_broken_connection_is_told_at_once():
    """Row 29: a killed server cost the whole timeout."""
    with desk() as at, Client(at.native, timeout=1e6) as robot:  # it would wait for ever
        assert robot.health()["status"] == "ok"
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(robot.infer, {**GOOD, "prompt": "hang"})
            until(lambda: at.service.health()["running"])
            wire = at.opened["native"]
            for peer in list(wire.ledger.open):
                peer.socket.shutdown(2)
            with pytest.raises(ConnectionLost, match="broke before the answer"):
                asking.result(WAIT_S)
            at.puppet.release.set()
        assert robot.infer(GOOD).actions.shape == (3, 2)  # on a new connection


def test_a_broken_connection_is_retried_by_the_rule():
    with desk() as at, Client(at.native, timeout=WAIT_S, retries=1) as robot:
        assert robot.health()["status"] == "ok"
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(robot.infer, {**GOOD, "prompt": "wait"})
            until(lambda: at.service.health()["running"])
            for peer in list(at.opened["native"].ledger.open):
                peer.socket.shutdown(2)
            until(lambda: at.service.health()["failed"] >= 1)
            at.puppet.release.set()
            assert asking.result(WAIT_S).actions.shape == (3, 2)


def test_a_client_works_after_fork():
    """Row 29: the child waited for ever, whatever its timeout."""
    with desk() as at:
        program = f"""
import os, sys
import numpy as np
from sinew_client import Client
good = {{"images": {{"front": np.zeros((48, 64, 3), np.uint8)}}, "state": [3, 0], "prompt": "go"}}
robot = Client({at.native!r}, timeout=30)
assert robot.infer(good).actions[0, 0] == 3
child = os.fork()
if not child:
    assert robot.infer(good).actions[0, 0] == 3
    robot.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert robot.infer(good).actions[0, 0] == 3
robot.close()
print("fine")
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
        assert done.stdout == "fine\n", done.stderr


def reply(actions: np.ndarray) -> schema.PredictResponse:
    return schema.PredictResponse(
        actions=actions.ravel().tolist(), horizon=actions.shape[0], dim=actions.shape[1], warnings=["dark"]
    )


def test_chunks_that_must_not_be_executed():
    """Row 5, the client's side."""
    for bad in (np.nan, np.inf, -np.inf):
        actions = np.zeros((3, 2))
        actions[2, 1] = bad
        with pytest.raises(UnsafeChunk, match="not finite"):
            protocol.decode_chunk(reply(actions))
    chunk = protocol.decode_chunk(reply(np.array([[0.0, 1.0], [0.5, 3.0]])))
    assert chunk.warnings == ("dark",)
    for shape in ((1025, 1), (1, 1025)):
        with pytest.raises(UnsafeChunk, match="expected at most 1024 actions of at most 1024 values"):
            protocol.decode_chunk(reply(np.zeros(shape)))
    assert len(protocol.decode_chunk(reply(np.zeros((1025, 1))), max_rows=1025).actions) == 1025
    protocol.check_limits(chunk, (-1, 3))
    protocol.check_limits(chunk, ([-1, 0], [1, 4]))
    with pytest.raises(UnsafeChunk, match="action 1, dimension 1: expected 0 to 2, got 3"):
        protocol.check_limits(chunk, ([-1, 0], [1, 2]))
    with pytest.raises(UnsafeChunk, match="dimension 0: expected nan to 9"):
        protocol.check_limits(chunk, (float("nan"), 9))
    with desk() as at:
        with Client(at.native, timeout=WAIT_S, limits=(-1, 1)) as robot:
            robot.infer({**GOOD, "state": [1, 0]})
            with pytest.raises(UnsafeChunk):
                robot.infer({**GOOD, "state": [2, 0]})
        with Client(at.native, timeout=WAIT_S, max_age=100.0) as robot:
            robot.infer({**GOOD, "time": time.time()})
            with pytest.raises(UnsafeChunk, match=r"old, which is more than max_age \(100 s\)"):
                robot.infer({**GOOD, "time": time.time() - 3600})


# ----------------------------------------------------------------------------- the recorder


def test_a_refused_request_does_not_end_recording(tmp_path):
    """Row 6: a camera's name of 70 kB ended the thread, and the process could not be stopped."""
    recorder = Recorder(tmp_path)
    name = "x" * 70_000
    recorder.put("native", "", Observation(images={name: FRAME}, state=np.zeros(2)), SinewError("refused"))
    recorder.put("native", "", Observation(images={"front": object()}, state=np.zeros(2)), CHUNK)
    recorder.put("native", "", OBSERVATION, CHUNK)
    until(lambda: sum(recorder.stats()[key] for key in ("written", "failed")) == 3)
    assert recorder.stats()["alive"]
    recorder.close()
    assert len(list(read_records(tmp_path))) == recorder.stats()["written"] >= 2


def test_a_record_that_is_written_while_it_is_added_leaves_no_bytes_behind(tmp_path, monkeypatch):
    """Bytes that were never taken off the count would end the recording of a server that runs for weeks."""
    recorder, real = Recorder(tmp_path), background_writer._size

    def size(observation):
        end = time.monotonic() + 0.2
        while recorder._thread is not threading.current_thread() and time.monotonic() < end:
            if recorder.stats()["written"]:
                break
            time.sleep(0.001)
        return real(observation)

    monkeypatch.setattr(background_writer, "_size", size)
    recorder.put("native", "", OBSERVATION, CHUNK)
    until(lambda: recorder.stats()["written"] == 1)
    until(lambda: not recorder._waiting_bytes, "the count of waiting bytes to be zero")
    recorder.close()


def test_two_recorders_share_a_folder(tmp_path):
    """Row 28: they overwrote each other."""
    recorders = [Recorder(tmp_path), Recorder(tmp_path)]
    for _ in range(10):
        for recorder in recorders:
            recorder.put("native", "", OBSERVATION, CHUNK)
    for recorder in recorders:
        recorder.close()
    assert sum(recorder.stats()["written"] for recorder in recorders) == 20
    assert len(list(read_records(tmp_path))) == 20
    assert not list(tmp_path.glob("*.part"))


WRITER = """
import sys, time
from pathlib import Path
from sinew.records.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]))
part = recorder._claim()[0]
part.write_bytes(b"half")
print(part, flush=True)
time.sleep(600)
"""


def test_what_a_killed_recorder_left_goes_with_the_next_and_nothing_else(tmp_path):
    def writer():
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True
        )
        return process, Path(process.stdout.readline().strip())

    killed, left = writer()
    killed.kill()
    killed.wait(WAIT_S)
    assert left.read_bytes() == b"half"
    alive, kept = writer()
    try:
        strangers = [tmp_path / "notes.part", tmp_path / "1.part.txt"]
        for stranger in strangers:
            stranger.touch()
        link = tmp_path / "00000099.part"
        link.symlink_to(strangers[0])
        recorder = Recorder(tmp_path)
        recorder.put("native", "", OBSERVATION, CHUNK)
        recorder.close()
        assert kept.read_bytes() == b"half"
        assert all(stranger.exists() for stranger in strangers)
        assert link.is_symlink()
        assert len(list(read_records(tmp_path))) == 1
        assert sorted(tmp_path.glob("0*.part")) == sorted({kept, link})
    finally:
        alive.kill()
        alive.wait(WAIT_S)


def test_a_full_disk_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("sinew.records.background_writer.RETRY_S", 0.0)
    recorder = Recorder(tmp_path)
    real, full = np.savez, [True]

    def savez(file, **arrays):
        file.write(b"half")
        if full[0]:
            raise OSError(28, "No space left on device")
        real(file, **arrays)

    monkeypatch.setattr("sinew.records.recorder.np.savez", savez)
    recorder.put("native", "", OBSERVATION, CHUNK)
    until(lambda: recorder.stats()["failed"] == 1)
    assert not list(tmp_path.iterdir())  # nothing half is left
    full[0] = False
    monkeypatch.setattr("sinew.records.recorder.np.savez", real)
    recorder.put("native", "", OBSERVATION, CHUNK)
    until(lambda: recorder.stats()["written"] == 1)
    recorder.close()


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("sinew.records.background_writer.CLOSE_S", 0.2)
    hanging = threading.Event()
    monkeypatch.setattr("sinew.records.recorder.np.savez", lambda *_a, **_k: hanging.wait(WAIT_S))
    recorder = Recorder(tmp_path)
    for _ in range(100):
        recorder.put("native", "", OBSERVATION, CHUNK)
    assert recorder.stats()["dropped"] > 0
    recorder.close()  # returns, although the queue is full and nobody takes from it
    hanging.set()


# ----------------------------------------------------------------------------- the process

HANG = """
import sys, threading, time
import sinew.serve.process
from sinew.cli import main
from sinew.serve.wires.native import NativeCodec

sinew.serve.process.END_S = 2.0
NativeCodec.control = lambda *given: time.sleep(1000)  # the wire's own loop hangs
sys.exit(main(["serve", *sys.argv[1:]]))
"""


def test_sigterm_ends_a_process_whose_transport_hangs(tmp_path):
    with serving(tmp_path, PEN, "--wire", "native:0", "--threads", 1, command=("-c", HANG)) as server:
        with Client(server.address, timeout=0.5) as robot, pytest.raises(RequestTimeout):
            robot.health()
        assert server.stop(signal.SIGTERM, timeout=WAIT_S) != 0
        assert "Timeout" in server.log.read_text()  # and says where every thread was


SICK = """
import sys, time
import sinew.policy
from sinew.cli import main

load = sinew.policy.load

class Sick:
    def __init__(self, policy):
        self.policy = policy
    def __getattr__(self, name):
        return getattr(self.policy, name)
    def run(self, prepared, cancel=None, between=None):
        time.sleep(1000)

sinew.policy.load = lambda *a, **k: Sick(load(*a, **k))
sys.exit(main(["serve", *sys.argv[1:]]))
"""


def test_a_server_that_hangs_ends_itself(tmp_path):
    arguments = (PEN, "--wire", "native:0", "--threads", 1, "--stuck-s", 0.5)
    with (
        serving(tmp_path, *arguments, command=("-c", SICK)) as server,
        Client(server.address, timeout=WAIT_S) as robot,
    ):
        policy = robot.metadata()["policy"]
        cameras = {
            each["name"]: np.zeros((each["height"], each["width"], 3), np.uint8) for each in policy["cameras"]
        }
        with contextlib.suppress(Exception):
            robot.infer({"images": cameras, "state": np.zeros(policy["state"]["dim"]), "prompt": "go"})
        assert server.process.wait(WAIT_S) == HOPELESS
        assert (
            "this server cannot answer requests any more and ends: a request is being computed"
            in server.log.read_text()
        )


def test_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_descriptor_limit()
        hard = DESCRIPTORS if before[1] == resource.RLIM_INFINITY else min(before[1], DESCRIPTORS)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_more_connections_are_promised_than_can_be_open(caplog):
    """--max-connections 2000 under a limit of 1,024 kept new robots out, and the log filled."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        assert [connections_within(256, servers) for servers in (1, 2, 3)] == [256, 256, 256]
        assert not caplog.records
        assert (connections_within(2000, 1), connections_within(2000, 2)) == (1024 - 128, (1024 - 128) // 2)
        assert "--max-connections 2000: limited to 448 on each of 2 ports" in caplog.messages[-1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        assert connections_within(256, 2) == 25
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert servers(parse(["native", "openpi:8000", "http:8000", "evo1"])) == 3


def test_a_lack_of_descriptors_is_a_line_of_the_log(caplog):
    """asyncio wrote a traceback for each place of its backlog, once a second: 4.8 MB of log."""
    with desk(("web",)) as at:
        before, made = resource.getrlimit(resource.RLIMIT_NOFILE), []
        used = len(list(Path("/proc/self/fd").iterdir()))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, before[1]))
            with contextlib.suppress(OSError):
                while True:
                    made.append(plain(at.web))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, before[1]))
            until(lambda: any("could not be accepted" in text for text in caplog.messages), "the line")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for each in made:
                each.close()
        assert len([text for text in caplog.messages if "could not be accepted" in text]) <= 5
        assert not [record for record in caplog.records if record.exc_info]
        until(lambda: get(at.web) == 200, "the server to take connections again")


def get(address: str) -> int:
    with contextlib.closing(HTTPConnection(address.removeprefix("ws://"), timeout=WAIT_S)) as connection:
        connection.request("GET", "/healthz")
        return connection.getresponse().status


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
def test_an_access_log_on_a_full_disk_is_a_line_of_the_log(caplog, capsys):
    """It was a traceback of 28 lines for each request."""
    with access_logging("/dev/full"):
        for _ in range(50):
            logging.getLogger("sinew.access").info("{}")
    assert [text for text in caplog.messages if "--access-log" in text] == [
        "--access-log: 1 lines could not be written: [Errno 28] No space left on device"
    ]
    assert "Traceback" not in capsys.readouterr().err


# ----------------------------------------------------------------------------- LeRobot

LEFT = Agreement(("a", "b"), (("top", "front"),), "task", None, 3, "helpers")


def test_agreements_outlive_the_process(tmp_path):
    """Row 15: the stock client never came back after a restart."""
    file = tmp_path / "deep" / "lerobot.json"
    first = Agreements(4)
    first.open(file, SPEC)
    first.add("ipv4:10.0.0.7", LEFT)
    second = Agreements(4)
    second.open(file, SPEC)
    assert second.of("ipv4:10.0.0.7") == (LEFT,)
    assert second.of("ipv4:10.0.0.8") == ()
    assert file.stat().st_mode & 0o077 == 0
    for content in (
        b"",
        b"[]",
        b"{}",
        b"\xff",
        json.dumps({"policy": 1, "hosts": []}).encode(),
        b"[" * 10_000,
    ):
        file.write_bytes(content)
        broken = Agreements(4)
        broken.open(file, SPEC)
        assert broken.of("ipv4:10.0.0.7") == ()


def test_agreements_are_about_one_policy(tmp_path):
    first = Agreements(4)
    first.open(tmp_path / "a", SPEC)
    first.add("host", LEFT)
    other = Agreements(4)
    other.open(tmp_path / "a", replace(SPEC, name="other"))
    assert other.of("host") == ()


def test_an_observation_chooses_among_the_agreements_of_its_host():
    right = replace(LEFT, state=("c", "d"))
    longer = replace(LEFT, actions=1)
    swapped = replace(LEFT, state=("b", "a"))
    seen = {"a": 0.0, "b": 0.0, "top": FRAME}
    assert fitting((right, LEFT), seen) == LEFT
    assert fitting((longer, LEFT), seen) == longer
    assert fitting((swapped, LEFT), seen) is None  # the same keys in another order: nothing says which
    assert fitting((right,), seen) is None


def test_clients_that_begin_do_not_evict_robots():
    """Row 21: 257 calls of Ready put live robots out."""
    sessions = Sessions(Listen(max_connections=4))
    for number in range(2):
        client = f"ipv4:10.0.0.1:{number}"
        sessions.agree(client, LEFT)
        session, _agreed = sessions.find(client)
        session.offer(Waiting(0, OBSERVATION, 0, 0.0), must_go=True)
        sessions.recognize(client, session, LEFT)
        session.take()
    for number in range(500):
        sessions.begin(f"ipv4:10.0.0.2:{number}")
    for number in range(2):
        session, agreed = sessions.find(f"ipv4:10.0.0.1:{number}")
        assert session.agreement == LEFT
    for number in range(2, 4):
        client = f"ipv4:10.0.0.1:{number}"
        sessions.agree(client, LEFT)
        session, _agreed = sessions.find(client)
        sessions.recognize(client, session, LEFT)
    with pytest.raises(BusyError, match="4 clients are connected"):
        sessions.begin("ipv4:10.0.0.9:1")
