"""Convert LeRobot SmolVLA checkpoints to bundles.

The widths come from the configuration of the language model that the checkpoint names. A missing field has the default
of transformers' SmolVLMConfig or LlamaConfig, as in LeRobot. The converter checks the shape of every tensor against the
widths.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sinew.bundle.schema import ImageRecipe, Processing, PromptRecipe
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.steps import NORMALIZER, RELATIVE, TOKENIZER, ProcessorStep
from sinew.convert.lm_head import LM_HEAD_SETTING, PROMPT_SETTINGS, lm_head, text_recipe
from sinew.convert.names import rename
from sinew.convert.options import COMMITTED_ROWS_SETTING, IGNORE_SETTING, SOLVER_STEPS_SETTING, ConvertOptions
from sinew.convert.read.files import read_json
from sinew.convert.tokenizer_files import find_model_dir, find_tokenizer
from sinew.convert.widths import decoder, tower
from sinew.core import ConvertError, PolicySpec
from sinew.families.smolvla.model import SmolVLAConfig
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.prompt.base import TextRecipe
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.suffix import Suffix

# LeRobot's apply_rope uses this constant and ignores the language model's own rope_theta.
ROPE_THETA = 10_000.0
VISION_EPS = 1e-6
VISION_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "layer_norm_eps": VISION_EPS,
}
TEXT_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}
PREFIXES = (
    ("model.vlm_with_expert.vlm.model.vision_model.", "vision."),
    ("model.vlm_with_expert.vlm.model.text_model.", "language."),
    ("model.vlm_with_expert.vlm.model.connector.modality_projection.", "connector."),
    ("model.vlm_with_expert.vlm.lm_head.", "lm_head."),
    ("model.vlm_with_expert.lm_expert.", "expert."),
    ("model.", ""),
)
TABLE = "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"
HEAD = "model.vlm_with_expert.vlm.lm_head.weight"
# Actions do not depend on the language head, so this tensor is not needed.
UNUSED_TENSORS = ("model.vlm_with_expert.vlm.lm_head.",)
VLM_FILES = "config.json tokenizer.json tokenizer_config.json"


def bundle_name(upstream: str) -> str:
    """Return the module path in :class:`sinew.families.smolvla.model.SmolVLA` for LeRobot's name of a tensor."""
    return rename(upstream, PREFIXES)


NAMES = ("smolvla",)
recognises = of_type(*NAMES)
OPTIONS = ("base", "vlm", "tokenizer", "arch", "stats", "stats_key", "dataset")
# Options of Sinew's own training (research/policies/egg.py). LeRobot's SmolVLA does not have them.
OWN_OPTIONS = ("state_in_head", "rolling")
SETTINGS = {
    "solver_steps": SOLVER_STEPS_SETTING,
    "committed_rows": COMMITTED_ROWS_SETTING,
    "ignore": IGNORE_SETTING,
    "lm_head": LM_HEAD_SETTING,
    # SmolVLA was not trained with a prompt for questions, so the user may choose one.
    "question_prompt": PROMPT_SETTINGS["question_prompt"],
}
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_smolvla.py, unchanged from its first
    # version to LeRobot 0.6.
    defaults={
        "chunk_size": 50,
        "n_action_steps": 50,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "max_state_dim": 32,
        "max_action_dim": 32,
        "resize_imgs_with_padding": [512, 512],
        "empty_cameras": 0,
        "tokenizer_max_length": 48,
        "num_steps": 10,
        "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "prefix_length": -1,
        "pad_language_to": "longest",
        "num_expert_layers": -1,
        "num_vlm_layers": 16,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75,
        "min_period": 4e-3,
        "max_period": 4.0,
    },
    fixed={"adapt_to_pi_aloha": False, "use_delta_joint_actions_aloha": False},
    # The conversion's function committed_rows reads the first of these fields separately.
    unread=" ".join(("rtc_training_max_delay", "load_vlm_weights", *OWN_OPTIONS)),
    steps={
        "smolvla_new_line_processor": ProcessorStep(required=True),
        "tokenizer_processor": TOKENIZER,
        "relative_actions_processor": RELATIVE,
        "normalizer_processor": NORMALIZER,
    },
    adapters=True,
)


