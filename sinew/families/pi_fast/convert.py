"""Convert LeRobot pi0-FAST checkpoints to bundles.

FAST's tokenizer (``tokenizer.json``, ``processor_config.json``) is in the checkpoint, or in the folder of
``--action-tokenizer DIR``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import LeRobotCheckpoint, Schema, of_type
from sinew.convert.lerobot.steps import NORMALIZER, PRE, RELATIVE, TOKENIZER, ProcessorStep
from sinew.convert.names import rename
from sinew.convert.options import IGNORE_SETTING, ConvertOptions
from sinew.convert.read.files import named, read_json
from sinew.convert.tokenizer_files import TokenizerFiles, find_tokenizer, load_tokenizer
from sinew.core import ConvertError
from sinew.families.pi.convert import (
    EMBEDDING,
    HEAD,
    PREFIXES,
    WHOSE_TOKENIZER,
    gemma_tensors,
    paligemma,
    processing,
)
from sinew.families.pi_fast.model import PI0FastConfig
from sinew.models.solvers import SINGLE

NAMES = ("pi0_fast",)
recognises = of_type(*NAMES)
OPTIONS = ("base", "tokenizer", "action_tokenizer", "arch", "stats", "stats_key", "dataset")
SETTINGS = {"ignore": IGNORE_SETTING}
PROMPT = "Task: {prompt}, State: {state};\n"
MARK, END = "Action: ", "|"
ACTION_TOKENIZER = "action_tokenizer_processor"
SCHEMA = Schema(
    # Default values of the configuration's keys, from LeRobot's configuration_pi0_fast.py.
    defaults={
        "paligemma_variant": "gemma_2b",
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_state_dim": 32,
        "image_resolution": [224, 224],
        "empty_cameras": 0,
        "tokenizer_max_length": 200,
        "max_decoding_steps": 256,
        "fast_skip_tokens": 128,
        "validate_action_token_prefix": True,
        "action_tokenizer_name": "",
        "use_relative_actions": False,
        "relative_exclude_joints": ["gripper"],
        "action_feature_names": None,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    },
    # With any other temperature, LeRobot would choose the tokens at random.
    fixed={"temperature": 0.0},
    # Fields that do not change the actions. "dtype" is the dtype of LeRobot's computation. The policy has no action
    # expert. "max_action_dim" and "max_action_tokens" only concern training. Without "use_kv_cache" LeRobot generates
    # more tokens after the end token, and discards them.
    unread="dtype action_expert_variant max_action_dim max_action_tokens text_tokenizer_name use_kv_cache",
    steps={
        "relative_actions_processor": RELATIVE,
        "normalizer_processor": NORMALIZER,
        "pi0_fast_prepare_state_tokenizer_processor_step": ProcessorStep(
            "max_state_dim", fields={"task_key": ("task",)}, required=True
        ),
        "tokenizer_processor": TOKENIZER,
        ACTION_TOKENIZER: ProcessorStep(
            "trust_remote_code max_action_tokens action_tokenizer_name fast_skip_tokens paligemma_tokenizer_name"
        ),
    },
    adapters=True,
)


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported pi0-FAST.
    """
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    checkpoint.config = dict(SCHEMA.defaults) | checkpoint.config
    arch = read_json(options.arch) if options.arch else {}
    tokenizer = find_tokenizer(options, path / "tokenizer", path, whose=WHOSE_TOKENIZER)
    fast, facts = action_tokenizer(checkpoint)
    token_fields = action_tokens(checkpoint, tokenizer, fast, facts)
    config = model_config(checkpoint, arch, tokenizer, token_fields)
    weights = gemma_tensors(checkpoint.tensors)
    if EMBEDDING in weights and HEAD not in weights:
        raise ConvertError(
            f"{path}: the tensor {HEAD} is missing. LeRobot stores this head separately from the token table, and would"
            " initialise a missing head with random values. Use a complete checkpoint"
        )
    return Conversion(
        format="lerobot-pi0_fast",
        config=config,
        spec=checkpoint.policy_spec(
            "pi0_fast",
            config.chunk_size,
            noise_dim=0,
            solver_steps=1,
            max_prompt_tokens=checkpoint.max_tokens,
            solver=SINGLE,
        ),
        processing=processing(
            checkpoint, config, options.compat, tokenizer.pad_token_id or 0, prompt_template=PROMPT
        ),
        tokenizer=tokenizer.text,
        tensors=weights,
        rename=lambda name: rename(name, PREFIXES),
        sources=[
            *checkpoint.files,
            *([options.arch] if options.arch else []),
            *(tokenizer.path, fast.path, facts),
        ],
        notes=tuple(checkpoint.notes),
        widths_assumed=options.arch is None,
    )


