"""One vocabulary: what robot and server say to each other lives once, in the robot's package, and travels whole."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sinew_client
from sinew_client import errors, protocol, types
from sinew_client.solver import NoiseLevels
from sinew_client.types import ActionChunk, Observation, Timing, history_problem

import sinew
from sinew import core
from sinew.bundle import Bundle
from sinew.core import CameraSpec, KeyMap, MotionSpec, PolicySpec, SinewError, VectorSpec
from sinew.models import solvers
from sinew.models.solvers import SINGLE, Solver

ASSETS = Path(sinew.__file__).parent / "assets"
BUNDLES = sorted(ASSETS.rglob("*.gguf"))
SPEC = PolicySpec(
    "tiny",
    "name",
    (CameraSpec("front", 4, 6),),
    VectorSpec(2, ("x", "y"), ("m", "m")),
    VectorSpec(3),
    chunk_size=10,
    noise_dim=3,
    solver_steps=1,
    max_prompt_tokens=5,
    control_hz=20.0,
    keys=(KeyMap("openpi", {"observation/image": "front"}, ("a", "b"), unread=("c",)),),
    solver=Solver("table", table=((1.0, 0.0, 1.0), (0.5, 1.0, -0.5))),
    motion=MotionSpec("offsets", (0, 1), (0, 1), scale=0.5, low=-1.0, high=1.0),
)


def test_each_name_is_one_thing() -> None:
    own = [name for name, value in vars(core).items() if name[0] != "_" and not isinstance(value, ModuleType)]
    shared = [name for name in own if hasattr(types, name) or hasattr(errors, name)]
    assert {"Observation", "ActionChunk", "Timing", "PolicySpec", "SinewError", "ObservationError"} < set(
        shared
    )
    for name in shared:
        assert getattr(core, name) is getattr(types, name, None) or getattr(core, name) is getattr(
            errors, name
        )
    assert protocol.ActionChunk is types.ActionChunk is sinew_client.ActionChunk
    assert solvers.Solver is sinew_client.solver.Solver


def test_who_only_speaks_needs_numpy_alone() -> None:
    """A machine that measures models has no protobuf; the words must come without."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('google', 'zmq', 'msgspec', 'torch')));"
        "import sinew_client.types, sinew.core, sinew.models.solvers"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_errors_are_of_one_kind_and_name_the_field() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    assert len(kinds) > 10
    assert all(issubclass(each, SinewError) for each in kinds)
    with pytest.raises(
        core.ObservationError, match=r"^state: expected an array with 1 dimension\(s\), got"
    ) as caught:
        protocol.encode_infer({"images": {}, "state": [[1.0]]}, 1)
    assert (caught.value.field, caught.value.code) == ("state", "bad_observation")
    assert isinstance(caught.value, sinew_client.ClientError)


def test_an_observation_is_what_a_request_may_hold() -> None:
    assert protocol.OBSERVATION_KEYS[-1] == "deadline_ms"
    names = protocol.schema.PredictRequest.DESCRIPTOR.fields_by_name
    assert set(protocol.OBSERVATION_KEYS) - set(names) == {
        "tokens",
        "earlier",
    }  # names that repeat


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.stem)
def test_a_specification_comes_through_a_wire_as_it_was(path: Path) -> None:
    spec = Bundle(path).manifest.spec
    assert PolicySpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_specification_with_all_there_is() -> None:
    for spec in (SPEC, replace(SPEC, solver=SINGLE, motion=None, control_hz=None)):
        told = json.loads(json.dumps(spec.to_dict()))
        assert PolicySpec.from_dict(told) == spec
        assert PolicySpec.from_dict({**told, "newer": 1}) == spec


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chunk_size": "10"}, "policy.chunk_size: expected a whole number, got '10'"),
        ({"chunk_size": True}, "policy.chunk_size: expected a whole number, got True"),
        ({"cameras": [{"name": 3, "height": 1, "width": 1}]}, r"policy.cameras\[0\].name: expected a text"),
        ({"cameras": [{"name": "a"}]}, r"policy.cameras\[0\].height: expected a value, got nothing"),
        ({"cameras": "front"}, "policy.cameras: expected a list"),
        ({"action": None}, "policy.action: expected a map, got None"),
        ({"action": {"dim": 0}}, "policy.action.dim: expected 1 or more, got 0"),
        (
            {"solver": {"kind": "magic"}},
            "policy.solver.kind: expected one of euler, rk4, single, renoise, diffusion, table",
        ),
        ({"solver": {"kind": "table"}}, "policy.solver: .*expected the field table for kind 'table' only"),
        (
            {"solver": {"kind": "table", "table": [[1, 2]]}},
            r"policy.solver.table\[0\]: expected a list of 3 values, got 2",
        ),
        ({"keys": [{"wire": "x", "images": {"a": 1}, "state": []}]}, "policy.keys.*expected a text, got 1"),
    ],
)
def test_what_is_no_specification_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(sinew_client.ClientError, match=f"^{words}"):
        PolicySpec.from_dict(SPEC.to_dict() | changes)


