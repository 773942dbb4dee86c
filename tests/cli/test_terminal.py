"""What every verb does alike: consoles, JSON, progress, and errors of one line that come before the work."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from sinew_perf.hardware import load_hops, load_machines

import sinew
from sinew import checks
from sinew.bundle import Bundle
from sinew.cli import main, terminal
from sinew.core import ObservationError, SinewError, extras, progress
from sinew.core.extras import EXTRAS, MissingPackageError, install
from sinew.core.providers import how_to_install
from sinew.processing.files import parse_vector
from sinew.serve.transport.listen import AddressError, Listen

ROOT = Path(__file__).resolve().parents[2]
PEN = ROOT / "sinew" / "assets" / "pen.gguf"


def flat(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return " ".join((said.out + said.err).split())


@pytest.fixture
def infer(tmp_path: Path) -> list[str]:
    """A complete command line of `sinew infer` for the pen policy."""
    spec, picture = Bundle(PEN).manifest.spec, tmp_path / "a.png"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(picture)
    images = [part for camera in spec.cameras for part in ("--image", f"{camera.name}={picture}")]
    state = ",".join(["0"] * spec.state.dim)
    return ["infer", str(PEN), *images, "--state", state, "--prompt", "go", "--device", "cpu"]


# ----------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("given", "left", "wanted"),
    [
        (["doctor", "--json"], ["doctor"], (True, None)),
        (["doctor", "--json", "policy.gguf"], ["doctor", "policy.gguf"], (True, None)),
        (["doctor", "--json", "out.json", "p.gguf"], ["doctor", "p.gguf"], (False, "out.json")),
        (["doctor", "--json=x", "p.gguf"], ["doctor", "p.gguf"], (False, "x")),
        (["doctor", "--", "--json"], ["doctor", "--", "--json"], (False, None)),
    ],
)
def test_json_flag(given: list[str], left: list[str], wanted: tuple[bool, str | None]) -> None:
    terminal.take_json(given)
    assert given == left
    assert (terminal.output.json, terminal.output.file and str(terminal.output.file)) == wanted


def test_json_is_alone_or_in_a_file_and_only_where_it_is_asked_for(
    infer: list[str], tmp_path: Path, capsys
) -> None:
    assert main([*infer, "--seed", "1", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*infer, "--seed", "1"]) == 0
    text = capsys.readouterr().out
    assert "action chunk of" in text
    assert "{" not in text
    assert main([*infer, "--seed", "1", "--json", str(tmp_path / "out.json")]) == 0
    assert "{" not in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["actions"] == alone["actions"]
    assert alone["policy"]["engine"] == "plan"
    assert alone["policy"]["precision"] == {"vision": "fp32", "language": "fp32", "head": "fp32"}


# ----------------------------------------------------------------------------- consoles and progress


def test_consoles_print_names_as_they_are(capsys) -> None:
    terminal.take_json([])
    line = f"my:robot_face:policy.gguf {'x' * 90}"
    terminal.console().print(line)
    assert capsys.readouterr().out == f"{line}\n"  # nor are 116 columns broken where nobody looks


class Listened(io.StringIO):
    """Standard error that says when somebody begins to write to it.

    pytest's own capture is read and emptied in two steps, between which what another thread writes is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def write(self, text: str) -> int:
        self.begun.set()
        time.sleep(0.05)  # long enough to be overtaken by whoever does not wait
        return super().write(text)


@contextlib.contextmanager
def a_task(wait: bool) -> Iterator[Listened]:
    """A task that ends at once, or once somebody has begun to announce it."""
    before = progress.listen(terminal.show_task)
    try:
        with contextlib.redirect_stderr(Listened()) as heard:
            with progress.task("exporting pen.gguf"):
                assert not wait or heard.begun.wait(60)
            yield heard
    finally:
        progress.listen(before)


def test_what_takes_long_is_announced_before_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.01)
    with a_task(wait=True) as heard:
        assert heard.getvalue() == "exporting pen.gguf ...\n"


def test_a_long_task_announces_the_part_that_it_has_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.01)
    before = progress.listen(terminal.show_task)
    try:
        with contextlib.redirect_stderr(Listened()) as heard, progress.task("checking", 2) as advance:
            for part in ("checking: memory", "checking: loopback", ""):
                end, lines = time.monotonic() + 60, heard.getvalue().count("\n")
                while heard.getvalue().count("\n") == lines and time.monotonic() < end:
                    time.sleep(0.01)
                advance(part or "checking: loopback")
        assert heard.getvalue() == "checking ...\nchecking: memory ...\nchecking: loopback ...\n"
    finally:
        progress.listen(before)


