"""The GR00T wire: the reader of messages and arrays against hostile bytes, the codec, and a client of the public
protocol in a process of its own against a real server."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

from sinew.core import (
    ActionChunk,
    CameraSpec,
    KeyMap,
    ObservationError,
    PolicySpec,
    RequestError,
    SinewError,
    Timing,
    VectorSpec,
)
from sinew.serve.request import DeadlineError
from sinew.serve.wires.groot.codec import MAX_BATCH, GrootCodec
from sinew.serve.wires.groot.names import Names
from sinew.serve.wires.server import Server
from tests.serve import groot_client

CASES = int(os.environ.get("SINEW_FUZZ_CASES", "100"))
ROOT = Path(__file__).resolve().parent
RNG = np.random.default_rng(0)
SPEC = PolicySpec(
    architecture="smolvla",
    name="test",
    cameras=(CameraSpec("front", 6, 8), CameraSpec("wrist", 6, 8)),
    state=VectorSpec(3, ("arm.0", "arm.1", "gripper.0")),
    action=VectorSpec(3, ("arm.0", "arm.1", "gripper.0")),
    chunk_size=4,
    noise_dim=5,
    solver_steps=10,
    max_prompt_tokens=16,
)
MAPPED = replace(
    SPEC,
    keys=(
        KeyMap("openpi", {"x": "front"}, ("s",)),
        KeyMap(
            "groot",
            {"video/ego_view": "front", "video.hand": "wrist"},
            ("state/arm", "state/grip"),
            "language/task",
        ),
    ),
)
PLAIN = replace(SPEC, state=VectorSpec(3), action=VectorSpec(3))


class Doorman:
    """What the codec asks of the service."""

    def __init__(self, spec: PolicySpec, key: str = ""):
        self.spec, self.key, self.sessions = spec, key, []

    def authorize(self, key: str) -> None:
        if key != self.key:
            raise SinewError("no")

    def reset(self, session: str) -> None:
        self.sessions.append(session)


def make_codec(spec: PolicySpec = SPEC, key: str = "") -> GrootCodec:
    codec = GrootCodec()
    codec.bind(Doorman(spec, key))
    return codec


CODEC = make_codec()
FRAMES = RNG.integers(0, 256, (2, 1, 6, 8, 3), dtype=np.uint8)  # [B, T, height, width, 3]
ARM = RNG.standard_normal((2, 1, 2)).astype(np.float32)
GRIP = RNG.standard_normal((2, 1, 1)).astype(np.float32)


def nested(**changes) -> dict:
    return {
        "video": {"front": FRAMES, "wrist": FRAMES[::-1]},
        "state": {"arm": ARM, "gripper": GRIP},
        "language": {"annotation.human.task_description": [["go"], ["stop"]]},
        **changes,
    }


def flat(**changes) -> dict:
    """As N1.5 sends it, without a batch axis."""
    return {
        "video.front": FRAMES[0],
        "video.wrist": FRAMES[1],
        "state.arm": ARM[0],
        "state.gripper": GRIP[0],
        "annotation.human.action.task_description": ["go"],
        **changes,
    }


def encoded(data: object, dialect: str = "n1.6", **fields: object) -> memoryview:
    encode = groot_client.HOOKS[dialect][0]
    return memoryview(msgpack.packb({"endpoint": "get_action", "data": data, **fields}, default=encode))


def request(observation: dict, dialect: str = "n1.6", **options: object) -> memoryview:
    return encoded({"observation": observation, "options": options or None}, dialect)


def decoded(payload: memoryview, codec: GrootCodec = CODEC) -> list:
    header = codec.peek(payload)
    if header.error is not None:
        raise header.error
    return [decode() for decode in codec.decoders(header, payload)]


def answered(payload: memoryview, count: int, codec: GrootCodec = CODEC) -> tuple[object, np.ndarray]:
    """The reply to a request, as the client's own hooks read it, and the actions that it should hold."""
    header = codec.peek(payload)
    assert header.error is None
    actions = RNG.standard_normal((count, 4, 3)).astype(np.float32)
    chunks = [ActionChunk(each, Timing(1, 2, 3, (4, 5), 6, 21, 7), seed=8) for each in actions]
    hook = groot_client.HOOKS["n1.7" if header.raw else "n1.6"][1]
    return msgpack.unpackb(codec.encode(header, chunks, 30.0), object_hook=hook), actions