def test_nothing_at_all_is_refused() -> None:
    for given in (None, [], "policy"):
        with pytest.raises(sinew_client.ClientError, match="^policy: expected a map"):
            PolicySpec.from_dict(given)


def test_a_specification_is_taken_to_its_bounds() -> None:
    told = SPEC.to_dict()
    for name, good, bad in (
        ("chunk_size", (1,), (0, -1)),
        ("n_action_steps", (0, 1), (2, -1)),
        ("committed_rows", (0, 1), (2,)),
    ):
        for value in good:
            assert getattr(PolicySpec.from_dict({**told, "chunk_size": 1, name: value}), name) == value
        for value in bad:
            with pytest.raises(
                sinew_client.ClientError, match=f"^policy.{name}: expected (1 or more|0 to 1), got {value}$"
            ):
                PolicySpec.from_dict({**told, "chunk_size": 1, name: value})
    (keys,), many = told["keys"], [str(number) for number in range(10_000)]
    full = {**keys, "images": dict.fromkeys(many, "front"), "state": many}
    (read,) = PolicySpec.from_dict({**told, "keys": [full]}).keys
    assert (len(read.images), read.state) == (10_000, tuple(many))
    for more, said in (
        ({"state": [*many, "more"]}, r"state: expected a list of at most 10000 values, got \['0', "),
        (
            {"images": {**full["images"], "more": "front"}},
            "images: expected a map of at most 10000 texts, got {'0': ",
        ),
        ({"images": ["a"]}, r"images: expected a map of at most 10000 texts, got \['a'\]$"),
        ({"images": {1: "a"}}, "images: a key: expected a text, got 1$"),
        ({"images": {"a": 1}}, "images.'a': expected a text, got 1$"),
        ({"channels_first": 1}, "channels_first: expected true or false, got 1$"),
    ):
        with pytest.raises(sinew_client.ClientError, match=rf"^policy.keys\[0\].{said}"):
            PolicySpec.from_dict({**told, "keys": [keys | more]})
    for hz, said in ((True, "a number, got True"), ("20", "a number, got '20'")):
        with pytest.raises(sinew_client.ClientError, match=f"^policy.control_hz: expected {said}$"):
            PolicySpec.from_dict({**told, "control_hz": hz})
    found = PolicySpec.from_dict({**told, "control_hz": 20, "resizes_frames": False})
    assert (type(found.control_hz), found.resizes_frames) == (float, False)
    with pytest.raises(
        sinew_client.ClientError, match="motion.kind: expected one of absolute, relative, offsets, got 'x'$"
    ):
        PolicySpec.from_dict({**told, "motion": {"kind": "x"}})
    with pytest.raises(sinew_client.ClientError, match="^policy.history: expected 1 to 16, got 17$"):
        PolicySpec.from_dict({**told, "history": 17})


