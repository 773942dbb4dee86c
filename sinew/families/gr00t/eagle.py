"""Convert GR00T N1.6 and N1.5, whose backbone is Eagle (SigLIP and Qwen3).

N1.5 has two layouts. NVIDIA's layout has config.json, sharded weights and experiment_cfg/metadata.json. LeRobot's
layout for fine-tunes has one weight file, and statistics in the files of the processors. A LeRobot fine-tune has the
widths of its base model.
"""

from __future__ import annotations

from pathlib import Path

from sinew.bundle.schema import PromptRecipe
from sinew.convert.chat_template import MARK, find_chat_template, render
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.folder import name_of
from sinew.convert.names import language_rules
from sinew.convert.options import ConvertOptions
from sinew.convert.qwen import qwen3
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply, renames
from sinew.convert.tokenizer_files import TokenizerFiles, find_model_dir, find_tokenizer
from sinew.convert.widths import tower
from sinew.core import ConvertError
from sinew.families.gr00t import n15
from sinew.families.gr00t.files import (
    SUPPORTED_VALUES,
    UNREAD_FIELDS,
    EagleParts,
    NvidiaFiles,
    head_config,
    model_type,
    processing,
    specification,
    token_prompt,
    untied,
)
from sinew.families.gr00t.images import image_recipe
from sinew.families.gr00t.model import Gr00tEagleConfig
from sinew.families.gr00t.weights import head_rules, siglip_rules
from sinew.layers.vit import ViTConfig
from sinew.steps.image.grid import Grid

EAGLE_FILES = "*.json merges.txt chat_template*"
# Smallest and largest number of image tokens per image, as in the image processor of Eagle 3.
PIXEL_BOUNDS = 4, 4096


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read an N1.5 or N1.6 directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    name, flag = JsonRecord(path / "config.json").get("model_name", "nvidia/Eagle-Block2A-2B-v2"), "--vlm"
    if model_type(path) != "Gr00tN1d6":
        name, flag = n15.assets(path)
    eagle_dir = find_model_dir(str(name), options.vlm, path, flag, EAGLE_FILES)
    eagle = JsonRecord(eagle_dir / "config.json")
    preprocessor = JsonRecord(eagle_dir / "preprocessor_config.json")
    if model_type(path) == "Gr00tN1d6":
        processor = JsonRecord(eagle_dir / "processor_config.json")
        parts = n16(NvidiaFiles(path, options), eagle, preprocessor, processor)
    else:
        parts = n15.read(path, options, preprocessor)
    return assemble(name_of(path), options, eagle_dir, eagle, parts)


