"""A served GR00T bundle answers GR00T's own client under the checkpoint's own keys."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sinew.core import Moment, Observation
from sinew.policy import load
from tests.convert.test_groot import ask_for_history, converted, copy, observation
from tests.golden import Golden
from tests.serve import groot_client
from tests.serve.test_server import serving


@pytest.mark.slow
def test_a_client_sends_the_frames_that_are_announced(golden, tmp_path):
    """N1.7 of one camera at [-20, 0], which reads only the newest state."""
    home, g = golden / "groot-n17", Golden(golden / "groot-n17")
    source, bundle = copy(home / "checkpoint", tmp_path), tmp_path / "out.gguf"
    ask_for_history(source, "video", [-20, 0], modality_keys=[g.cameras[0]])
    converted(home, source, tmp_path)
    given = observation(g)
    old, new = (given.images[camera] for camera in g.cameras)
    wanted = load(bundle).infer(
        Observation({g.cameras[0]: new}, given.state, prompt=given.prompt, seed=7,
                    earlier=(Moment({g.cameras[0]: old}, given.state),))
    )  # fmt: skip
    parts = json.loads(g.metadata["state_keys"])
    ends = np.cumsum([size for _, size in parts])
    values = zip((key for key, _ in parts), np.split(np.float32(given.state), ends[:-1]), strict=True)
    with serving(tmp_path, bundle, "--wire", "groot:0", "--threads", 1) as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        client = groot_client.PolicyClient(host, int(port), dialect="n1.7")
        config = client.get_modality_config()
        assert [config[key].delta_indices for key in ("video", "state")] == [[-20, 0], [0]]
        asked = {
            "video": {g.cameras[0]: np.stack([old, new])[None]},
            "state": {key: value[None, None] for key, value in values},
            "language": {config["language"].modality_keys[0]: [[given.prompt]]},
        }
        actions, _ = client.get_action(asked, {"seed": 7})
        client.close()
    found = np.concatenate([actions[key][0] for key in config["action"].modality_keys], axis=-1)
    np.testing.assert_allclose(found, wanted.actions, atol=1e-6, rtol=0)


@pytest.mark.proves(wire="groot")
@pytest.mark.parametrize(("name", "dialect"), [("groot-n17", "n1.7"), ("groot-n16", "n1.6")])
def test_the_groot_wire_has_the_checkpoints_keys(name, dialect, golden, groot_bundle, tmp_path):
    g, bundle = Golden(golden / name), groot_bundle(name)
    given = observation(g)
    parts = json.loads(g.metadata["state_keys"])
    ends = np.cumsum([size for _, size in parts])
    values = dict(zip((key for key, _ in parts), np.split(np.float32(given.state), ends[:-1]), strict=True))
    with serving(tmp_path, bundle, "--wire", "groot:0", "--threads", 1) as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        client = groot_client.PolicyClient(host, int(port), dialect=dialect)
        config = client.get_modality_config()
        asked = {
            "video": {key: given.images[key][None, None] for key in config["video"].modality_keys},
            "state": {key: values[key][None, None] for key in config["state"].modality_keys},
            "language": {config["language"].modality_keys[0]: [[given.prompt]]},
        }
        actions, info = client.get_action(asked, {"seed": 7})
        assert config["state"].modality_keys == [key for key, _ in parts]
        assert config["action"].delta_indices == list(range(10))
        client.close()
    assert info["seed"] == [7]
    keys = json.loads(g.metadata["action_keys"])
    assert list(actions) == [key for key, _ in keys]
    found = np.concatenate([actions[key][0] for key, _ in keys], axis=-1)
    policy = load(bundle)
    expected = policy.infer(
        {"images": given.images, "state": given.state, "prompt": given.prompt, "seed": 7}
    ).actions
    assert (
        "a step compose_pose: Sinew does not convert poses" in policy.describe()["unguided"]
    )  # so `sinew run` refuses --handover rtc
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
