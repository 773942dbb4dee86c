"""Fuzzers for checkpoints, bundles, exported folders and records. ``tests.hostile.fuzz`` runs the long form.

Every input must give a policy or a :class:`SinewError`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from sinew.bundle import Bundle, write_bundle
from sinew.bundle.facts import describe
from sinew.bundle.quant import FORMATS
from sinew.bundle.schema import KEY_ARCHITECTURE, Manifest
from sinew.bundle.writer import rewrite
from sinew.cli.inspect import show
from sinew.convert import ConvertOptions, convert, read
from sinew.convert.read.torch_zip import read_torch
from sinew.core import ActionChunk, Observation, SinewError
from sinew.layers.stores.lowbit import dequantize
from sinew.lowbit.sources import lowbit_sources, plan_formats
from sinew.policy import Policy, load
from sinew.processing import Processor
from sinew.records.recorder import Recorder, read_record
from tests.adapters import make_adapters, options_of
from tests.cases import golden_cases
from tests.convert.openpi_layout import write_checkpoint
from tests.convert.vlacpp_file import write_vlacpp, write_vlacpp_pi
from tests.hostile.mutate import dumps, mutate_bytes, mutate_record

EXPECTED = (SinewError,)
ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
Case = Callable[[random.Random], None]


@dataclass(frozen=True)
class Checkpoint:
    """A copy of a checkpoint.

    Attributes:
        root: Folder or file to convert.
        options: Options of the conversion.
    """

    home: Path
    root: Path
    options: ConvertOptions


STATISTICS = {"mean": [0.0] * 6, "std": [1.0] * 6}
DROID = {"embodiment": "oxe_droid_relative_eef_relative_joint", "settings": {"frames": "240x300"}}
GIVEN = {"arch": "arch.json", "stats": "statistics.json"}
FAMILIES: dict[
    str, tuple[tuple[str, str, dict[str, object]], ...]
] = {  # name of the group -> case, folder, options
    "checkpoints of LeRobot": (
        ("smolvla-2cam", "checkpoint", {"vlm": "vlm"}),
        ("pi0-2cam", "checkpoint", {"arch": "arch.json"}),
        ("pi05-2cam", "checkpoint", {"arch": "arch.json"}),
        ("pi0fast-2cam", "checkpoint", {"arch": "arch.json"}),
        *((case, "checkpoint", {}) for case in ("act-env", "diffusion-ddim", "xvla-ee6d", "xvla-auto")),
        *((case, "checkpoint", {}) for case in ("vqbet-sequential", "mtdit-ddpm", "eo1-fast", "wallx-3cam")),
        ("molmoact2-3cam", "checkpoint", {}),
        ("turbovla-3cam", "checkpoint", {**GIVEN, "stats_key": "robot", "settings": {"gripper": "scaled"}}),
    ),
    "checkpoints of GR00T": (
        ("groot-n17", "checkpoint", {"vlm": "vlm", **DROID}),
        ("groot-n16", "checkpoint", {"vlm": "eagle", "settings": {"letterbox": "true"}}),
        ("groot-n15", "checkpoint", {"vlm": "eagle", "base": "base"}),
        ("groot-n15", "base", {"vlm": "eagle", "settings": {"embodiment_id": "2"}}),
    ),
    "checkpoints of OpenVLA": tuple(
        (case, "checkpoint", {}) for case in ("openvla-ar", "openvla-oft", "vla-adapter", "bitvla")
    ),
}


def checkpoints(golden: Path, work: Path, family: str) -> list[Checkpoint]:
    """Return copies of the golden checkpoints of a group, which a fuzzer may damage."""
    if family == "checkpoints of openpi":
        return [openpi_checkpoint(golden, work, name) for name in ("pi0_aloha", "pi05_droid")]
    found = []
    for case, root, options in FAMILIES[family]:
        home = work / f"{case}-{root}"
        ignored = shutil.ignore_patterns("fixture.safetensors")
        shutil.copytree(golden / case, home, copy_function=shutil.copyfile, ignore=ignored)
        record = {"observation.state": STATISTICS, "action": STATISTICS}
        (home / "stats.json").write_text(json.dumps(record))
        given = {
            key: home / str(value) if key in ("vlm", "base", "arch", "stats") else value
            for key, value in options.items()
        }
        found.append(Checkpoint(home, home / root, ConvertOptions(**given)))  # type: ignore[arg-type]
    return found


def openpi_checkpoint(golden: Path, work: Path, name: str) -> Checkpoint:
    """Write a golden pi checkpoint in openpi's layout."""
    (home := work / f"openpi-{name}").mkdir()
    root, arch, _statistics = write_checkpoint(golden, home, name)
    return Checkpoint(home, root, ConvertOptions(arch=arch, openpi_config=name))


