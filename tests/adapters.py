"""LoRA adapters of the golden checkpoints, in folders as LeRobot and PEFT write them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from sinew.convert import convert
from sinew.convert.read.safetensors import read_weights
from sinew.convert.tensors import read_array
from tests.cases import cases, golden_cases

PREFIX = "base_model.model."
ATTENTION = r"expert.*\.(q|v)_proj"  # the usual target modules of LeRobot
EVERYTHING = r"(_proj|proj|_mlp_in|_mlp_out|time_mlp_\w+|fc1|fc2|linear|dense)"


def weights_of(case: str) -> dict[str, np.ndarray]:
    """Return the weights of a golden checkpoint by upstream name."""
    found, _files = read_weights(golden_cases() / cases()[case].home / cases()[case].checkpoint)
    return {name: read_array(source) for name, source in found.items()}


def write_folder(
    case: str,
    folder: Path,
    seed: int,
    targets: str,
    rank: int = 4,
    whole: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """Write a LoRA adapter with random numbers for a golden checkpoint.

    Args:
        case: Name of the golden case.
        folder: The folder to write.
        seed: Seed of the random numbers. The statistics of the adapter also depend on the seed.
        targets: Pattern for the names of the linear layers that the adapter changes.
        rank: Rank of the adapter.
        whole: Modules that the adapter replaces as a whole.
        config: Further fields of ``adapter_config.json``.

    Returns:
        The folder.
    """
    base, random = weights_of(case), np.random.default_rng(seed)
    shutil.copytree(
        golden_cases() / cases()[case].home / cases()[case].checkpoint,
        folder,
        ignore=shutil.ignore_patterns("model*.safetensors"),
    )
    made: dict[str, np.ndarray] = {}
    for name, weight in base.items():
        module, _, part = name.rpartition(".")
        if (
            part == "weight"
            and weight.ndim == 2
            and re.fullmatch(f".*{targets}", module)
            and "lm_head" not in name
        ):
            outputs, inputs = weight.shape
            made[f"{PREFIX}{module}.lora_A.weight"] = random.normal(0, 0.1, (rank, inputs)).astype(np.float32)
            made[f"{PREFIX}{module}.lora_B.weight"] = random.normal(0, 0.1, (outputs, rank)).astype(
                np.float32
            )
        if module in whole:
            made[f"{PREFIX}{name}"] = random.normal(0, 0.1, weight.shape).astype(np.float32)
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "modules_to_save": list(whole),
    }
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    save_file(made, folder / "adapter_model.safetensors")
    for file in folder.glob("*processor*.safetensors"):
        save_file(
            {name: statistic * np.float32(1 + seed / 8) for name, statistic in load_file(file).items()}, file
        )
    return folder


@dataclass(frozen=True)
class Adapters:
    """A bundle with its adapters.

    Attributes:
        base: The bundle.
        files: The adapters by name.
        merged: The bundle with each adapter merged into it, by the name of the adapter.
    """

    base: Path
    files: dict[str, Path]
    merged: dict[str, Path]


def options_of(case: str) -> dict[str, Any]:
    """Return the options with which a golden case is converted."""
    return cases()[case].options(golden_cases() / cases()[case].home)


def make_adapters(case: str, base: Path, home: Path) -> Adapters:
    """Make two adapters of a golden case.

    The adapter "arm" changes attention layers and replaces one module. The adapter "kitchen" changes all layers, with
    rank-stabilised scaling (``use_rslora``) and another alpha for some modules.
    """
    folders = {
        "arm": write_folder(case, home / "arm", 1, ATTENTION, whole=("model.action_out_proj",)),
        "kitchen": write_folder(
            case,
            home / "kitchen",
            2,
            EVERYTHING,
            6,
            use_rslora=True,
            lora_alpha=2,
            alpha_pattern={"q_proj": 3},
        ),
    }
    checkpoint = golden_cases() / cases()[case].home / cases()[case].checkpoint

    def made(name: str, kind: str, **more: Any) -> Path:
        given = options_of(case) | {"base": checkpoint} | more
        return convert(folders[name], home / f"{name}.{kind}.gguf", name=name, **given)

    return Adapters(
        base,
        {name: made(name, "adapter", merge=False) for name in folders},
        {name: made(name, "merged") for name in folders},
    )


Make = Callable[[str], Adapters]
