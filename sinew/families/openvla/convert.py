"""Convert OpenVLA, OpenVLA-OFT and VLA-Adapter checkpoints to bundles.

All three have ``model_type: openvla``. The files next to the weights distinguish them: OpenVLA has no head, OFT has an
MLP head, and the weights of VLA-Adapter contain action queries. OFT with discrete parallel decoding, which predicts
action tokens, has no head either. So the user must request it (``--set decoding=parallel``). No file contains the
number of cameras, the chunk length or the kind of statistics. They follow from the sizes of the head and the state
projector (``ROBOTS``), or from options.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert import widths
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions, Setting
from sinew.convert.read.files import directory_config, named
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply
from sinew.convert.tokenizer_files import TokenizerFiles, find_tokenizer
from sinew.core import CameraSpec, ConvertError, PolicySpec, VectorSpec
from sinew.families.openvla.adapter import AdapterConfig
from sinew.families.openvla.model import OFTConfig, OpenVLAConfig
from sinew.families.openvla.prismatic import (
    BLOCK,
    BLOCKS,
    ENDS,
    LANGUAGE,
    OPENVLA,
    PROJECTOR,
    ROBOTS,
    STATE,
    PrismaticCheckpoint,
    RobotConstants,
    towers,
)
from sinew.layers.decoder import DecoderConfig
from sinew.models.solvers import SINGLE
from sinew.steps.image.base import ImageRecipe, ImageStep
from sinew.steps.image.centre_crop import CentreCrop
from sinew.steps.image.jpeg import Jpeg
from sinew.steps.image.resize import Resize
from sinew.steps.prompt.base import PromptStep
from sinew.steps.prompt.last import Last
from sinew.steps.prompt.lower import Lower
from sinew.steps.prompt.template import sentence

NAMES = ("openvla",)
# Fields of config.json that are not read. They describe how the model was built before training, or only other forms of
# the policy need them.
UNREAD_FIELDS = (
    "arch_specifier hf_llm_id llm_backbone_id llm_max_length n_action_bins norm_stats pad_to_multiple_of pad_token_id"
    " use_fused_vision_backbone vision_backbone_id"
)
SUPPORTED_VALUES = {
    "image_resize_strategy": "resize-naive",
    "output_projector_states": False,
    "timm_override_act_layers": [None, None],
}
OPTIONS = ("tokenizer", "stats", "stats_key", "cameras")
SETTINGS = {
    "center_crop": Setting(
        bool, "true crops each frame to its middle 90 %, as after fine-tuning with augmentation (default)"
    ),
    "chunk": Setting(int, "actions per chunk, if the sizes of the head do not identify the robot", 1, 1024),
    "statistics": Setting(
        str, "kind of the statistics of actions and state", values=("bounds_q99", "bounds")
    ),
    "decoding": Setting(
        str,
        "decoding of action tokens without a head: in_turn (OpenVLA) or parallel (OFT, a whole chunk at once)",
        values=("in_turn", "parallel"),
    ),
}
# Largest number of tokens of the instruction with the prompt around it. OpenVLA itself has no limit.
MAX_TOKENS = 128
CROP_AREA = 0.9
# Side of LIBERO's and Bridge's frames in pixels. Frames of other sizes are resized.
FRAME = 256
COMMON_TEXT = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
TEXT = {
    "llama": {**COMMON_TEXT, "intermediate_size": 11008, "vocab_size": 32000},
    "qwen2": {**COMMON_TEXT, "intermediate_size": 22016, "vocab_size": 151936},
}
LM_HEAD = Rule(r"language_model\.lm_head\.weight", ("lm_head.weight",))
QUESTION = "What action should the robot take to {prompt}?"
CHAT = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)


def recognises(path: Path) -> bool:
    """Return True for a directory whose configuration names OpenVLA with a supported language model."""
    config = directory_config(path)
    text = config.get("text_config")
    return config.get("model_type") == "openvla" and isinstance(text, dict) and text.get("model_type") in TEXT


class HeadPart(NamedTuple):
    """The parts of a conversion that differ between OpenVLA, OpenVLA-OFT and VLA-Adapter.

    Attributes:
        architecture: Name of the architecture.
        config: Configuration of the model.
        rules: Rules for the tensors of the head.
        dead: Prefixes of the names of tensors that inference does not use.
        prompt: Steps of the prompt.
    """

    architecture: str
    config: Any
    rules: list[Rule]
    dead: tuple[str, ...]
    prompt: tuple[PromptStep, ...]


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    return assemble(PrismaticCheckpoint(path, options))


def assemble(checkpoint: PrismaticCheckpoint) -> Conversion:
    """Collect everything that a bundle needs from an opened checkpoint.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    path, options = checkpoint.path, checkpoint.options
    action, state = checkpoint.part("action_head"), checkpoint.part("proprio_projector")
    adapter = "action_queries.weight" in checkpoint.tensors
    if not adapter and checkpoint.config.part("text_config").get("model_type") == "qwen2":
        raise ConvertError(
            f"{path}: config.json names VLA-Adapter's Qwen2, but the tensor 'action_queries.weight' is missing, so the"
            " weights belong to another policy; use the config.json and the weights of one checkpoint"
        )
    parallel = decodes_in_parallel(checkpoint, bool(action), bool(state), adapter)
    action_dim, state_dim = sizes(checkpoint, action, state)
    robot = robot_of(path, options, action_dim, state_dim, bool(action) or parallel)

    text = checkpoint.text_config(TEXT)
    vision, rules, dead = towers(checkpoint)
    shared = {
        "vision": vision,
        "projector": (4 * sum(t.hidden_size for t in vision), text["hidden_size"]),
        "language": decoder(text),
        "vocab_size": text["vocab_size"],
        "chunk_size": robot.chunk,
        "max_action_dim": action_dim,
        "max_state_dim": state_dim,
    }
    tokenizer = find_tokenizer(options, path, whose="the checkpoint's")
    with named(checkpoint.config.path):
        if adapter:
            head = adapter_head(checkpoint, action, shared)
        elif action or parallel:
            head = oft_head(checkpoint, tokenizer, shared, parallel)
        else:
            head = token_head(checkpoint, tokenizer, shared)
    if adapter and len(robot.cameras) != 2:
        raise ConvertError(
            f"--cameras: VLA-Adapter's head requires 2 cameras, got {len(robot.cameras)}; pass the names of both"
        )

    weights = checkpoint.tensors | action | state
    rules = [*rules, *head.rules, *LANGUAGE, *PROJECTOR, *ENDS, *BLOCKS, *STATE]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else checkpoint.config["pad_token_id"]
    return Conversion(
        format=checkpoint.format,
        config=head.config,
        spec=spec(checkpoint, head, robot),
        processing=processing(checkpoint, head, robot, pad, image_recipe(checkpoint)),
        tokenizer=tokenizer.text,
        tensors=apply(weights, rules),
        dead=(*dead, *head.dead),
        sources=[*dict.fromkeys(checkpoint.files), tokenizer.path],
        notes=(
            *notes(checkpoint, robot),
            *decoding_notes(bool(action), bool(state), parallel),
            *checkpoint.config.leftover(UNREAD_FIELDS, SUPPORTED_VALUES),
        ),
    )


