"""Convert LeRobot MolmoAct2 checkpoints to bundles.

The checkpoint's configuration does not describe the network. The network's configuration, the tokenizer and the image
processor are in the folder or repository that ``checkpoint_path`` names, or in the folder of ``--vlm``. The weights in
that folder are not read, because LeRobot writes all weights into the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.schema import ImageRecipe, Normalization, Processing, PromptRecipe, VectorPart
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.stats import ACTION, STATE
from sinew.convert.lerobot.steps import DEVICE, NORMALIZER, POST, PRE, ProcessorStep
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply, constant, join, renames, reshape, split, split_qkv, transpose
from sinew.convert.tokenizer_files import TokenizerFiles, find_model_dir, find_tokenizer
from sinew.convert.widths import decoder, rope_theta, tower
from sinew.core import CameraSpec, ConvertError
from sinew.families.molmoact2.model import SOLVER, ActionExpertConfig, ConnectorConfig, MolmoAct2Config
from sinew.layers.vit import ViTConfig
from sinew.steps.image.resize import Resize
from sinew.steps.prompt.base import PromptStep
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.marker import Marker
from sinew.steps.prompt.state_tokens import StateTokens
from sinew.steps.prompt.task import TaskPrompt
from sinew.steps.prompt.text import Text
from sinew.steps.vector.affine import Affine
from sinew.steps.vector.base import VectorStep
from sinew.steps.vector.bounds import ValueBounds

NAMES = ("molmoact2",)
recognises = of_type(*NAMES)
OPTIONS = ("vlm", "tokenizer", "stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
FILES = "config.json processor_config.json tokenizer*.json vocab.json merges.txt"
PACK = "molmoact2_pack_inputs"
TO_MODEL, TO_ROBOT = "molmoact2_state_frame_transform", "molmoact2_action_frame_transform"
MODES = "discrete action tokens are not supported, because Sinew computes only the action expert"
FRAME = ProcessorStep("joint_signs joint_offsets")
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_molmoact2.py.
    defaults={
        "checkpoint_path": "allenai/MolmoAct2",
        "chunk_size": 30,
        "n_action_steps": 30,
        "setup_type": "",
        "control_mode": "",
        "image_keys": [],
        "normalize_language": True,
        "add_setup_tokens": True,
        "add_control_tokens": True,
        "num_state_tokens": 256,
        "max_sequence_length": None,
        "num_inference_steps": None,
        "joint_signs": None,
        "joint_offsets": None,
        "inference_action_mode": "continuous",
        "lora_rank": 64,
        "lora_alpha": 16,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    },
    # The default of action_mode differs between LeRobot 0.6.1 and later versions.
    required="action_mode",
    fixed={"expected_max_action_dim": 32, "mask_action_dim_padding": True},
    # The tokenizer of discrete actions is not needed. The statistics of norm_tag and the mask of normalize_gripper are
    # in the files of the processors.
    unread="checkpoint_revision checkpoint_force_download discrete_action_tokenizer discrete_generation_max_steps"
    " norm_tag norm_stats_path normalize_gripper num_flow_timesteps flow_matching_cutoff flow_matching_time_offset"
    " flow_matching_time_scale flow_matching_beta_alpha flow_matching_beta_beta enable_inference_cuda_graph"
    " per_episode_seed eval_seed enable_lora_vlm enable_lora_action_expert train_mode_vlm lora_dropout"
    " lora_bias enable_knowledge_insulation freeze_embedding train_action_expert_only model_dtype dtype"
    " llm_residual_dropout softmax_auxiliary_loss softmax_auxiliary_loss_scale discrete_loss_token_weighting"
    " optimizer_vit_lr optimizer_connector_lr optimizer_action_expert_lr dataset_feature_names",
    steps={
        TO_MODEL: FRAME,
        "molmoact2_masked_normalizer": replace(NORMALIZER, stands_for="normalizer_processor"),
        "molmoact2_clamp_normalized": ProcessorStep("normalization_masks", required=True),
        PACK: ProcessorStep(
            "checkpoint_path checkpoint_revision checkpoint_force_download action_mode discrete_action_tokenizer"
            " image_keys allow_image_key_fallback setup_type control_mode normalize_language add_setup_tokens"
            " add_control_tokens num_state_tokens max_sequence_length chunk_size env_action_dim",
            fields={"max_action_dim": (32,)},
            required=True,
        ),
    },
    adapters_inside=True,
    after={
        "molmoact2_clamp_action": ProcessorStep(required=True),
        "molmoact2_masked_unnormalizer": replace(NORMALIZER, stands_for="unnormalizer_processor"),
        TO_ROBOT: FRAME,
        "device_processor": DEVICE,
    },
)
# Entries of the network's configuration that do not change the actions.
UNREAD_FIELDS = (
    "add_setup_tokens add_control_tokens attention_dropout bos_token_id pad_token_id depth_mode dropout attn_dropout"
    " embedding_dropout residual_dropout image_feature_dropout initializer_range float32_attention"
    " max_position_embeddings max_action_horizon n_obs_steps norm_stats_filename num_action_tokens num_depth_codes"
    " num_depth_tokens num_state_tokens tie_word_embeddings use_frame_special_tokens flow_matching_beta_alpha"
    " flow_matching_beta_beta flow_matching_cutoff flow_matching_time_offset flow_matching_time_scale"
    " action_expert_depth_gate_init_bias action_expert_depth_gate_per_layer action_end_token_id"
    " action_output_token_id action_token_start_id depth_end_token_id depth_output_token_id depth_start_token_id"
    " depth_token_start_id frame_end_token_id frame_start_token_id image_col_id image_end_token_id image_high_res_id"
    " image_low_res_id image_start_token_id low_res_image_start_token_id state_end_token_id state_start_token_id"
    " state_token_start_id max_action_dim qk_norm_type rope_parameters action_start_token_id"
)
# Constants in LeRobot's code. LeRobot rejects prompts with more tokens than max_tokens() computes from these numbers.
TOKENS_OF_VIEW, TOKENS_OF_PROMPT, MULTIPLE = 196, 80 + 32 + 32, 64
# The tokens of a view. All of them attend to each other.
PATCH, COLUMN, START, END = "<im_patch>", "<im_col>", "<im_start>", "<im_end>"
OTHERS = "<low_res_im_start>", "<frame_start>", "<frame_end>", "<im_low>"
QUESTION = (
    " Given these, what action should the robot take to complete the task?<|im_end|>\n<|im_start|>assistant\n"
)
MODEL = r"model\.model\."
TABLE = "model.model.transformer.wte."


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported MolmoAct2.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    check_modes(checkpoint)
    name = str(checkpoint["checkpoint_path"])
    home = find_model_dir(name, options.vlm, path, "--vlm", FILES)
    return conversion(checkpoint, home, find_tokenizer(options, home, whose=f"{name}'s"), "lerobot-molmoact2")


def conversion(
    checkpoint: LeRobotCheckpoint, home: Path, tokenizer: TokenizerFiles, file_format: str
) -> Conversion:
    """Read the network's configuration in the folder ``home``, and convert the checkpoint.

    Raises:
        ConvertError: The checkpoint is not a supported MolmoAct2.
    """
    network = JsonRecord(home / "config.json")
    processor = JsonRecord(home / "processor_config.json")
    pictures = processor.part("image_processor")
    parts = {each: network.part(f"{each}_config") for each in ("vit", "adapter", "text", "action_expert")}
    config = model_config(checkpoint, network, parts, pictures, tokenizer)
    cameras = ordered(checkpoint)
    prompt = prompt_recipe(checkpoint, processor, config, tokenizer, len(cameras))
    usual_steps = network["flow_matching_num_steps"]
    sources = [*checkpoint.files, network.path, processor.path, tokenizer.path]
    return Conversion(
        format=file_format,
        config=config,
        spec=checkpoint.policy_spec(
            "molmoact2",
            config.chunk_size,
            noise_dim=config.max_action_dim,
            solver=SOLVER,
            solver_steps=checkpoint.size(
                "num_inference_steps", checkpoint["num_inference_steps"] or usual_steps
            ),
            max_prompt_tokens=prompt.max_tokens,
            cameras=cameras,
        ),
        processing=processing(checkpoint, image_recipe(checkpoint, pictures, config.vision), prompt, config),
        tokenizer=tokenizer.text,
        tensors=tensors(checkpoint, config),
        dead=("model.lm_head.", "model.model.transformer.rotary_emb.inv_freq"),
        sources=list(dict.fromkeys(sources)),
        notes=(
            *checkpoint.notes,
            *(note for each in (network, *parts.values()) for note in each.leftover(UNREAD_FIELDS)),
        ),
    )


def check_modes(checkpoint: LeRobotCheckpoint) -> None:
    """Reject checkpoints whose actions are text tokens.

    Raises:
        ConvertError: The checkpoint is such a checkpoint.
    """
    for key in ("action_mode", "inference_action_mode"):
        if checkpoint[key] == "discrete":
            raise ConvertError(f'{checkpoint.file}: {key}="discrete": {MODES}')
    checkpoint.one_of("action_mode", "continuous", "both")
    if checkpoint["inference_action_mode"] not in (None, "continuous"):
        checkpoint.one_of("inference_action_mode", "continuous")


def ordered(checkpoint: LeRobotCheckpoint) -> tuple[CameraSpec, ...]:
    """Return the cameras that the policy reads, in the order in which the prompt has their views.

    Raises:
        ConvertError: The step that packs the inputs names a camera that the configuration lacks.
    """
    keys = checkpoint.pipelines.config(PRE, PACK).get("image_keys") or checkpoint["image_keys"]
    by_slot = {camera.slot or camera.name: camera for camera in checkpoint.cameras}
    if not keys:
        return checkpoint.cameras
    slots = [str(key).removeprefix("observation.images.") for key in keys]
    if missing := [slot for slot in slots if slot not in by_slot]:
        raise ConvertError(
            f"{checkpoint.path / PRE}.json: image_keys: expected cameras of config.json, {', '.join(by_slot)}, got"
            f" {missing[0]}"
        )
    if rest := [slot for slot in by_slot if slot not in slots]:
        checkpoint.notes.append(
            f"image_keys omits {', '.join(rest)}, so the policy does not read these cameras"
        )
    return tuple(by_slot[slot] for slot in slots)


def model_config(
    checkpoint: LeRobotCheckpoint,
    network: JsonRecord,
    parts: Mapping[str, JsonRecord],
    pictures: JsonRecord,
    tokenizer: TokenizerFiles,
) -> MolmoAct2Config:
    vit, adapter, text, expert = parts.values()
    network.expect(
        add_action_expert=True, action_expert_depth_gate=False, enable_depth_reasoning=False, max_action_dim=32,
        state_format="discrete", mask_action_dim_padding=True,
    )  # fmt: skip
    text.expect(hidden_act="silu", norm_after=False, rope_scaling=None, rope_scaling_layers=None)
    if text["use_qk_norm"]:
        text.expect(qk_norm_type="qwen3")
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConvertError(
            f"{text.path}: {text.name}rope_parameters.rope_type: expected 'default', got {rope['rope_type']!r}"
        )
    expert.expect(
        num_layers=text["num_hidden_layers"],
        context_layer_norm=True,
        qk_norm=True,
        rope=True,
        causal_attn=False,
    )
    outputs, layers = vision_outputs(adapter, vit)
    extra = text["additional_vocab_size"]
    views = [tokenizer.tokenizer.token_to_id(token) for token in (PATCH, COLUMN, START, END, *OTHERS)]
    with checkpoint.named():
        return MolmoAct2Config(
            vision=vision(vit, layers),
            vision_outputs=outputs,
            connector=connector(adapter, pictures, text),
            language=decoder(
                text,
                norm_eps=text["layer_norm_eps"],
                rope_theta=rope_theta(text),
                qkv_bias=text["qkv_bias"],
                qk_norm=text["use_qk_norm"],
            ),
            expert=ActionExpertConfig(
                hidden_size=expert["hidden_size"],
                intermediate_size=rounded_up(
                    int(expert["hidden_size"] * expert["mlp_ratio"]), expert["ffn_multiple_of"]
                ),
                num_heads=expert["num_heads"],
                time_size=expert["timestep_embed_dim"],
                qk_norm_eps=expert["qk_norm_eps"],
            ),
            vocab_size=text["vocab_size"] + extra,
            chunk_size=checkpoint.size("chunk_size"),
            max_state_dim=checkpoint.state.dim,
            max_action_dim=checkpoint.size("max_action_dim", 32, low=checkpoint.action.dim),
            image_token=network["image_patch_id"],
            view_tokens=tuple(token for token in views if token is not None),
            skipped_tokens=skipped(checkpoint, network),
        )


def vision_outputs(adapter: JsonRecord, vit: JsonRecord) -> tuple[tuple[int, ...], int]:
    """Return the indices of the tower's layers that the connector reads, and how many layers are needed for them."""
    count = vit["num_hidden_layers"]
    outputs = tuple(index if index >= 0 else index + count for index in adapter["vit_layers"])
    if not outputs or min(outputs) < 0 or max(outputs) >= count:
        raise ConvertError(
            f"{adapter.path}: {adapter.name}vit_layers: expected layers of {count}, got {adapter['vit_layers']}"
        )
    return outputs, max(outputs) + 1


