"""GR00T's clients, in processes of their own, against ``sinew serve --wire groot`` with a small real bundle."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from sinew.policy import load
from sinew.records.recorder import read_records
from tests import processes
from tests.serve import groot_client
from tests.serve.test_server import CASE, START_S, serving

ROOT = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def bundle(smolvla_bundle) -> Path:
    return smolvla_bundle(CASE)


@pytest.fixture(scope="module")
def policy(bundle):
    return load(bundle)


@pytest.fixture(scope="module")
def server(bundle, tmp_path_factory):
    directory = tmp_path_factory.mktemp("groot")
    with serving(
        directory,
        bundle,
        "--wire",
        "groot:0",
        "--threads",
        1,
        "--queue",
        2,
        "--record",
        directory / "records",
    ) as running:
        running.records = directory / "records"
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()


def run_client(server, dialect: str, folder: Path) -> dict:
    host, port = server.address.removeprefix("tcp://").split(":")
    command = [sys.executable, str(ROOT / "groot_client.py"), host, port, dialect, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * START_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dialect", ["n1.5", "n1.6", "n1.6-flat", "n1.7"])
def test_a_client_of_the_public_protocol(server, policy, dialect, tmp_path):
    """Every action is what ``Policy.infer`` gives for the same observation, bit for bit. Three requests; the second
    has a batch of four, more than the queue holds."""
    requests = []
    for index, batch in enumerate((1, 4, 2)):
        rng = np.random.default_rng(index)
        arrays = {
            "video.camera1": rng.integers(0, 256, (batch, 1, 48, 64, 3), dtype=np.uint8),
            "video.camera2": rng.integers(0, 256, (batch, 1, 48, 64, 3), dtype=np.uint8),
            "state.state": rng.standard_normal((batch, 1, 6)).astype(np.float32),
        }
        texts = [f"pick up cube {n}" for n in range(batch)]
        if dialect == "n1.5" and batch == 1:
            arrays = {name: array[0] for name, array in arrays.items()}
        requests.append((arrays, texts, 100 * index))
        np.savez(tmp_path / f"request-{index}.npz", language=np.array(texts), seed=100 * index, **arrays)
    before = len(list(server.records.glob("*.npz")))
    said = run_client(server, dialect, tmp_path)
    assert said["ping"] == {"status": "ok", "message": "Server is running"}
    assert "kill: clients cannot stop this server" in said["kill"]
    if dialect != "n1.5":
        assert said["modalities"]["video"] == [[0], ["camera1", "camera2"]]
        assert said["modalities"]["action"] == [list(range(50)), ["actions"]]
        assert said["reset"] == {}
    wait_for_records(server.records, before + 7)
    drawn = [record.meta["seed"] for record in list(read_records(server.records))[before:]]
    for index, (arrays, texts, seed) in enumerate(requests):
        with np.load(tmp_path / f"reply-{index}.npz") as file:
            reply = {name: file[name] for name in file.files}
        info = json.loads(str(reply.pop("info")))
        seeds = [drawn.pop(0) for _ in texts]
        if dialect != "n1.5":  # which has no place for a seed
            assert seeds == info["seed"] == [seed + n for n in range(len(texts))]
        ((key, actions),) = reply.items()
        assert key == ("actions" if dialect in ("n1.6", "n1.7") else "action.actions")
        if actions.ndim == 2:
            assert dialect == "n1.5"
            actions, arrays = actions[None], {name: array[None] for name, array in arrays.items()}
        assert (actions.dtype, actions.shape) == (np.float32, (len(texts), 50, 6))
        for n, text in enumerate(texts):
            expected = policy.infer(
                {
                    "images": {
                        "camera1": arrays["video.camera1"][n, 0],
                        "camera2": arrays["video.camera2"][n, 0],
                    },
                    "state": arrays["state.state"][n, 0],
                    "prompt": text,
                    "seed": seeds[n],
                }
            ).actions
            np.testing.assert_array_equal(actions[n], expected)


def wait_for_records(directory: Path, count: int) -> None:
    start = time.monotonic()
    while len(list(directory.glob("*.npz"))) < count:
        assert time.monotonic() - start < START_S
        time.sleep(0.01)


def test_errors_over_the_socket(server):
    host, port = server.address.removeprefix("tcp://").split(":")
    client = groot_client.PolicyClient(host, int(port))
    state = {"state": np.zeros((1, 1, 6), np.float32)}
    frame = np.zeros((1, 1, 8, 8, 3), np.uint8)
    good = {"video": {"camera1": frame, "camera2": frame}, "state": state, "language": {"task": [["go"]]}}
    for changes, options, text in (
        (
            {"state": {"state": np.full((1, 1, 6), np.nan, np.float32)}},
            {},
            "bad_observation: state: expected finite",
        ),
        ({"state": {"state": np.zeros((1, 1, 5), np.float32)}}, {}, "bad_observation: state: expected shape"),
        ({"video": {}}, {}, "bad_observation: video: expected frames under one of the keys camera1, camera2"),
        ({"language": {"task": [[""]]}}, {}, "bad_observation: prompt"),
        ({}, {"seed": -1}, "bad_observation: seed"),
        ({}, {"seed": 2**70}, "."),
        ({}, {"deadline_ms": -5}, "bad_request: deadline_ms"),
        ({}, {"solver_steps": 10**9}, "bad_observation: solver_steps"),
    ):
        if options.get("seed") == 2**70:  # MessagePack has no such number
            with pytest.raises(OverflowError):
                client.get_action(good, options)
            continue
        with pytest.raises(RuntimeError, match=f"Server error: {text}") as caught:
            client.get_action({**good, **changes}, options)
        assert "Traceback" not in str(caught.value)
    # a batch of which the second element is wrong
    frames = frame.repeat(2, 0)
    two = {
        "video": {"camera1": frames, "camera2": frames},
        "state": {"state": np.zeros((2, 1, 6), np.float32)},
    }
    two["state"]["state"][1] = np.inf
    with pytest.raises(RuntimeError, match="state: expected finite"):
        client.get_action({**two, "language": {"task": [["go"]]}})
    actions, _ = client.get_action(good)
    assert actions["actions"].shape == (1, 50, 6)
    client.close()


def test_the_printed_program_runs(bundle, tmp_path):
    """With a stand-in for NVIDIA's package that does on the wire what it does."""
    package = tmp_path / "gr00t" / "policy"
    package.mkdir(parents=True)
    (package / "server_client.py").write_text((ROOT / "groot_client.py").read_text())
    with serving(tmp_path, bundle, "--wire", "groot:0", "--threads", 1) as server:
        while not re.search("groot at .*; example:", server.process.stdout.readline()):
            pass
        assert server.process.stdout.readline() == "\n"
        program = textwrap.dedent("".join(iter(server.process.stdout.readline, "\n")))
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = processes.run([sys.executable, "-c", program], timeout=START_S, env=environment)
        assert done.returncode == 0, done.stderr
        assert "actions" in done.stdout
