"""Advantages and scales of guidance through real wires: what a client asks for is what the policy gets, and is kept."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from sinew_client import Client, InvalidObservation, schema

from sinew.cli import main
from sinew.convert import convert
from sinew.core import ObservationError, RequestError, SinewError
from sinew.policy import Policy, load
from sinew.records.recorder import read_records
from sinew.serve.replay import Replay
from sinew.serve.wires import openpi
from sinew.serve.wires.groot.codec import _continuation
from sinew.stream.split import SplitPolicy
from tests import processes
from tests.cases import cases
from tests.serve.puppet import until
from tests.serve.test_server import START_S, ServerProcess, raw_socket, serving

pytest.importorskip("websockets.sync.client", reason="the client of the openpi wire needs websockets")

from tests.serve.test_web_wires import ask, connected, post

CASE = "smolvla-2cam"
FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
SEEN = {"images": {"camera1": FRAME, "camera2": FRAME}, "state": np.zeros(6), "prompt": "go", "seed": 1}
GUIDED = {"advantage": "good", "guidance_scale": 1.1}  # no float32 is that number
BOUND = 1e-5


@pytest.fixture(scope="module")
def bundle(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case, out = cases()[CASE], tmp_path_factory.mktemp("advantages") / "policy.gguf"
    settings = {"advantage": "good,bad", "advantage_words": " {advantage}", "usual_advantage": "bad"}
    checkpoint = shutil.copytree(golden / case.home / case.checkpoint, out.with_name("checkpoint"))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_steps": 3}))  # of ten, half of the time
    return convert(checkpoint, out, settings=settings, **case.options(golden / case.home))


@pytest.fixture(scope="module")
def policy(bundle: Path) -> Policy:
    return load(bundle, engine="eager", device="cpu", threads=1)


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("server")
    ports = {wire: processes.free_port() for wire in ("native", "openpi", "http")}
    wires = [word for wire, port in ports.items() for word in ("--wire", f"{wire}:{port}")]
    options = ("--engine", "eager", "--threads", 1, "--max-batch", 4, "--record", folder / "records")
    running: Any = ServerProcess(folder, bundle, *wires, *options)
    running.records = folder / "records"
    running.at = {
        "native": f"tcp://127.0.0.1:{ports['native']}",
        "openpi": f"ws://127.0.0.1:{ports['openpi']}",
        "http": f"http://127.0.0.1:{ports['http']}/v1/actions",
    }
    try:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()
    finally:
        running.close()


def by_native(server: Any, fields: dict[str, Any]) -> np.ndarray:
    with Client(server.at["native"], timeout=START_S) as client:
        return client.infer({**SEEN, **fields}).actions


def by_openpi(server: Any, fields: dict[str, Any]) -> np.ndarray:
    message = {**SEEN, "images": dict(SEEN["images"]), **fields}
    with connected(server.at["openpi"]) as connection:
        reply = ask(connection, message)
    return reply["actions"]


def by_http(server: Any, fields: dict[str, Any]) -> np.ndarray:
    body = {**SEEN, "state": [0.0] * 6, "images": dict.fromkeys(SEEN["images"], _json(FRAME)), **fields}
    status, reply = post(server.at["http"], body)
    found = json.loads(reply)
    if status != 200:
        raise SinewError(found["error"]["message"])
    return np.float32(found["actions"])


def _json(frame: np.ndarray) -> dict[str, Any]:
    return {
        "__numpy__": base64.b64encode(frame.tobytes()).decode(),
        "dtype": "|u1",
        "shape": list(frame.shape),
    }


WIRES: dict[str, Callable[[Any, dict[str, Any]], np.ndarray]] = {
    "native": by_native,
    "openpi": by_openpi,
    "http": by_http,
}
each_wire = pytest.mark.parametrize("wire", sorted(WIRES))


def failure(act: Callable[[], Any]) -> str:
    """Return what a client is told."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each client has errors of its own
        act()
    return str(caught.value)