def n16(
    files: NvidiaFiles, eagle: JsonRecord, preprocessor: JsonRecord, eagle_processor: JsonRecord
) -> EagleParts:
    """Read the parts of an N1.6 checkpoint.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    area = eagle_processor["pixels_per_token"]
    unit = round(area**0.5)
    smallest, largest = (tokens * area for tokens in PIXEL_BOUNDS)
    grid = Grid(unit=unit, min_pixels=smallest, max_pixels=largest, method="pil_bicubic")
    image, frames = image_recipe(files, preprocessor, grid)
    files.modalities.only_now("video")
    vision = eagle.part("vision_config")
    vision.filled({"use_rope": True}).expect(use_rope=False)
    return EagleParts(
        architecture="gr00t_n1_6",
        format=files.format if files.format != NvidiaFiles.format else "gr00t-n1.6",
        head=files.config,
        records=(files.config,),
        layers=files.config["select_layer"],
        backbone=r"backbone\.model\.",
        tensors=files.weights[0],
        files=files.files,
        robot=files.robot(frames),
        image=image,
        text_first=True,
        generate=False,
        formal=bool(files.processor.get("formalize_language", True)),
        listed=False,
    )


def assemble(
    name: str, options: ConvertOptions, eagle_dir: Path, eagle: JsonRecord, parts: EagleParts
) -> Conversion:
    """Collect everything that a bundle of the policy needs.

    Args:
        name: Name of the policy.
        options: The user's options.
        eagle_dir: Folder of Eagle's files.
        eagle: Eagle's configuration.
        parts: The parts of the checkpoint.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    vision, text = eagle.part("vision_config"), eagle.part("text_config")
    unshuffle = round(1 / eagle["downsample_ratio"]) if eagle.get("use_pixel_shuffle") else 1
    layers = eagle["mlp_connector_layers"]
    if (layers, unshuffle > 1) not in ((1, False), (2, True)):
        raise ConvertError(
            f"{eagle.path}: mlp_connector_layers: expected 1 without pixel shuffle, or 2 with pixel shuffle, got"
            f" {layers}"
        )
    sizes = vision_config(vision)
    language = qwen3(text, parts.layers, parts.head["backbone_embedding_dim"])
    tokenizer = find_tokenizer(options, eagle_dir)
    unit = sizes.patch_size * unshuffle
    tokens = (parts.image.height // unit) * (parts.image.width // unit)
    prompt, template_file = eagle_prompt(eagle_dir, parts, tokens, tokenizer, text["vocab_size"], eagle)
    config = Gr00tEagleConfig(
        language=language,
        head=head_config(parts.head, masks=parts.text_first),
        vocab_size=text["vocab_size"],
        chunk_size=parts.head["action_horizon"],
        max_state_dim=parts.head["max_state_dim"],
        max_action_dim=parts.head["max_action_dim"],
        image_token=eagle["image_token_index"],
        rows=parts.image.height // unit,
        cols=parts.image.width // unit,
        vision=sizes,
        unshuffle=unshuffle,
    )
    lm = parts.backbone.replace("\\", "") + "language_model."
    tensors = untied(parts.tensors, f"{lm}lm_head.weight", f"{lm}model.embed_tokens.weight")
    rules = (
        *head_rules(parts.robot.embodiment.number),
        *language_rules(parts.backbone + r"language_model\.model\.", language.num_layers),
        *siglip_rules(parts.backbone + r"vision_model\.vision_model\.", sizes.patch_size),
        *connector_rules(parts.backbone + r"mlp1\.", unshuffle),
    )
    return Conversion(
        format=parts.format,
        config=config,
        spec=specification(parts.architecture, name, parts.robot, parts.head, options, prompt),
        processing=processing(parts.image, prompt, parts.robot.vectors, parts.head),
        tokenizer=tokenizer.text,
        tensors=apply(tensors, rules),
        sources=[*parts.files, eagle.path, template_file, tokenizer.path],
        notes=(
            *parts.robot.notes,
            *(note for record in parts.records for note in record.leftover(UNREAD_FIELDS, SUPPORTED_VALUES)),
        ),
    )


def vision_config(vision: JsonRecord) -> ViTConfig:
    """Return the sizes of the SigLIP tower. The configuration of N1.6 contains the number of patches, and that of
    N1.5 contains the side of the image."""
    patch = vision["patch_size"]
    patches = vision.get("num_patches")
    side = patch * round(patches**0.5) if patches else vision["image_size"]
    return tower(vision, image_size=side, norm_eps=vision.get("layer_norm_eps", 1e-6))


def connector_rules(upstream: str, unshuffle: int) -> tuple[Rule, ...]:
    """Return the rules for the connector's tensors: one linear layer, or a norm and two linear layers."""
    if unshuffle == 1:
        return renames(upstream, "", "0=connector")
    return renames(upstream, "connector.", "0=norm 1=fc1 3=fc2")


def eagle_prompt(
    eagle_dir: Path,
    parts: EagleParts,
    tokens: int,
    tokenizer: TokenizerFiles,
    vocab_size: int,
    eagle: JsonRecord,
) -> tuple[PromptRecipe, Path]:
    """Build the prompt recipe from Eagle's chat template.

    Returns:
        The recipe, with each view at the position where NVIDIA's processor writes it, and the file of the template.
    """
    template, template_file = find_chat_template(eagle_dir)
    images = ["image"] * len(parts.robot.cameras)
    content = ["text", *images] if parts.text_first else [*images, "text"]
    text = render(template, content, parts.generate, template_file)
    for number in range(1, len(images) + 1):
        if text.count(f"<image-{number}>") != 1:
            raise ConvertError(
                f"{template_file}: expected exactly one <image-{number}> in the text that the template renders. Pass"
                " Eagle's own folder with --vlm"
            )
        text = text.replace(f"<image-{number}>", f"<image {number}><img>{{image}}</img>")
    prompt_template = text.replace(MARK, "{prompt}")
    token = eagle["image_token_index"]
    return token_prompt(
        prompt_template, tokenizer, vocab_size, token, tokens, parts.formal, parts.listed
    ), template_file
