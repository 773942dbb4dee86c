"""LeRobot Diffusion Policy checkpoint -> bundle.

Backbones are named, not described, and the sampler is that of diffusers behind its name: what of it changes the actions
stands in the configuration, and defaults that differ between LeRobot's versions are never taken. Batch norms become
part of their convolutions. The solution has rows of the earlier moments too: the chunk begins at the newest one's.
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
from sinew.convert.tensors import apply, join, renames, split
from sinew.core import MAX_HISTORY, ConvertError, PolicySpec, VectorSpec
from sinew.families.diffusion.model import DiffusionConfig
from sinew.families.diffusion.unet import UNetConfig
from sinew.layers.resnet import LAYERS, ResNetConfig

NAMES = ("diffusion",)
recognises = of_type(*NAMES)
OPTIONS = ("stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
GROUP = 16  # channels of a group where the backbone's batch norms were replaced
SCHEMA = Schema(
    defaults={  # LeRobot's configuration_diffusion.py
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
INSIDE = (  # modules of a stage: N is the number of a block there, B its name here
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
    """Read a checkpoint directory, the weights aside. Raises :class:`ConvertError`."""
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
            all_cameras=True,  # none was missing in training
            state_parts=checkpoint.state_parts(),
            first_row=config.history - 1,
        ),
        tokenizer=silent.TOKENIZER,
        tensors=tensors(checkpoint.tensors, config),
        sources=checkpoint.files,
        notes=tuple(checkpoint.notes),
    )


def image_sizes(checkpoint: LeRobotCheckpoint) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return to what size a frame is resized, and to what size it is cut then; None for what is not done."""
    resized, cut = checkpoint.sides("resize_shape"), checkpoint.sides("crop_shape")
    if resized is not None:
        if (ratio := checkpoint.number("crop_ratio")) > 1:
            raise ConvertError(f"{checkpoint.file}: crop_ratio: expected at most 1, got {ratio:g}")
        cut = (int(resized[0] * ratio), int(resized[1] * ratio)) if ratio < 1 else None
    return resized, cut


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


def tensors(found: dict[str, TensorSource], config: DiffusionConfig) -> dict[str, TensorSource]:
    """Return the model's tensors under its names, and those that are not read under upstream's."""
    out = dict(found)
    for number, prefix in enumerate(encoders(found, config)):
        out = keypoint_encoder(out, prefix, f"vision.{number}.")
    return apply(films(out, config), RULES)


def encoders(found: dict[str, TensorSource], config: DiffusionConfig) -> list[str]:
    """Return the prefix of each encoder of views. One for all cameras has no number; that of one camera may have it."""
    numbered = any(name.startswith(f"{ENCODER}0.") for name in found)
    return [f"{ENCODER}{number}." if numbered else ENCODER for number in range(config.encoders)]


def films(found: dict[str, TensorSource], config: DiffusionConfig) -> dict[str, TensorSource]:
    """Return the tensors with what all blocks take of time and condition as one layer of each, in the order in which
    blocks run. Raises :class:`ConvertError` where a block's is missing."""
    stages = len(config.unet.widths)
    places = [f"down_modules.{stage}.{block}" for stage in range(stages) for block in range(2)]
    places += ["mid_modules.0", "mid_modules.1"]
    places += [f"up_modules.{stage}.{block}" for stage in range(stages - 1) for block in range(2)]
    out = dict(found)
    weights: list[TensorSource] = []
    biases: list[TensorSource] = []
    for place in places:
        for value, into in (("weight", weights), ("bias", biases)):
            name = f"{UNET}{place}.cond_encoder.1.{value}"
            if name not in out:
                raise ConvertError(f"{name} is missing")
            into.append(out.pop(name))
    halves = [split(weight, (config.time_size, config.condition_size), axis=1) for weight in weights]
    time, condition = (join(*parts) for parts in zip(*halves, strict=True))
    return out | {"time_film.weight": time, "film.weight": condition, "film.bias": join(*biases)}
