"""Convert LeRobot VLA-JEPA checkpoints: Qwen3-VL and the action head. The world model is omitted.

The widths, tokenizer, chat template and image processor of the language model are in the hub repository that
``qwen_model_name`` names, or in the folder of --vlm. Source: LeRobot ``policies/vla_jepa`` (0.6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sinew.bundle.schema import PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert.chat_template import find_chat_template
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import STATE, LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.steps import NORMALIZER, POSTPROCESSOR, RELATIVE, ProcessorStep
from sinew.convert.names import language_rules
from sinew.convert.options import IGNORE_SETTING, SOLVER_STEPS_SETTING, ConvertOptions
from sinew.convert.qwen import qwen3
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply
from sinew.convert.tokenizer_files import find_model_dir, find_tokenizer
from sinew.core import ConvertError, VectorSpec
from sinew.families.gr00t.head import HeadConfig
from sinew.families.gr00t.model import SOLVER
from sinew.families.gr00t.qwen import VLM_FILES, grid_step, position_sections, vision_config
from sinew.families.gr00t.weights import Rules, qwen_vision_rules, transformer_rules
from sinew.families.vla_jepa.model import JepaConfig
from sinew.families.vla_jepa.processing import (
    BINARIZE,
    CLIP,
    ENCODER,
    PREP,
    SNAP,
    added_tokens,
    image_processor,
    image_recipe,
    processing,
    prompt_recipe,
)
from sinew.layers.dit import DiTConfig

ARCHITECTURE = "vla_jepa"
NAMES = (ARCHITECTURE,)
recognises = of_type(*NAMES)
OPTIONS = ("vlm", "tokenizer", "stats", "stats_key", "dataset")
SETTINGS = {"solver_steps": SOLVER_STEPS_SETTING, "ignore": IGNORE_SETTING}
DEFAULT_TASK = "Execute the robot action."  # LeRobot's text for an empty task
PRESETS = {"DiT-B": (12, 64), "DiT-L": (32, 48), "DiT-test": (2, 8)}  # number of heads, and width of a head
CONTEXT, HEAD = r"model\.qwen\.model\.model\.", r"model\.action_model\."
WORLD = (ENCODER, "model.video_predictor.")
# LeRobot adds this many spare rows to the position table of the head.
SPARE_POSITIONS = 4
GRIPPER = ProcessorStep("gripper_dim threshold")
SCHEMA = Schema(
    defaults={
        "chunk_size": 7,
        "n_action_steps": 7,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"},
        "qwen_model_name": "Qwen/Qwen3-VL-2B-Instruct",
        "prompt_template": "Your task is {instruction}. Infer the temporal dynamics from frames {actions} and produce"
        " the corresponding policy actions {e_actions}.",
        "special_action_token": "<|action_{}|>",
        "embodied_action_token": "<|embodied_action|>",
        "num_action_tokens_per_timestep": 8,
        "num_embodied_action_tokens_per_instruction": 32,
        "num_inference_timesteps": 4,
        "action_hidden_size": 1024,
        "action_model_type": "DiT-B",
        "action_num_layers": 16,
        "action_num_heads": None,
        "action_attention_head_dim": None,
        "action_num_timestep_buckets": 1000,
        "action_max_seq_len": 1024,
        "num_video_frames": 8,
        "jepa_tubelet_size": 2,
        "resize_images_to": None,
        "binarize_gripper_action": False,
        "pre_snap_gripper_action": False,
        "clip_normalized_actions": True,
        "gripper_dim": 6,
        "gripper_threshold": 0.5,
        "gripper_joint_names": ["gripper"],
    },
    unread="jepa_encoder_name freeze_qwen enable_world_model reinit_modules torch_dtype tokenizer_padding_side"
    " action_dim state_dim num_target_vision_tokens use_relative_actions relative_exclude_joints action_feature_names"
    " action_dropout action_noise_beta_alpha action_noise_beta_beta action_noise_s predictor_depth predictor_num_heads"
    " predictor_mlp_ratio predictor_dropout world_model_loss_weight world_model_num_views repeated_diffusion_steps"
    " causal_world_model_context",
    steps={
        PREP: ProcessorStep("resize_to", "expand_channels"),
        "relative_actions_processor": RELATIVE,
        "normalizer_processor": NORMALIZER,
    },
    after={
        CLIP: ProcessorStep(),
        SNAP: GRIPPER,
        **{name: step for name, step in POSTPROCESSOR.items() if name != "device_processor"},
        BINARIZE: GRIPPER,
        "device_processor": POSTPROCESSOR["device_processor"],
    },
)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported VLA-JEPA.
    """
    return assemble(LeRobotCheckpoint(path, options, SCHEMA))