def test_the_doctor_reports_each_check_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "INSTALLATION", (checks.python, checks.packages, checks.temporary_disk))
    reported: list[object] = []

    @contextlib.contextmanager
    def listener(text: str, total: int | None) -> Iterator[Callable[[str], None]]:
        reported.append((text, total))
        yield reported.append

    before = progress.listen(listener)
    try:
        assert [check.name for check in checks.installation()] == ["python", "packages", "temporary disk"]
    finally:
        progress.listen(before)
    name = "checking the installation"
    assert reported == [(name, 3), f"{name}: packages", f"{name}: temporary disk", ""]


def test_what_is_short_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 1e6)
    threads = set(threading.enumerate())
    with a_task(wait=False) as heard:
        assert set(threading.enumerate()) <= threads  # no timer is left; others of before may end
        assert not heard.getvalue()


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["serve", PEN, "--wire", "openpi:abc"], "--wire openpi:abc: expected a port"),
        (["serve", "nope.gguf", "--access-log", "-"], "nope.gguf: no such file"),
        (["serve", PEN, "--tls-key", "key.pem"], "--tls-key key.pem: pass --tls-cert too"),
        (
            ["serve", PEN, "--tls-cert", "foo.pem"],
            "foo.pem: expected a PEM file with a certificate, got a file without it",
        ),
        (["serve", PEN, "--port", "9000"], "--wire NAME:PORT"),
        (["inspect", ROOT / "docs"], "expected a bundle, a checkpoint, or a folder of `sinew export`"),
        (["doctor", "nope.gguf", "--json"], "correct the path or name that the message shows"),
        (
            ["bench", "tcp://"],
            "expected tcp://HOST:PORT with the port of the native protocol (5555, or PORT of",
        ),
        (["bench", "ws://127.0.0.1:8000/x"], "got 'ws://127.0.0.1:8000/x'"),
        (
            ["bench", "ipc://tmp/x"],
            "or ipc:///PATH if it has `--wire native:ipc:///PATH`, got 'ipc://tmp/x'",
        ),
        (
            ["serve", PEN, "--wire", "openpi:ipc:///tmp/x"],
            "expected a port, because only the protocol native supports a Unix socket",
        ),
        (["bench", PEN, "--warmup", "2"], "--warmup: expected the address of a server, tcp://HOST:PORT, got"),
        (
            ["bench", "tcp://x:1", "--threads", "2"],
            "--threads: expected a policy that runs on this machine, got the server",
        ),
        (
            ["bench", "tcp://x:1", "--dtype", "fp32"],
            "--dtype: expected a policy that runs on this machine, got the server",
        ),
        (
            ["run", "tcp://x:1", "--device", "cpu"],
            "--device: expected a policy that is run here, got the server",
        ),
        (["recording", "replay", ROOT / "docs"], "no records (*.npz) in this folder"),
        (["recording", "replay", "nope.jsonl"], "nope.jsonl: no such file or folder"),
        (["recording", "mcap", "nope", "run.mcap"], "nope: no such file or folder"),
        (["serve", "--replay", "nope"], "nope: no such file or folder"),
        (
            ["bench", "tcp://127.0.0.1:1", "--api-key-file", "nope"],
            "--api-key-file nope: No such file or directory",
        ),
        (
            ["perf", "run", "SmolVLA"],
            "SmolVLA: no such file or folder; did you mean 'smolvla'?; expected one of",
        ),
        (["run", PEN, "--stream", "--timeout", "3"], "--timeout: expected none with --stream"),
        (["run", PEN, "--stream", "--takeover", "expert"], "--takeover: expected none with --stream"),
        (["run", PEN, "--set", "text_tokens=8"], "text_tokens needs --stream"),
        (["run", PEN, "--set", "assist_when=every:3"], "assist_when needs assist"),
        (["run", PEN, "--set", "assist_timeout=9"], "assist_timeout needs assist"),
        (["perf", "run", "pi0.5", "--hardware", "nope"], "hardware 'nope'"),
        (["bench", PEN, "--dtype", "int3"], "dtype: expected one of fp32, bf16, fp16, native"),
        (["eval", PEN, "--dtype", "int3"], "dtype: expected one of fp32, bf16, fp16, native"),
        (["evl"], "did you mean 'eval'?"),
        (
            ["quantize", PEN, "--out", "x.gguf", "--recipe", "vision=int8", "head=int8"],
            "error: expected no further words, got head=int8",
        ),
        (["eval", PEN, "--episode", "3"], "error: unknown flag --episode: did you mean --episodes?"),
        (["run", PEN, "--trials", "2"], "error: unknown flag --trials: it is now `sinew trials --scenes`"),
        (["run", PEN, "--trials=2"], "error: unknown flag --trials: it is now `sinew trials --scenes`"),
        (["bench", "localhost:5555"], "no such file or folder; did you mean 'tcp://localhost:5555'?"),
        (["convert"], "vla.cpp GGUF file, or a bundle in an older format); see `sinew convert --help`"),
        (["run", "--zzz"], "error: unknown flag --zzz: see `sinew run --help`"),
        (["run", "--seconds", "x"], "error: --seconds: expected a number, got 'x'"),
        (["run", "--episodes", "0"], "error: --episodes: expected a number >= 1, got 0"),
        (
            ["new", "famly", "x"],
            "KIND: expected one of family, engine, wire, step, robot, task, got 'famly'; did you mean 'family'?",
        ),
        (
            ["new"],
            "error: KIND is required (one of family, engine, wire, step, robot, task); see `sinew new --help`",
        ),
        (["convert", "a"], "error: OUT is required (bundle to write); see `sinew convert --help`"),
        (["convert", "a", "b", "--vlm"], "error: --vlm is required (a value); see `sinew convert --help`"),
    ],
    ids=lambda value: (
        "-".join(map(str, value))[:40].replace(str(ROOT), "") if isinstance(value, list) else ""
    ),
)
def test_small_mistakes(command: list[object], words: str, capsys) -> None:
    assert main(list(map(str, command))) in (1, 2)
    assert words in flat(capsys)


