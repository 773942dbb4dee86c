"""openpi's checkpoints (pi0, pi0.5) -> bundles.

The directory holds ``model.safetensors`` (PyTorch) or ``params/`` (JAX), and
``assets/<asset>/norm_stats.json``; what else a policy needs lies in openpi's source, under the name of the
training config. The published ones are in ``families/pi/openpi/embodiments.py``, one's own is a file
(``families/pi/openpi/own_config.py``); the checkpoint's tensors are checked against the one that is named.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sinew.bundle.schema import ImageRecipe, Normalization, Processing, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lm_head import LM_HEAD_SETTING, PROMPT_SETTINGS
from sinew.convert.names import rename
from sinew.convert.options import SOLVER_STEPS_SETTING, ConvertOptions
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
from sinew.families.pi.openpi.jax import read_params
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
PROMPT_TOKENS = {False: 48, True: 200}  # by pi05
SOLVER_STEPS = 10  # openpi's sample_actions
PERIODS = {"min_period": 4e-3, "max_period": 4.0}


NAMES = ("openpi pi0", "openpi pi05")
OPTIONS = ("tokenizer", "arch", "stats", "openpi_config")
SETTINGS = {"solver_steps": SOLVER_STEPS_SETTING, "lm_head": LM_HEAD_SETTING, **PROMPT_SETTINGS}


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
        known = ", ".join(OPENPI_CONFIGS)
        near = did_you_mean(options.openpi_config, OPENPI_CONFIGS)
        got = (
            f"{options.openpi_config!r} is not one of them{near}"
            if options.openpi_config
            else "none was given"
        )
        raise ConvertError(
            f"{path}: give the training config with --openpi-config NAME ({got}): {known}; or one of your own as a"
            " file, NAME.json (docs/tutorial-openpi.md)"
        )
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
    weights, files = read_weights(path, architecture)
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
        notes=(f"openpi training config {options.openpi_config}", *head.notes),
        widths_assumed=options.arch is None,
    )


def read_weights(path: Path, architecture: str) -> tuple[dict[str, TensorSource], list[Path]]:
    """Return the tensors under openpi's PyTorch names, and the files that hold them."""
    params = path / "params"
    if params.is_dir() and not (path / "model.safetensors").exists():
        return read_params(params, architecture), sorted(file for file in params.rglob("*") if file.is_file())
    return safetensors.read_weights(path)


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
