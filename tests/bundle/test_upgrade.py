"""Bundles of formats 1 and 2 load as they did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.bundle.schema import KEY_VERSION, Manifest, Processing, from_builtins, to_json
from sinew.bundle.upgrade import upgraded
from sinew.core import BundleError
from sinew.policy import Policy
from sinew.solvers import FLOW
from sinew.steps.image.letterbox import Letterbox
from tests.golden import Golden

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
    old |= {KEY_VERSION: 1, "sinew.config": json.dumps(config), "sinew.spec": json.dumps(spec)}
    bundle.manifest = Manifest.from_metadata(old)
    return bundle


@pytest.mark.parametrize("case", ["smolvla-2cam", "pi0-2cam", "pi05-2cam"])
def test_a_bundle_of_format_1_computes_the_same_bits(case, golden, smolvla_bundle, pi_bundle, tmp_path):
    path = (pi_bundle if case.startswith("pi") else smolvla_bundle)(case)
    observation = Golden(golden / case).observation()
    now, then = Policy(Bundle(path)), Policy(as_format_1(path, tmp_path / "old.gguf"))
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

RECORDS = json.loads(
    Path(__file__).with_name("processing-2.json").read_text()
)  # as every converter wrote them
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
    ("changes", "said"),
    [
        ({"resize": "stretch"}, "unknown field 'image.resize'"),
        ({"sharpen": 1}, "unknown field 'image.sharpen'"),
        ({"steps": [{"kind": "sharpen"}]}, "kind: expected one of .*, got 'sharpen' - at `.*steps"),
        ({"steps": [{"kind": "jpeg", "speed": 1}]}, "unknown field 'image.steps.speed'"),
        (
            {"steps": [{"kind": "jpeg", "quality": "high"}]},
            "jpeg: Expected `int`, got `str` - at `..quality`",
        ),
        ({"steps": [7]}, "expected a step, an object with its kind, got int"),
        ({"steps": 7}, "Expected `array`, got `int`"),
    ],
)
def test_what_format_2_did_not_know_is_refused_by_name(changes, said):
    record = RECORDS["smolvla-2cam"]
    with pytest.raises(BundleError, match=said):
        read_2({**record, "image": {**record["image"], **changes}})
