"""Mutated texts and small files for every reader except the protocols: recordings, contexts, decision logs,
contracts, fleets, limits, settings, adapters, caches, exports, names on the hub, and messages of streams.

An input is a valid record with a few values of other types, written as its writer does. Or it is a valid text with
bytes changed, removed, doubled, joined with another text, or reversed. The result must be a value or one of
``EXPECTED``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import torch
import yaml
from sinew_client import ClientError, schema
from sinew_client.control.adapter import Adapter
from sinew_client.control.adapter_file import write as write_adapter
from sinew_client.control.handover import parse_handover
from sinew_client.control.journal import SCHEMA, repeat, watched
from sinew_client.control.motion import parse_motion
from sinew_client.control.replan import parse_rule
from sinew_client.control.safety import Limits
from sinew_client.control.settings import Settings
from sinew_client.control.what_if import alternatives, read_run
from sinew_client.protocol import decode_metadata
from sinew_client.streams import decode_window
from sinew_eval.dataset.records import episodes
from sinew_perf.hardware import hardware
from sinew_ros.contract import read as read_contract

from sinew.bundle import Bundle
from sinew.bundle.schema import Manifest
from sinew.cli.settings import SettingsFile
from sinew.convert.sources import hub
from sinew.convert.sources.cache import RECORD, CacheEntry
from sinew.core import ActionChunk, Observation, SinewError
from sinew.engine.contexts import FORMS, pack, unpack
from sinew.engine.onnx.engine import _table
from sinew.engine.onnx.graphs import GraphSet
from sinew.policy import Policy, load
from sinew.processing.safety import Safety
from sinew.records.recorder import Recorder, read_record, read_records
from sinew.records.viewers.mcap_file import write_mcap
from sinew.serve.fleet.config import read as read_fleet
from sinew.serve.replay import Replay
from sinew.serve.wires.native import NativeCodec
from tests.control.test_edge_adapter import FORM, tensors
from tests.hostile.meter import gave
from tests.hostile.mutate import dumps, mutate_bytes, mutate_record, spliced
from tests.hostile.test_recordings import archive, npy, plain
from tests.serve.puppet import lone
from tests.serve.test_streams import Asker, message
from tests.stream.rolling import write_bundle

EXPECTED = (SinewError,)
ROOT = Path(__file__).resolve().parents[2]
SO101 = ROOT / "packages" / "sinew_ros" / "config" / "so101.yaml"
Case = Callable[[random.Random], object]

LIMITS = {
    "low": [-1.0, -2.0],
    "high": 3,
    "velocity": 1.5,
    "acceleration": [9.0, None],
    "names": ["a", "b"],
    "when": "clip",
}
SETTINGS = {
    "hz": 20.0,
    "handover": "rtc:guided:exp:5",
    "replan": "queue:0.5",
    "limits": LIMITS,
    "max_age": 1.0,
    "motion": {"kind": "relative", "action": [0], "state": [1]},
    "deadline": 2.0,
    "stale": 0.5,
    "finish": False,
    "future": False,
    "substeps": 2,
    "committed_rows": 0,
    "refine": 0,
}
METADATA = {
    "server": {"engine": "eager", "threads": 1},
    "policy": {"chunk_size": 4, "action": {"dim": 2, "limits": LIMITS, "names": ["a", "b"]}, "cameras": []},
}
FLEET = {
    "address": "auto",
    "policies": {
        "default": {
            "source": "/a.gguf",
            "replicas": {"min": 1, "max": 4, "queue_ms": 5},
            "ongoing": 4,
            "cpus": 2,
            "max_batch": "auto",
            "action_limits": "clamp",
            "memory_gib": 1.5,
        },
        "b": {"source": "b", "replicas": 2},
    },
}
CONFIG = {"serve": {"threads": 2, "wire": ["native", "http"], "record": "x"}, "perf": {"run": {"seed": 1}}}
GPU = {
    "mine": {
        "title": "Mine",
        "source": "me",
        "memory_gib": 8,
        "bandwidth": 3e11,
        "peak": {"fp32": 1e12},
    }
}
STATISTICS = {"mode": "quantiles", "stats": {"q01": [0.0] * 3, "q99": [1.0] * 3}, "rows": 0, "snap": [2]}


def journal() -> list[dict[str, Any]]:
    """Return the events of a run with two take-overs, holds, and pauses."""
    chunk = [[0.1 * k, 0.2] for k in range(8)]
    settings = {"hz": 20.0, "handover": "aligned", "replan": "4", "limits": LIMITS, "max_age": 1.0}
    found: list[dict[str, Any]] = [{"event": "begin", "schema": SCHEMA, "settings": settings, "dim": 2}]
    found += [{"event": "ask", "step": 0, "frame": 0, "state": [0, 0]}]
    found += [{"event": "arrived", "step": 1, "actions": chunk}]
    for step in range(1, 6):
        command = {"step": step, "row": chunk[step], "reason": "", "clipped": [], "age": step, "chunk": 0}
        found.append(
            {"event": "command", "command": {**command, "index": step, "seam": step == 1}, "state": [0, 0]}
        )
    found += [{"event": "ask", "step": 6, "frame": 5, "state": [0, 0]}]
    found += [{"event": "failed", "step": 7, "reason": "lost", "kind": "connection_lost"}]
    found += [{"event": "pause"}, {"event": "resume", "position": [0, 0], "moved": True}]
    found += [
        {"event": "refined", "step": 8, "rows": chunk, "state": None},
        {"event": "fault", "step": 8, "reason": ""},
    ]
    return found


def toml(record: dict[str, Any], table: str = "") -> str:
    """Return nested tables as TOML, without the values that TOML does not support."""
    lines, below = [], []
    for key, value in record.items():
        name = json.dumps(str(key))
        if isinstance(value, dict):
            below.append(toml(value, f"{table}.{name}" if table else name))
        elif value is not None:
            with contextlib.suppress(ValueError, TypeError):
                lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(([f"[{table}]"] if table else []) + lines + below)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(each) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def yaml_tree(rng: random.Random, record: Any) -> str:
    """Return a damaged record as YAML. Some values are replaced by anchors, aliases and tags."""
    text: str = yaml.safe_dump(mutate_record(record, rng, rng.choice((0, 1, 1, 2, 4))), allow_unicode=True)
    for _ in range(rng.choice((0, 0, 0, 1, 2, 8))):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        lines[at] += rng.choice(YAML_PIECES)
        text = "\n".join(lines)
    return text


YAML_PIECES = (
    *(
        " &a",
        " *a",
        ": *a",
        " !!timestamp x",
        " !!int ''",
        " !!binary '!'",
        "\n<<: *a",
        "\n? [a]\n: b",
        " |",
        " >-",
    ),
    *(
        "\n- *a",
        " !!python/name:os.system",
        "\n---",
        "\n%YAML 9.9",
        ": {",
        "\n\t",
        " # x",
        ' "\\ud800"',
        ' "\\x00"',
    ),
    *(
        ": " + "9" * 5000,
        ": 0x" + "f" * 5000,
        ": 1:1:1:1",
        ": .inf",
        ": 2001-99-99",
        ": &a [*a]",
        " [*a, *a, *a, *a]",
    ),
)


LIMITS_OF_PYTHON = (
    *(
        b"[" * 3000,
        b'{"a":' * 3000,
        b"9" * 5000,
        b"0x" + b"f" * 5000,
        b"1e999",
        b'"\\ud800"',
        b"\0",
        b"\xed\xa0\x80",
    ),
    *(
        b" = 0x" + b"f" * 5000 + b"\n",
        b"\nx = " + b"[" * 3000,
        b": 0x" + b"f" * 5000,
        b"\n" * 5000,
        b"a" * 20_000,
    ),
)


class Text:
    """The fuzzer for one kind of text file, which writes a new file for each input."""

    def __init__(self, file: Path, write: Callable[[random.Random], str], read: Callable[[Path], object]):
        self._file, self._write, self._read = file, write, read
        rng = random.Random(0)
        # valid texts, which the fuzzer joins with other texts
        self._good = [write(rng).encode(errors="surrogatepass") for _ in range(8)]

    def case(self, rng: random.Random) -> object:
        data = self._write(rng).encode(errors="surrogatepass")
        if rng.random() < 0.3:
            data = mutate_bytes(data, rng, len(data))
        elif rng.random() < 0.2:
            data = spliced(rng, data, rng.choice(self._good))
        if rng.random() < 0.05:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(LIMITS_OF_PYTHON) + data[at:]
        self._file.write_bytes(data)
        gave(data)
        return self._read(self._file)


class Recordings:
    """The fuzzer for records of --record: their arrays, their descriptions, and the archive itself."""

    def __init__(self, work: Path):
        self.folder = work / "recordings"
        recorder = Recorder(self.folder)
        seen = Observation(
            images={"front": np.zeros((8, 8, 3), np.uint8)}, state=np.zeros(2), prompt="go", seed=1
        )
        for _ in range(2):
            recorder.put("native", "arm", seen, ActionChunk(np.zeros((3, 2), np.float32), seed=1))
        recorder.close()
        self.file = max(self.folder.glob("*.npz"))
        self.data = self.file.read_bytes()
        with np.load(self.file) as stored:
            self.arrays = {name: stored[name] for name in stored.files}
        self.meta = json.loads(str(self.arrays.pop("meta")))

    def case(self, rng: random.Random) -> object:
        if rng.random() < 0.5:
            data = mutate_bytes(self.data, rng, len(self.data))
        else:
            meta = mutate_record(self.meta, rng, rng.choice((0, 1, 1, 2)))
            text = (
                mutate_bytes(dumps(meta).encode(), rng, 200) if rng.random() < 0.1 else dumps(meta).encode()
            )
            members = {"meta.npy": plain(npy(np.array(text.decode(errors="replace"))))}
            for name, array in self.arrays.items():
                held = odd_array(rng) if rng.random() < 0.2 else array
                content = npy(held)
                if rng.random() < 0.2:
                    content = mutate_bytes(content, rng, 128)
                name = (
                    rng.choice(("images/", "state", "a\0b", "x" * 300, "noise"))
                    if rng.random() < 0.05
                    else name
                )
                members[f"{name}.npy"] = plain(content)
            data = archive(members)
            if rng.random() < 0.2:
                data = mutate_bytes(data, rng, len(data))
        self.file.write_bytes(data)
        gave(data)
        choice = rng.randrange(4)
        if choice == 0:
            return read_record(self.file)
        if choice == 1:
            return Replay(self.folder)
        if choice == 2:
            return list(episodes(read_records(self.folder), 20))
        out = self.folder / "out.mcap"
        out.unlink(missing_ok=True)
        return write_mcap(read_records(self.folder), out, hz=20)


def odd_array(rng: random.Random) -> np.ndarray:
    kind = rng.choice(("u1", "i4", ">f4", "f2", "f8", "?", "U3", "S2", "c8", "M8[s]", "O", "f4,u1"))
    shape = rng.choice(
        ((), (0,), (2,), (3, 2), (8, 8, 3), (8, 8, 4), (0, 8, 3), (1,) * 9, (9000,), (9000, 1))
    )
    made = np.zeros(shape, kind)
    if made.dtype.kind in "fc" and made.size:
        made.flat[rng.randrange(made.size)] = rng.choice((np.nan, np.inf, -1.0, 60_000.0))
    return made


class Contexts:
    """The fuzzer for the contexts of split inference: damaged bytes, and headers with other types and sizes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.context = (
            [torch.randn(1, 2, 3, 8, generator=generator) for _ in range(2)],
            torch.tensor([[True, False]]),
            None,
            torch.randn(1, 4, generator=generator),
        )
        self.data = [pack(self.context, form) for form in FORMS]

    def case(self, rng: random.Random) -> object:
        data = rng.choice(self.data)
        if rng.random() < 0.5:
            data = mutate_bytes(data, rng, 80)
        else:
            end = 4 + int.from_bytes(data[:4], "little")
            heads = mutate_record(msgpack.unpackb(data[4:end]), rng, rng.choice((1, 1, 2)))
            with contextlib.suppress(
                ValueError, OverflowError, TypeError
            ):  # msgpack does not support these values
                head = msgpack.packb(heads)
                data = len(head).to_bytes(4, "little") + head + data[end:]
        gave(data)
        return unpack(data, self.context, torch.device("cpu"))


