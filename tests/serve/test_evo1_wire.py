"""Evo-1's WebSocket: clients as its repository writes them, over a real socket; hostile JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinew.core import ObservationError, RequestError, SinewError
from sinew.policy import load
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.wires import evo1, parse
from tests.golden import Golden
from tests.hostile.decoders import mutate, targets
from tests.models.test_evo1_parity import observation
from tests.serve.puppet import SPEC, WAIT_S, desk

websockets = pytest.importorskip("websockets", reason="the client side needs websockets")
SEED = 7
PICTURE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def body(**changes: Any) -> dict[str, Any]:
    given = {
        "image": [
            PICTURE.tolist(),
            np.zeros((4, 5, 3), np.uint8).tolist(),
            np.zeros((2, 2, 3), np.uint8).tolist(),
        ],
        "image_mask": [1, 0, 0],
        "state": [0.25, 0.5],
        "action_mask": [[1, 1] + [0] * 22],
        "prompt": "go",
    }
    return {**given, **changes}


def read(**changes: Any):
    return evo1.observation(evo1.read(json.dumps(body(**changes)).encode()), SPEC)


async def chunks(address: str, *messages: str) -> list[Any]:
    """What the repository's clients do: one connection, text frames of JSON, lists of rows."""
    async with asyncio.timeout(WAIT_S):
        async with websockets.connect(address, max_size=10_000_000) as ws:
            found = []
            for message in messages:
                await ws.send(message)
                found.append(json.loads(await ws.recv()))
            return found


def test_a_client_of_the_repository_gets_the_policys_actions(golden, evo1_bundle, monkeypatch):
    """Two views and a black one that is masked; frames in BGR; a mask of 24 numbers; rows of 24."""
    monkeypatch.setattr(
        "sinew.processing.processor.secrets.randbits", lambda _: SEED
    )  # the protocol has no seed
    policy, g = load(evo1_bundle("evo1"), dtype="float32", engine="eager"), Golden(golden / "evo1")
    seen = observation(g, noise=None, seed=SEED)
    frames = [frame[..., ::-1].tolist() for frame in seen.images.values()]
    message = {
        "image": [*frames, np.zeros((448, 448, 3), np.uint8).tolist()],
        "image_mask": [1, 1, 0],
        "state": g.numpy("state_raw").astype(float).tolist(),
        "action_mask": [1] * 7 + [0] * 17,
        "prompt": g.metadata["task"],
    }
    sizes = {
        "padded_state_dim": policy.manifest.processing.padded_state_dim,
        "padded_action_dim": policy.manifest.processing.padded_action_dim,
    }
    with desk(("evo1",), policy=policy, **sizes) as server:
        (rows,) = asyncio.run(chunks(server.evo1, json.dumps(message)))
    assert np.asarray(rows).shape == (14, 24)
    np.testing.assert_array_equal(np.asarray(rows, np.float32)[:, :7], policy.infer(seen).actions)
    assert not np.asarray(rows)[:, 7:].any()


def test_errors_end_the_connection_with_a_reason():
    """As upstream's handler: a frame of words would be taken for actions."""
    with desk(("evo1", "web")) as server:
        first, second = asyncio.run(
            chunks(server.evo1, json.dumps(body()), json.dumps(body(state=[1.5, 0.0])))
        )
        assert first == [[0.25, 0.25, *[0.0] * 22]] * 3
        assert second[0][:2] == [1.5, 1.5]
        for message, reason in (
            ("{", "not a JSON observation"),
            (json.dumps(body(state=[0.0] * 24)), r"state: expected 2 numbers, got 24; .* --set state_dim=24"),
            (b"\x80", "expected a text frame"),
        ):
            with pytest.raises(websockets.exceptions.ConnectionClosedError, match=reason) as caught:
                asyncio.run(chunks(server.evo1, message))
            assert caught.value.rcvd.code == 1011
        assert asyncio.run(chunks(server.evo1, json.dumps(body()))) == [first]


