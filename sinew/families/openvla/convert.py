"""OpenVLA, OpenVLA-OFT and VLA-Adapter checkpoints -> bundles.

All three say ``model_type: openvla``; what lies beside the weights tells them apart: no head for OpenVLA, an MLP for
OFT, and action queries in the weights of VLA-Adapter. OFT's discrete parallel decoding leaves no head either, so it is
asked for (``--set decoding=parallel``). The number of cameras, the length of a chunk and the choice of statistics are
in no file: they follow from the sizes of the head and the state's projector (``ROBOTS``), or are given.
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
# Fields of config.json that are not read: they describe how the model was built before training, or only other forms of
# the policy need them
ASIDE = (
    "arch_specifier hf_llm_id llm_backbone_id llm_max_length n_action_bins norm_stats pad_to_multiple_of pad_token_id"
    " use_fused_vision_backbone vision_backbone_id"
)
USUAL = {
    "image_resize_strategy": "resize-naive",
    "output_projector_states": False,
    "timm_override_act_layers": [None, None],
}
OPTIONS = ("tokenizer", "stats", "stats_key", "cameras")
SETTINGS = {
    "center_crop": Setting(
        bool, "cut the middle 90 % of each frame, as fine-tuning with augmentation wants (true)"
    ),
    "chunk": Setting(int, "actions per chunk, where the sizes of the head do not tell the robot", 1, 1024),
    "statistics": Setting(str, "of the actions and the state", values=("bounds_q99", "bounds")),
    "decoding": Setting(
        str,
        "of action tokens, where there is no head: OpenVLA's, in turn, or OFT's, a chunk at once",
        values=("in_turn", "parallel"),
    ),
}
MAX_TOKENS = 128  # most tokens of the instruction with its frame; OpenVLA has no limit of its own
CROP_AREA = 0.9
FRAME = 256  # pixels: the side of LIBERO's and Bridge's frames; others are resized
BOTH = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
TEXT = {
    "llama": {**BOTH, "intermediate_size": 11008, "vocab_size": 32000},
    "qwen2": {**BOTH, "intermediate_size": 22016, "vocab_size": 151936},
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
    """What a family's own part contributes."""

    architecture: str
    config: Any
    rules: list[Rule]
    dead: tuple[str, ...]
    prompt: tuple[PromptStep, ...]


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory, the weights aside. Raises :class:`ConvertError`."""
    return assemble(PrismaticCheckpoint(path, options))


def assemble(checkpoint: PrismaticCheckpoint) -> Conversion:
    """Return the conversion of an opened checkpoint. Raises :class:`ConvertError`."""
    path, options = checkpoint.path, checkpoint.options
    action, state = checkpoint.part("action_head"), checkpoint.part("proprio_projector")
    adapter = "action_queries.weight" in checkpoint.tensors
    if not adapter and checkpoint.config.part("text_config").get("model_type") == "qwen2":
        raise ConvertError(
            f"{path}: config.json names VLA-Adapter's Qwen2, and 'action_queries.weight' is missing: these are another"
            " policy's weights"
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
        raise ConvertError(f"--cameras: VLA-Adapter's head is made for 2 cameras, got {len(robot.cameras)}")

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
            *checkpoint.config.leftover(ASIDE, USUAL),
        ),
    )


def decodes_in_parallel(checkpoint: PrismaticCheckpoint, action: bool, state: bool, adapter: bool) -> bool:
    """Return True for action tokens of a whole chunk at once. action, state: whether the head and the state's projector
    are there. Raises :class:`ConvertError` where a head has to be there, or must not be."""
    path, options = checkpoint.path, checkpoint.options
    asked = options.setting("decoding", None)
    if action or adapter:
        if asked is not None:
            raise ConvertError(f"--set decoding={asked}: {path} has an action head, which decodes no tokens")
        if not action:
            raise ConvertError(
                f"{path}: no action_head--*.pt beside the weights; it belongs to the checkpoint"
            )
        return False
    if state and asked != "parallel":
        raise ConvertError(
            f"{path}: no action_head--*_checkpoint.pt beside the weights; it belongs to the checkpoint, unless that"
            " was trained to decode action tokens in parallel: --set decoding=parallel"
        )
    if asked is None and (chunk := options.setting("chunk", 1)) > 1:
        raise ConvertError(
            f"--set chunk={chunk}: {path} has no action head; give --set decoding=parallel for OFT's action tokens"
        )
    return bool(asked == "parallel")


def decoding_notes(action: bool, state: bool, parallel: bool) -> tuple[str, ...]:
    """Return notes about the decoding of a policy without a head."""
    if action:
        return ()
    if not parallel:
        return ("no action head: OpenVLA's tokens, in turn; --set decoding=parallel is OFT's chunk at once",)
    read = "; the state is read, as in training: upstream's evaluation leaves it out without a head"
    return (f"no action head: OFT's action tokens, a chunk at once{read if state else ''}",)


def notes(checkpoint: PrismaticCheckpoint, robot: RobotConstants) -> tuple[str, ...]:
    """Return notes about facts that no file states and that were inferred or set."""
    return (
        f"statistics {checkpoint.statistics[0]!r} ({robot.mode})",
        f"{robot.chunk} actions per chunk; cameras {', '.join(robot.cameras)}{camera_reason(checkpoint)}",
    )


def camera_reason(checkpoint: PrismaticCheckpoint) -> str:
    """Return the origin of the cameras, for a note: the training project's programs count the views, its files do
    not.
    """
    if checkpoint.options.cameras:
        return ", as given"
    return (
        ": upstream's for a robot of these sizes, as no file says them; yours, in their order, with --cameras"
    )


def sizes(
    checkpoint: PrismaticCheckpoint, action: dict[str, TensorSource], state: dict[str, TensorSource]
) -> tuple[int, int]:
    """Return the numbers of an action and of the state, from the tensors of the head and the projector."""
    try:
        state_dim = state["fc1.weight"].shape[1] if state else 0
        if action:
            return action["model.fc2.weight"].shape[0], state_dim
        key, table = checkpoint.statistics
        return len(table["action"]["q01"]), state_dim
    except (KeyError, IndexError, TypeError) as error:
        raise ConvertError(
            f"{checkpoint.path}: the head, the projector or the statistics lack {error}"
        ) from None


def robot_of(
    path: Path, options: ConvertOptions, action_dim: int, state_dim: int, chunked: bool
) -> RobotConstants:
    robot = ROBOTS.get((action_dim, state_dim)) if chunked else OPENVLA
    if robot is None and not all(options.setting(name, None) for name in ("chunk", "statistics")):
        raise ConvertError(
            f"{path}: actions of {action_dim} and states of {state_dim} numbers belong to no robot known here;"
            " give --set chunk=N, --set statistics=bounds_q99 (or bounds) and --cameras"
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
    """The prompt that OpenVLA was trained with; the lone space at its end is a token of its own (29871 in Llama's)."""
    first = Tokenizer.from_str(tokenizer.text).encode("In:").ids[:1]
    if first != [tokenizer.token_id("<s>")]:
        raise ConvertError(f"{tokenizer.path}: expected a tokenizer that begins with <s>, got token {first}")
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
    """Return the token ids of an action's bins."""
    return {
        "action_bins": checkpoint.config["n_action_bins"],
        "action_tokens_end": shared["vocab_size"] - checkpoint.config["pad_to_multiple_of"],
    }


def adapter_head(
    checkpoint: PrismaticCheckpoint, action: dict[str, TensorSource], shared: dict[str, Any]
) -> HeadPart:
    if shared["max_state_dim"] == 0:
        raise ConvertError(
            f"{checkpoint.path}: no proprio_projector--*.pt; VLA-Adapter's head reads the state"
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
        # The first heads share one projection among the three sources.
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
    # OpenVLA's own 1e-8 is missing in its first version.
    eps = 0.0 if head.architecture == "openvla" else 1e-8
    action, action_parts = checkpoint.normalization("action", action_dim, robot.mode, eps, clip=False)
    # Upstream reads no mask of the state.
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
    """Frames of another size go through JPEG and lanczos3; then the middle is cut out, for each tower the same."""
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
