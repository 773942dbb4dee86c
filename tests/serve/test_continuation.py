"""Real-time chunking through the wires: what a client asks for is what the policy gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, InvalidObservation, ServerError
from sinew_eval.foreign.server import serving

from sinew.bundle.schema import Normalization
from sinew.cli import main
from sinew.core import (
    ContinuationRequest,
    Observation,
    ObservationError,
    PolicySpec,
    RequestError,
    VectorSpec,
)
from sinew.policy import load
from sinew.processing.continuation import check_continuation, continuation
from sinew.processing.normalize import Normalizer
from sinew.serve.wires import openpi
from sinew.serve.wires.groot.codec import _continuation
from sinew.steps.vector.add_state import AddState
from sinew.steps.vector.threshold import Threshold

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
            with pytest.raises(ServerError, match="delay: expected `previous` with it"):
                client.infer(observation(delay=2))
            with pytest.raises(InvalidObservation, match="previous: expected an array with 2 dimension"):
                client.infer(observation(previous=ROWS[0]))
            with pytest.raises(ServerError, match="previous: expected rows of 4 numbers"):
                client.infer(observation(previous=ROWS[:19, :3]))
        assert main(["recording", "replay", str(records), address]) == 0


@pytest.mark.slow  # an export, and two servers
@pytest.mark.parametrize("engine", ["onnx", "cuda"])
def test_what_an_engine_cannot_continue_is_refused_by_name(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = (
        f"rtc: expected no-jacobian or ramp on engine {engine}; engine cpu, plan or eager supports all values"
    )
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


TRAINED = replace(
    PolicySpec("a", "b", (), VectorSpec(2), VectorSpec(2), 4, 3, 1, 8), noise_rows=5, committed_rows=2
)
PLAIN = replace(TRAINED, committed_rows=0)
IDENTITY = Normalizer(Normalization("identity"), 2, "action")


def asking(rows: int = 3, **fields: Any) -> Observation:
    return Observation({}, np.zeros(2, np.float32), previous=np.arange(2.0 * rows).reshape(-1, 2), **fields)


def test_fields_are_taken_to_their_bounds_and_refused_beyond() -> None:
    for spec, fields in (
        (PLAIN, {"rows": 1}),
        (PLAIN, {"rows": 16, "delay": 0, "horizon": np.int64(0), "beta": 0}),
        *((PLAIN, {"rtc": kind, "beta": np.float32(1000)}) for kind in ("guided", "no-jacobian", "ramp")),
        *((PLAIN, {"schedule": kind}) for kind in ("exp", "linear", "ones", "zeros")),
        (TRAINED, {"delay": 2}),
        (TRAINED, {}),
        (TRAINED, {"delay": 3, "rtc": "guided", "schedule": "ones", "beta": 1.0}),
    ):
        check_continuation(asking(**fields).continuation, spec)
    many = "at most the 2 actions that this checkpoint was trained to continue"
    weigh = "no value with rtc trained, which uses no weights"
    for spec, fields, message in (
        (PLAIN, {"rows": 0}, "previous: expected 1 to 16 actions, got 0"),
        (PLAIN, {"rows": 17}, "previous: expected 1 to 16 actions, got 17"),
        (PLAIN, {"delay": -1}, "delay: expected a whole number of actions, 0 or more, got -1"),
        (PLAIN, {"delay": True}, "delay: expected a whole number of actions, 0 or more, got True"),
        (PLAIN, {"horizon": 1.0}, "horizon: expected a whole number of actions, 0 or more, got 1.0"),
        (
            PLAIN,
            {"rtc": ("ramp",)},
            "rtc: expected one of guided, no-jacobian, ramp, trained, got ('ramp',)",
        ),
        (PLAIN, {"schedule": "x"}, "schedule: expected one of exp, linear, ones, zeros, got 'x'"),
        (PLAIN, {"beta": -0.5}, "beta: expected a number from 0 to 1000, got -0.5"),
        (PLAIN, {"beta": 1000.5}, "beta: expected a number from 0 to 1000, got 1000.5"),
        (PLAIN, {"beta": "1"}, "beta: expected a number from 0 to 1000, got '1'"),
        (TRAINED, {"delay": 3}, f"delay: expected {many}, got 3"),
        (TRAINED, {"schedule": "exp"}, f"schedule: expected {weigh}, got 'exp'"),
        (TRAINED, {"beta": 5.0}, f"beta: expected {weigh}, got 5.0"),
    ):
        with pytest.raises(ObservationError) as error:
            check_continuation(asking(**fields).continuation, spec)
        assert str(error.value) == message
    bad = asking()
    bad.previous[1, 1] = np.nan  # type: ignore[index]
    for odd, message in (
        (bad, "previous: expected finite numbers, got NaN or infinity"),
        (
            replace(bad, previous=np.zeros(2)),
            r"previous: expected numbers of shape [R, 2], got float64 of shape [2]",
        ),
        (
            replace(bad, previous=np.zeros((1, 2, 2), int)),
            r"previous: expected numbers of shape [R, 2], got int64 of shape [1, 2, 2]",
        ),
        (
            replace(bad, previous=np.zeros((2, 3))),
            r"previous: expected numbers of shape [R, 2], got float64 of shape [2, 3]",
        ),
    ):
        with pytest.raises(ObservationError) as error:
            check_continuation(odd.continuation, PLAIN)
        assert str(error.value) == message
    for name in ("delay", "horizon", "rtc", "schedule", "beta"):
        with pytest.raises(
            ObservationError, match=f"^{name}: expected `previous` with it, the actions to continue"
        ):
            check_continuation(ContinuationRequest(**{name: 0}), PLAIN)  # type: ignore[arg-type]
    assert Observation({}, np.zeros(2)).continuation is None


def test_rows_of_each_kind_that_are_continued() -> None:
    """Of five that the solver integrates, four are the chunk's, and the horizon's are free."""

    def of(spec: PolicySpec, **fields: Any) -> Any:
        return continuation(asking(**fields).continuation, spec, IDENTITY, (), np.zeros(2), 3)

    found = of(PLAIN, delay=1, horizon=1)
    assert (found.kind, found.beta, found.overlap) == ("guided", 5.0, 3)
    exp = [w * np.expm1(w) / np.expm1(1) for w in (2 / 3, 1 / 3)]
    np.testing.assert_allclose(found.weights[:, 0], [1, *exp, 0, 0], rtol=1e-6)
    assert found.weights[:, 2].tolist() == [0] * 5
    assert found.target.tolist() == [[0, 1, 0], [2, 3, 0], [4, 5, 0], [4, 5, 0], [0, 0, 0]]
    assert of(PLAIN, horizon=2, schedule="ones").weights[:, 0].tolist() == [1, 1, 0, 0, 0]
    assert of(PLAIN, rows=9, schedule="ones").overlap == 4
    assert of(PLAIN, horizon=4) is None
    assert of(PLAIN, beta=0.0) is None
    assert of(PLAIN, beta=1.0).beta == 1.0
    ramp = of(PLAIN, rtc="ramp", delay=2, beta=0.0)
    assert (ramp.kind, ramp.overlap) == ("ramp", 3)
    assert ramp.weights[:2, 0].tolist() == [0, 0]
    assert ramp.weights[:, 2].tolist() == [1] * 5  # padding has all of its velocity
    assert of(PLAIN, rtc="ramp", horizon=9).overlap == 0
    for delay, rows, end in ((2, 3, 2), (2, 1, 1), (1, 3, 1)):
        trained = of(TRAINED, rows=rows, delay=delay)
        assert (trained.kind, trained.overlap) == ("trained", end)
        assert trained.weights.tolist() == [[0] * 3] * end + [[1] * 3] * (5 - end)
    assert of(TRAINED) is None
    assert continuation(ContinuationRequest(), PLAIN, IDENTITY, (), np.zeros(2), 3) is None


def test_actions_are_turned_back_before_they_are_continued() -> None:
    """Relative ones to the state of the new frame; a step without an inverse is refused by name."""
    state, add = np.array([10.0, 20.0]), AddState((0, 1))
    found = continuation(asking().continuation, PLAIN, IDENTITY, (add,), state, 2)
    assert found is not None
    assert found.target[:3].tolist() == [[-10, -19], [-8, -17], [-6, -15]]
    with pytest.raises(
        ObservationError,
        match="^previous: expected actions that Sinew can convert back to model units, got a step",
    ):
        continuation(asking().continuation, PLAIN, IDENTITY, (add, Threshold((1,))), state, 2)


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
        asked = ContinuationRequest(previous=np.float32([[1, 2]]), delay=1, rtc=kind)
        check_continuation(asked, spec)
        found = continuation(asked, spec, normalizer, (), np.zeros(2), 3)
        assert found is not None
        assert found.target[0].tolist() == [1, 2, 0]
        assert found.weights.tolist() == weights
    none = replace(asked, beta=0.0)  # a guidance of no weight
    assert continuation(none, spec, normalizer, (), np.zeros(2), 3) is None
