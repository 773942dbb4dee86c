"""Convert LeRobot Wall-X checkpoints to bundles.

The checkpoint's configuration does not describe the network. The network's configuration, the tokenizer and the image
processor are in the folder or repository that ``pretrained_name_or_path`` names, or in the folder of ``--vlm``. The
weights in that folder are not read, because LeRobot writes all weights into the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sinew.bundle.schema import ImageRecipe, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.steps import NORMALIZER, ProcessorStep
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
from sinew.families.wallx.model import SOLVER, WallXConfig
from sinew.layers.decoder import DecoderConfig
from sinew.layers.qwen25_vit import Qwen25ViTConfig
from sinew.models.qwen25_vl import image_places
from sinew.steps.image.grid import Grid
from sinew.steps.image.long_side import LongSide
from sinew.steps.prompt.base import PromptStep
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.marker import Marker
from sinew.steps.prompt.suffix import Suffix
from sinew.steps.prompt.text import Text
from sinew.steps.prompt.without import Without

NAMES = ("wall_x",)
recognises = of_type(*NAMES)
OPTIONS = ("vlm", "tokenizer", "stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
FILES = "config.json tokenizer*.json *preprocessor_config.json vocab.json merges.txt"
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_wall_x.py.
    defaults={
        "pretrained_name_or_path": "x-square-robot/wall-oss-flow",
        "chunk_size": 32,
        "n_action_steps": 32,
        "max_state_dim": 20,
        "max_action_dim": 20,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    },
    fixed={"n_obs_steps": 1, "prediction_mode": "diffusion"},
    # The action tokenizer is not needed: only the prediction mode "fast" uses it.
    unread="action_tokenizer_path attn_implementation vision_attn_implementation",
    steps={"wall_x_task_processor": ProcessorStep(required=True), "normalizer_processor": NORMALIZER},
)
# Entries of the network's configuration that do not change the actions.
UNREAD_FIELDS = (
    "attention_dropout bos_token_id eos_token_id pad_token_id vision_start_token_id vision_end_token_id"
    " vision_token_id video_token_id initializer_range max_position_embeddings max_window_layers sliding_window"
    " tie_word_embeddings vocab_size noise_scheduler tokens_per_second spatial_patch_size"
)

# Constants in LeRobot's code of Wall-X. Sizes of images are in pixels.
SOLVER_STEPS = 10
LONG_SIDE = 256
LEAST_PIXELS, MOST_PIXELS = 4 * 28 * 28, 16384 * 28 * 28
# Names of an image processor's lowest and highest number of pixels. Each pair has the name in older and in newer files.
LIMITS = ("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")
MAX_TOKENS = 768  # LeRobot's limit for prompt and actions together
CAMERA_NAMES = {"face_view": "front view", "move1_view": "move view", "move2_view": "move view"}

STATE, ACTION = "<|propri|>", "<|action|>"
BEFORE = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nObservation:"
VIEW = "<|vision_start|>", "<|vision_end|>"
TASK = "\nInstruction: "
BEHIND = f"\nPredict the next action in robot action.\nProprioception: {STATE}\n<|im_end|>\n<|im_start|>assistant\n"
TABLE, HEAD = "model.model.embed_tokens.weight", "model.lm_head.weight"
LAYER = r"model\.model\.layers\.(\d+)\."


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported Wall-X.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    name = str(checkpoint["pretrained_name_or_path"])
    home = find_model_dir(name, options.vlm, path, "--vlm", FILES)
    base = JsonRecord(home / "config.json")
    text = base.part("text_config") if "text_config" in base.content else base
    tower = base.part("vision_config")
    tokenizer = find_tokenizer(options, home, whose=f"{name}'s")
    preprocessor = JsonRecord(home / "preprocessor_config.json")
    vision = qwen25_vision(tower)
    image = image_recipe(checkpoint, preprocessor, vision)
    config, others = model_config(checkpoint, base, text, vision, image, tokenizer)
    prompt = prompt_recipe(checkpoint, config, tokenizer)
    records = [base, tower, *([text] if text is not base else [])]
    unread = [
        f"model.model.layers.{i}.moe.experts.{e}." for i in range(config.language.num_layers) for e in others
    ]
    return Conversion(
        format="lerobot-wallx",
        config=config,
        spec=checkpoint.policy_spec(
            "wallx",
            config.chunk_size,
            noise_dim=config.max_action_dim,
            solver=SOLVER,
            solver_steps=SOLVER_STEPS,
            max_prompt_tokens=prompt.max_tokens,
        ),
        processing=checkpoint.processing(image, prompt, config, all_cameras=True),
        tokenizer=tokenizer.text,
        tensors=tensors(checkpoint, config),
        dead=(*unread, *((HEAD,) if TABLE in checkpoint.tensors else ())),
        sources=[*checkpoint.files, base.path, preprocessor.path, tokenizer.path],
        notes=(*checkpoint.notes, *(note for each in records for note in each.leftover(UNREAD_FIELDS))),
    )


def image_recipe(
    checkpoint: LeRobotCheckpoint, preprocessor: JsonRecord, vision: Qwen25ViTConfig
) -> ImageRecipe:
    """Build the steps from a frame to pixels. Frames of different sizes keep different sizes.

    LeRobot resizes each frame twice. Then Qwen's image processor applies its own limits.
    """
    checkpoint.refuse_image_scales()
    preprocessor.expect(
        do_resize=True, do_normalize=True, do_rescale=True, resample=3, patch_size=vision.patch_size,
        merge_size=vision.merge,
    )  # fmt: skip
    least, most = (pixel_limit(preprocessor, *keys) for keys in LIMITS)
    if vision.unit != 28:
        raise ConvertError(
            f"{preprocessor.path}: expected image tokens of 28 x 28 pixels, LeRobot's resize unit, got {vision.unit}"
        )
    with checkpoint.named():
        theirs = Grid(vision.unit, LEAST_PIXELS, MOST_PIXELS, method="bicubic")
        own = Grid(vision.unit, least, most, method="bicubic")
    steps = (LongSide(LONG_SIDE, method="bicubic"), theirs, *((own,) if own != theirs else ()))
    return qwen_pictures(steps, preprocessor, checkpoint.cameras)


def pixel_limit(preprocessor: JsonRecord, key: str, newer: str) -> int:
    """Return a limit of an image's total number of pixels. Newer files store the limit in ``size``.

    Args:
        preprocessor: The image processor's configuration.
        key: Name of the limit in older files.
        newer: Name of the limit in newer files.

    Raises:
        ConvertError: The limit is missing or out of range.
    """
    limit = preprocessor.get(key, (preprocessor.get("size") or {}).get(newer))
    if type(limit) is not int or not 1 <= limit <= MAX_SIZE**2:
        raise ConvertError(
            f"{preprocessor.path}: {key}: expected a whole number from 1 to {MAX_SIZE**2}, got {limit!r}"
        )
    return limit


def model_config(
    checkpoint: LeRobotCheckpoint,
    base: JsonRecord,
    text: JsonRecord,
    vision: Qwen25ViTConfig,
    image: ImageRecipe,
    tokenizer: TokenizerFiles,
) -> tuple[WallXConfig, range]:
    """Build the model's configuration.

    Returns:
        The configuration, and the numbers of the experts that no token uses.
    """
    text.expect(attention_moe=False, use_lora=False)
    if (has_experts := text.get("mlp_moe", False)) is not True:
        raise ConvertError(
            f"{text.path}: {text.name}mlp_moe: expected True, got {has_experts!r}. Sinew cannot convert this"
            " checkpoint, because it does not support a Wall-X network without experts yet"
        )
    rope = (text.get("rope_scaling") or {}) | (text.get("rope_parameters") or {})
    for key in ("type", "rope_type"):
        if (kind := rope.get(key, "default")) not in ("default", "mrope"):
            raise ConvertError(f"{text.path}: {text.name}rope_scaling.{key}: expected 'mrope', got {kind!r}")
    if any(kind != "full_attention" for kind in text.get("layer_types") or ()):
        raise ConvertError(f"{text.path}: {text.name}layer_types: expected full_attention in all layers")
    count = text["num_experts"]
    if type(count) is not int or count < 2:
        raise ConvertError(
            f"{text.path}: {text.name}num_experts: expected at least 2, one for the prompt and one for actions,"
            f" got {count!r}"
        )
    with checkpoint.named():
        language = qwen25_language(text)
        width, inner = experts(text, language)
        config = WallXConfig(
            vision=vision,
            language=language,
            vocab_size=tokenizer.tokenizer.get_vocab_size(with_added_tokens=True),
            chunk_size=checkpoint.size("chunk_size", high=MAX_TOKENS),
            max_state_dim=checkpoint.size("max_state_dim", low=checkpoint.state.dim),
            max_action_dim=checkpoint.size("max_action_dim", low=checkpoint.action.dim),
            image_token=base["image_token_id"],
            state_token=tokenizer.token_id(STATE),
            position_sections=position_sections(text),
            frames=sizes_of_views(image, len(checkpoint.cameras)),
            expert_width=width,
            expert_intermediate_size=inner,
        )
    for key, name, size in (
        ("dof_config", "max_action_dim", config.max_action_dim),
        ("agent_pos_config", "max_state_dim", config.max_state_dim),
    ):
        check_width(text if text.get(key) is not None else base, key, name, size)
    return config, range(2, count)


def experts(text: JsonRecord, language: DecoderConfig) -> tuple[int, int]:
    """Return two sizes of the feed-forward expert for action tokens: how many channels it reads, and the width of its
    hidden layer.

    Raises:
        ConvertError: A width is missing or inconsistent.
    """
    records, widths = text["experts"], text["dim_inputs"]
    where = f"{text.path}: {text.name}"
    if (
        not isinstance(records, list)
        or len(records) < 2
        or not all(isinstance(each, dict) for each in records)
    ):
        raise ConvertError(f"{where}experts: expected a list of at least two objects, got {records!r:.80}")
    if not isinstance(widths, list) or len(widths) < 2:
        raise ConvertError(f"{where}dim_inputs: expected a list of at least two widths, got {widths!r:.80}")
    for index, (expert, width) in enumerate(zip(records[:2], widths[:2], strict=True)):
        record = JsonRecord(text.path, expert, f"{text.name}experts[{index}].")
        if record["hidden_size"] != width:
            raise ConvertError(
                f"{where}experts[{index}].hidden_size: expected {width}, the value in dim_inputs, got"
                f" {record['hidden_size']}"
            )
        record.expect(hidden_act="silu")
    usual = language.hidden_size, language.intermediate_size
    if (widths_of_prompt := (widths[0], records[0]["intermediate_size"])) != usual:
        raise ConvertError(
            f"{where}experts[0]: expected hidden_size {usual[0]} and intermediate_size {usual[1]}, as in the network,"
            f" got {widths_of_prompt[0]} and {widths_of_prompt[1]}"
        )
    return widths[1], records[1]["intermediate_size"]


def check_width(record: JsonRecord, key: str, name: str, size: int) -> None:
    """Check that the widths of a vector's parts add up to the width that the network's layers read.

    Raises:
        ConvertError: The total width differs.
    """
    parts = record.part(key).content
    where = f"{record.path}: {record.name}{key}"
    if not all(type(width) is int and width >= 0 for width in parts.values()):
        raise ConvertError(
            f"{where}: expected an object with the width of each part, got {dict(parts)!r:.80}"
        )
    if (total := sum(parts.values())) != size:
        raise ConvertError(
            f"{where}: expected widths with a sum of {size}, the checkpoint's {name}, got {total}. Pass the network"
            " that this checkpoint was trained from with --vlm"
        )


def prompt_recipe(
    checkpoint: LeRobotCheckpoint, config: WallXConfig, tokenizer: TokenizerFiles
) -> PromptRecipe:
    """Build the prompt up to the first action token: the named views, the instruction, and the state token."""
    placeholder = tokenizer.token_text(config.image_token)
    # LeRobot scales a point in the instruction by the size of the frame. Prompt steps do not have this size, so reject
    # such an instruction.
    steps: list[PromptStep] = [Without("<point>"), Text(BEFORE)]
    around = BEFORE + TASK + BEHIND
    for slot, (rows, cols) in zip(view_names(checkpoint), config.grids, strict=True):
        before, behind = f" {slot}: {VIEW[0]}", VIEW[1]
        around += before + behind
        steps += [Text(before), Image(placeholder, rows * cols, config.image_token), Text(behind)]
    steps += [Text(TASK), Instruction(), Suffix("."), Text(BEHIND), Marker(config.state_token, 1)]
    # Reject the action token in an instruction, because LeRobot would read it as an action.
    steps.append(Marker(tokenizer.token_id(ACTION), 0))
    most = MAX_TOKENS - config.chunk_size
    if (needed := len(tokenizer.encode(around)) + config.image_tokens + 1) > most:
        raise ConvertError(
            f"{checkpoint.file}: expected a prompt of at most {most} tokens, LeRobot's limit, got {needed} with an"
            " empty instruction; use fewer or smaller views"
        )
    return PromptRecipe(
        max_tokens=most,
        vocab_size=config.vocab_size,
        pad_token_id=tokenizer.pad_token_id or 0,
        steps=tuple(steps),
    )


def view_names(checkpoint: LeRobotCheckpoint) -> list[str]:
    """Return the names of the views in the prompt, in the order of the cameras."""
    names = []
    for key, feature in checkpoint["input_features"].items():
        slot = key.replace("observation.images.", "")
        if feature["type"] == "VISUAL" and not slot.startswith("empty_camera_"):
            usual = slot.replace("_", " ") if "view" in slot else f"{slot} view"
            names.append(CAMERA_NAMES.get(slot, usual))
    return names


def tensors(checkpoint: LeRobotCheckpoint, config: WallXConfig) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names."""
    out, name = dict(checkpoint.tensors), "model.action_preprocessor.w2.weight"
    if name not in out:
        raise ConvertError(f"the tensor {name} is missing in the checkpoint. Use a complete checkpoint")
    width = config.language.hidden_size
    out["action_mix.weight"], out["time_mix.weight"] = split(out.pop(name), (width, width), axis=1)
    constants = {
        "image_places": image_places(config.grids),
        "state_mask": ones(checkpoint.state.dim, config.max_state_dim),
        "action_mask": ones(checkpoint.action.dim, config.max_action_dim),
    }
    rules = (
        # The token table and the output layer are the same tensor. LeRobot stores it only under the name of the output
        # layer.
        *(() if TABLE in out else (Rule(HEAD.replace(".", r"\."), ("language.embed_tokens.weight",)),)),
        Rule(
            LAYER + r"post_attention_layernorm\.(.+)",
            (r"language.layers.\1.post_norm.\2", r"experts.\1.norm.\2"),
            lambda source: (source, source),
        ),
        Rule(LAYER + r"moe\.experts\.0\.(.+)", (r"language.layers.\1.mlp.\2",)),
        Rule(LAYER + r"moe\.experts\.1\.(.+)", (r"experts.\1.mlp.\2",)),
        *qwen25_rules(r"model\.model\.", r"model\.visual\."),
        *renames(
            r"model\.action_preprocessor\.",
            "",
            "propri_proj=state_proj w1=action_in w3=action_time_out action_proj_back=action_out",
        ),
    )
    return apply(out, rules) | {
        each: constant(each, np.array(values, np.float32)) for each, values in constants.items()
    }


def ones(count: int, width: int) -> list[float]:
    """Return the mask of a padded vector: 1 for each of its first ``count`` values, and 0 for the padding."""
    return [1.0] * count + [0.0] * (width - count)
