"""Convert LeRobot X-VLA checkpoints to bundles.

Florence-2's tensors have two sets of names: those of LeRobot 0.4, which the published checkpoints use, and those of
transformers. The converter supports both. A checkpoint has some weights for each domain (robot), and a bundle has the
weights of one domain. The preprocessor's file defines the domain, or ``--embodiment N`` sets another domain.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sinew.bundle.schema import ImageRecipe, Normalization, Processing, PromptRecipe, VectorPart
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import ACTION, LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.steps import DEVICE, NORMALIZER, POST, PRE, TOKENIZER, ProcessorStep
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply, computed, moved, pick, renames, reshape, rows, transpose
from sinew.convert.tokenizer_files import TokenizerFiles, find_tokenizer
from sinew.core import ConvertError, PolicySpec, VectorSpec
from sinew.families.xvla.davit import MLP_RATIO, DaViTConfig
from sinew.families.xvla.model import BlockConfig, XVLAConfig
from sinew.models.solvers import Solver
from sinew.steps.image.base import ImageStep
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.vector.threshold import Threshold

NAMES = ("xvla",)
recognises = of_type(*NAMES)
OPTIONS = ("tokenizer", "embodiment", "stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # pixel statistics of ImageNet, as in LeRobot's step
# Names of two steps that cancel each other: the first one multiplies pixels by 255, and the second one divides them by
# 255.
SCALE, TO_FLOAT = "xvla_image_scale", "xvla_image_to_float"
NORMALIZE, DOMAIN = "xvla_imagenet_normalize", "xvla_add_domain_id"
# The step that converts a rotation from 6 numbers to an axis-angle vector. It returns only the first arm, and its
# gripper becomes open (1) or closed (-1).
ROTATE = "xvla_rotation_6d_to_axis_angle"
OF_ALL_VIEWS = {"image_keys": (None,)}
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_xvla.py.
    defaults={
        "chunk_size": 32,
        "n_action_steps": 32,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "IDENTITY"},
        "tokenizer_name": "facebook/bart-large",
        "tokenizer_max_length": 64,
        "hidden_size": 1024,
        "depth": 24,
        "num_heads": 16,
        "mlp_ratio": 4.0,
        "num_domains": 30,
        "len_soft_prompts": 32,
        "dim_time": 32,
        "max_len_seq": 512,
        "use_hetero_proj": False,
        "action_mode": "ee6d",
        "num_denoising_steps": 10,
        "max_state_dim": 32,
        "max_action_dim": 20,
        "resize_imgs_with_padding": None,
        "num_image_views": None,
        "empty_cameras": 0,
    },
    required="florence_config",
    fixed={
        "use_proprio": True,
        # If this field had a value, each observation would select its own domain, which Sinew does not support.
        "domain_feature_key": None,
        "tokenizer_padding_side": "right",
        # The model reads the padding tokens, so the padded length changes the result.
        "pad_language_to": "max_length",
    },
    # "dtype" is the dtype of LeRobot's computation. The other fields only concern training.
    unread="dtype freeze_language_encoder train_policy_transformer train_soft_prompts"
    " optimizer_soft_prompt_lr_scale optimizer_soft_prompt_warmup_lr_scale",
    steps={
        "tokenizer_processor": replace(
            TOKENIZER, fields={**TOKENIZER.fields, "padding": ("max_length",)}, ordered=False
        ),
        SCALE: ProcessorStep(fields=OF_ALL_VIEWS),
        TO_FLOAT: ProcessorStep(
            "validate_range", fields=OF_ALL_VIEWS, absent="Sinew still scales frames to the range 0 to 1"
        ),
        NORMALIZE: ProcessorStep(
            fields=OF_ALL_VIEWS,
            absent="the model reads frames in the range 0 to 1, without ImageNet's mean and standard deviation, which"
            " X-VLA was pretrained with. If this policy was trained with them (the hub's xvla-libero was), add the step"
            " to the file",
        ),
        DOMAIN: ProcessorStep(
            "domain_id",
            ordered=False,
            absent="the file does not define the domain (robot) of the policy; using domain 0. Pass --embodiment N for"
            " another domain",
        ),
        "normalizer_processor": NORMALIZER,
    },
    after={
        "unnormalizer_processor": NORMALIZER,
        ROTATE: ProcessorStep(fields={"expected_action_dim": (10, 20)}),
        "device_processor": DEVICE,
    },
)
# The parts of an action after the ROTATE step, with their sizes and normalisations.
POSE = (
    VectorPart("position", 3, Normalization("identity")),
    VectorPart("rotation", 3, Normalization("identity"), rotation=True),
    VectorPart("gripper", 1, Normalization("identity")),
)
# Number of values in the action of one arm. POSE_DIM counts the values after the ROTATE step, and UNROTATED_DIM the
# values before this step.
POSE_DIM, UNROTATED_DIM = 7, 10


class ActionSpace(NamedTuple):
    """How the outputs of the model become an action, for one value of ``action_mode``.

    Attributes:
        model: Number of values that the head outputs.
        real: Number of these values that the robot has. 0 if the configuration defines the number.
        grippers: Indices of gripper values. The model does not read them. A sigmoid is applied to its outputs for them.
    """

    model: int
    real: int
    grippers: tuple[int, ...] = ()


# The action spaces of LeRobot's action_hub.py.
SPACES = {
    "ee6d": ActionSpace(20, 20, (9, 19)),
    "joint": ActionSpace(14, 14, (6, 13)),
    "agibot_ee6d": ActionSpace(20, 20),
    "franka_joint7": ActionSpace(20, 7),
    "auto": ActionSpace(0, 0),
    "so101_bimanual": ActionSpace(20, 12, (5, 11)),
}

FLORENCE = r"model\.vlm\."
BLOCK = rf"{FLORENCE}vision_tower\.blocks\.(\d+)\.(\d+)\."
OURS = r"vision.stages.\1.blocks.\2."
LAYER = rf"{FLORENCE}language_model\.(?:model\.)?encoder\.layers\.(\d+)\."
RULES = (
    Rule(rf"{FLORENCE}vision_tower\.convs\.(\d+)\.(?:proj|conv)\.(.+)", (r"vision.stages.\1.conv.\2",)),
    Rule(rf"{FLORENCE}vision_tower\.convs\.(\d+)\.norm\.(.+)", (r"vision.stages.\1.norm.\2",)),
    *(
        rule
        for number, kind, attention in (
            (0, "spatial_block", "window_attn"),
            (1, "channel_block", "channel_attn"),
        )
        for rule in (
            Rule(rf"{BLOCK}{kind}\.conv([12])\.(?:fn\.dw\.)?(weight|bias)", (rf"{OURS}{number}.conv\3.\4",)),
            Rule(rf"{BLOCK}{kind}\.(?:{attention}\.norm|norm1)\.(.+)", (rf"{OURS}{number}.norm1.\3",)),
            Rule(rf"{BLOCK}{kind}\.(?:ffn\.norm|norm2)\.(.+)", (rf"{OURS}{number}.norm2.\3",)),
            Rule(rf"{BLOCK}{kind}\.{attention}\.(?:fn\.)?proj\.(.+)", (rf"{OURS}{number}.attn.o_proj.\3",)),
            Rule(rf"{BLOCK}{kind}\.ffn\.(?:fn\.net\.)?fc([12])\.(.+)", (rf"{OURS}{number}.mlp.fc\3.\4",)),
        )
    ),
    *renames(rf"{BLOCK}spatial_block\.window_attn\.(?:fn\.)?", OURS + "0.attn.", "qkv={qkv}_proj"),
    Rule(rf"{BLOCK}channel_block\.channel_attn\.(?:fn\.)?qkv\.(.+)", (rf"{OURS}1.attn.qkv.\3",)),
    Rule(rf"{FLORENCE}image_projection", ("connector.proj.weight",), transpose),
    Rule(rf"{FLORENCE}multi_modal_projector\.image_projection\.weight", ("connector.proj.weight",)),
    Rule(rf"{FLORENCE}(?:multi_modal_projector\.)?image_proj_norm\.(.+)", (r"connector.norm.\1",)),
    Rule(
        rf"{FLORENCE}language_model\.(?:model\.)?encoder\.embed_positions\.weight",
        ("language.places",),
        # Remove the first two rows of BART's position table, which do not belong to any token.
        lambda source: rows(source, 2, source.shape[0] if source.shape else 0),
    ),
    Rule(
        rf"{FLORENCE}language_model\.(?:model\.)?encoder\.layernorm_embedding\.(.+)", (r"language.norm.\1",)
    ),
    *renames(
        LAYER,
        r"language.layers.\1.",
        "self_attn.out_proj=attn.o_proj self_attn=attn self_attn_layer_norm=norm1 fc1=mlp.fc1 fc2=mlp.fc2"
        " final_layer_norm=norm2",
    ),
    *renames(
        r"model\.transformer\.blocks\.(\d+)\.",
        r"layers.\1.",
        "attn.qkv=attn.{qkv}_proj attn.proj=attn.o_proj norm1 norm2 mlp",
    ),
    *renames(r"model\.transformer\.", "", "norm vlm_proj=language_proj aux_visual_proj=view_proj"),
    Rule(r"model\.transformer\.pos_emb", ("places",), lambda source: pick(source, 0)),
)
HEAD = "model.transformer."
# Names of the token table. Only one of these tensors is read.
TABLES = tuple(
    f"model.vlm.language_model.{middle}{name}.weight"
    for middle in ("model.", "")
    for name in ("encoder.embed_tokens", "shared")
)
# The other names in TABLES are copies of the token table.
UNUSED_TENSORS = ("model.vlm.language_model.final_logits_bias", *TABLES)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported X-VLA.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    if not checkpoint.pipelines.steps[PRE]:
        raise ConvertError(
            f"{path / PRE}.json: expected the preprocessing steps, which define the policy's domain, got none. Save"
            " the policy again with LeRobot"
        )
    whose = f"{checkpoint['tokenizer_name']}'s"
    tokenizer = find_tokenizer(options, path / "tokenizer", path, whose=whose)
    if tokenizer.pad_token_id is None:
        raise ConvertError(
            f"{tokenizer.path}: expected a padding token, which the model reads, got none. Pass the checkpoint's"
            " tokenizer with --tokenizer"
        )
    space, image = action_space(checkpoint), image_recipe(checkpoint)
    config = model_config(checkpoint, space, image, tokenizer)
    return Conversion(
        format="lerobot-xvla",
        config=config,
        spec=policy_spec(checkpoint, config, image),
        processing=processing(checkpoint, config, image),
        tokenizer=tokenizer.text,
        tensors=tensors(checkpoint.tensors, config, domain(checkpoint)),
        dead=UNUSED_TENSORS,
        sources=[*checkpoint.files, tokenizer.path],
        notes=tuple(checkpoint.notes),
    )


def action_space(checkpoint: LeRobotCheckpoint) -> ActionSpace:
    """Return the action space that ``action_mode`` in the configuration selects.

    Raises:
        ConvertError: The mode is unknown, or the actions have another size.
    """
    mode, dim = checkpoint["action_mode"], checkpoint.action.dim
    space = SPACES.get(mode.lower()) if isinstance(mode, str) else None
    if space is None:
        raise ConvertError(
            f"{checkpoint.file}: action_mode: expected one of {', '.join(SPACES)}, got {mode!r}"
        )
    if turns(checkpoint):
        real = dim if not space.model else space.real
        if real < UNROTATED_DIM or dim not in (real, POSE_DIM):
            raise ConvertError(
                f"{checkpoint.path / POST}.json: {ROTATE}: expected actions of at least {UNROTATED_DIM} values, got"
                f" {dim} for action_mode {mode!r}"
            )
        if checkpoint.normalization(ACTION, "ACTION").mode != "identity":
            raise ConvertError(
                f"{checkpoint.path / POST}.json: {ROTATE}: expected actions without normalisation"
            )
        dim = real
    if not space.model:
        return ActionSpace(checkpoint.size("max_action_dim", low=dim), dim)
    if dim != space.real:
        raise ConvertError(
            f"{checkpoint.file}: output_features.action: expected {space.real} values for action_mode {mode!r}, got"
            f" {dim}"
        )
    return space


def turns(checkpoint: LeRobotCheckpoint) -> bool:
    """Return True if a step of the postprocessor converts the rotation in an action from six numbers to three."""
    return checkpoint.pipelines.step(POST, ROTATE) is not None


def action_spec(checkpoint: LeRobotCheckpoint) -> VectorSpec:
    action = checkpoint.action
    return VectorSpec(POSE_DIM) if turns(checkpoint) and action.dim != POSE_DIM else action


def domain(checkpoint: LeRobotCheckpoint) -> int:
    """Return the number of the domain (robot) whose weights the bundle has."""
    choice, count = checkpoint.options.embodiment, checkpoint.size("num_domains")
    number = checkpoint.pipelines.config(PRE, DOMAIN).get("domain_id", 0)
    where = f"{checkpoint.path / PRE}.json: {DOMAIN}: domain_id"
    if choice:
        where, number = (
            f"--embodiment {choice}",
            int(choice) if choice.isdecimal() and choice.isascii() else choice,
        )
    if type(number) is not int or not 0 <= number < count:
        raise ConvertError(f"{where}: expected the number of a domain, 0 to {count - 1}, got {number!r}")
    if choice:
        checkpoint.notes[:] = [note for note in checkpoint.notes if f"no step {DOMAIN}" not in note]
    checkpoint.notes.append(f"using domain {number} of {count}; pass --embodiment N for another domain")
    return number


def image_recipe(checkpoint: LeRobotCheckpoint) -> ImageRecipe:
    """Build the recipe that converts a camera frame to the model's pixels.

    LeRobot resizes a frame after the normalisation. Sinew resizes before the normalisation, so the bars have the
    colour of the mean.

    Raises:
        ConvertError: The steps of the preprocessor are not supported.
    """
    steps, pre = checkpoint.pipelines, f"{checkpoint.path / PRE}.json"
    if steps.step(PRE, SCALE) is not None and steps.step(PRE, TO_FLOAT) is None:
        raise ConvertError(f"{pre}: {SCALE}: expected the step {TO_FLOAT} after it, got none")
    if (mode := checkpoint.image_mode()) != "IDENTITY":
        raise ConvertError(f"{pre}: normalizer_processor: expected mode IDENTITY for images, got {mode}")
    normalized = steps.step(PRE, NORMALIZE) is not None
    mean, std = (MEAN, STD) if normalized else ((0.0,) * 3, (1.0,) * 3)
    sides = checkpoint.sides("resize_imgs_with_padding")
    if sides is None:
        height, width = checkpoint.frame_size
        return ImageRecipe(height, width, mean=mean, std=std)
    height, width = sides
    resize_steps: tuple[ImageStep, ...] = (Letterbox(height, width, pad_value=mean if normalized else 0.0),)
    return ImageRecipe(height, width, resize_steps, mean, std)


def vision_config(record: JsonRecord) -> DaViTConfig:
    """Read the sizes of Florence-2's tower from a ``vision_config``.

    Raises:
        ConvertError: A field has an unsupported value.
        ValueError: A size is wrong.
        TypeError: A field has a wrong type.
    """
    widths, kernels = record.get("dim_embed") or record["embed_dim"], tuple(record["patch_size"])
    record.expect(
        mlp_ratio=MLP_RATIO,
        qkv_bias=True,
        in_channels=3,
        activation_function="gelu",
        image_feature_source=["spatial_avg_pool", "temporal_avg_pool"],
        patch_padding=[kernel // 2 for kernel in kernels],
    )
    return DaViTConfig(
        widths=tuple(widths),
        depths=tuple(record["depths"]),
        num_heads=tuple(record["num_heads"]),
        num_groups=tuple(record["num_groups"]),
        kernels=kernels,
        strides=tuple(record["patch_stride"]),
        norms_first=tuple(record["patch_prenorm"]),
        window_size=record["window_size"],
    )


def text_config(record: JsonRecord) -> BlockConfig:
    """Read the sizes of the text encoder from a ``text_config``.

    Raises:
        ConvertError: A field has an unsupported value.
        ValueError: A size is wrong.
    """
    record.expect(activation_function="gelu", scale_embedding=False, normalize_before=False)
    return BlockConfig(
        hidden_size=record["d_model"],
        intermediate_size=record["encoder_ffn_dim"],
        num_layers=record["encoder_layers"],
        num_heads=record["encoder_attention_heads"],
    )


def model_config(
    checkpoint: LeRobotCheckpoint, space: ActionSpace, image: ImageRecipe, tokenizer: TokenizerFiles
) -> XVLAConfig:
    florence = JsonRecord(checkpoint.file, checkpoint.config).part("florence_config")
    width, ratio = checkpoint.size("hidden_size"), checkpoint.number("mlp_ratio", below=1000)
    with checkpoint.named():
        vision, text = vision_config(florence.part("vision_config")), florence.part("text_config")
        grid = vision.grid(image.height, image.width)
        return XVLAConfig(
            vision=vision,
            language=text_config(text),
            head=BlockConfig(
                width, int(width * ratio), checkpoint.size("depth"), checkpoint.size("num_heads")
            ),
            vocab_size=text["vocab_size"],
            rows=grid[0],
            cols=grid[1],
            views=views(checkpoint),
            text_places=text["max_position_embeddings"],
            places=checkpoint.size("max_len_seq"),
            prompt_tokens=checkpoint.max_tokens,
            chunk_size=checkpoint.size("chunk_size"),
            max_state_dim=checkpoint.size("max_state_dim", low=max(space.grippers, default=0) + 1),
            max_action_dim=space.model,
            time_size=checkpoint.size("dim_time"),
            domain_tokens=checkpoint.size("len_soft_prompts", low=0),
            pad_token=tokenizer.pad_token_id or 0,
            grippers=space.grippers,
        )


def views(checkpoint: LeRobotCheckpoint) -> int:
    """Return the number of views that the model reads.

    The features of a saved policy already include its empty cameras, and LeRobot adds ``empty_cameras`` to their number
    once more.
    """
    features = checkpoint["input_features"].values()
    feature_count = sum(feature.get("type") == "VISUAL" for feature in features)
    fixed = checkpoint["num_image_views"]
    camera_count = feature_count + checkpoint.size("empty_cameras", low=0, high=16)
    return max(camera_count, 0 if fixed is None else checkpoint.size("num_image_views", high=64))


def policy_spec(checkpoint: LeRobotCheckpoint, config: XVLAConfig, image: ImageRecipe) -> PolicySpec:
    return checkpoint.policy_spec(
        "xvla",
        config.chunk_size,
        action=action_spec(checkpoint),
        noise_dim=config.max_action_dim,
        solver_steps=checkpoint.size("num_denoising_steps"),
        max_prompt_tokens=config.prompt_tokens,
        resizes_frames=bool(image.steps),
        solver=Solver("renoise"),
    )


def processing(checkpoint: LeRobotCheckpoint, config: XVLAConfig, image: ImageRecipe) -> Processing:
    prompt = PromptRecipe(
        max_tokens=config.prompt_tokens,
        vocab_size=config.vocab_size,
        pad_token_id=config.pad_token,
        padding="max_length",
    )
    if not turns(checkpoint):
        return checkpoint.processing(image, prompt, config)
    return checkpoint.processing(
        image, prompt, config, action_parts=POSE, action_steps=(Threshold((6,), 0.5, -1.0, 1.0),)
    )


def tensors(sources: dict[str, TensorSource], config: XVLAConfig, number: int) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names, with the weights of one domain. Unread tensors keep their names.

    Raises:
        ConvertError: A tensor is missing.
    """
    out, prefix = dict(sources), "model.vlm."
    if not any(name.startswith(f"{prefix}image_") for name in out):
        prefix += "multi_modal_projector."

    def take(name: str) -> TensorSource:
        if name not in out:
            raise ConvertError(f"the tensor {name} is missing in the checkpoint. Use a complete checkpoint")
        return out.pop(name)

    def linear(name: str, size: int) -> tuple[TensorSource, TensorSource]:
        """Return weight [out, in] and bias [out] of a layer that the checkpoint stores for each domain, for the
        bundle's domain."""
        weight, bias = take(f"{HEAD}{name}.fc.weight"), take(f"{HEAD}{name}.bias.weight")
        return transpose(reshape(pick(weight, number), size, -1)), pick(bias, number)

    position = f"{prefix}image_pos_embed." if "projector" not in prefix else f"{prefix}image_position_embed."
    tables = [take(f"{position}{axis}_embeddings.weight") for axis in ("column", "row")]
    temporal = take(f"{prefix}visual_temporal_embed.pos_idx_to_embed")
    results = {
        "connector.places": computed(
            lambda columns, rows, moments: view_places(columns, rows, moments, (config.rows, config.cols)),
            *tables,
            temporal,
        )
    }
    table = next((name for name in TABLES if name in out), TABLES[0])
    results["language.embed_tokens.weight"] = take(table)
    if config.domain_tokens:
        prompts = pick(take(f"{HEAD}soft_prompt_hub.weight"), number)
        results["domain_rows"] = reshape(prompts, config.domain_tokens, -1)
    input_size = config.max_action_dim + config.max_state_dim + config.time_size
    weight, results["action_in_proj.bias"] = linear("action_encoder", input_size)
    results |= shares(weight, config)
    results["action_out_proj.weight"], results["action_out_proj.bias"] = linear(
        "action_decoder", config.head.hidden_size
    )
    for theirs, ours in (("vlm_proj", "language_proj"), ("aux_visual_proj", "view_proj")):
        if f"{HEAD}{theirs}.fc.weight" in out:
            results[f"{ours}.weight"], results[f"{ours}.bias"] = linear(theirs, config.language.hidden_size)
    return apply(out, RULES) | results