class Checkpoints:
    """The fuzzer for checkpoints, which damages one file at a time."""

    def __init__(self, found: list[Checkpoint]):
        self.files = [
            (path, each)
            for each in found
            for path in sorted(each.home.rglob("*"))
            if path.suffix in (".json", ".safetensors", ".pt", ".model")
        ]

    def case(self, rng: random.Random) -> None:
        """Damage one file, read the checkpoint as `sinew convert` does up to its weights, and restore the file."""
        path, checkpoint = rng.choice(self.files)
        options, home = checkpoint.options, checkpoint.home
        original = path.read_bytes()
        try:
            if path.suffix == ".json" and rng.random() < 0.9:
                record = json.loads(original)
                path.write_text(dumps(mutate_record(record, rng, rng.choice((1, 1, 2, 4)))))
            else:
                path.write_bytes(mutate_bytes(original, rng, 40_000))
            if path.name == "stats.json":
                options = replace(options, stats=path)
            conversion = read(checkpoint.root, options)
            if rng.random() < 0.02:
                conversion.write(home / "out.gguf", "out", options)
                Policy(Bundle(home / "out.gguf"), engine="eager").warm_up()
        finally:
            path.write_bytes(original)


class VlaCpp:
    """The fuzzer for GGUF files of vla.cpp, which damages bytes before the weights."""

    def __init__(self, golden: Path, work: Path):
        self.work = work
        self.cases = []
        for case, write, vlm in (
            ("smolvla-2cam", write_vlacpp, "vlm"),
            ("pi05-2cam", write_vlacpp_pi, "checkpoint/tokenizer"),
        ):
            data = write(golden / case, work / f"{case}.vlacpp.gguf").read_bytes()
            self.cases.append((data, golden / case / vlm))

    def case(self, rng: random.Random) -> None:
        """Damage bytes and import the file."""
        data, tokenizer = rng.choice(self.cases)
        file = self.work / "theirs.gguf"
        file.write_bytes(mutate_bytes(data, rng, rng.choice((64, 2000, 20_000))))
        read(file, ConvertOptions(tokenizer=tokenizer, cameras=("camera1", "camera2")))


class Manifests:
    """The fuzzer for the metadata of bundles. The damaged bundles are opened, shown, loaded and run."""

    def __init__(self, bundles: list[Path]):
        self.bundles = [Bundle(path) for path in bundles]

    def case(self, rng: random.Random) -> None:
        """Damage one record of the metadata, then do the same as `inspect` and `serve`."""
        bundle = copy.copy(rng.choice(self.bundles))
        bundle.file = copy.copy(bundle.file)
        metadata = dict(bundle.file.metadata)
        key = rng.choice([key for key, value in metadata.items() if isinstance(value, str)])
        if metadata[key].startswith("{"):
            record = mutate_record(json.loads(metadata[key]), rng, rng.choice((1, 1, 2, 4)))
            metadata[key] = dumps(record)
        else:
            metadata[key] = rng.choice(("", "[/red]", "x" * 9999, "pi0", "pi05", "smolvla"))
        bundle.file.metadata = metadata
        bundle.manifest = Manifest.from_metadata(metadata)
        with contextlib.redirect_stdout(io.StringIO()):
            describe(bundle)
            if rng.random() < 0.1:
                show(bundle, True)
        policy = Policy(bundle)
        with contextlib.suppress(SinewError):
            policy.warm_up()


class Recipes:
    """The fuzzer for the processing of frames, instructions, states and actions, which is data in the bundle."""

    def __init__(self, bundles: list[Path]):
        self.manifests = [Bundle(path).manifest for path in bundles]

    def case(self, rng: random.Random) -> None:
        """Damage the processing of one policy and use it."""
        manifest = rng.choice(self.manifests)
        metadata = {**manifest.to_metadata(), KEY_ARCHITECTURE: manifest.architecture}
        key = rng.choice([key for key in metadata if "processing" in key or "spec" in key])
        record = mutate_record(json.loads(metadata[key]), rng, rng.choice((1, 1, 1, 2)))
        damaged = Manifest.from_metadata({**metadata, key: dumps(record)})
        processor = Processor(damaged)
        spec = processor.spec
        frames = {each.name: np.zeros((each.height, each.width, 3), np.uint8) for each in spec.cameras}
        observation = Observation(images=frames, state=np.zeros(spec.state.dim), prompt="go", seed=1)
        processor.prepare(observation)
        width = damaged.processing.padded_action_dim
        processor.actions(np.zeros((spec.chunk_size, width), np.float32), observation)


