"""Texts from elsewhere: contracts, fleets, limits, journals, metadata. Each ends in values or in its reader's error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from sinew_client import ClientError
from sinew_client.control import journal
from sinew_client.control.journal import JournalError, is_journal, repeat, watched
from sinew_client.control.safety import Limits, LimitsError
from sinew_client.control.settings import Settings, SettingsError
from sinew_client.protocol import decode_metadata, schema
from sinew_client.untrusted import named, parse_yaml, shown
from sinew_client.untrusted.texts import MAX_NODES
from sinew_client.untrusted.words import SHOWN
from sinew_perf.hardware import hardware
from sinew_ros.contract import ContractError
from sinew_ros.contract import read as read_contract

from sinew.cli.settings import SettingsFile
from sinew.core import SinewError
from sinew.serve.fleet.config import read as read_fleet
from tests import processes

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)  # 10^9 values in 544 bytes

# ----------------------------------------------------------------------------- YAML


READ_BOTH = """
import sys, resource
sys.path.insert(0, "packages/sinew_ros")  # not installed
pages = int(open("/proc/self/statm").read().split()[0])  # torch built for CUDA has 3 GiB already
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30),) * 2)
from pathlib import Path
from sinew_client import ClientError
from sinew.core import SinewError
from sinew_ros.contract import read as contract
from sinew.serve.fleet.config import read as fleet
for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
    for reader in (contract, fleet):
        try:
            reader(path)
            print("taken")
        except (ClientError, SinewError) as error:
            print(str(error).replace("\\n", " ")[:5000])
