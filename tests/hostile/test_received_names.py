"""Received files are data: a hostile value in every field of every reader imports, opens and contacts nothing.

An audit hook of Python's hears what is imported, opened and connected while a reader runs. The names it listens for are
in no path of this machine but the ones that the records hold.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")

from sinew_client import ClientError
from sinew_client.control.adapter import Adapter
from sinew_client.control.adapter_file import write as write_adapter
from sinew_client.control.journal import repeat as repeat_journal
from sinew_client.control.journal import watched
from sinew_client.control.safety import Limits
from sinew_client.typed_names import OutsideName, UntypedNameError, portable, require_typed, typed_values
from sinew_client.types import PolicySpec
from sinew_eval.episodes import campaign
from sinew_eval.episodes.adapters import read_mapping
from sinew_eval.episodes.episode_log import episodes_of
from sinew_eval.episodes.outside import TypedNames
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.evidence import leaderboard, page, repeat
from sinew_eval.farm import files, shards
from sinew_eval.report.gate import GATES, read_gate
from sinew_eval.report.report import document
from sinew_eval.trials.sitting import TrialSession

from sinew.bundle import Bundle
from sinew.bundle.schema import Manifest
from sinew.convert.sources import card
from sinew.convert.sources.cache import RECORD, CacheEntry
from sinew.convert.tokenizer_files import find_model_dir
from sinew.core import SinewError
from sinew.engine.onnx.graphs import GraphSet
from sinew.serve.fleet.config import read as read_fleet
from tests.control.test_edge_adapter import FORM, tensors
from tests.hostile.readers import FLEET, LIMITS, journal

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
MODULE, FILE, HOST = (
    "received_and_never_typed",
    "received-and-never-typed.bin",
    "received-and-never-typed.invalid",
)
NAMES = (MODULE, FILE, HOST)


class Listener:
    """Hears of each import, opened file and connection that holds one of ``NAMES`` while it is on."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or event not in EVENTS:
            return
        text = repr(arguments[:3])
        if any(name in text for name in NAMES):
            self.heard.append(f"{event} {text[:200]}")

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[str]]:
        self.heard.clear()
        self.on = True
        try:
            yield self.heard
        finally:
            self.on = False


EVENTS = {
    "import", "open", "os.listdir", "os.scandir", "subprocess.Popen", "os.system", "os.exec", "socket.connect",
    "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "os.mkdir", "os.remove", "os.rename",
}  # fmt: skip
LISTENER = Listener()  # hooks stay for as long as the process


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Values by what they are. The module, the file and the FIFO exist, so that they could be used."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / f"{MODULE}.py").write_text("class Name:\n    def __init__(self, *_, **__): pass\n")
    (folder / FILE).write_bytes(b"secret")
    os.mkfifo(folder / f"fifo-{FILE}")
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    return {
        "folder": folder,
        "code": f"{MODULE}:Name",
        "a suite's code": f"vla-eval/{MODULE}:Name",
        "path": str(folder / FILE),
        "relative path": f"../{folder.name}/{FILE}",
        "mapping": str(folder / FILE).replace(".bin", ".json"),
        "FIFO": str(folder / f"fifo-{FILE}"),
        "address": f"tcp://{HOST}:5555",
        "socket": f"ipc://{folder}/{FILE}",
        "model server": f"vla-eval://{HOST}:5555",
        "URL": f"https://{HOST}/x",
        "hub name": f"hf://{HOST}/x",
        "deep": deep,
        "huge number": 10**400,
        "many": 10**10,
        "negative": -1,
        "not a number": float("nan"),
        "infinite": float("inf"),
        "half a character": "\ud800",
        "NUL": f"\0{FILE}",
        "text": "x",
        "list": [1, [2]],
        "object": {"x": {"y": 1}},
        "options": {"path": str(folder / FILE), "kind": f"{MODULE}:Name", "url": f"https://{HOST}/x"},
        "nothing": None,
        "truth": True,
    }


