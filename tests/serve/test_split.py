"""Vision and prefix on a server, the head here: over the socket, against the policy in one piece."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sinew_client import Client, ClientError, ServerError

from sinew.core import Moment, RequestError, SinewError
from sinew.engine.backend import BACKENDS
from sinew.engine.capability import Capability
from sinew.policy import Policy, load
from sinew.processing.safety import Safety
from sinew.records.comparison import replay_records
from sinew.records.recorder import Recorder, read_records
from sinew.serve import contexts
from sinew.serve.deploy import PolicyHost
from sinew.serve.replay import Replay
from sinew.stream.split import SplitCalls, SplitPolicy, template_of
from tests.engine.test_batches import observations
from tests.serve.puppet import WAIT_S, desk

CASE = "smolvla-2cam"


@pytest.fixture(scope="module")
def policy(smolvla_bundle) -> Policy:
    return load(smolvla_bundle(CASE), engine="eager", threads=1)


def test_the_same_actions_with_the_head_on_the_robot(policy, monkeypatch):
    padded = {"padded_state_dim": policy.padded_state_dim, "padded_action_dim": policy.padded_action_dim}
    host = PolicyHost()
    with desk(policy=policy, safety=Safety(policy.processor), **padded) as at:
        at.service.policies.get().metadata["server"] = policy.describe()
        contexts.add(at.service, ("fp32", "int8"), host)
        observation = observations(policy, 1)[0]
        wanted = policy.infer(observation).actions
        sizes, made, begun = {}, [], []
        for form in ("fp32", "int8"):
            with Client(f"{at.native}/context.{form}", timeout=WAIT_S) as client:
                robot = SplitPolicy(policy, client)
                prepare = policy.processor.prepare
                with monkeypatch.context() as patched:
                    patched.setattr(
                        policy.processor,
                        "prepare",
                        lambda given, pixels, of=prepare: made.append(pixels) or of(given, pixels),
                    )
                    found = robot.infer(observation)
                assert made == [False, True]  # it reads no picture here, but the server does
                made.clear()
                assert found.actions.shape == wanted.shape
                off = np.abs(found.actions - wanted).max() / np.abs(wanted).max()
                assert off <= (1e-6 if form == "fp32" else 0.1)
                sizes[form] = robot.last.nbytes
                assert robot.last.server_ms > 0
                with pytest.raises(ClientError, match="call Client.context"):
                    client.infer({"images": observation.images, "state": observation.state, "prompt": "go"})
                with pytest.raises(ServerError, match="state: expected") as refused:
                    client.context({"images": observation.images, "state": [1.0], "prompt": "go"})
                assert refused.value.code == "bad_observation"
                moments = iter((1.0, 1.5, 1.75))  # asked, with the context, done
                clock = SimpleNamespace(perf_counter=lambda moments=moments: next(moments))
                with monkeypatch.context() as patched:
                    patched.setattr("sinew.stream.split.time", clock)
                    times = robot.infer(observation).timing
                assert (robot.last.round_trip_ms, robot.last.head_ms) == (500.0, 250.0)
                assert (times.prefix_ms, times.step_ms) == (500.0, (250.0,))
                assert times.total_ms == 750.0 + times.preprocess_ms
                far = np.full_like(observation.state, 1e6)  # outside of the statistics
                with pytest.raises(ServerError, match="state"):
                    client.context({"images": observation.images, "state": far, "prompt": "go"})
                for error, said in (
                    (RuntimeError("no such shape\nat line 7"), "no such shape"),
                    (ValueError(), ""),
                ):
                    with monkeypatch.context() as patched:
                        patched.setattr(
                            policy.engine, "solve", lambda *_, error=error: (_ for _ in ()).throw(error)
                        )
                        with pytest.raises(
                            SinewError,
                            match=rf"^split: the head cannot use .* context \({said}\); use the same bundle",
                        ):
                            robot.infer(observation)
                for name, said in (
                    ("continuation", "previous: omit it, because a split policy does not continue chunks"),
                    (
                        "unconditional",
                        "guidance_scale: expected 0, 1 or none, because a split policy reads only one prompt",
                    ),
                ):
                    odd = replace(prepare(observation, pixels=False), **{name: np.zeros(1)})
                    with monkeypatch.context() as patched:
                        patched.setattr(policy.processor, "prepare", lambda *_, odd=odd, **__: odd)
                        with pytest.raises(SinewError, match=f"^{said}$"):
                            robot.infer(observation)
                with pytest.raises(
                    SinewError, match="^question: expected no request for text, .*, got a split one$"
                ):
                    robot.infer(replace(observation, question="what is it?"))
                with monkeypatch.context() as patched:
                    patched.setattr(at.service, "reset", lambda *given: begun.append(given))
                    robot.reset("episode")
                assert begun.pop() == ("episode", f"context.{form}")
                robot.close()
                assert policy.infer(observation).actions.shape == wanted.shape  # the robot's is its own
                for closed, message in (
                    (robot.infer, "the policy is closed; open it again"),
                    (robot.reset, "the policy is closed; open it again"),
                    (client.context, "the client is closed; create a new client"),
                ):
                    with pytest.raises(ClientError, match=f"^{message}$"):
                        closed(observation)
        assert sizes["int8"] < 0.5 * sizes["fp32"]
        own = load(policy.bundle.path, engine="eager", threads=1)
        SplitPolicy(own, Client(f"{at.native}/context.fp32"), template_of(policy), whole=True).close()
        with pytest.raises(ClientError, match="^the policy is closed; open it again$"):
            own.infer(observation)
        with Client(at.native, timeout=WAIT_S) as client:
            with pytest.raises(SinewError, match=r"expected a policy context.FORM"):
                SplitPolicy(policy, client)
            with pytest.raises(ClientError, match="returns actions and no context"):
                client.context({"images": observation.images, "state": observation.state, "prompt": "go"})
            monkeypatch.setattr("sinew.stream.split.fingerprint", lambda _path: "another file")
            with (
                Client(f"{at.native}/context.int8", timeout=WAIT_S) as theirs,
                pytest.raises(SinewError, match="split: expected the server's bundle"),
            ):
                SplitPolicy(policy, theirs)
            assert list(client.metadata()["policies"]) == ["default", "context.fp32", "context.int8"]
        for scheduler in host.begun:
            scheduler.stop()
            assert scheduler.join(WAIT_S)


def test_contexts_are_recorded_without_their_bytes(policy, tmp_path, caplog):
    """What was seen is kept, and that the answer was a context: a replay compares the other answers and counts it."""
    host = PolicyHost()
    given = observations(policy, 1)[0]
    asked = {"images": given.images, "state": given.state, "prompt": given.prompt, "seed": 3}
    recorder = Recorder(tmp_path / "records")
    padded = {"padded_state_dim": policy.padded_state_dim, "padded_action_dim": policy.padded_action_dim}
    with desk(policy=policy, recorder=recorder, **padded) as at:
        at.service.policies.get().metadata["server"] = {**policy.describe(), "version": "1"}
        contexts.add(at.service, ("int8",), host)
        with Client(f"{at.native}/context.int8", timeout=WAIT_S) as client:
            assert client.context(asked)[0]
        with Client(at.native, timeout=WAIT_S) as client:
            client.infer(asked)
            recorder.close()
            assert recorder.stats() | {"alive": False} == {
                "written": 2, "dropped": 0, "failed": 0, "full": False, "alive": False,
            }  # fmt: skip
            first, second = read_records(tmp_path / "records")
            assert (first.context, first.actions, first.error, first.text) == (True, None, "", "")
            np.testing.assert_array_equal(first.observation.state, given.state)
            assert not second.context
            found = replay_records(client, (first, second), None)
        assert [row["result"] for row in found["rows"]] == ["unkept", "equal"]
        assert (found["unkept"], found["equal"], found["lost"]) == (1, 1, 0)
        for scheduler in host.begun:
            scheduler.stop()
            assert scheduler.join(WAIT_S)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
    (tmp_path / "records" / second.path.name).unlink()
    with pytest.raises(
        SinewError, match="actions, got 1 records of errors, texts, contexts or other policies"
    ):
        Replay(tmp_path / "records")


def test_moments_travel_to_the_context(case_bundle, caplog):
    """Of a policy that reads two: the answer says that one stands for both."""
    policy = load(case_bundle("diffusion-ddim"), engine="eager", threads=1)
    host = PolicyHost()
    given = observations(policy, 1)[0]
    with desk(policy=policy, padded_action_dim=policy.padded_action_dim) as at:
        at.service.policies.get().metadata["server"] = policy.describe()
        contexts.add(at.service, ("fp32",), host)
        with Client(f"{at.native}/context.fp32", timeout=WAIT_S) as client, caplog.at_level("WARNING"):
            robot = SplitPolicy(policy, client)
            found, wanted = robot.infer(given), policy.infer(given)
            np.testing.assert_allclose(found.actions, wanted.actions, rtol=0, atol=1e-5)
            assert found.warnings == wanted.warnings
            assert any("got 1" in warning for warning in found.warnings)
            assert any(
                "uses 2 observation steps and got 1" in record.getMessage() for record in caplog.records
            )
            other = Moment({name: 255 - frame for name, frame in given.images.items()}, given.state)
            both = replace(given, earlier=(other,))
            found, wanted = robot.infer(both), policy.infer(both)
            np.testing.assert_allclose(found.actions, wanted.actions, rtol=0, atol=1e-5)
            assert not found.warnings
        for scheduler in host.begun:
            scheduler.stop()
            assert scheduler.join(WAIT_S)


class OfFile:
    """A policy of another file."""

    def __init__(self, policy: Policy, path: Path):
        self.prepare, self.bundle = policy.prepare, SimpleNamespace(path=path)


def test_an_exchanged_bundle_gives_no_contexts(policy, tmp_path):
    """The robot has compared its file with the first one: its head would read another policy's context."""
    copied, other = tmp_path / "copy.gguf", tmp_path / "other.gguf"
    shutil.copyfile(policy.bundle.path, copied)
    data = bytearray(copied.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    stands = [policy]
    split = contexts.ContextPolicy(lambda: stands[0], "fp32")
    seen = observations(policy, 1)[0]
    same, changed = OfFile(policy, copied), OfFile(policy, other)
    for standing in (policy, same):  # the same bytes elsewhere are the same policy
        stands[0] = standing
        assert split.prepare(seen)[0] is standing
    stands[0] = changed
    with pytest.raises(RequestError, match="replaced by a bundle that differs"):
        split.prepare(seen)
    stands[0] = policy
    assert split.prepare(seen)[0] is policy


def test_a_call_that_cannot_be_opened_leaves_no_connection(policy, monkeypatch):
    closed = []

    class Noted(Client):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr("sinew.stream.split.Client", Noted)
    with desk(policy=policy) as at:
        at.service.policies.get().metadata["server"] = policy.describe()
        calls = SplitCalls(policy, at.native)
        with pytest.raises(SinewError, match="split: expected a policy context.FORM"):
            calls()
        assert len(closed) == 1


def test_an_engine_in_one_piece_is_refused_by_name(policy, monkeypatch):
    refusals = {Capability.SPLIT: BACKENDS["onnx"].lacking(Capability.SPLIT)}
    whole = SimpleNamespace(capabilities=replace(policy.capabilities, refusals=refusals))
    with pytest.raises(
        SinewError, match="split: expected engine cpu, plan or eager, which computes actions from a context"
    ):
        template_of(whole)
    with desk(policy=policy) as at:
        monkeypatch.setattr(policy.engine, "read", lambda _inputs: [object()])
        host = PolicyHost()
        with pytest.raises(SinewError, match="--context bf16: context: expected only tensors, got an object"):
            contexts.add(at.service, ("bf16",), host)
        assert at.service.policies.names == ("default",)
        assert all(scheduler.join(WAIT_S) for scheduler in host.begun)