"""


def test_aliases_are_counted_with_what_they_stand_for(tmp_path: Path) -> None:
    """544 bytes printed 10^9 values: a contract that hung for minutes."""
    texts = {
        "server": LAUGHS + "server: *i\n",
        "hz": LAUGHS + "server: tcp://a:1\nhz: *i\n",
        "merged": "a: &a {x: 1}\n"
        + "".join(
            f"{new}: &{new} {{<<: [{','.join([f'*{old}'] * 10)}]}}\n"
            for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "itself": "a: &a [*a]\nserver: *a\n",
        "key": LAUGHS + "? *i\n: 1\n",
        "policies": LAUGHS + "policies: {default: {source: *i}}\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    done = processes.run([sys.executable, "-c", READ_BOTH, str(tmp_path)], timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(texts)
    for line in lines:
        assert "with all aliases, got more" in line or "an alias inside its own value" in line
        assert len(line) < 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 30_000, "at most 64 levels of containers"),
        ("a: " + "x" * 300_000, "at most 262144 bytes"),
        ("a: " + "x" * 20_000, "at most 16384 characters, got 20000"),
        ("[" + "a," * 20_000 + "]", f"at most {MAX_NODES} values, got more"),
        ('a: "\\uD800"', "surrogates|codec|character"),
        ("a: " + "9" * 5000, "limit"),
        ("a: 2001-99-99", "month"),
        ('a: !!timestamp "x"', "NoneType"),
        ('a: !!int ""', "string index out of range"),
        ("a: !!bool x", "x"),
        ("? [a]\n: b", "unhashable"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: \0", "special characters"),
    ],
)
def test_texts_that_are_no_values(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_fleet_or_contract(tmp_path / "a.yaml")


def read_fleet_or_contract(path: Path) -> None:
    """Both refuse it alike, each with its own error; the words are those of the reader that they share."""
    errors = []
    for reader, kind in ((read_contract, ContractError), (read_fleet, SinewError)):
        with pytest.raises(kind) as caught:
            reader(path)
        errors.append(str(caught.value))
        assert len(errors[-1]) < 500
    assert str(path) in errors[0]
    assert str(path) in errors[1]
    raise ValueError(errors[0])


def test_aliases_of_people_are_taken() -> None:
    text = "base: &base {max_age: 0.2, type: x}\na: {<<: *base, topic: /a}\nb: [*base, *base]"
    assert parse_yaml(text)["a"] == {"max_age": 0.2, "type": "x", "topic": "/a"}
    assert parse_yaml("") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hz", "a" * 9000),
        ("hz", list(range(5000))),
        ("server", {str(number): [] for number in range(2000)}),
        ("start", "x" * 9000),
        ("stamps", "x" * 9000),
        ("y" * 9000, 1),
        ("cameras", {"c" * 9000: 1}),
        ("control", {"substeps": "9" * 9000}),
        ("control", {"motion": {"kind": "m" * 9000}}),
        ("limits", {"low": ["a" * 9000]}),
        ("limits", {"z" * 9000: 1}),
        ("limits", {"names": 5}),
    ],
)
def test_messages_are_short(tmp_path: Path, field: str, value: object) -> None:
    from tests.ros.test_ros_contract import GOOD

    (tmp_path / "c.yaml").write_text(json.dumps({**GOOD, field: value}))
    with pytest.raises(ClientError) as caught:
        read_contract(tmp_path / "c.yaml")
    assert len(str(caught.value)) < 500


def test_what_is_shown_of_a_value() -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    loop: list = []
    loop.append(loop)
    for value in (
        deep,
        loop,
        "x" * 10**6,
        list(range(10**6)),
        10**5000,
        {1: {2: b"a" * 10**6}},
        object(),
        "\ud800\0",
    ):
        assert len(shown(value)) <= SHOWN
        assert len(named(value)) <= SHOWN
        shown(value).encode()
        named(value).encode()
    assert shown({"a": [1, 2.5, None, True, "b"], 3: ()}) == "{'a': [1, 2.5, None, True, 'b'], 3: ()}"
    assert (named("arm"), shown("arm"), named(5)) == ("arm", "'arm'", "5")


def test_numbers_that_no_float_holds(tmp_path: Path) -> None:
    from tests.ros.test_ros_contract import GOOD

    state = {**GOOD["state"], "scale": 10**400}
    (tmp_path / "c.yaml").write_text(json.dumps({**GOOD, "state": state}))
    with pytest.raises(ContractError, match="state.scale: expected a number or a list of 6 numbers, got "):
        read_contract(tmp_path / "c.yaml")


# ----------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"names": 5}', "names: expected a list of texts"),
        ('{"names": [[1], 2]}', "names: expected a list of texts"),
        ('{"low": 1' + "0" * 400 + "}", "low: expected numbers, got a number of 1329 bits"),
        ('{"low": true}', "low: expected numbers, got True"),
        ('{"low": "1"}', "low: expected numbers, got '1'"),
        ('{"low": {"a": 1}}', "low: expected numbers"),
        ('{"when": ["clip"]}', "when: expected clip or hold"),
        ('{"\\ud800": 1}', "half a character"),
        ("[" * 5000, "at most 64 levels"),
        ('{"low": ' + "9" * 5000 + "}", "limit"),
        ('{"low": [' + "0," * 200_000 + "0]}", "expected at most 262144 bytes"),
    ],
)
def test_limits(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "limits.json").write_text(text)
    with pytest.raises(LimitsError, match=said) as caught:
        Limits.read(tmp_path / "limits.json", 2)
    assert len(str(caught.value)) < 500
    str(caught.value).encode()


def test_limits_of_a_width_that_no_robot_has() -> None:
    """Of a server's metadata: a single number counts for every joint, and would be written out for all of them."""
    for dim in (10**12, 0):
        with pytest.raises(LimitsError, match="expected 1 to 8192 values in a command"):
            Limits.from_metadata({"action": {"dim": dim, "limits": {"low": 0}}})
    for action in (
        {"limits": {"low": 0}},
        {"dim": float("inf"), "limits": {"low": 0}},
        {"dim": 2, "limits": [1]},
        5,
    ):
        with pytest.raises(LimitsError, match="action: expected a number `dim` and a table `limits`"):
            Limits.from_metadata({"action": action})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(LimitsError, match="expected a regular file"):
        Limits.read(tmp_path / "a.json", 2)
    for reader, kind in ((read_contract, ContractError), (read_fleet, SinewError), (repeat, JournalError)):
        with pytest.raises(kind, match="expected a regular file"):
            reader(tmp_path / "a.json")
    assert not is_journal(tmp_path / "a.json")
    assert not is_journal(Path("a\0b"))
    with pytest.raises(LimitsError, match="null"):
        Limits.read(Path("a\0b.json"), 2)