@each_wire
def test_each_wire_carries_both_fields(server: Any, policy: Policy, wire: str) -> None:
    wanted = {}
    for name, fields in {
        "usual": {},
        "good": {"advantage": "good"},
        "none": {"advantage": ""},
        "guided": GUIDED,
        "more": {**GUIDED, "guidance_scale": 3.0},
    }.items():
        wanted[name] = policy.infer({**SEEN, **fields}).actions
        np.testing.assert_allclose(WIRES[wire](server, fields), wanted[name], rtol=0, atol=BOUND)
    assert np.array_equal(wanted["usual"], policy.infer({**SEEN, "advantage": "bad"}).actions)
    names = list(wanted)
    for first in names:
        for second in names[names.index(first) + 1 :]:
            assert float(np.abs(wanted[first] - wanted[second]).max()) > 10 * BOUND, (first, second)


@pytest.mark.parametrize("wire", ["openpi", "http"])
def test_the_fields_other_name_is_taken(server: Any, policy: Policy, wire: str) -> None:
    wanted = policy.infer({**SEEN, **GUIDED}).actions
    found = WIRES[wire](server, {"advantage": "good", "cfg_scale": 1.1})
    np.testing.assert_allclose(found, wanted, rtol=0, atol=BOUND)
    both = {"advantage": "good", "cfg_scale": 2.0, "guidance_scale": 3.0}
    assert "cfg_scale: expected one scale, as guidance_scale, got two" in failure(
        lambda: WIRES[wire](server, both)
    )


@each_wire
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"advantage": "best"},
            "advantage: expected one of good, bad, or an empty text for none, got 'best'",
        ),
        ({"advantage": "good" * 5000}, "advantage: expected "),
        (
            {"advantage": "good", "guidance_scale": 100.5},
            "guidance_scale: expected a number from 0 to 100, got 100.5",
        ),
        (
            {"advantage": "good", "guidance_scale": -1.0},
            "guidance_scale: expected a number from 0 to 100, got -1",
        ),
        (
            {"advantage": "", "guidance_scale": 2.0},
            "guidance_scale: expected an advantage with it, such as good, bad",
        ),
        ({"advantage": 3}, "advantage: expected "),
        ({"guidance_scale": "much"}, "guidance_scale: expected "),
        ({"guidance_scale": [1.0, 2.0]}, "guidance_scale: expected "),
        ({"cfg_strength": 2.0}, "cfg_strength: expected one of "),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    server: Any, wire: str, fields: dict[str, Any], told: str
) -> None:
    found = failure(lambda: WIRES[wire](server, fields))
    assert told in found
    assert "Traceback" not in found
    assert len(found) < 2000
    assert WIRES[wire](server, {}).shape[1] == 6  # the next request is answered


@pytest.mark.parametrize("wire", ["native", "openpi"])  # JSON has no word for it
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_no_number_is_refused(server: Any, wire: str, scale: float) -> None:
    told = failure(lambda: WIRES[wire](server, {"advantage": "good", "guidance_scale": scale}))
    assert "guidance_scale: expected a number from 0 to 100" in told


def test_clients_refuse_what_has_no_place_in_a_message() -> None:
    with Client("tcp://127.0.0.1:1", timeout=1) as client:
        for fields, name in (({"advantage": 3}, "advantage"), ({"guidance_scale": "2"}, "guidance_scale")):
            with pytest.raises(InvalidObservation, match=f"^{name}: expected a value that fits the field"):
                client.infer({**SEEN, **fields})