class StreamMessages:
    """The fuzzer for messages of a stream: messages that the server reads, and windows that a robot reads."""

    def __init__(self, work: Path):
        policy: Policy = load(write_bundle(work), engine="eager", threads=1)
        self.codec = NativeCodec()
        sizes = policy.padded_state_dim, policy.padded_action_dim
        self.codec.bind(lone(policy.spec, *sizes, policy, Safety(policy.processor)))
        window = schema.PredictResponse(request_id=1, actions=[0.0] * 6, horizon=3, dim=2)
        window.window.step, window.window.sample_time = 3, 1.0
        self.window = window.SerializeToString()

    def case(self, rng: random.Random) -> object:
        if rng.random() < 0.4:
            data = fields(rng, self.window)
            gave(data)
            return decode_window(data)
        taker, asker = self.codec.open_streams(), Asker()
        given: dict[str, Any] = {
            "rate": rng.choice((100.0, 0.0, -1.0, 1e9, float("nan"))) if rng.random() < 0.3 else 100.0
        }
        for _ in range(rng.randrange(3)):
            name, values = rng.choice(STREAM_FIELDS)
            given[name] = rng.choice(values)
        data = message(**given).SerializeToString()
        data = fields(rng, data) if rng.random() < 0.5 else data
        gave(data)
        header = SimpleNamespace(kind=given.get("kind", 4), session=given.get("session", ""), policy="")
        try:
            return taker.take(asker, [], header, memoryview(data))
        finally:
            for robot in list(taker.robots.values()):
                with contextlib.suppress(SinewError):
                    robot.session.read()
                with contextlib.suppress(SinewError):
                    robot.session.run()
                taker._end(robot)


