"""CogACT's runs: what their files say, what is given beside them, and what is refused by one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sinew.cli import main
from sinew.convert import convert, read
from sinew.convert.options import ConvertOptions
from sinew.core import ConvertError
from sinew.processing.normalize import Normalizer
from tests.cases import cases

CONFIG, STATISTICS = "config.json", "dataset_statistics.json"
WEIGHTS = "checkpoints/latest-checkpoint.pt"
Change = Callable[[Path], Any]


@pytest.fixture
def run(golden: Path, tmp_path: Path) -> Path:
    """A copy of the case's run, whose files are links."""
    source = golden / "cogact" / "checkpoint"
    return Path(shutil.copytree(source, tmp_path / "run", copy_function=lambda a, b: Path(b).symlink_to(a)))


def given(run: Path, **other: Any) -> dict[str, Any]:
    return cases()["cogact"].options(run.parent) | other


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Return what changes a JSON file of a run."""

    def edited(run: Path) -> None:
        record = json.loads((run / name).read_text())
        change(record)
        (run / name).unlink()
        (run / name).write_text(json.dumps(record))

    return edited


def weights(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Return what changes the sections of a run's file of weights."""

    def edited(run: Path) -> None:
        record = torch.load(run / WEIGHTS, weights_only=True, mmap=True)
        language = record["model"]["llm_backbone"]
        language.pop("llm.lm_head.weight")
        language["llm.model.embed_tokens.weight"] = torch.zeros(
            128, 64
        )  # eight megabytes of which nobody asks here
        change(record["model"])
        (run / WEIGHTS).unlink()
        torch.save(record, run / WEIGHTS)

    return edited


def second(run: Path) -> None:
    (run / "checkpoints" / "step-000020-epoch-02-loss=0.0100.pt").symlink_to(run / WEIGHTS)


def narrow(sections: dict[str, Any]) -> None:
    head = sections["action_model"]
    head["net.x_embedder.linear.weight"] = head["net.x_embedder.linear.weight"][:, :6].contiguous()


def longer(sections: dict[str, Any]) -> None:
    head = sections["action_model"]
    head["net.positional_embedding"] = head["net.positional_embedding"].repeat(2, 1)


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (second, {}, r"expected one file checkpoints/\*.pt, got 2; pass one of them: .*step-000020"),
        (lambda run: (run / WEIGHTS).unlink(), {}, r"expected one file checkpoints/\*.pt, got 0"),
        (
            edit(CONFIG, lambda r: r["vla"].update(base_vlm="siglip-224px+7b")),
            {},
            r"vla.base_vlm: expected prism-dinosiglip-224px\+7b or .*, got 'siglip-224px\+7b'",
        ),
        (
            edit(CONFIG, lambda r: r.update(past_action_window_size=2)),
            {},
            "past_action_window_size: expected 0, got 2",
        ),
        (
            edit(CONFIG, lambda r: r.update(future_action_window_size=7)),
            {},
            "future_action_window_size: expected 15, got 7",
        ),
        (
            edit(CONFIG, lambda r: r.update(action_model_type="DiT-XL")),
            {},
            "action_model_type: expected DiT-S, DiT-B, DiT-L, got 'DiT-XL'",
        ),
        (edit(CONFIG, lambda r: r.pop("action_model_type")), {}, "action_model_type: expected .*, got None"),
        (
            edit(CONFIG, lambda r: r.update(action_model_type=["DiT-S"])),
            {},
            r"action_model_type: .*, got \['DiT-S'\]",
        ),
        (lambda run: None, {"tokenizer": None}, "pass Llama 2's .* with --tokenizer FILE_OR_DIR"),
        (
            lambda run: None,
            {"stats_key": "aloha"},
            "no statistics 'aloha'; pass --stats-key with one of: bridge",
        ),
        (lambda run: None, {"stats_key": ""}, "statistics of 2 data sets; pass --stats-key with one of"),
        (lambda run: None, {"cameras": ("a", "b")}, "--cameras: expected one name, .*, got 2"),
        (
            lambda run: None,
            {"settings": {"solver_steps": "30"}},
            "--set solver_steps: expected 25 or 34, got 30",
        ),
        (lambda run: None, {"settings": {"guidance_scale": "0.5"}}, "--set guidance_scale: expected .* 1 to"),
        (lambda run: None, {"settings": {"center_crop": "true"}}, "center_crop"),
        (
            weights(lambda s: s.pop("action_model")),
            {},
            "got no action_model. These are weights of OpenVLA or of a language model",
        ),
        (
            weights(lambda s: s.pop("vision_backbone")),
            {},
            "expected the modules .*, got no vision_backbone$",
        ),
        (weights(narrow), {}, "action_dim: expected 6, got 7"),
        (weights(longer), {}, "future_action_window_size: expected 32, got 15"),
        (
            weights(lambda s: s["action_model"].pop("net.blocks.1.attn.qkv.bias")),
            {},
            r"does not fit its config: .*layers\.1\.attn",
        ),
    ],
)
def test_what_is_refused_and_why(run: Path, change: Change, options: dict[str, Any], said: str) -> None:
    change(run)
    with pytest.raises(ConvertError, match=said) as caught:
        convert(run, run.parent / "out.gguf", **given(run, **options))
    assert "\n" not in str(caught.value)
    assert not (run.parent / "out.gguf").exists()


