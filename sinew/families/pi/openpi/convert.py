"""Convert openpi checkpoints of pi0 and pi0.5 to bundles.

A checkpoint directory contains ``model.safetensors`` (PyTorch) or ``params/`` (JAX), and
``assets/<asset>/norm_stats.json``. All other facts about the policy are in openpi's source code, in the training
configuration with which it was trained. ``families/pi/openpi/embodiments.py`` has openpi's published configurations. A
configuration of your own is a JSON file (``families/pi/openpi/own_config.py``). The converter checks the checkpoint's
tensors against the configuration.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinew_client.documentation import page

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
    PI05_PROMPT,
    PREFIXES,
    WHOSE_TOKENIZER,
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
# Length of the prompt in tokens. Key: False for pi0, True for pi0.5.
PROMPT_TOKENS = {False: 48, True: 200}
SOLVER_STEPS = 10  # default of openpi's sample_actions
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
        "true if your script merged the adapters when it converted this LoRA run to PyTorch (openpi's script drops"
        " them)",
    ),
    "ignore": Setting(str, "names of weights or config.json keys to ignore, separated by commas"),
}
VARIANT_KEYS = ("paligemma_variant", "action_expert_variant")
LORA = "_lora"  # suffix of the names of openpi's LoRA variants
# READ and UNREAD are the keys of config.json, as openpi's converter or a copy of Pi0Config writes them. Sinew reads the
# READ keys. The UNREAD keys do not influence the actions.
READ = ("action_dim", "action_horizon", "paligemma_variant", "action_expert_variant")
UNREAD = ("precision", "dtype", "pytorch_compile_mode")


def recognises(path: Path) -> bool:
    """Return True for an openpi directory. LeRobot's config.json has a "type". openpi's config.json has no "type" or is
    absent.
    """
    if not path.is_dir():
        return False
    if record := directory_config(path):
        return "type" not in record and "action_horizon" in record
    return any((path / each).is_dir() for each in ("assets", "params")) or bool(_steps_near(path))


def _steps_near(path: Path) -> list[Path]:
    """Return checkpoints near a path that is not a checkpoint itself, to suggest them in an error message.

    Returns:
        The parent of a ``params`` folder, or the step folders of a training run, in order.
    """
    if path.name == "params" and (path / "_METADATA").is_file():
        return [path.resolve().parent]
    saved = {each.parent for name in ("params", "assets") for each in path.glob(f"*/{name}")}
    return sorted((each for each in saved if each.name.isdecimal()), key=lambda each: int(each.name))


def read(path: Path, options: ConvertOptions) -> Conversion:
    if saved := _steps_near(path):
        steps = ", ".join(map(str, saved[-3:]))
        raise ConvertError(f"{path}: expected the folder of one training step; use one of: {steps}")
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
            f"{own}: action_horizon: expected {record['action_horizon']}, the value in {config_file}, got"
            f" {published.chunk_size}; correct the file"
        )
    if "action_horizon" not in record:
        raise ConvertError(
            f"{own}: action_horizon is missing. Add it, because {config_file} does not contain it either"
        )
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
    """Return the error message for an unknown training configuration."""
    names = ", ".join(OPENPI_CONFIGS)
    if {"fast", "binning", "vq"} & {*name.split("_")}:
        return (
            f"{path}: --openpi-config {name}: expected a pi0 or pi0.5, got a training config of an autoregressive"
            " policy. Sinew reads those in LeRobot's layout only; convert the checkpoint with LeRobot first"
        )
    got = f"{name!r} is unknown{did_you_mean(name, OPENPI_CONFIGS)}" if name else "none was given"
    return (
        f"{path}: pass the training configuration with --openpi-config NAME ({got}). Use one of: {names}; or the path"
        f" of your own configuration file, NAME.json, which {page('tutorial-openpi')} explains"
    )


def read_weights(
    path: Path, architecture: str, options: ConvertOptions, lora: bool
) -> tuple[dict[str, TensorSource], list[Path], list[str]]:
    """Read the weights of an openpi checkpoint.

    Args:
        path: The checkpoint directory.
        architecture: "pi0" or "pi05".
        options: The user's options.
        lora: True if the training configuration has LoRA adapters.

    Returns:
        The tensors under openpi's PyTorch names, the files that contain the tensors, and notes for the user.

    Raises:
        ConvertError: The run trained LoRA adapters, and the checkpoint does not contain them.
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
                f"--set ignore={absent[0]}: expected the name of a tensor in {files[0]} or of a key in config.json"
            )
        weights = {name: source for name, source in weights.items() if name not in ignored}
    if merged:
        return weights, files, [f"LoRA: the adapters of {merged} stacked weights were merged into them"]
    for name in ("lora_alpha", "rslora"):
        if name in options.settings:
            raise ConvertError(
                f"--set {name}: expected a checkpoint with params/ and LoRA adapters, got none; omit --set {name}"
            )
    if lora and not options.setting("lora_merged", False):
        raise ConvertError(
            f"{path}: expected the LoRA adapters of this run, got weights without them. openpi's"
            " convert_jax_model_to_pytorch.py drops adapters, so these weights may be the base model. Convert the JAX"
            " checkpoint (a step's folder with params/) instead. If your own script merged the adapters, add --set"
            " lora_merged=true"
        )
    return weights, files, []


