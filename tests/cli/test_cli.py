"""The command line as a user meets it: both ways to start it, help, exit codes, errors, output."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docstring_parser
import numpy as np
import pytest
from PIL import Image

from sinew import __version__
from sinew.bench import measure as bench
from sinew.cli import build_app as program
from sinew.cli import main
from sinew.cli.verbs import SECTIONS, VERBS, WITHIN, commands, function_of
from sinew.core import machine
from sinew.core.statistics import summarize
from tests import processes

SCRIPT = Path(sys.executable).parent / "sinew"
STATE = "-0.1,0.2,0,0,0,1"


def sinew(*arguments: object, script: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one command in its own process, wide enough that no line is broken."""
    environment = {**os.environ, "COLUMNS": "200", **environment}
    if script:
        command = [SCRIPT, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    return processes.run([sys.executable, "-m", "sinew", *arguments], env=environment, forking=True)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The same in this process, which has imported torch already: returns returncode, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def assert_one_error_line(code: int, stdout: str, stderr: str, *parts: str) -> None:
    assert code == 1
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    for part in parts:
        assert part in stderr


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``CAMERA=FILE`` arguments for the two cameras of the golden case."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    arguments = []
    for camera, size in (("camera1", (48, 64, 3)), ("camera2", (64, 48, 3))):
        path = folder / f"{camera}.png"
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(path)
        arguments.append(f"{camera}={path}")
    return arguments


def image_flags(pictures: list[str]) -> list[str]:
    return [part for argument in pictures for part in ("--image", argument)]


# ----------------------------------------------------------------------------- help and usage


def test_the_installed_script_starts() -> None:
    if not SCRIPT.exists():
        pytest.skip("sinew is not installed in this environment")
    result = sinew("serve", "--help", script=True)
    assert result.returncode == 0, result.stderr
    assert "sinew serve" in result.stdout


COMMANDS = {" ".join(words): (words, verb) for words, verb in commands()}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_verb(here, command: str) -> None:
    """It says how the verb is called and all that its function says of it, and ends with an example."""
    words, verb = COMMANDS[command]
    result = here(*words, "--help")
    assert result.returncode == 0, result.stderr
    assert f"Usage: sinew {command}" in result.stdout
    assert result.stderr == ""
    assert verb.example.split()[: len(words)] == list(words)
    shown = " ".join(result.stdout.split())
    assert shown.endswith(f"Example: sinew {verb.example}")
    module, _, name = function_of(words, verb).partition(":")
    said = docstring_parser.parse(inspect.getdoc(getattr(importlib.import_module(module), name)) or "")
    for text in (said.short_description, said.long_description):
        assert " ".join((text or "").replace("`", "").split()) in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_are_understood(command: str) -> None:
    words = shlex.split(COMMANDS[command][1].example)
    program().parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    "group", dict.fromkeys(words[:-1] for words, _ in commands() if words[1:]), ids=" ".join
)
def test_help_of_every_group(here, group: tuple[str, ...]) -> None:
    result = here(*group, "--help")
    assert result.returncode == 0, result.stderr
    assert all(words[-1] in result.stdout for words, _ in commands() if words[:-1] == group)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_parameter_is_described(command: str) -> None:
    module, _, name = function_of(*COMMANDS[command]).partition(":")
    function = getattr(importlib.import_module(module), name)
    hints = typing.get_type_hints(function)
    groups = {name for name in inspect.signature(function).parameters if is_dataclass(hints[name])}
    assert described(function) == set(inspect.signature(function).parameters) - groups, function
    for each in groups:  # flags that several verbs share
        own = {name for base in hints[each].__mro__[:-1] for name in described(base)}
        assert own == {f.name for f in fields(hints[each])}, hints[each]


def described(what: object) -> set[str]:
    docstring = docstring_parser.parse(inspect.getdoc(what) or "")
    return {entry.arg_name for entry in docstring.params if entry.description}