def places(record: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each field of a record: its keys and indices. Of a list the first and the last."""
    if place:
        yield place
    if isinstance(record, dict):
        for key, value in record.items():
            yield from places(value, (*place, key))
    elif isinstance(record, list) and record:
        for index in sorted({0, len(record) - 1}):
            yield from places(record[index], (*place, index))


def changed(record: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a record with another value in one place."""
    if not place:
        return value
    copied = copy.copy(record)
    copied[place[0]] = changed(record[place[0]], place[1:], value)
    return copied


# ----------------------------------------------------------------------------- the readers


@dataclass(frozen=True)
class Reader:
    """One reader of received records.

    Attributes:
        record: a good record.
        read: writes a record into a folder, and reads it as the product does up to where it would be used.
    """

    record: Any
    read: Callable[[Any, Path], object]


def _text(record: Any) -> str:
    return json.dumps(record)


def _episode(seed: int) -> Episode:
    return Episode(seed, "pen", True, 30, 4, 30, 0, 0, [0] * 4, [1.0] * 4, chunk_size=24, digest="0" * 16)


def _report() -> dict[str, Any]:
    """Return a report of two variants, as ``sinew eval --out`` writes it."""
    task = Task("sinew/Pen-v0")
    variants = [Variant("expert", 8, handover="aligned"), Variant("expert", 4, handover="aligned")]
    results = [[_episode(5000), _episode(5001)] for _ in variants]
    report = document(task, 20.0, variants, results, workers=1, command="sinew eval expert")
    outcomes = [
        [
            {name: getattr(each, name) for name in ("seed", "task", "success", "steps", "digest")}
            for each in row
        ]
        for row in results
    ]
    edge = {"file": "edge.safetensors", "id": "0" * 64}
    report["variants"][0]["edge_adapter"] = edge
    report["variants"][0]["variant"]["edge_adapter"] = "edge.safetensors"
    return json.loads(json.dumps({**report, "outcomes": outcomes}))


def _plan(folder: Path) -> dict[str, Any]:
    files.FarmPlan.of(Task("sinew/Pen-v0"), [Variant("expert"), Variant(str(PEN))], [(0, 1), (1, 1)]).write(
        folder
    )
    return json.loads((folder / files.PLAN).read_text())


def _repeat(record: Any, folder: Path) -> object:
    (folder / "report.json").write_text(_text(record))
    return repeat.read(folder / "report.json").local(TypedNames())


def _repeat_page(record: Any, folder: Path) -> object:
    (folder / "report.html").write_text(page.page("x", [], record))
    return repeat.read(folder / "report.html").local(TypedNames())


def _check_place(record: Any, folder: Path) -> object:
    (folder / "report.json").write_text(_text(record))
    return repeat.check_place(folder, Task("sinew/Pen-v0"), [Variant("expert")])


def _gate(record: Any, folder: Path) -> object:
    (folder / "gate.json").write_text(_text(record))
    gate = read_gate(folder / "gate.json")
    return gate.task(), gate.held(Task(gate.protocol["env"]), {"replan": None}, {"env": None})


def _farm(record: Any, folder: Path) -> object:
    (folder / files.PLAN).write_text(_text(record))
    plan = files.FarmPlan.read(folder)
    return plan.local(folder, TypedNames())


def _episodes(record: Any, folder: Path) -> object:
    (folder / files.PLAYED).mkdir(exist_ok=True)
    for name in (files.PLAYED + "/5000-x", campaign.LOG):
        (folder / name).write_text(_text(record) + "\n")
    return (
        shards.left_over(folder),
        campaign.read_log(folder / campaign.LOG),
        list(episodes_of(_text(record).encode())),
    )


def _sitting(record: Any, folder: Path) -> object:
    (folder / "sitting.json").write_text(_text(record["plan"]))
    (folder / campaign.LOG).write_text(f"{_text(record['begun'])}\n{_text(record['episode'])}\n")
    return TrialSession(folder, Task("sinew/Pen-v0"), [Variant("expert")], 2, 5000).due()


def _leaderboard(record: Any, folder: Path) -> object:
    (folder / "report.json").write_text(_text(record))
    paths = [folder / "report.json"]
    found = {"boards": leaderboard.boards(paths), "date": "", "sinew": ""}
    for board in found["boards"]:
        (
            leaderboard.rows(board),
            leaderboard.pair_rows(board),
            leaderboard.task_rows(board),
            leaderboard.title(board),
        )
    return leaderboard.markup(found, leaderboard.named_reports(paths))


def _card(record: Any, folder: Path) -> object:
    (folder / "report.json").write_text(_text(record))
    return card.records_of(PEN, [folder / "report.json"], "expert")


def _journal(record: Any, folder: Path) -> object:
    path = folder / "run.jsonl"
    path.write_text("\n".join(map(_text, record)) + "\n")
    return repeat_journal(path), watched(path)


def _limits(record: Any, folder: Path) -> object:
    (folder / "limits.json").write_text(_text(record))
    return Limits.read(folder / "limits.json", 2)


def _mapping(record: Any, folder: Path) -> object:
    (folder / "map.json").write_text(_text(record))
    return read_mapping(folder / "map.json")


@functools.cache
def _metadata_of_pen() -> dict[str, Any]:
    return dict(Bundle(PEN).file.metadata)


def _manifest(record: Any, folder: Path) -> object:
    texts = {key: _text(value) if isinstance(value, (dict, list)) else value for key, value in record.items()}
    return Manifest.from_metadata({**_metadata_of_pen(), **texts})


def _edge(record: Any, folder: Path) -> object:
    path = folder / "edge.safetensors"
    write_adapter(path, FORM, tensors())
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"]["sinew.adapter"] = _text(record)
    text = _text(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return Adapter.read(path)


def _graphs(record: Any, folder: Path) -> object:
    (folder / "graphs.json").write_text(_text(record))
    return GraphSet.load(folder)


def _cache(record: Any, folder: Path) -> object:
    (folder / RECORD).write_text(_text(record))
    entry = CacheEntry(folder)
    return entry.damage(), entry.nbytes


def _fleet(record: Any, folder: Path) -> object:
    (folder / "fleet.yaml").write_text(_text(record))  # JSON is YAML
    return read_fleet(folder / "fleet.yaml")


def _metadata(record: Any, folder: Path) -> object:
    return PolicySpec.from_dict(record)


def _model(record: Any, folder: Path) -> object:
    return find_model_dir(str(record["model_name"]), None, folder, "--vlm", "config.json")


def _readers(folder: Path) -> dict[str, Reader]:
    report = _report()
    without = {name: value for name, value in report.items() if name != "outcomes"}
    (folder / "plan").mkdir()
    plan = _plan(folder / "plan")
    (folder / "graphs").mkdir()
    GraphSet("smolvla", 2, ("a", "b"), (10,), (), {"head": "int8"}, "", 8).save(folder / "graphs")
    (folder / "sitting").mkdir()
    sitting = TrialSession(folder / "sitting", Task("sinew/Pen-v0"), [Variant("expert")], 2, 5000)
    trial = {"key": sitting.keys[0], **_episode(5000).to_dict(), "trial": "001"}
    write_adapter(folder / "edge.safetensors", FORM, tensors())
    data = (folder / "edge.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entry = {
        **dict.fromkeys(("source", "name", "architecture", "made", "converter"), "a"),
        "bundle": "pen.gguf", "bytes": 1, "mtime_ns": 1, "seconds": 1.0, "notes": ["n"],
        "files": [{"name": "model.safetensors", "bytes": 5, "sha256": "a"}],
        "outside": [{"name": str(folder / "none"), "bytes": 5, "sha256": "a"}],
    }  # fmt: skip
    metadata = {
        key: json.loads(value) if value.startswith("{") else value
        for key, value in Bundle(PEN).file.metadata.items()
        if isinstance(value, str) and len(value) < 100_000
    }
    mapping = {
        "images": {"camera1": "pixels"},
        "state": ["agent_pos"],
        "known_as": {"pixels": ["top"]},
        "rest": [0],
    }
    return {
        "eval --repeat report.json": Reader(report, _repeat),
        "eval --repeat report.html": Reader(report, _repeat_page),
        "eval --out with a report": Reader(report, _check_place),
        "eval --gate": Reader(json.loads((GATES / "pen.json").read_text()), _gate),
        "eval --join plan": Reader(plan, _farm),
        "episodes of a farm": Reader({"key": plan["keys"][0], **_episode(5000).to_dict()}, _episodes),
        "trials": Reader(
            {
                "plan": json.loads((folder / "sitting" / "sitting.json").read_text()),
                "begun": {"begun": "001", "seed": 5000},
                "episode": trial,
            },
            _sitting,
        ),
        "leaderboard": Reader(report, _leaderboard),
        "leaderboard of an old report": Reader(without, _leaderboard),
        "hub push": Reader(report, _card),
        "recording replay": Reader(journal(), _journal),
        "run --limits": Reader(LIMITS, _limits),
        "eval --adapter": Reader(mapping, _mapping),
        "manifest of a bundle": Reader(metadata, _manifest),
        "edge adapter": Reader(json.loads(header["__metadata__"]["sinew.adapter"]), _edge),
        "exported graphs": Reader(json.loads((folder / "graphs" / "graphs.json").read_text()), _graphs),
        "cache": Reader(entry, _cache),
        "fleet": Reader(FLEET, _fleet),
        "metadata of a server": Reader(Bundle(PEN).manifest.spec.to_dict(), _metadata),
        "a checkpoint's configuration": Reader({"model_name": "lab/vlm"}, _model),
    }


NAMED = (
    "eval --repeat report.json", "eval --repeat report.html", "eval --out with a report", "eval --gate",
    "eval --join plan", "episodes of a farm", "trials", "leaderboard", "leaderboard of an old report", "hub push",
    "recording replay", "run --limits", "eval --adapter", "manifest of a bundle", "edge adapter", "exported graphs",
    "cache", "fleet", "metadata of a server", "a checkpoint's configuration",
)  # fmt: skip


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return _readers(tmp_path_factory.mktemp("records"))


@pytest.mark.parametrize("each", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMED)
def test_a_hostile_value_in_every_field_is_only_data(
    name: str,
    each: int,
    readers: dict[str, Reader],
    hostile: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """each: values of each field, in turn over the fields; 0: all of them."""
    monkeypatch.syspath_prepend(str(hostile["folder"]))
    monkeypatch.chdir(hostile["folder"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert set(readers) == set(NAMED)
    reader = readers[name]
    wrong: list[str] = []
    count = 0
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        kinds = [kind for kind in hostile if kind != "folder"]
        for number, place in enumerate(places(reader.record)):
            first = each * number % len(kinds)
            for kind in (kinds + kinds)[first : first + (each or len(kinds))]:
                value = hostile[kind]
                count += 1
                record = changed(reader.record, place, value)
                where = f"{'.'.join(map(str, place))} = {kind}"
                error: BaseException | None = None
                with LISTENER.listening() as heard:
                    try:
                        reader.read(record, tmp_path)
                    except SinewError:
                        pass
                    except Exception as caught:  # noqa: BLE001 - which is what is tested
                        error = caught
                if error is not None:
                    wrong.append(f"{where}: {type(error).__name__}: {error!s:.100}")
                if heard:
                    wrong.append(f"{where}: {heard[0]}")
    assert not wrong, f"{len(wrong)} of {count}: " + "\n".join(wrong[:20])
    assert MODULE not in sys.modules


def test_the_listener_hears(hostile: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with LISTENER.listening() as heard:
        Path(hostile["path"]).read_bytes()
        os.close(os.open(hostile["FIFO"], os.O_RDONLY | os.O_NONBLOCK))
    assert len(heard) == 2
    monkeypatch.syspath_prepend(str(hostile["folder"]))
    with LISTENER.listening() as heard:
        __import__(MODULE)
    assert heard
    del sys.modules[MODULE]


# ----------------------------------------------------------------------------- the rule


def test_names_have_to_be_typed_behind_their_own_flag() -> None:
    names = [OutsideName("task.env", "pkg:Env", "--env"), OutsideName("task.adapter", "a.json", "--adapter")]
    typed = {"--env": typed_values(["pkg:Env"]), "--adapter": typed_values(["/here/a.json", "", None])}
    assert require_typed("page", names, typed) == ["pkg:Env", "/here/a.json"]
    with pytest.raises(UntypedNameError, match=r"page: .*task.env pkg:Env.*--env pkg:Env"):
        require_typed("page", names, {"--adapter": typed_values(["pkg:Env", "/here/a.json"])})
    many = [OutsideName(f"x[{index}]", "a" * 10_000 + "\x1b", "--env") for index in range(100)]
    with pytest.raises(ClientError, match="and 92 more") as caught:
        require_typed("p" * 10_000, many, {})
    assert len(str(caught.value)) < 4000
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("/home/me/a b/x.gguf", "x.gguf"),
        ("--out=/home/me/x", "--out=x"),
        ("edge_adapter=none,/home/me/e.st", "edge_adapter=none,e.st"),
        ("~/x/y.gguf", "y.gguf"),
        ("C:\\Users\\me\\x.gguf", "x.gguf"),
        ("ipc:///tmp/me/a.sock", "ipc://a.sock"),
        ("file:///home/me/x", "file://x"),
        ("tcp://host:5555", "tcp://host:5555"),
        ("sinew/Blocks-v0", "sinew/Blocks-v0"),
        ("org/name", "org/name"),
        ("put the red / blue block left/right", "put the red / blue block left/right"),
        ({"a": ["/home/me/x", 1, None]}, {"a": ["x", 1, None]}),
    ],
)
def test_a_record_keeps_no_folder_of_this_machine(value: Any, left: Any) -> None:
    assert portable(value) == left
