"""Hostile files: short forms of the fuzzers, and each shape that once ended in a traceback, a hang or a full disk."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.panel import Panel
from rich.progress import TextColumn
from rich.text import Text
from sinew_client.untrusted import open_regular

from sinew.bundle import Bundle, write_bundle
from sinew.cli import main, terminal
from sinew.convert import convert
from sinew.convert.read.files import read_bytes
from sinew.convert.sources import card as cards
from sinew.convert.sources.cache import CacheEntry
from sinew.core import BundleError, CameraSpec, ConvertError, KeyMap, SinewError
from sinew.core.fields import from_builtins, from_json, problems, to_json
from sinew.engine.onnx.engine import _table
from sinew.engine.onnx.graphs import NEWEST, GraphSet
from sinew.engine.onnx.providers import open_session
from sinew.policy import load
from sinew.records.recorder import read_record
from sinew.serve.deploy import deploy
from sinew.serve.limits import ServingLimits
from sinew.steps.action_tokens.base import ActionTokens
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.tokenizer import open_tokenizer
from tests import processes
from tests.bundle.test_bundle import sources
from tests.hostile import files
from tests.hostile.mutate import mutate_bytes, mutate_record

CASE = "smolvla-2cam"


# ----------------------------------------------------------------------------- fuzzers, short


PARTS = {"manifests": files.Manifests, "recipes": files.Recipes, "headers": files.Headers}


@pytest.mark.parametrize(
    "kind",
    [
        *files.FAMILIES,
        "vla.cpp files",
        *PARTS,
        "low-bit weights",
        "records",
        "adapters",
        "torch files",
    ],
)
def test_every_input_is_a_policy_or_an_error(golden, smolvla_bundle, pi_bundle, tmp_path, kind):
    """Short: `make fuzz` runs the same inputs by the thousand."""
    if kind in PARTS:
        bundles = [smolvla_bundle("smolvla-2cam"), pi_bundle("pi05-2cam")]
        case = PARTS[kind](bundles, tmp_path) if kind == "headers" else PARTS[kind](bundles)
        run = case.case
    else:
        run = files.makers(golden, tmp_path)[kind]()
    for number in range(8):
        with contextlib.suppress(SinewError):
            run(random.Random(f"{kind} {number}"))


@pytest.mark.parametrize(
    ("offset", "value"), [(6, 109), (8, 1), (10, 99)], ids=["version", "encrypted", "method"]
)
def test_records_of_other_kinds_of_zip(tmp_path, offset, value):
    made = files.Records(tmp_path)
    data = bytearray(made.data)
    data[data.index(b"PK\x01\x02") + offset] = value  # in the first entry of the directory at the end
    made.file.write_bytes(data)
    with pytest.raises(SinewError, match="damaged.npz: not a record"):
        read_record(made.file)


BYTES = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"A": 0, "B": 1, "\u00c3": 2}, "merges": []},
    }
)
SIZES = {"most": 4, "end": 9, "rows": 2, "dims": 2, "zero": 8, "least": -65.0, "scale": 2.0}
FAST = ActionTokens.read({"kind": "fast", "tokenizer": BYTES, **SIZES})


def test_tokenizers_of_actions():
    """A second tokenizer comes with a bundle, and is used when a robot waits: a sentence is a chunk or an error."""
    record, rng = from_json(to_json(FAST), dict, "speaks"), random.Random(7)
    chunks = 0
    for number in range(400):
        text = json.dumps(mutate_record(json.loads(BYTES), rng, 1 + number % 3))
        damaged = mutate_record(record | {"tokenizer": text}, rng, number % 2)
        with contextlib.suppress(SinewError):
            words = from_builtins([damaged], tuple[ActionTokens, ...], "speaks")[0]
            if any(problems(words)):
                continue
            for sentence in (list(range(9)), [8], [], [rng.randrange(-(2**63), 2**63) for _ in range(3)]):
                found = words.chunk(np.array(sentence, np.int64))
                assert found.shape == (words.rows, words.dims)
                chunks += 1
    assert chunks > 50


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "FAST's tokenizer cannot be read"),
        ("[]", "expected a JSON object, got list"),
        (
            '{"model": {"type": "BPE", "dropout": 0.5, "vocab": {}, "merges": []}}',
            "with dropout the tokens are random",
        ),
        ("x" * (1 + (8 << 20)), "tokenizer: expected at most 8388608 characters"),
    ],
    ids=["nothing", "a list", "random", "long"],
)
def test_tokenizers_of_actions_that_are_none(text, why):
    assert why in next(problems(replace(FAST, tokenizer=text)))


def test_folders_of_graphs(tmp_path):
    """Without an export, which takes a minute: the record, the tables and the graphs one by one."""
    good = GraphSet("smolvla", 2, ("a", "b"), (10,), (), {"head": "int8"}, "", 8)
    good.save(tmp_path)
    assert GraphSet.load(tmp_path) == good
    speaks = replace(good, reads=(NEWEST, "b"), said=(NEWEST,), speaks=(FAST,))
    (tmp_path / "speaks").mkdir()
    speaks.save(tmp_path / "speaks")
    assert GraphSet.load(tmp_path / "speaks") == speaks
    rng = random.Random(1)
    for folder in (tmp_path, tmp_path / "speaks"):
        record = json.loads((folder / "graphs.json").read_text())
        for _ in range(300):
            (folder / "graphs.json").write_text(json.dumps(mutate_record(record, rng, 2)))
            with contextlib.suppress(BundleError):
                GraphSet.load(folder)
    table = io.BytesIO()
    np.save(table, np.zeros((10, 4), np.float32))
    for number in range(100):
        (tmp_path / "moments-10.npy").write_bytes(mutate_bytes(table.getvalue(), random.Random(number), 200))
        with contextlib.suppress(BundleError):
            _table(tmp_path / "moments-10.npy", 10)
    onnxruntime = pytest.importorskip("onnxruntime")
    for content in (b"", b"\x08\x07garbage", b"\0" * 100):
        (tmp_path / "step.onnx").write_bytes(content)
        with pytest.raises(BundleError, match="step.onnx: ONNX Runtime cannot open this file"):
            open_session(onnxruntime, tmp_path / "step.onnx", None, ["CPUExecutionProvider"])


# ----------------------------------------------------------------------------- files that are no files


@pytest.fixture
def checkpoint(golden, tmp_path) -> Path:
    for folder in ("checkpoint", "vlm"):
        shutil.copytree(golden / CASE / folder, tmp_path / folder, copy_function=shutil.copyfile)
    return tmp_path / "checkpoint"


def within(seconds: float, work) -> BaseException | None:
    """What ``work`` raised; a failure if it hangs."""
    found: list[BaseException | None] = []

    def call() -> None:
        try:
            work()
            found.append(None)
        except BaseException as error:  # noqa: BLE001 - handed on
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "policy_preprocessor.json"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "directory"])
def test_only_regular_files_are_read(checkpoint, name, kind):
    """A FIFO without a writer once waited for ever, a link to /dev/zero once read until memory was gone."""
    path = checkpoint / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    error = within(60, lambda: convert(checkpoint, checkpoint.parent / "out.gguf"))
    assert isinstance(error, ConvertError)
    assert re.search("expected a (regular|JSON) file, got a", str(error))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_bundles_are_regular_files(tmp_path):
    os.mkfifo(tmp_path / "fifo.gguf")
    for path in (tmp_path / "fifo.gguf", Path("/dev/zero"), tmp_path):
        error = within(60, lambda path=path: Bundle(path))
        assert isinstance(error, BundleError)
        assert "expected a regular file" in str(error)


def test_files_have_a_largest_size(checkpoint):
    with pytest.raises(ConvertError, match=r"config.json: expected at most 1000 bytes"):
        read_bytes(checkpoint / "config.json", 1000)
    os.truncate(checkpoint / "config.json", 1 << 40)  # sparse
    with pytest.raises(ConvertError, match=r"config.json: expected at most 268435456 bytes"):
        convert(checkpoint, checkpoint.parent / "out.gguf")


def test_links_to_regular_files_are_followed(checkpoint, tmp_path):
    """The hub's cache is made of links."""
    (checkpoint / "config.json").rename(tmp_path / "blob")
    (checkpoint / "config.json").symlink_to(tmp_path / "blob")
    convert(checkpoint, tmp_path / "out.gguf")
    with open_regular(checkpoint / "config.json") as file:
        assert file.read(1) == b"{"


