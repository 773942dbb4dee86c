"""LoRA adapters of PEFT, merged into the weights of their base when a bundle is written.

    W + scale * B @ A,   scale = lora_alpha / r, or lora_alpha / sqrt(r) with ``use_rslora``

A [r, inputs] and B [outputs, r] belong to W [outputs, inputs] (Hu et al. 2021, "LoRA"; Kalajdzievski 2023 for the
square root). The sum is computed in float32 and rounded to the type of the base's weight. Weights of modules in
``modules_to_save``, and biases, are stored as a whole and replace the base's weights. Names and fields follow PEFT 0.18
to 0.21. Each changed weight records its change (:class:`Changed`), so that an adapter can be written without its base
(``unmerged.py``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.writer import Data, TensorSource
from sinew.convert.read.elements import BF16
from sinew.convert.read.files import read_json
from sinew.convert.read.safetensors import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_safetensors
from sinew.convert.tensors import computed, read_array, rounded
from sinew.core import ConvertError

PREFIX = "base_model.model."
# Fields of adapter_config.json that conversion ignores. These fields concern training, or repeat the names of modules
# that the weights already have. Conversion requires every other field to be empty.
UNREAD = (
    "alpha_pattern base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules"
    " inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout"
    " megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision runtime_config"
    " target_modules task_type use_rslora auto_mapping"
)
# Values of init_lora_weights with which the start of the training did not change the base's weights.
INITIAL = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Changed:
    """A weight of the base model that an adapter changes: its new bytes, and the origin of the change.

    Attributes:
        data: The bytes of the changed weight.
        base: The weight in the base model.
        factors: A [r, inputs], B [outputs, r] and the scale of their product; None if the adapter replaces the whole
            weight.
    """

    data: Data
    base: TensorSource
    factors: tuple[TensorSource, TensorSource, float] | None = None

    def blocks(self) -> Iterable[memoryview]:
        return self.data.blocks()


def merge(base: Mapping[str, TensorSource], folder: Path) -> tuple[dict[str, TensorSource], list[Path]]:
    """Apply the adapter in a folder to the tensors of its base.

    The base's weights are read later, when the bundle is written.

    Args:
        base: Name -> weight of the base.
        folder: The adapter's folder, with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns:
        Name -> weight of the merged model, and the adapter's files.

    Raises:
        ConvertError: The adapter is not a LoRA, or does not fit the base.
    """
    file = folder / ADAPTER_CONFIG
    config, merged = read_config(file), dict(base)
    weights = read_safetensors(folder / ADAPTER_WEIGHTS)
    if not weights:
        raise ConvertError(
            f"{folder / ADAPTER_WEIGHTS}: expected the weights of an adapter, got an empty file; copy the adapter again"
        )
    for module, factors in _factors(folder, weights):
        name = _named(base, f"{module}.weight", folder)
        down, up, weight = factors["A"], factors["B"], base[name]
        if weight.shape != (up.shape[0], down.shape[1]) or up.shape[1] != down.shape[0] or not down.shape[0]:
            raise ConvertError(
                f"{folder}: {module}: expected lora_A [r, inputs] and lora_B [outputs, r] for a weight"
                f" {list(weight.shape)}, got {list(down.shape)} and {list(up.shape)}; pass the base that the adapter"
                " was trained on with --base"
            )
        scale = _scale(file, config, module, down.shape[0])
        merged[name] = _merged(weight, down, up, scale)
    for key, source in weights.items():
        if ".lora_" not in key:
            name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
            if name not in base and _is_new(config, name):
                # The adapter trained and saved this whole module (modules_to_save), and the base lacks it.
                merged[name] = source
                continue
            name = _named(base, name, folder)
            if source.shape != base[name].shape:
                raise ConvertError(
                    f"{folder}: {key}: expected {list(base[name].shape)} as in the base, got {list(source.shape)}"
                )
            merged[name] = replace(source, data=Changed(source.data, base[name]))
    return merged, [file, folder / ADAPTER_WEIGHTS]


def merge_inside(tensors: Mapping[str, TensorSource], alpha: float, rank: int) -> dict[str, TensorSource]:
    """Merge the adapters of a model that was saved with PEFT's layers inside.

    PEFT writes ``base_model.model.`` into each name, ``base_layer`` into the names of changed layers, and the factors
    beside them.

    Args:
        tensors: Name -> weight of the checkpoint.
        alpha: Value of ``lora_alpha``.
        rank: Rank of all factors.

    Returns:
        Name -> weight of the merged model, without PEFT's parts in the names. Tensors of a model without adapters stay
        as they are.

    Raises:
        ConvertError: A factor is missing, or does not fit its weight.
    """
    merged, factors = dict[str, TensorSource](), dict[str, dict[str, TensorSource]]()
    for name, source in tensors.items():
        plain = name.replace(PREFIX, "", 1)
        if match := re.fullmatch(r"(.+)\.lora_([AB])\.\w+\.weight", plain):
            factors.setdefault(match[1], {})[match[2]] = source
        else:
            merged[plain.replace(".base_layer.", ".")] = source
    for module, pair in factors.items():
        weight = merged.get(f"{module}.weight")
        if weight is None or len(pair) < 2:
            missing = "weight" if weight is None else f"lora_{({'A', 'B'} - set(pair)).pop()}"
            raise ConvertError(f"{module}: {missing} is missing; copy the complete checkpoint")
        down, up = pair["A"], pair["B"]
        if down.shape != (rank, *weight.shape[1:]) or up.shape != (*weight.shape[:1], rank):
            raise ConvertError(
                f"{module}: expected lora_A [{rank}, inputs] and lora_B [outputs, {rank}] for a weight"
                f" {list(weight.shape)}, got {list(down.shape)} and {list(up.shape)}"
            )
        if not all(np.isfinite(read_array(factor)).all() for factor in (down, up)):
            raise ConvertError(f"{module}: lora_A, lora_B: expected finite numbers, got NaN or infinity")
        merged[f"{module}.weight"] = _merged(weight, down, up, alpha / rank)
    return merged


def read_config(file: Path) -> dict[str, Any]:
    """Read the configuration of a LoRA adapter.

    Raises:
        ConvertError: The adapter is not a LoRA, or is an unsupported variant.
    """
    config = read_json(file)
    if config.get("peft_type") != "LORA":
        raise ConvertError(
            f"{file}: peft_type: expected LORA, got {json.dumps(config.get('peft_type'))[:80]}; merge the adapter with"
            " PEFT, and convert the merged model"
        )
    if config.get("init_lora_weights", True) not in INITIAL:
        raise ConvertError(
            f"{file}: init_lora_weights={json.dumps(config['init_lora_weights'])[:80]}: this initialisation changes the"
            " weights of the base; convert the adapter to a plain LoRA with PEFT first"
        )
    for key, value in config.items():
        if key not in UNREAD.split() and value not in (None, False, "", [], {}):
            raise ConvertError(
                f"{file}: {key}={json.dumps(value)[:80]} is not supported; merge the adapter with PEFT, and convert"
                " the merged model"
            )
    return config


def _factors(
    folder: Path, weights: Mapping[str, TensorSource]
) -> Iterator[tuple[str, dict[str, TensorSource]]]:
    """Yield the name of each module that the adapter changes, and its two LoRA factors.

    Raises:
        ConvertError: One factor of a module is missing.
    """
    modules: dict[str, dict[str, TensorSource]] = {}
    for key, source in weights.items():
        if ".lora_" not in key:
            continue
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        if match is None or len(source.shape) != 2:
            raise ConvertError(
                f"{folder}: {key} {list(source.shape)}: expected {PREFIX}MODULE.lora_A.weight or lora_B.weight"
                " of a linear layer; merge the adapter with PEFT"
            )
        if not np.isfinite(read_array(source)).all():
            raise ConvertError(f"{folder}: {key}: expected finite numbers, got NaN or infinity")
        modules.setdefault(match[1], {})[match[2]] = source
    for module, factors in modules.items():
        if missing := {"A", "B"} - set(factors):
            raise ConvertError(
                f"{folder}: {module}: lora_{missing.pop()}.weight is missing; copy the complete adapter"
            )
        yield module, factors


def _is_new(config: Mapping[str, Any], name: str) -> bool:
    """Return True if a weight belongs to a module that the adapter stores as a whole (``modules_to_save``)."""
    saved = config.get("modules_to_save")
    module = name.rpartition(".")[0]
    return isinstance(saved, list) and any(
        isinstance(each, str) and f".{module}".endswith(f".{each}") for each in saved
    )


def _named(base: Mapping[str, TensorSource], name: str, folder: Path) -> str:
    """Return the name that a weight of the adapter has in the base model. The base may omit ``model.``, as in
    LeRobot's first files of pi0."""
    for each in (name, name.removeprefix("model.")):
        if each in base:
            return each
    raise ConvertError(
        f"{folder}: {name} is no weight of the base; pass the base that the adapter was trained on with --base"
    )