def vision(vit: JsonRecord, layers: int) -> ViTConfig:
    heads, patch = vit["num_attention_heads"], vit["image_patch_size"]
    vit.expect(
        hidden_act="gelu_pytorch_tanh", num_key_value_heads=heads, head_dim=vit["hidden_size"] // heads
    )
    height, width = vit["image_default_input_size"]
    rows = height // patch
    if height != width or vit["image_num_pos"] != rows**2:
        raise ConvertError(
            f"{vit.path}: {vit.name}image_default_input_size: expected a square whose {vit['image_num_pos']} patches"
            f" have a position each, got {height} x {width} pixels with patches of {patch}"
        )
    return tower(
        vit,
        num_layers=layers,
        image_size=rows * patch,
        patch_size=patch,
        activation="gelu_tanh",
        final_norm=False,
    )


def connector(adapter: JsonRecord, pictures: JsonRecord, text: JsonRecord) -> ConnectorConfig:
    heads, size = adapter["num_attention_heads"], adapter["hidden_size"]
    adapter.expect(
        hidden_act="silu",
        num_key_value_heads=heads,
        head_dim=size // heads,
        text_hidden_size=text["hidden_size"],
    )
    # With "eager", LeRobot's pooling ignores the mask, and attends to padding as to patches whose features are zero.
    kernel = adapter.get("attn_implementation", "eager")
    if kernel not in ("eager", "sdpa"):
        raise ConvertError(
            f"{adapter.path}: {adapter.name}attn_implementation: expected eager or sdpa, got {kernel!r}"
        )
    rows, cols = pictures["pooling_size"]
    mask = adapter.get("pooling_attention_mask", False)
    return ConnectorConfig(
        hidden_size=size,
        intermediate_size=adapter["intermediate_size"],
        num_heads=heads,
        window=(rows, cols),
        query_mask=mask,
        attention_mask=mask and kernel == "sdpa",
    )