def test_json_for_a_device_is_no_argument_of_the_verb(capsys) -> None:
    assert main(["inspect", str(PEN), "--json", "/dev/full"]) == 1
    assert "--json /dev/full: No space left on device" in flat(capsys)
    assert main(["inspect", "--json", str(PEN)]) == 0  # the file that is there is the verb's
    assert json.loads(capsys.readouterr().out)["name"] == "pen"


def test_a_host_that_nobody_knows_is_said_in_words() -> None:
    with pytest.raises(AddressError, match="cannot listen on no.such.host.invalid:0: ") as caught:
        Listen(host="no.such.host.invalid", port=0).tcp_socket()
    assert "Unknown error" not in str(caught.value)  # a resolver's numbers are not the system's


def test_columns_are_honoured_in_a_pipe(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["perf", "machines"]) == 0
    text = capsys.readouterr().out.splitlines()[:-1]
    assert 40 < max(map(len, text)) <= 60
    monkeypatch.delenv("COLUMNS")
    assert terminal.console().width >= terminal.WIDTH


def test_machines_may_be_separated_by_commas() -> None:
    assert [each.name for each in load_machines(["h200,rtx4090", "thor,h200"])] == ["h200", "rtx4090", "thor"]
    assert [[each.name for each in hop] for hop in load_hops(["5g,4g,5g", "5g"])] == [["5g", "4g"], ["5g"]]
    with pytest.raises(SinewError, match="hardware 'nope'"):
        load_machines(["h200,nope"])


def test_a_misspelt_option_of_load_is_said() -> None:
    with pytest.raises(
        TypeError, match="sinew.load: expected options device, .*got 'engin'; did you mean 'engine'"
    ):
        sinew.load(PEN, engin="plan")
    assert {"load", "Policy"} <= set(dir(sinew))
    assert (Path(sinew.__file__).parent / "py.typed").is_file()


def test_infer_without_an_instruction_says_that_the_policy_has_none(tmp_path, capsys) -> None:
    picture = tmp_path / "a.png"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(picture)
    images = [word for name in ("front", "wrist") for word in ("--image", f"{name}={picture}")]
    assert main(["infer", str(PEN.with_name("blocks.gguf")), *images, "--state", "0,0,0,0"]) == 1
    assert "such as 'pick up the red cube' (this policy has no default)" in flat(capsys)


def test_a_state_with_brackets_is_read() -> None:
    np.testing.assert_array_equal(parse_vector("--state", "[0, -45,60]"), [0, -45, 60])
    with pytest.raises(ObservationError, match=r"--state: expected numbers .* got 'x'"):
        parse_vector("--state", "0,x")


def test_no_axis_of_a_misfit_is_zero(capsys) -> None:
    assert main(["perf", "fit", str(PEN), "--memory-gib", "3"]) == 1
    assert "largest values, one at a time: none, even with one of" in flat(capsys)