class Headers:
    """The fuzzer for bundles that damages bytes before the weights."""

    def __init__(self, bundles: list[Path], work: Path):
        self.work = work
        self.data = [path.read_bytes() for path in bundles]
        self.ends = [min(info.offset for info in Bundle(path).infos.values()) for path in bundles]

    def case(self, rng: random.Random) -> None:
        """Damage bytes and load the bundle."""
        index = rng.randrange(len(self.data))
        data, end = self.data[index], self.ends[index]
        within = rng.choice((64, 4096, end))
        file = self.work / "header.gguf"
        if rng.random() < 0.7:
            file.write_bytes(mutate_bytes(data[:end], rng, within) + data[end:])
        else:
            tail = max(end - 12_000, 0)
            file.write_bytes(data[:tail] + mutate_bytes(data[tail:end], rng, end - tail) + data[end:])
        # without this patch, every input would fail at the hash
        with mock.patch("sinew.bundle.reader.read_hashes", return_value=None):
            Policy(Bundle(file))


class LowBit:
    """The fuzzer for bundles with quantised weights: damaged headers, damaged weights, and random bytes for the
    unpacking."""

    def __init__(self, work: Path):
        self.work = work
        self.data: list[tuple[bytes, int]] = []
        opened = Bundle(ASSETS / "pen.gguf")
        for kind in ("int8", "q8_0", "q4_0"):
            recipe = {"vision": kind, "language": kind, "head": kind}
            path = work / f"{kind}.gguf"
            write_bundle(path, lambda: opened.manifest, lowbit_sources(opened, plan_formats(opened, recipe)))
            end = min(info.offset for info in Bundle(path).infos.values())
            self.data.append((path.read_bytes(), end))

    def case(self, rng: random.Random) -> None:
        """Damage a header or weights, load and run the bundle. Or unpack random bytes with a random shape."""
        if rng.random() < 0.5:
            name = rng.choice([name for name, each in FORMATS.items() if each.group])
            k, rows = rng.choice((0, 1, 31, 32, 33, 96)), rng.choice((0, 1, 3))
            width = rng.choice((FORMATS[name].row_bytes(96), rng.randrange(120)))
            stored = np.frombuffer(rng.randbytes(rows * width), np.uint8).reshape(rows, width)
            with contextlib.suppress(
                ValueError, RuntimeError
            ):  # such a shape would be a mistake of the caller, because shapes come from the header
                dequantize(torch.from_numpy(stored.copy()), None, name, k)
            return
        data, end = rng.choice(self.data)
        file = self.work / "lowbit.gguf"
        if rng.random() < 0.6:
            file.write_bytes(mutate_bytes(data[:end], rng, end) + data[end:])
        else:
            raw = bytearray(data)
            for _ in range(64):
                raw[rng.randrange(end, len(raw))] = rng.choice(
                    (0, 0x7C, 0x7F, 0xFC, 0xFF)
                )  # the scales may also be infinite
            file.write_bytes(raw)
        with mock.patch("sinew.bundle.reader.read_hashes", return_value=None):
            Policy(Bundle(file), engine=rng.choice(("eager", "cpu")), threads=1).warm_up()


class Exports:
    """The fuzzer for the folders of ``sinew export``: their record, tables, header and graphs."""

    def __init__(self, work: Path):
        from sinew.engine.onnx.opening import write_folder

        self.folder = work / "exported"
        self.folder.mkdir()
        bundle = Path(
            shutil.copyfile(ASSETS / "pen.gguf", work / "pen.gguf")
        )  # the graphs are next to their bundle
        write_folder(Bundle(bundle), self.folder)
        self.files = sorted(path for path in self.folder.iterdir() if path.is_file())

    def case(self, rng: random.Random) -> None:
        """Damage one file, open the folder and run it."""
        path = rng.choice(self.files)
        original = path.read_bytes()
        try:
            if path.suffix == ".json" and rng.random() < 0.9:
                path.write_text(dumps(mutate_record(json.loads(original), rng, rng.choice((1, 1, 2, 4)))))
            elif rng.random() < 0.1:
                path.unlink()
            else:
                path.write_bytes(mutate_bytes(original, rng, rng.choice((200, 4000, len(original)))))
            policy = load(self.folder, engine="onnx", threads=1)
            # A graph that opens and cannot run has an error of ONNX Runtime, which `sinew` prints as one line.
            with contextlib.suppress(RuntimeError):
                policy.warm_up()
        finally:
            path.write_bytes(original)


