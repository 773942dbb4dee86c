"""The bounded reader: each kind of text, array, message and archive at its bounds and beyond them."""

from __future__ import annotations

import io
import json
import os
import struct
import time
import zipfile
from pathlib import Path

import msgpack
import numpy as np
import pytest
from sinew_client import untrusted
from sinew_client.untrusted import TornLineError, UntrustedError

from tests.work import lines_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 65 + "]" * 65, "at most 64 levels of containers, got more"),
        ("[" * 200_000, "at most 64 levels of containers, got more"),
        ('{"a":' * 200_000, "at most 64 levels of containers, got more"),
        ("NaN", "expected finite numbers, got nan"),
        ("[1, {}, 1e999]", "expected finite numbers, got inf"),
        ('{"a": [-Infinity]}', "expected finite numbers, got -inf"),
        ('"\\ud800"', "half a character"),
        ('{"\\uD800": 1}', "half a character"),
        ("9" * 5000, "limit"),
        ("", "expected JSON, got text that is not JSON"),
        ("[1,]", "expected JSON, got text that is not JSON"),
        (b"\xff", "expected UTF-8 text, got invalid start byte at byte 0"),
        ("[" + "1," * 10 + "1]", "at most 10 values, got more"),
    ],
)
def test_texts_that_are_no_json(text: str | bytes, message: str) -> None:
    most = 10 if len(text) < 40 else 1 << 20
    with pytest.raises(UntrustedError, match=message) as caught:
        untrusted.parse_json(text, max_values=most)
    assert len(str(caught.value)) < 400


def test_json_within_its_bounds() -> None:
    value = {"a": [1, 2.5, None, True, "é,[{"], "b": {}}
    assert untrusted.parse_json(json.dumps(value).encode(), max_values=12) == value
    assert untrusted.parse_json("[" * 64 + "]" * 64)
    assert untrusted.parse_json(json.dumps(",[{:" * 100), max_values=2) == ",[{:" * 100  # marks in a text
    assert np.isnan(untrusted.parse_json("NaN", finite=False))


def test_marks_of_texts_are_counted_in_linear_time() -> None:
    text = "[" + '"\\"' * 300_000
    started = time.process_time()
    with pytest.raises(UntrustedError):
        untrusted.parse_json(text, max_values=1)
    assert time.process_time() - started < 5


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert untrusted.read_json(path) == {"a": 1}
    assert untrusted.read_bytes(path, 8) == b'{"a": 1}'
    with pytest.raises(UntrustedError, match="at most 7 bytes, got more"):
        untrusted.read_bytes(path, 7)
    os.truncate(path, 1 << 40)  # sparse
    with pytest.raises(UntrustedError, match="at most 262144 bytes, got more"):
        untrusted.read_json(path)
    assert untrusted.read_text("/proc/self/stat")  # whose size is 0
    with pytest.raises(OSError, match="a\\\\x00b"):
        untrusted.read_text("a\0b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link to a FIFO"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        os.mkfifo(tmp_path / "b")
        path.symlink_to(tmp_path / "b")
    readers = (
        *(untrusted.open_regular, untrusted.open_lock, untrusted.read_bytes, untrusted.read_text),
        *(untrusted.read_json, untrusted.read_toml, untrusted.read_yaml, untrusted.read_npy),
        *(untrusted.read_npz, untrusted.open_archive, lambda path: list(untrusted.read_jsonl(path))),
    )
    for read in readers:
        with pytest.raises(OSError, match="regular file|directory"):
            read(path)


def test_locks(tmp_path: Path) -> None:
    with untrusted.open_lock(tmp_path / ".lock") as file:
        assert file.read() == b""
    (tmp_path / ".lock").write_text("kept")
    with untrusted.open_lock(tmp_path / ".lock") as file:
        assert file.read() == b"kept"


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n[2]\n3')
    assert list(untrusted.read_jsonl(path)) == [(1, {"a": 1}), (3, [2]), (4, 3)]
    path.write_text('1\n{"a": \n3\n')
    with pytest.raises(UntrustedError, match="^line 2: expected JSON") as caught:
        list(untrusted.read_jsonl(path))
    assert not isinstance(caught.value, TornLineError)
    path.write_text('1\n{"a": ')
    with pytest.raises(TornLineError, match="^line 2: "):
        list(untrusted.read_jsonl(path))
    path.write_text("1\n" * 4)
    assert len(list(untrusted.read_jsonl(path, max_lines=4))) == 4
    with pytest.raises(UntrustedError, match="at most 3 lines, got more"):
        list(untrusted.read_jsonl(path, max_lines=3))
    os.truncate(path, 1 << 40)
    with pytest.raises(UntrustedError, match="line 5: expected at most 100 bytes, got more"):
        list(untrusted.read_jsonl(path, 100))
    path.write_text("[" * 200_000 + "\n")
    with pytest.raises(UntrustedError, match="line 1: expected at most 64 levels"):
        list(untrusted.read_jsonl(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 5000, "at most 64 levels"),
        (".".join("a" * 100_000) + " = 1", "keys of at most 256 parts"),
        ("[" + ".".join("a" * 100_000) + "]", "keys of at most 256 parts"),
        (".".join("a" * 100) + " = 1", "at most 64 levels"),
        ("a = inf", "finite numbers"),
        ("a = " + "9" * 5000, "limit"),
        ("a = 1\na = 2", "expected TOML, got text that is not TOML"),
        ("a = 2001-99-99", "TOML"),
        ("a = '''" + "'" * 100_000, "TOML"),
    ],
)
def test_texts_that_are_no_toml(text: str, message: str) -> None:
    started = time.process_time()
    with pytest.raises(UntrustedError, match=message) as caught:
        untrusted.parse_toml(text)
    assert len(str(caught.value)) < 400
    assert time.process_time() - started < 5


