"""Convert LeRobot Diffusion Policy checkpoints to bundles.

The configuration contains the name of the backbone, and the name of the noise scheduler in the library diffusers. The
configuration must contain all settings of the noise scheduler that change the actions, because some defaults differ
between LeRobot's versions. Batch norms are merged into the weights of the convolutions before them. The solver also
computes actions for the earlier observation steps, and the chunk begins at the newest observation step.
"""

from __future__ import annotations

from pathlib import Path

from sinew.bundle.schema import ImageRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert import silent
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.frames import whole_frames
from sinew.convert.lerobot.noise_levels import NOISE_LEVELS, noise_levels
from sinew.convert.lerobot.steps import NORMALIZER
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.resnet import keypoint_encoder
from sinew.convert.tensors import apply, join_conditioned, renames
from sinew.core import MAX_HISTORY, ConvertError, PolicySpec, VectorSpec
from sinew.families.diffusion.model import DiffusionConfig
from sinew.families.diffusion.unet import UNetConfig
from sinew.layers.resnet import LAYERS, ResNetConfig

NAMES = ("diffusion",)
recognises = of_type(*NAMES)
OPTIONS = ("stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
# Channels per group of the group norms that replace the backbone's batch norms.
GROUP = 16
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_diffusion.py.
    defaults={
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
        "vision_backbone": "resnet18",
        "resize_shape": None,
        "crop_ratio": 1.0,
        "spatial_softmax_num_keypoints": 32,
        "kernel_size": 5,
        "n_groups": 8,
        "diffusion_step_embed_dim": 128,
        "use_film_scale_modulation": True,
        **NOISE_LEVELS,
    },
    required="n_obs_steps horizon n_action_steps crop_shape use_group_norm down_dims"
    " use_separate_rgb_encoder_per_camera",
    unread="drop_n_last_frames crop_is_random pretrained_backbone_weights do_mask_loss_for_padding scheduler_name",
    features=("STATE", "VISUAL", "ENV", "LANGUAGE"),
    steps={"normalizer_processor": NORMALIZER},
)
ENCODER, UNET = "diffusion.rgb_encoder.", "diffusion.unet."
# Names of the modules of a U-Net stage, in LeRobot and in Sinew. N stands for the number of a block in LeRobot, and B
# for its name in Sinew.
INSIDE = (
    "N.conv1.block.0=B.conv1.conv N.conv1.block.1=B.conv1.norm N.conv2.block.0=B.conv2.conv"
    " N.conv2.block.1=B.conv2.norm N.residual_conv=B.shortcut "
)
BLOCKS = INSIDE.replace("N", "0").replace("B", "first") + INSIDE.replace("N", "1").replace("B", "second")
RULES = (
    *renames(
        r"diffusion\.unet\.",
        "",
        "diffusion_step_encoder.1=time_in diffusion_step_encoder.3=time_out final_conv.0.block.0=unet.end.conv"
        " final_conv.0.block.1=unet.end.norm final_conv.1=unet.out",
    ),
    *renames(r"diffusion\.unet\.mid_modules\.", "unet.middle.", BLOCKS),
    *renames(r"diffusion\.unet\.(down|up)_modules\.(\d+)\.", r"unet.\1.\2.", f"{BLOCKS}2=resample"),
)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported Diffusion Policy.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    state, image = checkpoint.whole_state(), whole_frames(checkpoint, *image_sizes(checkpoint))
    config = model_config(checkpoint, state.dim, image)
    return Conversion(
        format="lerobot-diffusion",
        config=config,
        spec=policy_spec(checkpoint, config, state, image),
        processing=checkpoint.processing(
            image,
            silent.PROMPT,
            config,
            all_cameras=True,  # the policy was always trained with frames of all cameras
            state_parts=checkpoint.state_parts(),
            first_row=config.history - 1,
        ),
        tokenizer=silent.TOKENIZER,
        tensors=tensors(checkpoint.tensors, config),
        sources=checkpoint.files,
        notes=tuple(checkpoint.notes),
    )


