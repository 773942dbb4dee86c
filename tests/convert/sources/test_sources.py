"""Everything that a verb takes as a policy, and the cache of what was converted on first use."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sinew_client.target import addresses_of
from sinew_client.typed_names import UntypedNameError

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert.conversion import Conversion
from sinew.convert.sources import cache, hub, resolve
from sinew.core import BundleError, ConvertError, SinewError, progress
from sinew.policy import open_bundle
from tests import processes
from tests.convert.sources.fake_hub import FakeHub, fake_hub

FLIP = bytes([0x55])


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An empty cache, and what was told while the test ran."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sentences: list[str] = []
    before = progress.tell(sentences.append)
    yield sentences
    progress.tell(before)


@pytest.fixture
def run(golden: Path, tmp_path: Path) -> Path:
    """A training run of LeRobot with two checkpoints, the language model's files beside them."""
    run = tmp_path / "outputs" / "train" / "pick-cube"
    for step in ("000100", "000200"):
        home = run / "checkpoints" / step
        shutil.copytree(golden / "smolvla-2cam" / "checkpoint", home / "pretrained_model")
        shutil.copytree(golden / "smolvla-2cam" / "vlm", home / "vlm")
        (home / "training_state").mkdir()
        (home / "training_state" / "optimizer_state.safetensors").write_bytes(b"not read")
    flip(run / "checkpoints" / "000100" / "pretrained_model" / "model.safetensors", -1)
    (run / "checkpoints" / "last").symlink_to("000200")
    return run


def flip(path: Path, place: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= FLIP[0]
    path.write_bytes(data)


def known() -> list[cache.CacheEntry]:
    return [entry for entry in cache.entries() if isinstance(entry, cache.CacheEntry)]


def weights(path: Path) -> dict[str, str]:
    hashes = Bundle(path).hashes
    assert hashes
    return hashes


# ----------------------------------------------------------------------------- folders


def test_a_training_run_is_converted_once(
    run: Path, said: list[str], smolvla_bundle: Callable[[str], Path]
) -> None:
    first = resolve(run)
    assert f"converting {run}: the cache {cache.folder()} has no bundle of these files" in said
    assert weights(first) == weights(smolvla_bundle("smolvla-2cam"))
    assert Bundle(first).manifest.name == "pick-cube"
    identity = first.stat().st_ino, first.stat().st_mtime_ns
    last = run / "checkpoints" / "last"
    for source in (run, run / "checkpoints", last, str(last), last / "pretrained_model"):
        said.clear()
        assert resolve(source) == first
        assert [line.partition(": ")[2][:9] for line in said] == ["converted"]  # it says so every time
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == identity
    assert open_bundle(run).path == first
    other = resolve(run / "checkpoints" / "000100")
    assert other != first
    assert sum(a != b for a, b in zip(weights(other).values(), weights(first).values(), strict=True)) == 1


def test_the_name_of_the_configuration_wins(run: Path, said: list[str]) -> None:
    model = run / "checkpoints" / "000200" / "pretrained_model"
    config = model / "train_config.json"
    config.write_text('{"job_name": "tidy", "policy": {"repo_id": "lab/tidy-table"}}')
    assert Bundle(resolve(run)).manifest.name == "tidy-table"
    config.write_text('{"job_name": "\\u001b[2Jtidy\\n", "policy": {"repo_id": "lab/\\u202e"}}')
    assert Bundle(resolve(run)).manifest.name == "[2Jtidy"


def test_a_changed_checkpoint_converts_again(run: Path, said: list[str]) -> None:
    first = resolve(run)
    flip(run / "checkpoints" / "000200" / "pretrained_model" / "model.safetensors", -1)
    second = resolve(run)
    assert second != first
    assert weights(second) == weights(
        resolve(run / "checkpoints" / "000100")
    )  # the same content, the same entry
    assert len(known()) == 2


def test_a_changed_language_model_converts_again(run: Path, said: list[str]) -> None:
    first = resolve(run)
    config = run / "checkpoints" / "000200" / "vlm" / "config.json"
    config.write_text(config.read_text() + "\n")
    said.clear()
    assert resolve(run) == first
    assert said[0] == f"converting {run}: {config} has changed"
    config.unlink()  # what is gone cannot have another content; the bundle holds everything
    said.clear()
    resolve(run)
    assert "converted" in said[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda entry: os.truncate(entry.bundle, entry.record.bytes - 1), "bytes, expected"),
        (lambda entry: flip(entry.bundle, -100), "tensors are damaged"),
        (lambda entry: flip(entry.bundle, 3000), ""),
        (lambda entry: entry.bundle.unlink(), "No such file"),
        (lambda entry: (entry.home / "source.json").write_text("{"), "expected the record of a conversion"),
        (lambda entry: (entry.home / "source.json").write_text('{"bundle": "../x"}'), "expected the record"),
    ],
)
def test_a_damaged_entry_is_noticed(
    run: Path, said: list[str], damage: Callable[[cache.CacheEntry], object], words: str
) -> None:
    good = weights(resolve(run))
    damage(known()[0])
    said.clear()
    assert weights(resolve(run)) == good
    assert said[0].startswith(f"converting {run}: damaged entry")
    assert words in said[0]
    assert Bundle(resolve(run)).verify() == []