def test_what_is_refused_before_it_is_too_small_a_robot(run: Path) -> None:
    """An arm without a gripper: upstream's code takes number 6 for one, whatever it is."""
    edit(CONFIG, lambda record: record.update(action_dim=6))(run)
    weights(narrow)(run)
    with pytest.raises(ConvertError, match="actions: expected at least 7 values, .*, got 6"):
        convert(run, run.parent / "out.gguf", **given(run))


def test_the_lines_that_a_user_types(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of the run, from which an observation is answered; and what is said where something is missing."""
    from PIL import Image

    frame, out = tmp_path / "frame.png", tmp_path / "cogact.gguf"
    Image.fromarray(np.full((48, 64, 3), 90, np.uint8)).save(frame)
    options, words = given(run), []
    for verb, flag, field in (("pass", "--stats-key", "stats_key"), ("with", "--tokenizer", "tokenizer")):
        assert main(["convert", str(run), str(out), *words]) == 1
        assert f"{verb} {flag}" in " ".join(capsys.readouterr().err.split())
        words += [flag, str(options[field])]
    assert main(["convert", str(run / WEIGHTS), str(out), *words, "--set", "solver_steps=2"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "guidance scale 1.5, the default of CogACT's servers; change it with --set guidance_scale=SCALE"
        in told
    )
    ask = [
        "infer",
        str(out),
        "--image",
        str(frame),
        "--prompt",
        "Open it",
        "--seed",
        "1",
        "--engine",
        "eager",
    ]
    assert main([*ask, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    actions = np.array(answer["actions"])
    assert actions.shape == (16, 7)
    assert set(actions[:, 6]) <= {0.0, 1.0}
    assert len(answer["timing"]["step_ms"]) == 2
    for more, said in (
        (["--solver-steps", "30"], "solver_steps: expected 25 or 34, got 30"),
        (["--state", "1,2"], r"state"),
        (["--guidance-scale", "3"], "guidance_scale: expected none for this policy"),
    ):
        assert main([*ask, *more]) == 1
        assert said in " ".join(capsys.readouterr().err.split())


def test_names_of_a_head_whose_config_is_silent_go_by_its_width(run: Path) -> None:
    """Configs of other versions of the training name no size of the head."""
    edit(CONFIG, lambda record: record.pop("action_model_type"))(run)

    def wider(sections: dict[str, Any]) -> None:
        head = sections["action_model"]
        head["net.x_embedder.linear.weight"] = torch.zeros(768, 7)

    weights(wider)(run)
    assert read(run, ConvertOptions(**given(run))).config.head.num_heads == 12


def test_the_moving_average_is_left_aside_and_said(run: Path) -> None:
    weights(lambda sections: sections.update(ema_diffusion=dict(sections["action_model"])))(run)
    found = read(run, ConvertOptions(**given(run, settings={"guidance_scale": "3"})))
    assert {name.partition(".")[0] for name in found.dropped} >= {"ema_diffusion", "action_model"}
    assert found.config.guidance_scale == 3.0
    assert any("ema_diffusion" in note for note in found.notes)
    assert any("guidance scale 3, as set by the user" in note for note in found.notes)


@pytest.mark.parametrize("masked", [False, True])
def test_actions_are_clipped_snapped_and_then_scaled(run: Path, masked: bool) -> None:
    """Upstream's order, in its words: clip, then 0 or 1 of number 6 at one half, then the quantiles where the mask has
    them. masked: the gripper's number has quantiles, too."""

    def change(record: dict[str, Any]) -> None:
        action = record["bridge_orig"]["action"]
        action["q01"][6], action["q99"][6] = 0.25, 2.25
        action["mask"][6] = masked
        action["mask"][2] = False

    edit(STATISTICS, change)(run)
    found, half = read(run, ConvertOptions(**given(run))), np.float32(0.5)
    x = np.linspace(-1.5, 1.5, 16 * 7, dtype=np.float32).reshape(16, 7)
    x[:4, 6] = half, np.nextafter(half, np.float32(0)), 2.0, -2.0
    stats = json.loads((run / STATISTICS).read_text())["bridge_orig"]["action"]
    low, high, mask = (np.array(stats[name]) for name in ("q01", "q99", "mask"))
    inside = np.clip(x.astype(np.float64), -1, 1)
    inside[:, 6] = inside[:, 6] >= 0.5
    expected = np.where(mask, (inside + 1) / 2 * (high - low) + low, inside)
    made = Normalizer(found.processing.action, 7, "action").unnormalize(x)
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)
    assert found.spec.action.units == (() if masked else ("",) * 6 + ("opening",))
