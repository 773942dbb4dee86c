"""Real-time chunking through the wires: what a client asks for is what the policy gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, InvalidObservation, ServerError

from sinew.bundle.schema import Normalization
from sinew.cli import main
from sinew.core import Observation, ObservationError, PolicySpec, RequestError, VectorSpec
from sinew.eval.server import serving
from sinew.policy import load
from sinew.processing.continuation import check_continuation, continuation
from sinew.processing.normalize import Normalizer
from sinew.serve.wires import openpi
from sinew.serve.wires.groot.codec import _continuation

BLOCKS = Path(__file__).parents[2] / "sinew" / "assets" / "blocks.gguf"
ROWS = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
FIELDS: dict[str, Any] = {
    "previous": ROWS,
    "delay": 3,
    "horizon": 8,
    "rtc": "no-jacobian",
    "schedule": "linear",
    "beta": 2.5,
}


def observation(**fields: Any) -> dict[str, Any]:
    frames = {name: np.full((64, 64, 3), 90, np.uint8) for name in ("front", "wrist")}
    state = np.float32([0.1, -0.05, 0.2, 0.03])
    return {
        "images": frames,
        "state": state,
        "prompt": "put the red block into the left bin",
        "seed": 3,
        **fields,
    }


@pytest.mark.skipif(not BLOCKS.exists(), reason="no trained policy")
def test_a_served_chunk_is_continued_as_in_process_and_replayed(tmp_path: Path) -> None:
    policy = load(BLOCKS, engine="eager", threads=1)
    records = tmp_path / "records"
    with serving(BLOCKS, tmp_path / "log", "--record", str(records), "--engine", "eager") as address:
        with Client(address, timeout=60) as client:
            for fields in (FIELDS, {"previous": ROWS}, {"previous": ROWS, "delay": 4, "rtc": "ramp"}, {}):
                served = client.infer(observation(**fields)).actions
                np.testing.assert_allclose(served, policy.infer(observation(**fields)).actions, atol=1e-5)
            with pytest.raises(ServerError, match="rtc: expected guided, no-jacobian or ramp"):
                client.infer(observation(previous=ROWS, rtc="trained"))
            with pytest.raises(ServerError, match="delay: expected previous beside it"):
                client.infer(observation(delay=2))
            with pytest.raises(InvalidObservation, match="previous: expected 2 dimension"):
                client.infer(observation(previous=ROWS[0]))
            with pytest.raises(ServerError, match="previous: expected rows of 4 numbers"):
                client.infer(observation(previous=ROWS[:19, :3]))
        assert main(["recording", "replay", str(records), address]) == 0


@pytest.mark.slow  # an export, and two servers
@pytest.mark.parametrize("engine", ["onnx", "cuda"])
def test_what_an_engine_cannot_continue_is_refused_by_name(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = f"rtc: expected no-jacobian or ramp on engine {engine}; engines eager and plan take all"
    target = BLOCKS
    if engine == "onnx":
        target = tmp_path / "exported"
        assert main(["export", str(BLOCKS), "--onnx", str(target)]) == 0
    with serving(target, tmp_path / "log", "--engine", engine, "--device", "cpu") as address:
        with Client(address, timeout=60) as client:
            server = client.metadata()["server"]
            assert server["guidance"] == ["no-jacobian", "ramp"]
            with pytest.raises(ServerError, match=refused):
                client.infer(observation(previous=ROWS, delay=3))
            eager = load(BLOCKS, engine="eager", threads=1)
            for kind in server["guidance"]:
                asked = observation(previous=ROWS, delay=3, rtc=kind)
                served = client.infer(asked).actions
                np.testing.assert_allclose(served, eager.infer(asked).actions, atol=1e-3)
            assert len(client.infer(observation()).actions) == 32  # the connection goes on
        options = ("--hz", "20", "--seconds", "1", "--prompt", "go", "--handover", "rtc")
        assert main(["run", address, *options]) == 1
        assert f"engine {engine}" in capsys.readouterr().err


def test_options_of_the_web_wires() -> None:
    flat = {**FIELDS, "previous": ROWS.tolist()}
    found = openpi.options(flat)
    assert np.array_equal(found.pop("previous"), ROWS)
    assert found == {name: value for name, value in FIELDS.items() if name != "previous"}
    for name, bad in (("delay", 1.5), ("rtc", 3), ("beta", "much"), ("beta", 10**400), ("horizon", True)):
        with pytest.raises((ObservationError, RequestError), match=name):
            openpi.options({name: bad})


def test_options_of_groot() -> None:
    data = memoryview(ROWS.astype("<f4").tobytes())
    flat = {**FIELDS, "previous": {"nd": True, "type": "<f4", "shape": [20, 4], "data": data}}
    found = _continuation(flat)
    assert np.array_equal(found.pop("previous"), ROWS)
    assert found == {name: value for name, value in FIELDS.items() if name != "previous"}
    assert _continuation({}) == {}
    with pytest.raises(RequestError, match=r"options\.delay: expected a number"):
        _continuation({"delay": "3"})
    with pytest.raises(ObservationError, match=r"options\.previous"):
        _continuation({"previous": [1, 2]})


def test_one_row_is_continued_and_padding_is_committed_with_its_rows() -> None:
    """As in training, where all columns of the rows that go on were the actions' own."""
    spec = replace(
        PolicySpec("a", "b", (), VectorSpec(2), VectorSpec(2), 4, 3, 1, 8), noise_rows=4, committed_rows=2
    )
    normalizer = Normalizer(Normalization("identity"), 2, "action")
    for kind, weights in (
        ("trained", [[0, 0, 0], *[[1, 1, 1]] * 3]),
        ("guided", [[1, 1, 0], *[[0, 0, 0]] * 3]),  # nothing pulls at padding
    ):
        asked = Observation({}, np.zeros(2, np.float32), previous=np.float32([[1, 2]]), delay=1, rtc=kind)
        check_continuation(asked, spec)
        found = continuation(asked, spec, normalizer, (), np.zeros(2), 3)
        assert found is not None
        assert found.target[0].tolist() == [1, 2, 0]
        assert found.weights.tolist() == weights
    none = replace(asked, beta=0.0)  # a guidance of no weight
    assert continuation(none, spec, normalizer, (), np.zeros(2), 3) is None