def test_pictures_of_any_size_are_not_written_out_as_tokens(golden, tmp_path):
    """The text of 4 million image tokens took half a minute and 4 GB."""
    shutil.copytree(golden / "groot-n17" / "vlm", tmp_path / "vlm", copy_function=shutil.copyfile)
    file = tmp_path / "vlm" / "preprocessor_config.json"
    record = json.loads(file.read_text())
    record["size"] = {"shortest_edge": 1 << 31, "longest_edge": 1 << 32}
    file.write_text(json.dumps(record))
    _case, root, options = files.FAMILIES["checkpoints of GR00T"][0]
    with pytest.raises(ConvertError, match="image tokens: expected at most 8192 for all views"):
        convert(golden / "groot-n17" / root, tmp_path / "o.gguf", **{**options, "vlm": tmp_path / "vlm"})


def test_planted_links_are_not_written_through(checkpoint, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("out.gguf", "out.gguf.partial", "out.gguf.header", "out.gguf.partial.header"):
        (tmp_path / name).symlink_to(victim)
    convert(checkpoint, tmp_path / "out.gguf")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "out.gguf").is_symlink()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_output_is_a_regular_file_or_none(checkpoint, tmp_path):
    (tmp_path / "out.gguf").mkdir()
    with pytest.raises(BundleError, match="expected a regular file or none"):
        convert(checkpoint, tmp_path / "out.gguf")