def assemble(checkpoint: LeRobotCheckpoint) -> Conversion:
    """Collect everything that a bundle needs from an opened checkpoint.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    path, options = checkpoint.path, checkpoint.options
    vlm_dir = find_model_dir(str(checkpoint["qwen_model_name"]), options.vlm, path, "--vlm", VLM_FILES)
    vlm = JsonRecord(vlm_dir / "config.json")
    has_state = STATE in checkpoint["input_features"]
    vectors = checkpoint.state if has_state else VectorSpec(0), checkpoint.action
    preprocessor = image_processor(vlm_dir)
    tower = vision_config(vlm.part("vision_config"))
    unit = tower.patch_size * tower.merge
    image = image_recipe(checkpoint, preprocessor, grid_step(preprocessor, unit, "bicubic_float"))
    rows, cols = image.height // unit, image.width // unit

    actions, embodied = added_tokens(checkpoint)
    tokenizer = find_tokenizer(options, vlm_dir).with_tokens([*actions, embodied])
    template, template_file = find_chat_template(vlm_dir)
    prompt = prompt_recipe(checkpoint, vlm, tokenizer, template, template_file, rows * cols)
    check_depth(checkpoint, vlm.part("text_config"))
    checkpoint.check_tokens(*(item.token for item in prompt.held))
    model = model_config(checkpoint, vlm, prompt, vectors, (rows, cols))
    spec = checkpoint.policy_spec(
        ARCHITECTURE,
        model.chunk_size,
        state=vectors[0],
        noise_dim=model.max_action_dim,
        solver=SOLVER,
        solver_steps=options.setting("solver_steps", checkpoint["num_inference_timesteps"]),
        max_prompt_tokens=prompt.max_tokens,
        default_prompt=DEFAULT_TASK,
    )
    if not has_state:
        checkpoint.notes.append(
            "the features contain no state, so the head has no state token, as in LeRobot"
        )
    return Conversion(
        format=checkpoint.format or "lerobot-vla-jepa",
        config=model,
        spec=spec,
        processing=processing(checkpoint, image, prompt, vectors, has_state),
        tokenizer=tokenizer.text,
        tensors=apply(checkpoint.tensors, rules(checkpoint.tensors, model, has_state)),
        dead=("model.qwen.model.model.language_model.norm.", "model.qwen.model.lm_head.", *WORLD),
        sources=[*checkpoint.files, vlm.path, preprocessor.path, template_file, tokenizer.path],
        notes=tuple(checkpoint.notes),
    )


def check_depth(checkpoint: LeRobotCheckpoint, text: JsonRecord) -> None:
    """Raise ConvertError if the language model of --vlm has another number of layers than the checkpoint's."""
    pattern = re.compile(CONTEXT + r"language_model\.layers\.(\d+)\..*")
    indices = [int(match[1]) for name in checkpoint.tensors if (match := pattern.fullmatch(name))]
    if indices and max(indices) + 1 != text["num_hidden_layers"]:
        raise ConvertError(
            f"{text.path}: {text.name}num_hidden_layers: expected {max(indices) + 1}, as in the checkpoint, got"
            f" {text['num_hidden_layers']}. Pass the checkpoint's model with --vlm"
        )


def model_config(
    checkpoint: LeRobotCheckpoint,
    vlm: JsonRecord,
    prompt: PromptRecipe,
    vectors: tuple[VectorSpec, VectorSpec],
    grid: tuple[int, int],
) -> JepaConfig:
    """Build the model's configuration. ``grid`` has the rows and columns of a view's image tokens."""
    image, marker = prompt.held
    text = vlm.part("text_config")
    heads, head_dim = PRESETS[checkpoint.one_of("action_model_type", *PRESETS)]
    layers = checkpoint.size("action_num_layers")
    chunk, hidden = checkpoint.size("chunk_size"), checkpoint.size("action_hidden_size")
    positions = chunk + checkpoint.size("num_action_tokens_per_timestep") + SPARE_POSITIONS
    with checkpoint.named():
        return JepaConfig(
            language=qwen3(text, text["num_hidden_layers"], text["hidden_size"]),
            head=HeadConfig(
                dit=DiTConfig(
                    num_layers=layers,
                    num_heads=checkpoint["action_num_heads"] or heads,
                    head_dim=checkpoint["action_attention_head_dim"] or head_dim,
                    output_size=hidden,
                    context_size=text["hidden_size"],
                    is_cross=tuple(index % 2 == 0 for index in range(layers)),
                ),
                hidden_size=hidden,
                buckets=checkpoint.size("action_num_timestep_buckets"),
                positions=max(checkpoint.size("action_max_seq_len"), positions),
                future_tokens=marker.times,
                norm_features=False,
            ),
            vocab_size=prompt.vocab_size,
            chunk_size=chunk,
            max_state_dim=vectors[0].dim,
            max_action_dim=vectors[1].dim,
            image_token=image.token,
            vision=vision_config(vlm.part("vision_config")),
            rows=grid[0],
            cols=grid[1],
            position_sections=position_sections(text),
            marker=marker.token,
            markers=marker.times,
        )


def rules(tensors: Mapping[str, TensorSource], model: JepaConfig, has_state: bool) -> Rules:
    """Return the rules that rename all tensors of a checkpoint that inference reads."""
    embedded = any(name.endswith("language_model.embed_tokens.weight") for name in tensors)
    coder = HEAD + r"(state_encoder|action_encoder|action_decoder)\.layer(\d)\.(.*)"
    return (
        *(() if has_state else (Rule(HEAD + r"state_encoder\..*"),)),
        Rule(coder, (r"head.\1.fc\2.\3",)),
        *transformer_rules(HEAD),
        # The token table and the output layer are the same tensor. LeRobot stores it only under the name of the output
        # layer.
        *(() if embedded else (Rule(r"model\.qwen\.model\.lm_head\.(.*)", (r"language.embed_tokens.\1",)),)),
        *language_rules(CONTEXT + r"language_model\.", model.language.num_layers, norm=""),
        *qwen_vision_rules(CONTEXT + r"visual\."),
    )