# ----------------------------------------------------------------------------- observations


@pytest.mark.parametrize("dialect", ["n1.6", "n1.7"])
def test_every_part_arrives(dialect):
    got = decoded(request(nested(), dialect, seed=5, session="arm-1", solver_steps=3))
    assert len(got) == 2
    for index, each in enumerate(got):
        np.testing.assert_array_equal(each.images["front"], FRAMES[index, 0])
        np.testing.assert_array_equal(each.images["wrist"], FRAMES[1 - index, 0])
        np.testing.assert_array_equal(each.state, np.concatenate([ARM[index, 0], GRIP[index, 0]]))
        assert each.state.dtype == np.float32
        assert (each.prompt, each.seed) == (("go", 5), ("stop", 6))[index]
        assert (each.session, each.solver_steps) == ("arm-1", 3)


def test_flat_forms():
    (got,) = decoded(encoded(flat()))
    np.testing.assert_array_equal(got.images["wrist"], FRAMES[1, 0])
    np.testing.assert_array_equal(got.state, np.concatenate([ARM[0, 0], GRIP[0, 0]]))
    assert got.prompt == "go"
    both = {
        "video.front": FRAMES,
        "state.arm": ARM,
        "state.gripper": GRIP.astype(np.float64),
        "task": ["a", "b"],
    }
    assert [each.prompt for each in decoded(request(both))] == ["a", "b"]  # the simulation wrapper's
    assert [each.prompt for each in decoded(encoded(both))] == ["a", "b"]  # N1.5's, with a batch axis
    text_array = {**both, "task": np.array(["a", "bc"])}
    assert [each.prompt for each in decoded(encoded(text_array))] == ["a", "bc"]
    one = {**both, "task": ["both"]}
    assert [each.prompt for each in decoded(encoded(one))] == ["both", "both"]


def test_a_policy_with_a_history_gets_all_of_its_steps():
    """[B, T] of frames and states; a policy that reads only the newest state needs one. One step is the newest."""
    history = replace(SPEC, history=2, history_stride=20)
    frames = RNG.integers(0, 256, (2, 2, 6, 8, 3), dtype=np.uint8)
    arm, grip = (RNG.standard_normal((2, 2, n)).astype(np.float32) for n in (2, 1))
    video, state = {"front": frames, "wrist": frames[::-1]}, {"arm": arm, "gripper": grip}
    config = msgpack.unpackb(make_codec(history)._modalities)
    assert [config[name]["as_json"]["delta_indices"] for name in ("video", "state")] == [[-20, 0], [-20, 0]]
    for member, seen in enumerate(decoded(request(nested(video=video, state=state)), make_codec(history))):
        (old,) = seen.earlier
        for at, moment in enumerate((old, seen)):
            np.testing.assert_array_equal(moment.images["front"], frames[member, at])
            np.testing.assert_array_equal(moment.images["wrist"], frames[1 - member, at])
            np.testing.assert_array_equal(moment.state, np.concatenate([arm[member, at], grip[member, at]]))
    one = {"arm": arm[:, -1:], "gripper": grip}
    with pytest.raises(
        ObservationError, match="state.arm: expected 2 observation steps, as in video.front, got 1"
    ):
        decoded(request(nested(video=video, state=one)), make_codec(history))
    newest = make_codec(replace(history, history_states=False))
    assert msgpack.unpackb(newest._modalities)["state"]["as_json"]["delta_indices"] == [0]
    (seen, _) = decoded(request(nested(video=video, state=one)), newest)
    np.testing.assert_array_equal(seen.state, np.concatenate([arm[0, 1], grip[0, 1]]))
    np.testing.assert_array_equal(seen.earlier[0].state, np.concatenate([arm[0, 1], grip[0, 0]]))
    (seen, _) = decoded(request(nested()), newest)
    assert seen.earlier == ()
    for wrong, message in (
        (
            {"front": frames, "wrist": frames[:, -1:]},
            "video.wrist: expected 2 observation steps, as in video.front, got 1",
        ),
        ({"front": frames[:, [0, 0, 1]]}, "video.front: expected 1 or 2 observation steps, got 3"),
    ):
        with pytest.raises(ObservationError, match=message):
            decoded(request(nested(video=wrong, state=state)), newest)


