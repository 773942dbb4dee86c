"""What a bundle knows of the look of its training data: round trip, bounds, and that it is gathered right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.bundle.rename import rename_cameras, renamed
from sinew.bundle.schema import Manifest, Seen, SeenCamera, SeenState
from sinew.bundle.writer import rewrite
from sinew.checks.wiring.thumbnails import Gathering, opponent, thumbnail, unpacked
from sinew.convert.sources import embedded
from sinew.core import BundleError
from sinew.policy import load
from tests.hostile.mutate import dumps, mutate_record

KEY_SEEN = "sinew.seen"
PEN = embedded()["pen"]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Bundle(PEN).manifest


@pytest.fixture(scope="module")
def seen(manifest: Manifest) -> Seen:
    assert manifest.seen is not None
    return manifest.seen


@pytest.mark.parametrize("name", sorted(embedded()))
def test_every_embedded_policy_knows_its_cameras_and_joints(name: str) -> None:
    bundle = Bundle(embedded()[name])
    found = bundle.manifest.seen
    assert found is not None
    assert list(found.cameras) == [camera.name for camera in bundle.manifest.spec.cameras]
    assert all(camera.thumbnail and camera.farthest > 0 and camera.still for camera in found.cameras.values())
    assert found.state is not None
    assert len(found.state.mean) == bundle.manifest.spec.state.dim
    assert len(bundle.manifest.to_metadata()[KEY_SEEN]) < 2000  # type: ignore[arg-type]


def test_it_is_written_and_read_and_may_be_absent(manifest: Manifest, tmp_path: Path) -> None:
    bundle, out = Bundle(PEN), tmp_path / "out.gguf"
    rewrite(bundle, replace(manifest, seen=None), out)
    without = Bundle(out)
    assert without.manifest == replace(manifest, seen=None)
    assert KEY_SEEN not in without.file.metadata
    rewrite(without, manifest, tmp_path / "again.gguf")
    again = Bundle(tmp_path / "again.gguf")
    assert (again.manifest, again.hashes, again.verify()) == (manifest, bundle.hashes, [])


def test_what_cannot_be_is_refused_by_its_field(manifest: Manifest, seen: Seen, tmp_path: Path) -> None:
    camera, state = seen.cameras["now"], seen.state
    assert state is not None

    def with_camera(**changes: object) -> Seen:
        return replace(seen, cameras={"now": replace(camera, **changes)})  # type: ignore[arg-type]

    cases = {
        "sinew.seen.cameras: a name is not in spec.cameras": replace(seen, cameras={"side": camera}),
        r"sinew.seen.cameras.now.mean\[1\]: expected a number from 0 to 255, got 256": with_camera(
            mean=(0.0, 256.0, 0.0)
        ),
        "sinew.seen.cameras.now.thumbnail: expected base64 of 192 bytes, got 1 bytes": with_camera(
            thumbnail="AA=="
        ),
        "sinew.seen.cameras.now.thumbnail: expected base64 of 192 bytes, got 100000 char": with_camera(
            thumbnail="A" * 100_000
        ),
        "sinew.seen.cameras.now.spread: expected base64 of 192 bytes, got not base64": with_camera(
            spread="ä"
        ),
        "sinew.seen.cameras.now.spread: expected both thumbnail and spread": with_camera(spread=""),
        "sinew.seen.cameras.now.farthest": with_camera(farthest=-1.0),
        "sinew.seen.cameras.now.still": with_camera(still=seen.frames + 1),
        "sinew.seen.frames": replace(seen, frames=0),
        "sinew.seen.source": replace(seen, source="a\nb"),
        "sinew.seen.state: expected 1 numbers each": replace(seen, state=replace(state, mean=(0.0, 0.0))),
        r"sinew.seen.state.mean\[0\]: expected a finite": replace(
            seen, state=replace(state, mean=(float("inf"),))
        ),
        r"sinew.seen.state.std\[0\]: expected a finite number of at least 0": replace(
            seen, state=replace(state, std=(-1.0,))
        ),
    }
    for message, changed in cases.items():
        with pytest.raises(BundleError, match=message):
            rewrite(Bundle(PEN), replace(manifest, seen=changed), tmp_path / "no.gguf")
    text = dict(manifest.to_metadata(), **{"general.architecture": manifest.architecture})
    with pytest.raises(BundleError, match=r"sinew\.seen: unknown field 'blessing'"):
        Manifest.from_metadata({**text, KEY_SEEN: '{"source": "", "frames": 1, "blessing": 1}'})


def test_mutated_records_are_taken_or_refused_in_one_line(manifest: Manifest) -> None:
    import json
    import random

    text = dict(manifest.to_metadata(), **{"general.architecture": manifest.architecture})
    record, refused = json.loads(str(text[KEY_SEEN])), list[str]()
    for seed in range(150):
        rng = random.Random(seed)
        try:
            changed = Manifest.from_metadata({**text, KEY_SEEN: dumps(mutate_record(record, rng, 2))})
            for camera in changed.seen.cameras.values() if changed.seen else ():
                assert not camera.thumbnail or unpacked(camera.thumbnail).shape == (8, 8, 3)
        except BundleError as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert all(len(text) < 600 and "\n" not in text for text in refused)


def test_cameras_that_are_renamed_keep_what_was_seen(manifest: Manifest, seen: Seen) -> None:
    spec = rename_cameras(manifest.spec, {"front": "now"})
    assert renamed(None, manifest.spec, spec) is None
    found = renamed(seen, manifest.spec, spec)
    assert found is not None
    assert found.cameras == {"front": seen.cameras["now"], "previous": seen.cameras["previous"]}
    policy = load(PEN, engine="eager", rename={"front": "now"})
    assert policy.manifest.seen == found


def test_gathering_says_what_numpy_says() -> None:
    rng, gathering = np.random.default_rng(0), Gathering()
    frames = rng.integers(0, 256, (5, 64, 64, 3), np.uint8)
    states = rng.normal(size=(5, 3))
    for frame, state in zip(frames, states, strict=True):
        gathering.add({"a": frame, "b": frame[::2, ::4].astype(np.float32) / 255, "c": frames[0]}, state)
    found = gathering.seen("five frames")
    assert (found.source, found.frames) == ("five frames", 5)
    for channel in range(3):
        assert found.cameras["a"].mean[channel] == pytest.approx(frames[..., channel].mean(), rel=1e-4)
        assert found.cameras["a"].std[channel] == pytest.approx(frames[..., channel].std(), rel=1e-4)
    cells = frames.reshape(5, 8, 8, 8, 8, 3).mean((2, 4))
    assert np.abs(unpacked(found.cameras["a"].thumbnail) - cells.mean(0)).max() <= 1
    assert np.abs(unpacked(found.cameras["a"].spread) - opponent(cells).std(0)).max() <= 1
    assert [found.cameras[name].still for name in "abc"] == [1, 1, 5]
    assert found.state == SeenState(
        *(
            tuple(float(f"{x:.6g}") for x in row)
            for row in (states.mean(0), states.std(0), states.min(0), states.max(0))
        )
    )
    with pytest.raises(ValueError, match="at least one"):
        Gathering().seen("")


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (480, 640), (65, 1000)])
def test_thumbnails_of_any_size(shape: tuple[int, int]) -> None:
    frame = np.zeros((*shape, 3), np.uint8)
    frame[..., 0], frame[: shape[0] // 2] = 200, 40
    found = thumbnail(frame)
    assert found.shape == (8, 8, 3)
    assert np.isfinite(found).all()
    if shape[0] > 60:
        assert np.allclose(found[:4], 40)
        assert np.allclose(found[4:], [200, 0, 0], atol=20)


def test_a_camera_without_a_thumbnail_is_taken(manifest: Manifest, tmp_path: Path) -> None:
    plain = Seen("stats.json", 10, {"now": SeenCamera((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))})
    rewrite(Bundle(PEN), replace(manifest, seen=plain), tmp_path / "plain.gguf")
    assert Bundle(tmp_path / "plain.gguf").manifest.seen == plain
