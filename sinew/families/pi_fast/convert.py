"""LeRobot pi0-FAST checkpoint -> bundle.

FAST's tokenizer (``tokenizer.json``, ``processor_config.json``) lies in the checkpoint, or is given with
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
    defaults={  # LeRobot's configuration_pi0_fast.py
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
    fixed={"temperature": 0.0},  # a temperature draws tokens
    # dtype: of upstream's computation. There is no expert; what has most is of training. use_kv_cache says how, not
    # what: without it tokens behind the end are said, and cut.
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
    """Read a checkpoint directory, the weights aside. Raises :class:`ConvertError`."""
    checkpoint = LeRobotCheckpoint(path, options, SCHEMA)
    checkpoint.config = dict(SCHEMA.defaults) | checkpoint.config
    arch = read_json(options.arch) if options.arch else {}
    tokenizer = find_tokenizer(options, path / "tokenizer", path, whose=WHOSE_TOKENIZER)
    fast, facts = action_tokenizer(checkpoint)
    said = action_tokens(checkpoint, tokenizer, fast, facts)
    config = model_config(checkpoint, arch, tokenizer, said)
    weights = gemma_tensors(checkpoint.tensors)
    if EMBEDDING in weights and HEAD not in weights:
        raise ConvertError(
            f"{path}: expected {HEAD}, which LeRobot keeps apart from the token table and draws at random where it is"
            " missing"
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
        processing=processing(checkpoint, config, options.compat, tokenizer.pad_token_id or 0, words=PROMPT),
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
    """Return FAST's tokenizer, and the file with the meaning of its characters."""
    options, name = checkpoint.options, checkpoint["action_tokenizer_name"]
    beside = checkpoint.path / Path(str(name)).name if name else checkpoint.path / "action_tokenizer"
    folder = options.action_tokenizer or beside
    fast = load_tokenizer([folder], "give the folder of FAST's tokenizer with --action-tokenizer DIR")
    if fast.config.get("clean_up_tokenization_spaces"):
        raise ConvertError(
            f"{fast.path.with_name('tokenizer_config.json')}: clean_up_tokenization_spaces: expected false, got true,"
            " which changes what tokens spell"
        )
    return fast, fast.path.with_name("processor_config.json")


def action_tokens(
    checkpoint: LeRobotCheckpoint, tokenizer: TokenizerFiles, fast: TokenizerFiles, facts: Path
) -> dict[str, Any]:
    """Return the fields of the configuration that are of what is said. Raises :class:`ConvertError` for files that
    disagree."""
    if not facts.is_file():
        raise ConvertError(f"{facts}: expected the file with FAST's scale and min_token, got none")
    record, skip = read_json(facts), checkpoint.size("fast_skip_tokens", low=0, high=1 << 20)
    other = checkpoint.pipelines.config(PRE, ACTION_TOKENIZER).get("fast_skip_tokens", skip)
    if other != skip:
        raise ConvertError(
            f"{checkpoint.path / PRE}.json: {ACTION_TOKENIZER}: fast_skip_tokens: expected config.json's {skip}, got"
            f" {other!r}"
        )
    scale, least = record.get("scale"), record.get("min_token")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or type(least) is not int:
        raise ConvertError(f"{facts}: expected numbers scale and min_token, got {scale!r} and {least!r}")
    checked = checkpoint["validate_action_token_prefix"]
    if type(checked) is not bool:
        raise ConvertError(
            f"{checkpoint.file}: validate_action_token_prefix: expected true or false, got {checked!r}"
        )
    return {
        "max_tokens": checkpoint.size("max_decoding_steps"),
        "end_token": tokenizer.token_id(END),
        "zero_token": tokenizer.tokenizer.get_vocab_size(with_added_tokens=False) - 1 - skip,
        "action_tokenizer": fast.text,
        "lowest": float(least),
        "scale": float(scale),
        "begins": (tokenizer.token_id("Action"), tokenizer.token_id(":")) if checked else (),
        "leaves_out": tuple(tokenizer.tokenizer.encode(MARK, add_special_tokens=False).ids),
    }


def model_config(
    checkpoint: LeRobotCheckpoint, arch: dict[str, Any], tokenizer: TokenizerFiles, said: dict[str, Any]
) -> PI0FastConfig:
    with named(f"{checkpoint.file} or --arch"):
        return PI0FastConfig(
            **paligemma(checkpoint.config, arch),
            chunk_size=checkpoint.size("n_action_steps", high=checkpoint.size("chunk_size")),
            max_state_dim=checkpoint.size("max_state_dim"),
            max_action_dim=checkpoint.action.dim,
            start_token=tokenizer.token_id("<bos>"),
            **said,
        )