def test_the_newest_moment_is_taken():
    history = np.concatenate([FRAMES[::-1], FRAMES], axis=1)  # T = 2
    (first, _) = decoded(request(nested(video={"front": history})))
    np.testing.assert_array_equal(first.images["front"], FRAMES[0, 0])
    with pytest.raises(ObservationError, match="video.front: expected at least one observation step"):
        decoded(request(nested(video={"front": history[:, :0]})))


def test_a_bundle_with_a_key_map():
    codec = make_codec(MAPPED)
    observation = {
        "video": {"ego_view": FRAMES, "hand": FRAMES},
        "state": {"grip": GRIP, "arm": ARM, "legs": ARM},
        "language": {"task": [["go"], ["on"]], "other": [["x"], ["y"]]},
    }
    got = decoded(request(observation), codec)[1]
    assert set(got.images) == {"front", "wrist"}
    np.testing.assert_array_equal(got.state, np.concatenate([ARM[1, 0], GRIP[1, 0]]))
    assert got.prompt == "on"
    observation["video"]["hands"] = FRAMES
    with pytest.raises(ObservationError, match="video.hands: .*unknown camera; did you mean 'hand'"):
        decoded(request(observation), codec)
    assert Names.of(MAPPED).cameras == {"ego_view": "front", "hand": "wrist"}


def test_groups_come_from_the_names_of_dimensions():
    assert Names.of(SPEC).actions == {"arm": slice(0, 2), "gripper": slice(2, 3)}
    for names in ((), ("a", "b", "c"), ("arm.0", "x", "arm.1"), ("arm.0", "grip.0", "arm.1")):
        found = Names.of(replace(SPEC, action=VectorSpec(3, names), state=VectorSpec(3, names)))
        assert (found.actions, found.states) == ({"actions": slice(0, 3)}, ("state",))
    joints = np.zeros((2, 1, 3), np.float32)
    for key in ("state", "joints"):  # there is only one, so its name does not matter
        assert decoded(request(nested(state={key: joints})), make_codec(PLAIN))[0].state.shape == (3,)
    with pytest.raises(
        ObservationError,
        match="state.state: expected numbers, got nothing; the request has keys arm, gripper",
    ):
        decoded(request(nested()), make_codec(PLAIN))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"video": {}}, "video: expected frames under one of the keys front, wrist, got no keys"),
        ({"video": {"left": FRAMES}}, "video: .* got keys left"),
        (
            {"video": {"front": FRAMES[0]}},
            r"video.front: expected \[batch, time, height, width, 3\], got shape",
        ),
        ({"video": {"front": FRAMES[..., 0:2]}}, "front: expected three colour channels"),
        (
            {"video": {"front": FRAMES.astype(np.int32)}},
            "front: expected uint8 or float pixels, got dtype int32",
        ),
        ({"video": {"front": FRAMES.tolist()}}, "video.front: expected an array, got list"),
        ({"video": {"front": FRAMES[:0]}}, "video.front: expected a batch of 1 to 64, got 0|state.arm"),
        ({"state": {"arm": ARM}}, "state.gripper: expected numbers, got nothing; the request has keys arm"),
        (
            {"state": {"arm": ARM, "gripper": GRIP[:1]}},
            "state.gripper: expected a batch of 2, as in video.front, got 1",
        ),
        (
            {"state": {"arm": ARM[0], "gripper": GRIP}},
            r"state.arm: expected \[batch, time, dim\], got shape \[1, 2\]",
        ),
        (
            {"language": {"a": [["x"]] * 2, "b": [["y"]] * 2}},
            "language: expected the key annotation.* got keys a, b",
        ),
        ({"language": {"task": [["x"]] * 3}}, "language.task: expected 2 instructions, .* got 3"),
        ({"language": {"task": [["x", "y"]] * 2}}, "language.task: expected text, got list"),
        ({"language": {"task": [[7]] * 2}}, "language.task: expected text, got int"),
    ],
)
def test_wrong_parts_are_named(changes, text):
    with pytest.raises(ObservationError, match=text):
        decoded(request(nested(**changes)))


