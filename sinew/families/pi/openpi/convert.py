"""openpi's checkpoints (pi0, pi0.5) -> bundles.

The directory holds ``model.safetensors`` (PyTorch) or ``params/`` (JAX), and
``assets/<asset>/norm_stats.json``; what else a policy needs lies in openpi's source, under the name of the
training config. The published ones are in ``families/pi/openpi/embodiments.py``, one's own is a file
(``families/pi/openpi/own_config.py``); the checkpoint's tensors are checked against the one that is named.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinew.bundle.schema import ImageRecipe, Normalization, Processing, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lm_head import LM_HEAD_SETTING, PROMPT_SETTINGS
from sinew.convert.names import rename
from sinew.convert.options import SOLVER_STEPS_SETTING, ConvertOptions, Setting
from sinew.convert.read import safetensors
from sinew.convert.read.files import directory_config, read_json
from sinew.convert.read.record import JsonRecord
from sinew.convert.tokenizer_files import find_tokenizer
from sinew.core import CameraSpec, ConvertError, PolicySpec, did_you_mean
from sinew.families.pi.convert import (
    PREFIXES,
    WHOSE_TOKENIZER,
    WITH_STATE,
    model_config,
    paligemma_head,
    tensors,
    with_text,
)
from sinew.families.pi.openpi.embodiments import OPENPI_CONFIGS, OpenPIConfig
from sinew.families.pi.openpi.jax import Adapters, read_params
from sinew.families.pi.openpi.own_config import own_config
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.prompt.base import PromptStep
from sinew.steps.prompt.clean import Clean
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.state import State
from sinew.steps.prompt.suffix import Suffix
from sinew.steps.prompt.template import sentence
from sinew.steps.vector.add_state import AddState

SIDE, ACTION_DIM = 224, 32
STATISTICS = "norm_stats.json"
PROMPT_TOKENS = {False: 48, True: 200}  # pi05 -> prompt tokens
SOLVER_STEPS = 10  # openpi's sample_actions
PERIODS = {"min_period": 4e-3, "max_period": 4.0}


NAMES = ("openpi pi0", "openpi pi05")
OPTIONS = ("tokenizer", "arch", "stats", "openpi_config")
SETTINGS = {
    "solver_steps": SOLVER_STEPS_SETTING,
    "lm_head": LM_HEAD_SETTING,
    **PROMPT_SETTINGS,
    "lora_alpha": Setting(
        str,
        "alpha of the run's LoRAConfig: one number, or two (language model, action expert) with a comma between",
    ),
    "rslora": Setting(bool, "whether the run's LoRAConfig sets rslora"),
    "lora_merged": Setting(
        bool,
        "true: what converted this LoRA run to PyTorch merged its adapters (openpi's own script drops them)",
    ),
    "ignore": Setting(str, "weights, or keys of config.json, to leave aside, separated by commas"),
}
VARIANT_KEYS = ("paligemma_variant", "action_expert_variant")
LORA = "_lora"  # ends the names of openpi's variants with adapters
# Keys of config.json, as openpi's converter writes them or a copy of Pi0Config has them: read, and without influence
READ = ("action_dim", "action_horizon", "paligemma_variant", "action_expert_variant")
UNREAD = ("precision", "dtype", "pytorch_compile_mode")


def recognises(path: Path) -> bool:
    """Return True for openpi's directories: LeRobot's config.json has a "type"; openpi's has none, or is absent."""
    if not path.is_dir():
        return False
    if record := directory_config(path):
        return "type" not in record and "action_horizon" in record
    return any((path / each).is_dir() for each in ("assets", "params")) or bool(_steps_near(path))


def _steps_near(path: Path) -> list[Path]:
    """Return the checkpoint whose ``params`` a folder is, or those of the steps that a run has saved in it."""
    if path.name == "params" and (path / "_METADATA").is_file():
        return [path.resolve().parent]
    saved = {each.parent for name in ("params", "assets") for each in path.glob(f"*/{name}")}
    return sorted((each for each in saved if each.name.isdecimal()), key=lambda each: int(each.name))