def decodes_in_parallel(checkpoint: PrismaticCheckpoint, action: bool, state: bool, adapter: bool) -> bool:
    """Return True if the policy decodes the action tokens of a whole chunk at once.

    Args:
        checkpoint: The opened checkpoint.
        action: True if the checkpoint has an action head.
        state: True if the checkpoint has a state projector.
        adapter: True for VLA-Adapter.

    Raises:
        ConvertError: A required head is missing, or ``--set decoding`` is used with a head.
    """
    path, options = checkpoint.path, checkpoint.options
    decoding = options.setting("decoding", None)
    if action or adapter:
        if decoding is not None:
            raise ConvertError(
                f"--set decoding={decoding}: {path} has an action head, so it does not decode tokens. Omit the option"
            )
        if not action:
            raise ConvertError(
                f"{path}: no action_head--*.pt next to the weights. Copy this file of the checkpoint to the folder"
            )
        return False
    if state and decoding != "parallel":
        raise ConvertError(
            f"{path}: no action_head--*_checkpoint.pt next to the weights. Copy this file of the checkpoint to the"
            " folder, or pass --set decoding=parallel if the policy was trained to decode action tokens in parallel"
        )
    if decoding is None and (chunk := options.setting("chunk", 1)) > 1:
        raise ConvertError(
            f"--set chunk={chunk}: {path} has no action head; pass --set decoding=parallel for OFT's action tokens"
        )
    return bool(decoding == "parallel")


def decoding_notes(action: bool, state: bool, parallel: bool) -> tuple[str, ...]:
    """Return notes for the user that state how the actions of a policy without an action head are decoded."""
    if action:
        return ()
    if not parallel:
        return (
            "no action head: OpenVLA's tokens, one after the other; pass --set decoding=parallel for OFT's whole chunk",
        )
    state_note = (
        "; the state is read, as in training, although OFT's evaluation code ignores it without a head"
    )
    return (f"no action head: OFT's action tokens, a whole chunk at once{state_note if state else ''}",)