def test_a_key_of_no_modality_is_refused_and_a_state_that_is_not_read_is_told(caplog):
    with pytest.raises(ObservationError, match="^states: expected one of video, state.*did you mean 'state'"):
        decoded(request({**nested(), "states": {"arm": ARM}}))
    with pytest.raises(ObservationError, match="^advantage: expected one of video, state"):
        decoded(encoded({**flat(), "advantage": 1.0}))
    codec = make_codec(MAPPED)
    observation = {
        "video": {"ego_view": FRAMES},
        "state": {"grip": GRIP, "arm": ARM, "legs": ARM},
        "language": {"task": [["go"], ["on"]], "other": [["x"], ["y"]]},
    }
    for _ in range(2):
        decoded(request(observation), codec)
    sentence = "the policy does not read state.legs, language.other"
    assert caplog.messages == [f"groot: {sentence}"]
    (_actions, info), _ = answered(request(observation), 2, codec)
    assert info["warnings"] == [sentence]
    (_actions, info), _ = answered(request(nested()), 2)
    assert "warnings" not in info


def test_a_batch_beyond_the_limit():
    many = {"video.front": np.zeros((MAX_BATCH + 1, 1, 2, 2, 3), np.uint8)}
    many |= {
        "state.arm": np.zeros((MAX_BATCH + 1, 1, 2), "f4"),
        "state.gripper": np.zeros((MAX_BATCH + 1, 1, 1), "f4"),
    }
    with pytest.raises(ObservationError, match="video.front: expected a batch of 1 to 64, got 65"):
        decoded(encoded(many))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"endpoint": "kill"}, "kill: clients cannot stop this server"),
        ({"endpoint": "shutdown"}, "endpoint: expected one of get_action, .* got 'shutdown'"),
        ({"endpoint": ["get_action"]}, "endpoint: expected one of"),
        ({"data": [1]}, "data: expected a map, got list"),
        ({"data": {"observation": 3}}, "observation: expected a map, got int"),
        ({"data": {"observation": {}, "options": 3}}, "options: expected a map or nothing, got int"),
        ({"data": {"observation": {}, "options": {"seed": "x"}}}, "options.seed: expected a number, got str"),
        (
            {"data": {"observation": {}, "options": {"seed": True}}},
            "options.seed: expected a number, got bool",
        ),
        ({"data": {"observation": {}, "options": {"session": 1}}}, "options.session: expected text, got int"),
        ({"data": {"observation": {}, "options": {"sed": 1}}}, "options.sed: .*; did you mean 'seed'"),
        (
            {"data": {"observation": {}, "cfg_scale": 2.0}},
            "data.cfg_scale: expected one of observation, options",
        ),
        (
            {"api_tokn": "x"},
            "api_tokn: expected one of endpoint, data, api_token, .*did you mean 'api_token'",
        ),
    ],
)
def test_requests_that_are_refused(fields, text):
    header = CODEC.peek(memoryview(msgpack.packb({"endpoint": "get_action", **fields})))
    with pytest.raises((RequestError, ObservationError), match=text):
        raise header.error


# ----------------------------------------------------------------------------- replies


@pytest.mark.parametrize("dialect", ["n1.6", "n1.7"])
def test_replies_by_group(dialect):
    (found, info), actions = answered(request(nested(), dialect), 2)
    assert list(found) == ["arm", "gripper"]
    np.testing.assert_array_equal(found["arm"], actions[..., :2])
    np.testing.assert_array_equal(found["gripper"], actions[..., 2:])
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    assert (info["seed"], info["server_ms"], len(info["timing"])) == ([8, 8], 30.0, 2)
    assert info["timing"][0]["head_ms"] == 9