def view_places(
    columns: np.ndarray, rows: np.ndarray, moments: np.ndarray, grid: tuple[int, int]
) -> np.ndarray:
    """Return the position embedding of each feature of a view, [rows * cols, C].

    The embedding is that of the column followed by that of the row. The embedding of the only time step is added.

    Args:
        columns: Embeddings of the columns.
        rows: Embeddings of the rows.
        moments: Embeddings of the time steps. Only the first one is used.
        grid: Rows and columns of the features.
    """
    count, across = grid
    both = (
        np.broadcast_to(columns[None, :across], (*grid, columns.shape[1])),
        np.broadcast_to(rows[:count, None], (*grid, rows.shape[1])),
    )
    return (np.concatenate(both, axis=2) + moments[0]).reshape(count * across, -1)


def shares(weight: TensorSource, config: XVLAConfig) -> dict[str, TensorSource]:
    """Split the first layer of the head, which reads actions, state and time, into one layer for each of them, [C, in].

    The columns for grippers become zero.
    """
    sizes = {
        "action_in_proj": config.max_action_dim,
        "state_proj": config.max_state_dim,
        "time_proj": config.time_size,
    }
    out, start = {}, 0
    for name, size in sizes.items():
        grippers = () if name == "time_proj" else config.grippers

        def part(
            x: np.ndarray, start: int = start, size: int = size, zeros: tuple[int, ...] = grippers
        ) -> np.ndarray:
            columns = x[:, start : start + size].copy()
            columns[:, list(zeros)] = 0
            return columns

        out[f"{name}.weight"] = moved(part, weight)
        start += size
    return out
