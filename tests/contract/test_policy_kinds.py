"""A policy is a policy, wherever it computes: kinds x what each promises, opened by one function. What a kind cannot
have says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import sinew_client
from sinew_client import ClosedError, Observation, PolicySpec, RequestTimeout, connect
from sinew_eval.sim import blocks_expert

import sinew
from sinew.core import SinewError
from sinew.policy import load
from sinew.processing.safety import Safety
from sinew.serve import contexts
from sinew.serve.deploy import PolicyHost
from tests import processes
from tests.engine.test_batches import observations
from tests.serve.puppet import WAIT_S, desk
from tests.serve.test_replay import FRAMES, STATE, chunk_of, record

CASE = "smolvla-2cam"
LONG_MS = 1e3 * WAIT_S  # of a recorded inference that is waited for in vain
OPTIONS = {"engine": "eager", "threads": 1}


@pytest.fixture(scope="module")
def world(smolvla_bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A bundle, a server of it and of its contexts, and what the bundle answers to two observations."""
    path: Path = smolvla_bundle(CASE)
    policy = load(path, **OPTIONS)
    padded = {"padded_state_dim": policy.padded_state_dim, "padded_action_dim": policy.padded_action_dim}
    host = PolicyHost()
    seen = observations(policy, 2)
    answers = [policy.infer(each).actions for each in seen]
    with desk(policy=policy, safety=Safety(policy.processor), **padded) as at:
        at.service.policies.get().metadata["server"] = policy.describe()
        contexts.add(at.service, ("fp32",), host)
        yield SimpleNamespace(
            bundle=path, address=at.native, spec=policy.spec, seen=seen, answers=answers,
            records=record(tmp_path_factory.mktemp("records"), {"arm": 2}, (4, 6), LONG_MS),
        )  # fmt: skip
        for scheduler in host.begun:
            scheduler.stop()
            assert scheduler.join(WAIT_S)


# ----------------------------------------------------------------------------- kinds


class InThisProcess:
    """sinew.Policy."""

    without: dict[str, str] = {}  # noqa: RUF012 - behaviour -> why this kind cannot have it

    def __init__(self, world: SimpleNamespace):
        self.world = world

    def open(self) -> Any:
        return connect(self.world.bundle, **OPTIONS)

    @property
    def seen(self) -> list[Observation]:
        return self.world.seen

    @property
    def answers(self) -> list[np.ndarray]:
        """What it answers to these, in their order."""
        return self.world.answers

    @property
    def spec(self) -> PolicySpec | None:
        return self.world.spec

    def begin(self, policy: Any) -> None:
        """Do what an episode begins with."""
        policy.reset()

    def close(self) -> None:
        """Let go of what stands around the policy."""


class OnAServer(InThisProcess):
    def open(self) -> Any:
        return connect(self.world.address, timeout=WAIT_S)


class OnOneOfSeveral(InThisProcess):
    def open(self) -> Any:
        return connect([f"tcp://127.0.0.1:{processes.free_port()}", self.world.address], timeout=WAIT_S)


class InTwoPlaces(InThisProcess):
    def open(self) -> Any:
        return connect(self.world.bundle, split=f"{self.world.address}/context.fp32", **OPTIONS)


class OfARecording(InThisProcess):
    seen = (Observation(images=FRAMES, state=STATE, session="arm"),) * 2
    answers = tuple(chunk_of("arm", number, (4, 6)) for number in range(2))
    spec = None

    def open(self) -> Any:
        return connect(self.world.records, latency=False)

    def begin(self, policy: Any) -> None:
        policy.reset("arm")


class AnExpert(InThisProcess):
    without = {  # noqa: RUF012
        "test_bad_field_is_named": "it reads the simulator and not the observation",
        "test_timeout": "nothing that it does takes long",
    }
    spec = None

    def __init__(self, world: SimpleNamespace):
        super().__init__(world)
        self.env = gymnasium.make("sinew/Blocks-v0")
        self.env.reset(seed=1)

    def open(self) -> Any:
        return connect("expert:sinew/Blocks-v0")

    @property
    def answers(self) -> list[np.ndarray]:
        scene: Any = self.env.unwrapped
        return [blocks_expert.act(scene.world())[None]] * 2

    def begin(self, policy: Any) -> None:
        policy.start(self.env)

    def close(self) -> None:
        self.env.close()


KINDS = [InThisProcess, OnAServer, OnOneOfSeveral, InTwoPlaces, OfARecording, AnExpert]
pytestmark = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
Opened = Callable[[], Any]


