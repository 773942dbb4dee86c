"""Convert LeRobot checkpoints of pi0 and pi0.5 to bundles.

The configuration of a checkpoint names variants of Gemma and contains no widths. ``VARIANTS`` and ``SO400M`` below
contain openpi's widths (``gemma.get_config``, and SigLIP's So400m/14). ``--arch FILE.json`` replaces these widths. The
converter checks the shape of every tensor against the widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from sinew.bundle.schema import ImageRecipe, Processing, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.steps import NORMALIZER, PRE, RELATIVE, TOKENIZER, ProcessorStep
from sinew.convert.lm_head import LM_HEAD_SETTING, PROMPT_SETTINGS, LMHead, lm_head, text_recipe
from sinew.convert.names import rename, replace_prefix
from sinew.convert.options import (
    COMMITTED_ROWS_SETTING,
    IGNORE_SETTING,
    SOLVER_STEPS_SETTING,
    ConvertOptions,
    Setting,
)
from sinew.convert.read.files import named, read_json
from sinew.convert.tokenizer_files import TokenizerFiles, find_tokenizer
from sinew.convert.widths import decoder, tower
from sinew.core import MAX_HISTORY, MAX_HISTORY_STEPS, ConvertError
from sinew.families.pi.model import Memory, PI0Config, PI05Config
from sinew.layers.decoder import DecoderConfig
from sinew.layers.vit import ViTConfig
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.prompt.clean import Clean
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.state import State
from sinew.steps.prompt.suffix import Suffix
from sinew.steps.prompt.template import sentence

WHOSE_TOKENIZER = "PaliGemma's tokenizer.json"
# Epsilon of the norms of Gemma and SigLIP, and base of Gemma's rotary positions. Both are constants in openpi's code.
NORM_EPS, ROPE_THETA = 1e-6, 10_000.0
VARIANTS = {"gemma_300m": (1024, 4096, 18, 8, 1, 256), "gemma_2b": (2048, 16384, 18, 8, 1, 256)}
WIDTHS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
VOCABULARY = 257_152
PI05_PROMPT = "Task: {prompt}, State: {state};\nAction: "
# The prompt of a pi0.5 whose prompt does not contain the state.
PI05_PROMPT_WITHOUT_STATE = "Task: {prompt};\nAction: "
# SUBTASK_PROMPT is the prompt after which pi0.5 generates a subtask. SUBTASK_END is the text between the subtask and
# the actions. Both come from openpi's pull request 942 and from ports of it. No published file contains them.
SUBTASK_PROMPT, SUBTASK_END = "Task: {prompt}, State: {state};\nSubtask: ", ";\nAction: "
# PaliGemma's prompt for a question (Beyer et al. 2024, arXiv 2407.07726, section 3).
QUESTION_PROMPT = "answer en {prompt}\n"
GEMMA: dict[str, Any] = {"norm": "gemma_rms", "activation": "gelu_tanh"}
# Default values of the configuration's keys, from LeRobot's configuration_pi0.py, unchanged from LeRobot 0.4 to 0.6.
DEFAULTS = {
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "chunk_size": 50,
    "n_action_steps": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "num_inference_steps": 10,
    "min_period": 4e-3,
    "max_period": 4.0,
    "use_relative_actions": False,
    "relative_exclude_joints": ["gripper"],
    "action_feature_names": None,
    "image_resolution": [224, 224],
    "empty_cameras": 0,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "tokenizer_max_length": 48,
}
# Configuration keys that Sinew does not need. "dtype" is the dtype of LeRobot's computation.
UNREAD = "dtype time_sampling_beta_alpha time_sampling_beta_beta time_sampling_scale time_sampling_offset"
PREPARE = "pi05_prepare_state_tokenizer_processor_step"
# Defaults of pi0.5's memory options, which exist since LeRobot 0.6.2.
MEMORY: dict[str, Any] = {
    "use_visual_memory": False,
    "use_proprioceptive_memory": False,
    "memory_frames": 6,
    "memory_stride": 30,
    "memory_temporal_attention_every": 4,
}
PI0 = Schema(
    DEFAULTS,
    unread=UNREAD,
    steps={
        "pi0_new_line_processor": ProcessorStep(required=True),
        "tokenizer_processor": TOKENIZER,
        "relative_actions_processor": RELATIVE,
        "normalizer_processor": NORMALIZER,
    },
    adapters=True,
)
PI05 = Schema(
    DEFAULTS
    | {
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
        "tokenizer_max_length": 200,
    },
    # Other functions read these keys: with_memory reads the MEMORY keys, and committed_rows reads the last key.
    unread=" ".join((UNREAD, *MEMORY, "rtc_training_max_delay")),
    steps={
        "relative_actions_processor": RELATIVE,
        "normalizer_processor": NORMALIZER,
        PREPARE: ProcessorStep(
            "max_state_dim", "include_state_in_prompt", {"task_key": ("task",)}, required=True
        ),
        "tokenizer_processor": TOKENIZER,
    },
    adapters=True,
)
# Configuration of pi0 up to LeRobot 0.3 (configuration_pi0.py).
OLD_PI0 = Schema(
    {
        "chunk_size": 50,
        "n_action_steps": 50,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "max_state_dim": 32,
        "max_action_dim": 32,
        "resize_imgs_with_padding": [224, 224],
        "empty_cameras": 0,
        "tokenizer_max_length": 48,
        "num_steps": 10,
    },
    fixed={"adapt_to_pi_aloha": False, "use_delta_joint_actions_aloha": False, "proj_width": 1024},
    unread="attention_implementation",
    steps=PI0.steps,
    adapters=True,
)
OLD_KEYS = ("resize_imgs_with_padding", "num_steps", "proj_width")
PALIGEMMA = "paligemma_with_expert.paligemma.model."
# Names of LeRobot's tensors before August 2025, when LeRobot ported openpi's PyTorch code.
OLD_PREFIXES = (
    ("paligemma_with_expert.paligemma.language_model.lm_head.", "paligemma_with_expert.paligemma.lm_head."),
    ("paligemma_with_expert.paligemma.language_model.model.", f"{PALIGEMMA}language_model."),
    ("paligemma_with_expert.paligemma.vision_tower.", f"{PALIGEMMA}vision_tower."),
    ("paligemma_with_expert.paligemma.multi_modal_projector.", f"{PALIGEMMA}multi_modal_projector."),
)
PREFIXES = (
    ("paligemma_with_expert.paligemma.lm_head.", "lm_head."),
    (f"{PALIGEMMA}vision_tower.vision_model.", "vision."),
    (f"{PALIGEMMA}multi_modal_projector.linear.", "connector."),
    (f"{PALIGEMMA}language_model.", "language."),
    ("paligemma_with_expert.gemma_expert.model.", "expert."),
)
EMBEDDING, HEAD = (
    f"{PALIGEMMA}language_model.embed_tokens.weight",
    "paligemma_with_expert.paligemma.lm_head.weight",
)
# Output layers of the language models. Actions do not depend on them.
UNUSED_TENSORS = ("paligemma_with_expert.paligemma.lm_head.", "paligemma_with_expert.gemma_expert.lm_head.")


NAMES = ("pi0", "pi05")
recognises = of_type(*NAMES)
OPTIONS = ("base", "tokenizer", "arch", "stats", "stats_key", "dataset")
SETTINGS = {
    "solver_steps": SOLVER_STEPS_SETTING,
    "committed_rows": COMMITTED_ROWS_SETTING,
    "ignore": IGNORE_SETTING,
    "lm_head": LM_HEAD_SETTING,
    **PROMPT_SETTINGS,
    "state_in_prompt": Setting(
        bool, "true if the prompt of a pi0.5 with state memory also contains the state"
    ),
}


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported pi0 or pi0.5.
    """
    record = read_json(path / "config.json")
    architecture = str(record.get("type"))
    old_layout = architecture == "pi0" and any(key in record for key in OLD_KEYS)
    schema = OLD_PI0 if old_layout else PI05 if architecture == "pi05" else PI0
    checkpoint = LeRobotCheckpoint(path, options, schema)
    checkpoint.config = dict(schema.defaults) | checkpoint.config
    if old_layout:
        checkpoint.config = current_config(checkpoint.config)
    arch = read_json(options.arch) if options.arch else {}
    config = model_config(architecture, checkpoint.config, arch, str(checkpoint.file))
    history: dict[str, Any] = {}
    if isinstance(config, PI05Config):
        config, history = with_memory(checkpoint, config)
    tokenizer = find_tokenizer(options, path / "tokenizer", path, whose=WHOSE_TOKENIZER)
    weights = tensors(checkpoint.tensors, architecture)
    head = paligemma_head(options, weights, tokenizer)
    config = replace(config, lm_head=head.kind)
    prompt = PI05_PROMPT if state_in_prompt(checkpoint, options, config) else PI05_PROMPT_WITHOUT_STATE
    return Conversion(
        format=f"lerobot-{architecture}",
        config=config,
        spec=checkpoint.policy_spec(
            architecture,
            config.chunk_size,
            noise_dim=config.max_action_dim,
            solver_steps=options.setting("solver_steps", checkpoint["num_inference_steps"]),
            max_prompt_tokens=checkpoint.max_tokens,
            committed_rows=checkpoint.committed_rows(config.chunk_size),
            **history,
        ),
        processing=with_memory_of(
            config,
            with_text(
                processing(
                    checkpoint, config, options.compat, tokenizer.pad_token_id or 0, old_layout, prompt
                ),
                head,
                options,
                architecture == "pi05",
            ),
        ),
        tokenizer=tokenizer.text,
        tensors=weights,
        rename=lambda name: rename(name, PREFIXES),
        dead=head.dead,
        sources=[*checkpoint.files, *([options.arch] if options.arch else []), tokenizer.path],
        notes=(*checkpoint.notes, *head.notes),
        widths_assumed=options.arch is None,
    )


