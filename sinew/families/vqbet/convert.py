"""Convert LeRobot VQ-BeT checkpoints to bundles.

The configuration names the backbone. It must contain the settings whose defaults differ between LeRobot's versions.
Tensors that only training reads are omitted: the encoder of the code book, its usage counts, and the position
embeddings after the newest observation step. Batch norms are merged into the weights of the convolutions before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sinew.bundle.schema import ImageRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert import silent
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import STATE, LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.frames import whole_frames
from sinew.convert.lerobot.steps import NORMALIZER
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.resnet import keypoint_encoder
from sinew.convert.tensors import Rule, apply, join, pick, renames, reshape, rows, split, transpose
from sinew.core import MAX_HISTORY, ConvertError
from sinew.families.vqbet.model import SOLVER, TOKENS, VQBeTConfig
from sinew.layers.resnet import LAYERS, ResNetConfig

NAMES = ("vqbet",)
recognises = of_type(*NAMES)
OPTIONS = ("stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
# Channels per group of the group norms that replace the backbone's batch norms.
GROUP = 16
HEAD = "vqbet.action_head."
BOOK = r"vqbet\.action_head\.vqvae_model\.vq_layer\.layers\.(\d+)\._codebook\."
FIRST, SECOND = f"{HEAD}map_to_cbet_preds_primary_bin.0.", f"{HEAD}map_to_cbet_preds_secondary_bin.0."
UNUSED_TENSORS = (
    f"{HEAD}vqvae_model.encoder.",
    f"{HEAD}vqvae_model.discretized",
    f"{HEAD}vqvae_model.vq_layer.freeze_codebook",
    *(
        f"{HEAD}vqvae_model.vq_layer.layers.{layer}._codebook.{part}"
        for layer in range(2)
        for part in ("cluster_size", "embed_avg", "initted")
    ),
    "vqbet.select_target_actions_indices",
)
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_vqbet.py.
    defaults={
        "n_action_pred_token": 3,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
        "vision_backbone": "resnet18",
        "spatial_softmax_num_keypoints": 32,
        "vqvae_n_embed": 16,
        "vqvae_embedding_dim": 256,
        "vqvae_enc_hidden_dim": 128,
        "gpt_block_size": 500,
        "gpt_input_dim": 512,
        "gpt_output_dim": 512,
        "gpt_n_layer": 8,
        "gpt_n_head": 8,
        "gpt_hidden_dim": 512,
        "bet_softmax_temperature": 0.1,
        "sequentially_select": False,
    },
    required="n_obs_steps action_chunk_size crop_shape use_group_norm",
    unread="crop_is_random pretrained_backbone_weights n_vqvae_training_steps dropout mlp_hidden_dim"
    " offset_loss_weight primary_code_loss_weight secondary_code_loss_weight optimizer_vqvae_lr"
    " optimizer_vqvae_weight_decay",
    # The function check_inputs accepts only one camera and the state.
    features=("STATE", "VISUAL", "ENV", "LANGUAGE"),
    steps={"normalizer_processor": NORMALIZER},
)
RULES = (
    *renames(
        r"vqbet\.policy\.transformer\.h\.(\d+)\.",
        r"layers.\1.",
        "ln_1=norm1 attn.c_attn=attn.{qkv}_proj attn.c_proj=attn.o_proj ln_2=norm2 mlp.0=mlp.fc1 mlp.2=mlp.fc2",
    ),
    *renames(
        r"vqbet\.",
        "",
        "rgb_feature_projector.0=image_proj state_projector.0=state_proj policy.transformer.wte=token_proj"
        " policy.transformer.ln_f=norm policy.lm_head=feature_proj action_head.map_to_cbet_preds_bin.0=code_proj"
        " action_head.map_to_cbet_preds_offset.0=offset_proj action_head.vqvae_model.decoder.0=decoder.fc1"
        " action_head.vqvae_model.decoder.2=decoder.fc2 action_head.vqvae_model.decoder.4=decoder.fc3",
    ),
    Rule(r"vqbet\.action_token", ("action_token",), lambda source: reshape(source, -1)),
    Rule(BOOK + "embed", (r"books.\1.weight",), lambda source: pick(source, 0)),
    # This tensor is the causal mask, which Sinew computes itself.
    Rule(r"vqbet\.policy\.transformer\.h\.\d+\.attn\.bias"),
)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported VQ-BeT.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    check_inputs(checkpoint)
    image = whole_frames(checkpoint, None, checkpoint.sides("crop_shape"))
    config = model_config(checkpoint, image)
    return Conversion(
        format="lerobot-vqbet",
        config=config,
        spec=checkpoint.policy_spec(
            "vqbet",
            config.action_rows,
            n_action_steps=config.action_rows,  # LeRobot's action queue executes all actions
            noise_dim=config.max_action_dim,
            noise_rows=config.chunk_size,
            solver_steps=1,
            resizes_frames=bool(image.steps),
            solver=SOLVER,
            history=config.history,
            **silent.SPEC,
        ),
        processing=checkpoint.processing(
            image,
            silent.PROMPT,
            config,
            all_cameras=True,  # the policy was always trained with frames of all cameras
        ),
        tokenizer=silent.TOKENIZER,
        tensors=tensors(checkpoint.tensors, config),
        dead=UNUSED_TENSORS,
        sources=checkpoint.files,
        notes=tuple(checkpoint.notes),
    )


def check_inputs(checkpoint: LeRobotCheckpoint) -> None:
    """Raise :class:`ConvertError` unless the policy reads exactly one camera and the state."""
    names = list(checkpoint["input_features"])
    if len(checkpoint.cameras) != 1 or len(names) != 2 or STATE not in names:
        raise ConvertError(
            f"{checkpoint.file}: input_features: expected one camera and {STATE}, got {', '.join(names)}. With other"
            " inputs LeRobot reads the wrong token of the transformer, so the policy cannot be converted. Train with"
            " one camera and the state"
        )


def model_config(checkpoint: LeRobotCheckpoint, image: ImageRecipe) -> VQBeTConfig:
    name = checkpoint.one_of("vision_backbone", *LAYERS)
    grid = ResNetConfig.grid(image.height, image.width)
    history = checkpoint.size("n_obs_steps", high=MAX_HISTORY)
    longest = checkpoint.size("gpt_block_size")
    # The reference also computes tokens of future actions. No other token attends to them and their outputs are not
    # used, so Sinew omits them.
    if (count := TOKENS * history + checkpoint.size("n_action_pred_token") - 1) > longest:
        raise ConvertError(
            f"{checkpoint.file}: gpt_block_size: expected at least {count}, the number of tokens of {history}"
            f" observation steps, got {longest}"
        )
    with checkpoint.named():
        return VQBeTConfig(
            vision=ResNetConfig(LAYERS[name], group=GROUP if checkpoint["use_group_norm"] else 0),
            history=history,
            rows=grid[0],
            cols=grid[1],
            keypoints=checkpoint.size("spatial_softmax_num_keypoints"),
            token_size=checkpoint.size("gpt_input_dim"),
            hidden_size=checkpoint.size("gpt_hidden_dim"),
            num_layers=checkpoint.size("gpt_n_layer"),
            num_heads=checkpoint.size("gpt_n_head"),
            feature_size=checkpoint.size("gpt_output_dim"),
            codes=checkpoint.size("vqvae_n_embed"),
            code_size=checkpoint.size("vqvae_embedding_dim"),
            decoder_size=checkpoint.size("vqvae_enc_hidden_dim"),
            temperature=checkpoint.number("bet_softmax_temperature"),
            action_rows=checkpoint.size("action_chunk_size"),
            action_dim=checkpoint.action.dim,
            max_state_dim=history * checkpoint.state.dim,
            sequential=bool(checkpoint["sequentially_select"]),
        )


def tensors(source: Mapping[str, TensorSource], config: VQBeTConfig) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names."""
    out = keypoint_encoder(source, "vqbet.rgb_encoder.", "vision.")
    table = "vqbet.policy.transformer.wpe.weight"
    if table in out:
        out["places.weight"] = rows(out.pop(table), 0, TOKENS * config.history)
    if config.sequential:
        out = in_sequence(out, config)
    return apply(out, RULES)


def in_sequence(sources: dict[str, TensorSource], config: VQBeTConfig) -> dict[str, TensorSource]:
    """Join the layers that predict the two codes into one layer.

    The scores of the second code also depend on the first code. This part of the layer becomes a table with one row for
    each first code.

    Raises:
        ConvertError: A tensor is missing.
    """
    out = dict(sources)
    parts = [f"{place}{value}" for place in (FIRST, SECOND) for value in ("weight", "bias")]
    if missing := [part for part in parts if part not in out]:
        raise ConvertError(f"the tensor {missing[0]} is missing in the checkpoint. Use a complete checkpoint")
    weight, bias, wide, second_bias = (out.pop(part) for part in parts)
    second, after = split(wide, (config.feature_size, config.codes), axis=1)
    return out | {
        "code_proj.weight": join(weight, second),
        "code_proj.bias": join(bias, second_bias),
        "after_first.weight": transpose(after),
    }
