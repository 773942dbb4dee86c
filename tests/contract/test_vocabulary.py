"""One vocabulary: what robot and server say to each other lives once, in the robot's package, and travels whole."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sinew_client
from sinew_client import errors, protocol, types

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
    with pytest.raises(core.ObservationError, match=r"^state: expected 1 dimension\(s\), got") as caught:
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
        ({"chunk_size": 0}, "policy.chunk_size: expected 1 or more, got 0"),
        ({"n_action_steps": 11}, "policy.n_action_steps: expected 0 to 10, got 11"),
        ({"cameras": [{"name": 3, "height": 1, "width": 1}]}, r"policy.cameras\[0\].name: expected a text"),
        ({"cameras": [{"name": "a"}]}, r"policy.cameras\[0\].height: expected a value, got nothing"),
        ({"cameras": "front"}, "policy.cameras: expected a list"),
        ({"action": None}, "policy.action: expected a map, got None"),
        ({"action": {"dim": 0}}, "policy.action.dim: expected 1 or more, got 0"),
        (
            {"solver": {"kind": "magic"}},
            "policy.solver.kind: expected one of euler, single, renoise, diffusion, table",
        ),
        ({"solver": {"kind": "table"}}, "policy.solver: .*rows of a table"),
        (
            {"solver": {"kind": "table", "table": [[1, 2]]}},
            r"policy.solver.table\[0\]: expected a list of 3, got 2",
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
