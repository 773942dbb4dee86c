"""The parts that all checkpoints with OpenVLA's files share: files, vision towers, statistics, and constants of
robots.

The constants are in no file of a checkpoint. Sources: openvla/openvla, moojink/openvla-oft
(prismatic/vla/constants.py, experiments/robot/openvla_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from sinew.bundle.schema import Normalization, VectorPart
from sinew.bundle.writer import TensorSource
from sinew.convert.names import language_rules
from sinew.convert.options import ConvertOptions
from sinew.convert.read.files import named, read_json
from sinew.convert.read.record import JsonRecord
from sinew.convert.read.safetensors import read_weights
from sinew.convert.read.torch_zip import read_torch
from sinew.convert.tensors import Rule, join, pick, renames, reshape
from sinew.core import ConvertError
from sinew.layers.vit import ViTConfig

# Attention heads of the timm models in published checkpoints, which are in no configuration.
HEADS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": 16,
    "vit_so400m_patch14_siglip_224": 16,
}
# Epsilon of the towers' norms, timm's default for these models.
EPS = 1e-6
TOWERS = ("vision_backbone.featurizer.", "vision_backbone.fused_featurizer.")


@dataclass(frozen=True)
class RobotConstants:
    """Constants of a robot in the training project's code, which are in no file of a checkpoint.

    Attributes:
        chunk: Actions in a chunk.
        mode: Kind of the statistics, "bounds_q99" or "bounds".
        cameras: Names of the cameras.
    """

    chunk: int
    mode: str
    cameras: tuple[str, ...]


# Key: (size of an action, size of the state). Value: the constants of this robot in prismatic/vla/constants.py.
ROBOTS = {
    # Constants for the robot of the simulated benchmark LIBERO.
    (7, 8): RobotConstants(8, "bounds_q99", ("full_image", "wrist_image")),
    # Constants for the robot ALOHA.
    (14, 14): RobotConstants(25, "bounds", ("full_image", "left_wrist_image", "right_wrist_image")),
    # Constants for the Bridge data set.
    (7, 7): RobotConstants(5, "bounds_q99", ("full_image",)),
}
# OpenVLA itself has the same constants for every robot.
OPENVLA = RobotConstants(1, "bounds_q99", ("full_image",))


class PrismaticCheckpoint:
    """A directory with ``config.json``, weight shards, and optional .pt files with the head and the state projector.

    Attributes:
        format: Name of the checkpoint's layout. The bundle records it as its origin.
        spare_blocks: Number of blocks at the end of each tower whose outputs are not used.
    """

    format = "openvla"
    spare_blocks = 1

    def __init__(self, path: Path, options: ConvertOptions):
        self.path, self.options = path, options
        for pattern, what in (
            ("vision_backbone--*.pt", "FiLM layers in the towers"),
            ("noisy_action_projector--*.pt", "a diffusion head"),
        ):
            if files := sorted(path.glob(pattern)):
                raise ConvertError(f"{files[0]}: Sinew does not support {what}; convert another checkpoint")
        self.config = JsonRecord(path / "config.json")
        self.files = [self.config.path]

    def text_config(self, defaults: Mapping[str, Mapping[str, Any]]) -> JsonRecord:
        """Return the language model's configuration, filled with the defaults of its class.

        Args:
            defaults: Defaults of each supported model_type.

        Raises:
            ConvertError: The model_type is not supported, or the positions are rescaled.
        """
        text = self.config.part("text_config")
        if (kind := text.get("model_type")) not in defaults:
            raise ConvertError(
                f"{text.path}: text_config.model_type: expected {' or '.join(defaults)}, got {kind!r}"
            )
        text.expect(rope_scaling=None)
        return text.filled(defaults[kind])

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def preprocessor(self) -> JsonRecord:
        """Return the configuration of the image processor."""
        record = JsonRecord(self.path / "preprocessor_config.json")
        self.files.append(record.path)
        return record

    @cached_property
    def tensors(self) -> dict[str, TensorSource]:
        weights = [self.path / name for name in ("model.safetensors", "model.safetensors.index.json")]
        if (self.path / "lora_adapter").is_dir() and not any(file.exists() for file in weights):
            raise ConvertError(
                f"{self.path} contains only a LoRA adapter; merge it into its base model first (OpenVLA's"
                " vla-scripts/merge_lora_weights_and_save.py)"
            )
        tensors, files = read_weights(self.path)
        self.files += files
        return tensors

    def part(self, name: str) -> dict[str, TensorSource]:
        """Read the tensors of ``NAME--STEP_checkpoint.pt`` with the highest step. Empty if there is no such file."""
        files = sorted(self.path.glob(f"{name}--*.pt"), key=_step)
        if not files:
            return {}
        self.files.append(files[-1])
        return {key.removeprefix("module."): source for key, source in read_torch(files[-1]).items()}

    @cached_property
    def statistics(self) -> tuple[str, dict[str, Any]]:
        """The statistics that the user chose with ``--stats-key``, or the only ones: (name of the data set, its
        statistics).
        """
        own, option = self.path / "dataset_statistics.json", self.options.stats
        file = option or (own if own.exists() else None)
        if file is not None:
            table: Any = read_json(file)
            self.files.append(file)
        else:
            table = self.config.get("norm_stats")
        if not isinstance(table, dict) or not table:
            raise ConvertError(
                f"{self.path}: no statistics in dataset_statistics.json or in norm_stats of config.json; pass the"
                " statistics of the fine-tuning run with --stats FILE"
            )
        key = self.options.stats_key or (next(iter(table)) if len(table) == 1 else "")
        if key not in table:
            problem = f"no statistics {key!r}" if key else f"statistics of {len(table)} data sets"
            raise ConvertError(
                f"{file or self.path}: {problem}; pass --stats-key with one of: {', '.join(sorted(table))}"
            )
        return key, table[key]

    def action_units(self, dim: int) -> tuple[str, ...]:
        """Return the units of actions, or () if the statistics have no mask.

        In RLDS data sets the gripper's value is how far it is open, and the mask excludes this value from the
        normalisation.
        """
        _, table = self.statistics
        entry = table.get("action") if isinstance(table, dict) else None
        mask = entry.get("mask") if isinstance(entry, dict) else None
        if not isinstance(mask, list) or len(mask) != dim or mask[-1]:
            return ()
        return ("",) * (dim - 1) + ("opening",)

    def normalization(
        self, vector: str, dim: int, mode: str, eps: float, clip: bool, masked: bool = True
    ) -> tuple[Normalization, tuple[VectorPart, ...]]:
        """Build the normalisation of a vector.

        Args:
            vector: "action" or "proprio".
            dim: Size of the vector.
            mode: "bounds_q99" or "bounds".
            eps: Small number that is added to the width of a range to avoid a division by zero.
            clip: True clips the result to [-1, 1].
            masked: True applies the mask in the statistics.

        Returns:
            The normalisation, and its parts if the mask excludes some values.
        """
        low, high = ("q01", "q99") if mode == "bounds_q99" else ("min", "max")
        key, table = self.statistics
        entry = table.get(vector) if isinstance(table, dict) else None
        try:
            stats = {name: tuple(float(x) for x in entry[name]) for name in (low, high)}  # type: ignore[index]
            mask = [bool(keep) for keep in (entry.get("mask") if masked else None) or [True] * dim]  # type: ignore[union-attr]
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ConvertError(
                f"{self.path}: statistics {key!r} have no {low} and {high} of {vector!r}; pass other statistics with"
                " --stats FILE or --stats-key KEY"
            ) from None
        if {len(mask), *map(len, stats.values())} != {dim}:
            sizes = ", ".join(f"{name} {len(values)}" for name, values in stats.items())
            raise ConvertError(
                f"{self.path}: statistics {key!r} of {vector!r}: expected {dim} values, got {sizes}. Pass the"
                " statistics of this robot with --stats FILE"
            )

        def of(first: int, end: int) -> Normalization:
            if not mask[first]:
                return Normalization("identity")
            part = {name: values[first:end] for name, values in stats.items()}
            kind: Any = "quantiles" if mode == "bounds_q99" else "min_max"
            return Normalization(kind, part, eps=eps, convention="openpi", clip=clip)

        if all(mask):
            return of(0, dim), ()
        edges = [0, *(i for i in range(1, dim) if mask[i] != mask[i - 1]), dim]
        parts = tuple(VectorPart(f"{vector}.{a}-{b - 1}", b - a, of(a, b)) for a, b in pairwise(edges))
        return Normalization("identity"), parts


def _step(path: Path) -> tuple[int, str]:
    number = re.search(r"--(\d+)_checkpoint", path.name)
    return (int(number[1]) if number else -1), path.name


def towers(checkpoint: PrismaticCheckpoint) -> tuple[tuple[ViTConfig, ...], list[Rule], tuple[str, ...]]:
    """Read the vision towers.

    The features are the output of the second last block, so the last block, the final norm and SigLIP's pooling head
    are not needed. Widths and depths are in no configuration, so they are read from the tensors.

    Returns:
        The sizes of the towers, the rules that rename their tensors, and the prefixes of the names of tensors that
        inference does not use.
    """
    names, tensors = checkpoint.config["timm_model_ids"], checkpoint.tensors
    side = checkpoint.config["image_sizes"][0]
    configs, rules, dead = [], list[Rule](), []
    for index, (prefix, name) in enumerate(zip(TOWERS, names, strict=False)):
        if name not in HEADS:
            raise ConvertError(f"timm_model_ids: expected {' or '.join(HEADS)}, got {name!r}")
        blocks = {
            int(m[1]) for key in tensors if (m := re.match(re.escape(prefix) + r"blocks\.(\d+)\.", key))
        }
        try:
            patch = tensors[f"{prefix}patch_embed.proj.weight"].shape
            hidden = tensors[f"{prefix}blocks.0.mlp.fc1.weight"].shape[0]
        except KeyError as error:
            raise ConvertError(
                f"{checkpoint.path}: the tensor {error} of the tower {name!r} is missing. Use a complete checkpoint"
            ) from None
        tokens = [f"{prefix}{t}" for t in ("cls_token", "reg_token") if f"{prefix}{t}" in tensors]
        depth, target = len(blocks) - checkpoint.spare_blocks, f"vision.towers.{index}."
        with named(f"{checkpoint.path}: tower {name!r}"):
            configs.append(
                ViTConfig(
                    hidden_size=patch[0],
                    intermediate_size=hidden,
                    num_layers=depth,
                    num_heads=HEADS[name],
                    image_size=side,
                    patch_size=patch[-1],
                    norm_eps=EPS,
                    activation="gelu",
                    prefix_tokens=sum(tensors[t].shape[1] for t in tokens),
                    layer_scale=f"{prefix}blocks.0.ls1.scale_factor" in tensors,
                    final_norm=False,
                )
            )
        if tokens:
            joined = join(*(pick(tensors.pop(t), 0) for t in tokens))
            tensors[f"{target}prefix"] = joined
        rules += tower_rules(prefix, target)
        dead += [f"{prefix}blocks.{depth}.", f"{prefix}norm.", f"{prefix}attn_pool."]
    return (
        tuple(configs),
        [Rule("|".join(re.escape(d) + ".*" for d in dead), (r"\g<0>",)), *rules],
        tuple(dead),
    )


def tower_rules(prefix: str, target: str) -> tuple[Rule, ...]:
    """Return the rules that give the tensors of timm's VisionTransformer the names of
    :class:`sinew.layers.vit.VisionTransformer`.
    """
    theirs, layer = re.escape(prefix), target + r"layers.\1."
    block, places = theirs + r"blocks\.(\d+)\.", f"{target}position_embedding.weight"
    return (
        *renames(block, layer, "attn.qkv=attn.{qkv}_proj attn.proj=attn.o_proj norm1 norm2 mlp"),
        Rule(block + r"ls([12])\.scale_factor", (rf"{layer}scale\2.weight",)),
        *renames(theirs, target, "patch_embed.proj=patch_embedding"),
        Rule(theirs + "pos_embed", (places,), lambda source: reshape(source, -1, source.shape[-1])),
    )


LANGUAGE = language_rules(r"language_model\.model\.")
PROJECTOR = renames(r"projector\.", "vision.projector.", "fc1=layers.0 fc2=layers.1 fc3=layers.2")
STATE = renames("", "state_proj.", "fc1=layers.0 fc2=layers.1")
ENDS = renames(r"model\.", "head.", "layer_norm1=norm_in fc1=proj_in layer_norm2=norm_out fc2=proj_out")
BLOCK = r"model\.mlp_resnet_blocks\.(\d+)\."
BLOCKS = renames(BLOCK, r"head.blocks.\1.", "ffn.0=norm ffn.1=proj")
