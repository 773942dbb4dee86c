"""Recordings from elsewhere: sizes that a file only says take no memory, and every reader of them refuses by name."""

from __future__ import annotations

import io
import json
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from sinew.core import ActionChunk, Observation, SinewError
from sinew.records.recorder import Recorder, read_record, read_records
from sinew.records.viewers.mcap_file import write_mcap
from sinew.serve.replay import Replay
from tests import processes

GIB = 1 << 30
META = {
    "recorded": 1.0,
    "wire": "native",
    "prompt": "go",
    "session": "a",
    "total_ms": 1.0,
    **dict.fromkeys(("seed", "solver_steps", "time")),
}
ACTIONS = np.zeros((4, 2), np.float32)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(kind: str, shape: tuple[int, ...]) -> bytes:
    """The beginning of an array's file, and nothing of the array."""
    said = {"descr": kind, "fortran_order": False, "shape": shape}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, said)
    return file.getvalue()


def zeros(head: bytes, size: int) -> tuple[bytes, int, int]:
    """Deflated bytes that begin with ``head`` and are zeros up to ``size``, the size, and no checksum."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + block * (size >> 24) + packer.flush(zlib.Z_FINISH), size, 0


def plain(data: bytes) -> tuple[bytes, int, int]:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush(), len(data), zlib.crc32(data)


def archive(members: dict[str, tuple[bytes, int, int]], method: int = 8) -> bytes:
    """A zip file whose directory says what it is told: name -> (packed bytes, unpacked size, checksum)."""
    out, directory = bytearray(), bytearray()
    for name, (packed, size, crc) in members.items():
        raw, said = name.encode(), min(size, 0xFFFFFFFF)
        wide = struct.pack("<HHQ", 1, 8, size) if size >= 0xFFFFFFFF else b""
        numbers = struct.pack("<IIIHH", crc, len(packed), said, len(raw), len(wide))
        directory += struct.pack("<IHHHHHH", 0x02014B50, 45, 45, 0, method, 0, 33) + numbers
        directory += struct.pack("<HHHII", 0, 0, 0, 0, len(out)) + raw + wide
        out += struct.pack("<IHHHHH", 0x04034B50, 45, 0, method, 0, 33) + numbers + raw + wide + packed
    end = struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, *[len(members) & 0xFFFF] * 2, len(directory), len(out), 0
    )
    return bytes(out + directory + end)


def record(meta: dict | str = META, **arrays: tuple[bytes, int, int]) -> dict[str, tuple[bytes, int, int]]:
    text = meta if isinstance(meta, str) else json.dumps(meta)
    held = {
        "meta": plain(npy(np.array(text))),
        "state": plain(npy(np.zeros(2))),
        "actions": plain(npy(ACTIONS)),
    }
    return {f"{name}.npy": member for name, member in (held | arrays).items()}


def bombs() -> dict[str, tuple[bytes, str]]:
    """Name -> (the file, what is said of it)."""
    frame = 6 * GIB
    shape = (frame // 3 // (1 << 15), 1 << 15, 3)
    small = plain(npy(np.zeros(1 << 23, np.uint8)))
    images = {f"images/{number}": small for number in range(33)}
    return {
        "one array": (
            archive(record(**{"images/front": zeros(header("|u1", shape), frame)})),
            "at most 268435456",
        ),
        "many arrays": (archive(record(**images)), "at most 268435456 unpacked bytes"),
        "too many": (archive(record(**{f"x{n}": plain(b"") for n in range(130)})), "at most 128 entries"),
        "a long directory": (
            archive({f"{n:06}.npy": plain(b"") for n in range(60_000)}),
            "a directory of at most",
        ),
        "a lying header": (
            archive(record(state=plain(header("<f8", (1 << 33,)) + bytes(64)))),
            "68719476736 bytes",
        ),
        "a lying directory": (
            archive(record(state=(zeros(header("|u1", (frame,)), frame)[0], 200, 0))),
            "not a record",
        ),
        "a promise": (
            archive(record(state=(plain(bytes(99))[0], 200 << 20, 0))),
            "from 6 packed bytes, got 209715200",
        ),
        "LZMA": (archive(record(), zipfile.ZIP_LZMA), "got method 14"),
        "many rows": (
            archive(record(actions=plain(npy(np.zeros((4 << 20, 6), np.uint8))))),
            "actions: expected",
        ),
    }


READERS = """
import resource, sys
from pathlib import Path
from sinew.core import SinewError
from sinew.records.viewers.mcap_file import write_mcap
from sinew.records.recorder import read_record, read_records
from sinew.serve.replay import Replay
from sinew_eval.dataset.records import episodes

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

before = peak()
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for folder in sorted(Path(sys.argv[1]).iterdir()):
    readers = {
        "record": lambda: read_record(folder / "1.npz"),
        "replay": lambda: Replay(folder),
        "mcap": lambda: write_mcap(read_records(folder), folder / "out.mcap", hz=10),
        "dataset": lambda: list(episodes(read_records(folder), 10)),
    }
    for name, reader in readers.items():
        try:
            reader()
            print(folder.name, name, "taken", sep="|")
        except SinewError as error:
            print(folder.name, name, error, sep="|")