# ----------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"mean": [float("nan")] + [0] * 5}, r"mean\[0\]: expected a finite number, got nan"),
        ({"std": [1] * 5 + [float("inf")]}, r"std\[5\]: expected a finite number, got inf"),
        ({"std": [1, 1, -1, 1, 1, 1]}, r"std\[2\]: expected at least 0, got -1"),
        ({"std": [1e39] * 6}, r"std\[0\]: expected a finite number"),
    ],
)
def test_statistics_that_cannot_be(checkpoint, stats, message):
    good = {"mean": [0.0] * 6, "std": [1.0] * 6}
    file = checkpoint.parent / "stats.json"
    file.write_text(json.dumps({"observation.state": good, "action": good | stats}))
    with pytest.raises(ConvertError, match=f"processing.action.stats.{message}"):
        convert(checkpoint, checkpoint.parent / "out.gguf", stats=file)


def test_a_range_upside_down(golden, tmp_path):
    vector = {"q01": [0.0] * 7, "q99": [1.0] * 7}
    record = {"observation.state": vector, "action": vector | {"q99": [1.0] * 6 + [-1.0]}}
    (tmp_path / "stats.json").write_text(json.dumps(record))
    case = golden / "pi05-2cam"
    with pytest.raises(ConvertError, match=r"q01\[6\]: expected at most q99\[6\] = -1.0, got 0.0"):
        convert(
            case / "checkpoint", tmp_path / "o.gguf", arch=case / "arch.json", stats=tmp_path / "stats.json"
        )


def test_values_that_never_vary_are_noted(checkpoint, capsys):
    good = {"mean": [0.0] * 6, "std": [1.0] * 6}
    file = checkpoint.parent / "stats.json"
    file.write_text(json.dumps({"observation.state": good, "action": good | {"std": [1, 1, 0, 1, 1, 0]}}))
    out = checkpoint.parent / "out.gguf"
    assert main(["convert", str(checkpoint), str(out), "--stats", str(file)]) == 0
    assert "processing.action: value 2, 5 did not vary in training" in capsys.readouterr().out.replace(
        "\n", " "
    )
    assert any("value 2, 5 did not vary" in note for note in Bundle(out).manifest.provenance.notes)


# ----------------------------------------------------------------------------- manifests


