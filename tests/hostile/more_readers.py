"""More fuzzers for texts and small files: the bounded reader, records in the user's caches, descriptions of arms, and
the files of an evaluation.

As in :mod:`tests.hostile.readers`, an input must give a value or one of ``readers.EXPECTED``.
"""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from sinew_client import untrusted
from sinew_client.arm.end_effector import KinematicsOptions
from sinew_client.arm.kinematics import read_chain
from sinew_client.untrusted import UntrustedError
from sinew_eval.episodes import episode_log
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task
from sinew_eval.episodes.variants import Variant
from sinew_eval.evidence import leaderboard, repeat
from sinew_eval.farm.files import FORMAT, PLAN, FarmPlan
from sinew_eval.report.gate import GATES, read_gate
from sinew_perf import success

from sinew.bundle import Bundle
from sinew.bundle.digests import DigestCache
from sinew.convert.sources.card import records_of
from sinew.core import SinewError
from sinew.engine import prepared, proofs
from sinew.serve.wires.lerobot.agreements import Agreements
from tests.hostile.meter import gave
from tests.hostile.mutate import dumps, mutate_bytes, mutate_record
from tests.hostile.readers import LIMITS_OF_PYTHON, Case, Text, toml, yaml_tree

ROOT = Path(__file__).resolve().parents[2]
PEN = ROOT / "sinew" / "assets" / "pen.gguf"
ARM = ROOT / "examples" / "robots" / "ur5e.urdf"
RECORD = {"a": [1, 2.5, None, True, "text"], "b": {"c": [[1], [2]], "d": ""}, "e": -1e-9}
OPTIONS = {
    "tip": "tool0",
    "action": "dxyz*0.02,gripper",
    "state": "xyz,gripper",
    "unit": "rad",
    "offsets": "tip",
    "rotation": "keep",
    "within": [1e-3, 1e-2],
    "singular": 0.01,
    "velocity": [1.0] * 6,
}


def bounded(read: Callable[[], object]) -> object:
    """Call a reader, and raise its own error as an error of the product."""
    try:
        return read()
    except UntrustedError as error:
        raise SinewError(str(error)) from None


def texts(rng: random.Random) -> object:
    """Read JSON, TOML and YAML with the bounded reader."""
    record = mutate_record(RECORD, rng, rng.choice((0, 1, 2, 4)))
    kind = rng.choice(("json", "toml", "yaml"))
    write = {"json": dumps, "toml": toml, "yaml": lambda record: yaml_tree(rng, record)}[kind]
    data = write(record).encode(errors="surrogatepass")
    if rng.random() < 0.4:
        data = mutate_bytes(data, rng, len(data))
    if rng.random() < 0.1:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(LIMITS_OF_PYTHON) * rng.choice((1, 1, 8)) + data[at:]
    gave(data)
    if kind == "json":
        return bounded(lambda: untrusted.parse_json(data))
    text = data.decode(errors="replace")
    return bounded(lambda: {"toml": untrusted.parse_toml, "yaml": untrusted.parse_yaml}[kind](text))


def lines(work: Path) -> Case:
    """Read JSON lines with the bounded reader."""
    text = Text(
        work / "lines.jsonl",
        lambda rng: "\n".join(dumps(mutate_record(RECORD, rng, rng.choice((0, 1, 2)))) for _ in range(3)),
        lambda path: bounded(lambda: list(untrusted.read_jsonl(path, 4096))),
    )
    return text.case