def paligemma_head(
    options: ConvertOptions, weights: dict[str, TensorSource], tokenizer: TokenizerFiles
) -> LMHead:
    """Find PaliGemma's language head. In the original models, its weight is the same tensor as the token table."""
    return lm_head(options, weights, HEAD, EMBEDDING, tokenizer, "<eos>", UNUSED_TENSORS, tied=True)


def with_text(recipe: Processing, head: LMHead, options: ConvertOptions, subtasks: bool) -> Processing:
    """Add the prompts for text generation to a processing recipe, if the bundle contains the language head.

    Args:
        recipe: The processing recipe.
        head: The language head.
        options: The user's options, which may replace the prompts.
        subtasks: True if the language model was trained to generate subtasks (pi0.5).
    """
    prompt = recipe.prompt
    if not head.kind:
        return recipe
    state = next((step for step in prompt.steps if isinstance(step, State)), None)
    before = tuple(step for step in prompt.steps if isinstance(step, Clean))
    subtask_prompts = (
        {"subtask": SUBTASK_PROMPT, "action": SUBTASK_END} if subtasks and state is not None else {}
    )
    text = text_recipe(options, before, state, question=QUESTION_PROMPT, **subtask_prompts)
    return replace(recipe, prompt=replace(prompt, eos_token_id=head.end, text=text))