def notes(checkpoint: PrismaticCheckpoint, robot: RobotConstants) -> tuple[str, ...]:
    """Return notes about facts that are not in the files, but were inferred or set by the user."""
    return (
        f"statistics {checkpoint.statistics[0]!r} ({robot.mode})",
        f"{robot.chunk} actions per chunk; cameras {', '.join(robot.cameras)}{camera_reason(checkpoint)}",
    )


def camera_reason(checkpoint: PrismaticCheckpoint) -> str:
    """Return a text for a note: it states how the number and the names of the cameras were found. The training
    project's files do not contain the cameras."""
    if checkpoint.options.cameras:
        return ", as set by --cameras"
    return ", the training project's cameras for a robot of these sizes; pass yours in their order with --cameras"


def sizes(
    checkpoint: PrismaticCheckpoint, action: dict[str, TensorSource], state: dict[str, TensorSource]
) -> tuple[int, int]:
    """Return (size of an action, size of the state), read from the tensors of the head and the state projector."""
    try:
        state_dim = state["fc1.weight"].shape[1] if state else 0
        if action:
            return action["model.fc2.weight"].shape[0], state_dim
        key, table = checkpoint.statistics
        return len(table["action"]["q01"]), state_dim
    except (KeyError, IndexError, TypeError) as error:
        raise ConvertError(
            f"{checkpoint.path}: the head, the projector or the statistics have no {error}; use a complete checkpoint"
        ) from None


def robot_of(
    path: Path, options: ConvertOptions, action_dim: int, state_dim: int, chunked: bool
) -> RobotConstants:
    robot = ROBOTS.get((action_dim, state_dim)) if chunked else OPENVLA
    if robot is None and not all(options.setting(name, None) for name in ("chunk", "statistics")):
        raise ConvertError(
            f"{path}: no known robot has actions of {action_dim} values and states of {state_dim} values; pass --set"
            " chunk=N, --set statistics=bounds_q99 (or bounds) and --cameras"
        )
    robot = robot or OPENVLA
    return replace(
        robot,
        chunk=options.setting("chunk", robot.chunk),
        mode=options.setting("statistics", robot.mode),
        cameras=options.cameras or robot.cameras,
    )


def decoder(text: JsonRecord) -> DecoderConfig:
    qwen = text["model_type"] == "qwen2"
    text.expect(hidden_act="silu")
    text.expect(**{"use_sliding_window": False} if qwen else {"attention_bias": False, "mlp_bias": False})
    with named(f"{text.path}: text_config"):
        return widths.decoder(text, rope_theta=text["rope_theta"], qkv_bias=qwen)


def openvla_prompt(tokenizer: TokenizerFiles) -> tuple[PromptStep, ...]:
    """Return OpenVLA's training prompt. The single space at its end is a separate token (29871 in Llama's
    tokenizer).
    """
    first = Tokenizer.from_str(tokenizer.text).encode("In:").ids[:1]
    if first != [tokenizer.token_id("<s>")]:
        raise ConvertError(
            f"{tokenizer.path}: expected a tokenizer that begins a text with <s>, got token {first}"
        )
    return (*sentence(f"In: {QUESTION}\nOut:"), Last(tokenizer.token_id("\u2581")))


def oft_head(
    checkpoint: PrismaticCheckpoint, tokenizer: TokenizerFiles, shared: dict[str, Any], tokens: bool
) -> HeadPart:
    stop = tokenizer.token_id("</s>")
    if tokens:
        config = OFTConfig(**shared, stop_token=stop, **action_tokens(checkpoint, shared))
        return HeadPart("openvla_oft", config, [LM_HEAD], (), openvla_prompt(tokenizer))
    config = OFTConfig(**shared, stop_token=stop)
    return HeadPart("openvla_oft", config, [], ("language_model.lm_head.",), openvla_prompt(tokenizer))


def token_head(
    checkpoint: PrismaticCheckpoint, tokenizer: TokenizerFiles, shared: dict[str, Any]
) -> HeadPart:
    config = OpenVLAConfig(**shared, **action_tokens(checkpoint, shared))
    return HeadPart("openvla", config, [LM_HEAD], (), openvla_prompt(tokenizer))


