"""No code of the product reads around the bounded reader (``sinew_client.untrusted``).

A raw read that is safe has a comment on its line, in one of the two forms below: whose file it is, or what bounds the
data. ``OWN`` lists the owners; a file that another program or person can have written has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "packages" / "sinew-client" / "src" / "sinew_client" / "untrusted"
PRODUCT = ("sinew/**/*.py", "eval/sinew_eval/**/*.py", "packages/*/**/*.py")
OWN = (
    "in an installed package",
    "of the operating system",
    "written by this process",
    "named by the person at this machine",
)
MARK = re.compile(rf"# (?:own file: (?:{'|'.join(OWN)})|bounded: [a-z][a-z ]{{10,60}})$")
MOST_MARKS = 32  # a sixth of the files that read: the bounded reader is the rule
PARSERS = re.compile(
    r"(?:json|simplejson|orjson|ujson)\.loads?|msgspec\.(?:json|msgpack|yaml|toml)\.decode|tom(?:llib|li)\.loads?"
    r"|(?:numpy|np)\.(?:load|loadtxt|genfromtxt|fromfile|memmap)|(?:\w+\.)?_?msgpack\.(?:unpackb?|Unpacker|loads?)"
    r"|(?:\w+\.)?yaml\.(?:(?:safe_|full_|unsafe_)?load(?:_all)?|compose|parse)"
    r"|(?:c?[pP]ickle|marshal|shelve|dill|joblib)\.(?:loads?|open|Unpickler)|torch\.load"
    r"|zipfile\.(?:ZipFile|PyZipFile|Path)|tarfile\.(?:open|TarFile)|(?:gzip|bz2|lzma)\.open|shutil\.unpack_archive"
    r"|(?:io|os|codecs)\.open|open|fileinput\.input|linecache\.getlines?"
)
WRITING = frozenset("wxa")
# The last part of each name above: unparsing every call takes most of the time.
LAST = re.compile(
    r"(?:safe_|full_|unsafe_)?loads?(?:_all)?|loadtxt|genfromtxt|fromfile|memmap|decode|unpackb?|Unpickler|Unpacker"
    r"|compose|parse|open|ZipFile|PyZipFile|Path|TarFile|unpack_archive|input|getlines?|read_text|read_bytes"
)


def is_raw(call: ast.Call) -> bool:
    """Return True where a call opens or parses data without bounds. Opening to write is none."""
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if not LAST.fullmatch(last):
        return False
    name = ast.unparse(call.func)
    if name == "untrusted" or name.startswith("untrusted."):
        return False
    if name.endswith(").open") and ".parse(" in name:  # of a target's text; paths parse nothing
        return False
    if name == "os.open":
        return not re.search(r"O_WRONLY|O_DIRECTORY|O_NONBLOCK", ast.unparse(call))
    is_open = name in ("open", "io.open", "codecs.open") or (
        name.endswith(".open") and not PARSERS.fullmatch(name)
    )
    if is_open:
        place = 1 if name in ("open", "io.open", "codecs.open") else 0
        values = [
            *call.args[place : place + 1],
            *(each.value for each in call.keywords if each.arg == "mode"),
        ]
        mode = values[0] if values else ast.Constant("r")
        if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
            return place == 1  # a method of another object: no mode comes first
        return not WRITING & set(mode.value)
    if last in ("read_text", "read_bytes") and "." in name:  # a path's take words alone
        return not call.args or isinstance(call.args[0], ast.Constant)
    return PARSERS.fullmatch(name) is not None


def raw_reads(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, call and whether it is marked, of each raw read."""
    if not re.search(
        r"load|open|read_|decode|unpack|zipfile|tarfile|parse|memmap|fromfile|genfromtxt", source
    ):
        return
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and is_raw(node):
            last = node.end_lineno or node.lineno
            marked = any(MARK.search(line) for line in lines[node.lineno - 1 : last])
            yield node.lineno, ast.unparse(node)[:80], marked


def sources() -> list[Path]:
    return sorted(
        path
        for pattern in PRODUCT
        for path in ROOT.glob(pattern)
        if READER not in path.parents and "templates" not in path.parts and path.name != "setup.py"
    )


def test_nothing_reads_around_the_bounded_reader() -> None:
    unmarked, marks = [], 0
    for path in sources():
        for line, call, marked in raw_reads(path.read_text("utf-8")):
            marks += marked
            if not marked:
                unmarked.append(f"{path.relative_to(ROOT)}:{line}: {call}")
    assert not unmarked, "read these with sinew_client.untrusted:\n" + "\n".join(unmarked)
    assert marks <= MOST_MARKS


def test_every_mark_stands_at_a_raw_read() -> None:
    """A mark that allows nothing is a remark, and misleads."""
    for path in sources():
        text = path.read_text("utf-8")
        marks = len(re.findall(r"# (?:own file|bounded): ", text))
        assert marks == sum(marked for *_, marked in raw_reads(text)), path


def test_the_reader_imports_optional_libraries_late() -> None:
    """The robot's package needs numpy and protobuf alone."""
    for path in READER.glob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert (name or "").partition(".")[0] not in (
                    "yaml",
                    "tomllib",
                    "tomli",
                    "msgpack",
                    "zipfile",
                )


@pytest.mark.parametrize(
    "line",
    [
        "json.loads(text)",
        "json.load(file)",
        "tomllib.loads(text)",
        "yaml.safe_load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "np.load(path, allow_pickle=False)",
        "numpy.fromfile(path)",
        "msgpack.unpackb(data)",
        "self._msgpack.unpackb(data)",
        "msgspec.json.decode(data)",
        "pickle.loads(data)",
        "torch.load(path)",
        "zipfile.ZipFile(path)",
        "tarfile.open(path)",
        "open(path)",
        "open(path, 'rb')",
        "open(path, mode='r+b')",
        "open(path, mode)",
        "path.open()",
        "path.open('rb')",
        "path.read_text()",
        "(folder / 'a').read_bytes()",
        "os.open(path, os.O_RDONLY)",
        "json.loads(text)  # own file",
        "json.loads(text)  # own file: of a friend",
        "json.loads(text)  # bounded: yes",
    ],
)
def test_raw_reads_are_seen(line: str) -> None:
    assert [marked for *_, marked in raw_reads(line)] == [False]


@pytest.mark.parametrize(
    "line",
    [
        "parse_json(text)",
        "untrusted.read_text(path)",
        "read_bytes(path)",
        "open(path, 'wb')",
        "path.open('x', encoding='utf-8')",
        "path.open(mode='a')",
        "goals.open(bridge)",
        "Target.parse(text).open()",
        "os.open(path, os.O_WRONLY)",
        "json.dumps(value)",
        "np.save(path, array)",
    ],
)
def test_other_calls_are_none(line: str) -> None:
    assert not list(raw_reads(line))


def test_a_mark_allows_a_raw_read() -> None:
    for mark in (*(f"own file: {owner}" for owner in OWN), "bounded: the values are counted above"):
        assert [marked for *_, marked in raw_reads(f"json.loads(text)  # {mark}")] == [True]