class AdapterFiles:
    """The fuzzer for adapters: damaged headers, records and factors are opened, loaded and run with their base."""

    def __init__(self, work: Path):
        found = make_adapters("smolvla-2cam", work / "base.gguf", work)
        checkpoint = golden_cases() / "smolvla-2cam" / "checkpoint"
        self.base = Bundle(convert(checkpoint, found.base, **options_of("smolvla-2cam")))
        self.file = work / "damaged.gguf"
        self.data = [(path, path.read_bytes()) for path in found.files.values()]

    def case(self, rng: random.Random) -> None:
        """Damage one adapter, load it with its base and run both."""
        path, data = rng.choice(self.data)
        opened = Bundle(path)
        end = min(info.offset for info in opened.infos.values())
        if rng.random() < 0.3:
            said = opened.manifest
            records = said.to_metadata()
            key = rng.choice([key for key, value in records.items() if str(value).startswith("{")])
            records[key] = dumps(mutate_record(json.loads(str(records[key])), rng, rng.choice((1, 1, 2))))
            damaged = Manifest.from_metadata({**records, KEY_ARCHITECTURE: said.architecture})
            rewrite(opened, damaged, self.file)
        elif rng.random() < 0.6:
            self.file.write_bytes(mutate_bytes(data[:end], rng, rng.choice((4096, end))) + data[end:])
        else:
            raw = bytearray(data)
            for _ in range(64):
                raw[rng.randrange(end, len(raw))] = rng.choice((0, 0x7C, 0x7F, 0xFC, 0xFF))
            self.file.write_bytes(raw)
        # Without this change, damage to the header would always fail at its hash. An attacker would write the hash
        # too.
        with mock.patch("sinew.bundle.reader.read_hashes", return_value=None):
            policy = Policy(self.base, "cpu", threads=1, adapters={"a": self.file})
        policy.infer(replace(policy.dummy_observation(), adapter="a"))


class Records:
    """The fuzzer for records of ``sinew serve --record``."""

    def __init__(self, work: Path):
        recorder = Recorder(work / "records")
        frame, state = np.zeros((8, 8, 3), np.uint8), np.zeros(2)
        chunk = ActionChunk(np.zeros((3, 2), np.float32), seed=1)
        recorder.put("native", "arm", Observation(images={"front": frame}, state=state, seed=1), chunk)
        recorder.close()
        self.data = next((work / "records").glob("*.npz")).read_bytes()
        self.file = work / "damaged.npz"

    def case(self, rng: random.Random) -> None:
        """Damage bytes and read the record."""
        self.file.write_bytes(mutate_bytes(self.data, rng, len(self.data)))
        read_record(self.file)


class TorchFiles:
    """The fuzzer for ``.pt`` files."""

    def __init__(self, work: Path):
        self.work = work
        buffer = io.BytesIO()
        torch.save({"module": {"a": torch.ones(7, 3), "b": torch.ones(5).bfloat16()}, "step": 1}, buffer)
        self.data = buffer.getvalue()

    def case(self, rng: random.Random) -> None:
        """Damage bytes and read every tensor."""
        file = self.work / "head.pt"
        file.write_bytes(mutate_bytes(self.data, rng, len(self.data)))
        for source in read_torch(file).values():
            for _ in source.data.blocks():
                pass


def makers(golden: Path, work: Path) -> Mapping[str, Callable[[], Case]]:
    """Return all fuzzers by name. Calling one of them prepares its files in ``work``."""

    @cache
    def bundles() -> list[Path]:
        found = [each for family in FAMILIES for each in checkpoints(golden, work / "whole", family)]
        return [
            convert(each.root, work / "whole" / f"{number}-{each.home.name}.gguf", **_given(each.options))
            for number, each in enumerate(found)
        ]

    def of_family(family: str) -> Callable[[], Case]:
        return lambda: Checkpoints(checkpoints(golden, work / "damaged", family)).case

    return {
        **{name: of_family(name) for name in (*FAMILIES, "checkpoints of openpi")},
        "vla.cpp files": lambda: VlaCpp(golden, work).case,
        "manifests": lambda: Manifests(bundles()).case,
        "recipes": lambda: Recipes([*bundles(), ASSETS / "pen.gguf"]).case,
        "headers": lambda: Headers(bundles()[:3], work).case,
        "low-bit weights": lambda: LowBit(work).case,
        "exported folders": lambda: Exports(work).case,
        "records": lambda: Records(work).case,
        "adapters": lambda: AdapterFiles(work).case,
        "torch files": lambda: TorchFiles(work).case,
    }


def _given(options: ConvertOptions) -> dict[str, Any]:
    """Return the options as arguments of ``convert``."""
    names = ("vlm", "base", "arch", "openpi_config", "embodiment", "settings")
    return {name: getattr(options, name) for name in names if getattr(options, name)}
