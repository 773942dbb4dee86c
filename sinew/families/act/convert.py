"""LeRobot ACT checkpoint -> bundle.

The backbone is named, not described: its widths are those of torchvision's ResNet behind the name. Frames go in at
their own size, which cameras therefore share. What only training reads (the encoder of the latent) is left out, and
frozen batch norms become part of their convolutions.
"""

from __future__ import annotations

from pathlib import Path

from sinew.bundle.schema import ImageRecipe, Processing
from sinew.bundle.writer import TensorSource
from sinew.convert import silent
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import ACTION, STATE, LeRobotCheckpoint, Schema, config_type
from sinew.convert.lerobot.steps import NORMALIZER
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.resnet import backbone
from sinew.convert.tensors import Rule, apply, constant, reshape, split_qkv
from sinew.core import ConvertError, PolicySpec, VectorSpec
from sinew.families.act.model import ActConfig, view_places
from sinew.layers.resnet import LAYERS, ResNetConfig
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
    state = checkpoint.whole_state()
    config = model_config(checkpoint, state.dim)
    if (decay := checkpoint["temporal_ensemble_coeff"]) is not None:
        checkpoint.notes.append(
            f"temporal_ensemble_coeff={decay}: the robot's loop does that: sinew run --handover ensemble:{decay}"
        )
    return Conversion(
        architecture="act",
        format="lerobot-act",
        config=config,
        spec=policy_spec(checkpoint, config, state),
        processing=processing(checkpoint, config),
        tokenizer=silent.TOKENIZER,
        tensors=tensors(checkpoint.tensors, config),
        dead=DEAD,
        sources=checkpoint.files,
        notes=tuple(checkpoint.notes),
    )


def model_config(checkpoint: LeRobotCheckpoint, state_dim: int) -> ActConfig:
    name = checkpoint["vision_backbone"]
    if name not in LAYERS:
        expected = ", ".join(LAYERS)
        raise ConvertError(f"{checkpoint.file}: vision_backbone: expected one of {expected}, got {name!r}")
    activation = checkpoint["feedforward_activation"]
    if activation not in ("relu", "gelu"):
        raise ConvertError(
            f"{checkpoint.file}: feedforward_activation: expected relu or gelu, got {activation!r}"
        )
    rows, cols = ResNetConfig.grid(*checkpoint.frame_size)
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
            max_state_dim=state_dim,
            max_action_dim=checkpoint.vector("output_features", "ACTION", ACTION).dim,
            environment_dim=checkpoint.environment_dim,
            pre_norm=bool(checkpoint["pre_norm"]),
            activation=activation,
        )
    except (ValueError, TypeError) as error:
        raise ConvertError(f"{checkpoint.file}: {error}") from None


def policy_spec(checkpoint: LeRobotCheckpoint, config: ActConfig, state: VectorSpec) -> PolicySpec:
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


def processing(checkpoint: LeRobotCheckpoint, config: ActConfig) -> Processing:
    height, width = checkpoint.frame_size
    return Processing(
        image=ImageRecipe(height, width, **checkpoint.image_scales()),
        prompt=silent.PROMPT,
        state=checkpoint.normalization(STATE, "STATE"),
        action=checkpoint.normalization(ACTION, "ACTION"),
        padded_state_dim=config.max_state_dim,
        padded_action_dim=config.max_action_dim,
        all_cameras=True,  # none was missing in training
        state_parts=checkpoint.state_parts(),
    )


def tensors(found: dict[str, TensorSource], config: ActConfig) -> dict[str, TensorSource]:
    """Return the model's tensors under its names, and those that are not read under upstream's."""
    table = view_places(config.rows, config.cols, config.hidden_size).numpy()
    return apply(backbone(found, BACKBONE, "vision."), RULES) | {
        "view_places": constant("view_places", table)
    }