def archives(work: Path) -> Case:
    """Read zip archives and arrays with the bounded reader."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, a=np.arange(6.0).reshape(2, 3), **{"b/c": np.array("text")})
    packed = buffer.getvalue()
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("folder/data.bin", b"x" * 100)
        archive.writestr("a.txt", b"text")
    plain, array = buffer.getvalue(), io.BytesIO()
    np.save(array, np.arange(6, dtype="<f4").reshape(2, 3))
    path = work / "archive"

    def everything(path: Path) -> object:
        with untrusted.open_archive(path) as archive:
            return [archive.read(name) for name in archive.names]

    readers = ((packed, untrusted.read_npz), (plain, everything), (array.getvalue(), untrusted.read_npy))

    def case(rng: random.Random) -> object:
        data, read = rng.choice(readers)
        start = rng.choice((0, max(len(data) - 200, 0)))  # the directory of a zip archive is at its end
        data = data[:start] + mutate_bytes(data[start:], rng, len(data))
        path.write_bytes(data)
        gave(data)
        return bounded(lambda: read(path))

    return case


def messages(rng: random.Random) -> object:
    """Read MessagePack with the bounded reader."""
    record = mutate_record({**RECORD, "f": [b"x" * 40] * 3}, rng, rng.choice((0, 1, 2)))
    try:
        data = msgpack.packb(record)
    except (OverflowError, ValueError, TypeError):
        data = b"\x81\xa1a" * rng.randrange(200)
    data = mutate_bytes(data, rng, len(data))
    gave(data)
    return bounded(lambda: untrusted.unpack_msgpack(data))


def arms(work: Path) -> Case:
    """Read descriptions of arms, and options of the end effector."""
    description = ARM.read_text()
    text = Text(work / "arm.urdf", lambda rng: description, lambda path: read_chain(path, "tool0"))

    def case(rng: random.Random) -> object:
        if rng.random() < 0.5:
            return text.case(rng)
        return KinematicsOptions.parse(mutate_record({"o": OPTIONS}, rng, rng.choice((1, 1, 2))).get("o"))

    return case


def own_records(work: Path) -> Case:
    """Read the files in the user's folders: verification results, findings, hashes, and accepted conditions."""
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    spec = Bundle(PEN).manifest.spec
    proof = {"passed": True, "sinew": "0", "hardware": "cpu", "engine": "onnx"}
    finding = {
        "engine": "onnx",
        "against": "plan",
        "taken": True,
        "why": "w",
        "device": "cpu",
        "seconds": {"a": 1.0},
    }
    agreed = {"policy": "p", "hosts": {"h": [{"joints": ["a"], "cameras": {}, "rows": 3}]}}
    proof_file = proofs._path(PEN, "onnx", "cpu")
    memo = DigestCache(work, work / "digests")
    memo_file = memo.path
    targets: tuple[tuple[Path, Any, Callable[[Path], object]], ...] = (
        (proof_file, proof, lambda _: (proofs.lacking(PEN, "onnx", "cpu"), proofs.records(PEN))),
        (prepared._path(PEN, "onnx"), finding, lambda _: prepared.kept(PEN, "onnx")),
        (memo_file, {"/a": [[1, 2, 3, 4, 5], "ab"]}, lambda _: DigestCache(work, work / "digests").entries),
        (work / "lerobot.json", agreed, lambda path: Agreements(2).open(path, spec)),
    )
    for path, _, _ in targets:
        path.parent.mkdir(parents=True, exist_ok=True)

    def writer(record: Any) -> Callable[[random.Random], str]:
        return lambda rng: dumps(mutate_record(record, rng, rng.choice((0, 1, 1, 2))))

    cases = [Text(path, writer(record), read).case for path, record, read in targets]
    return lambda rng: rng.choice(cases)(rng)


# ----------------------------------------------------------------------------- evaluation


def gates(work: Path) -> Case:
    good = [json.loads(path.read_text()) for path in sorted(GATES.glob("*.json"))]
    write = lambda rng: dumps(mutate_record(rng.choice(good), rng, rng.choice((0, 1, 1, 2))))  # noqa: E731

    def read(path: Path) -> object:
        gate = read_gate(path)
        return gate, gate.outcomes

    return Text(work / "gate.json", write, read).case


def plans(work: Path) -> Case:
    record = {
        "format": FORMAT,
        "lease_s": 60.0,
        "task": Task().to_dict(),
        "keys": ["k"],
        "jobs": [[0, 1, 2]],
        "variants": [Variant("expert").to_dict()],
    }
    write = lambda rng: dumps(mutate_record(record, rng, rng.choice((0, 1, 1, 2))))  # noqa: E731
    return Text(work / PLAN, write, lambda path: FarmPlan.read(path.parent)).case


