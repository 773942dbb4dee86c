"""``sinew serve --record`` and ``sinew recording replay``: what is written, what comes back, files that are none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sinew_client import Client, ServerError

from sinew.core import Moment, Observation, SinewError
from sinew.policy import Policy, load
from sinew.records.arithmetic import TOLERANCES
from sinew.records.arithmetic import kept as kept_of
from sinew.records.background_writer import BACKLOG
from sinew.records.recorder import Recorder, read_record, read_records
from tests import processes
from tests.serve.groot_client import PolicyClient
from tests.serve.puppet import until
from tests.serve.test_server import CASE, FRAME, GOOD, START_S, serving

SECRET = {"prompt": "fetch the SECRET bottle", "state": np.full(6, 0.123456), "seed": 424242}


@pytest.fixture(scope="module")
def policy(smolvla_bundle) -> Policy:
    return load(smolvla_bundle(CASE))


# ----------------------------------------------------------------------------- records


def observe(**changes) -> Observation:
    return Observation(**{**GOOD, **changes})


def test_records_hold_everything(tmp_path, policy):
    noise = np.zeros((50, 32), np.float32)
    given = observe(noise=noise, seed=None, session="arm", time=1.5, solver_steps=2)
    recorder = Recorder(tmp_path / "new")
    chunk = policy.infer(given)
    recorder.put("native", "arm", given, chunk)
    recorder.put("http", "", observe(seed=None), policy.infer(observe(seed=7)))
    recorder.put("groot", "", observe(prompt="", tokens=np.array([5, 6])), SinewError("broken"))
    recorder.close()
    first, second, third = read_records(tmp_path / "new")
    np.testing.assert_array_equal(first.actions, chunk.actions)
    np.testing.assert_array_equal(first.observation.noise, noise)
    for name in ("prompt", "session", "time", "solver_steps", "seed"):
        assert getattr(first.observation, name) == getattr(given, name)
    np.testing.assert_array_equal(first.observation.images["camera2"], FRAME)
    assert (first.wire, first.error, second.observation.seed) == ("native", "", 7)
    assert (third.actions, third.error) == (None, "[internal] broken")
    assert third.observation.tokens.tolist() == [5, 6]
    np.testing.assert_array_equal(policy.infer(second.observation).actions, second.actions)

    before = [Moment({"camera1": FRAME[::-1]}, np.float32([index])) for index in range(3)]
    moments = Recorder(tmp_path / "moments")
    moments.put("native", "", observe(earlier=before), SinewError("x"))
    moments.close()
    (found,) = read_records(tmp_path / "moments")
    assert [each.state.item() for each in found.observation.earlier] == [0, 1, 2]
    np.testing.assert_array_equal(found.observation.earlier[1].images["camera1"], FRAME[::-1])
    assert list(found.observation.images) == list(GOOD["images"])

    again = Recorder(tmp_path / "new")  # numbers go on
    again.put("native", "", given, chunk)
    again.close()
    assert [record.path.stem for record in read_records(tmp_path / "new")][-1] == "00000004"


def test_recording_ends_at_the_limit_and_drops_what_the_disk_cannot_take(tmp_path, caplog):
    recorder = Recorder(tmp_path, limit_bytes=30_000)
    for _ in range(5):  # about 19 kB each
        recorder.put("native", "", observe(), SinewError("x"))
    recorder.close()
    assert len(list(tmp_path.glob("*.npz"))) == 2
    assert "recording has ended" in caplog.text

    slow = Recorder(tmp_path / "slow")
    stuck = threading.Event()
    slow._write = lambda *entry: stuck.wait(START_S)
    for _ in range(BACKLOG + 6):
        slow.put("native", "", observe(), SinewError("x"))
    stuck.set()
    slow.close()
    assert "records are being dropped" in caplog.text
    assert "5 records were dropped" in caplog.text or "6 records were dropped" in caplog.text


def test_files_that_are_no_records(tmp_path):
    with pytest.raises(SinewError, match="no records"):
        list(read_records(tmp_path))
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 nonsense")
    (tmp_path / "b.npz").write_bytes(b"")
    np.savez(tmp_path / "c.npz", state=np.zeros(6))
    np.savez(tmp_path / "d.npz", meta=np.array("[1]"), state=np.zeros(6))
    np.savez(tmp_path / "e.npz", meta=np.array([{"a": 1}], dtype=object), state=np.zeros(6))
    meta = {"recorded": 1.0, "wire": "native", "seed": 1, "prompt": "", "session": ""}
    meta |= {"solver_steps": None, "time": None}
    for name, said in (("f", ["fp32"]), ("g", {"precision": ["fp32"]}), ("h", {"precision": {"all": 32}})):
        text = np.array(json.dumps(meta | {"server": said}))
        np.savez(tmp_path / f"{name}.npz", meta=text, state=np.zeros(6))
    for name, strange in (
        ("i", "earlier/1/state"),
        ("j", "earlier/00/state"),
        ("k", "earlier/0/images/camera1"),
    ):
        array = np.zeros((2, 2, 3), np.uint8) if "images" in strange else np.zeros(6)
        np.savez(
            tmp_path / f"{name}.npz", meta=np.array(json.dumps(meta)), state=np.zeros(6), **{strange: array}
        )
    for path in sorted(tmp_path.glob("*.npz")):
        with pytest.raises(SinewError, match="not a record"):
            read_record(path)
    with pytest.raises(SinewError, match="--record"):
        Recorder(tmp_path / "a.npz")


# ----------------------------------------------------------------------------- the command line


def sinew(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sinew", *map(str, arguments)]
    return processes.run(command, timeout=START_S)


def altered(source: Path, target: Path, change: float, server: dict | None) -> None:
    """Write a record with one action changed, computed as ``server`` says, None: by a sinew that did not say it."""
    with np.load(source) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(str(arrays["meta"]))
    said = meta.pop("server")
    if server is not None:
        meta["server"] = said | server
    arrays["meta"] = np.array(json.dumps(meta))
    arrays["actions"][7, 3] += np.float32(change)
    np.savez(target, **arrays)


def test_serve_records_and_client_replays(smolvla_bundle, tmp_path):
    """A server with everything on: a key, records, the access log, a deadline. What two wires asked of it is
    replayed and gives the same actions, bit for bit where it is computed as then, else within the tolerance; a record
    with other actions is found."""
    records, access = tmp_path / "records", tmp_path / "access.jsonl"
    (tmp_path / "key").write_text("secret\n")
    ports = processes.free_port(), processes.free_port()
    options = [
        "--threads",
        1,
        "--record",
        records,
        "--access-log",
        access,
        "--api-key-file",
        tmp_path / "key",
    ]
    wires = ["--wire", f"native:{ports[0]}", "--wire", f"groot:{ports[1]}"]
    with serving(tmp_path, smolvla_bundle(CASE), *wires, *options, "--deadline-ms", 20_000) as server:
        address = f"tcp://127.0.0.1:{ports[0]}"
        with Client(address, timeout=START_S, api_key="secret") as client:
            for seed in (1, None):
                client.infer({**GOOD, **SECRET, "seed": seed, "time": 2.0})
            client.infer({**GOOD, "noise": np.ones((50, 32)), "seed": None, "solver_steps": 3})
            with pytest.raises(ServerError):
                client.infer({**GOOD, "state": np.zeros(5)})
        groot = PolicyClient("127.0.0.1", ports[1], api_token="secret")
        state = np.full((1, 1, 6), 0.3, np.float32)
        groot.get_action(
            {
                "video": {"camera1": FRAME[None, None], "camera2": FRAME[None, None]},
                "state": {"state": state},
                "language": {"t": [["go"]]},
            }
        )
        groot.close()
        until(lambda: len(list(records.glob("*.npz"))) == 5)

        kept = tmp_path / "kept"
        records_of = list(read_records(records))
        kept.mkdir()
        for record in records_of:
            (kept / record.path.name).write_bytes(record.path.read_bytes())

        def replay() -> tuple[int, dict, str]:
            told = ("--json", tmp_path / "told.json")
            ran = sinew("recording", "replay", kept, address, "--api-key-file", tmp_path / "key", *told)
            return ran.returncode, json.loads(told[1].read_text()), ran.stdout

        code, result, text = replay()
        assert code == 0, text
        counts = {name: result[name] for name in ("records", "equal", "within", "beyond", "error", "new")}
        assert counts == {"records": 5, "equal": 4, "within": 0, "beyond": 0, "error": 1, "new": 0}
        assert "every bit must be equal" in text
        assert "4 equal to the bit, 0 within the tolerance, 0 beyond;" in text
        assert "secret" not in result["command"]
        with Client(address, timeout=START_S, api_key="secret") as client:
            about = client.metadata()
        assert records_of[0].server == kept_of(about["server"])
        assert {"engine", "threads", "precision", "instructions", "libraries"} <= records_of[0].server.keys()

        scale = about["policy"]["action"]["scale"][3]
        first, tolerance = min(kept.glob("*.npz")), TOLERANCES["fp32"]
        other = {"threads": 64}
        for change, arithmetic, counted, said in (
            (
                0.01 * tolerance,
                {},
                "beyond",
                "every bit must be equal",
            ),  # the same arithmetic gives the same bits
            (0.01 * tolerance, other, "within", "threads: 64 then, 1 now (1 of 5)"),
            (0.01 * tolerance, None, "within", "the records do not state how they were computed"),
            (
                4.0 * tolerance,
                other,
                "beyond",
                "0.00012 of each action's scale, for sums in another order in fp32",
            ),
            (4.0 * tolerance, {"precision": {"all": "bf16"}}, "within", "in bf16"),
        ):
            altered(records / first.name, first, change * scale, arithmetic)
            code, result, text = replay()
            assert (code, result[counted], result["equal"]) == (int(counted == "beyond"), 1, 3), (
                change,
                server,
            )
            assert said in text
            assert f"joint {result['largest']['joint']} of {first.name}" in text
            assert (result["largest"]["row"], result["largest"]["joint"]) == (7, "3")
            # 2^-24 of a recorded action, rounded once more to float32, is what the number may be off by
            assert result["largest"]["of_scale"] == pytest.approx(change, abs=2.0**-23)

        late = sinew("bench", address, "--api-key-file", tmp_path / "key", "--runs", 1, "--deadline-ms", 1e-6)
        assert late.returncode == 1
        assert "[deadline]" in late.stderr
        unknown = sinew("bench", address)
        assert unknown.returncode == 1
        assert "[unauthorized]" in unknown.stderr
        assert server.stop() == 0
        log = server.log.read_text()
    assert "Traceback" not in log
    text = access.read_text()
    assert "SECRET" not in text
    assert "SECRET" not in log
    entries = [json.loads(line) for line in text.splitlines()]
    assert [entry["outcome"] for entry in entries[:5]] == ["ok", "ok", "ok", "bad_observation", "ok"]
    assert entries[-1]["outcome"] == "unauthorized"
    assert "secret" not in text
