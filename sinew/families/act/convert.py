"""LeRobot ACT checkpoint -> bundle.

The backbone is named, not described: its widths are those of torchvision's ResNet behind the name. Frames go in at
their own size, which cameras therefore share. What only training reads (the encoder of the latent) is left out, and
frozen batch norms become part of their convolutions.
"""

from __future__ import annotations

import re
from pathlib import Path

from sinew.bundle.schema import ImageRecipe, Processing, VectorPart
from sinew.bundle.writer import TensorSource
from sinew.convert import silent
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import ACTION, STATE, LeRobotCheckpoint, Schema, config_type
from sinew.convert.lerobot.stats import ENVIRONMENT
from sinew.convert.lerobot.steps import NORMALIZER
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.tensors import Rule, apply, computed, constant, reshape, split_qkv
from sinew.core import ConvertError, PolicySpec, VectorSpec
from sinew.families.act.model import ActConfig, view_places
from sinew.layers.resnet import LAYERS, ResNetConfig, folded
from sinew.solvers import SINGLE

NAMES = ("act",)
OPTIONS = ("stats", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
# The second meets zeros alone; the counts of a batch norm say how long it was trained.
DEAD = ("model.vae_encoder", "model.encoder_latent_input_proj.weight")
BACKBONE = "model.backbone."
SCHEMA = Schema(
    defaults={  # LeRobot's configuration_act.py
        "chunk_size": 100,
        "n_action_steps": 100,
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "vision_backbone": "resnet18",
        "pre_norm": False,
        "dim_model": 512,
        "n_heads": 8,
        "dim_feedforward": 3200,
        "feedforward_activation": "relu",
        "n_encoder_layers": 4,
        "n_decoder_layers": 1,
        "temporal_ensemble_coeff": None,
    },
    fixed={"n_obs_steps": 1, "replace_final_stride_with_dilation": False},
    unread=(
        *("pretrained_backbone_weights", "use_vae", "latent_dim", "n_vae_encoder_layers"),
        *("dropout", "kl_weight", "optimizer_lr_backbone"),
    ),
    features=("STATE", "VISUAL", "ENV", "LANGUAGE"),
    steps={"normalizer_processor": NORMALIZER},
)
LAYER = r"model\.((?:en|de)coder)\.layers\.(\d+)\."
RULES = (
    *(
        Rule(
            rf"{LAYER}{theirs}\.in_proj_(weight|bias)",
            tuple(rf"\1.\2.{ours}.{part}_proj.\3" for part in "qkv"),
            split_qkv,
        )
        for theirs, ours in (("self_attn", "attn"), ("multihead_attn", "cross"))
    ),
    Rule(rf"{LAYER}self_attn\.out_proj\.(.+)", (r"\1.\2.attn.o_proj.\3",)),
    Rule(rf"{LAYER}multihead_attn\.out_proj\.(.+)", (r"\1.\2.cross.o_proj.\3",)),
    Rule(rf"{LAYER}linear([12])\.(.+)", (r"\1.\2.mlp.fc\3.\4",)),
    Rule(rf"{LAYER}(norm\d\..+)", (r"\1.\2.\3",)),
    Rule(r"model\.((?:en|de)coder)\.norm\.(.+)", (r"\1_norm.\2",)),
    Rule(r"model\.decoder_pos_embed\.(.+)", (r"queries.\1",)),
    Rule(r"model\.encoder_1d_feature_pos_embed\.(.+)", (r"places.\1",)),
    Rule(r"model\.encoder_robot_state_input_proj\.(.+)", (r"state_proj.\1",)),
    Rule(r"model\.encoder_env_state_input_proj\.(.+)", (r"environment_proj.\1",)),
    Rule(r"model\.encoder_latent_input_proj\.bias", ("latent",)),
    Rule(
        r"model\.encoder_img_feat_input_proj\.weight",  # a convolution of one pixel
        ("connector.weight",),
        lambda source: reshape(source, source.shape[0], -1),
    ),
    Rule(r"model\.encoder_img_feat_input_proj\.bias", ("connector.bias",)),
    Rule(r"model\.action_head\.(.+)", (r"action_proj.\1",)),
)


def recognises(path: Path) -> bool:
    """Return True for a LeRobot directory of this type."""
    return config_type(path) in NAMES


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory, the weights aside. Raises :class:`ConvertError`."""
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    state, environment = vectors(checkpoint)
    config = model_config(checkpoint, state.dim, environment.dim if environment else 0)
    if (decay := checkpoint["temporal_ensemble_coeff"]) is not None:
        checkpoint.notes.append(
            f"temporal_ensemble_coeff={decay}: the robot's loop does that: sinew run --handover ensemble:{decay}"
        )
    return Conversion(
        architecture="act",
        format="lerobot-act",
        config=config,
        spec=policy_spec(checkpoint, config, state, environment),
        processing=processing(checkpoint, config, state, environment),
        tokenizer=silent.TOKENIZER,
        tensors=tensors(checkpoint.tensors, config),
        dead=DEAD,
        sources=checkpoint.files,
        notes=tuple(checkpoint.notes),
    )


def vectors(checkpoint: LeRobotCheckpoint) -> tuple[VectorSpec, VectorSpec | None]:
    """Return the robot's state and that of its environment, which a policy may read beside it."""
    state = checkpoint.vector("input_features", "STATE", STATE)
    if ENVIRONMENT not in checkpoint["input_features"]:
        return state, None
    return state, checkpoint.vector("input_features", "ENV", ENVIRONMENT)


def frame_size(checkpoint: LeRobotCheckpoint) -> tuple[int, int]:
    """Return height and width of the frames, which all cameras share."""
    sizes = {(camera.height, camera.width) for camera in checkpoint.cameras}
    if len(sizes) > 1:
        found = ", ".join(f"{each.name} {each.height} x {each.width}" for each in checkpoint.cameras)
        raise ConvertError(f"{checkpoint.file}: expected cameras of one size, got {found}")
    return sizes.pop()


def model_config(checkpoint: LeRobotCheckpoint, state_dim: int, environment_dim: int) -> ActConfig:
    name = checkpoint["vision_backbone"]
    if name not in LAYERS:
        expected = ", ".join(LAYERS)
        raise ConvertError(f"{checkpoint.file}: vision_backbone: expected one of {expected}, got {name!r}")
    activation = checkpoint["feedforward_activation"]
    if activation not in ("relu", "gelu"):
        raise ConvertError(
            f"{checkpoint.file}: feedforward_activation: expected relu or gelu, got {activation!r}"
        )
    rows, cols = ResNetConfig.grid(*frame_size(checkpoint))
    try:
        return ActConfig(
            vision=ResNetConfig(LAYERS[name]),
            hidden_size=checkpoint.size("dim_model"),
            intermediate_size=checkpoint.size("dim_feedforward"),
            num_heads=checkpoint.size("n_heads"),
            encoder_layers=checkpoint.size("n_encoder_layers"),
            decoder_layers=checkpoint.size("n_decoder_layers"),
            rows=rows,
            cols=cols,
            chunk_size=checkpoint.size("chunk_size"),
            max_state_dim=state_dim + environment_dim,
            max_action_dim=checkpoint.vector("output_features", "ACTION", ACTION).dim,
            environment_dim=environment_dim,
            pre_norm=bool(checkpoint["pre_norm"]),
            activation=activation,
        )
    except (ValueError, TypeError) as error:
        raise ConvertError(f"{checkpoint.file}: {error}") from None


def policy_spec(
    checkpoint: LeRobotCheckpoint, config: ActConfig, state: VectorSpec, environment: VectorSpec | None
) -> PolicySpec:
    if environment is not None:
        names = environment.names or tuple(f"environment_{index}" for index in range(environment.dim))
        state = VectorSpec(config.max_state_dim, (*state.names, *names) if state.names else ())
        checkpoint.notes.append(
            f"{ENVIRONMENT}: the last {environment.dim} of the state's {state.dim} numbers"
        )
    return PolicySpec(
        architecture="act",
        name=checkpoint.name,
        cameras=checkpoint.cameras,
        state=state,
        action=checkpoint.vector("output_features", "ACTION", ACTION),
        chunk_size=config.chunk_size,
        noise_dim=0,
        solver_steps=1,
        resizes_frames=False,
        control_hz=checkpoint.control_hz,
        n_action_steps=checkpoint.size("n_action_steps", high=config.chunk_size),
        solver=SINGLE,
        **silent.SPEC,
    )


def processing(
    checkpoint: LeRobotCheckpoint, config: ActConfig, state: VectorSpec, environment: VectorSpec | None
) -> Processing:
    height, width = frame_size(checkpoint)
    own = checkpoint.normalization(STATE, "STATE")
    parts: tuple[VectorPart, ...] = ()
    if environment is not None:
        other = checkpoint.normalization(ENVIRONMENT, "ENV")
        parts = VectorPart("state", state.dim, own), VectorPart("environment", environment.dim, other)
    return Processing(
        image=ImageRecipe(height, width, **checkpoint.image_scales()),
        prompt=silent.PROMPT,
        state=own,
        action=checkpoint.normalization(ACTION, "ACTION"),
        padded_state_dim=config.max_state_dim,
        padded_action_dim=config.max_action_dim,
        all_cameras=True,  # none was missing in training
        state_parts=parts,
    )


def tensors(found: dict[str, TensorSource], config: ActConfig) -> dict[str, TensorSource]:
    """Return the model's tensors under its names, and those that are not read under upstream's."""
    table = view_places(config.rows, config.cols, config.hidden_size).numpy()
    return apply(convolutions(found), RULES) | {"view_places": constant("view_places", table)}


def convolutions(found: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the tensors with each convolution of the backbone and the batch norm behind it as one of ours."""
    out = dict(found)
    norms = [name.removesuffix(".running_var") for name in found if name.endswith(".running_var")]
    for norm in (name for name in norms if name.startswith(BACKBONE)):
        out.pop(f"{norm}.num_batches_tracked", None)
        # bn1 follows conv1, downsample.1 follows downsample.0
        conv = re.sub(r"bn(\d)$", r"conv\1", norm) if norm[-3:-1] == "bn" else norm[:-1] + "0"
        parts = (
            f"{conv}.weight",
            *(f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")),
        )
        if missing := [part for part in parts if part not in out]:
            raise ConvertError(f"{missing[0]} is missing")
        sources = [out.pop(part) for part in parts]
        name = backbone_name(conv.removeprefix(BACKBONE))
        out[f"{name}.weight"] = computed(lambda *values: folded(*values)[0], *sources)
        out[f"{name}.bias"] = computed(lambda *values: folded(*values)[1], *sources)
    return out


def backbone_name(theirs: str) -> str:
    """conv1 -> vision.stem; layer1.0.conv1 -> vision.stages.0.0.conv1; layer2.0.downsample.0 -> ...shortcut."""
    if theirs == "conv1":
        return "vision.stem"
    stage, block, part, *_ = theirs.removeprefix("layer").split(".")
    return f"vision.stages.{int(stage) - 1}.{block}.{'shortcut' if part == 'downsample' else part}"
