"""A policy without language: any instruction, and none, is one token, and its bundle is whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import sinew
from sinew.bundle import Bundle, write_bundle
from sinew.convert import silent
from sinew.lowbit.sources import lowbit_sources
from sinew.processing.prompt import Prompter


@pytest.mark.parametrize("said", ["go", "pick up the red cube", "x" * 5000, "{prompt}{state}"])
def test_whatever_is_said_is_one_token(said: str) -> None:
    assert Prompter(silent.TOKENIZER, silent.PROMPT).encode(said, np.zeros(3, np.float32)).tolist() == [0]


def test_a_bundle_without_language_runs_with_and_without_a_prompt(smolvla_bundle, tmp_path) -> None:
    bundle = Bundle(smolvla_bundle())
    manifest = bundle.manifest
    silenced = replace(
        manifest,
        tokenizer=silent.TOKENIZER,
        processing=replace(manifest.processing, prompt=silent.PROMPT),
        spec=replace(manifest.spec, **silent.SPEC),
    )
    write_bundle(tmp_path / "silent.gguf", lambda: silenced, lowbit_sources(bundle, {}))
    policy = sinew.load(tmp_path / "silent.gguf", engine="eager")
    images = {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in policy.spec.cameras}
    observation = {"images": images, "state": np.zeros(policy.spec.state.dim, np.float32), "seed": 0}
    chunks = [
        policy.infer({**observation, **said}).actions for said in ({}, {"prompt": "stop"}, {"prompt": ""})
    ]
    assert all(np.array_equal(chunk, chunks[0]) for chunk in chunks)
