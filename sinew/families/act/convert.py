"""Convert LeRobot ACT checkpoints to bundles.

The configuration names the backbone. The backbone has the widths of torchvision's ResNet with this name. Frames are
read at their own size, and the sizes of the cameras may differ. The encoder that computes the latent vector is
omitted, because only training uses it. Frozen batch norms are merged into the weights of the convolutions before
them.
"""

from __future__ import annotations

import math
from pathlib import Path

from sinew.bundle.schema import ImageRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert import silent
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.steps import NORMALIZER
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.resnet import backbone
from sinew.convert.tensors import Rule, apply, constant, renames, reshape
from sinew.core import ConvertError
from sinew.families.act.model import ActConfig, all_view_places
from sinew.layers.resnet import LAYERS, ResNetConfig
from sinew.models.solvers import SINGLE

NAMES = ("act",)
recognises = of_type(*NAMES)
OPTIONS = ("stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
# The VAE encoder is only for training. The weight of the latent's projection is always multiplied by a latent of zeros.
UNUSED_TENSORS = ("model.vae_encoder", "model.encoder_latent_input_proj.weight")
BACKBONE = "model.backbone."
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_act.py.
    defaults={
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
    unread="pretrained_backbone_weights use_vae latent_dim n_vae_encoder_layers dropout kl_weight"
    " optimizer_lr_backbone",
    features=("STATE", "VISUAL", "ENV", "LANGUAGE"),
    steps={"normalizer_processor": NORMALIZER},
)
RULES = (
    *renames(
        r"model\.((?:en|de)coder)\.layers\.(\d+)\.",
        r"\1.\2.",
        "self_attn.in_proj=attn.{qkv}_proj self_attn.out_proj=attn.o_proj linear1=mlp.fc1 linear2=mlp.fc2"
        " multihead_attn.in_proj=cross.{qkv}_proj multihead_attn.out_proj=cross.o_proj norm1 norm2 norm3",
    ),
    *renames(
        r"model\.",
        "",
        "encoder.norm=encoder_norm decoder.norm=decoder_norm decoder_pos_embed=queries action_head=action_proj"
        " encoder_1d_feature_pos_embed=places encoder_robot_state_input_proj=state_proj"
        " encoder_env_state_input_proj=environment_proj",
    ),
    Rule(r"model\.encoder_latent_input_proj\.bias", ("latent",)),
    Rule(
        # This weight belongs to a convolution with a 1 x 1 kernel.
        r"model\.encoder_img_feat_input_proj\.weight",
        ("connector.weight",),
        lambda source: reshape(source, source.shape[0], -1),
    ),
    Rule(r"model\.encoder_img_feat_input_proj\.bias", ("connector.bias",)),
)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported ACT.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    state = checkpoint.whole_state()
    image = checkpoint.unresized_frames()
    config = model_config(checkpoint, state.dim, image)
    decay = checkpoint["temporal_ensemble_coeff"]
    if decay is not None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not math.isfinite(decay):
            raise ConvertError(
                f"{checkpoint.file}: temporal_ensemble_coeff: expected a number or null, got {decay!r}"
            )
        checkpoint.notes.append(
            f"temporal_ensemble_coeff={decay}: `sinew run` and `sinew eval` merge chunks in this way (ensemble:{decay})"
        )
    return Conversion(
        format="lerobot-act",
        config=config,
        spec=checkpoint.policy_spec(
            "act",
            config.chunk_size,
            state=state,
            noise_dim=0,
            solver_steps=1,
            resizes_frames=False,
            solver=SINGLE,
            temporal_ensemble=None if decay is None else float(decay),
            **silent.SPEC,
        ),
        processing=checkpoint.processing(
            image,
            silent.PROMPT,
            config,
            all_cameras=True,  # the policy was always trained with frames of all cameras
            state_parts=checkpoint.state_parts(),
        ),
        tokenizer=silent.TOKENIZER,
        tensors=tensors(checkpoint.tensors, config),
        dead=UNUSED_TENSORS,
        sources=checkpoint.files,
        notes=tuple(checkpoint.notes),
    )


def model_config(checkpoint: LeRobotCheckpoint, state_dim: int, image: ImageRecipe) -> ActConfig:
    name = checkpoint.one_of("vision_backbone", *LAYERS)
    activation = checkpoint.one_of("feedforward_activation", "relu", "gelu")
    rows, cols = ResNetConfig.grid(image.height, image.width)
    with checkpoint.named():
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
            max_action_dim=checkpoint.action.dim,
            environment_dim=checkpoint.environment_dim,
            pre_norm=bool(checkpoint["pre_norm"]),
            activation=activation,
            frames=image.sizes,
        )


def tensors(sources: dict[str, TensorSource], config: ActConfig) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names."""
    table = all_view_places(config).numpy()
    return apply(backbone(sources, BACKBONE, "vision."), RULES) | {
        "view_places": constant("view_places", table)
    }
