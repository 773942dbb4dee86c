"""What a Python program has at hand gives the same actions, to the bit, as the arrays that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as generated
from hypothesis import settings
from hypothesis import strategies as st
from PIL import Image

from sinew.core import CameraSpec, Moment, Observation, ObservationError, PolicySpec, VectorSpec
from sinew.policy import Policy, load
from sinew.processing.given import array, observation, picture

FRAME = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
OTHER = np.random.default_rng(1).integers(0, 256, (40, 56, 3), dtype=np.uint8)
STATE = np.linspace(-1, 1, 6, dtype=np.float32)
SPEC = PolicySpec(
    "a",
    "b",
    (CameraSpec("camera1", 40, 56), CameraSpec("camera2", 40, 56)),
    VectorSpec(6),
    VectorSpec(6),
    2,
    6,
    1,
    8,
)
BASE: dict[str, Any] = {
    "images": {"camera1": FRAME, "camera2": OTHER},
    "state": STATE,
    "prompt": "pick up the cube",
    "seed": 3,
}


def chw(frame: np.ndarray) -> torch.Tensor:
    """As LeRobot's data sets give a frame: float32 [3, height, width] in [0, 1]."""
    return torch.from_numpy(frame).permute(2, 0, 1).float() / 255


def flat(frames: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"observation.images.{name}": frame for name, frame in frames.items()}
    return {
        **named,
        "observation.state": torch.from_numpy(STATE),
        "task": "pick up the cube",
        "seed": 3,
        **more,
    }


@pytest.fixture(scope="module")
def policy(smolvla_bundle: Callable[[str], Path]) -> Policy:
    return load(smolvla_bundle("smolvla-2cam"), "cpu", "fp32", "eager", threads=1)


TENSORS = {name: torch.from_numpy(frame) for name, frame in BASE["images"].items()}
FORMS: dict[str, tuple[Any, bool]] = {  # name -> observation, and whether its frames are floats
    "PIL": ({**BASE, "images": {"camera1": Image.fromarray(FRAME), "camera2": Image.fromarray(OTHER)}}, False),
    "uint8 tensors": ({**BASE, "images": TENSORS, "state": torch.from_numpy(STATE)}, False),
    "uint8 tensors, channels first": (
        {**BASE, "images": {n: t.permute(2, 0, 1) for n, t in TENSORS.items()}},
        False,
    ),
    "LeRobot's keys, uint8": (flat(BASE["images"]), False),
    "LeRobot's row": (flat({n: chw(f) for n, f in BASE["images"].items()}, timestamp=0.5, action=STATE), True),
    "LeRobot's batch of one": (
        {
            **flat({n: chw(f)[None] for n, f in BASE["images"].items()}, task=["pick up the cube"]),
            "observation.state": torch.from_numpy(STATE)[None].double().requires_grad_(),
        },
        True,
    ),
    "an Observation of PIL images": (
        Observation(images={n: Image.fromarray(f) for n, f in BASE["images"].items()}, state=list(STATE),
                    prompt="pick up the cube", seed=3),  # type: ignore[arg-type]
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_same_actions(policy: Policy, name: str) -> None:
    form, floats = FORMS[name]
    frames = {n: (chw(f).permute(1, 2, 0).numpy() if floats else f) for n, f in BASE["images"].items()}
    expected = policy.infer({**BASE, "images": frames}).actions
    np.testing.assert_array_equal(policy.infer(form).actions, expected)
    policy.check(form)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "CMYK"])
def test_modes_of_pil_images(mode: str) -> None:
    made = Image.fromarray(FRAME).convert(mode)
    np.testing.assert_array_equal(picture("images.a", made), np.asarray(made.convert("RGB")))


@pytest.mark.parametrize(
    ("shape", "first"),
    [((3, 3, 8), True), ((3, 8, 3), False), ((3, 8, 8), True), ((1, 8, 3), False)],
)
def test_channels_come_first_only_where_they_do_not_come_last(
    shape: tuple[int, int, int], first: bool
) -> None:
    frame = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    np.testing.assert_array_equal(picture("images.a", frame), frame.transpose(1, 2, 0) if first else frame)


def test_of_numbers_any_width_and_no_axis_too_many() -> None:
    assert picture("images.a", np.zeros((4, 5, 3))).dtype == np.float32
    assert picture("images.a", np.zeros((4, 5))).shape == (4, 5)  # which the processor refuses
    assert array("state", torch.Size([2, 3])).tolist() == [2, 3]
    assert observation({**BASE, "state": [0.5]}, SPEC).state.tolist() == [0.5]