# ----------------------------------------------------------------------------- settings, journals, metadata


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("hz", value) for value in (None, "20", True, [1], 10**400, float("nan"))),
        *(("substeps", value) for value in (None, 1.5, "1", True)),
        *(("handover", value) for value in (None, 5, ["aligned"])),
        *(("replan", None), ("motion", "absolute"), ("limits", [1]), ("finish", "yes"), ("refine", None)),
        ("motion", {"kind": "offsets", "action": [float("inf")], "state": [0]}),
    ],
)
def test_settings_have_kinds(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings(**{"hz": 20.0, name: value}).controller(2)


BEGIN = {
    "event": "begin",
    "schema": "sinew.control/1",
    "settings": {"hz": 20.0, "handover": "aligned"},
    "dim": 2,
}
ASK = {"event": "ask", "step": 0, "frame": 0, "state": [0, 0]}
ARRIVED = {"event": "arrived", "step": 1, "actions": [[0, 0], [1, 1]]}
WINDOW = {"event": "window", "step": 1, "first": 1, "rows": [], "sample_time": 0.0, "frame_time": 0}
COMMAND = {
    "event": "command",
    "state": [0, 0],
    "command": {
        "step": 1,
        "row": [0, 0],
        "reason": "",
        "clipped": [],
        "age": 1,
        "chunk": 0,
        "index": 0,
        "seam": True,
    },
}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({**BEGIN, "settings": 5}, "line 1: settings: expected an object, got 5"),
        ({**BEGIN, "settings": {"pace": 5}}, "line 1: .*pace"),
        ({**BEGIN, "dim": 10**12}, "line 1: dim: expected a whole number from 1 to 8192"),
        ({**BEGIN, "dim": 1e400}, "line 1: dim"),
        ({**ASK, "step": "a"}, "step: expected a whole number"),
        ({**ASK, "step": 10**30}, "step: expected a whole number"),
        ({**ASK, "state": "abc"}, "state: expected numbers, got 'abc'"),
        ({**ASK, "state": [[1], [2]]}, r"state: expected numbers, got \[\[1\], \[2\]\]"),
        ({**ASK, "state": [10**400]}, "state: expected numbers"),
        (
            {**ARRIVED, "actions": [[1], [2, 3]]},
            "actions: expected actions with the same number of values each",
        ),
        ({**ARRIVED, "actions": 5}, "actions: expected actions"),
        ({**ARRIVED, "actions": [["1", "2"]]}, "actions: expected"),
        ({**ARRIVED, "actions": [[0]] * 9000}, "actions: expected at most 8192 actions"),
        ({**COMMAND, "command": 5}, "command: expected an object"),
        ({**COMMAND, "command": {**COMMAND["command"], "clipped": 5}}, "clipped: expected texts"),
        ({**COMMAND, "command": {**COMMAND["command"], "row": {"a": 1}}}, "row: expected numbers"),
        ({**COMMAND, "command": {"step": 1}}, "command"),
        ({**COMMAND, "state": [0, "b"]}, r"state: expected numbers, got \[0, 'b'\]"),
        ({**ASK, "state": [0] * 8193}, r"state: expected numbers, got \[0, "),
        ({**WINDOW, "sample_time": "now"}, "sample_time: expected a number, got 'now'"),
        ({"event": "take_over", "step": 1, "shadow": 1}, "shadow: expected true or false, got 1"),
        ({"event": "resume", "position": "here"}, "position: expected numbers"),
        ({"event": "failed", "step": 1, "reason": 5}, "reason: expected a text"),
        (
            {"event": "refined", "step": 1, "rows": [[[[[0]]]]], "state": None},
            r"rows: expected actions \(lists of numbers\)",
        ),
        ({"event": 5}, "expected an object with an event"),
    ],
)
def test_journals(tmp_path: Path, line: dict, said: str) -> None:
    path = tmp_path / "run.jsonl"
    lines = [line] if line.get("event") == "begin" else [BEGIN, ASK, line]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(JournalError, match=said):
        repeat(path)
    if "pace" not in said:
        with pytest.raises(JournalError, match=said):
            watched(path)


