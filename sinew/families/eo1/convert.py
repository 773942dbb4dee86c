"""Convert LeRobot EO-1 checkpoints to bundles.

The checkpoint's configuration also contains the whole configuration of the backbone. The tokenizer and the image
processor are in the folder or repository that the configuration names, or in the folder of ``--vlm``. The converter
adds seven tokens to the tokenizer, and the token table has spare rows for these tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sinew.bundle.schema import ImageRecipe, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.steps import NORMALIZER, PRE, ProcessorStep
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.qwen import (
    position_sections,
    qwen25_language,
    qwen25_rules,
    qwen25_vision,
    qwen_pictures,
    sizes_of_views,
)
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply, constant, renames, split
from sinew.convert.tokenizer_files import TokenizerFiles, find_model_dir, find_tokenizer
from sinew.core import MAX_SIZE, ConvertError
from sinew.families.eo1.model import EO1Config
from sinew.layers.qwen25_vit import Qwen25ViTConfig
from sinew.models.qwen25_vl import image_places
from sinew.steps.image.grid import Grid
from sinew.steps.prompt.base import PromptStep
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.marker import Marker
from sinew.steps.prompt.text import Text

NAMES = ("eo1",)
recognises = of_type(*NAMES)
OPTIONS = ("vlm", "tokenizer", "stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
FILES = "config.json tokenizer*.json *preprocessor_config.json vocab.json merges.txt"
TEMPLATE, PROCESSOR = "eo1_conversation_template_processor", "eo1_qwen_processor"
TEXT_TOKENS = 200  # longest instruction
# LeRobot adds these tokens to the tokenizer in this order.
ADDED_TOKENS = (
    *("<|action_start|>", "<|action_pad|>", "<|action_end|>"),
    *("<|state_start|>", "<|state_pad|>", "<|state_end|>", "<|vla|>"),
)
STATE = "<|state_pad|>"
BEFORE = "<|im_start|>system\nYou are a helpful physical assistant.<|im_end|>\n<|im_start|>user\n"
VIEW = "<|vision_start|>", "<|vision_end|>"
ROBOT = f"<|state_start|>{STATE}<|state_end|>"
BEHIND = "<|vla|><|im_end|>\n<|im_start|>assistant\n<|action_start|>"
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_eo1.py.
    defaults={
        "vlm_base": "Qwen/Qwen2.5-VL-3B-Instruct",
        "image_min_pixels": 64 * 28 * 28,
        "image_max_pixels": 128 * 28 * 28,
        "use_fast_processor": False,
        "chunk_size": 8,
        "n_action_steps": 8,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "num_denoise_steps": 10,
        "num_action_layers": 2,
        "min_period": 4e-3,
        "max_period": 4.0,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    },
    required="vlm_config",
    fixed={"n_obs_steps": 1, "action_act": "linear"},
    unread="time_sampling_beta_alpha time_sampling_beta_beta time_sampling_scale time_sampling_offset dtype"
    " supervise_padding_action_dims supervise_padding_actions force_fp32_autocast attn_implementation",
    steps={
        "normalizer_processor": NORMALIZER,
        TEMPLATE: ProcessorStep("input_features chunk_size"),
        PROCESSOR: ProcessorStep("processor_name image_min_pixels image_max_pixels", "use_fast_processor"),
    },
)
BACKBONE = r"model\.vlm_backbone\.model\."
TABLE, HEAD = (
    "model.vlm_backbone.model.language_model.embed_tokens.weight",
    "model.vlm_backbone.lm_head.weight",
)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported EO-1.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    home = find_model_dir(str(checkpoint["vlm_base"]), options.vlm, path, "--vlm", FILES)
    vlm = JsonRecord(checkpoint.file, checkpoint.config).part("vlm_config")
    tokenizer = find_tokenizer(options, home, whose=f"{checkpoint['vlm_base']}'s").with_tokens(ADDED_TOKENS)
    preprocessor = JsonRecord(home / "preprocessor_config.json")
    vision = qwen25_vision(vlm.part("vision_config"))
    image = image_recipe(checkpoint, preprocessor, vision)
    config = model_config(checkpoint, vlm, vision, image, tokenizer)
    prompt = prompt_recipe(config, tokenizer)
    return Conversion(
        format="lerobot-eo1",
        config=config,
        spec=checkpoint.policy_spec(
            "eo1",
            config.chunk_size,
            noise_dim=config.max_action_dim,
            solver_steps=checkpoint.size("num_denoise_steps"),
            max_prompt_tokens=prompt.max_tokens,
        ),
        processing=checkpoint.processing(image, prompt, config, all_cameras=True),
        tokenizer=tokenizer.text,
        tensors=tensors(checkpoint.tensors, config),
        dead=(HEAD,) if TABLE in checkpoint.tensors else (),
        sources=[*checkpoint.files, preprocessor.path, tokenizer.path],
        notes=tuple(checkpoint.notes),
    )


def image_recipe(
    checkpoint: LeRobotCheckpoint, preprocessor: JsonRecord, vision: Qwen25ViTConfig
) -> ImageRecipe:
    """Build the steps from a frame to pixels. Frames of different sizes keep different sizes."""
    checkpoint.refuse_image_scales()
    preprocessor.expect(
        do_resize=True, do_normalize=True, do_rescale=True, resample=3, patch_size=vision.patch_size,
        merge_size=vision.merge,
    )  # fmt: skip
    step = checkpoint.pipelines.config(PRE, PROCESSOR)
    least, most = (
        checkpoint.size(key, step.get(key, checkpoint[key]), high=MAX_SIZE**2)
        for key in ("image_min_pixels", "image_max_pixels")
    )
    fast = step.get("use_fast_processor", checkpoint["use_fast_processor"])
    with checkpoint.named():
        # The bicubic resizes of torch ("bicubic") and of Pillow ("pil_bicubic") round differently in one of three
        # hundred bytes.
        grid = Grid(
            unit=vision.unit, min_pixels=least, max_pixels=most, method="bicubic" if fast else "pil_bicubic"
        )
    return qwen_pictures((grid,), preprocessor, checkpoint.cameras)


def model_config(
    checkpoint: LeRobotCheckpoint,
    vlm: JsonRecord,
    vision: Qwen25ViTConfig,
    image: ImageRecipe,
    tokenizer: TokenizerFiles,
) -> EO1Config:
    text = vlm.part("text_config") if "text_config" in vlm.content else vlm
    with checkpoint.named():
        config = EO1Config(
            vision=vision,
            language=qwen25_language(text),
            vocab_size=text["vocab_size"],
            chunk_size=checkpoint.size("chunk_size"),
            max_state_dim=checkpoint.size("max_state_dim", low=checkpoint.state.dim),
            max_action_dim=checkpoint.size("max_action_dim", low=checkpoint.action.dim),
            min_period=checkpoint.number("min_period"),
            max_period=checkpoint.number("max_period"),
            image_token=vlm["image_token_id"],
            state_token=tokenizer.token_id(STATE),
            position_sections=position_sections(text),
            frames=sizes_of_views(image, len(checkpoint.cameras)),
            out_layers=checkpoint.size("num_action_layers"),
        )
    if (last := max(tokenizer.token_id(token) for token in ADDED_TOKENS)) >= config.vocab_size:
        raise ConvertError(
            f"{tokenizer.path}: expected ids of EO-1's tokens below {config.vocab_size}, the size of the token table,"
            f" got {last}"
        )
    return config


def prompt_recipe(config: EO1Config, tokenizer: TokenizerFiles) -> PromptRecipe:
    """Build the prompt up to the first action token: the views, the state token, and the unchanged instruction."""
    placeholder = tokenizer.token_text(config.image_token)
    steps: list[PromptStep] = [Text(BEFORE)]
    for rows, cols in config.grids:
        steps += [Text(VIEW[0]), Image(placeholder, rows * cols, config.image_token), Text(VIEW[1])]
    steps += [Text(ROBOT), Instruction(), Text(BEHIND), Marker(config.state_token, 1)]
    around = BEFORE + (VIEW[0] + VIEW[1]) * len(config.grids) + ROBOT + BEHIND
    return PromptRecipe(
        max_tokens=len(tokenizer.encode(around)) + config.image_tokens + TEXT_TOKENS,
        vocab_size=config.vocab_size,
        pad_token_id=tokenizer.pad_token_id or 0,
        steps=tuple(steps),
    )


def tensors(sources: Mapping[str, TensorSource], config: EO1Config) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names."""
    out, name = dict(sources), "model.action_time_mlp_in.weight"
    if name not in out:
        raise ConvertError(f"the tensor {name} is missing in the checkpoint. Use a complete checkpoint")
    width = config.language.hidden_size
    out["action_mix.weight"], out["time_mix.weight"] = split(out.pop(name), (width, width), axis=1)
    places = np.array(image_places(config.grids), np.float32)
    rules = (
        # The token table and the output layer are the same tensor. LeRobot stores it only under the name of the output
        # layer.
        *(() if TABLE in out else (Rule(HEAD.replace(".", r"\."), ("language.embed_tokens.weight",)),)),
        *qwen25_rules(BACKBONE + r"language_model\.", BACKBONE + r"visual\."),
        *renames(
            r"model\.",
            "",
            "state_proj action_in_proj=action_in action_time_mlp_in=action_mix action_time_mlp_out=action_time_out",
        ),
        *(
            Rule(rf"model\.action_out_proj\.{2 * index}\.(.+)", (rf"action_out.{index}.\1",))
            for index in range(config.out_layers)
        ),
    )
    return apply(out, rules) | {"image_places": constant("image_places", places)}