@pytest.mark.parametrize(
    ("moments", "stride", "problem"),
    [
        *((moments, stride, "") for moments, stride in ((1, 1), (1, 9999), (2, 1024), (5, 256), (16, 68))),
        (0, 1, "history: expected 1 to 16, got 0"),
        (17, 1, "history: expected 1 to 16, got 17"),
        (1, 0, "history_stride: expected 1 to 1024 control steps between 1 observation steps, got 0"),
        (2, 1025, "history_stride: expected 1 to 1024 control steps between 2 observation steps, got 1025"),
        (4, 342, "history_stride: expected 1 to 341 control steps between 4 observation steps, got 342"),
    ],
)
def test_moments_that_a_robot_can_keep(moments: int, stride: int, problem: str) -> None:
    assert history_problem(moments, stride) == problem


def test_what_is_not_said_is_as_of_an_ordinary_policy() -> None:
    """A server of an older version says less: what it leaves out must mean what it meant then."""
    spec = PolicySpec("a", "b", SPEC.cameras * 3, VectorSpec(1), VectorSpec(1), 4, 3, 2, 8)
    least = {
        each.name: spec.to_dict()[each.name]
        for each in fields(PolicySpec)
        if each.default is each.default_factory
    }  # both MISSING
    assert PolicySpec.from_dict(least) == spec
    assert (spec.resizes_frames, spec.n_action_steps, spec.committed_rows) == (True, 0, 0)
    assert (spec.history, spec.history_stride, spec.views, replace(spec, history=2).views) == (1, 1, 3, 6)
    assert (spec.noise_shape, replace(spec, noise_rows=6).noise_shape) == ((4, 3), (6, 3))
    draws = replace(spec, solver=Solver("diffusion", levels=NoiseLevels(4, fresh=True)))
    assert [spec.noises(), spec.noises(4), draws.noises(), draws.noises(4)] == [(4, 3)] * 2 + [
        (2, 4, 3),
        (4, 4, 3),
    ]
    assert types.MOST_TOGETHER == 64
    assert KeyMap("openpi", {}, ()).channels_first is False
    assert MotionSpec("offsets").scale == 1.0
    seen = Observation({}, np.zeros(1))
    assert (seen.subtask, seen.text_only) == (False, False)
    times = Timing().to_dict()
    assert [name for name, value in times.items() if value not in (0, ())] == ["batch"]
    assert (times["batch"], times["reused_prefix"], Timing(step_ms=(1.0, 2.5)).head_ms) == (1, False, 3.5)
    assert ActionChunk(np.zeros((1, 1))).round_trip_ms == 0.0


@pytest.mark.parametrize(
    ("names", "units", "labels"),
    [
        ((), (), ()),
        (("x", "y"), (), ("x", "y")),
        ((), ("m", ""), ("0 [m]", "1")),
        (("x", "y"), ("m", "rad"), ("x [m]", "y [rad]")),
    ],
)
def test_numbers_are_told_apart_by_name_and_unit(names: tuple, units: tuple, labels: tuple) -> None:
    assert VectorSpec(2, names, units).labels == labels


def test_names_and_units_are_as_many() -> None:
    with pytest.raises(ValueError, match="^units: expected 2 units, one for each name, got 1$"):
        _ = VectorSpec(2, ("x", "y"), ("m",)).labels


@pytest.mark.parametrize(
    ("fields", "asks", "acts"),
    [
        ({}, "", True),
        ({"subtask": np.bool_(False), "text_tokens": None}, "", True),
        ({"subtask": True}, "subtask", True),
        ({"subtask": True, "text_only": True}, "subtask", False),
        ({"question": "what?"}, "question", False),
        ({"text_tokens": 0}, "text_tokens", True),
    ],
)
def test_what_is_asked_for(fields: dict[str, Any], asks: str, acts: bool) -> None:
    seen = Observation.from_mapping({"images": {}, "state": np.zeros(1), **fields})
    assert (seen.asks, seen.acts) == (asks, acts)
    assert [moment.state is seen.state for moment in seen.moments] == [True]


def test_an_observation_of_unknown_or_missing_keys_is_refused() -> None:
    for given, said in (
        ({"images": {}}, "^state: expected a value, got nothing$"),
        ({"state": 1}, "^images: expected a value, got nothing$"),
        ({"images": {}, "state": 1, "promt": ""}, "^promt: .*an unknown key; did you mean 'prompt'"),
    ):
        with pytest.raises(core.ObservationError, match=said):
            Observation.from_mapping(given)