def image_sizes(checkpoint: LeRobotCheckpoint) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return (size of a frame after the resize, size after the crop). None in place of the size of a step that is
    not used."""
    resize_size, crop_size = checkpoint.sides("resize_shape"), checkpoint.sides("crop_shape")
    if resize_size is not None:
        if (ratio := checkpoint.number("crop_ratio")) > 1:
            raise ConvertError(f"{checkpoint.file}: crop_ratio: expected at most 1, got {ratio:g}")
        crop_size = (int(resize_size[0] * ratio), int(resize_size[1] * ratio)) if ratio < 1 else None
    return resize_size, crop_size


def model_config(checkpoint: LeRobotCheckpoint, state_dim: int, image: ImageRecipe) -> DiffusionConfig:
    name = checkpoint.one_of("vision_backbone", *LAYERS)
    rows, cols = ResNetConfig.grid(image.height, image.width)
    cameras, history = len(checkpoint.cameras), checkpoint.size("n_obs_steps", high=MAX_HISTORY)
    widths = checkpoint["down_dims"]
    if not isinstance(widths, list):
        raise ConvertError(f"{checkpoint.file}: down_dims: expected a list of widths, got {widths!r}")
    with checkpoint.named():
        return DiffusionConfig(
            vision=ResNetConfig(LAYERS[name], group=GROUP if checkpoint["use_group_norm"] else 0),
            unet=UNetConfig(
                widths=tuple(checkpoint.size("down_dims", width) for width in widths),
                kernel_size=checkpoint.size("kernel_size"),
                num_groups=checkpoint.size("n_groups"),
                scales=bool(checkpoint["use_film_scale_modulation"]),
            ),
            cameras=cameras,
            encoders=cameras if checkpoint["use_separate_rgb_encoder_per_camera"] else 1,
            history=history,
            rows=rows,
            cols=cols,
            keypoints=checkpoint.size("spatial_softmax_num_keypoints"),
            time_size=checkpoint.size("diffusion_step_embed_dim"),
            chunk_size=checkpoint.size("horizon"),
            max_state_dim=history * state_dim,
            max_action_dim=checkpoint.action.dim,
            environment_dim=checkpoint.environment_dim,
        )


def policy_spec(
    checkpoint: LeRobotCheckpoint, config: DiffusionConfig, state: VectorSpec, image: ImageRecipe
) -> PolicySpec:
    rows = checkpoint.size("n_action_steps", high=config.chunk_size - config.history + 1)
    return checkpoint.policy_spec(
        "diffusion",
        rows,
        state=state,
        noise_dim=config.max_action_dim,
        noise_rows=config.chunk_size,
        resizes_frames=bool(image.steps),
        history=config.history,
        **noise_levels(checkpoint),
        **silent.SPEC,
    )


def tensors(sources: dict[str, TensorSource], config: DiffusionConfig) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names."""
    out = dict(sources)
    for number, prefix in enumerate(encoders(sources, config)):
        out = keypoint_encoder(out, prefix, f"vision.{number}.")
    return apply(films(out, config), RULES)


def encoders(sources: dict[str, TensorSource], config: DiffusionConfig) -> list[str]:
    """Return the prefix of the tensor names of each image encoder.

    If one encoder reads all cameras, its name contains no number. If there is only one camera, its encoder may have a
    number.
    """
    numbered = any(name.startswith(f"{ENCODER}0.") for name in sources)
    return [f"{ENCODER}{number}." if numbered else ENCODER for number in range(config.encoders)]


def films(sources: dict[str, TensorSource], config: DiffusionConfig) -> dict[str, TensorSource]:
    """Join the FiLM layers of all blocks into one layer for the time and one for the condition, in the order of the
    blocks.

    Raises:
        ConvertError: The layer of a block is missing.
    """
    stages = len(config.unet.widths)
    places = [f"down_modules.{stage}.{block}" for stage in range(stages) for block in range(2)]
    places += ["mid_modules.0", "mid_modules.1"]
    places += [f"up_modules.{stage}.{block}" for stage in range(stages - 1) for block in range(2)]
    layers = [f"{UNET}{place}.cond_encoder.1" for place in places]
    out, (time, condition), bias = join_conditioned(
        sources, layers, (config.time_size, config.condition_size)
    )
    return out | {"time_film.weight": time, "film.weight": condition, "film.bias": bias}
