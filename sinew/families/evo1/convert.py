"""Convert Evo-1 checkpoints in LeRobot's layout, and in that of the original repository (MINT-SJTU/Evo-1).

A folder of the original repository contains ``config.json``, ``norm_stats.json`` and DeepSpeed's
``mp_rank_00_model_states.pt``. In both layouts, the widths and the tokenizer of InternVL3 are not in the checkpoint.
They come from the hub repository that the configuration names, or from the folder that the user passes with ``--vlm``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.schema import Processing, PromptRecipe
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import config_type
from sinew.convert.options import IGNORE_SETTING, SOLVER_STEPS_SETTING, ConvertOptions, Setting
from sinew.convert.read.files import named
from sinew.convert.read.record import JsonRecord
from sinew.convert.tokenizer_files import TokenizerFiles, find_model_dir, find_tokenizer
from sinew.convert.widths import decoder, rope_theta, tower
from sinew.core import ConvertError, PolicySpec
from sinew.families.evo1 import lerobot
from sinew.families.evo1 import original as original_layout
from sinew.families.evo1.model import SOLVER, Evo1Config
from sinew.families.evo1.parts import IMAGE_MEAN, IMAGE_STD, Parts
from sinew.families.evo1.weights import rename
from sinew.steps.image.base import ImageRecipe
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.strip import Strip
from sinew.steps.prompt.template import sentence

NAMES = ("evo1",)
OPTIONS = ("vlm", "tokenizer", "stats", "stats_key", "dataset", "cameras", "embodiment")
SETTINGS = {
    "ignore": IGNORE_SETTING,
    "solver_steps": SOLVER_STEPS_SETTING,
    "masked_rows": Setting(
        str,
        "attention of masked tokens: attend, or zero as in flash attention without padding",
        values=("attend", "zero"),
    ),
    "state_dim": Setting(
        int,
        "size of the state, for robots that pad the state with zeros before they send it",
        1,
        original_layout.VECTOR,
    ),
}
VLM_FILES = "*.json merges.txt"
PLACEHOLDER = "<IMG_CONTEXT>"


def recognises(path: Path) -> bool:
    """Return True for an Evo-1 directory in either layout."""
    return config_type(path) in NAMES or original_layout.is_original(path)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported Evo-1.
    """
    original = original_layout.is_original(path)
    unread = {"cameras": "--cameras"} if not original else {"dataset": "--dataset"}
    if flags := [flag for name, flag in unread.items() if name in options.non_defaults]:
        raise ConvertError(
            f"{flags[0]}: not supported for {path}, which is in the {'original' if original else 'LeRobot'} layout."
            " Omit the option"
        )
    return assemble((original_layout if original else lerobot).read(path, options), options, path)


def assemble(parts: Parts, options: ConvertOptions, path: Path) -> Conversion:
    """Collect everything that a bundle needs from the parts that the reader of a layout returns.

    Args:
        parts: The result of the reader of the checkpoint's layout.
        options: The user's options.
        path: The checkpoint. The InternVL folder may be next to it.
    """
    vlm_dir = find_model_dir(parts.vlm, options.vlm, path, "--vlm", VLM_FILES)
    vlm = JsonRecord(vlm_dir / "config.json")
    tokenizer = find_tokenizer(options, vlm_dir)
    config = _model_config(parts, vlm, tokenizer, options)
    return Conversion(
        format=parts.format,
        config=config,
        spec=_spec(parts, options),
        processing=_processing(parts, config, tokenizer),
        tokenizer=tokenizer.text,
        tensors=rename(parts.tensors, config.language.num_layers, parts.category, config.unshuffle),
        sources=[*parts.files, vlm.path, tokenizer.path],
        notes=parts.notes,
    )