def test_an_interrupted_conversion_leaves_nothing(
    run: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Conversion, out: Path, *_: object) -> None:
        out.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve(run)
    assert [path.suffix for path in cache.folder().iterdir()] == [".lock"]
    stale = cache.folder() / f"{next(cache.folder().iterdir()).stem}.abc"  # of a process that was killed
    stale.mkdir()
    resolve(run)
    assert not stale.exists()


def test_files_that_change_meanwhile_are_not_kept(
    run: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Conversion.write

    def write_and_change(self: Conversion, *arguments: object) -> None:
        write(self, *arguments)  # type: ignore[arg-type]
        flip(run / "checkpoints" / "000200" / "pretrained_model" / "model.safetensors", -1)

    monkeypatch.setattr(Conversion, "write", write_and_change)
    with pytest.raises(SinewError, match="its files changed during the conversion"):
        resolve(run)
    assert known() == []


def test_two_processes_at_once_convert_once(run: Path, said: list[str]) -> None:
    command = [sys.executable, "-m", "sinew", "inspect", str(run), "--json"]
    both = [processes.Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    ends = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert sum(error.count(f"converting {run}") for _, error in ends) == 1
    assert ends[0][0] == ends[1][0]
    assert len(known()) == 1


def test_what_is_no_policy_is_said(run: Path, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("nothing")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    none = "a folder with none of config.json, params, assets"
    for folder, words in (("empty", none), ("notes", none), ("bare", "a folder without weights")):
        with pytest.raises(BundleError, match=f"expected a bundle, a checkpoint.*got {words}"):
            resolve(tmp_path / folder)
    with pytest.raises(BundleError, match=r"nope\.gguf: no such file"):
        resolve("nope.gguf")
    shutil.rmtree(run / "checkpoints" / "000200" / "pretrained_model" / "tokenizer")
    (run / "checkpoints" / "000200" / "vlm" / "tokenizer.json").unlink()
    with pytest.raises(ConvertError, match=r"to pass options, run `sinew convert .*pick-cube policy\.gguf`"):
        resolve(run)


def test_a_run_whose_model_was_not_typed_says_the_line_that_takes_it(run: Path) -> None:
    """`sinew serve RUN` has no flag --vlm; `sinew convert` has it."""
    shutil.rmtree(run / "checkpoints" / "000200" / "vlm")
    with pytest.raises(
        UntypedNameError,
        match=r"add: --vlm vlm to `sinew convert .*pick-cube policy\.gguf`, and use policy\.gguf",
    ):
        resolve(run)


def test_an_unwritable_cache_is_said(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SinewError, match="set XDG_CACHE_HOME to another folder"):
        resolve(run)


def test_verbs_of_the_cache(run: Path, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = resolve(run), resolve(run / "checkpoints" / "000100")
    assert main(["hub", "cache", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["entries"]
    assert [entry["bundle"] for entry in listed] == [str(first), str(second)]
    assert main(["hub", "cache", "show", listed[0]["key"][:8], "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["damage"] is None
    for name in ("pick-cube", "pick"):
        assert main(["hub", "cache", "show", name]) == 1  # both have this name
        assert listed[1]["key"][:12] in capsys.readouterr().err.replace("\n", "")
    flip(first, -100)
    assert main(["hub", "cache", "show", listed[0]["key"], "--json"]) == 1
    assert "tensors are damaged" in json.loads(capsys.readouterr().out)["damage"]
    assert main(["hub", "cache", "rm", listed[0]["key"]]) == 0
    assert (first.exists(), second.exists(), run.exists()) == (False, True, True)
    capsys.readouterr()
    assert (
        main(["hub", "cache", "show", "pick", "--json"]) == 0
    )  # the beginning of a name that only one has now
    assert json.loads(capsys.readouterr().out)["name"] == "pick-cube"
    assert main(["hub", "cache", "rm"]) == 1
    assert main(["hub", "cache", "rm", "--all"]) == 0
    assert cache.entries() == []


# ----------------------------------------------------------------------------- the hub


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lerobot/smolvla_base", hub.HubName("lerobot/smolvla_base")),
        ("hf://lab/pick@v1.0", hub.HubName("lab/pick", "v1.0")),
        ("hf:/lab/pick", hub.HubName("lab/pick")),  # what a path makes of it
        ("hf://lab/pick@main/small.gguf", hub.HubName("lab/pick", "main", "small.gguf")),
        ("hf://lab/pick/int8/small.gguf", hub.HubName("lab/pick", None, "int8/small.gguf")),
        ("runs/policy.gguf", None),
        ("/lab/pick", None),
        ("lab/pick/more", None),
        ("hf://../etc", None),
        ("tcp://127.0.0.1:5555", None),
        ("policy", None),
    ],
)
def test_names_of_the_hub(text: str, expected: hub.HubName | None) -> None:
    assert hub.parse(text) == expected


def test_the_bundle_of_a_repository() -> None:
    name = hub.HubName("lab/pick")
    choose = hub._bundle_of
    assert choose(name, ["README.md", "policy.gguf", "other.gguf"]) == "policy.gguf"
    assert choose(name, ["README.md", "pick.gguf"]) == "pick.gguf"
    assert choose(name, ["config.json", "model.safetensors", "extra.gguf"]) is None
    assert choose(hub.HubName("lab/pick", None, "b.gguf"), ["a.gguf", "b.gguf"]) == "b.gguf"
    with pytest.raises(SinewError, match=r"got a\.gguf, b\.gguf; choose one with hf://lab/pick/FILE"):
        choose(name, ["a.gguf", "b.gguf"])
    with pytest.raises(SinewError, match=r"got c\.gguf"):
        choose(hub.HubName("lab/pick", None, "c.gguf"), ["a.gguf"])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=60) | st.from_regex(r"(hf://)?[\w.@/-]{0,40}", fullmatch=True))
def test_any_text_is_a_name_or_none(text: str) -> None:
    found = hub.parse(text)
    assert found is None or (hub.parse(str(found)) == found and ".." not in str(found))


def test_addresses_are_no_sources() -> None:
    assert addresses_of("tcp://127.0.0.1:5555")
    assert not addresses_of("hf://lab/pick")


def ask(source: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`sinew inspect` in a process of its own: huggingface_hub reads its environment when it is imported."""
    command = [sys.executable, "-m", "sinew", "inspect", source, "--json"]
    return processes.run(command, env={**os.environ, **environment}, timeout=240)


class Ill(http.server.BaseHTTPRequestHandler):
    """A hub that answers, and cannot."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - http.server looks it up by name

    def log_message(self, *_arguments: object) -> None:
        pass


def test_what_is_cached_is_used_while_the_hub_is_ill(
    tmp_path: Path, smolvla_bundle: Callable[[str], Path]
) -> None:
    """Also a bundle of another name than policy.gguf: a robot that has everything boots."""
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "models--lab--arm"
    (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    shutil.copy(smolvla_bundle("smolvla-2cam"), repository / "snapshots" / ("a" * 40) / "model.gguf")
    server = http.server.HTTPServer(("127.0.0.1", 0), Ill)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        found = ask("lab/arm", {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": endpoint, "HF_TOKEN": ""})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert json.loads(found.stdout)["name"] == "smolvla-2cam", found.stderr
    assert "answers with status 503" in " ".join(found.stderr.split())


@pytest.mark.slow
def test_repositories_of_a_hub(run: Path, tmp_path: Path, smolvla_bundle: Callable[[str], Path]) -> None:
    pytest.importorskip("huggingface_hub")
    (tmp_path / "bundles").mkdir()
    shutil.copy(smolvla_bundle("smolvla-2cam"), tmp_path / "bundles" / "policy.gguf")
    (tmp_path / "bundles" / "README.md").write_text("# a card")
    checkpoint = run / "checkpoints" / "000200" / "pretrained_model"
    shutil.copytree(run / "checkpoints" / "000200" / "vlm", checkpoint / "vlm")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "vlm_model_name": "HuggingFaceTB/vlm"}))
    repositories = {
        "lab/bundle": tmp_path / "bundles",
        "lab/pick": checkpoint,
        "HuggingFaceTB/vlm": checkpoint / "vlm",
    }
    environment = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_TOKEN": ""}
    with fake_hub(repositories) as server:
        online = {**environment, "HF_ENDPOINT": server.url}
        fetched = ask("hf://lab/bundle", online)
        assert json.loads(fetched.stdout)["name"] == "smolvla-2cam", fetched.stderr
        assert not any("README" in path and "/resolve/" in path for path in server.asked)
        converted = ask("lab/pick", online)
        assert json.loads(converted.stdout)["name"] == "pick", converted.stderr
        assert "converting hf://lab/pick: the cache" in converted.stderr
        missing = ask("lab/none", online)
        assert missing.returncode == 1
        assert (
            "hf://lab/none: no file or folder here, and the hub answers: Repository Not Found"
            in missing.stderr
        )
    gone = {**environment, "HF_ENDPOINT": server.url}  # nobody listens there any more
    again = ask("lab/pick", gone)
    assert json.loads(again.stdout)["name"] == "pick", again.stderr
    assert ": converted 20" in again.stderr
    unreachable = ask("lab/other", gone)
    assert unreachable.returncode == 1
    assert "no file or folder here" in unreachable.stderr
    assert "hf download lab/other --local-dir DIR" in unreachable.stderr
    assert "Traceback" not in unreachable.stderr


@pytest.fixture
def hosted(
    run: Path, tmp_path: Path, smolvla_bundle: Callable[[str], Path]
) -> Iterator[tuple[FakeHub, dict[str, str]]]:
    """A hub with a bundle, lab/bundle, and a checkpoint, lab/pick; and the environment of a process that asks it."""
    pytest.importorskip("huggingface_hub")
    (tmp_path / "bundles").mkdir()
    shutil.copy(smolvla_bundle("smolvla-2cam"), tmp_path / "bundles" / "policy.gguf")
    checkpoint = run / "checkpoints" / "000200" / "pretrained_model"
    with fake_hub({"lab/bundle": tmp_path / "bundles", "lab/pick": checkpoint}) as server:
        yield (
            server,
            {
                "HF_ENDPOINT": server.url,
                "HF_HOME": str(tmp_path / "hf"),
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "HF_TOKEN": "",
            },
        )


def test_nothing_is_fetched_without_room(hosted: tuple[FakeHub, dict[str, str]]) -> None:
    server, environment = hosted
    server.sizes = {"policy.gguf": 10**15, "model.safetensors": 10**15}
    for name in ("lab/bundle", "lab/pick"):
        found = ask(name, environment)
        assert found.returncode == 1
        assert "GB, the free space in" in found.stderr
        assert "got 1000000.0 GB" in found.stderr
    assert not any("/resolve/" in path for path in server.asked)


@pytest.mark.parametrize(("name", "file"), [("lab/bundle", "policy.gguf"), ("lab/pick", "model.safetensors")])
@pytest.mark.parametrize("form", ["flipped", "short"])
def test_what_is_not_what_the_hub_says_is_not_kept(
    hosted: tuple[FakeHub, dict[str, str]], name: str, file: str, form: str
) -> None:
    server, environment = hosted
    true = (server.repositories[name] / file).read_bytes()
    server.bodies[file] = true[:-1] + bytes([true[-1] ^ 1]) if form == "flipped" else true[:-1]
    found = ask(name, environment)
    assert found.returncode == 1
    what = (
        "SHA-256 " if form == "flipped" else f"{len(true)} bytes as the hub states, got {len(true) - 1} bytes"
    )
    assert f"hf://{name}: {file}: expected {what}" in found.stderr
    assert found.stderr.rstrip().endswith("the file was removed, run the command again")
    kept = Path(environment["HF_HOME"]).rglob("*")
    assert server.bodies[file] not in [each.read_bytes() for each in kept if each.is_file()]
    server.bodies.clear()
    if name == "lab/bundle":
        again = ask(name, environment)
        assert json.loads(again.stdout)["name"] == "smolvla-2cam", again.stderr


def test_names_of_a_repository_are_told_in_a_line(hosted: tuple[FakeHub, dict[str, str]]) -> None:
    server, environment = hosted
    server.names = [
        "a\x1b[2J\nerror: " + "x" * 300 + ".gguf",
        *(f"file{index}.gguf" for index in range(5000)),
    ]
    found = ask("hf://lab/bundle/none.gguf", environment)
    assert found.returncode == 1
    assert r"got none.gguf" in found.stderr
    assert "and 4992 more" in found.stderr
    assert len(found.stderr) < 1000
    assert "\x1b" not in found.stderr


def test_a_fetch_that_is_ended_leaves_nothing_half(hosted: tuple[FakeHub, dict[str, str]]) -> None:
    """huggingface_hub's name of an incomplete file is another one each time: nobody would ever remove it."""
    server, environment = hosted
    server.stall.set()
    command = [sys.executable, "-m", "sinew", "inspect", "lab/bundle"]
    process = processes.Process(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while server.stall.is_set() or not list(Path(environment["HF_HOME"]).rglob("*.incomplete")):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=60)
    server.go.set()
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(Path(environment["HF_HOME"]).rglob("*.incomplete"))