STREAM_FIELDS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("kind", (4, 5)),
    ("rate", (100.0, 0.0, -1.0, 1e9, float("nan"))),
    ("time", (0.0, -1.0, 1e9, 1e308, float("nan"), float("inf"))),
    ("frame_time", (0.0, 1e308, float("nan"))),
    ("delay", (0, 1, 1 << 31, (1 << 32) - 1)),
    ("raw_state", ([], [0.0], [float("nan"), 0.0], [1e38] * 2, [0.0] * 9000)),
    ("prompt", ("", "stop", "x" * 70_000, "\0")),
    ("session", ("", "arm", "x" * 5000, "\0")),
    ("rtc", ("", "none", "guided", "?")),
    ("seed", (0, (1 << 64) - 1)),
    ("solver_steps", (0, 1, 101, (1 << 32) - 1)),
    ("interpolation", ("", "linear", "?")),
    ("text_tokens", (0, 1, (1 << 32) - 1)),
    ("noise", ([0.0],)),
    ("camera_names", (["front"], ["front"] * 100)),
)


def fields(rng: random.Random, data: bytes) -> bytes:
    """Return a message with changed bytes, or with further fields of any number and type."""
    if rng.random() < 0.5:
        return mutate_bytes(data, rng, len(data))
    for _ in range(rng.randrange(1, 4)):
        number, kind = rng.choice((rng.randrange(1, 60), rng.randrange(1, 1 << 29))), rng.randrange(6)
        body = rng.randbytes(rng.choice((1, 4, 8, 10, 200)))
        if kind == 2:
            body = varint(rng.choice((len(body), 1 << 31, 1 << 62))) + body
        data += varint(number << 3 | kind) + body
    return data


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def adapters(work: Path) -> Case:
    write_adapter(work / "toy.safetensors", FORM, tensors())
    data = (work / "toy.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])

    def case(rng: random.Random) -> object:
        if rng.random() < 0.5:
            changed = mutate_bytes(data, rng, end)
        else:
            found = mutate_record(header, rng, rng.choice((0, 1, 2)))
            if rng.random() < 0.5 and isinstance(found.get("__metadata__"), dict):
                form = json.loads(header["__metadata__"]["sinew.adapter"])
                found["__metadata__"]["sinew.adapter"] = dumps(mutate_record(form, rng, rng.choice((1, 2))))
            text = dumps(found).encode()
            changed = len(text).to_bytes(8, "little") + text + data[end:]
        gave(changed)
        return Adapter.parse(changed)

    return case


def caches(work: Path) -> Case:
    home = work / "entry"
    home.mkdir()
    shutil.copyfile(ROOT / "sinew" / "assets" / "pen.gguf", home / "pen.gguf")
    found = (home / "pen.gguf").stat()
    file = {"name": "model.safetensors", "bytes": 5, "sha256": "a"}
    record = {
        **dict.fromkeys(("source", "name", "architecture", "made", "converter"), "a"),
        "bundle": "pen.gguf",
        "bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "seconds": 1.0,
        "files": [file],
        "outside": [{**file, "name": str(home / "none")}],
        "notes": ["n"],
    }

    def write(rng: random.Random) -> str:
        return dumps(mutate_record(record, rng, rng.choice((0, 1, 1, 2))))

    def read(path: Path) -> object:
        entry = CacheEntry(path.parent)
        return entry.damage(), entry.stale(), entry.nbytes

    return Text(home / RECORD, write, read).case


def exports(work: Path) -> Case:
    (work / "graphs").mkdir()
    GraphSet("smolvla", 2, ("a", "b"), (10,), (), {"head": "int8"}, "", 8).save(work / "graphs")
    record = json.loads((work / "graphs" / "graphs.json").read_text())
    table = npy(np.zeros((10, 4), np.float32))
    text = Text(
        work / "graphs" / "graphs.json",
        lambda rng: dumps(mutate_record(record, rng, rng.choice((1, 1, 2)))),
        lambda path: GraphSet.load(path.parent),
    )

    def case(rng: random.Random) -> object:
        if rng.random() < 0.7:
            return text.case(rng)
        changed = mutate_bytes(table, rng, 130)
        (work / "moments-10.npy").write_bytes(changed)
        gave(changed)
        return _table(work / "moments-10.npy", 10)

    return case


def rules(rng: random.Random) -> object:
    """Parse settings, motions, methods of chunk merging and rules. Each parser must raise its own ValueError."""
    kind = rng.randrange(4)
    if kind == 0:
        found = mutate_record(SETTINGS, rng, rng.choice((1, 1, 2)))
        known = {key: value for key, value in found.items() if key in SETTINGS}
        return Settings(**{"hz": 20.0, **known}).controller(2)
    text = rng.choice(
        ("rtc:guided:exp:5", "ensemble:0.1+halt:2", "queue:0.5", "disagreement:0.2,5", "full", "aligned")
    )
    text = mutate_bytes(text.encode(), rng, 99).decode("utf-8", "replace")
    try:
        if kind == 1:
            return parse_motion(mutate_record(SETTINGS["motion"], rng, rng.choice((1, 2))))
        return parse_handover(text) if kind == 2 else parse_rule(text)
    except ValueError as error:  # the parsers document this error
        raise ClientError(str(error)) from None


def statistics(rng: random.Random) -> object:
    """Read manifests as a converter makes them, with values of any type."""
    manifest = _pen()
    processing = mutate_record({"action": STATISTICS, "image": {"mean": [0.5] * 3, "std": [0.5] * 3}}, rng, 1)
    made = dataclasses.replace(manifest.processing)
    for part, values in processing.items():
        if isinstance(values, dict) and hasattr(made, part):
            old = getattr(made, part)
            known = {
                key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if hasattr(old, key)
            }
            made = dataclasses.replace(made, **{part: dataclasses.replace(old, **known)})
    return dataclasses.replace(manifest, processing=made).check()


def _pen(kept: list[Manifest] = []) -> Manifest:  # noqa: B006 - kept on purpose
    if not kept:
        kept.append(Bundle(ROOT / "sinew" / "assets" / "pen.gguf").manifest)
    return kept[0]


def hub_names(rng: random.Random) -> object:
    text = rng.choice(("hf://org/name@main/file.gguf", "org/name", "org/name@v1.0", "hf:/org/name"))
    text = mutate_bytes(text.encode() * rng.choice((1, 1, 1, 50)), rng, 99).decode("utf-8", "replace")
    gave(text.encode())
    return hub.parse(text)


def metadata(rng: random.Random) -> object:
    """Read the metadata of a server, and the limits that a robot derives from it."""
    text = dumps(mutate_record(METADATA, rng, rng.choice((1, 1, 2))))
    if rng.random() < 0.3:
        text = mutate_bytes(text.encode(), rng, len(text)).decode("utf-8", "replace")
    gave(text.encode())
    found = decode_metadata(schema.PredictResponse(metadata=text))
    policy = found.get("policy")
    if isinstance(policy, dict) and isinstance(policy.get("action"), dict):
        with contextlib.suppress(
            KeyError, TypeError, ValueError, AttributeError
        ):  # the field is one that a client reads itself
            return Limits.from_metadata(policy)
    return found


def targets(work: Path) -> dict[str, Callable[[], Case]]:
    """Return name -> a function that prepares a fuzzer in ``work`` and returns its case."""

    def damaged(record: Any) -> Callable[[random.Random], str]:
        return lambda rng: dumps(mutate_record(record, rng, rng.choice((1, 1, 2, 4))))

    def tables(record: Any) -> Callable[[random.Random], str]:
        return lambda rng: toml(mutate_record(record, rng, rng.choice((1, 1, 2, 4))))

    def lines(rng: random.Random) -> str:
        events = mutate_record(journal(), rng, rng.choice((1, 1, 2, 3)))
        return "\n".join(map(dumps, events)) + "\n"

    def all_readers(path: Path) -> object:
        found = repeat(path), watched(path)
        log = read_run(path)
        return found, alternatives(log, (log.settings.choice.handover,))

    contract = yaml.safe_load(SO101.read_text())
    return {
        "recordings": lambda: Recordings(work).case,
        "contexts": lambda: Contexts().case,
        "stream messages": lambda: StreamMessages(work).case,
        "journals": lambda: Text(work / "run.jsonl", lines, all_readers).case,
        "contracts": lambda: Text(work / "c.yaml", lambda rng: yaml_tree(rng, contract), read_contract).case,
        "fleets": lambda: Text(work / "f.yaml", lambda rng: yaml_tree(rng, FLEET), read_fleet).case,
        "limits json": lambda: Text(work / "l.json", damaged(LIMITS), lambda path: Limits.read(path, 2)).case,
        "limits toml": lambda: (
            Text(work / "l.toml", tables({"limits": LIMITS}), lambda path: Limits.read(path, 2)).case
        ),
        "config toml": lambda: (
            Text(
                work / "s.toml",
                tables(CONFIG),
                lambda path: SettingsFile.read(path, ("serve", "perf", "run")),
            ).case
        ),
        "hardware toml": lambda: Text(work / "h.toml", tables(GPU), hardware).case,
        "settings": lambda: rules,
        "statistics": lambda: statistics,
        "adapters": lambda: adapters(work),
        "caches": lambda: caches(work),
        "exported json": lambda: exports(work),
        "hub names": lambda: hub_names,
        "metadata": lambda: metadata,
    }
