"""Flags from the environment and from a file: every flag of every verb, and what is said of mistakes."""

from __future__ import annotations

import json
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from sinew.cli import build_app, main, settings
from sinew.cli.verbs import commands
from sinew.core import SinewError, progress


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the suite gives its servers (conftest.py) is not there."""
    monkeypatch.delenv("SINEW_SERVE_PREPARE")


def sample(hint: Any) -> Any:
    """A value that a flag of this type takes."""
    if typing.get_origin(hint) is typing.Annotated:
        return sample(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)[-1]
    inner = [each for each in typing.get_args(hint) if each not in (type(None), Ellipsis)]
    if typing.get_origin(hint) in (list, tuple):
        return [sample(inner[0])]
    if inner:
        return sample(inner[0])
    return {bool: True, int: 7, float: 0.5}.get(hint, "there")


def bound(app: App, words: tuple[str, ...], *flags: str) -> dict[str, Any]:
    """What a command would be called with, but for its positional arguments."""
    _, found, _ = app.parse_args([*words, *flags], exit_on_error=False, print_error=False)
    return found.arguments


@pytest.mark.parametrize("words", [words for words, _ in commands()], ids=" ".join)
def test_every_flag_has_a_variable_and_a_key(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = build_app()
    for word in words:
        app = app[word]
    arguments = app.assemble_argument_collection()
    flags = {
        name: sample(argument.field_info.annotation) for name, argument in settings.flags(arguments).items()
    }
    wanted = [argument for argument in arguments if argument.index is not None and argument.required]
    places = [argument for argument in wanted if not argument.name.startswith("--")]
    given = (*words, *(str(sample(argument.field_info.annotation)) for argument in places))
    has_flag = {name: argument.show for name, argument in settings.flags(arguments).items()}
    command_line = []
    for name, value in flags.items():
        for each in value if isinstance(value, list) else [value]:
            if has_flag[name]:
                command_line += [f"--{name}"] if each is True else [f"--{name}={each}"]
            else:
                command_line += ["--set", f"{name.replace('-', '_')}={each}"]
    expected = bound(build_app(), given, *command_line)
    assert len(str(expected)) > len(str(given[len(words) :])) or not flags

    prefix = "SINEW_" + "_".join(words).upper() + "_"
    variables = {prefix + name.upper().replace("-", "_"): value for name, value in flags.items()}
    assert len(variables) == len(flags)
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            text = value[0] if isinstance(value, list) else value
            patch.setenv(name, "1" if text is True else str(text))
        assert bound(build_app(), given) == expected

    file = tmp_path / "sinew.toml"
    file.write_text(f"[{'.'.join(words)}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in flags.items()))
    assert bound(build_app(file), given) == expected


@pytest.fixture
def said() -> Iterator[list[str]]:
    sentences: list[str] = []
    before = progress.tell(sentences.append)
    yield sentences
    progress.tell(before)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    file = tmp_path / "robot.toml"
    file.write_text(
        '[serve]\nhost = "1.1.1.1"\nqueue = 3\nmax_connections = 4\nverbose = false\nwire = ["http", "groot"]\n'
    )
    monkeypatch.setenv("SINEW_SERVE_HOST", "2.2.2.2")
    monkeypatch.setenv("SINEW_SERVE_QUEUE", "5")
    found = bound(build_app(file), ("serve", "policy.gguf"), "--host", "3.3.3.3")
    listening, bounds = found["on"], found["bounds"]
    assert (listening.host, bounds.queue, bounds.max_connections) == ("3.3.3.3", 5, 4)
    assert (listening.wire, listening.verbose) == (("http", "groot"), False)
    monkeypatch.setenv("SINEW_SERVE_WIRE", "native openpi:8001")
    assert bound(build_app(file), ("serve",))["on"].wire == ("native", "openpi:8001")
    assert said[0] == "from the environment: --queue"
    assert said[1] == f"from {file}: --wire, --verbose, --max-connections"


ROBOT = ("run", "tcp://127.0.0.1:5555")


def test_set_reaches_every_option_and_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    file = tmp_path / "robot.toml"
    file.write_text("[run]\nsubsteps = 3\nstale_of = ['wrist=0.2']\nmax_age = 2\n")
    monkeypatch.setenv("SINEW_RUN_FINISH", "1")
    chosen = (
        "substeps=2",
        "stale_of=front=0.1",
        "stale-of=state=0.3",
        "watchdog=false",
        "hz=20",
        "dtype=fp32",
    )
    found = bound(build_app(file), ROBOT, *(word for each in chosen for word in ("--set", each)))
    by, on = found["by"], found["on"]
    assert (by.substeps, by.max_age, by.finish) == (2, 2.0, True)
    assert (on.watchdog, on.hz, found["runs"].dtype) == (False, 20.0, "fp32")
    assert found["envelope"].stale_of == ("front=0.1", "state=0.3")
    assert said == ["from the environment: finish", f"from {file}: max_age"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--substeps 2", "--substeps was moved: use --set substeps=2"),
        ("--max-age=x", "--max-age was moved: use --set max_age=x"),
        ("--substeps", "--substeps was moved: use --set substeps=VALUE"),
        ("--takeover-options '{\"after\": 2}'", "use --set takeover_options='{\"after\": 2}'"),
        (
            "--no-watchdog --finish",
            "--no-watchdog, --finish were moved: use --set watchdog=false --set finish=true",
        ),
        ("--substep 2", "unknown flag --substep: did you mean --set substeps=VALUE?"),
        (
            "--set substep=2",
            "--set substep=2: `sinew run` has no setting of this name; did you mean 'substeps'?",
        ),
        ("--set cheese=2", "no setting of this name; `sinew run --settings` lists the settings"),
        ("--set substeps=two", "--set substeps: expected a whole number, got 'two'"),
        ("--set substeps=1.5", "--set substeps: expected a whole number, got '1.5'"),
        ("--set speed=2", "--set speed: expected a number <= 1, got 2"),
        ("--set watchdog=maybe", "--set watchdog: expected true or false, got 'maybe'"),
        ("--set substeps", "--set substeps: expected NAME=VALUE, such as --set substeps=2"),
        ("--set hz=3 --hz 2", "--set hz=3: expected --hz once, got it again"),
        ("--set skew=3 --set skew=2", "--set skew=2: expected skew once, got it again"),
    ],
)
def test_mistakes_in_settings(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ROBOT, *shlex.split(words)]) in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", ["run", "trials", "doctor"])
def test_settings_are_listed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--settings"]) == 0
    text = capsys.readouterr().out
    rows = re.findall(
        r"^  (\w+) +(?:text|number|whole number|true or false|path|choice)\b", text, re.MULTILINE
    )
    options = settings.flags(build_app()[command].assemble_argument_collection())
    assert sorted(rows) == sorted(name.replace("-", "_") for name, each in options.items() if not each.show)
    assert "kinematics_options" in rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nhots = 1", "[serve] hots: `sinew serve` has no such flag; did you mean 'host'?"),
        ("[srve]\nhost = 1", "srve: expected a table with the name of a command; did you mean 'serve'?"),
        ("serve = 1", "serve: expected a table [serve], got 1"),
        ("host = 1", "host: expected a table with the name of a command"),
        ("[serve", "expected a TOML file"),
        ("[serve]\nwire = {native = 1}", "[serve] wire: expected a text, a number"),
        ("[serve]\nhost = 2020-01-01", "[serve] host: expected a text, a number"),
    ],
)
def test_mistakes_in_a_file(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "robot.toml"
    file.write_text(text)
    with pytest.raises(SinewError) as error:
        bound(build_app(file), ("serve", "policy.gguf"))
    assert words in str(error.value)
    assert str(file) in str(error.value)


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINEW_SERVE_HOTS", "1.1.1.1")
    with pytest.raises(
        SinewError, match=r"SINEW_SERVE_HOTS: `sinew serve` has no such flag.*'SINEW_SERVE_HOST'"
    ):
        bound(build_app(), ("serve", "policy.gguf"))
    bound(build_app(), ("prepare", "policy.gguf"))  # another verb's variables are not its business


def test_where_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "robot.toml"
    file.write_text("[hub.cache.show]\nverify = true\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for command in (
        ["hub", "cache", "show", "x", "--config", str(file)],
        ["--config", str(file), "hub", "cache", "show", "x"],
        ["hub", "cache", "show", f"--config={file}", "x"],
    ):
        assert main(command) == 1
        assert capsys.readouterr().err.startswith(f"from {file}: --verify\nerror: x: expected the name")
    monkeypatch.setenv("SINEW_CONFIG", str(file))
    assert main(["hub", "cache", "show", "x"]) == 1
    assert capsys.readouterr().err.startswith(f"from {file}: --verify\n")
    assert main(["hub", "cache", "show", "x", "--config", str(tmp_path / "none.toml")]) == 1
    assert "expected a TOML file, got No such file" in capsys.readouterr().err
    assert main(["hub", "cache", "show", "x", "--config"]) == 1
    assert "--config: expected a .toml file, got nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "variables", "message"),
    [
        (
            '[fleet]\napi_key_file = "k"',
            {},
            r"\[fleet\] api_key_file: expected a table with the name of a command",
        ),
        (
            "[hub.cache]\nverify = true",
            {},
            r"\[hub.cache\] verify: expected a table with the name of a command",
        ),
        (
            "",
            {"SINEW_HUB_CACHE_VERIFY": "1"},
            "SINEW_HUB_CACHE_VERIFY: expected a flag of a command in this group",
        ),
        (
            '[fleet.upp]\nhost = "::"',
            {},
            r"\[fleet\] upp: expected a table with the name of a command; did you mean 'up'",
        ),
        (
            "",
            {"SINEW_FLEET_API_KEY_FILE": "k"},
            "SINEW_FLEET_API_KEY_FILE: expected a flag of a command in this group",
        ),
        ("[perf]\nsteps = 3", {}, r"\[perf\] steps: expected a table with the name of a command"),
        ("[serve]\nmax-batch = 2\nmax_batch = 3", {}, "max_batch: this flag occurs twice"),
        ("", {"SINEW_SERVE_PORT": "8000"}, "SINEW_SERVE_PORT: `sinew serve` has no such flag"),
    ],
)
def test_what_would_be_left_out_in_silence_is_named(
    text: str,
    variables: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Settings of a group's name instead of its command's: a key's file among them would leave a server open."""
    file = tmp_path / "settings.toml"
    file.write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    verb = (
        ["serve", "none.gguf"] if "serve" in (text + str(variables)).lower() else ["fleet", "up", "none.yaml"]
    )
    verb = ["perf", "machines"] if "perf" in text else verb
    verb = ["hub", "cache", "show", "x"] if "hub" in (text + str(variables)).lower() else verb
    assert main(["--config", str(file), *verb]) == 1
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_services_of_kubernetes_are_no_settings(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A Service called sinew-serve puts these into each pod beside it."""
    for name, value in {
        "SINEW_SERVE_SERVICE_HOST": "10.0.0.1",
        "SINEW_SERVE_SERVICE_PORT_NATIVE": "5555",
        "SINEW_SERVE_PORT": "tcp://10.0.0.1:5555",
        "SINEW_SERVE_PORT_5555_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "none.gguf"]) == 1
    assert "none.gguf" in capsys.readouterr().err