EARLY = """
import sys
from sinew.cli import main
code = main({arguments!r})
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--image", "nope.jpg"), ("--state", "1,2,3"), ("--rename", "x=y"), ("--prompt", "")],
)
def test_mistakes_are_found_before_torch(infer: list[str], flag: str, value: str) -> None:
    arguments = list(infer)
    if flag in arguments:
        arguments[arguments.index(flag) + 1] = f"now={value}" if flag == "--image" else value
    else:
        arguments += [flag, value]
    run = subprocess.run(
        [sys.executable, "-c", EARLY.format(arguments=arguments)], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["1", "False"], run.stderr


def test_a_fault_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("seven")

    monkeypatch.setattr("sinew.checks.installation", broken)
    assert main(["doctor"]) == 1
    fault = "(a fault of this program; --debug shows where, please report it)"
    assert flat(capsys) == f"error: ZeroDivisionError: seven {fault}"
    with pytest.raises(ZeroDivisionError):
        main(["doctor", "--debug"])


def test_a_missing_package_names_our_distribution(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'mujoco'", name="mujoco")

    monkeypatch.setattr("sinew.checks.installation", absent)
    assert main(["doctor"]) == 1
    assert f"needs mujoco: {install('mujoco')}" in flat(capsys)
    assert install("matplotlib") in str(MissingPackageError("a figure", "matplotlib"))


def test_a_package_that_a_verb_cannot_be_read_without() -> None:
    """The parser imports a verb's file, and says of one that does not import nothing that helps."""
    code = (
        "import sys; sys.modules['gymnasium'] = None;"
        "from sinew.cli import main; sys.exit(main(['eval', '--setup', 'doom']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"error: this command needs gymnasium: {install('gymnasium')}" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ('{"url": "file:///home/a%20b/sinew", "dir_info": {"editable": true}}', "/home/a b/sinew"),
        ('{"url": "file:///tmp/sinew.whl", "archive_info": {}}', "sinew-vla"),  # which may be gone
        (None, "sinew-vla"),
        ("no JSON", "sinew-vla"),
        ("[]", "sinew-vla"),
    ],
)
def test_the_command_names_what_pip_was_given(monkeypatch: pytest.MonkeyPatch, record, named) -> None:
    """A checkout's folder where it was installed from one: the name is on no index yet."""
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: record))
    assert install("mujoco") == f"pip install '{named}[sim]'"
    assert install("gguf") == f"pip install --force-reinstall '{named}'"


@pytest.mark.parametrize(
    ("record", "command"),
    [
        ('{"url": "file:///home/a%20b/sinew", "dir_info": {}}', "pip install '/home/a b/sinew/eval'"),
        ('{"url": "file:///tmp/sinew.whl", "archive_info": {}}', "pip install ./eval (in a clone of Sinew)"),
        (None, "pip install ./eval (in a clone of Sinew)"),
    ],
)
def test_the_command_for_another_distribution_needs_no_index(monkeypatch, record, command: str) -> None:
    """No package index has sinew-vla-eval, so its name alone cannot be installed."""
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: record))
    assert how_to_install("sinew-eval") == command


def test_extras_exist() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])


def test_a_policy_shows_what_it_is() -> None:
    shown = repr(sinew.load(PEN, "cpu"))
    for words in ("'pen' (smolvla)", "cameras now, previous", "engine plan on cpu", "fp32"):
        assert words in shown


@pytest.mark.parametrize(("width", "stands"), [(100, False), (40, True)])
def test_a_table_that_is_too_wide_stands_row_below_row(width: int, stands: bool) -> None:
    """Whole: no number and no name is cut."""
    names = [f"a column of words {n}" for n in range(9)]
    rows = [[f"{row}.{n}-of-some-length" for n in range(9)] for row in range(2)]
    made = terminal.table(
        "two rows", *names[: 9 if stands else 3], rows=[r[: 9 if stands else 3] for r in rows]
    )
    with (console := Console(width=width)).capture() as found:
        console.print(made)
    lines = found.get().splitlines()
    assert max(map(len, lines)) <= width
    assert ("a column of words 0 0.0-of-some-length" in " ".join(lines[1].split())) is stands
    shown = [cell for row in rows for cell in row if cell in found.get()]
    assert len(shown) == (18 if stands else 6)


@pytest.mark.parametrize("width", [32, 38, 40, 44, 70])
@pytest.mark.parametrize("place", ["-", "research/log/measurements-of-a-long-name.md#and-its-heading"])
def test_no_word_of_a_table_is_cut(width: int, place: str) -> None:
    """A path may be broken, as it would leave no table its shape, but it is whole, too."""
    rows = [("vision", "1032", "7.1", place)]
    with (console := Console(width=width)).capture() as found:
        console.print(terminal.table("x", "stage", ">operators", ">MB made anew", "where", rows=rows))
    shown = found.get()
    assert {"vision", "operators", "1032", "anew"} <= set(re.split(r"[\s│┃]+", shown))
    assert place in re.sub(r"[\s│┃]|vision|1032|7\.1", "", shown)
    assert ("│" in shown) is (width > (40 if place == "-" else 44))