def logs(work: Path) -> Case:
    good = json.loads(
        episode_log.line("k", Episode(1, "", True, 9, 2, 8, 1, 0, [1, 2], [5.0, 6.0], 8, digest="ab"))
    )

    def write(rng: random.Random) -> str:
        return "".join(dumps(mutate_record(good, rng, rng.choice((0, 1, 2)))) + "\n" for _ in range(3))

    def read(path: Path) -> object:
        return list(episode_log.episodes_of(episode_log.read_log_file(path)))

    return Text(work / "episodes.jsonl", write, read).case


def reports(work: Path) -> Case:
    variant = {
        "label": "a",
        "variant": Variant("expert").record(),
        "policy": {"kind": "bundle", "id": "ab"},
        "latency_ms": {"p50": 5.0},
        "actions_per_chunk": 4,
        "mean_steps_to_success": 9.0,
        "dtype": "fp32",
        "by_task": {"": {"wins": 1, "episodes": 2, "interval": [0.1, 0.9]}},
        "chunk_size": 8,
        "bundle": {"name": "a", "bytes": 9, "backbone": ""},
        "peak_bytes": None,
        "failed_seeds": [1],
        "wins": 1,
        "episodes": 2,
        "success": 0.5,
        "interval": [0.1, 0.9],
    }
    trials = [
        {"seed": seed, "success": seed == 0, "steps": 9, "digest": "ab", "task": ""} for seed in range(2)
    ]
    record = {
        "schema": repeat.SCHEMA,
        "task": Task().record(),
        "control_hz": 10.0,
        "hardware": "cpu",
        "seeds": {"first": 0, "count": 2},
        "variants": [variant],
        "outcomes": [trials],
    }

    def write(rng: random.Random) -> str:
        damaged = mutate_record(record, rng, rng.choice((0, 1, 1, 2, 3)))
        if isinstance(damaged, dict) and rng.random() < 0.3:
            damaged.pop("outcomes", None)
        return dumps(damaged)

    def read(path: Path) -> object:
        boards = leaderboard.boards([path])
        drawn = [(leaderboard.rows(board), leaderboard.pair_rows(board)) for board in boards]
        cards = records_of(PEN, [path], "ab")
        return drawn, cards, repeat.read(path)

    return Text(work / "report.json", write, read).case


def surfaces(work: Path) -> Case:
    variants = [
        {"variant": {"handover": name, "replan": 2, "latency": latency}, "wins": 3, "episodes": 4}
        for name in ("aligned", "naive")
        for latency in ("0", "50ms", "0.2ms", "7")
    ]
    record = {"schema": "sinew.eval/1", "control_hz": 20.0, "task": {"env": "a"}, "variants": variants}

    def write(rng: random.Random) -> str:
        return dumps(mutate_record(record, rng, rng.choice((0, 1, 1, 2, 3))))

    def read(path: Path) -> object:
        task, ways = success.read_surface(path)
        late = success.LatencySpread(60.0, 20.0)
        return task, success.best(ways, late), success.reasons(ways[:1], 0.9, 0.0)

    return Text(work / "surface.json", write, read).case


def targets(work: Path) -> dict[str, Callable[[], Case]]:
    """Return name -> a function that prepares a fuzzer in ``work`` and returns its case."""
    return {
        "bounded texts": lambda: texts,
        "bounded lines": lambda: lines(work),
        "bounded archives": lambda: archives(work),
        "bounded messages": lambda: messages,
        "arms": lambda: arms(work),
        "own records": lambda: own_records(work),
        "gates": lambda: gates(work),
        "farm plans": lambda: plans(work),
        "episode logs": lambda: logs(work),
        "reports": lambda: reports(work),
        "success surfaces": lambda: surfaces(work),
    }