def test_robots_with_scales_of_their_own_share_a_server(server: Any, policy: Policy) -> None:
    """Four robots at once, two of them guided: each gets what it asked for, whoever shares its inference."""
    asked = (
        {},
        {"advantage": "good", "guidance_scale": 0.5},
        {"advantage": "good", "guidance_scale": 3.0},
        {"advantage": "good"},
    )
    wanted = [policy.infer({**SEEN, **fields}).actions for fields in asked]
    found: dict[int, list[np.ndarray]] = {}
    batches: list[int] = []

    def drive(number: int) -> None:
        with Client(server.at["native"], timeout=START_S) as client:
            chunks = [client.infer({**SEEN, **asked[number]}) for _ in range(10)]
        found[number] = [chunk.actions for chunk in chunks]
        batches.extend(chunk.timing.batch for chunk in chunks)

    robots = [threading.Thread(target=drive, args=(number,)) for number in range(len(asked))]
    for robot in robots:
        robot.start()
    for robot in robots:
        robot.join(START_S)
    for number, chunks in found.items():
        for actions in chunks:
            np.testing.assert_allclose(actions, wanted[number], rtol=0, atol=BOUND)
    assert len(found) == len(asked)
    assert max(batches) <= 2  # nobody else shares two prompts, and nobody shares one with the guided


def test_the_server_says_what_it_takes(server: Any) -> None:
    with Client(server.at["native"], timeout=START_S) as client:
        about = client.metadata()["server"]
    assert about["advantages"] == ["good", "bad"]
    assert about["usual_advantage"] == "bad"
    assert about["unscaled"] == ""


@pytest.mark.parametrize("fields", [{"advantage": "good"}, {"guidance_scale": 2.0}])
def test_a_stream_follows_the_policys_own(server: Any, fields: dict[str, Any]) -> None:
    sample = schema.PredictRequest(kind=4, raw_state=[0.0] * 6, rate=10.0, time=1.0, **fields)
    with raw_socket(server.at["native"], zmq.DEALER) as socket:
        socket.send_multipart([b"", sample.SerializeToString()])
        reply = schema.PredictResponse.FromString(socket.recv_multipart()[-1])
    assert reply.error.startswith(f"{next(iter(fields))}: expected no value in a stream")


def test_a_head_on_the_robot_follows_an_advantage_and_refuses_a_second_prompt(
    bundle: Path, policy: Policy, tmp_path: Path
) -> None:
    options = ("--wire", "native:0", "--engine", "eager", "--threads", 1, "--context", "fp32")
    with serving(tmp_path, bundle, *options) as server:
        address = f"{server.address}/context.fp32"
        with SplitPolicy(policy, Client(address, timeout=START_S)) as split:
            for fields in ({"advantage": "good"}, {"advantage": "good", "guidance_scale": 0.0}, {}):
                wanted = policy.infer({**SEEN, **fields}).actions
                np.testing.assert_allclose(
                    split.infer({**SEEN, **fields}).actions, wanted, rtol=0, atol=BOUND
                )
            with pytest.raises(
                SinewError,
                match="guidance_scale: expected 0, 1 or none, because a split policy reads only one",
            ):
                split.infer({**SEEN, **GUIDED})
        with Client(address, timeout=START_S) as client:
            told = failure(lambda: client.context({**SEEN, **GUIDED}))
        assert "guidance_scale: expected 0, 1 or none with split inference" in told


def test_records_keep_both_and_a_replay_asks_for_both(server: Any, policy: Policy, bundle: Path) -> None:
    wanted = by_native(server, GUIDED)

    def kept() -> bool:
        return any(record.observation.guidance_scale == 1.1 for record in read_records(server.records))

    until(kept)
    (record, *_) = [each for each in read_records(server.records) if each.observation.guidance_scale == 1.1]
    assert record.observation.advantage == "good"
    assert record.actions is not None
    np.testing.assert_allclose(policy.infer(record.observation).actions, wanted, rtol=0, atol=BOUND)
    failed = [each for each in read_records(server.records) if each.observation.advantage == "best"]
    assert all("advantage: expected one of" in each.error for each in failed)
    assert main(["recording", "replay", str(server.records), server.at["native"]]) == 0
    with Replay(server.records, policy.manifest, latency=False) as replay:
        assert replay.infer({**SEEN, **GUIDED}).actions.shape == wanted.shape
        with pytest.raises(ObservationError, match="^advantage: expected one of good, bad"):
            replay.infer({**SEEN, "advantage": "best"})


