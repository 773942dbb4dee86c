"""The film: the task as MuJoCo draws it, and what is beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sinew.core import SinewError

from sinew_eval.demo.film import SIDE, Shot, compose, write_film
from sinew_eval.sim import film
from sinew_eval.sim.blocks import BlocksEnv


def pose() -> np.ndarray:
    env = BlocksEnv()
    env.reset(seed=5004)
    return env.pose()


def shot(**changes: object) -> Shot:
    images = {name: np.full((64, 64, 3), 90, np.uint8) for name in ("front", "wrist")}
    actions = np.random.default_rng(0).uniform(-1, 1, (9, 4)).astype(np.float32)
    return Shot(**{"pose": pose(), "images": images, "prompt": "go", "actions": actions, "latency_ms": (4.0, 6.0),
                   "step": 8, **changes})  # fmt: skip


def test_the_film_shows_the_task_that_is_played() -> None:
    """The model with lights and colours has the same joints, so a pose means the same."""
    import mujoco  # after sinew_eval.sim.blocks, which has chosen no OpenGL for this process

    drawn, played = mujoco.MjModel.from_xml_string(film.model_xml()), BlocksEnv()._model
    assert drawn.nq == played.nq
    names = [[model.joint(index).name for index in range(model.njnt)] for model in (drawn, played)]
    assert names[0] == names[1]


def test_a_picture_has_the_scene_and_what_belongs_to_it() -> None:
    scene = np.zeros((720, 960, 3), np.uint8)
    plain, ended = compose(scene, shot()), compose(scene, shot(result="success after 9 steps", success=True))
    assert plain.size == (960 + SIDE, 720)
    side = np.asarray(plain)[:, 960:]
    assert len(np.unique(side.reshape(-1, 3), axis=0)) > 20
    assert np.any(np.asarray(plain)[600:] != np.asarray(ended)[600:])
    assert compose(scene, shot(latency_ms=())).size == plain.size


@pytest.mark.slow
def test_mujoco_draws_where_there_is_opengl(tmp_path: Path) -> None:
    try:
        film.backend()
    except SinewError as error:
        pytest.skip(str(error))
    seen = list(film.frames(np.stack([pose(), pose()]), 96, 72))
    assert [frame.shape for frame in seen] == [(72, 96, 3)] * 2
    np.testing.assert_array_equal(seen[0], seen[1])
    assert seen[0].std() > 10
    write_film([shot(), shot(result="success", success=True)], tmp_path / "film.webp", 20)
    assert (tmp_path / "film.webp").read_bytes()[8:12] == b"WEBP"


@pytest.mark.slow
def test_without_opengl_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film, "BACKENDS", ("nothing",))
    film.backend.cache_clear()
    with pytest.raises(SinewError, match=r"a film needs OpenGL without a display.*nothing: "):
        film.backend()
    film.backend.cache_clear()
