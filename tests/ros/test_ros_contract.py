"""The contract: what it says, and what is refused by name."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client import ClientError
from sinew_ros.__main__ import main
from sinew_ros.contract import Contract, ContractError, parse, read, skeleton

from sinew.core import CameraSpec, PolicySpec, VectorSpec
from tests.serve.puppet import desk

SO101 = Path(__file__).resolve().parents[2] / "packages" / "sinew_ros" / "config" / "so101.yaml"
POLICY = PolicySpec(
    architecture="smolvla",
    name="arm",
    cameras=(CameraSpec("front", 48, 64), CameraSpec("wrist", 48, 64)),
    state=VectorSpec(6, ("a", "b", "c", "d", "e", "f")),
    action=VectorSpec(6),
    chunk_size=3,
    noise_dim=2,
    solver_steps=1,
    max_prompt_tokens=16,
).to_dict()


def test_the_example_is_understood() -> None:
    contract = read(SO101)
    contract.check(POLICY)
    assert (contract.state_dim, contract.action_dim) == (6, 6)
    assert contract.settings.hz == 30
    assert contract.settings.stale == 0.2  # the oldest that any source may be
    assert contract.names["enable"] == "/sinew/enable"
    assert not contract.start


def test_a_skeleton_is_a_contract_that_fits() -> None:
    contract = parse(yaml.safe_load(skeleton("tcp://gpu:5555", POLICY, 30)))
    contract.check(POLICY)
    assert [each.name for each in contract.cameras] == ["front", "wrist"]
    assert contract.states[0].joints == ("a", "b", "c", "d", "e", "f")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("hz",), 0, "hz: expected a number above 0, got 0"),
        (("hz",), None, "hz: expected a number above 0"),
        (("cameras", "front", "topik"), "/x", "cameras.front.topik: unknown field; use one of max_age, rate, topic"),
        (("cameras", "front", "type"), "Image", "cameras.front.type: expected sensor_msgs/msg/Image or"),
        (("state", "joints"), ["a", "a"], "state.joints: a is listed twice"),
        (("state", "scale"), [1, 2], "state.scale: expected a number or a list of 6 numbers"),
        (("state", "scale"), [".nan"], "state.scale: expected a number or a list of 6 numbers"),
        (("action",), [], "action: expected at least one topic"),
        (("server",), 7, "server: expected an address or a list of addresses, got 7"),
        (("start",), "yes", "start: expected true or false, got 'yes'"),
        (("stamps",), "now", "stamps: expected header or arrival, got now"),
        (("control", "handover"), "warp", "handover"),
        (("control", "substeps"), 3, "substeps"),
        (("control", "warp"), 3, "control.warp: unknown"),
        (("limits",), {"velocity": [1.0]}, "limits.velocity: expected 6 numbers"),
        (("names",), {"status": "/joint_states"}, None),
        (("colour",), "red", "colour: unknown"),
        (("goals",), {"hold": 1}, "goals.hold: unknown field; use one of feedback, hold_limit, preempt, time_limit"),
        (("goals",), {"preempt": 1}, "goals.preempt: expected true or false, got 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(path: tuple[str, ...], value: Any, said: str | None) -> None:
    found = yaml.safe_load(SO101.read_text())
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if said is None:
        parse(found)
        return
    with pytest.raises(ClientError) as error:
        parse(found)
    assert said in str(error.value)


def test_topics_that_would_hear_themselves_are_refused() -> None:
    found = yaml.safe_load(SO101.read_text())
    found["action"][1] = {
        "topic": "/joint_states",
        "type": "sensor_msgs/msg/JointState",
        "joints": ["gripper"],
    }
    with pytest.raises(ContractError, match="action.topic: /joint_states is already the topic of state"):
        parse(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"cameras": POLICY["cameras"][:1]},
            "cameras: expected the policy's cameras front, got front, wrist",
        ),
        ({"state": {"dim": 7}}, "state: expected the policy's 7 numbers, got 6 joints"),
        ({"action": {"dim": 5}}, "action: expected the policy's 5 numbers, got 6 joints"),
    ],
)
def test_a_contract_for_another_policy_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError) as error:
        read(SO101).check({**POLICY, **change})
    assert said in str(error.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
GOOD = yaml.safe_load(SO101.read_text())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_a_file_says_ends_in_a_contract_or_an_error(data: st.DataObject) -> None:
    found = copy.deepcopy(GOOD)
    inner: Any = found
    while True:
        key = data.draw(
            st.sampled_from(sorted(inner) if isinstance(inner, dict) else list(range(len(inner))))
        )
        if isinstance(inner[key], (dict, list)) and inner[key] and data.draw(st.booleans()):
            inner = inner[key]
            continue
        inner[key] = data.draw(ANYTHING)
        break
    with contextlib.suppress(ClientError):
        assert isinstance(parse(found), Contract)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    for name, said in (
        ("bad.yaml", "bad.yaml: .*while parsing"),
        ("none.yaml", "none.yaml: No such file or directory"),
    ):
        with pytest.raises(ContractError, match=said):
            read(tmp_path / name)


def test_the_program_writes_a_contract_and_refuses_a_bad_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with desk() as server:
        assert main(["contract", server.native, "--hz", "50"]) == 0
    text = capsys.readouterr().out
    contract = parse(yaml.safe_load(text))
    assert (contract.servers, contract.settings.hz) == ((server.native,), 50)
    assert contract.states[0].joints == ("a", "b")
    assert contract.prompt == ""  # a sentence of the template's would be what the robot is told
    (tmp_path / "robot.yaml").write_text(text.replace("hz: 50", "hz: no"))
    assert main(["run", str(tmp_path / "robot.yaml"), "--transport", "dds"]) == 1
    assert "error: hz: expected a number above 0" in capsys.readouterr().err