def open_checkpoint(path: Path, options: ConvertOptions | None = None) -> LeRobotCheckpoint:
    """Open a checkpoint directory and check its configuration.

    Raises:
        ConvertError: The configuration is not supported.
    """
    return LeRobotCheckpoint(path, options or ConvertOptions(), SCHEMA)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported SmolVLA.
    """
    checkpoint = open_checkpoint(path, options)
    vlm_name = str(checkpoint["vlm_model_name"])
    if options.arch:
        vlm_dir, vlm_config = None, options.arch
    else:
        vlm_dir = find_model_dir(vlm_name, options.vlm, checkpoint.path, "--vlm", VLM_FILES)
        vlm_config = vlm_dir / "config.json"
    vlm = read_json(vlm_config)

    folders = [path / "tokenizer", path]
    if vlm_dir and checkpoint.tokenizer_name in ("", vlm_name):
        folders.append(vlm_dir)
    vlm_name = checkpoint.tokenizer_name or vlm_name
    tokenizer = find_tokenizer(options, *folders, whose=f"the one of {vlm_name!r}")
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = vlm.get("pad_token_id", vlm.get("text_config", {}).get("pad_token_id"))
    if pad_id is None:
        raise ConvertError(
            f"{tokenizer.path}: expected a padding token in this file or in the configuration of {vlm_name!r}. Pass"
            " another tokenizer with --tokenizer"
        )

    special: dict[str, tuple[int, ...]] = {}
    if checkpoint["add_image_special_tokens"]:
        fake = tokenizer.token_id("<fake_token_around_image>")
        special = {
            "image_start_tokens": (fake, tokenizer.token_id("<global-img>")),
            "image_end_tokens": (fake,),
        }
    tied = bool(vlm.get("tie_word_embeddings", vlm.get("text_config", {}).get("tie_word_embeddings")))
    head = lm_head(
        options, checkpoint.tensors, HEAD, TABLE, tokenizer, "<end_of_utterance>", UNUSED_TENSORS, tied
    )
    config = replace(model_config(checkpoint, vlm, special), lm_head=head.kind)
    return Conversion(
        format="lerobot-smolvla",
        config=config,
        spec=policy_spec(checkpoint, config, options),
        processing=processing(
            checkpoint, config, int(pad_id), head.end, text_recipe(options, ()) if head.kind else None
        ),
        tokenizer=tokenizer.text,
        tensors=checkpoint.tensors,
        rename=bundle_name,
        dead=head.dead,
        sources=[*checkpoint.files, vlm_config, tokenizer.path],
        notes=(*checkpoint.notes, *head.notes),
        widths_assumed=options.arch is None,
    )


def model_config(
    checkpoint: LeRobotCheckpoint, vlm: dict[str, Any], special: dict[str, tuple[int, ...]]
) -> SmolVLAConfig:
    vision = VISION_DEFAULTS | vlm.get("vision_config", {})
    text = TEXT_DEFAULTS | vlm.get("text_config", {})
    depth = checkpoint["num_vlm_layers"] if checkpoint["num_vlm_layers"] > 0 else text["num_hidden_layers"]
    expert_depth = checkpoint["num_expert_layers"] if checkpoint["num_expert_layers"] > 0 else depth
    expert_width = int(text["hidden_size"] * checkpoint["expert_width_multiplier"])
    every = checkpoint["self_attn_every_n_layers"]
    with checkpoint.named():
        language = decoder(text, num_layers=depth, rope_theta=ROPE_THETA)
        return SmolVLAConfig(
            vision=tower(vision),
            language=language,
            expert=replace(
                language,
                hidden_size=expert_width,
                intermediate_size=expert_intermediate_size(expert_width),
                num_layers=expert_depth,
            ),
            vocab_size=text["vocab_size"],
            pixel_shuffle=vlm.get("scale_factor", 2),
            chunk_size=checkpoint.size("chunk_size"),
            max_state_dim=checkpoint.size("max_state_dim"),
            max_action_dim=checkpoint.size("max_action_dim"),
            min_period=checkpoint["min_period"],
            max_period=checkpoint["max_period"],
            # If attention_mode does not contain "cross", every layer is a self layer, which attends to the actions. If
            # the period ``every`` is 0 or less, no layer is a self layer.
            self_attn_every_n_layers=max(every, 0) if "cross" in checkpoint["attention_mode"] else 1,
            prefix_length=max(checkpoint["prefix_length"], 0),
            image_start_tokens=special.get("image_start_tokens", ()),
            image_end_tokens=special.get("image_end_tokens", ()),
            state_in_head=bool(checkpoint.config.get("state_in_head", False)),
            rolling=bool(checkpoint.config.get("rolling", False)),
        )


def expert_intermediate_size(width: int) -> int:
    """Return the width of the hidden layer of the expert's MLP, computed like LeRobot's ``get_intermediate_size``.

    It is 4 * 2/3 of ``width``, rounded up to a multiple of 256.
    """
    return -(-int(4 * int(2 * width / 3)) // 256) * 256


def policy_spec(checkpoint: LeRobotCheckpoint, config: SmolVLAConfig, options: ConvertOptions) -> PolicySpec:
    cameras, resizes = checkpoint.cameras, checkpoint["resize_imgs_with_padding"] is not None
    # Without resizing, frames must already have the size that the tower requires.
    if not resizes:
        side = config.vision.image_size
        cameras = tuple(replace(camera, height=side, width=side) for camera in cameras)
    return checkpoint.policy_spec(
        "smolvla",
        config.chunk_size,
        cameras=cameras,
        noise_dim=config.max_action_dim,
        solver_steps=options.setting("solver_steps", checkpoint["num_steps"]),
        max_prompt_tokens=checkpoint.max_tokens,
        resizes_frames=resizes,
        committed_rows=checkpoint.committed_rows(config.chunk_size),
    )


def processing(
    checkpoint: LeRobotCheckpoint, config: SmolVLAConfig, pad_id: int, eos_id: int, text: TextRecipe | None
) -> Processing:
    checkpoint.refuse_image_scales()
    side = config.vision.image_size
    width, height = checkpoint["resize_imgs_with_padding"] or (side, side)  # LeRobot's order is width, height
    if height % config.vision.patch_size or width % config.vision.patch_size:
        raise ConvertError(
            f"resize_imgs_with_padding: expected multiples of the patch size {config.vision.patch_size}, got height"
            f" {height} and width {width}"
        )
    padding = checkpoint.padding or checkpoint["pad_language_to"]
    if padding not in ("longest", "max_length"):
        raise ConvertError(f"pad_language_to: expected 'longest' or 'max_length', got {padding!r}")
    return checkpoint.processing(
        ImageRecipe(
            height, width, (Letterbox(height, width),) if checkpoint["resize_imgs_with_padding"] else ()
        ),
        PromptRecipe(
            max_tokens=checkpoint.max_tokens,
            vocab_size=config.vocab_size,
            pad_token_id=pad_id,
            eos_token_id=eos_id,
            text=text,
            steps=(Instruction(), Suffix("\n")),
            padding=padding,
        ),
        config,
        empty_cameras=checkpoint.size("empty_cameras", low=0, high=16),
        action_steps=checkpoint.action_steps(),
    )