def _alpha(options: ConvertOptions) -> tuple[float, float] | None:
    """Return the two alphas of ``--set lora_alpha``, for the language model and the action expert. None if it is not
    set.

    Raises:
        ConvertError: The text is not one or two numbers above 0.
    """
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
    """Return the names in ``--set ignore`` that are names of arrays in the checkpoint. The other names are keys of
    config.json.
    """
    keys = directory_config(path)
    return [name for name in str(options.setting("ignore", "")).split(",") if name and name not in keys]


def _check_config(file: Path, published: OpenPIConfig, options: ConvertOptions) -> None:
    """Check config.json against the training configuration.

    Raises:
        ConvertError: A key is unknown or has another value than in the training configuration.
    """
    record = directory_config(file.parent)
    tokens = PROMPT_TOKENS[published.pi05]
    expected = {
        "pi05": published.pi05,
        "max_token_len": tokens,
        "discrete_state_input": published.state_in_prompt,
    }
    if not published.pi05:
        expected["discrete_state_input"] = False
    ignored = str(options.setting("ignore", "")).split(",")
    for key, value in expected.items():
        if key not in ignored and record.get(key, value) not in (value, None):
            raise ConvertError(
                f"{file}: {key}: expected {value} as in the training configuration {options.openpi_config}, got"
                f" {record[key]!r}; pass the configuration that the checkpoint was trained with"
            )
    if unknown := [key for key in record if key not in (*READ, *UNREAD, *expected, *ignored)]:
        raise ConvertError(
            f"{file}: expected only keys of openpi's Pi0Config, got {', '.join(unknown)}; if they do not change the"
            f" actions, pass --set ignore={','.join(unknown)}"
        )


def prompt_recipe(published: OpenPIConfig, vocab_size: int, pad_id: int) -> PromptRecipe:
    steps: tuple[PromptStep, ...] = (Instruction(), Suffix("\n"))
    if published.pi05 and published.state_in_prompt:
        steps = sentence(PI05_PROMPT, State(published.embodiment.state.dim))
    return PromptRecipe(
        max_tokens=PROMPT_TOKENS[published.pi05],
        vocab_size=vocab_size,
        pad_token_id=pad_id,
        steps=(Clean(), *steps),
        padding="max_length",
    )


def find_statistics(path: Path, chosen: Path | None) -> Path:
    """Find the file of a checkpoint's statistics.

    Args:
        path: The checkpoint directory.
        chosen: The value of --stats: the file, its folder, or the name of an asset. None requires that there is only
            one.

    Raises:
        ConvertError: There is no file, or more than one.
    """
    assets = path / "assets"
    files = sorted(assets.glob(f"**/{STATISTICS}"))
    candidates = [] if chosen is None else [chosen, chosen / STATISTICS, assets / chosen / STATISTICS]
    matches = [each for each in candidates if each.is_file()] if candidates else files
    if not matches or len(matches) > max(1, len(candidates)):
        names = ", ".join(str(file.parent.relative_to(assets)) for file in files) or "none"
        raise ConvertError(
            f"{path}: expected the statistics of one asset, got {names}"
            + (f"; --stats {chosen} does not match" if candidates else "; pass --stats ASSET or --stats FILE")
        )
    return matches[0]


def normalization(file: Path, key: str, dim: int, quantiles: bool) -> Normalization:
    """Read the statistics of a vector: z-scores for pi0, quantiles for pi0.5.

    Args:
        file: The statistics file.
        key: "state" or "actions".
        dim: Dimensions of the robot. The file may have more dimensions.
        quantiles: True reads quantiles.
    """
    record: Any = read_json(file)
    needed = ("q01", "q99") if quantiles else ("mean", "std")
    try:
        stats = {s: tuple(float(v) for v in record["norm_stats"][key][s][:dim]) for s in needed}
    except (KeyError, TypeError, ValueError):
        raise ConvertError(
            f"{file}: {key!r} must have the statistics {', '.join(needed)}; use the file of this checkpoint's training"
        ) from None
    if short := [s for s, values in stats.items() if len(values) != dim]:
        raise ConvertError(
            f"{file}: {', '.join(short)} of {key!r} must have at least {dim} values, the robot's dimension"
        )
    return Normalization("quantiles" if quantiles else "mean_std", stats, eps=1e-6, convention="openpi")
