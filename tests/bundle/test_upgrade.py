"""Bundles of formats 1 and 2 load as they did."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.bundle.schema import KEY_VERSION, Manifest, Processing
from sinew.bundle.upgrade import upgraded
from sinew.cli import main
from sinew.convert import convert
from sinew.convert.sources import ASSETS
from sinew.core import BundleError, ConvertError
from sinew.core.fields import from_builtins, to_json
from sinew.models.solvers import FLOW
from sinew.policy import Policy, load
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.prompt.base import PromptText
from tests.golden import Golden

# As every converter wrote them.
RECORDS = json.loads(lzma.decompress(Path(__file__).with_name("processing-2.json.xz").read_bytes()))
LATER = {"config": ("norm", "activation", "qkv_bias", "qk_norm", "sub_norms"), "spec": ("solver",)}


def as_format_1(path: Path, out: Path) -> Bundle:
    """The same bundle with the metadata that format 1 had. Its header is decoded again from the changed text."""
    shutil.copyfile(path, out)
    bundle = Bundle(out)
    old = dict(bundle.file.metadata)
    config, spec = json.loads(old["sinew.config"]), json.loads(old["sinew.spec"])
    for part in ("language", "expert"):
        family = {"rms": "llama", "gemma_rms": "gemma"}[config[part]["norm"]]
        config[part] = {k: v for k, v in config[part].items() if k not in LATER["config"]} | {
            "family": family
        }
    spec = {key: value for key, value in spec.items() if key not in LATER["spec"]}
    old["sinew.processing"] = json.dumps(RECORDS[path.stem])  # formats 1 and 2 have the same
    old |= {KEY_VERSION: 1, "sinew.config": json.dumps(config), "sinew.spec": json.dumps(spec)}
    bundle.manifest = Manifest.from_metadata(old)
    return bundle


@pytest.mark.parametrize("case", ["smolvla-2cam", "pi0-2cam", "pi05-2cam"])
def test_a_bundle_of_format_1_computes_the_same_bits(case, golden, smolvla_bundle, pi_bundle, tmp_path):
    path = (pi_bundle if case.startswith("pi") else smolvla_bundle)(case)
    observation = Golden(golden / case).observation()
    both = Bundle(path), as_format_1(path, tmp_path / "old.gguf")
    now, then = (Policy(bundle, engine="eager") for bundle in both)
    assert then.spec.solver == FLOW
    assert then.engine.model.config == now.engine.model.config
    assert np.array_equal(then.infer(observation).actions, now.infer(observation).actions)


def test_what_no_format_knows_is_refused_by_name(smolvla_bundle):
    metadata = dict(Bundle(smolvla_bundle("smolvla-2cam")).file.metadata)
    with pytest.raises(BundleError, match=r"bundle format 99 is not supported \(this version reads 1 to 3\)"):
        Manifest.from_metadata(metadata | {KEY_VERSION: 99})
    for version, family in ((1, "mamba"), (2, "gemma")):
        assert upgraded("config", {"language": {"family": family}}, version) == {
            "language": {"family": family}
        }


# ----------------------------------------------------------------------------- format 2

MAKERS = {
    "smolvla": "smolvla_bundle",
    "pi0": "pi_bundle",
    "groot": "groot_bundle",
    "openvla": "openvla_bundle",
    "vla-adapter": "openvla_bundle",
    "bitvla": "openvla_bundle",
    "vla-jepa": "jepa_bundle",
    "evo1": "evo1_bundle",
}


def read_2(record: dict) -> Processing:
    return from_builtins(upgraded("processing", record, 2), Processing, "sinew.processing")


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_of_format_2_is_what_its_converter_writes_today(case, request):
    made = request.getfixturevalue(next(maker for start, maker in MAKERS.items() if case.startswith(start)))
    found = Bundle(made if isinstance(made, Path) else made(case)).manifest.processing
    assert read_2(RECORDS[case]) == found
    assert upgraded("processing", json.loads(to_json(found)), 3) == json.loads(to_json(found))


def test_a_letterbox_of_format_2_follows_the_steps():
    record = RECORDS["openvla-oft"]
    steps = [step["kind"] for step in record["image"]["steps"]]
    image = read_2({**record, "image": {**record["image"], "resize": "letterbox", "pad": "center"}}).image
    assert [step.kind for step in image.steps] == [*steps, "letterbox"]
    assert image.steps[-1] == Letterbox(image.height, image.width, pad="center")


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("image", {"resize": "stretch"}, "unknown field 'image.resize'"),
        ("image", {"sharpen": 1}, "unknown field 'image.sharpen'"),
        ("image", {"steps": [{"kind": "sharpen"}]}, "kind: expected one of .*, got 'sharpen' - at `.*steps"),
        ("image", {"steps": [{"kind": "jpeg", "speed": 1}]}, "unknown field 'image.steps.speed'"),
        (
            "image",
            {"steps": [{"kind": "jpeg", "quality": "high"}]},
            "jpeg: Expected `int`, got `str` - at `..quality`",
        ),
        ("image", {"steps": [7]}, 'expected a step, an object with a "kind", got int'),
        ("image", {"steps": 7}, "Expected `array`, got `int`"),
        ("prompt", {"shout": True}, "unknown field 'prompt.shout'"),
        ("prompt", {"template": 7}, "unknown field 'prompt.template'"),
        ("prompt", {"steps": []}, "prompt.steps: format 2 has no such field"),
    ],
)
def test_what_format_2_did_not_know_is_refused_by_name(part, changes, said):
    record = RECORDS["smolvla-2cam"]
    with pytest.raises(BundleError, match=said):
        read_2({**record, part: {**record[part], **changes}})


@pytest.mark.parametrize(
    ("fields", "text", "rest"),
    [
        ({}, "Pick_it\n up ", []),
        ({"clean": True, "strip": True, "lower": True}, "pick it  up", []),
        ({"words_only": True, "as_list": True}, repr(["pick_it\n up "]), []),
        ({"template": "a {image}{prompt} b"}, "a Pick_it\n up  b", []),  # an image of no tokens
        ({"template": "{state};", "state_values": 3, "state_bins": 4}, "3 -1 2;", []),
        ({"template": "{image}!", "image_text": "#", "image_tokens": 3, "placeholder": 5}, "###!", []),
        ({"template": "go\n", "ensure_suffix": "\n"}, "go\n", []),
        ({"template": "", "ensure_suffix": "\n"}, "\n", []),
        ({"drop": [4], "ensure_last": 9, "marker": 3, "markers": 2}, "Pick_it\n up ", [1, 9]),
    ],
)
def test_each_field_of_a_prompt_of_format_2_says_what_it_said(fields, text, rest):
    """What was said before is written down here: format 2's own function is gone."""
    record = {"max_tokens": 9, "vocab_size": 10, "pad_token_id": 0, **fields}
    recipe = read_2({**RECORDS["smolvla-2cam"], "prompt": record}).prompt
    said = PromptText("Pick_it\n up ", "", np.array([0.9, -1.5]))
    ids = [4, 1, 4]
    for step in recipe.steps:
        said, ids = step.forward(said), step.tokens(ids, said.text)
    assert said.text == text
    assert ids == (rest or [4, 1, 4])
    assert [tuple(held) for held in recipe.held] == [
        *([("image tokens", 5, 3)] if "placeholder" in fields else []),
        *([("marking tokens", 3, 2)] if "markers" in fields else []),
    ]