def _scale(file: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    expected = _of_module(file, config, "rank_pattern", module, config.get("r", 8))
    if expected != rank:
        raise ConvertError(f"{file}: {module}: expected rank {expected}, got {rank}")
    alpha = _of_module(file, config, "alpha_pattern", module, config.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConvertError(f"{file}: lora_alpha: expected a number, got {json.dumps(alpha)[:80]}")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(file: Path, config: Mapping[str, Any], pattern: str, module: str, usual: Any) -> Any:
    """Return a module's own rank or alpha from a table of the adapter's configuration.

    The keys of the table are names of modules, or ends of such names. ``usual`` is the value for all other modules.

    Other regular expressions are rejected, because they come from a file and matching them may take unlimited time.
    """
    table = config.get(pattern) or {}
    if not isinstance(table, dict):
        raise ConvertError(f"{file}: {pattern}: expected a table, got {json.dumps(table)[:80]}")
    for key, value in table.items():
        name = key.removeprefix("^").replace("\\.", ".")
        if not re.fullmatch(r"[\w.]+", name):
            raise ConvertError(
                f"{file}: {pattern}: expected names of modules (no other regular expressions), got {key[:80]!r}"
            )
        if module == name or (not key.startswith("^") and module.endswith(f".{name}")):
            return value
    return usual


def _merged(weight: TensorSource, down: TensorSource, up: TensorSource, scale: float) -> TensorSource:
    def add(values: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return values + np.float32(scale) * (b @ a)

    total = computed(add, weight, down, up, shape=weight.shape)
    total = rounded(total) if weight.type is BF16 else total
    return replace(total, data=Changed(total.data, weight, (down, up, scale)))