def read(path: Path, options: ConvertOptions) -> Conversion:
    if saved := _steps_near(path):
        steps = ", ".join(map(str, saved[-3:]))
        raise ConvertError(f"{path}: expected a checkpoint, the folder of a step, as {steps}")
    published, own = OPENPI_CONFIGS.get(options.openpi_config), Path(options.openpi_config)
    if published is None and own.suffix != ".json":
        raise ConvertError(_unknown_config(path, options.openpi_config))
    stats_file = find_statistics(path, options.stats)
    own_files = [] if published else [own]
    published = published or own_config(own, JsonRecord(stats_file))
    architecture = "pi05" if published.pi05 else "pi0"
    config_file = path / "config.json"
    record = {
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        **({"action_horizon": published.chunk_size} if published.chunk_size else {}),
        "action_dim": ACTION_DIM,
        **directory_config(path),
    }
    if own_files and record.get("action_horizon") != (published.chunk_size or record.get("action_horizon")):
        raise ConvertError(
            f"{own}: action_horizon: expected {record['action_horizon']} as {config_file} has it, got"
            f" {published.chunk_size}"
        )
    if "action_horizon" not in record:
        raise ConvertError(f"{own}: action_horizon is missing, and {config_file} does not say it")
    _check_config(config_file, published, options)
    lora = any(str(record[key]).endswith(LORA) for key in VARIANT_KEYS) or published.lora
    record |= {key: str(record[key]).removesuffix(LORA) for key in VARIANT_KEYS}
    arch = read_json(options.arch) if options.arch else {}
    config = model_config(
        architecture,
        record
        | PERIODS
        | {
            "chunk_size": record["action_horizon"],
            "max_state_dim": record["action_dim"],
            "max_action_dim": record["action_dim"],
            "image_resolution": [arch.get("vision", {}).get("image_size", SIDE)] * 2,
        },
        arch,
        str(config_file),
    )
    tokenizer = find_tokenizer(options, path / "tokenizer", path, whose=WHOSE_TOKENIZER)
    robot = published.embodiment
    side = config.vision.image_size
    weights, files, notes = read_weights(path, architecture, options, lora)
    weights = tensors(weights, architecture)
    head = paligemma_head(options, weights, tokenizer)
    config = replace(config, lm_head=head.kind)
    processing = Processing(
        image=ImageRecipe(side, side, (Letterbox(side, side, "pil_bilinear", "center"),)),
        prompt=prompt_recipe(published, config.vocab_size, tokenizer.pad_token_id or 0),
        state=normalization(stats_file, "state", robot.state.dim, published.pi05),
        action=normalization(stats_file, "actions", robot.action.dim, published.pi05),
        padded_state_dim=config.max_state_dim,
        padded_action_dim=config.max_action_dim,
        pad_missing_cameras=True,
        empty_cameras=3 - len(robot.cameras),
        state_steps=robot.state_steps,
        action_steps=(
            *((AddState(robot.relative),) if published.relative_actions else ()),
            *robot.action_steps,
        ),
    )
    return Conversion(
        format=f"openpi-{architecture}",
        config=config,
        spec=PolicySpec(
            architecture=architecture,
            name=own.stem,
            cameras=tuple(CameraSpec(name, side, side) for name in robot.cameras),
            state=robot.state,
            action=robot.action,
            chunk_size=config.chunk_size,
            noise_dim=config.max_action_dim,
            solver_steps=options.setting("solver_steps", SOLVER_STEPS),
            max_prompt_tokens=PROMPT_TOKENS[published.pi05],
            embodiment=robot.name,
            keys=(robot.keys,),
            default_prompt=published.default_prompt,
            motion=published.motion,
            control_hz=published.control_hz,
        ),
        processing=with_text(processing, head, options, published.pi05),
        tokenizer=tokenizer.text,
        tensors=weights,
        rename=lambda name: rename(name, PREFIXES),
        dead=head.dead,
        sources=[
            *files,
            *([config_file] if config_file.exists() else []),
            *own_files,
            stats_file,
            *([options.arch] if options.arch else []),
            tokenizer.path,
        ],
        notes=(f"openpi training config {options.openpi_config}", *notes, *head.notes),
        widths_assumed=options.arch is None,
    )


def _unknown_config(path: Path, name: str) -> str:
    """Return the message about a training config that is not in the table."""
    known = ", ".join(OPENPI_CONFIGS)
    if {"fast", "binning", "vq"} & {*name.split("_")}:
        return (
            f"{path}: --openpi-config {name}: expected a pi0 or pi0.5, got a training config of an autoregressive"
            " policy. Sinew reads those in LeRobot's layout only; convert the checkpoint with LeRobot first"
        )
    got = f"{name!r} is not one of them{did_you_mean(name, OPENPI_CONFIGS)}" if name else "none was given"
    return (
        f"{path}: give the training config with --openpi-config NAME ({got}): {known}; or one of your own as a"
        " file, NAME.json (docs/tutorial-openpi.md)"
    )