def test_fields_of_a_manifest_are_bounded(smolvla_bundle, tmp_path):
    bundle = Bundle(smolvla_bundle(CASE))
    m, spec, out = bundle.manifest, bundle.manifest.spec, tmp_path / "m.gguf"

    def camera(name: str = "camera1", height: int = 480) -> dict:
        return {"cameras": (CameraSpec(name, height, 640), spec.cameras[1])}

    cases = {
        r"spec.cameras\[0\].height: expected 1 to 8192, got 2147483648": camera(height=1 << 31),
        "height: expected 1 to 8192, got 0": camera(height=0),
        r"cameras\[0\].name: expected 1 to 256 characters, printable": camera(name="a\nb"),
        "name: expected 1 to 256 characters, p": camera(name="a" * 70_000),
        "pixels of all frames": {"cameras": tuple(CameraSpec(f"c{i}", 8192, 8192) for i in range(16))},
        "solver_steps: expected 1 to 100": {"solver_steps": 0},
        "expected 1 to 100": {"solver_steps": 101},
        "control_hz: expected actions per second": {"control_hz": -5.0},
        "above 0 and at most 10000": {"control_hz": 1e9},
        "n_action_steps": {"n_action_steps": 51},
        "max_prompt_tokens": {"max_prompt_tokens": 0},
        "one name and one unit": {"state": replace(spec.state, names=("a",))},
        "default_prompt": {"default_prompt": "x" * 100_000},
    }
    for message, change in cases.items():
        write_bundle(out, lambda change=change: replace(m, spec=replace(spec, **change)), sources(bundle))
        with pytest.raises(BundleError, match=message):
            Bundle(out)
    rows = replace(m.processing, state=replace(m.processing.state, rows=1))
    with pytest.raises(BundleError, match=r"processing.state.rows: expected 0, because only actions"):
        replace(m, processing=rows).check()
    config = {**m.config, "prefix_length": 1 << 20}
    write_bundle(out, lambda: replace(m, config=config), sources(bundle))
    with pytest.raises(BundleError, match="prefix_length: expected 0 to 8192, got 1048576"):
        load(out)


def test_inspect_prints_any_name(smolvla_bundle, tmp_path, capsys):
    bundle = Bundle(smolvla_bundle(CASE))
    spec = replace(bundle.manifest.spec, name="[/red]", cameras=(CameraSpec("[/x]", 8, 8),))
    manifest = replace(
        bundle.manifest, name="[/red]", spec=spec, config={**bundle.manifest.config, "[/a]": "[/b]"}
    )
    write_bundle(tmp_path / "m.gguf", lambda: manifest, sources(bundle))
    assert main(["inspect", str(tmp_path / "m.gguf"), "--tensors"]) == 0
    assert "[/red]" in capsys.readouterr().out


STEERS = "\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202ename"  # a title, an empty screen, colours, and text from right to left


def test_what_is_printed_does_not_steer_a_terminal(smolvla_bundle, tmp_path, capsys):
    bundle = Bundle(smolvla_bundle(CASE))
    old = bundle.manifest
    origin = replace(
        old.provenance, converter=STEERS, notes=(STEERS,), dropped=(STEERS,), options={"a": STEERS}
    )
    manifest = replace(old, provenance=origin, config={**old.config, STEERS: STEERS})
    write_bundle(tmp_path / "m.gguf", lambda: manifest, sources(bundle))
    path = str(tmp_path / "m.gguf")
    for words in (
        ["inspect", path],
        ["inspect", path, "--tensors"],
        ["hub", "push", path, "lab/pick", "--dry"],
    ):
        assert main(words) == 0
    assert main(["inspect", STEERS]) == 1
    with terminal.bars(TextColumn("{task.description}")), terminal.show_task(STEERS, None):
        pass
    terminal.console().print(Text(STEERS), Panel(STEERS))
    said = capsys.readouterr()
    assert not {each for each in said.out + said.err if each in STEERS and not each.isprintable()}
    assert said.out.count(r"\x1b[2J\x9b1m\r\u202ename") >= 4
    assert terminal.shown("a\tb\nc é 木") == "a\tb\nc é 木"


