"""Bundles of format 1 load as they did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.bundle.schema import KEY_VERSION, Manifest
from sinew.bundle.upgrade import upgraded
from sinew.core import BundleError
from sinew.policy import Policy
from sinew.solvers import FLOW
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
    with pytest.raises(BundleError, match=r"bundle format 99 is not supported \(this version reads 1 to 2\)"):
        Manifest.from_metadata(metadata | {KEY_VERSION: 99})
    assert upgraded({"language": {"family": "mamba"}}, 1) == {"language": {"family": "mamba"}}
    assert upgraded({"language": {"family": "gemma"}}, 2) == {"language": {"family": "gemma"}}
