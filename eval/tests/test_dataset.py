"""LeRobot data sets: what is written is what was seen, and LeRobot's own reader opens it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew.cli import main
from sinew.core import ActionChunk, Observation, SinewError
from sinew.records.recorder import Recorder, read_records
from tests.serve.lerobot_releases import CLIENTS, each_release, lerobot_folder

from sinew_eval.dataset.records import episodes
from sinew_eval.dataset.statistics import Statistics
from sinew_eval.dataset.writer import DatasetFrame, DatasetWriter

READ = """
import json, sys
import torch

_operators = torch.library.Library("torchvision", "FRAGMENT")  # PyPI's torchvision, as in tests/serve/lerobot_robot.py
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from lerobot.datasets.lerobot_dataset import LeRobotDataset
found = LeRobotDataset("nobody/nothing", root=sys.argv[1], delta_timestamps={"action": [0, 0.05]})
item = found[int(sys.argv[2])]
print(json.dumps({
    "episodes": found.num_episodes, "frames": found.num_frames, "fps": found.fps, "task": item["task"],
    "cameras": found.meta.camera_keys, "names": found.meta.features["action"]["names"],
    "state": item["observation.state"].tolist(), "action": item["action"].tolist(),
    "pixel": item["observation.images.front"][:, 1, 2].tolist(), "done": bool(item["next.done"]),
    "mean": found.meta.stats["observation.images.front"]["mean"].ravel().tolist(),
    "ends": [int(row["dataset_to_index"]) for row in found.meta.episodes],
}))
"""


def frames(count: int, seed: int = 0, task: str = "go") -> list[DatasetFrame]:
    rng = np.random.default_rng(seed)
    return [
        DatasetFrame(
            {name: rng.integers(0, 256, (4, 6, 3), np.uint8) for name in ("front", "wrist")},
            rng.normal(size=3), rng.normal(size=2), task,
        )
        for _ in range(count)
    ]  # fmt: skip


def write(out: Path) -> list[list[DatasetFrame]]:
    """Two episodes of two tasks."""
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    written = [frames(5, 0, "stack"), frames(4, 1, "unstack")]
    writer = DatasetWriter(out, 20, state=("a", "b", "c"), action=("x", "y"), robot="arm")
    for index, each in enumerate(written):
        writer.add(each, bool(index))
    assert writer.close() == {"episodes": 2, "frames": 9, "tasks": 2}
    return written


def test_columns_are_what_was_seen(tmp_path: Path) -> None:
    written = [frame for episode in write(tmp_path / "out") for frame in episode]
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(tmp_path / "out/data/chunk-000/file-000.parquet").to_pylist()
    assert [row["frame_index"] for row in rows] == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert [row["index"] for row in rows] == list(range(9))
    assert [row["next.success"] for row in rows] == [False] * 8 + [True]
    for row, frame in zip(rows, written, strict=True):
        np.testing.assert_array_equal(row["action"], frame.action.astype(np.float32))
        np.testing.assert_array_equal(row["observation.state"], frame.state.astype(np.float32))
    info = json.loads((tmp_path / "out/meta/info.json").read_text())
    assert info["features"]["action"] == {"dtype": "float32", "shape": [2], "names": ["x", "y"]}
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())
    states = np.stack([frame.state for frame in written]).astype(np.float32)
    np.testing.assert_allclose(stats["observation.state"]["std"], states.std(0), rtol=1e-6)
    np.testing.assert_allclose(stats["observation.state"]["q90"], np.quantile(states, 0.9, axis=0), rtol=1e-6)
    pixels = np.stack([frame.images["wrist"] for frame in written]).reshape(-1, 3) / 255
    found = stats["observation.images.wrist"]
    for name, expected in (("mean", pixels.mean(0)), ("std", pixels.std(0)), ("max", pixels.max(0)),
                           ("min", pixels.min(0))):  # fmt: skip
        np.testing.assert_allclose(np.ravel(found[name]), expected, atol=1e-9)
    assert np.abs(np.ravel(found["q50"]) - np.quantile(pixels, 0.5, axis=0)).max() <= 1 / 255


@pytest.mark.slow
@each_release
def test_lerobots_own_reader_opens_it(tmp_path: Path, release: str) -> None:
    written = write(tmp_path / "out")
    done = subprocess.run(
        [CLIENTS, "-c", READ, tmp_path / "out", "6"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1",
             "PYTHONPATH": str(lerobot_folder(release))},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    seen = written[1]
    assert (found["episodes"], found["frames"], found["fps"]) == (2, 9, 20)
    assert (found["task"], found["ends"], found["done"]) == ("unstack", [5, 9], False)
    assert found["cameras"] == ["observation.images.front", "observation.images.wrist"]
    np.testing.assert_array_equal(found["state"], seen[1].state.astype(np.float32))
    np.testing.assert_array_equal(found["action"], [seen[i].action.astype(np.float32) for i in (1, 2)])
    np.testing.assert_allclose(found["pixel"], seen[1].images["front"][1, 2] / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": np.zeros(4)}, "observation.state: expected 3 finite numbers"),
        ({"action": np.array([np.nan, 0])}, "action: expected 2 finite numbers"),
        ({"images": {"front": np.zeros((4, 6, 3), np.uint8)}}, "images.front: expected uint8 [4, 6, 3]"),
        (
            {"images": dict.fromkeys(("front", "wrist"), np.zeros((4, 5, 3), np.uint8))},
            "images.front: expected",
        ),
    ],
)
def test_frames_that_differ_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    writer = DatasetWriter(tmp_path / "out", 20)
    good = frames(2)
    bad = DatasetFrame(
        **{**{name: getattr(good[0], name) for name in ("images", "state", "action", "task")}, **change}
    )
    with pytest.raises(SinewError) as error:
        writer.add([*good, bad])
    assert said in str(error.value)


def test_what_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    with pytest.raises(SinewError, match="whole number of frames"):
        DatasetWriter(tmp_path / "a", 12.5)
    with pytest.raises(SinewError, match="the folder already exists"):
        DatasetWriter(tmp_path, 20)
    writer = DatasetWriter(tmp_path / "b", 20)
    with pytest.raises(SinewError, match="no episode"):
        writer.close()


def test_a_failure_leaves_whole_episodes_or_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    for complete in (0, 1):
        with contextlib.suppress(EOFError), DatasetWriter(tmp_path / str(complete), 20) as writer:
            for _ in range(complete):
                writer.add(frames(2))
            raise EOFError
    assert not (tmp_path / "0").exists()
    assert json.loads((tmp_path / "1" / "meta" / "info.json").read_text())["total_episodes"] == 1


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    whole, parts = Statistics(), [Statistics(), Statistics()]
    for index, frame in enumerate(frames(6)):
        for each in (whole, parts[index % 2]):
            each.picture("front", frame.images["front"])
            each.vectors("state", frame.state[None])
    parts[0].merge(parts[1])
    found, expected = parts[0].table(), whole.table()
    assert found["front"] == expected["front"]
    np.testing.assert_allclose(found["state"]["mean"], expected["state"]["mean"])


# ----------------------------------------------------------------------------- records


def record(folder: Path, times: list[float], prompt: str = "go", session: str = "s") -> None:
    recorder = Recorder(folder)
    for index, when in enumerate(times):
        frame = np.full((4, 6, 3), index, np.uint8)
        seen = Observation(images={"front": frame}, state=np.full(3, index), prompt=prompt, seed=0, time=when)
        recorder.put("native", session, seen, ActionChunk(np.full((4, 2), index, np.float32), seed=0))
    recorder.close()


def test_records_become_episodes_of_one_rate(tmp_path: Path) -> None:
    record(tmp_path, [10.0, 10.1, 10.2, 20.0, 20.1, 20.21])
    found = list(episodes(read_records(tmp_path), 10))
    assert [[int(frame.action[0]) for frame in each] for each in found] == [[0, 1, 2], [3, 4, 5]]
    assert found[0][1].images["front"].max() == 1
    with pytest.raises(SinewError, match="came 10 times a second, got 15"):
        list(episodes(read_records(tmp_path), 15))
    with pytest.raises(SinewError, match=r"came 10 times a second, got 30\. .*`sinew run --frames FOLDER`"):
        list(episodes(read_records(tmp_path), 30))  # no two follow each other at that rate
    with pytest.raises(
        SinewError, match="--corrections: expected control steps in which a human drove, got none"
    ):
        list(episodes(read_records(tmp_path), 10, corrections=True))


def test_one_episode_is_in_memory(tmp_path: Path) -> None:
    """Ten requests a second for an hour are more than any machine has; the episodes were all held at once."""
    frame = np.zeros((600, 600, 3), np.uint8)
    recorder = Recorder(tmp_path)
    for number in range(24):
        seen = Observation(
            images={"front": frame}, state=np.zeros(2), seed=0, time=number // 3 * 9 + number % 3 / 10
        )
        recorder.put("native", "s", seen, ActionChunk(np.zeros((4, 2), np.float32), seed=0))
    recorder.close()
    tracemalloc.start()
    assert sum(1 for _ in episodes(read_records(tmp_path), 10)) == 8
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        peak < 12 * frame.nbytes
    )  # of 24: an episode has 3, and the one before is still in its reader's hands


def test_the_verb_takes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    record(tmp_path / "records", [10.0, 10.1, 10.2])
    assert (
        main(
            ["recording", "dataset", str(tmp_path / "records"), str(tmp_path / "out"), "--hz", "10", "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["frames"] == 3
    assert "next.success" not in json.loads((tmp_path / "out/meta/info.json").read_text())["features"]
    assert (
        main(
            ["recording", "dataset", str(tmp_path / "records"), str(tmp_path / "x"), "--env", "sinew/Pen-v0"]
        )
        == 1
    )
    capsys.readouterr()
    assert main(["recording", "dataset", str(tmp_path / "no"), str(tmp_path / "x"), "--hz", "10"]) == 1
    assert (
        f"apply only to a recording, but {tmp_path / 'no'} contains no records"
        in capsys.readouterr().err.replace("\n", " ")
    )


def pixels(*shape: int, kind: Any = np.uint8, value: float = 0) -> np.ndarray:
    return np.full(shape, value, kind)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "images/front",
            pixels(0, 0, 3),
            "images/front: expected uint8 or float [height, width, 3], sides from 1 to 8192, got uint8 [0, 0, 3]",
        ),
        (
            "images/front",
            pixels(4, 6),
            "images/front: expected uint8 or float [height, width, 3], sides from 1 to 8192, got uint8 [4, 6]",
        ),
        (
            "images/front",
            pixels(4, 6, 4),
            "images/front: expected uint8 or float [height, width, 3], sides from 1 to 8192, got uint8 [4, 6, 4]",
        ),
        (
            "images/front",
            pixels(2, 4, 6, 3),
            "images/front: expected uint8 or float [height, width, 3], sides from 1 to 8192, got uint8 [2, 4, 6, 3]",
        ),
        (
            "images/front",
            pixels(4, 6, 3, kind=np.float32, value=200),
            "floats in [0, 1], got float32 from 200 to 200",
        ),
        (
            "images/front",
            pixels(4, 6, 3, kind=np.float32, value=np.nan),
            "floats in [0, 1], got float32 from nan",
        ),
        (
            "images/front",
            pixels(4, 6, 3, kind=np.int64),
            "images/front: expected uint8 or float [height, width, 3], sides from 1 to 8192, got int64",
        ),
        (
            "images/front",
            pixels(4, 6, 3, kind="U3"),
            "images/front: expected uint8 or float [height, width, 3], sides from 1 to 8192, got <U3",
        ),
        ("images/../../x", pixels(4, 6, 3), "expected printable camera names without slashes, got '../../x'"),
        ("images/..", pixels(4, 6, 3), "expected printable camera names without slashes, got '..'"),
        ("images/a\x1b", pixels(4, 6, 3), r"expected printable camera names without slashes, got 'a\x1b'"),
        ("state", np.zeros(0), "observation.state: expected one number or more, got none"),
        ("state", np.array(["a"]), "state: expected at most 8192 numbers, got <U1"),
        (
            "state",
            np.zeros(3, np.complex64),
            "state: expected a dtype of numbers, booleans or text, got '<c8'",
        ),
        ("state", np.full(3, 1e300), "observation.state: expected 3 finite numbers"),
        (
            "actions",
            np.zeros((0, 2)),
            "actions: expected finite numbers [H, D], H at most 8192, got float64 [0, 2]",
        ),
        ("actions", np.zeros(()), "actions: expected finite numbers [H, D], H at most 8192, got float64 []"),
        ("actions", np.array([["a"]]), "actions: expected at most 1048576 numbers, got <U1 [1, 1]"),
        ("time", "noon", "Expected `float | null`, got `str` - at `$.time`"),
        ("time", [1], "Expected `float | null`, got `array` - at `$.time`"),
        ("time", 1e300, "time: expected seconds, got 1e+300"),
        pytest.param("time", 10**400, "Number out of range - at `$.time`", id="digits"),
        ("prompt", "\ud800", "surrogates not allowed"),
    ],
)
def test_records_from_elsewhere_are_told_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any, said: str
) -> None:
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    record(tmp_path / "records", [10.0, 10.1, 10.2])
    for path in (tmp_path / "records").glob("*.npz"):
        with np.load(path) as file:
            arrays = dict(file)
        meta = json.loads(str(arrays.pop("meta")))
        if isinstance(value, np.ndarray):
            arrays = {
                key: each for key, each in arrays.items() if key.partition("/")[0] != name.partition("/")[0]
            }
            arrays[name] = value
        else:
            meta[name] = value
        np.savez(path, **arrays, meta=np.array(json.dumps(meta)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            main(["recording", "dataset", str(tmp_path / "records"), str(tmp_path / "out"), "--hz", "10"])
            == 1
        )
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert "fault of this program" not in told
    assert [each.name for each in tmp_path.iterdir()] == ["records"]


WRITER = """
import sys
from pathlib import Path
from sinew_eval.dataset.writer import DatasetWriter
from eval.tests.test_dataset import frames
with DatasetWriter(Path(sys.argv[1]), 20) as writer:
    for _ in range(int(sys.argv[2])):
        writer.add(frames(2))
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("complete", [0, 2])
def test_a_signal_leaves_whole_episodes_or_nothing(tmp_path: Path, complete: int) -> None:
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    out = tmp_path / "out"
    words = ["env", "--default-signal=TERM", sys.executable, "-c", WRITER, out, str(complete)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert not out.exists()
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert [each.name for each in tmp_path.iterdir()] == (["out"] if complete else [])
    if complete:
        assert json.loads((out / "meta" / "info.json").read_text())["total_episodes"] == complete


def test_what_is_there_stays(tmp_path: Path) -> None:
    """Also a link to nowhere, and what came while episodes were played."""
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SinewError, match="the folder already exists"):
        DatasetWriter(tmp_path / "link", 20)
    with DatasetWriter(tmp_path / "out", 20) as writer:
        writer.add(frames(2))
        (tmp_path / "out").mkdir()
        with pytest.raises(SinewError, match="the folder already exists"):
            writer.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "out"]
    assert not list((tmp_path / "out").iterdir())


def test_a_simulator_that_is_not_installed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINEW_SIMS", str(tmp_path))
    assert main(["recording", "dataset", "expert", str(tmp_path / "out"), "--env", "libero_object/0"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "libero is not installed; run `sinew eval --setup libero`" in told
    assert not (tmp_path / "out").exists()


def test_the_verb_plays_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The scripted expert of the pen: what the environment was told is what is written."""
    pytest.importorskip("pyarrow", reason="the extra `dataset` is not installed")
    out = tmp_path / "out"
    words = ("expert", str(out), "--env", "sinew/Pen-v0", "--episodes", "2", "--replan", "4", "--json")
    assert main(["recording", "dataset", *words]) == 0
    found = SimpleNamespace(**json.loads(capsys.readouterr().out))
    assert (found.episodes, found.played) == (2, 2)
    info = json.loads((out / "meta/info.json").read_text())
    assert info["fps"] == 60
    assert info["total_frames"] == found.frames > 10