print("grown", peak() - before, sep="|")
"""


def test_what_a_file_says_takes_no_memory(tmp_path: Path) -> None:
    """2 MB that unpack to 7.3 GB ended `sinew recording mcap` by the kernel's hand."""
    pytest.importorskip("mcap")
    found = bombs()
    for name, (data, _said) in found.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.npz").write_bytes(data)
    done = processes.run([sys.executable, "-c", READERS, str(tmp_path)], timeout=900)
    assert done.returncode == 0, done.stderr
    *lines, grown = (line.split("|") for line in done.stdout.splitlines())
    assert len(lines) == 4 * len(found)
    for name, reader, said in lines:
        if (name, reader) not in (
            ("a lying header", "replay"),
            ("a lying directory", "replay"),
        ):  # it reads no state
            assert found[name][1] in said, (name, reader, said)
    assert int(grown[1]) < 300  # MiB: numpy, mcap and 24 MiB of actions


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (META | {"recorded": 1e308}, "recorded"),
        (META | {"recorded": float("nan")}, "recorded"),
        (META | {"recorded": int("9" * 400)}, "meta: "),
        (META | {"total_ms": float("inf")}, "total_ms: expected a finite number, got inf"),
        (META | {"session": 5}, r"Expected `str`, got `int` - at `\$.session`"),
        (META | {"prompt": ["go"]}, r"at `\$.prompt`"),
        (META | {"prompt": "\ud800"}, "meta: "),
        (META | {"seed": {"a": 1}}, r"at `\$.seed`"),
        (META | {"server": [1]}, r"at `\$.server`"),
        (META | {"server": {"precision": ["fp32"]}}, "server.precision"),
        ("[" * 100_000, "meta: expected at most 64 levels of containers"),
        ('{"seed": ' + "9" * 5000 + "}", "meta: .*Exceeds the limit"),
        ("[1]", "meta: Expected `object`, got `array`"),
    ],
)
def test_what_a_record_says_of_itself(tmp_path: Path, meta: dict | str, said: str) -> None:
    (tmp_path / "1.npz").write_bytes(archive(record(meta)))
    for reader in (lambda: read_record(tmp_path / "1.npz"), lambda: Replay(tmp_path)):
        with pytest.raises(SinewError, match=f"1.npz: not a record .*{said}"):
            reader()


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("images/front", np.zeros(3, np.uint8), "images/front: expected uint8 or float"),
        ("images/front", np.zeros((4, 4, 3), np.int32), r"got int32 \[4, 4, 3\]"),
        ("images/" + "a" * 300, np.zeros((4, 4, 3), np.uint8), "name of 1 to 256"),
        ("state", np.zeros((2, 2)), "state: expected at most 8192 numbers"),
        ("state", np.array(["a"]), "got <U1"),
        ("state", np.zeros(8193), r"got float64 \[8193\]"),
        ("actions", np.full((2, 2), np.nan), "actions: expected finite numbers"),
        ("actions", np.zeros((8193, 1)), "H at most 8192"),
        ("noise", np.zeros((1 << 20) + 1, np.uint8), "noise: expected at most 1048576 numbers"),
    ],
)
def test_arrays_that_no_request_has(tmp_path: Path, name: str, array: np.ndarray, said: str) -> None:
    (tmp_path / "1.npz").write_bytes(archive(record(**{name: plain(npy(array))})))
    with pytest.raises(SinewError, match=f"1.npz: not a record .*{said}"):
        read_record(tmp_path / "1.npz")


def test_a_recorder_writes_what_can_be_read(tmp_path: Path) -> None:
    """The longest prompt that a wire takes, each character twelve in JSON, and a refused time that is no number."""
    recorder = Recorder(tmp_path)
    frame = np.full((2, 3, 3), np.nan, np.float32)
    seen = Observation(images={"front": frame}, state=np.zeros(8192), prompt="😀" * 65_536, time=float("nan"))
    recorder.put("native", "arm", seen, SinewError("time: expected a number"))
    recorder.put("native", "arm", Observation(images={}, state=np.zeros(9000)), SinewError("state: too long"))
    recorder.put(
        "native", "arm", Observation(images={"front": frame}, state=np.zeros(2)), ActionChunk(ACTIONS, seed=1)
    )
    recorder.close()
    assert (recorder.stats()["written"], recorder.stats()["failed"]) == (2, 1)
    first, second = read_records(tmp_path)
    assert first.observation.prompt == seen.prompt
    assert second.actions is not None
    pytest.importorskip("mcap")
    counts = write_mcap(read_records(tmp_path), tmp_path / "out.mcap")
    assert counts == {"/camera/front": 2, "/state": 2, "/action": 1, "/request": 2}


def test_topics_are_bounded(tmp_path: Path) -> None:
    pytest.importorskip("mcap")
    small = plain(npy(np.zeros((1, 1, 3), np.uint8)))
    for number in range(17):
        images = {f"images/{number}-{camera}": small for camera in range(60)}
        (tmp_path / f"{number}.npz").write_bytes(archive(record(**images)))
    with pytest.raises(SinewError, match="records: expected at most 1000 topics"):
        write_mcap(read_records(tmp_path), tmp_path / "out.mcap")
