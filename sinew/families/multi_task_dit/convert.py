"""Convert LeRobot multi-task DiT checkpoints to bundles.

The checkpoint contains all weights. CLIP's configuration and tokenizer come from the folder or the hub repository that
the checkpoint's configuration names, or from the folder that the user passes with ``--vlm``. In each block, a linear
layer computes scales, shifts and gates ("modulations"). The converter joins these layers of all blocks into one layer
for the solver's time and one layer for the condition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sinew.bundle.schema import ImageRecipe, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.frames import whole_frames
from sinew.convert.lerobot.noise_levels import NOISE_LEVELS, noise_levels
from sinew.convert.lerobot.steps import NORMALIZER, TOKENIZER
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply, computed, join_conditioned, pick, renames, rows
from sinew.convert.tokenizer_files import TokenizerFiles, find_model_dir, find_tokenizer
from sinew.core import MAX_HISTORY, ConvertError
from sinew.families.multi_task_dit.model import MultiTaskDiTConfig
from sinew.families.multi_task_dit.vision import ClipVisionConfig
from sinew.layers.clip_text import ClipTextConfig
from sinew.layers.vit import BlockConfig
from sinew.models.solvers import Solver

NAMES = ("multi_task_dit",)
recognises = of_type(*NAMES)
OPTIONS = ("vlm", "tokenizer", "stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
FILES = "config.json tokenizer*.json vocab.json merges.txt"
# The value of "eos_token_id" in OpenAI's old configurations. It is not the id of a token: with this value, CLIP reads
# the text feature at the token with the highest id.
OLD_END = 2
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_multi_task_dit.py.
    defaults={
        **NOISE_LEVELS,
        "objective": "diffusion",
        "num_integration_steps": 100,
        "integration_method": "euler",
        "hidden_dim": 512,
        "num_layers": 6,
        "num_heads": 8,
        "use_positional_encoding": False,
        "timestep_embed_dim": 256,
        "use_rope": True,
        "rope_base": 10000.0,
        "vision_encoder_name": "openai/clip-vit-base-patch16",
        "use_separate_rgb_encoder_per_camera": False,
        "image_resize_shape": None,
        "image_crop_shape": [224, 224],
        "text_encoder_name": "openai/clip-vit-base-patch16",
        "tokenizer_max_length": 77,
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
    },
    required="n_obs_steps horizon n_action_steps",
    # CLIP's tokenizer pads with the end token, at which the text feature is read. With padding on the left, this would
    # be the first token, so every prompt would have the same feature.
    fixed={"tokenizer_padding_side": "right"},
    unread="sigma_min timestep_sampling_strategy timestep_sampling_s timestep_sampling_alpha timestep_sampling_beta"
    " dropout vision_encoder_lr_multiplier image_crop_is_random tokenizer_padding tokenizer_truncation scheduler_name"
    " do_mask_loss_for_padding drop_n_last_frames",
    steps={"tokenizer_processor": replace(TOKENIZER, ordered=False), "normalizer_processor": NORMALIZER},
)
HEAD = "noise_predictor."
TEXT = r"observation_encoder\.text_encoder\."
CLIP_LAYER = "layer_norm1=norm1 layer_norm2=norm2 mlp self_attn.out_proj=attn.o_proj self_attn=attn"
RULES = (
    *renames(
        r"noise_predictor\.",
        "",
        "time_mlp.1=time_in time_mlp.3=time_out input_proj=action_in output_proj=action_out",
    ),
    *renames(
        r"noise_predictor\.transformer_blocks\.(\d+)\.",
        r"layers.\1.",
        "attn.qkv_proj=attn.{qkv}_proj attn.out_proj=attn.o_proj multihead_attn.in_proj=attn.{qkv}_proj"
        " multihead_attn.out_proj=attn.o_proj mlp.0=mlp.fc1 mlp.2=mlp.fc2",
    ),
    Rule(r"noise_predictor\.pos_embedding", ("places.weight",), lambda source: pick(source, 0)),
    *renames(
        TEXT + r"text_encoder\.text_model\.",
        "language.",
        "embeddings.token_embedding=embed_tokens embeddings.position_embedding=places final_layer_norm=norm",
    ),
    *renames(
        TEXT + r"text_encoder\.text_model\.encoder\.layers\.(\d+)\.", r"language.layers.\1.", CLIP_LAYER
    ),
    *renames(TEXT, "language.", "projection=project"),
)


class Clip(NamedTuple):
    """The configurations and the tokenizer of the checkpoint's CLIP models.

    Attributes:
        vision: Configuration of the vision tower.
        text: Configuration of the text encoder.
        tokenizer: The tokenizer.
        files: The files that were read.
    """

    vision: JsonRecord
    text: JsonRecord
    tokenizer: TokenizerFiles
    files: tuple[Path, ...]


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported multi-task DiT.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    clip, image = clip_of(checkpoint), image_recipe(checkpoint)
    config = model_config(checkpoint, clip, image)
    tokenizer, separate = clip.tokenizer, bool(checkpoint["use_separate_rgb_encoder_per_camera"])
    if tokenizer.pad_token_id is None:
        raise ConvertError(
            f"{tokenizer.path}: expected a padding token, got none. Pass CLIP's tokenizer with --tokenizer"
        )
    prompt = PromptRecipe(
        max_tokens=checkpoint.size("tokenizer_max_length", high=config.language.positions),
        vocab_size=config.language.vocab_size,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Conversion(
        format="lerobot-multi-task-dit",
        config=config,
        spec=checkpoint.policy_spec(
            "multi_task_dit",
            checkpoint.size("n_action_steps", high=config.chunk_size - config.history + 1),
            state=checkpoint.state,
            noise_dim=config.max_action_dim,
            noise_rows=config.chunk_size,
            resizes_frames=bool(image.steps),
            history=config.history,
            max_prompt_tokens=prompt.max_tokens,
            **solution(checkpoint),
        ),
        processing=checkpoint.processing(
            image,
            prompt,
            config,
            all_cameras=True,  # the policy was always trained with frames of all cameras
            first_row=config.history - 1,
        ),
        tokenizer=tokenizer.text,
        tensors=tensors(checkpoint.tensors, config, separate),
        dead=tuple(f"{tower(number, separate)}post_layernorm." for number in range(config.encoders)),
        sources=[*checkpoint.files, *clip.files],
        notes=tuple(checkpoint.notes),
    )


def clip_of(checkpoint: LeRobotCheckpoint) -> Clip:
    """Read the configurations and the tokenizer of the checkpoint's CLIP models.

    Raises:
        ConvertError: The models cannot be found, or --vlm is used with two different models.
    """
    options, path = checkpoint.options, checkpoint.path
    names = [str(checkpoint[key]) for key in ("vision_encoder_name", "text_encoder_name")]
    if options.vlm is not None and names[0] != names[1]:
        raise ConvertError(
            f"--vlm {options.vlm}: expected one CLIP model for frames and text, but {checkpoint.file} names"
            f" {names[0]} and {names[1]}. Omit --vlm and put folders with these names next to the checkpoint"
        )
    homes = [find_model_dir(name, options.vlm, path, "--vlm", FILES) for name in names]
    vision, text = (JsonRecord(home / "config.json") for home in homes)
    tokenizer = find_tokenizer(options, homes[1], whose=f"{names[1]}'s")
    return Clip(
        vision.part("vision_config") if "vision_config" in vision.content else vision,
        text.part("text_config") if "text_config" in text.content else text,
        tokenizer,
        (*dict.fromkeys(home / "config.json" for home in homes), tokenizer.path),
    )


def image_recipe(checkpoint: LeRobotCheckpoint) -> ImageRecipe:
    """Build the recipe of a frame. A crop that is larger than the frame is omitted, as in LeRobot, with a note."""
    resize_size, crop_size = checkpoint.sides("image_resize_shape"), checkpoint.sides("image_crop_shape")
    height, width = resize_size or checkpoint.frame_size
    if crop_size is not None and (crop_size[0] > height or crop_size[1] > width):
        checkpoint.notes.append(
            f"image_crop_shape {crop_size[0]} x {crop_size[1]} is larger than the frame of {height} x {width}, so"
            " frames are not cropped, as in LeRobot"
        )
        crop_size = None
    return whole_frames(checkpoint, resize_size, crop_size, "image_crop_shape")


def solution(checkpoint: LeRobotCheckpoint) -> dict[str, object]:
    """Return ``solver`` and ``solver_steps`` of the policy specification."""
    if checkpoint.one_of("objective", "diffusion", "flow_matching") == "diffusion":
        return noise_levels(checkpoint)
    kind = checkpoint.one_of("integration_method", "euler", "rk4")
    # Sinew counts how often the head is evaluated. Each step of the Runge-Kutta method ("rk4") evaluates it four times.
    steps = checkpoint.size("num_integration_steps") * (4 if kind == "rk4" else 1)
    return {"solver": Solver(kind, start=0.0, end=1.0), "solver_steps": steps}


def model_config(checkpoint: LeRobotCheckpoint, clip: Clip, image: ImageRecipe) -> MultiTaskDiTConfig:
    for part in clip.vision, clip.text:
        part.expect(hidden_act="quick_gelu", layer_norm_eps=1e-5)
    side = clip.vision["image_size"]
    if (image.height, image.width) != (side, side):
        raise ConvertError(
            f"{checkpoint.file}: image_resize_shape, image_crop_shape: expected frames of {side} x {side}, which"
            f" {checkpoint['vision_encoder_name']} reads, got {image.height} x {image.width}"
        )
    cameras, history = len(checkpoint.cameras), checkpoint.size("n_obs_steps", high=MAX_HISTORY)
    width = checkpoint.size("hidden_dim")
    with checkpoint.named():
        return MultiTaskDiTConfig(
            vision=ClipVisionConfig(
                **blocks(clip.vision), image_size=side, patch_size=clip.vision["patch_size"]
            ),
            language=ClipTextConfig(
                **blocks(clip.text),
                positions=clip.text["max_position_embeddings"],
                vocab_size=clip.text["vocab_size"],
                out_size=width,
                out_bias=True,
                end_token=end_token(clip),
            ),
            head=BlockConfig(width, 4 * width, checkpoint.size("num_layers"), checkpoint.size("num_heads")),
            cameras=cameras,
            encoders=cameras if checkpoint["use_separate_rgb_encoder_per_camera"] else 1,
            history=history,
            time_size=checkpoint.size("timestep_embed_dim"),
            chunk_size=checkpoint.size("horizon"),
            max_state_dim=history * checkpoint.state.dim,
            max_action_dim=checkpoint.action.dim,
            rope_theta=checkpoint.number("rope_base") if checkpoint["use_rope"] else 0.0,
            places=bool(checkpoint["use_positional_encoding"]),
        )


def blocks(record: JsonRecord) -> dict[str, int]:
    return {
        "hidden_size": record["hidden_size"],
        "intermediate_size": record["intermediate_size"],
        "num_layers": record["num_hidden_layers"],
        "num_heads": record["num_attention_heads"],
    }


def end_token(clip: Clip) -> int:
    """Return the id of the token that ends a prompt. The text feature is read at the first such token.

    Raises:
        ConvertError: The tokenizer ends prompts with another token.
    """
    last_token = clip.tokenizer.encode("")[-1:]
    configured_id = clip.text.content.get("eos_token_id", OLD_END)
    token = clip.text["vocab_size"] - 1 if configured_id == OLD_END else configured_id
    if last_token != [token]:
        raise ConvertError(
            f"{clip.tokenizer.path}: expected a tokenizer that ends prompts with token {token}, as CLIP's configuration"
            f" ({clip.text.path}) requires, got {last_token or 'none'}"
        )
    return int(token)


def tensors(
    sources: Mapping[str, TensorSource], config: MultiTaskDiTConfig, separate: bool
) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names.

    Args:
        sources: The tensors of the checkpoint.
        config: The model's configuration.
        separate: True if each camera has its own vision tower, with a number in its name.
    """
    out, rules = modulations(sources, config), list(RULES)
    for number in range(config.encoders):
        theirs = tower(number, separate)
        first, table = f"{theirs}embeddings.class_embedding", f"{theirs}embeddings.position_embedding.weight"
        if missing := [name for name in (first, table) if name not in out]:
            raise ConvertError(
                f"the tensor {missing[0]} is missing in the checkpoint. Use a complete checkpoint"
            )
        places, ours = out.pop(table), f"vision.{number}."
        out[f"{ours}first"] = computed(lambda row, at: row + at[0], out.pop(first), places)
        out[f"{ours}position_embedding.weight"] = rows(places, 1, places.shape[0])
        rules += [
            *renames(re.escape(theirs), ours, "embeddings.patch_embedding=patch_embedding pre_layrnorm=norm"),
            *renames(re.escape(theirs) + r"encoder\.layers\.(\d+)\.", rf"{ours}layers.\1.", CLIP_LAYER),
        ]
    return apply(out, rules)


def tower(number: int, separate: bool) -> str:
    """Return the prefix of the names of a vision tower's tensors in the checkpoint."""
    return f"observation_encoder.vision_encoder{f's.{number}' if separate else ''}.model.vision_model."


def modulations(sources: Mapping[str, TensorSource], config: MultiTaskDiTConfig) -> dict[str, TensorSource]:
    """Join the linear layers that compute the scales, shifts and gates of all blocks into one layer for the time and
    one layer for the condition.

    Raises:
        ConvertError: The layer of a block is missing.
    """
    blocks = range(config.head.num_layers)
    layers = [f"{HEAD}transformer_blocks.{block}.adaLN_modulation.1" for block in blocks]
    out, (time, condition), bias = join_conditioned(
        sources, layers, (config.time_size, config.condition_size)
    )
    return out | {
        "time_modulation.weight": time,
        "modulation.weight": condition,
        "modulation.bias": bias,
    }