def skipped(checkpoint: LeRobotCheckpoint, network: JsonRecord) -> tuple[int, ...]:
    """Return the ids of tokens that the action expert does not read.

    A network that was trained on discrete actions too hides the end token from the expert. LeRobot 0.6.1 follows the
    network's action_mode. The commands of later versions, whose configuration has train_mode_vlm, follow the policy's
    action_mode, as their training does.
    """
    later = "train_mode_vlm" in checkpoint.config
    mode = network["action_mode"] if not later or checkpoint["action_mode"] == "both" else "continuous"
    if mode not in ("both", "continuous"):
        raise ConvertError(f"{network.path}: action_mode: expected both or continuous, got {mode!r}: {MODES}")
    end = network.get("eos_token_id")
    return (end,) if mode == "both" and end is not None else ()


def image_recipe(checkpoint: LeRobotCheckpoint, pictures: JsonRecord, vit: ViTConfig) -> ImageRecipe:
    """Build the steps from a frame to pixels: one resize without the aspect ratio.

    Raises:
        ConvertError: The image processor cuts a frame into several crops, or has other unsupported settings.
    """
    checkpoint.refuse_image_scales()
    side = vit.image_size
    if (mode := pictures.get("crop_mode", "overlap-and-resize-c2")) != "resize":
        raise ConvertError(
            f"{pictures.path}: image_processor.crop_mode: expected 'resize', got {mode!r}. Sinew does not cut frames"
            " into several crops"
        )
    pictures.expect(
        size={"height": side, "width": side}, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        patch_size=vit.patch_size,
    )  # fmt: skip
    return ImageRecipe(side, side, (Resize(side, side, method="bilinear_round"),))


def rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple if multiple > 0 else value


def max_tokens(checkpoint: LeRobotCheckpoint, views: int) -> int:
    """Return the largest number of tokens of a prompt that LeRobot accepts."""
    given = checkpoint.pipelines.config(PRE, PACK).get(
        "max_sequence_length", checkpoint["max_sequence_length"]
    )
    tokens = views * TOKENS_OF_VIEW + TOKENS_OF_PROMPT + checkpoint.state.dim
    return checkpoint.size("max_sequence_length", given or math.ceil(tokens / MULTIPLE) * MULTIPLE)


def prompt_recipe(
    checkpoint: LeRobotCheckpoint,
    processor: JsonRecord,
    config: MolmoAct2Config,
    tokenizer: TokenizerFiles,
    views: int,
) -> PromptRecipe:
    """Build the prompt: views, instruction, setup, state and control mode."""
    pack = checkpoint.pipelines.config(PRE, PACK)

    def entry(key: str) -> Any:
        return pack.get(key, checkpoint[key])

    setup = wrapped("setup", entry("setup_type"), entry("add_setup_tokens"))
    control = wrapped("control", entry("control_mode"), entry("add_control_tokens"))
    levels = checkpoint.size("num_state_tokens", entry("num_state_tokens"))
    for token in ("<state_start>", "<state_end>", "<state_0>", f"<state_{levels - 1}>", "<action_output>"):
        tokenizer.token_id(token)
    begin = tokenizer.config.get("bos_token") or tokenizer.config.get("eos_token")
    begin = begin.get("content") if isinstance(begin, dict) else begin
    if not isinstance(begin, str):
        raise ConvertError(
            f"{tokenizer.path.with_name('tokenizer_config.json')}: expected a bos_token or an eos_token, got none"
        )
    return PromptRecipe(
        max_tokens=max_tokens(checkpoint, views),
        vocab_size=config.vocab_size,
        pad_token_id=tokenizer.pad_token_id or 0,
        steps=(
            *((TaskPrompt(),) if entry("normalize_language") else ()),
            Text(begin),
            *(
                step
                for view in range(views)
                for step in view_steps(processor, config, tokenizer, f"Image {view + 1}" if views > 1 else "")
            ),
            Text("<|im_start|>user\nThe task is to "),
            Instruction(),
            Text(f". The setup is {setup}. The current state of the robot is <state_start>"),
            StateTokens(levels),
            Text(f"<state_end>. The expected control mode is {control}.{QUESTION}<action_output>"),
            # LeRobot hides the tokens after this mark from the action expert.
            Marker(tokenizer.token_id("<action_start>"), 0),
        ),
    )