@pytest.fixture
def case(
    kind: type[InThisProcess], world: SimpleNamespace, request: pytest.FixtureRequest
) -> Iterator[InThisProcess]:
    if why := kind.without.get(request.node.originalname):
        pytest.skip(why)
    made = kind(world)
    yield made
    made.close()


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(found, wanted)


# ----------------------------------------------------------------------------- behaviours


def test_own_answers(case: InThisProcess) -> None:
    with case.open() as policy:
        case.begin(policy)
        for observation, wanted in zip(case.seen, case.answers, strict=True):
            chunk = policy.infer(observation)
            assert isinstance(chunk, sinew_client.ActionChunk)
            assert_same(chunk.actions, wanted)


def test_an_observation_may_be_a_mapping(case: InThisProcess) -> None:
    with case.open() as policy:
        case.begin(policy)
        given = {name: value for name, value in vars(case.seen[0]).items() if value is not None}
        assert_same(policy.infer(given).actions, case.answers[0])


def test_spec(case: InThisProcess) -> None:
    with case.open() as policy:
        spec = policy.spec
        assert isinstance(spec, PolicySpec)
        assert (spec.chunk_size, spec.action.dim) == case.answers[0].shape
        assert case.spec is None or spec == case.spec


def test_bad_field_is_named(case: InThisProcess) -> None:
    good = {name: value for name, value in vars(case.seen[0]).items() if value is not None}
    with case.open() as policy:
        for changes, words in (
            ({"state": np.zeros(77, np.float32)}, "state: expected"),
            ({"images": {**good["images"], "tail": good["images"]["camera1"]}}, "tail"),
            ({"stat": 1}, "stat: expected one of"),
        ):
            with pytest.raises(SinewError, match=words) as caught:
                policy.infer({**good, **changes})
            assert caught.value.code == "bad_observation"
        case.begin(policy)
        assert_same(policy.infer(case.seen[0]).actions, case.answers[0])  # it harmed nothing


def test_reset_begins_anew(case: InThisProcess) -> None:
    with case.open() as policy:
        case.begin(policy)
        first = policy.infer(case.seen[0]).actions
        case.begin(policy)
        assert_same(policy.infer(case.seen[0]).actions, first)
        assert policy.reset("another session") is None


def test_an_episode_hands_out_a_row_at_a_time(case: InThisProcess) -> None:
    with case.open() as policy:
        wanted = case.answers
        rows = min(2, len(wanted[0]))
        case.begin(policy)
        episode = policy.episode(rows=rows, session=case.seen[0].session)
        for observation, chunk in zip(case.seen, wanted, strict=True):
            assert len(episode) == 0
            for row in chunk[:rows]:
                assert_same(episode.select_action(observation), row)
        case.begin(policy)
        again = policy.episode(session=case.seen[0].session)
        assert_same(again.select_action(case.seen[0]), wanted[0][0])
        assert len(again) == again.rows - 1
        again.reset()
        assert len(again) == 0
        for wrong in (0, policy.spec.chunk_size + 1, True):
            with pytest.raises(SinewError, match=r"rows: expected 1 to \d+ \(the actions of a chunk\), got"):
                policy.episode(rows=wrong)


def test_timeout(case: InThisProcess) -> None:
    policy = connect(case.world.records) if isinstance(case, OfARecording) else case.open()
    with policy:
        with pytest.raises(RequestTimeout, match="within 0 s"):
            policy.infer(case.seen[0], timeout=0.0)
        if not isinstance(case, OfARecording):
            assert_same(policy.infer(case.seen[0], timeout=WAIT_S).actions, case.answers[0])


def test_closed_once_and_refused_from_then_on(case: InThisProcess) -> None:
    with case.open() as policy:
        case.begin(policy)
        policy.infer(case.seen[0])
    policy.close()
    for ask in (lambda: policy.infer(case.seen[0]), lambda: policy.reset("arm")):
        with pytest.raises(ClosedError, match="the (policy|client) is closed"):
            ask()


def test_what_it_cannot_open_is_said(kind: type[InThisProcess], world: SimpleNamespace) -> None:
    for source, options, words in (
        ("expert:sinew/Nothing-v0", {}, "no scripted expert for sinew/Nothing-v0"),
        ("expert:sinew/Pen-v0", {"engine": "eager"}, "an expert has no option engine"),
        (world.records, {"split": "tcp://127.0.0.1:1"}, "a recording does not support the option split"),
        ("http://127.0.0.1:1", {}, "expected tcp://HOST:PORT"),
        (world.bundle, {"split": world.address, **OPTIONS}, "expected a policy context.FORM"),
    ):
        with pytest.raises(SinewError, match=words):
            sinew.connect(source, **options)