def with_memory_of(config: PI0Config, recipe: Processing) -> Processing:
    """Adapt a processing recipe to a model with memory, which reads several observation steps. The recipe of another
    model is returned unchanged.

    Each observation step has a state and the frames of all cameras. LeRobot masks empty cameras, so the recipe
    contains no empty cameras.
    """
    if not isinstance(config, PI05Config) or config.memory is None:
        return recipe
    return replace(
        recipe,
        padded_state_dim=config.memory.moments * config.max_state_dim,
        all_cameras=True,
        empty_cameras=0,
        pad_missing_cameras=False,
    )


def current_config(old: dict[str, Any]) -> dict[str, Any]:
    """Convert the configuration of LeRobot's first pi0 (until August 2025) to the current keys."""
    try:
        width, height = old["resize_imgs_with_padding"]
        return old | {
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
            "image_resolution": [height, width],
            "num_inference_steps": old["num_steps"],
            "min_period": 4e-3,
            "max_period": 4.0,
        }
    except (KeyError, TypeError, ValueError):
        raise ConvertError(
            "config.json: expected the fields of a LeRobot pi0 configuration. Save the checkpoint again with LeRobot"
        ) from None


def tensors(sources: dict[str, TensorSource], architecture: str) -> dict[str, TensorSource]:
    """Return a dict of the weights, with openpi's names.

    LeRobot adds the prefix ``model.``. Early pi0 checkpoints name the action-time MLP ``time_mlp``. If the token table
    and the head are the same tensor, checkpoints store it under the name of the head.
    """
    weights = gemma_tensors(sources)
    if architecture == "pi0":
        weights = {
            f"action_{name}" if name.startswith("time_mlp_") else name: source
            for name, source in weights.items()
        }
    return weights