def test_lines_of_a_journal_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(BEGIN) + "\n")
    os.truncate(path, 1 << 40)  # sparse
    for reader in (repeat, watched):
        with pytest.raises(JournalError, match="line 2: expected at most 16777216 bytes"):
            reader(path)
    path.write_bytes(json.dumps(BEGIN).encode() + b"\n\xff\n")
    with pytest.raises(JournalError, match="not a decision log"):
        repeat(path)


def test_a_journal_begins_with_its_schema(tmp_path: Path) -> None:
    path, first = tmp_path / "run.jsonl", r": line 1: expected the first event of a decision log \(begin\)"
    other = {**BEGIN, "schema": "sinew.control/0"}
    for events, said in (
        ([], ": the decision log is empty"),
        ([{"event": "stood"}], first),
        ([other], first),
    ):
        path.write_text("".join(json.dumps(each) + "\n" for each in events))
        with pytest.raises(JournalError, match=f"^{path}{said}$"):
            repeat(path)
    moves = [BEGIN, ASK, COMMAND, {**ASK, "state": [0] * 3, "frame": 2}]
    path.write_text("".join(json.dumps(each) + "\n" for each in moves))
    with pytest.raises(JournalError, match=f"^{path}: ValueError: operands could not be broadcast"):
        watched(path)  # no state has as many numbers as another


def test_a_journal_may_be_as_large_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a command, rows, dimensions of what was no chunk, and bytes of a line: so many, and not one more."""
    most = 8192
    events = [
        {**BEGIN, "dim": most},
        {**ASK, "state": [0] * most},
        {**ARRIVED, "actions": [[0]] * most},
        {"event": "refined", "step": 1, "rows": [[[[0]]]], "state": None},
    ]
    lines = [json.dumps(each) + "\n" for each in events]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(lines))
    longest = max(map(len, lines))
    monkeypatch.setattr(journal, "MAX_LINE", longest)
    assert repeat(path).commands == 0
    monkeypatch.setattr(journal, "MAX_LINE", longest - 1)
    with pytest.raises(JournalError, match=f"line 3: expected at most {longest - 1} bytes, got more$"):
        repeat(path)


def test_a_good_journal_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (BEGIN, ASK, ARRIVED, COMMAND)))
    found = repeat(path)
    assert (found.commands, found.held) == (1, 0)
    with path.open("a") as file:  # a chunk that was none is a fault, and stays one
        for event in ({**ASK, "step": 2}, {**ARRIVED, "step": 3, "actions": [0, 1]}):
            file.write(json.dumps(event) + "\n")
    assert repeat(path).commands == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [("[" * 100_000, "at most 64 levels"), ("[1]", "an object"), ("9" * 5000, "limit"), ("", "JSON")],
)
def test_metadata(text: str, said: str) -> None:
    with pytest.raises(ClientError, match=said):
        decode_metadata(schema.PredictResponse(metadata=text))


def test_machines_of_other_kinds(tmp_path: Path) -> None:
    for text, said in (
        ("[a]\npeak = 5\nbandwidth = 1\nmemory_gib = 1\n", "a: peak: expected a table of formats, got int"),
        ("a = " + "9" * 5000, "limit"),
        ("a = " + "[" * 5000, "at most 64 levels"),
    ):
        (tmp_path / "h.toml").write_text(text)
        with pytest.raises(SinewError, match=said):
            hardware(tmp_path / "h.toml")


def test_a_config_of_numbers_that_python_does_not_write(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("serve = 0x" + "f" * 5000)
    with pytest.raises(SinewError, match=r"expected a table \[serve\], got a number of 20000 bits"):
        SettingsFile.read(tmp_path / "c.toml", ("serve",))


def test_a_fleet_names_files(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text('policies: {default: {source: "a\\0b"}}')
    with pytest.raises(SinewError, match=r"policies.default.source: expected printable text"):
        read_fleet(tmp_path / "f.yaml")
