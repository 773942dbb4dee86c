"""Convert GR00T N1.7, whose backbone is Qwen3-VL (Cosmos-Reason2)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sinew.convert.chat_template import MARK, find_chat_template, render
from sinew.convert.conversion import Conversion
from sinew.convert.names import language_rules
from sinew.convert.options import ConvertOptions
from sinew.convert.qwen import qwen3
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import apply
from sinew.convert.tokenizer_files import find_model_dir, find_tokenizer
from sinew.convert.widths import tower
from sinew.core import ConvertError
from sinew.families.gr00t.files import (
    SUPPORTED_VALUES,
    UNREAD_FIELDS,
    NvidiaFiles,
    head_config,
    processing,
    specification,
    token_prompt,
)
from sinew.families.gr00t.images import image_recipe
from sinew.families.gr00t.model import Gr00tQwenConfig
from sinew.families.gr00t.weights import head_rules, qwen_vision_rules
from sinew.layers.qwen_vit import QwenViTConfig
from sinew.steps.image.grid import Grid

ARCHITECTURE = "gr00t_n1_7"
BACKBONE = r"backbone\.model\.model\."
VLM_FILES = "config.json tokenizer*.json *preprocessor_config.json chat_template* special_tokens*"
VISION_EPS = 1e-6  # a constant in Qwen3-VL's code
DEFAULT_TASK = "Perform the task."  # LeRobot's text for an empty instruction


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read an N1.7 directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    return assemble(NvidiaFiles(path, options))


def assemble(files: NvidiaFiles) -> Conversion:
    """Collect everything that a bundle needs from the opened files of a checkpoint.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    path, options = files.path, files.options
    config, processor = files.config, files.processor
    vlm_dir = find_model_dir(str(config["model_name"]), options.vlm, path, "--vlm", VLM_FILES)
    vlm = JsonRecord(vlm_dir / "config.json")
    text, vision = vlm.part("text_config"), vlm.part("vision_config")
    config.expect(state_history_length=1)
    sizes = vision_config(vision)

    preprocessor = JsonRecord(vlm_dir / "preprocessor_config.json")
    unit = sizes.patch_size * sizes.merge
    grid = grid_step(preprocessor, unit, "bicubic")
    image, frames = image_recipe(files, preprocessor, grid)
    rows, cols = image.height // unit, image.width // unit

    robot = files.robot(frames)
    cameras = robot.cameras
    for camera in cameras:
        if (size := image.size_after(camera.height, camera.width)) != (image.height, image.width):
            raise ConvertError(
                f"{processor.path}: expected that the frames of all cameras become {image.height}x{image.width}"
                f" pixels, but frames of {camera.name!r} ({camera.height}x{camera.width}) become {size[0]}x{size[1]}"
            )
    tokenizer = find_tokenizer(options, vlm_dir)
    template, template_file = find_chat_template(vlm_dir)
    images = robot.history[0] * len(cameras)  # images of all observation steps, the oldest step first
    chat = render(template, ["image"] * images + ["text"], False, template_file)
    placeholder = tokenizer.token_text(vlm["image_token_id"])
    if chat.count(placeholder) != images:
        raise ConvertError(
            f"{template_file}: expected exactly one {placeholder} per image in the rendered text. Pass the model's"
            " own folder with --vlm"
        )
    prompt_template = chat.replace(placeholder, "{image}").replace(MARK, "{prompt}")
    prompt = token_prompt(
        prompt_template,
        tokenizer,
        text["vocab_size"],
        vlm["image_token_id"],
        rows * cols,
        bool(processor.get("formalize_language", True)),
    )

    model = model_config(config, vlm, rows, cols)
    tensors, _ = files.weights
    rules = (
        *head_rules(robot.embodiment.number),
        *language_rules(BACKBONE + r"language_model\.", model.language.num_layers, norm=""),
        *qwen_vision_rules(BACKBONE + r"visual\."),
    )
    return Conversion(
        format=files.format,
        config=model,
        spec=specification(ARCHITECTURE, files.name, robot, config, options, prompt, DEFAULT_TASK),
        processing=processing(image, prompt, robot.vectors, config),
        tokenizer=tokenizer.text,
        tensors=apply(tensors, rules),
        dead=("backbone.model.model.language_model.norm.", "backbone.model.lm_head."),
        sources=[*robot.files, vlm.path, preprocessor.path, template_file, tokenizer.path],
        notes=(*robot.notes, *config.leftover(UNREAD_FIELDS, SUPPORTED_VALUES)),
    )


def model_config(config: JsonRecord, vlm: JsonRecord, rows: int, cols: int) -> Gr00tQwenConfig:
    """Build the model's configuration.

    Args:
        config: config.json of the checkpoint.
        vlm: config.json of the vision-language model.
        rows: Number of rows of the grid of image tokens of a camera view.
        cols: Number of columns of the grid of image tokens of a camera view.
    """
    text = vlm.part("text_config")
    language = qwen3(text, config["select_layer"], config["backbone_embedding_dim"])
    return Gr00tQwenConfig(
        language=language,
        head=head_config(config, masks=True),
        vocab_size=text["vocab_size"],
        chunk_size=config["action_horizon"],
        max_state_dim=config["max_state_dim"],
        max_action_dim=config["max_action_dim"],
        image_token=vlm["image_token_id"],
        vision=vision_config(vlm.part("vision_config")),
        rows=rows,
        cols=cols,
        position_sections=position_sections(text),
    )


def position_sections(text: JsonRecord) -> tuple[int, int, int]:
    """Return three numbers: how many rotary frequencies of Qwen3-VL encode the time, the row and the column of a
    token."""
    sections = (text.get("rope_scaling") or {}) | (text.get("rope_parameters") or {})
    time, row, column = sections.get("mrope_section") or (0, 0, 0)
    if not sections.get("mrope_interleaved") or not time:
        raise ConvertError(
            f"{text.path}: rope_scaling: expected interleaved rotary positions (mrope_interleaved) with three sections."
            " Pass the configuration of a Qwen3-VL model with --vlm"
        )
    return time, row, column


def grid_step(preprocessor: JsonRecord, unit: int, method: Literal["bicubic", "bicubic_float"]) -> Grid:
    """Return the resize of the image processor, to multiples of ``unit`` pixels."""
    size = preprocessor.get("size", {})
    smallest = size.get("shortest_edge", preprocessor.get("min_pixels"))
    largest = size.get("longest_edge", preprocessor.get("max_pixels"))
    if smallest is None or largest is None:
        raise ConvertError(
            f"{preprocessor.path}: size.shortest_edge and size.longest_edge are missing. Pass the model's own folder"
            " with --vlm"
        )
    return Grid(unit=unit, min_pixels=smallest, max_pixels=largest, method=method)


def vision_config(vision: JsonRecord) -> QwenViTConfig:
    """Return the sizes of Qwen3-VL's tower."""
    vision.expect(hidden_act="gelu_pytorch_tanh")
    side = int(vision["num_position_embeddings"] ** 0.5)
    if side**2 != vision["num_position_embeddings"]:
        raise ConvertError(f"{vision.path}: vision_config.num_position_embeddings: expected a square number")
    return QwenViTConfig(
        blocks=tower(
            vision,
            num_layers=vision["depth"],
            num_heads=vision["num_heads"],
            image_size=side * vision["patch_size"],
            norm_eps=VISION_EPS,
        ),
        output_size=vision["out_hidden_size"],
        merge=vision["spatial_merge_size"],
        temporal_patch=vision["temporal_patch_size"],
        taps=tuple(vision["deepstack_visual_indexes"]),
    )