def action_tokenizer(checkpoint: LeRobotCheckpoint) -> tuple[TokenizerFiles, Path]:
    """Return FAST's tokenizer, and the path of the file that contains its scale and its lowest token."""
    options, name = checkpoint.options, checkpoint["action_tokenizer_name"]
    default_folder = checkpoint.path / Path(str(name)).name if name else checkpoint.path / "action_tokenizer"
    folder = options.action_tokenizer or default_folder
    fast = load_tokenizer([folder], "pass the folder of FAST's tokenizer with --action-tokenizer DIR")
    if fast.config.get("clean_up_tokenization_spaces"):
        raise ConvertError(
            f"{fast.path.with_name('tokenizer_config.json')}: clean_up_tokenization_spaces: expected false, got true,"
            " which changes the decoded text of tokens. Pass FAST's own tokenizer with --action-tokenizer"
        )
    return fast, fast.path.with_name("processor_config.json")


def action_tokens(
    checkpoint: LeRobotCheckpoint, tokenizer: TokenizerFiles, fast: TokenizerFiles, facts: Path
) -> dict[str, Any]:
    """Read the values that define the meaning of the action tokens, for the model's configuration.

    Raises:
        ConvertError: The files are missing or contradict each other.
    """
    if not facts.is_file():
        raise ConvertError(f"{facts} is missing. It contains FAST's scale and min_token")
    record, skip = read_json(facts), checkpoint.size("fast_skip_tokens", low=0, high=1 << 20)
    other = checkpoint.pipelines.config(PRE, ACTION_TOKENIZER).get("fast_skip_tokens", skip)
    if other != skip:
        raise ConvertError(
            f"{checkpoint.path / PRE}.json: {ACTION_TOKENIZER}: fast_skip_tokens: expected {skip}, the value in"
            f" config.json, got {other!r}"
        )
    scale, least = record.get("scale"), record.get("min_token")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or type(least) is not int:
        raise ConvertError(
            f"{facts}: expected a number scale and a whole number min_token, got {scale!r} and {least!r}"
        )
    validates = checkpoint["validate_action_token_prefix"]
    if type(validates) is not bool:
        raise ConvertError(
            f"{checkpoint.file}: validate_action_token_prefix: expected true or false, got {validates!r}"
        )
    return {
        "max_tokens": checkpoint.size("max_decoding_steps"),
        "end_token": tokenizer.token_id(END),
        "zero_token": tokenizer.tokenizer.get_vocab_size(with_added_tokens=False) - 1 - skip,
        "action_tokenizer": fast.text,
        "lowest": float(least),
        "scale": float(scale),
        "begins": (tokenizer.token_id("Action"), tokenizer.token_id(":")) if validates else (),
        "leaves_out": tuple(tokenizer.tokenizer.encode(MARK, add_special_tokens=False).ids),
    }


def model_config(
    checkpoint: LeRobotCheckpoint,
    arch: dict[str, Any],
    tokenizer: TokenizerFiles,
    token_fields: dict[str, Any],
) -> PI0FastConfig:
    with named(f"{checkpoint.file} or --arch"):
        return PI0FastConfig(
            **paligemma(checkpoint.config, arch),
            chunk_size=checkpoint.size("n_action_steps", high=checkpoint.size("chunk_size")),
            max_state_dim=checkpoint.size("max_state_dim"),
            max_action_dim=checkpoint.action.dim,
            start_token=tokenizer.token_id("<bos>"),
            **token_fields,
        )