def wrapped(kind: str, text: str, marks: bool) -> str:
    """Return the description of the setup or of the control mode, between its marks if the policy has such marks."""
    start, end = f"<{kind}_start>", f"<{kind}_end>"
    if not text or not marks or (text.startswith(start) and text.endswith(end)):
        return text
    return f"{start}{text}{end}"


def view_steps(
    processor: JsonRecord, config: MolmoAct2Config, tokenizer: TokenizerFiles, name: str
) -> Iterator[PromptStep]:
    """Yield the steps of one view: its name, and one placeholder per token between marks."""
    columns = processor.get("use_single_crop_col_tokens")
    if columns is None:
        columns = processor.get("image_use_col_tokens", True)
    side = config.vision.side
    rows, cols = (-(-side // size) for size in config.connector.window)
    placeholder = tokenizer.token_text(config.image_token)
    yield Text(name + START)
    for _ in range(rows if columns else 1):
        yield Image(placeholder, cols if columns else rows * cols, config.image_token)
        if columns:
            yield Text(COLUMN)
    yield Text(END)


def processing(
    checkpoint: LeRobotCheckpoint, image: ImageRecipe, prompt: PromptRecipe, config: MolmoAct2Config
) -> Processing:
    """Build the processing. Values that the masks exclude keep their robot units.

    Raises:
        ConvertError: The two pipelines contradict each other.
    """
    state, action = (
        replace(checkpoint.normalization(feature, kind), clip=True)
        for feature, kind in ((STATE, "STATE"), (ACTION, "ACTION"))
    )
    state_parts = masked_parts(checkpoint, STATE, state)
    start, raw = 0, list[int]()
    for part in state_parts:
        raw += range(start, start + part.dim) if part.normalization.mode == "identity" else ()
        start += part.dim
    to_model, to_robot = frame_steps(checkpoint)
    return Processing(
        image=image,
        prompt=prompt,
        state=state,
        action=action,
        state_parts=state_parts,
        action_parts=masked_parts(checkpoint, ACTION, action),
        # LeRobot rejects a value that is not normalised, such as a gripper's, outside this range.
        state_steps=(*to_model, *((ValueBounds(tuple(raw)),) if raw else ())),
        action_steps=to_robot,
        padded_state_dim=config.max_state_dim,
        padded_action_dim=config.max_action_dim,
        all_cameras=True,
    )


def masked_parts(checkpoint: LeRobotCheckpoint, feature: str, whole: Normalization) -> tuple[VectorPart, ...]:
    """Return the parts of a vector that the statistics' mask separates; () if all values are normalised."""
    mask = checkpoint.statistics.get(feature, {}).get("mask")
    if mask is None or whole.mode == "identity" or bool(np.all(mask)):
        return ()
    parts, start = [], 0
    for normalized, run in groupby(bool(value) for value in mask.ravel()):
        end = start + len(list(run))
        stats = {name: values[start:end] for name, values in whole.stats.items()}
        own = replace(whole, stats=stats) if normalized else Normalization("identity", clip=True)
        parts.append(VectorPart("", end - start, own))
        start = end
    return tuple(parts)


def frame_steps(checkpoint: LeRobotCheckpoint) -> tuple[tuple[VectorStep, ...], tuple[VectorStep, ...]]:
    """Return the conversions between the robot's joint frame and the frame of the training data.

    The first tuple converts the state for the model, and the second tuple converts the actions for the robot.

    The state of the model is sign * state + offset. The action of the robot is sign * (action - offset).

    Raises:
        ConvertError: The signs or the offsets are not valid, or have different lengths.
    """
    found = []
    for pipeline, step in ((PRE, TO_MODEL), (POST, TO_ROBOT)):
        record: Mapping[str, Any] = checkpoint.config
        where = str(checkpoint.file)
        if checkpoint.pipelines.there:
            record = checkpoint.pipelines.config(pipeline, step)
            where = f"{checkpoint.path / pipeline}.json: {step}"
        signs, offsets = (record.get(key) or [] for key in ("joint_signs", "joint_offsets"))
        for name, values in (("joint_signs", signs), ("joint_offsets", offsets)):
            if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
                raise ConvertError(f"{where}: {name}: expected a list of numbers, got {values!r:.80}")
        size = min(checkpoint.state.dim, checkpoint.action.dim)
        if len(signs) != len(offsets) or len(signs) > size:
            raise ConvertError(
                f"{where}: expected at most {size} joint_signs and as many joint_offsets, got {len(signs)} and"
                f" {len(offsets)}"
            )
        found.append([(float(sign), float(offset)) for sign, offset in zip(signs, offsets, strict=True)])
    state, action = found
    if state != action:
        checkpoint.notes.append(
            f"{TO_MODEL} and {TO_ROBOT} have different signs or offsets; the bundle follows each of them, as LeRobot"
            " does"
        )
    return (
        tuple(Affine((dim,), *pair) for dim, pair in enumerate(state) if pair != (1.0, 0.0)),
        tuple(
            Affine((dim,), sign, -sign * offset)
            for dim, (sign, offset) in enumerate(action)
            if (sign, offset) != (1.0, 0.0)
        ),
    )


def tensors(checkpoint: LeRobotCheckpoint, config: MolmoAct2Config) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names."""
    out = dict(checkpoint.tensors)
    if missing := [name for name in ("embedding", "new_embedding") if TABLE + name not in out]:
        raise ConvertError(
            f"the tensor {TABLE}{missing[0]} is missing in the checkpoint. Use a complete checkpoint"
        )
    language = config.language
    heads = (language.num_heads, language.num_kv_heads, language.num_kv_heads)
    widths, patch = [count * language.head_dim for count in heads], config.vision.patch_size
    layer = MODEL + r"transformer\.blocks\.(\d+)\."
    vit = MODEL + r"vision_backbone\.image_vit\."
    attention = "wq=q_proj wk=k_proj wv=v_proj wo=o_proj"
    expert = MODEL + r"action_expert\."
    rules = (
        Rule(
            layer + r"self_attn\.att_proj\.(.+)",
            tuple(rf"language.layers.\1.attn.{part}_proj.\2" for part in "qkv"),
            lambda source: split(source, widths),
        ),
        Rule(
            layer + r"mlp\.ff_proj\.weight",
            tuple(rf"language.layers.\1.mlp.{part}_proj.weight" for part in ("up", "gate")),
            lambda source: split(source, (language.intermediate_size,) * 2),
        ),
        *renames(
            layer,
            r"language.layers.\1.",
            "self_attn.attn_out=attn.o_proj self_attn.q_norm=attn.q_norm self_attn.k_norm=attn.k_norm"
            " mlp.ff_out=mlp.down_proj attn_norm=input_norm ff_norm=post_norm",
        ),
        Rule(MODEL + r"transformer\.ln_f\.weight", ("language.norm.weight",)),
        Rule(vit + r"positional_embedding", ("vision.position_embedding.weight",)),
        # A patch has its pixels row by row, with three colours each.
        Rule(
            vit + r"patch_embedding\.weight",
            ("vision.patch_embedding.weight",),
            lambda source: transpose(reshape(source, -1, patch, patch, 3), 0, 3, 1, 2),
        ),
        *renames(vit, "vision.", "patch_embedding"),
        *renames(vit + r"transformer\.resblocks\.(\d+)\.attention\.", r"vision.layers.\1.attn.", attention),
        *renames(
            vit + r"transformer\.resblocks\.(\d+)\.",
            r"vision.layers.\1.",
            "feed_forward.w1=mlp.fc1 feed_forward.w2=mlp.fc2 attention_norm=norm1 ffn_norm=norm2",
        ),
        *renames(MODEL + r"vision_backbone\.image_pooling_2d\.", "connector.pool.", attention),
        *renames(
            MODEL + r"vision_backbone\.image_projector\.",
            "connector.",
            "w1=gate_proj w2=down_proj w3=up_proj",
        ),
        Rule(
            expert + r"blocks\.(\d+)\.self_attn\.qkv\.(.+)",
            tuple(rf"blocks.\1.attn.{part}_proj.\2" for part in "qkv"),
            split_qkv,
        ),
        *renames(
            expert + r"blocks\.(\d+)\.",
            r"blocks.\1.",
            "self_attn.out_proj=attn.o_proj cross_attn.q_proj=cross_q cross_attn.out_proj=cross_o"
            " mlp.gate_proj=gate_proj mlp.up_proj=up_proj mlp.down_proj=down_proj modulation.linear=modulation",
        ),
        *renames(
            expert,
            "",
            "time_embed.1=time_in time_embed.3=time_out action_embed=action_in context_k_proj=context_k"
            " context_v_proj=context_v final_layer.modulation.linear=modulation final_layer.linear=action_out",
        ),
    )
    table = join(out.pop(TABLE + "embedding"), out.pop(TABLE + "new_embedding"))
    count = checkpoint.action.dim
    mask = np.array([1.0] * count + [0.0] * (config.max_action_dim - count), np.float32)
    return apply(out, rules) | {
        "language.embed_tokens.weight": table,
        "action_mask": constant("action_mask", mask),
    }