def read_weights(
    path: Path, architecture: str, options: ConvertOptions, lora: bool
) -> tuple[dict[str, TensorSource], list[Path], list[str]]:
    """Return the tensors under openpi's PyTorch names, the files that hold them, and notes.

    lora: the run trained adapters, by its configuration. Raises :class:`ConvertError` for a checkpoint that has lost
    them.
    """
    params, merged = path / "params", 0
    ignored = _ignored(options, path)
    if params.is_dir() and not (path / "model.safetensors").exists():
        adapters = Adapters(_alpha(options), options.setting("rslora", False))
        weights, merged = read_params(params, architecture, adapters, ignored)
        files = sorted(file for file in params.rglob("*") if file.is_file())
    else:
        weights, files = safetensors.read_weights(path)
        if absent := [name for name in ignored if name not in weights]:
            raise ConvertError(
                f"--set ignore={absent[0]}: expected a tensor of {files[0]} or a key of config.json"
            )
        weights = {name: source for name, source in weights.items() if name not in ignored}
    if merged:
        return weights, files, [f"LoRA: the adapters of {merged} stacked weights were merged into them"]
    for name in ("lora_alpha", "rslora"):
        if name in options.settings:
            raise ConvertError(
                f"--set {name}: expected a checkpoint with params/ and LoRA adapters, got none"
            )
    if lora and not options.setting("lora_merged", False):
        raise ConvertError(
            f"{path}: expected the LoRA adapters of this run, got weights without them. openpi's"
            " convert_jax_model_to_pytorch.py drops adapters, so this may be the base model. Convert the JAX"
            " checkpoint, the folder of a step with params/; or add --set lora_merged=true where your script merged"
            " the adapters"
        )
    return weights, files, []


def _alpha(options: ConvertOptions) -> tuple[float, float] | None:
    """Return ``--set lora_alpha`` for the language model and the action expert. Raises :class:`ConvertError`."""
    text = options.setting("lora_alpha", None)
    if text is None:
        return None
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(math.isfinite(each) and each > 0 for each in numbers):
        raise ConvertError(f"--set lora_alpha: expected one or two numbers above 0, got {text!r}")
    return numbers[0], numbers[-1]


def _ignored(options: ConvertOptions, path: Path) -> list[str]:
    """Return the arrays that ``--set ignore`` names; its other names are keys of config.json."""
    keys = directory_config(path)
    return [name for name in str(options.setting("ignore", "")).split(",") if name and name not in keys]


def _check_config(file: Path, published: OpenPIConfig, options: ConvertOptions) -> None:
    """Raise :class:`ConvertError` for keys of config.json that differ from the training config, or are not known."""
    record = directory_config(file.parent)
    tokens = PROMPT_TOKENS[published.pi05]
    meant = {
        "pi05": published.pi05,
        "max_token_len": tokens,
        "discrete_state_input": published.state_in_prompt,
    }
    if not published.pi05:
        meant["discrete_state_input"] = False
    ignored = str(options.setting("ignore", "")).split(",")
    for key, value in meant.items():
        if key not in ignored and record.get(key, value) not in (value, None):
            raise ConvertError(
                f"{file}: {key}: expected {value} as the training config {options.openpi_config}, got {record[key]!r};"
                " give the configuration that the checkpoint was trained with"
            )
    if unknown := [key for key in record if key not in (*READ, *UNREAD, *meant, *ignored)]:
        raise ConvertError(
            f"{file}: expected keys of openpi's Pi0Config, got {', '.join(unknown)}; where they do not change what is"
            f" computed, --set ignore={','.join(unknown)} leaves them aside"
        )


def prompt_recipe(published: OpenPIConfig, vocab_size: int, pad_id: int) -> PromptRecipe:
    said: tuple[PromptStep, ...] = (Instruction(), Suffix("\n"))
    if published.pi05 and published.state_in_prompt:
        said = sentence(WITH_STATE, State(published.embodiment.state.dim))
    return PromptRecipe(
        max_tokens=PROMPT_TOKENS[published.pi05],
        vocab_size=vocab_size,
        pad_token_id=pad_id,
        steps=(Clean(), *said),
        padding="max_length",
    )


def find_statistics(path: Path, asked: Path | None) -> Path:
    """Return the file of a checkpoint's statistics. asked: it, its folder, or the id of one of several assets."""
    assets = path / "assets"
    known = sorted(assets.glob(f"**/{STATISTICS}"))
    given = [] if asked is None else [asked, asked / STATISTICS, assets / asked / STATISTICS]
    found = [each for each in given if each.is_file()] if given else known
    if not found or len(found) > max(1, len(given)):
        names = ", ".join(str(file.parent.relative_to(assets)) for file in known) or "none"
        raise ConvertError(
            f"{path}: expected the statistics of one asset, found those of {names}"
            + (f", and none at --stats {asked}" if given else "; --stats ASSET or FILE says which")
        )
    return found[0]


def normalization(file: Path, key: str, dim: int, quantiles: bool) -> Normalization:
    """z-scores for pi0, quantiles for pi0.5. The file may hold more dimensions than the robot has."""
    record: Any = read_json(file)
    needed = ("q01", "q99") if quantiles else ("mean", "std")
    try:
        stats = {s: tuple(float(v) for v in record["norm_stats"][key][s][:dim]) for s in needed}
    except (KeyError, TypeError, ValueError):
        raise ConvertError(f"{file}: no statistics {list(needed)} for {key!r}") from None
    if short := [s for s, values in stats.items() if len(values) != dim]:
        raise ConvertError(f"{file}: {short} of {key!r} have fewer than {dim} values")
    return Normalization("quantiles" if quantiles else "mean_std", stats, eps=1e-6, convention="openpi")