def test_top_level_help_and_version(here) -> None:
    result = here("--help")
    assert result.returncode == 0
    places = [result.stdout.index(f"╭─ {title} ") for title in SECTIONS]
    assert places == sorted(places)
    assert all(verb in result.stdout for verb in VERBS)
    assert len(VERBS) <= 21  # on the first level
    assert here("--version").stdout.strip() == __version__


@pytest.mark.parametrize(
    "code",
    [
        "import sinew",
        "import sinew.core, sinew.core.machine",
        "from sinew.cli import main; main(['--help'])",
    ],
)
def test_torch_is_imported_only_where_it_is_needed(code: str) -> None:
    check = f"{code}\nimport sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


def test_unknown_verb() -> None:
    result = sinew("serv")
    assert result.returncode == 2
    assert result.stderr == "error: unknown command 'serv': did you mean 'serve'?\n"


@pytest.mark.parametrize("name", WITHIN)
def test_a_verb_that_has_another_name_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "x"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: unknown command {name!r}: it is `sinew {WITHIN[name]}`\n"
    found = program()
    for word in WITHIN[name].removesuffix(" --stream").split():
        found = found[word]  # a KeyError where there is no such verb


def test_bad_option_is_a_usage_error(here) -> None:
    result = here("bench", "x.gguf", "--runs", "0")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "--runs" in result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "infer blocks",
            "--image is required (picture file of a camera, as CAMERA=FILE); see `sinew infer --help`",
        ),
        ("convert a", "OUT is required (bundle to write); see `sinew convert --help`"),
        ("eval blocks --episodes 10.7", "--episodes: expected a whole number, got '10.7'"),
        ("serve blocks --max-batch 2.5", "--max-batch: expected a whole number, got '2.5'"),
        ("serve blocks --reuse=maybe", "--reuse: expected true or false, got 'maybe'"),
        ("--versoin serve blocks", "unknown flag --versoin: did you mean '--version'?"),
        (
            "--verbose serve blocks",
            "unknown flag --verbose: put flags of a command after its name, see `sinew COMMAND --help`",
        ),
        ("--zzz", "unknown flag --zzz: put flags of a command after its name, see `sinew COMMAND --help`"),
        ("recording datast", "unknown command 'datast': did you mean 'dataset'?"),
        ("recording zzz", "unknown command 'zzz': expected one of replay, advise, mcap, rrd, dataset"),
        ("infer blocks --image a --seed 1 --seed 2", "--seed: expected once, got it again; pass it once"),
    ],
)
def test_a_word_that_is_none_says_what_was_expected(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    out, errors = capsys.readouterr()
    assert not out
    assert errors.endswith(f"error: {said}\n")


# ----------------------------------------------------------------------------- errors


def test_error_is_one_line_without_traceback(here, tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    result = here("bench", missing)
    assert_one_error_line(result.returncode, result.stdout, result.stderr, "missing.gguf")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    assert "Traceback" in sinew("bench", missing, "--debug").stderr
    assert "Traceback" in sinew("bench", missing, SINEW_DEBUG="1").stderr


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sinew.cli.doctor.doctor", interrupted)
    assert main(["doctor"]) == 130


def test_reader_that_goes_away(smolvla_bundle) -> None:
    command = f"'{sys.executable}' -m sinew inspect '{smolvla_bundle('smolvla-2cam')}' --json | head -c 10"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stdout.startswith("{")
    assert "Traceback" not in result.stderr


# ----------------------------------------------------------------------------- infer


def test_infer_json_is_what_the_policy_returns(smolvla_bundle, pictures: list[str]) -> None:
    import sinew as package

    bundle = smolvla_bundle("smolvla-2cam")
    result = sinew(
        "infer",
        bundle,
        *image_flags(pictures),
        "--state",
        STATE,
        "--prompt",
        "pick it up",
        "--seed",
        3,
        "--json",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["seed"] == 3
    assert len(document["timing"]["step_ms"]) == 10

    images = {}
    for argument in pictures:
        camera, _, path = argument.partition("=")
        images[camera] = np.asarray(Image.open(path))
    state = np.array([float(part) for part in STATE.split(",")], np.float32)
    observation = {"images": images, "state": state, "prompt": "pick it up", "seed": 3}
    expected = package.load(bundle).infer(observation)
    np.testing.assert_allclose(np.array(document["actions"]), expected.actions, atol=1e-5)


def test_infer_prints_the_first_actions(here, smolvla_bundle, pictures: list[str]) -> None:
    bundle = smolvla_bundle("smolvla-2cam")
    result = here(
        "infer", bundle, *image_flags(pictures), "--state", STATE, "--prompt", "go", "--solver-steps", 2
    )
    assert result.returncode == 0, result.stderr
    assert "50 actions" in result.stdout
    assert "in 2 steps" in result.stdout
    rows = [line for line in result.stdout.splitlines() if re.match(r"│ +\d+ │", line)]
    assert len(rows) == 10
    assert "the first 10 of 50; --json has all" in result.stdout


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"--state": ""}, ("state", "[6]", "[0]")),
        ({"--state": "1,2"}, ("state", "[6]", "[2]")),
        ({"--state": "1,2,x,4,5,6"}, ("state", "'x'")),
        ({"--state": "1,2,nan,4,5,6"}, ("state", "finite")),
        ({"--prompt": ""}, ("prompt", "empty")),
        ({"--image": "nowhere.png"}, ("--image", "camera1, camera2", "nowhere.png")),
        ({"--image": "camera1=nowhere.png"}, ("images.camera1", "nowhere.png", "does not exist")),
        ({"--image": f"camera1={__file__}"}, ("images.camera1", "does not decode")),
        ({"--image": "PICTURE"}, ("--image", "'camera1' twice")),
        ({"--dtype": "int3"}, ("int3",)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_infer_names_the_bad_input(smolvla_bundle, pictures, capsys, change: dict[str, str], parts) -> None:
    flags = {"--state": STATE, "--prompt": "go", **change}
    if flags.get("--image") == "PICTURE":
        flags["--image"] = pictures[0]
    images = image_flags(pictures[:1]) if flags.get("--image") == pictures[0] else []
    arguments = [part for flag in flags.items() for part in flag]
    if "--image" not in flags:
        images = image_flags(pictures)
    code = main(["infer", str(smolvla_bundle("smolvla-2cam")), *images, *arguments])
    assert_one_error_line(code, *capsys.readouterr(), *parts)


# ----------------------------------------------------------------------------- bench


def test_bench_report_and_json(smolvla_bundle, tmp_path: Path) -> None:
    bundle, out = smolvla_bundle("smolvla-2cam"), tmp_path / "out.json"
    flags = ("--runs", 3, "--threads", 1, "--image-size", "24x32", "--deadline-ms", 1e-3)
    result = sinew("bench", bundle, *flags, "--json", out)
    assert result.returncode == 0, result.stderr
    assert "{" not in result.stdout
    document = json.loads(out.read_text())
    assert document["runs"] == 3
    assert document["threads"] == 1
    assert document["deadline"] == {"ms": 1e-3, "misses": 3, "miss_rate": 1.0}
    assert document["policy"]["views"] == 2
    assert document["policy"]["frames"]["camera1"] == [24, 32, 3]
    assert document["actions_per_second"] == pytest.approx(50 * document["chunks_per_second"])
    assert document["memory_bytes"]["steady"]["peak"] >= document["memory_bytes"]["after_load"]["now"] > 0
    assert {"cpu", "cores"} <= document["hardware"].keys()
    assert min(document["import_ms"], document["load_ms"], document["warm_up_ms"]) > 0
    stages = document["stages_ms"]
    assert list(stages) == ["preprocess", "vision", "prefix", "steps", "head", "postprocess", "total"]
    assert len(stages["steps"]) == document["policy"]["solver_steps"] == 10
    for stage in [*stages["steps"], *(value for name, value in stages.items() if name != "steps")]:
        assert 0 < stage["p50"] <= stage["p95"] <= stage["p99"] <= stage["max"]
    for word in ("chunk rate", "action rate", "peak memory", "missed in 3 of 3", "step 10"):
        assert word in result.stdout


def test_bench_fails_where_it_is_slower_than_before(tmp_path: Path, capsys) -> None:
    out, words = tmp_path / "before.json", ["bench", "pen", "--runs", "5", "--threads", "1"]
    assert main([*words, "--json", str(out)]) == 0
    before = json.loads(out.read_text())
    again = [*words, "--baseline", str(out), "--json", str(tmp_path / "now.json")]
    for factor, code in ((100.0, 0), (0.01, 1)):  # no machine is a hundred times as slow a second later
        samples = [factor * each for each in before["samples_ms"]["total"]]
        out.write_text(json.dumps(before | {"samples_ms": {"total": samples}}))
        assert main(again) == code
        found = json.loads((tmp_path / "now.json").read_text())["baseline"]
        low, high = found["interval"]
        assert (found["failed"], low <= found["ratio"] <= high) == (bool(code), True)
    capsys.readouterr()
    # A ratio of latencies as a requirement: the baseline takes a hundred times as long, or a hundredth of the time.
    for factor, code, text in (
        (100.0, 0, "2 times as fast is not excluded"),
        (0.01, 1, "less than 2 times as fast"),
    ):
        samples = [factor * each for each in before["samples_ms"]["total"]]
        policy = before["policy"] | {"device": "cuda"}  # the ratio of two providers compares two devices
        out.write_text(json.dumps(before | {"samples_ms": {"total": samples}, "policy": policy}))
        assert main([*again, "--faster", "2"]) == code
        assert text in capsys.readouterr().out
    assert main([*words, "--faster", "2"]) == 1
    assert "--faster: expected a report to compare with" in capsys.readouterr().err
    for other, message in (
        (before | {"threads": 7}, "--baseline: expected the same threads, 1, got 7"),
        ([], f"--baseline {out}: expected a report of `sinew bench BUNDLE --json {out}`"),
    ):
        out.write_text(json.dumps(other))
        assert main(again) == 1
        assert message in capsys.readouterr().err


def test_bench_refuses_a_bad_size(capsys) -> None:
    code = main(["bench", "any.gguf", "--image-size", "24"])
    assert_one_error_line(code, *capsys.readouterr(), "--image-size", "HEIGHTxWIDTH", "'24'")


def test_bench_fits_a_line_over_solver_steps(monkeypatch) -> None:
    """Of a policy whose inference takes 7 ms and 3 per step by a clock of its own, with an outlier that a median
    leaves out."""
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    class Policy:
        calls = 0
        spec = SimpleNamespace(solver_steps=10)

        def infer(self, observation: dict) -> None:
            Policy.calls += 1
            now[0] += 7e-3 + 3e-3 * observation["solver_steps"] + (1.0 if Policy.calls == 9 else 0.0)

    fit = bench.line_over_steps(Policy(), {"solver_steps": None}, (1, 2, 5), runs=5)
    assert Policy.calls == 3 + 3 * 5
    assert fit["median_ms"] == [10.0, 13.0, 22.0]
    assert (fit["prefix_ms"], fit["step_ms"]) == (pytest.approx(7.0), pytest.approx(3.0))
    assert fit["residual_ms"] == pytest.approx(0, abs=1e-9)
    assert fit["prefix_share"] == pytest.approx(7 / 37)


def test_bench_reports_the_fit(smolvla_bundle, tmp_path) -> None:
    result = sinew(
        "bench",
        smolvla_bundle("smolvla-2cam"),
        "--runs",
        2,
        "--threads",
        1,
        "--fit-steps",
        "1,4",
        "--engine",
        "eager",
        "--json",
        tmp_path / "bench.json",
    )
    assert result.returncode == 0, result.stderr
    fit = json.loads((tmp_path / "bench.json").read_text())["fit"]
    assert fit["steps"] == [1, 4]
    assert "inference(T) =" in result.stdout


@pytest.mark.parametrize("text", ["3", "1,x", "0,2", "1,1", "1,1001", "1,2;3"])
def test_bench_refuses_bad_numbers_of_steps(text, capsys) -> None:
    code = main(["bench", "any.gguf", "--fit-steps", text])
    assert_one_error_line(code, *capsys.readouterr(), "--fit-steps", "two or more numbers", repr(text))


def test_percentiles_are_never_below_an_observed_rank() -> None:
    found = summarize(range(1, 21))
    assert found == {"mean": 10.5, "p50": 11.0, "p95": 20.0, "p99": 20.0, "max": 20.0}


# ----------------------------------------------------------------------------- doctor


def test_doctor_passes_here_and_says_why(smolvla_bundle) -> None:
    result = sinew("doctor", smolvla_bundle("smolvla-2cam"), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(result.stdout)
    checks = {check["name"]: check for check in document["checks"]}
    wanted = {
        "python",
        "packages",
        "torch",
        "devices",
        "threads",
        "memory",
        "cpu kernels",
        "simd",
        "loopback",
        "bundle inference",
        "bundle memory",
    }
    assert wanted <= checks.keys()
    memory = checks["bundle memory"]["detail"]  # of a policy of a megabyte, which is not nothing
    assert re.match(
        r"needs [1-9]\d* MiB in addition to this program \(.*, as `sinew perf fit` counts\); [1-9]", memory
    )
    assert all(check["detail"] for check in document["checks"])
    assert all(check["advice"] for check in document["checks"] if check["status"] != "ok")


def test_doctor_says_the_most_that_a_bundle_took_of_a_gpu(here, smolvla_bundle, monkeypatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: {"name": "H100", "own": 1 << 30, "peak": 3 << 29})
    result = here("doctor", smolvla_bundle("smolvla-2cam"), "--json")
    checks = {check["name"]: check["detail"] for check in json.loads(result.stdout)["checks"]}
    assert checks["bundle inference"].endswith("all finite; 1.5 GiB of H100 at most")


def test_doctor_fails_on_a_broken_bundle(here, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a bundle")
    result = here("doctor", broken)
    assert result.returncode == 1
    assert "fail" in result.stdout
    assert "broken.gguf" in result.stdout
    assert "Traceback" not in result.stderr


def test_an_absent_runtime_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sinew import checks
    from sinew.core.extras import install

    path = [entry for entry in sys.path if not (Path(entry) / "onnxruntime").is_dir()]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    assert install("onnxruntime") in checks.onnxruntime().detail


def test_a_check_that_breaks_is_reported() -> None:
    from sinew import checks

    def broken() -> checks.Check:
        raise ValueError("surprise")

    (found,) = checks._guarded(broken)
    assert (found.status, found.detail) == ("fail", "ValueError: surprise")


# ----------------------------------------------------------------------------- demo


@pytest.mark.slow  # act plays its gate in eval/tests/test_eval.py, and the program's other demos run
def test_the_demo_of_an_act(tmp_path: Path) -> None:
    """As it is typed, with fewer episodes: it wins."""
    result = sinew("demo", "act", "--episodes", "3", "--sweep-episodes", "0", "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "as numbers in the state" in result.stdout
    (played,) = json.loads((tmp_path / "report.json").read_text())["variants"]
    assert (played["wins"], played["episodes"]) == (3, 3)
    made = (
        "closed_loop.gif" if "film       none, so a GIF shows small frames" in result.stdout else "film.webp"
    )
    assert (tmp_path / made).stat().st_size > 10_000
    refused = sinew("demo", "egg", "--out", tmp_path)
    assert refused.returncode == 2
    assert "blocks" in refused.stderr