def test_colours_are_swapped_and_masked_views_are_left_out():
    found = read()
    assert list(found.images) == ["front"]
    np.testing.assert_array_equal(found.images["front"], PICTURE[..., ::-1])
    assert found.state.tolist() == [0.25, 0.5]
    two = replace(SPEC, cameras=(SPEC.cameras[0], replace(SPEC.cameras[0], name="wrist")))
    message = evo1.read(
        json.dumps(body(image_mask=[True, 1, 0], image=[PICTURE.tolist()] * 2 + [[[[0, 0, 0]]]])).encode()
    )
    assert list(evo1.observation(message, two).images) == ["front", "wrist"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image_mask": [0, 1, 0]}, "image_mask"),
        ({"image_mask": [0, 0, 0]}, "image_mask"),
        ({"image_mask": [1, 1, 0]}, "image_mask"),  # more than the policy's cameras
        ({"image_mask": [1, 0]}, "image_mask"),
        ({"image_mask": [1, 0, 2]}, "image_mask"),
        ({"image_mask": {}}, "image_mask"),
        ({"image": [PICTURE.tolist()] * 3}, r"image\[1\]"),  # masked and not black
        ({"image": [[[[1, 2]]]], "image_mask": [1]}, r"image\[0\]"),
        ({"image": [[[[1, 2, 3], [1, 2, 3]], [[1, 2, 3]]]], "image_mask": [1]}, r"image\[0\]"),
        ({"image": [[[[1, 2, 3.0]]]], "image_mask": [1]}, r"image\[0\]"),
        ({"image": [[[[1, 2, -3]]]], "image_mask": [1]}, r"image\[0\]"),
        ({"image": [[[[1, 2, 256]]]], "image_mask": [1]}, "image"),
        ({"image": [[[[1, 2, 1 << 70]]]], "image_mask": [1]}, "image"),
        ({"image": [[[[1, 2, 3]]], 4], "image_mask": [1]}, "image"),
        ({"image": [], "image_mask": []}, "image_mask"),
        ({"image": "x"}, "image"),
        ({"image": [[[[0, 0, 0]]]] * 17, "image_mask": [1] * 17}, "image"),
        ({"action_mask": [1] * 3 + [0] * 21}, "action_mask"),
        ({"action_mask": [0, 1]}, "action_mask"),
        ({"action_mask": "all"}, "action_mask"),
        ({"state": ["a"]}, "state"),
        ({"state": [[0.0, 1.0], [0.0, 1.0]]}, "state"),
        ({"state": [0.0] * 40_000}, "state"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_fields_that_do_not_fit_are_named(changes, field):
    with pytest.raises(ObservationError, match=f"^{field}: expected "):
        read(**changes)


def test_a_field_that_is_not_known_is_refused_by_name():
    with pytest.raises(RequestError, match="unknown field `advantage`"):
        read(advantage="positive")


def test_other_statistics_than_the_bundles_are_refused():
    message = evo1.read(json.dumps(body(arm_key="aloha_joint", dataset_key="robotwin_a")).encode())
    evo1.observation(message, SPEC)  # a bundle without a choice
    evo1.observation(message, replace(SPEC, embodiment="aloha_joint/robotwin_a"))
    evo1.observation(message, replace(SPEC, embodiment="aloha_joint"))
    for embodiment, field in (("aloha_joint/robotwin_b", "dataset_key"), ("franka/robotwin_a", "arm_key")):
        with pytest.raises(ObservationError, match=f"^{field}: expected '"):
            evo1.observation(message, replace(SPEC, embodiment=embodiment))


def test_pictures_are_counted_before_they_are_made():
    text = json.dumps([np.zeros((9, 9, 3), np.uint8).tolist()] * 3).encode()
    with pytest.raises(ObservationError):
        list(evo1._pictures(text, PixelBudget(200)))
    assert len(list(evo1._pictures(text, PixelBudget(243)))) == 3


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_fuzz_mutations_of_a_good_message(data):
    """SinewError or an observation whose frames are those that the brackets say."""
    good, decode = targets()["evo1"]
    changed = mutate(random.Random(data.draw(st.integers(0, 1 << 40))), good)
    try:
        found = decode(changed)
    except SinewError:
        return
    assert all(frame.dtype == np.uint8 and frame.shape[2] == 3 for frame in found.images.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(body())), json_values)
def test_fuzz_any_json_in_a_field(name, value):
    with contextlib.suppress(SinewError):
        read(**{name: value})


def test_two_websockets_share_no_port():
    assert parse(["evo1"]) == {"evo1": 9000}
    from sinew.serve.transport.listen import Listen
    from sinew.serve.wires import open_wires

    with pytest.raises(SinewError, match="openpi already uses port 9000"):
        open_wires({"openpi": 9000, "evo1": 9000}, Listen())
