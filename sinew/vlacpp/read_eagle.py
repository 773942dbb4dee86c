"""Read vla.cpp's files of GR00T N1.6 and N1.5.

Tensors are renamed to NVIDIA's names, so that all further code is the same as for NVIDIA's own checkpoint folder. An
N1.6 file contains the processor's configuration and the statistics. An N1.5 file contains metadata.json, unless it was
made from a LeRobot fine-tune. In that case vla.cpp has written the statistics into a file next to it (--stats), and you
state the cameras (--cameras). Eagle's configuration, tokenizer, chat template and image processor come from --vlm.
Source: vla.cpp ``scripts/convert_gr00t_n1_{5,6}_to_gguf.py``, ``gguf_blocks.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply
from sinew.convert.tokenizer_files import find_model_dir
from sinew.core import CameraSpec, ConvertError
from sinew.families.gr00t import eagle as gr00t_eagle
from sinew.families.gr00t import n15
from sinew.families.gr00t.files import EagleParts, RobotRecord, choose
from sinew.vlacpp.file import FORMAT, VlacppFile, decoder_rules
from sinew.vlacpp.read_qwen import (
    SETTINGS,
    VlacppNvidia,
    head_record,
    head_rules,
)

__all__ = ["ARCHITECTURES", "NAMES", "OPTIONS", "SETTINGS", "read"]

ARCHITECTURES = ("gr00t_n1_5", "gr00t_n1_6")
NAMES = ("vla.cpp GGUF of gr00t_n1_5 or gr00t_n1_6",)
OPTIONS = ("vlm", "tokenizer", "embodiment", "cameras", "stats")
N15_ONLY = ("cameras", "stats", "center_crop", "embodiment_id")
EAGLE = {"gr00t_n1_5": n15.LEROBOT_ASSETS, "gr00t_n1_6": "nvidia/Eagle-Block2A-2B-v2"}
FRAME = 224  # side of a camera's frames in pixels, if no file states it; the vision tower reads images of this size


def _rules(backbone: str, connector: tuple[tuple[str, str], ...]) -> list[Rule]:
    tower = f"{backbone}vision_model.vision_model."
    layer = rf"{tower}encoder.layers.\1."
    return [
        *decoder_rules(f"{backbone}language_model.model."),
        *head_rules("aex", r"aex\.dit", "action_head."),
        Rule(r"vit\.patch_embd\.(.*)", (rf"{tower}embeddings.patch_embedding.\1",)),
        Rule(r"vit\.pos_embd", (f"{tower}embeddings.position_embedding.weight",)),
        Rule(r"vit\.blk\.(\d+)\.ln([12])\.(.*)", (rf"{layer}layer_norm\2.\3",)),
        Rule(r"vit\.blk\.(\d+)\.attn_([qkv])\.(.*)", (rf"{layer}self_attn.\2_proj.\3",)),
        Rule(r"vit\.blk\.(\d+)\.attn_o\.(.*)", (rf"{layer}self_attn.out_proj.\2",)),
        Rule(r"vit\.blk\.(\d+)\.(fc[12])\.(.*)", (rf"{layer}mlp.\2.\3",)),
        Rule(r"vit\.post_ln\.(.*)", (rf"{tower}post_layernorm.\1",)),
        *(Rule(rf"mm\.{old}\.(.*)", (rf"{backbone}mlp1.{new}.\1",)) for old, new in connector),
    ]


N15 = _rules("backbone.eagle_model.", (("fc", "0"),))
N16 = _rules("backbone.model.", (("ln", "0"), ("fc1", "1"), ("fc2", "3")))
TABLE = "backbone.model.vision_model.vision_model.embeddings.position_embedding.weight"


def read(file: VlacppFile, options: ConvertOptions) -> Conversion:
    """Read all of a file except the weights.

    Raises:
        ConvertError: The file is not supported, or an option is missing.
    """
    first = file.architecture == "gr00t_n1_5"
    for name in (*options.non_defaults, *options.settings):
        if name in N15_ONLY and not first:
            raise ConvertError(
                f"{name}: a vla.cpp file of {file.architecture} does not read it; omit this option"
            )
    folder = find_model_dir(
        EAGLE[file.architecture], options.vlm, file.path, "--vlm", gr00t_eagle.EAGLE_FILES
    )
    eagle, preprocessor = JsonRecord(folder / "config.json"), JsonRecord(folder / "preprocessor_config.json")
    if (own := file.integer("image_token_index")) != eagle["image_token_index"]:
        raise ConvertError(
            f"{file.path}: image_token_index: expected {own}, got {eagle['image_token_index']} from --vlm;"
            " pass the model that this file was converted from"
        )
    if first:
        parts = _n15(file, options, preprocessor)
    else:
        processor = JsonRecord(folder / "processor_config.json")
        files = VlacppNvidia(file, options, N16, EAGLE["gr00t_n1_6"])
        parts = gr00t_eagle.n16(files, eagle, preprocessor, processor)
        eagle = _with_table(file, eagle, parts)
    return gr00t_eagle.assemble(file.path.stem, options, folder, eagle, parts)


def _with_table(file: VlacppFile, eagle: JsonRecord, parts: EagleParts) -> JsonRecord:
    """Return Eagle's configuration with the number of patches for which the file contains position embeddings.
    vla.cpp's converter can resize the table of positions, which then fits images of one size only."""
    table, vision = parts.tensors.get(TABLE), eagle.part("vision_config")
    patches, side = vision["num_patches"], vision["patch_size"]
    if table is None or len(table.shape) != 2 or table.shape[0] == patches:
        return eagle
    grid = (parts.image.height // side, parts.image.width // side)
    if grid[0] * grid[1] != table.shape[0] or grid[0] != grid[1]:
        raise ConvertError(
            f"{file.path}: vit.pos_embd: expected {patches} positions, or those of {grid[0]} x {grid[1]} patches, got"
            f" {table.shape[0]}: the file was written for images of another size; write it again without resizing"
        )
    return JsonRecord(
        eagle.path, {**eagle.content, "vision_config": {**vision.content, "num_patches": table.shape[0]}}
    )


def _n15(file: VlacppFile, options: ConvertOptions, preprocessor: JsonRecord) -> EagleParts:
    tensors = apply(file.tensors, N15)
    head = JsonRecord(file.path, head_record(file, tensors))
    metadata = file.record("metadata_json")
    fine_tune = not metadata
    if fine_tune:
        robot = _fine_tune(file, options, head["action_horizon"])
    else:
        for name in ("cameras", "stats"):
            if name in options.non_defaults:
                raise ConvertError(
                    f"--{name}: {file.path} contains NVIDIA's metadata, which has them; omit this option"
                )
        robot = n15.robot(JsonRecord(file.path, metadata), head["action_horizon"], options)
    image = n15.image_recipe(preprocessor, options.setting("center_crop", not fine_tune))
    files = [file.path, *robot.files]
    return n15.parts(
        FORMAT, head, file.integer("lm_layers_used"), tensors, files, robot, image, fine_tune, head
    )


def _fine_tune(file: VlacppFile, options: ConvertOptions, horizon: int) -> RobotRecord:
    """Return the description of the robot of a LeRobot fine-tune. It is read from the file that vla.cpp wrote next to
    its GGUF file."""
    if options.stats is None or not options.cameras:
        raise ConvertError(
            f"{file.path}: made from a LeRobot fine-tune, so it contains no statistics and no cameras; pass"
            " --stats dataset_statistics.json (vla.cpp writes it next to the file) and --cameras NAME,NAME"
        )
    stats, numbers = JsonRecord(options.stats), file.record("embodiment_tag_mapping")
    # vla.cpp names every robot new_embodiment, so the number may also come from --set embodiment_id.
    if (number := options.setting("embodiment_id", None)) is not None:
        numbers |= dict.fromkeys(stats.content, number)
    embodiment = choose(
        options.embodiment, [tag for tag in stats.content if tag in numbers], numbers, stats.path
    )
    table = stats.part(embodiment.tag)
    bounds = {what: _bounds(table.part(what)) for what in ("state", "action")}
    cameras = [CameraSpec(name, FRAME, FRAME) for name in sorted(options.cameras)]
    vectors = n15.vectors_of(
        (n15.part("state", *bounds["state"]),), (n15.part("actions", *bounds["action"]),), horizon
    )
    notes = (f"cameras {', '.join(options.cameras)}: from --cameras, in alphabetical order",)
    return RobotRecord(embodiment, cameras, vectors, n15.TASK, [options.stats], notes)


def _bounds(part: JsonRecord) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    try:
        low, high = (np.asarray(part[name], np.float64) for name in ("min", "max"))
    except (ValueError, TypeError):
        low = high = np.zeros(0)
    if low.ndim != 1 or low.shape != high.shape or not len(low):
        raise ConvertError(
            f"{part.path}: {part.name}min and max: expected two lists of numbers of one length"
        )
    return low, high