def test_replies_to_flat_requests():
    found, actions = answered(encoded(flat()), 1)  # N1.5: no list, no batch axis
    np.testing.assert_array_equal(found["action.arm"], actions[0, :, :2])
    assert found["action.gripper"].shape == (4, 1)
    batched = {key: value[None] for key, value in flat().items() if not key.startswith("annotation")}
    found, actions = answered(encoded(batched), 1)
    np.testing.assert_array_equal(found["action.arm"], actions[..., :2])
    (found, _), actions = answered(request({**batched, "task": ["go"]}), 1)  # the simulation wrapper
    np.testing.assert_array_equal(found["action.gripper"], actions[..., 2:])


def test_other_endpoints():
    def ask(endpoint: str, codec: GrootCodec = CODEC, **fields: object) -> object:
        header = codec.peek(memoryview(msgpack.packb({"endpoint": endpoint, **fields})))
        assert header.error is None
        return msgpack.unpackb(codec.control(header))

    assert ask("ping") == {"status": "ok", "message": "Server is running"}
    assert ask("reset", data={"options": {"session": "arm-1"}}) == {}
    assert ask("reset", data={"options": None}) == {}
    assert CODEC.service.sessions[-2:] == ["arm-1", ""]
    config = ask("get_modality_config")
    assert {key: value["as_json"] for key, value in config.items()} == {
        "video": {"delta_indices": [0], "modality_keys": ["front", "wrist"]},
        "state": {"delta_indices": [0], "modality_keys": ["arm", "gripper"]},
        "action": {"delta_indices": [0, 1, 2, 3], "modality_keys": ["arm", "gripper"]},
        "language": {"delta_indices": [0], "modality_keys": ["annotation.human.task_description"]},
    }
    older = make_codec(replace(SPEC, architecture="gr00t_n1_5"))
    for value in ask("get_modality_config", older).values():
        assert groot_client.decode_n15(value).modality_keys


def test_token():
    codec = make_codec(key="secret")
    for fields, good in (({"api_token": "secret"}, True), ({"api_token": "x"}, False), ({}, False)):
        header = codec.peek(encoded({}, **fields))
        if good:
            codec.authorize(header)
        else:
            with pytest.raises(SinewError, match="no"):
                codec.authorize(header)


def test_errors_are_one_field_and_bounded():
    """Some clients take a reply for an error only if "error" is all there is in it."""
    reply = msgpack.unpackb(CODEC.encode_error(None, DeadlineError("late")))
    assert reply == {"error": "deadline: late"}
    assert len(CODEC.encode_error(None, RequestError("x" * 10**6))) < 1100


class Still:
    """A policy that stands still, of any specification."""

    def __init__(self, spec: PolicySpec):
        self.spec = spec

    def infer(self, observation: object) -> ActionChunk:
        return ActionChunk(np.zeros((self.spec.chunk_size, self.spec.action.dim), np.float32), Timing())

    def reset(self, session: str = "") -> None: ...


@pytest.mark.parametrize(
    ("spec", "module", "dialect"),
    [
        (MAPPED, "gr00t.policy.server_client", "n1.7"),  # whose keys were each given all numbers of the state
        (
            replace(MAPPED, architecture="gr00t_n1_5"),
            "gr00t.eval.robot",
            "n1.5",
        ),  # which has no server_client
    ],
)
def test_the_printed_program_of_named_parts_runs(spec, module, dialect, monkeypatch, capsys):
    client = partial(groot_client.PolicyClient, dialect=dialect)
    package = SimpleNamespace(PolicyClient=client, RobotInferenceClient=client)
    monkeypatch.setitem(sys.modules, module, package)
    with Server(Still(spec), ["groot:0"]) as server:
        exec("\n".join(make_codec(spec).guide(spec, server.addresses["groot"])), {})
    said = capsys.readouterr().out
    assert ("action.gripper" in said) == (dialect == "n1.5")
    assert said.count("gripper") == 1