# ----------------------------------------------------------------------------- sinew convert

HEADER = Path(__file__).with_name(
    "format-2.header"
)  # of the policy `egg` as format 2 wrote it; its tensors are the same
TENSORS, WHOLE = 862720, "632a3efa16140ab4ce05b338f9649ae98880ed81d601f6f1df4e0244719ba7e6"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    content = HEADER.read_bytes() + (ASSETS / "egg.gguf").read_bytes()[-TENSORS:]
    assert hashlib.sha256(content).hexdigest() == WHOLE
    (tmp_path / "old.gguf").write_bytes(content)
    return tmp_path / "old.gguf"


def version(path: Path) -> int:
    return Bundle(path).file.metadata[KEY_VERSION]


def answers(path: Path) -> bytes:
    policy = load(path, engine="eager", threads=1)
    rng = np.random.default_rng(0)
    frames = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in policy.spec.cameras}
    state = rng.standard_normal(policy.spec.state.dim).astype(np.float32)
    found = [policy.infer({"images": frames, "state": state, "prompt": "go", "seed": n}) for n in range(3)]
    return b"".join(each.actions.tobytes() for each in found)


def test_an_upgraded_file_is_the_same_policy(old, capsys):
    new = old.with_name("new.gguf")
    before = old.read_bytes()
    assert main(["convert", str(old), str(new)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "format 2 to 3 (frames, prompts and vectors" in said
    assert f"{len(Bundle(new).infos)} tensors are unchanged" in said
    assert (version(old), version(new), old.read_bytes()) == (2, 3, before)
    assert Bundle(new).manifest == Bundle(old).manifest
    assert Bundle(new).hashes == Bundle(old).hashes
    assert Bundle(new).verify() == []
    assert answers(new) == answers(old)
    again = old.with_name("again.gguf")
    assert convert(old, again).read_bytes() == new.read_bytes()


def test_a_file_is_replaced_where_it_lies_and_a_link_stays_one(old, monkeypatch):
    link = old.with_name("link.gguf")
    link.symlink_to(old)
    synced = []
    monkeypatch.setattr("sinew.bundle.writer.os.fsync", synced.append)
    wanted = Bundle(old).manifest
    assert main(["convert", str(link), str(link), "--force"]) == 0
    assert link.is_symlink()
    assert version(old) == 3
    assert Bundle(old).manifest == wanted
    assert len(synced) == 2  # its bytes before it took its name, then the name
    assert sorted(path.name for path in old.parent.iterdir()) == ["link.gguf", "old.gguf"]


def test_a_write_that_breaks_off_leaves_the_old_file(old, monkeypatch):
    before = old.read_bytes()

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sinew.bundle.writer.os.fsync", full)
    assert main(["convert", str(old), str(old), "--force"]) == 1
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["old.gguf"]


def test_what_cannot_be_upgraded_is_refused_by_name(old, capsys):
    bundle, new = Bundle(old), old.with_name("new.gguf")
    middle = max(bundle.infos.values(), key=lambda info: info.nbytes)
    data = bytearray(old.read_bytes())
    data[middle.offset + 7] ^= 1
    damaged = old.with_name("damaged.gguf")
    damaged.write_bytes(data)
    mine = old.with_name("mine.gguf")
    mine.write_bytes(b"mine")
    present = ASSETS / "egg.gguf"
    other = old.with_name("other.gguf")
    other.write_bytes(b"GGUF and nothing")
    for arguments, said in (
        ([old, mine], "mine.gguf exists; pass --force to overwrite it"),
        ([damaged, new], f"1 tensors are damaged, {middle.name} first; nothing was written"),
        ([other, new], "other.gguf"),
        ([present, new], "expected a checkpoint or a bundle before format 3, got one of format 3"),
        ([old, new, "--control-hz", 30], f"--control-hz: expected a checkpoint, got the bundle {old}"),
        ([old, new, "--rename", "front=camera1"], "--rename: expected a checkpoint"),
        ([old, new, "--name", "egg"], "--name: expected a checkpoint"),
        ([old, new, "--no-merge"], "--no-merge: expected a checkpoint"),
    ):
        assert main(["convert", *map(str, arguments)]) == 1
        assert said in " ".join(capsys.readouterr().err.split())
    assert mine.read_bytes() == b"mine"
    assert not new.exists()
    with pytest.raises(ConvertError, match="--name: expected a checkpoint"):
        convert(old, new, name="egg")
    assert version(old) == 2