def test_moments_before_are_brought_into_the_same_form() -> None:
    frames = {name: Image.fromarray(frame) for name, frame in BASE["images"].items()}
    for moment in ({"images": frames, "state": torch.from_numpy(STATE)}, Moment(frames, list(STATE))):  # type: ignore[arg-type]
        (found,) = observation({**BASE, "earlier": [moment]}, SPEC).earlier
        assert isinstance(found, Moment)
        np.testing.assert_array_equal(found.state, STATE)
        for name, frame in BASE["images"].items():
            np.testing.assert_array_equal(found.images[name], frame)
    assert observation({**BASE, "earlier": "x"}, SPEC).earlier == "x"  # which the processor refuses
    for moment, message in (
        ({"images": frames}, "earlier[0]: expected images and state of an observation step, got dict"),
        (7, "earlier[0]: expected images and state of an observation step, got int"),
        ({"images": 7, "state": STATE}, "earlier[0].images: expected a mapping of cameras, got int"),
        ({"images": {"a": "x"}, "state": STATE}, "earlier[0].images.a: expected numbers, got text"),
        ({"images": frames, "state": "x"}, "earlier[0].state: expected numbers, got text"),
    ):
        with pytest.raises(ObservationError) as error:
            observation({**BASE, "earlier": [moment]}, SPEC)
        assert str(error.value) == message


@pytest.mark.parametrize("name", ["getbands", "convert", "detach"])
def test_what_only_looks_like_a_picture_is_refused(name: str) -> None:
    with pytest.raises(ObservationError, match="images.a"):
        picture("images.a", SimpleNamespace(**{name: print}))


def test_bfloat16_is_exact(policy: Policy) -> None:
    state = torch.from_numpy(STATE).bfloat16()
    found = observation({**BASE, "state": state}, policy.spec).state
    np.testing.assert_array_equal(found, state.float().numpy())


def test_a_policy_that_reads_no_state_needs_none(policy: Policy) -> None:
    blind = replace(policy.spec, state=VectorSpec(0))
    given = {name: value for name, value in flat(BASE["images"]).items() if name != "observation.state"}
    assert observation(given, blind).state.shape == (0,)
    with pytest.raises(ObservationError, match=r"observation.state: expected a value, got nothing"):
        observation(given, policy.spec)


def test_what_is_at_hand_already_is_left_alone(policy: Policy) -> None:
    made = Observation(**BASE)
    assert observation(made, policy.spec) is made


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        (flat({"camera1": FRAME, "wrist": FRAME}), "observation.images.wrist", "unknown key"),
        (flat({"camera1": FRAME, "camer2": FRAME}), "observation.images.camer2", "did you mean"),
        (
            flat({"camera1": FRAME}, **{"observation.camera1": FRAME}),
            "observation.camera1",
            "one frame of camera1",
        ),
        (flat({"camera1": FRAME}, prompt="go"), "prompt", "one instruction"),
        (flat({"camera1": FRAME}, task=["a", "b"]), "task", "one text, got list"),
        (flat({"camera1": FRAME}, task=7), "task", "one text, got int"),
        (
            flat({"camera1": FRAME}, **{"observation.effort": STATE}),
            "observation.effort",
            "camera1, observation.images.camera2, observation.state, task, or a field of sinew.core.Observation",
        ),
        ({"observation.images.camera1": FRAME, "task": "go"}, "observation.state", "nothing"),
        ({**BASE, "images": FRAME}, "images", "a mapping of cameras"),
        ({**BASE, "images": {"camera1": Image.new("I;16", (4, 4))}}, "images.camera1", "I;16"),
        (
            {**BASE, "images": {"camera1": chw(FRAME).expand(2, -1, -1, -1), "camera2": FRAME}},
            "images.camera1",
            "got",
        ),
        ({**BASE, "images": {"camera1": chw(FRAME) * 255, "camera2": FRAME}}, "images.camera1", "got"),
        ({**BASE, "images": {"camera1": [[1], [1, 2]], "camera2": FRAME}}, "images.camera1", "numbers"),
        ({**BASE, "state": torch.zeros(2, 6)}, "state", "got"),
        ({**BASE, "taks": "go"}, "taks", "unknown key"),
        (7, "observation", "an Observation or a mapping, got int"),
        ([BASE], "observation", r"an Observation or a mapping \(infer_all takes several\), got list"),
        ({1: 2}, "1", "unknown key"),
    ],
)
def test_what_is_refused(policy: Policy, given: Any, field: str, words: str) -> None:
    with pytest.raises(ObservationError, match=words) as caught:
        policy.check(given)
    assert caught.value.field == field


KEYS = ("images", "state", "task", "observation.state", "observation.images.camera1", "seed", "x")
VALUES = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.floats(), max_size=3)


@settings(deadline=None, max_examples=60)
@generated(st.dictionaries(st.sampled_from(KEYS), VALUES | st.dictionaries(st.text(), VALUES, max_size=2)))
def test_anything_else_is_an_observation_error(policy: Policy, given: dict[str, Any]) -> None:
    try:
        policy.check(given)
    except ObservationError:
        return
    raise AssertionError("nothing of this is an observation")