def _model_config(
    parts: Parts, vlm: JsonRecord, tokenizer: TokenizerFiles, options: ConvertOptions
) -> Evo1Config:
    text = vlm.part("text_config" if "text_config" in vlm.content else "llm_config")
    vision = vlm.part("vision_config")
    text.expect(model_type="qwen2", hidden_act="silu", use_sliding_window=False)
    vision.expect(hidden_act="gelu", norm_type="layer_norm", use_mean_pooling=True, num_channels=3)
    vision.expect(use_qk_norm=False, qk_normalization=False, attention_bias=True, qkv_bias=True)
    vlm.expect(ps_version="v2", select_layer=-1, vision_feature_layer=-1)
    if _side(vision["image_size"]) != parts.side:
        raise ConvertError(
            f"{vlm.path}: vision_config.image_size: expected {parts.side}, the side of the checkpoint's images, got"
            f" {vision['image_size']}. Pass the checkpoint's model with --vlm"
        )
    layers = text["num_hidden_layers"]
    blank = (np.float32(0) - np.asarray(IMAGE_MEAN, np.float32)) / np.asarray(IMAGE_STD, np.float32)
    head: dict[str, Any] = dict(parts.sizes)
    if parts.every_row:
        head |= {"rows": parts.max_tokens, "blank": tuple(map(float, blank)), "pad_token": _pad(tokenizer)}
        head["masked_attend"] = options.setting("masked_rows", "attend") == "attend"
    elif "masked_rows" in options.settings:
        raise ConvertError(
            "--set masked_rows: omit this option for LeRobot's layout, whose head reads no masked tokens"
        )
    with named(f"{vlm.path} and the checkpoint's config.json"):
        return Evo1Config(
            vision=tower(
                vision,
                image_size=parts.side,
                patch_size=_side(vision["patch_size"]),
                norm_eps=vision.get("layer_norm_eps", 1e-6),
                activation="gelu",
                prefix_tokens=1,
                layer_scale=True,
                final_norm=False,
            ),
            language=decoder(
                text,
                num_layers=min(parts.layers or layers, layers),
                rope_theta=rope_theta(text),
                qkv_bias=True,
            ),
            vocab_size=text["vocab_size"],
            action_dim=parts.action.dim,
            views=parts.views,
            image_token=tokenizer.token_id(PLACEHOLDER),
            unshuffle=round(1 / vlm["downsample_ratio"]),
            **head,
        )


def _side(size: Any) -> int:
    """Return the side of a square image in pixels. ``size`` is a number, or a list of two equal numbers."""
    sides = set(size) if isinstance(size, list) else {size}
    if len(sides) != 1 or not all(type(side) is int for side in sides):
        raise ConvertError(f"vision_config: expected a square, got {size!r}")
    return int(sides.pop())


def _pad(tokenizer: TokenizerFiles) -> int:
    if tokenizer.pad_token_id is None:
        raise ConvertError(
            f"{tokenizer.path}: expected a padding token, because the head reads padding. Pass the model's own"
            " tokenizer with --tokenizer"
        )
    return tokenizer.pad_token_id


def _spec(parts: Parts, options: ConvertOptions) -> PolicySpec:
    return PolicySpec(
        architecture="evo1",
        name=parts.name,
        cameras=parts.cameras,
        state=parts.state,
        action=parts.action,
        chunk_size=parts.sizes["chunk_size"],
        noise_dim=parts.sizes["max_action_dim"],
        solver=SOLVER,
        solver_steps=options.setting("solver_steps", parts.solver_steps),
        max_prompt_tokens=parts.max_tokens,
        control_hz=parts.control_hz,
        embodiment=parts.embodiment,
        n_action_steps=parts.n_action_steps,
        real_time_chunking=parts.real_time_chunking,
    )


def _processing(parts: Parts, config: Evo1Config, tokenizer: TokenizerFiles) -> Processing:
    side = parts.side // (config.vision.patch_size * config.unshuffle)
    views = "".join(f"Image-{view + 1}: <img>{{image}}</img>\n" for view in range(parts.views))
    return Processing(
        image=ImageRecipe(parts.side, parts.side, steps=(parts.resize,), mean=IMAGE_MEAN, std=IMAGE_STD),
        prompt=PromptRecipe(
            max_tokens=parts.max_tokens,
            vocab_size=config.vocab_size,
            pad_token_id=tokenizer.pad_token_id or 0,
            steps=(
                Strip(),
                *sentence(f"{views}{{prompt}}", image=Image(PLACEHOLDER, side**2, config.image_token)),
            ),
            padding="max_length" if parts.every_row else "longest",
        ),
        state=parts.state_normalization,
        action=parts.action_normalization,
        padded_state_dim=config.max_state_dim,
        padded_action_dim=config.max_action_dim,
        empty_cameras=parts.views - len(parts.cameras),
        optional_cameras=parts.optional_cameras,
        pad_missing_cameras=True,
        action_steps=parts.action_steps,
    )