@pytest.mark.usefixtures("dry_ends")
def test_the_verbs_take_both(
    server: Any, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    guided = ("--set", "advantage=good", "--set", "guidance_scale=2")
    Image.fromarray(FRAME).save(tmp_path / "frame.png")
    images = [f"--image={name}={tmp_path / 'frame.png'}" for name in SEEN["images"]]
    infer = ["infer", str(bundle), *images, "--state", "0,0,0,0,0,0", "--prompt", "go", "--seed", "1"]
    told = []
    flags = ("--advantage", "good", "--guidance-scale", "2")
    for options in ((), flags):
        assert main([*infer, "--engine", "eager", *options, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out.strip().splitlines()[-1])["actions"])
    assert told[0] != told[1]
    assert main([*infer, "--advantage", "best"]) == 1
    assert "advantage: expected one of good, bad" in capsys.readouterr().err
    client = ["bench", server.at["native"], "--runs", "2", "--warmup", "0", "--prompt", "go"]
    assert main([*client, *flags]) == 0
    assert main([*client, "--guidance-scale", "101", "--advantage", "good"]) == 1
    assert "guidance_scale: expected a number from 0 to 100" in capsys.readouterr().err
    run = ["--hz", "20", "--seconds", "600", "--timeout", "60", "--prompt", "go"]
    journal = tmp_path / "run.jsonl"
    assert main(["run", server.at["native"], *run, *guided, "--record", str(journal)]) == 0
    capsys.readouterr()
    begun = json.loads(journal.read_text().splitlines()[0])
    assert (begun["advantage"], begun["guidance_scale"]) == ("good", 2.0)
    assert main(["recording", "replay", str(journal)]) == 0
    capsys.readouterr()
    for options, message in {
        ("--set", "advantage=best"): "advantage: expected one of good, bad, got 'best'",
        ("--set", "advantage=", "--set", "guidance_scale=2"): "guidance_scale needs advantage",
        ("--set", "guidance_scale=nan"): "guidance_scale: expected a number from 0 to 100, got nan",
    }.items():
        assert main(["run", server.at["native"], *run, *options]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "advantage=good"), "advantage: expected none for this policy, whose prompt has no place"),
        (
            ("--set", "guidance_scale=2"),
            "guidance_scale: expected none for this policy, whose prompt has no place",
        ),
    ],
)
def test_a_run_that_cannot_be_conditioned_ends_before_the_robot_moves(
    smolvla_bundle: Callable[..., Path],
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ("--hz", "20", "--seconds", "1", "--prompt", "go", "--robot", "dry")
    assert main(["run", str(smolvla_bundle(CASE)), *run, *options]) == 1
    assert message in capsys.readouterr().err


def test_an_engine_that_reads_one_prompt_ends_it_too(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("--hz", "20", "--seconds", "1", "--prompt", "go", "--engine", "cuda", "--device", "cpu")
    assert main(["run", str(bundle), *run, "--set", "advantage=good", "--set", "guidance_scale=2"]) == 1
    assert "guidance_scale: expected engine cpu, onnx, plan or eager" in capsys.readouterr().err


def test_options_of_groot_and_openpi() -> None:
    assert _continuation(dict(GUIDED)) == GUIDED
    with pytest.raises(RequestError, match=r"options\.advantage: expected text"):
        _continuation({"advantage": 1})
    with pytest.raises(RequestError, match=r"options\.guidance_scale: expected a number"):
        _continuation({"guidance_scale": True})
    assert openpi.options({"cfg_scale": 2}) == {"guidance_scale": 2.0}
    assert openpi.options({"cfg_scale": 2, "guidance_scale": 2.0}) == {"guidance_scale": 2.0}
    for name, bad in (("advantage", 1.5), ("guidance_scale", True), ("cfg_scale", 10**400)):
        with pytest.raises(ObservationError, match=name):
            openpi.options({name: bad})