def gemma_tensors(sources: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the weights under openpi's names, including PaliGemma's token table."""
    weights = {
        replace_prefix(name.removeprefix("model."), OLD_PREFIXES): source for name, source in sources.items()
    }
    if EMBEDDING not in weights and HEAD in weights:
        weights[EMBEDDING] = replace(weights[HEAD], name=EMBEDDING)
    return weights


def model_config(architecture: str, record: dict[str, Any], arch: dict[str, Any], where: str) -> PI0Config:
    """Build the model's configuration.

    Args:
        architecture: "pi0" or "pi05".
        record: LeRobot's config.json, or a record with the same keys.
        arch: Content of the file that the user passes with --arch.
        where: Name of the configuration for error messages.
    """
    with named(f"{where} or --arch"):
        return (PI05Config if architecture == "pi05" else PI0Config)(
            **paligemma(record, arch),
            expert=gemma(arch, "expert", record["action_expert_variant"]),
            chunk_size=record["chunk_size"],
            max_state_dim=record["max_state_dim"],
            max_action_dim=record["max_action_dim"],
            min_period=record["min_period"],
            max_period=record["max_period"],
        )


def paligemma(record: Mapping[str, Any], arch: dict[str, Any]) -> dict[str, Any]:
    """Return a dict with the fields ``vision``, ``language`` and ``vocab_size`` of the configuration of a model
    based on PaliGemma."""
    resolution = record.get("image_resolution", [224, 224])
    if resolution[0] != resolution[1]:
        raise ConvertError(
            f"image_resolution: expected a square, which the SigLIP tower requires, got {resolution}"
        )
    vision = SO400M | arch.get("vision", {})
    return {
        "vision": tower(vision, image_size=resolution[0], norm_eps=NORM_EPS),
        "language": gemma(arch, "language", record["paligemma_variant"]),
        "vocab_size": arch.get("language", {}).get("vocab_size", VOCABULARY),
    }


def gemma(arch: dict[str, Any], component: str, variant: str) -> DecoderConfig:
    """Return the sizes of a Gemma variant, or the widths in --arch for this component."""
    if component not in arch and variant not in VARIANTS:
        raise ConvertError(
            f"variant {variant!r} is unknown. Use one of {', '.join(VARIANTS)}, or pass the widths with --arch FILE"
        )
    widths = arch.get(component) or dict(zip(WIDTHS.split(), VARIANTS[variant], strict=True))
    strict = {"num_kv_heads": widths["num_key_value_heads"], "head_dim": widths["head_dim"]}
    return decoder(widths, norm_eps=NORM_EPS, rope_theta=ROPE_THETA, **strict, **GEMMA)


def with_memory(checkpoint: LeRobotCheckpoint, config: PI05Config) -> tuple[PI05Config, dict[str, Any]]:
    """Read the memory options of a pi0.5 checkpoint.

    Returns:
        The configuration with the memory, and the fields of the policy specification that describe the memory.
    """
    settings = MEMORY | checkpoint.config
    for name in ("use_visual_memory", "use_proprioceptive_memory"):
        if not isinstance(settings[name], bool):
            raise ConvertError(f"{checkpoint.file}: {name}: expected true or false, got {settings[name]!r}")
    if not (settings["use_visual_memory"] or settings["use_proprioceptive_memory"]):
        return config, {}

    def size(name: str, high: int) -> int:
        return checkpoint.size(name, settings[name], high=high)

    moments = size("memory_frames", MAX_HISTORY)
    stride = size("memory_stride", MAX_HISTORY_STEPS // max(1, moments - 1))
    every = size("memory_temporal_attention_every", config.vision.num_layers)
    memory = Memory(
        moments,
        len(checkpoint.cameras),
        every if settings["use_visual_memory"] else 0,
        settings["use_proprioceptive_memory"],
    )
    return replace(config, memory=memory), {
        "history": moments,
        "history_stride": stride,
        "history_padding": "mask",
    }


def state_in_prompt(checkpoint: LeRobotCheckpoint, options: ConvertOptions, config: PI0Config) -> bool:
    """Return True if the prompt contains the state.

    LeRobot's pipeline reads this option from its file. With state memory, a policy may be trained with or without the
    state in the prompt, and the file may not record which. ``--set state_in_prompt`` chooses.
    """
    stored_option = checkpoint.pipelines.config(PRE, PREPARE).get("include_state_in_prompt")
    user_option = options.setting("state_in_prompt", None)
    memory = config.memory if isinstance(config, PI05Config) else None
    if memory is None or not memory.states:
        if user_option is not None:
            raise ConvertError(
                "--set state_in_prompt: only a pi0.5 with use_proprioceptive_memory has this option; omit it"
            )
        return stored_option is not False
    if user_option is None and stored_option is None:
        checkpoint.notes.append(
            "the prompt also contains the state, as in LeRobot; if the policy was trained without the state in the"
            " prompt, pass --set state_in_prompt=false"
        )
    return bool(stored_option is not False if user_option is None else user_option)


class Sizes(Protocol):
    """The fields of a configuration that the processing recipe needs, for models based on PaliGemma."""

    @property
    def vision(self) -> ViTConfig: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_state_dim(self) -> int: ...
    @property
    def max_action_dim(self) -> int: ...


def processing(
    checkpoint: LeRobotCheckpoint,
    config: Sizes,
    compat: str,
    pad_id: int,
    old_layout: bool = False,
    prompt_template: str = PI05_PROMPT,
) -> Processing:
    """Build the processing recipe of a policy: the steps for frames, prompt, state and actions.

    Args:
        checkpoint: The opened checkpoint.
        config: Sizes of the model.
        compat: LeRobot version whose behaviour the recipe follows.
        pad_id: Id of the padding token.
        old_layout: True for a pi0 checkpoint of LeRobot up to 0.3.
        prompt_template: Prompt of pi0.5.
    """
    checkpoint.refuse_image_scales()
    old, side = compat == "lerobot-0.4", config.vision.image_size
    prompt = PromptRecipe(
        max_tokens=checkpoint.max_tokens,
        vocab_size=config.vocab_size,
        pad_token_id=pad_id,
        padding=checkpoint.padding or "max_length",
    )
    if checkpoint.type == "pi0":
        prompt = replace(prompt, steps=(Instruction(), Suffix("\n")))
    else:
        state_dim = checkpoint.state.dim
        # LeRobot 0.4 wrote the padded state into the prompt.
        state = State(config.max_state_dim if old else state_dim)
        prompt = replace(prompt, steps=(Clean(), *sentence(prompt_template, state)))
    letterbox = Letterbox(
        side,
        side,
        pad="top_left" if old_layout else "center",
        # LeRobot 0.4 padded with -1 before it scaled pixels from [0, 1] to [-1, 1]. The model therefore reads padding
        # with the value -3.
        pad_value=-1.0 if old and not old_layout else 0.0,
    )
    return checkpoint.processing(
        ImageRecipe(side, side, (letterbox,)),
        prompt,
        config,
        empty_cameras=checkpoint.size("empty_cameras", low=0, high=16),
        action_steps=checkpoint.action_steps(),
        pad_missing_cameras=True,
    )
