"""Layers that are left out of a policy: the shorter one is the longer one with these layers doing nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert.skip import candidates, fits, parse_layers, stacks_of, text_of, without_layers
from sinew.core import SinewError
from sinew.policy import Policy, load

ASSETS = Path(__file__).parents[2] / "sinew" / "assets"
BLOCKS, PEN = ASSETS / "blocks.gguf", ASSETS / "pen.gguf"


def test_a_layer_that_adds_nothing_can_be_left_out(tmp_path: Path) -> None:
    """A residual layer whose last products are zero is the identity, so both policies compute the same actions."""
    short = tmp_path / "short.gguf"
    without_layers(Bundle(BLOCKS), {"vision": (1,)}, short)
    policy = Policy(Bundle(BLOCKS), "cpu", "fp32", "eager")
    with torch.no_grad():
        for name, weight in policy.engine.model.named_parameters():
            if name.startswith(("vision.layers.1.attn.o_proj", "vision.layers.1.mlp.fc2")):
                weight.zero_()
    observation = policy.dummy_observation()
    expected = policy.infer({**vars_of(observation), "seed": 1}).actions
    actual = Policy(Bundle(short), "cpu", "fp32", "eager").infer({**vars_of(observation), "seed": 1}).actions
    assert actual == pytest.approx(expected, abs=1e-5)


def vars_of(observation: object) -> dict[str, object]:
    return {name: getattr(observation, name) for name in ("images", "state", "prompt")}


def test_the_shorter_bundle_states_what_it_lacks(tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    without_layers(Bundle(BLOCKS), parse_layers("vision=0+2,language=2+3,expert=2+3"), short)
    bundle = Bundle(short)
    assert bundle.verify() == []
    assert stacks_of(bundle) == {"vision": 1, "language": 2, "expert": 2}
    assert (
        "layers left out by sinew skip: vision=0+2,language=2+3,expert=2+3"
        in bundle.manifest.provenance.notes
    )
    assert load(short).infer(load(BLOCKS).dummy_observation()).actions.shape == (32, 4)


def test_candidates_are_what_fits() -> None:
    """In blocks, layers of the expert alternate in their form, and read the language layer of the same index."""
    names = [text_of(each) for each in candidates(Bundle(BLOCKS))]
    assert names[:3] == ["vision=0", "vision=1", "vision=2"]
    assert "language=0+1,expert=0+1" in names
    assert "language=0,expert=0" not in names
    assert all(fits(Bundle(BLOCKS), parse_layers(name)) for name in names)
    assert not fits(Bundle(BLOCKS), {"language": (0,)})


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("vision", "expected STACK=INDEX"),
        ("vision=x", "expected STACK=INDEX"),
        ("vision=1,vision=2", "expected STACK=INDEX"),
        ("ears=1", "expected a stack of"),
        ("vision=3", "expected fewer than all of the layers 0 to 2, got 3"),
        ("vision=0+1+2", "expected fewer than all"),
        ("language=0,expert=0", "do not fit together"),
        ("language=3", "language"),
    ],
)
def test_layers_that_cannot_be_left_out_are_named(tmp_path: Path, layers: str, says: str) -> None:
    with pytest.raises(SinewError, match=says):
        without_layers(Bundle(BLOCKS), parse_layers(layers), tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_ranking_needs_the_space_of_one_short_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ranking of a large policy writes dozens of copies of its weights, one after the other."""
    written: list[int] = []

    def counted(bundle: Bundle, skipped: Any, out: Path) -> None:
        without_layers(bundle, skipped, out)
        written.append(len(list(out.parent.glob("*.gguf"))))

    monkeypatch.setattr("sinew.convert.skip.without_layers", counted)
    assert main(["skip", str(PEN), "--observations", "1"]) == 0
    assert len(written) > 1
    assert set(written) == {1}


def test_a_command_ranks_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["skip", str(PEN), "--observations", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["change"] for row in rows] == sorted(row["change"] for row in rows)
    assert rows[0]["layers"] == "vision=1"
    assert rows[0]["nbytes"] < Bundle(PEN).weights_nbytes
    out = str(tmp_path / "short.gguf")
    assert main(["skip", str(PEN), "--layers", "vision=1", "--out", out, "--observations", "3"]) == 0
    assert "measure the success with" in capsys.readouterr().out
    assert main(["skip", str(PEN), "--layers", "vision=1", "--out", out]) == 1
    assert "the file already exists" in capsys.readouterr().err
    assert main(["skip", str(PEN), "--layers", "vision=1"]) == 1
    assert "expected both or neither" in capsys.readouterr().err