def action_tokens(checkpoint: PrismaticCheckpoint, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration that map action tokens to the bins of action values."""
    return {
        "action_bins": checkpoint.config["n_action_bins"],
        "action_tokens_end": shared["vocab_size"] - checkpoint.config["pad_to_multiple_of"],
    }


def adapter_head(
    checkpoint: PrismaticCheckpoint, action: dict[str, TensorSource], shared: dict[str, Any]
) -> HeadPart:
    if shared["max_state_dim"] == 0:
        raise ConvertError(
            f"{checkpoint.path}: no proprio_projector--*.pt next to the weights. VLA-Adapter's head reads the state,"
            " so copy this file of the checkpoint to the folder"
        )
    rotary = "model.mlp_resnet_blocks.0.k_self.weight" in action
    queries = checkpoint.tensors["action_queries.weight"].shape[0]
    config = AdapterConfig(**shared, num_queries=queries, rotary=rotary)
    to = r"head.blocks.\1."
    rules = [
        Rule(BLOCK + "gating_factor", (f"{to}gate",)),
        Rule(BLOCK + r"([qo]_proj\..*)", (rf"{to}\2",)),
        Rule(BLOCK + r"([kv])_(self|task)\.(.*)", (rf"{to}\2_\3.\4",)),
        Rule(BLOCK + r"([kv])_adapter\.(.*)", (rf"{to}\2_query.\3",)),
        # In the first version of VLA-Adapter's head, its own tokens, the action queries and the views share one
        # projection.
        Rule(
            BLOCK + r"([kv])_proj\.(.*)",
            tuple(rf"{to}\2_{source}.\3" for source in ("self", "query", "task")),
            lambda source: (source,) * 3,
        ),
        Rule(BLOCK + r"film_gen\..*", (r"film_gen.\g<0>",)),
    ]
    return HeadPart("vla_adapter", config, rules, ("film_gen.", "language_model.lm_head."), sentence(CHAT))


def spec(checkpoint: PrismaticCheckpoint, head: HeadPart, robot: RobotConstants) -> PolicySpec:
    return PolicySpec(
        architecture=head.architecture,
        name=checkpoint.name,
        cameras=tuple(CameraSpec(name, FRAME, FRAME) for name in robot.cameras),
        state=VectorSpec(head.config.max_state_dim),
        action=VectorSpec(
            head.config.max_action_dim, units=checkpoint.action_units(head.config.max_action_dim)
        ),
        chunk_size=robot.chunk,
        noise_dim=0,
        solver_steps=1,
        max_prompt_tokens=MAX_TOKENS,
        solver=SINGLE,
        embodiment=checkpoint.statistics[0],
    )


def processing(
    checkpoint: PrismaticCheckpoint, head: HeadPart, robot: RobotConstants, pad: int, image: ImageRecipe
) -> Processing:
    action_dim, state_dim = head.config.max_action_dim, head.config.max_state_dim
    # The first version of OpenVLA does not add the epsilon of 1e-8.
    eps = 0.0 if head.architecture == "openvla" else 1e-8
    action, action_parts = checkpoint.normalization("action", action_dim, robot.mode, eps, clip=False)
    # The training project ignores the mask of the state's statistics.
    state, _ = (
        checkpoint.normalization("proprio", state_dim, robot.mode, eps, clip=True, masked=False)
        if state_dim
        else (Normalization("identity"), ())
    )
    return Processing(
        image=image,
        prompt=PromptRecipe(
            max_tokens=MAX_TOKENS,
            vocab_size=head.config.vocab_size,
            pad_token_id=pad,
            steps=(Lower(), *head.prompt),
        ),
        state=state,
        action=action,
        action_parts=action_parts,
        padded_state_dim=state_dim,
        padded_action_dim=action_dim,
        all_cameras=True,
    )


def image_recipe(checkpoint: PrismaticCheckpoint) -> ImageRecipe:
    """Build the image recipe. Frames of another size go through JPEG and a lanczos3 resize. Then the centre is cropped.

    Each tower has its own normalisation.
    """
    height, width = checkpoint.config["image_sizes"]
    record = checkpoint.preprocessor()
    with named(f"{record.path}: tvf_normalize_params"):
        groups = record["tvf_normalize_params"][: len(checkpoint.config["timm_model_ids"])]
        mean, std = (tuple(float(x) for group in groups for x in group[name]) for name in ("mean", "std"))
    steps = image_steps(height, width, checkpoint.options)
    return ImageRecipe(height, width, mean=mean, std=std, steps=steps)


def image_steps(height: int, width: int, options: ConvertOptions) -> tuple[ImageStep, ...]:
    steps: tuple[ImageStep, ...] = (
        Jpeg(other_sizes=True),
        Resize(height, width, method="lanczos3", other_sizes=True),
    )
    if not options.setting("center_crop", True):
        return steps
    return (*steps, CentreCrop(height, width, area=CROP_AREA))