def test_the_log_does_not_steer_a_terminal():
    code = "from sinew.cli import terminal; terminal.log(20, '%(message)s'); import logging; logging.info('a\\x1bb')"
    done = processes.run([sys.executable, "-c", code])
    assert done.stderr == "a\\x1bb\n"


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", 'a": print(1), "b', "a`b", "a\\", "a\u202eb", ""])
def test_names_fit_into_programs_and_pages(smolvla_bundle, name):
    old = Bundle(smolvla_bundle(CASE)).manifest
    camera = replace(old.spec, cameras=(CameraSpec(name, 8, 8),))
    with pytest.raises(
        BundleError, match=r"spec.cameras\[0\].name: expected 1 to 256 characters, printable, without"
    ):
        replace(old, spec=camera).check()
    if not name:
        return
    keys = KeyMap("openpi", {name: old.spec.cameras[0].name}, ("state",))
    with pytest.raises(
        BundleError, match=r"spec.keys\[0\].images: a key: expected 0 to 256 characters, printable, w"
    ):
        replace(old, spec=replace(old.spec, keys=(keys,))).check()
    if not name.isprintable():
        joints = replace(old.spec.state, names=(name, *map(str, range(1, old.spec.state.dim))))
        for spec in (replace(old.spec, state=joints), replace(old.spec, embodiment=name)):
            with pytest.raises(BundleError, match=r"spec.\S+: expected at most 256 printable characters"):
                replace(old, spec=spec).check()


def test_the_program_on_a_card_is_the_program_that_was_meant(smolvla_bundle, tmp_path):
    bundle = Bundle(smolvla_bundle(CASE))
    cameras = (CameraSpec("x}) or print(1)  #", 8, 8),)
    manifest = replace(bundle.manifest, spec=replace(bundle.manifest.spec, cameras=cameras))
    write_bundle(tmp_path / "m.gguf", lambda: manifest, sources(bundle))
    text = cards.card(Bundle(tmp_path / "m.gguf"), "0" * 64, [], "lab/pick", {})
    (program,) = re.findall("^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    calls = [each.func for each in ast.walk(ast.parse(program)) if isinstance(each, ast.Call)]
    assert sorted(ast.unparse(each) for each in calls) == ["Client", "policy.infer"]


# ----------------------------------------------------------------------------- tokenizers


def with_tokenizer(golden: Path, **changes) -> str:
    return json.dumps(json.loads((golden / CASE / "vlm" / "tokenizer.json").read_text()) | changes)


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 34}}, "from one character, got 1.72e"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "b" * 99}}, "got 100"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}}, "cannot be read"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read"),
        ({"pre_tokenizer": split("(a+)+$")}, "retry-limit"),
        ({"pre_tokenizer": split("(")}, "cannot be read"),
        (
            {"post_processor": TEMPLATE | {"single": [TEXT] * 20}},
            "expected one text and at most 256 special tokens, got 20",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.1}}, "random"),
        ({"model": []}, "cannot be read"),
    ],
)  # fmt: skip
def test_tokenizers_neither_panic_nor_grow(golden, changes, message):
    """Doubling replacements took 10 GB and aborted the process, a template of 20,000 texts did not return."""
    found = within(60, lambda: open_tokenizer(with_tokenizer(golden, **changes)))
    assert isinstance(found, BundleError)
    assert message in str(found)


def test_panics_while_serving_are_errors_of_the_prompt(smolvla_bundle, golden, tmp_path):
    """A pattern that only an unforeseen text trips: the trial passes, the request is refused."""
    bundle = Bundle(smolvla_bundle(CASE))
    tokenizer = with_tokenizer(golden, pre_tokenizer=split("(z+)+$"))
    write_bundle(tmp_path / "m.gguf", lambda: replace(bundle.manifest, tokenizer=tokenizer), sources(bundle))
    policy = load(tmp_path / "m.gguf")
    policy.warm_up()
    observation = policy.dummy_observation()
    with pytest.raises(SinewError, match="prompt: expected text that the tokenizer accepts"):
        policy.infer(replace(observation, prompt="z" * 60 + "!"))
    policy.infer(observation)


# ----------------------------------------------------------------------------- what others wrote


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"std": (0.5, -0.5, 0.5)}, r"image.std\[\d\]: expected a finite number above 0"),
        ({"std": (0.0, 0.5, 0.5)}, r"image.std\[\d\]: expected a finite number above 0"),
        ({"mean": (float("nan"), 0.5, 0.5)}, r"image.mean\[0\]: expected a finite number, got nan"),
        ({"mean": ("a", 0.5, 0.5)}, r"Expected `float`, got `str` - at `\$.image.mean\[0\]`"),
        ({"std": (None, 0.5, 0.5)}, "Expected `float`, got `null`"),
        ({"steps": (Letterbox(8, 8, "\ud800"),)}, "surrogates not allowed"),
    ],
)
def test_pixels_that_no_picture_has(smolvla_bundle, tmp_path, changes, message):
    """A negative std turned frames around without a word; a text of a checkpoint was a TypeError."""
    manifest = Bundle(smolvla_bundle(CASE)).manifest
    image = replace(manifest.processing.image, **changes)
    with pytest.raises(BundleError, match=message):
        replace(manifest, processing=replace(manifest.processing, image=image)).check()


def test_a_checkpoint_whose_values_have_other_kinds(golden, tmp_path):
    """Of GR00T: the mean of its frames, as a text, is read as it is and refused where the bundle is made."""
    for folder in ("checkpoint", "vlm"):
        shutil.copytree(golden / "groot-n17" / folder, tmp_path / folder, copy_function=shutil.copyfile)
    file = tmp_path / "vlm" / "preprocessor_config.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"image_mean": ["a", 0.5, 0.5]}))
    _case, root, options = files.FAMILIES["checkpoints of GR00T"][0]
    with pytest.raises(ConvertError, match="Expected `float`, got `str`"):
        convert(tmp_path / root, tmp_path / "o.gguf", **{**options, "vlm": tmp_path / "vlm"})


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        ({"std": [0.0] * 6}, "processing.action: no value varied in training, so every chunk is the same"),
        ({"std": [1e30] * 6}, "processing.action: statistics up to 1e+30, expected at most 1e+09"),
        ({"std": [0.0] + [1.0] * 5}, "processing.action: value 0 did not vary in training"),
        ({"std": [0.5] + [1.0] * 5}, None),
    ],
)
def test_statistics_that_no_robot_has_are_told_at_serve(checkpoint, caplog, stats, said):
    good = {"mean": [0.0] * 6, "std": [1.0] * 6}
    file = checkpoint.parent / "stats.json"
    file.write_text(json.dumps({"observation.state": good, "action": good | stats}))
    policy = load(convert(checkpoint, checkpoint.parent / "out.gguf", stats=file), threads=1)
    deploy(policy, ServingLimits()).scheduler.stop()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert (
        any(said in each for each in warnings) if said else not any("processing" in each for each in warnings)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bundle": "a\0b.gguf"}, "bundle: expected the name of a file"),
        ({"bundle": "\ud800.gguf"}, "expected the record of a conversion"),
        ({"mtime_ns": 5000 * [[]]}, "expected the record of a conversion"),
    ],
)
def test_records_of_the_cache(tmp_path, change, said):
    record = {
        **dict.fromkeys(("source", "name", "architecture", "bundle", "made", "converter"), "a"),
        **{key: [] for key in ("files", "outside", "notes")},
        "bytes": 1,
        "mtime_ns": 1,
        "seconds": 1.0,
    }
    (tmp_path / "source.json").write_text(json.dumps(record))
    assert "No such file" in (CacheEntry(tmp_path).damage() or "")
    outside = [{"name": "x" * 5000, "bytes": 1, "sha256": "a"}]  # a name that no file can have
    (tmp_path / "source.json").write_text(json.dumps(record | {"outside": outside}))
    assert CacheEntry(tmp_path).stale() is None
    (tmp_path / "source.json").write_text(json.dumps(record | change))
    with pytest.raises(SinewError, match=said):
        CacheEntry(tmp_path).damage()


@pytest.mark.slow  # an interpreter that imports all of it
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_long_form_starts_as_it_is_typed() -> None:
    """`make fuzz` imports a package that nothing installs."""
    root = Path(__file__).resolve().parents[2]
    words = [
        "make",
        "-s",
        "-n",
        "fuzz",
        f"BIN={shlex.quote(str(Path(sys.executable).parent))}",
        "FUZZ_ARGS=--help",
    ]
    recipe = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()[
        -1
    ]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(recipe, shell=True, cwd=root, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--decoders" in done.stdout
