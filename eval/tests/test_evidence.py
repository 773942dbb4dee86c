"""What a run leaves: its page and record, the same episodes played again from them, and leaderboards of runs."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
import shutil
import sys
import tempfile
from copy import deepcopy
from dataclasses import replace
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the pen needs the sim extra")

from PIL import Image
from sinew.bundle import Bundle
from sinew.cli import main
from sinew.core import SinewError, statistics
from sinew.core.registry import architectures, backbone, families

from sinew_eval.episodes.runner import Episode, digest_of
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.episodes.watched import read_moments, watch, write_moments
from sinew_eval.evidence import films, leaderboard, page, repeat, run_page
from sinew_eval.evidence.animation import compose
from sinew_eval.report import stats

pytestmark = pytest.mark.usefixtures("rounded_by_shape", "forked")

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
needs_pen = pytest.mark.skipif(not PEN.exists(), reason="no trained policy at sinew/assets/pen.gguf")
QUICK = ("--env", "sinew/Pen-v0", "--solver-steps", 2, "--workers", 1)


class Elements(HTMLParser):
    """Every element of a page, with its attributes, and every text."""

    def __init__(self, markup: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants over three seeds, with films."""
    pytest.importorskip("matplotlib", reason="a sweep's figure needs matplotlib")
    folder = tmp_path_factory.mktemp("run")
    arguments = [str(PEN), *QUICK, "--episodes", 3, "--out", folder, "--films", 1]
    assert main(["eval", *map(str, arguments), "--sweep", "latency=0,100ms", "--handover", "naive"]) == 0
    return folder


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def again(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Return the exit status of a repetition, its result and everything that it said."""
    capsys.readouterr()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "result.json"
        code = main(["eval", *map(str, arguments), "--json", str(record)])
        found = capsys.readouterr()
        result = json.loads(record.read_text()) if record.exists() else {}
    return code, result, found.out + found.err


# ----------------------------------------------------------------------------- the page


@needs_pen
def test_a_page_holds_everything_that_it_shows(run: Path) -> None:
    markup = (run / "report.html").read_text()
    record = record_of(run)
    assert json.loads(page.record_in(markup) or "") == record
    elements = Elements(markup).found
    for tag, attributes in elements:
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        assert not [name for name in attributes if name.startswith("on")], attributes
        for name in ("src", "srcset", "href"):
            assert (attributes.get(name) or "data:").startswith(
                "data:image/webp;base64,"
            ) or name not in attributes
    assert [a for tag, a in elements if tag == "script"] == [{"type": "application/json", "id": page.RECORD}]
    assert any(a.get("http-equiv") == "Content-Security-Policy" for _, a in elements)
    assert "url(" not in markup.split("</style>")[0]
    assert "prefers-color-scheme: dark" in markup
    shown = " ".join(Elements(markup).texts)
    assert hashlib.sha256(PEN.read_bytes()).hexdigest() in shown
    for text in (
        record["command"],
        "sinew eval pen.gguf --repeat report.html",
        record["versions"]["python"],
        record["hardware"],
    ):
        assert text in shown


@needs_pen
def test_films_are_of_the_episodes_of_the_run(run: Path) -> None:
    """Played once more, command for command; a pair for each seed, and a still for those who want no motion."""
    markup = (run / "report.html").read_text()
    pictures = [a for tag, a in Elements(markup).found if tag == "img"]
    record = record_of(run)
    seeds = films.chosen([[_episode(**each) for each in trials] for trials in record["outcomes"]], 1)
    assert len(pictures) == 2 * len(seeds) > 0
    assert "every command was the same as in the run" in markup
    for attributes in pictures:
        data = base64.b64decode((attributes["src"] or "").partition("base64,")[2])
        film = Image.open(io.BytesIO(data))
        assert film.n_frames > 5
        first, last = (
            np.asarray(film.convert("RGB"), int)
            for index in (0, film.n_frames - 1)
            if film.seek(index) is None
        )
        assert np.abs(first - last).max() > 50
        seed, said = re.search(
            r"seed (\d+), .*: (success|no success) after", attributes["alt"] or ""
        ).groups()
        outcomes = {each["seed"]: each["success"] for trials in record["outcomes"] for each in trials}
        assert int(seed) in outcomes
        assert said
    stills = [a["srcset"] for tag, a in Elements(markup).found if tag == "source"]
    assert len(stills) == len(pictures)
    assert all(
        Image.open(io.BytesIO(base64.b64decode(s.partition("base64,")[2]))).n_frames == 1 for s in stills
    )


def _episode(**values: Any) -> Episode:
    return Episode(
        seed=values["seed"], task="", success=values["success"], steps=9, chunks=1, executed=9, held=0, misses=0,
        delays=[], latency_ms=[], digest=values.get("digest", ""),
    )  # fmt: skip


def test_seeds_about_which_variants_disagree_are_filmed_first() -> None:
    first = [_episode(seed=seed, success=seed >= 3) for seed in range(8)]  # 0, 1, 2 fail
    second = [_episode(seed=seed, success=seed not in (2, 6)) for seed in range(8)]
    assert films.chosen([first], 2) == [0, 1, 3, 4]
    assert films.chosen([first, second], 2) == [0, 1, 6, 3]
    assert films.chosen(
        [first, [replace(each, success=seed == 2) for seed, each in enumerate(first)]], 1
    ) == [2, 3]
    assert films.chosen([first], 0) == []


@needs_pen
def test_a_film_that_does_not_repeat_the_run_says_so(run: Path) -> None:
    record = record_of(run)
    film = films.Film(0, _episode(seed=5000, success=False), False, b"RIFF", b"RIFF")
    markup = run_page.write_page(record, [film])
    assert "1 of 1 films differ from the run in the bits of a command" in markup
    assert "different from the run" in markup


@needs_pen
def test_nothing_that_a_run_names_becomes_markup(run: Path) -> None:
    """An environment, a task or a server may have any name."""
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'<!--"
    record = record_of(run)
    record["task"]["env"] = record["command"] = record["hardware"] = bad
    for entry in record["variants"]:
        entry["label"] = entry["policy"]["id"] = entry["bundle"]["file"] = entry["dtype"] = bad
        entry["by_task"] = {
            bad: entry["by_task"][next(iter(entry["by_task"]))],
            "b": next(iter(entry["by_task"].values())),
        }
    for each in record["comparisons"]:
        each["variant"] = bad
    for trials in record["outcomes"]:
        for each in trials:
            each["task"] = bad
    film = films.Film(0, replace(_episode(seed=1, success=True), task=bad), True, b"x", b"x")
    markup = run_page.write_page(record, [film])
    found = Elements(markup).found
    assert [a for tag, a in found if tag == "script"] == [{"type": "application/json", "id": page.RECORD}]
    assert not [
        a
        for tag, a in found
        if any(name.startswith("on") for name in a) or (tag == "img" and a["src"] == "x")
    ]
    assert json.loads(page.record_in(markup) or "") == record


def test_an_episode_of_another_interpreter_is_filmed(tmp_path: Path) -> None:
    """As the simulators of suites are; its moments come back as they were."""
    words = ["eval", "expert", "--env", "sinew/Pen-v0", "--interpreter", sys.executable, "--episodes", "2"]
    assert main([*words, "--workers", "1", "--replan", "4", "--out", str(tmp_path), "--films", "1"]) == 0
    markup = (tmp_path / "report.html").read_text()
    (film,) = [a["src"] for tag, a in Elements(markup).found if tag == "img"]
    assert "every command was the same as in the run" in markup
    versions = json.loads(page.record_in(markup) or "")["versions"]  # of what plays, not of what asks
    assert versions["simulator mujoco"] == metadata.version("mujoco")
    assert "simulator python" in versions
    assert not {"mujoco", "gymnasium"} & versions.keys()
    assert Image.open(io.BytesIO(base64.b64decode(film.partition("base64,")[2]))).n_frames > 5
    ((_, episode, moments),) = watch(Task("sinew/Pen-v0"), [Variant("expert", 4)], [(0, 5000)], 10)
    assert [each.step for each in moments] == [*range(0, episode.steps, 6), episode.steps]
    write_moments(tmp_path / "moments.npz", moments)
    for one, other in zip(moments, read_moments(tmp_path / "moments.npz"), strict=True):
        for name in ("step", "state", "action", "prompt", "scene", "images"):
            np.testing.assert_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("shade", [0, 255])
def test_a_camera_is_named_on_dark_frames_and_bright_ones(shade: int) -> None:
    """A stroke of paper around ink: one of them differs from whatever lies under them."""
    frame = np.full((8, 8, 3), shade, np.uint8)
    seen = np.asarray(compose(np.zeros((128, 128, 3), np.uint8), {"wrist": frame}, "go", "step 1"))[:64, 128:]
    unlike = np.abs(seen.astype(int) - shade).min(axis=-1) > 180
    assert unlike.sum() > 20


def test_films_need_a_page() -> None:
    assert main(["eval", "expert", "--films", "2"]) == 1


@needs_pen
def test_what_cannot_be_filmed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["eval", "expert", "--env", "sinew/Pen-v0", "--episodes", "1", "--workers", "1", "--realtime",
                 "--out", str(tmp_path), "--films", "1"])  # fmt: skip
    assert code == 0
    assert "no films were made: --films needs chunks in simulated time" in capsys.readouterr().err
    assert "No films: films need chunks in simulated time." in (tmp_path / "report.html").read_text()


# ----------------------------------------------------------------------------- played again


@needs_pen
@pytest.mark.parametrize("name", ["report.html", "report.json"])
def test_another_laboratory_plays_the_same_episodes(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record alone and a bundle that lies elsewhere under another name."""
    shutil.copy(run / name, tmp_path)
    shutil.copy(PEN, tmp_path / "theirs.gguf")
    assert str(tmp_path.parent) not in (run / name).read_text()  # no folder of this machine
    target = [tmp_path / "theirs.gguf"] if name == "report.json" else []
    code, result, said = again(
        capsys, *target, "--repeat", tmp_path / name, "--workers", 1, "--out", tmp_path / "out"
    )
    assert code == 0, said
    shown = " ".join(Elements((tmp_path / "out" / "report.html").read_text()).texts)
    assert f"Played again: {name}" in shown
    assert "equal: every command of every episode" in shown
    assert repeat.read(tmp_path / "out" / "report.html").seeds == (5000, 5001, 5002)  # a link of a chain
    assert "equal: every command of every episode" in said
    assert result["repeat"]["passed"]
    for each in result["repeat"]["variants"]:
        assert each["equal_commands"] == each["equal_outcomes"] == each["episodes"] == 3
        assert each["there"] == each["here"]
    assert result["repeat"]["conditions"] == {}
    if name == "report.json":
        assert {each["variant"]["target"] for each in result["variants"]} == {"theirs.gguf"}
    first, second = record_of(run)["variants"], result["variants"]
    assert [each["wins"] for each in first] == [each["wins"] for each in second]


@pytest.mark.slow
@needs_pen
def test_what_differs_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(run)
    other, changed = deepcopy(record), deepcopy(record)
    other["versions"]["numpy"] = "1.0"
    other["outcomes"][0][1]["digest"] = "0" * 16
    changed["outcomes"][1][2]["success"] ^= True
    (tmp_path / "report.json").write_text(json.dumps(other))
    code, result, said = again(capsys, "--repeat", tmp_path / "report.json", "--workers", 1)
    assert code == 0
    assert f"differs: numpy: 1.0 there, {np.__version__} here" in said
    assert "equal: the outcome of every episode" in said
    assert [each["equal_commands"] for each in result["repeat"]["variants"]] == [2, 3]
    assert result["repeat"]["conditions"]["numpy"] == ["1.0", np.__version__]
    (tmp_path / "report.json").write_text(json.dumps(changed))
    code, result, said = again(capsys, "--repeat", tmp_path / "report.json", "--workers", 1)
    assert code == 1
    assert "seed 5002" in said
    assert "equal: " not in said
    (trial,) = result["repeat"]["variants"][1]["changed"]
    assert (trial["seed"], trial["there"]["success"] ^ trial["here"]["success"]) == (5002, True)


@needs_pen
def test_another_bundle_is_not_played_in_its_place(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(PEN.read_bytes() + b"\0")
    code, _, said = again(capsys, other, "--repeat", run / "report.json")
    assert code == 1
    assert re.search(
        r"other\.gguf: expected a policy of .*SHA-256 [0-9a-f]{16}.*, got [0-9a-f]{16}",
        " ".join(said.split()),
    )
    record = record_of(run)
    for entry in record["variants"]:
        entry["policy"]["id"] = "0" * 64
    (tmp_path / "report.json").write_text(json.dumps(record))
    code, _, said = again(capsys, "--repeat", tmp_path / "report.json")
    assert code == 1
    assert "variants[0].target (SHA-256 0000000000000000) pen.gguf" in " ".join(said.split())


@needs_pen
@pytest.mark.parametrize(
    "flags",
    [("--episodes", 2), ("--noise", 0), ("--seed", 0), ("--realtime",), ("--dtype", "bf16"),
     ("--engine", "eager"), ("--sweep", "replan=1,2"), ("--batch", 4), ("--batch", "auto")],
)  # fmt: skip
def test_nothing_else_may_change_what_is_played(
    run: Path, flags: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = again(capsys, "--repeat", run / "report.json", *flags)
    assert code == 1
    assert f"{flags[0]}: cannot be combined with --repeat, which plays the recorded settings" in " ".join(
        said.split()
    )


@pytest.mark.slow
@needs_pen
def test_what_was_played_in_lockstep_is_played_so_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any number of processes; its films are of the same seeds, each played alone."""
    arguments = [*map(str, (PEN, *QUICK, "--episodes", 6, "--batch", 3, "--out", tmp_path, "--films", 1))]
    assert main(["eval", *arguments]) == 0
    record = record_of(tmp_path)
    (variant,) = record["variants"]
    assert variant["variant"]["batch"] == 3
    assert variant["peak_bytes"] > PEN.stat().st_size
    (episodes,) = record["outcomes"]
    seeds = films.chosen([[_episode(**each) for each in episodes]], 1)
    markup = (tmp_path / "report.html").read_text()
    assert sum(tag == "img" for tag, _ in Elements(markup).found) == len(seeds) > 0
    code, result, said = again(capsys, "--repeat", tmp_path / "report.html", "--shards", 2)
    assert code == 0
    assert result["variants"][0]["variant"]["batch"] == 3
    assert "equal: every command of every episode" in said


def _with(record: dict[str, Any], *path: Any, value: Any) -> str:
    found = deepcopy(record)
    node = found
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return json.dumps(found)


@needs_pen
def test_records_that_are_none_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    record = record_of(run)
    without = {name: value for name, value in record.items() if name != "outcomes"}
    cases = {
        "": "expected a report",
        "[]": "expected schema sinew.eval/1, got 'list'",
        "{": "expected a report",
        "<html></html>": "got one without a record",
        "[" * 100_000: "at most 64 levels of containers",
        '{"schema": NaN}': "expected finite numbers, got nan",
        _with(record, "schema", value="sinew.eval/9"): "expected schema sinew.eval/1, got 'sinew.eval/9'",
        json.dumps(without): "expected the outcome of each episode, got none",
        _with(
            record, "task", "gravity", value=1
        ): "task: expected fields of this version of Sinew, got gravity",
        _with(
            record, "variants", 0, "variant", "x", value=1
        ): "variant: expected fields of this version of Sinew, got x",
        _with(record, "variants", 0, "variant", "latency", value="soon"): "latency: expected",
        _with(record, "outcomes", 0, value=[]): "expected the same seeds",
        _with(record, "outcomes", 0, 0, "seed", value=5001): "expected the same seeds",
        _with(record, "outcomes", 0, 0, "seed", value="a"): "outcomes: expected episodes with a seed from 0",
        _with(record, "outcomes", value=5): "outcomes: expected a list for each of 2 variants, got 5",
        _with(record, "variants", value=5): "variants: expected a list of 1 to 1000, got 5",
    }
    for number, (text, told) in enumerate(cases.items()):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(SinewError, match=re.escape(told)) as caught:
            repeat.read(path)
        assert str(path) in str(caught.value) or "latency" in told
    with pytest.raises(SinewError, match="No such file"):
        repeat.read(tmp_path / "none.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SinewError, match="UTF-8"):
        repeat.read(tmp_path / "bytes")


def test_a_digest_is_of_every_bit_of_every_command() -> None:
    actions = [np.array([0.5, -1.0], np.float32), np.array([0.25, 2.0], np.float32)]
    assert (
        digest_of(actions) == hashlib.sha256(np.array([0.5, -1, 0.25, 2], "<f8").tobytes()).hexdigest()[:16]
    )
    assert digest_of([actions[0], np.nextafter(actions[1], np.float32(9))]) != digest_of(actions)
    assert digest_of(actions[::-1]) != digest_of(actions)


# ----------------------------------------------------------------------------- leaderboards


@needs_pen
def test_a_board_ranks_and_pairs_what_reports_say(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against formulas and the report itself; JSON and page say the same."""
    capsys.readouterr()
    assert main(["leaderboard", str(run), "--out", str(tmp_path / "board.html"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(page.record_in((tmp_path / "board.html").read_text()) or "") == record
    (board,) = record["boards"]
    assert board["task"]["env"] == "sinew/Pen-v0"
    report = {each["variant"]["latency"]: each for each in record_of(run)["variants"]}
    assert [each["wins"] for each in board["entries"]] == sorted(
        (v["wins"] for v in report.values()), reverse=True
    )
    for each in board["entries"]:
        told = report["100ms" if "latency 100ms" in each["label"] else "0ms"]
        assert each["label"] == f"pen, latency {told['variant']['latency']}"
        assert math.isclose(
            each["step_ms"], told["latency_ms"]["p50"] / told["actions_per_chunk"], rel_tol=1e-3
        )
        assert each["interval"] == [round(end, 9) for end in statistics.wilson(each["wins"], 3)]
        assert each["size_bytes"] == PEN.stat().st_size
        assert each["peak_bytes"] > PEN.stat().st_size
        assert each["backbone"] == "SmolVLM2 in other sizes"
        if told["mean_steps_to_success"] is not None:
            assert math.isclose(each["seconds_to_success"], told["mean_steps_to_success"] / 60, abs_tol=1e-3)
    for each, cells in zip(board["entries"], leaderboard.rows(board), strict=True):
        assert cells[1:3] == [each["label"], f"{each['wins']}/3"]  # what a phone shows
    (pair,) = board["pairs"]
    won = [{t["seed"]: t["success"] for t in trials} for trials in record_of(run)["outcomes"]]
    order = won if board["entries"][0]["label"].endswith(" 0ms") else won[::-1]
    difference, low, high = stats.paired_difference(*order)
    assert pair["difference"] == round(difference, 4)
    assert pair["interval"] == [round(low, 6), round(high, 6)]
    assert pair["pairs"] == 3


def _report(name: str, failed: list[int], first: int = 0, count: int = 10, **changes: Any) -> dict[str, Any]:
    """A report of before there were outcomes."""
    won = count - len(failed)
    low, high = statistics.wilson(won, count)
    entry = {
        "label": name,
        "variant": {"target": f"/somewhere/{name}.gguf", "replan": 8, "latency": "0", "handover": "freeze",
                    "solver_steps": None, "dtype": None, "device": "cpu"},
        "policy": {"kind": "bundle", "id": name * 8},
        "dtype": "fp32", "wins": won, "episodes": count, "success": won / count, "interval": [low, high],
        "mean_steps_to_success": 40.0, "chunk_size": 32, "actions_per_chunk": 8.0,
        "latency_ms": {"p50": 16.0}, "by_task": {"a": {"wins": won, "episodes": count, "interval": [low, high]}},
        "failed_seeds": failed,
    }  # fmt: skip
    task = {
        "env": "sinew/Blocks-v0",
        "env_options": None,
        "reset_options": None,
        "adapter": "",
        "realtime": False,
    }
    return {
        "schema": "sinew.eval/1", "date": "2026-01-01", "command": "", "sinew": "0", "hardware": "a machine",
        "task": task, "control_hz": 20.0, "seeds": {"first": first, "count": count}, "variants": [entry], **changes,
    }  # fmt: skip


def _boards(folder: Path, *reports: dict[str, Any]) -> list[dict[str, Any]]:
    for index, report in enumerate(reports):
        (folder / str(index)).mkdir()
        (folder / str(index) / "report.json").write_text(json.dumps(report))
    return leaderboard.boards([folder])


def test_reports_of_several_runs_meet_on_a_board_of_their_task(tmp_path: Path) -> None:
    other = _report("d", [], task={**_report("d", [])["task"], "env": "sinew/Pen-v0"})
    blocks, pen = _boards(
        tmp_path, _report("a", [1, 2]), _report("b", [2]), _report("c", [7], first=5), other
    )
    assert [(each["rank"], each["label"]) for each in blocks["entries"]] == [
        (1, "b.gguf"),
        (1, "c.gguf"),
        (3, "a.gguf"),
    ]
    assert [each["label"] for each in pen["entries"]] == ["d.gguf"]
    pairs = {(each["first"], each["second"]): each for each in blocks["pairs"]}
    assert pairs["b.gguf", "a.gguf"]["pairs"] == 10
    assert pairs["b.gguf", "a.gguf"]["difference"] == 0.1
    assert pairs["b.gguf", "c.gguf"]["pairs"] == 5  # seeds 5 to 9
    assert pen["pairs"] == []
    assert blocks["entries"][0]["step_ms"] == 2.0
    assert blocks["entries"][0]["seconds_to_success"] == 2.0
    assert blocks["entries"][0]["peak_bytes"] is None  # which such a report does not say


def test_seeds_that_do_not_coincide_are_not_compared(tmp_path: Path) -> None:
    (board,) = _boards(tmp_path, _report("a", []), _report("b", [100], first=100))
    assert board["pairs"] == []
    assert leaderboard.pair_rows(board) == []


def test_rows_of_one_policy_say_in_what_they_differ(tmp_path: Path) -> None:
    full = _report("a", [1])
    full["variants"][0]["variant"]["replan"] = 0
    half = _report("a", [2])
    half["variants"][0]["dtype"] = "bf16"
    (board,) = _boards(tmp_path, _report("a", []), full, half, half)
    labels = [each["label"] for each in board["entries"]]
    assert labels[0] == "a.gguf, replan 8, fp32"
    assert "a.gguf, replan full, fp32" in labels
    assert sum(label.startswith("a.gguf, replan 8, bf16 (") for label in labels) == 2
    assert len(set(labels)) == 4


@pytest.mark.parametrize(
    "path", [("variants", 0, "chunk_size"), ("seeds",), ("variants", 0, "policy"), ("task", "env")]
)
def test_a_report_that_lacks_something_is_named(tmp_path: Path, path: tuple[Any, ...]) -> None:
    report = _report("a", [])
    node = report
    for step in path[:-1]:
        node = node[step]
    del node[path[-1]]
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(SinewError, match=f"report.json: expected a report of .*{path[-1]}: expected a"):
        leaderboard.boards([tmp_path])


def test_a_folder_without_reports_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leaderboard", str(tmp_path)]) == 1
    assert "got no report.json in it" in " ".join(capsys.readouterr().err.split())
    assert main(["leaderboard"]) == 1
    assert main(["leaderboard", str(tmp_path), "--out", "board.txt"]) == 1


def test_every_architecture_has_a_backbone() -> None:
    assert all(backbone(name) for name in architectures())
    assert backbone("another") == backbone("another", {}) == ""


def test_a_backbone_of_other_sizes_is_not_called_the_published_one() -> None:
    for family in families():
        for each in family.published().values():
            assert backbone(each["architecture"], each["config"]) == backbone(each["architecture"])
    sizes = {"pen": "SmolVLM2 in other sizes", "act": "ResNet-10, 16 channels at first"}
    for name, said in sizes.items():
        manifest = Bundle(PEN.with_name(f"{name}.gguf")).manifest
        assert backbone(manifest.architecture, manifest.config) == said
    assert backbone("act", {"vision": {"blocks": [3, 4, 6, 3], "width": 64}}) == "ResNet-34"