def test_toml_within_its_bounds() -> None:
    text = "# " + "." * 500 + '\na.b = 1\n"c.d" = "' + "." * 500 + "\"\ne = '''" + ".\n" * 500 + "'''\n"
    value = untrusted.parse_toml(text)
    assert (value["a"], value["c.d"]) == ({"b": 1}, "." * 500)
    assert untrusted.parse_toml("a = inf", finite=False)["a"] == float("inf")


def test_yaml_stops_at_its_depth() -> None:
    """The scanner of the library took a second for levels that nobody needs."""
    assert untrusted.parse_yaml("[" * 64 + "]" * 64) is not None
    for text in ("[" * 65 + "]" * 65, "[" * 260_000, "{a: " * 60_000, "- " * 130_000, "[a," * 80_000):
        with pytest.raises(UntrustedError, match="at most 64 levels of containers, got more"):
            lines_of(lambda text=text: untrusted.parse_yaml(text), 200_000)  # type: ignore[misc]


def npz(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_arrays(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(untrusted.read_npy(tmp_path / "a.npy"), array)
    np.savez_compressed(tmp_path / "a.npz", **{"a": array, "b/c": np.array("text")})
    arrays = untrusted.read_npz(tmp_path / "a.npz")
    np.testing.assert_array_equal(arrays["a"], array)
    assert str(arrays["b/c"]) == "text"
    np.save(tmp_path / "o.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(UntrustedError, match="expected a dtype of"):
        untrusted.read_npy(tmp_path / "o.npy")
    missing = pytest.raises(UntrustedError, match="^x: expected an array with this name, got no such array")
    with untrusted.open_npz(tmp_path / "a.npz") as npz_file, missing:
        npz_file.read("x")


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", "a\\b", "C:a"])
def test_names_of_entries_stay_inside(tmp_path: Path, name: str) -> None:
    npz(tmp_path / "a.zip", {name: b""})
    with pytest.raises(UntrustedError, match="relative path inside the archive"):
        untrusted.open_archive(tmp_path / "a.zip")


def test_archives_are_bounded(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.zip", {"a": bytes(1 << 20), "b/c": b"text"}, zipfile.ZIP_DEFLATED)
    with untrusted.open_archive(path) as archive:
        assert (archive.names, archive.size("a"), bytes(archive.read("b/c"))) == (
            ["a", "b/c"],
            1 << 20,
            b"text",
        )
        with pytest.raises(UntrustedError, match="^x: expected an entry"):
            archive.read("x")
    for bounds, message in (
        ({"max_entries": 1}, "at most 1 entries, got 2"),
        ({"max_unpacked": 1 << 20}, "at most 1048576 unpacked bytes, got 1048580"),
        ({"methods": (0,)}, "expected an entry that is stored, got method 8"),
    ):
        with pytest.raises(UntrustedError, match=message):
            untrusted.open_archive(path, **bounds)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 1 << 31)  # the unpacked size that the directory states
    path.write_bytes(data)
    with pytest.raises(UntrustedError, match="packed bytes, got 2147483648"):
        untrusted.open_archive(path)
    path.write_bytes(b"no archive")
    with pytest.raises(UntrustedError, match="expected a zip archive"):
        untrusted.open_archive(path)


def test_messages() -> None:
    value = {"a": [1, 2.5, None, "text"], "b": {}}
    assert untrusted.unpack_msgpack(msgpack.packb(value), max_values=9) == value
    for bounds, message in (
        ({"max_values": 8}, "at most 8 values"),
        ({"max_depth": 1}, "at most 1 levels"),
        ({"max_text": 3}, "at most 3 bytes of text, got 4"),
        ({"max_texts": 5}, "at most 5 bytes of text in all"),
    ):
        with pytest.raises(UntrustedError, match=message):
            untrusted.unpack_msgpack(msgpack.packb(value), **bounds)
    for data in (b"", b"\x91" * 10_000, b"\xc1", b"\x80\x80", b"\xa2\xff\xfe", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(UntrustedError):
            untrusted.unpack_msgpack(data)
