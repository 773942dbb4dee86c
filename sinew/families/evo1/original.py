"""Read Evo-1 checkpoints in the layout of the original repository (MINT-SJTU/Evo-1,
``Evo_1/scripts/Evo1_server.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from sinew.bundle.schema import Normalization
from sinew.convert.options import ConvertOptions
from sinew.convert.read.files import directory_config
from sinew.convert.read.record import JsonRecord
from sinew.convert.read.torch_zip import read_torch, unread_note
from sinew.core import CameraSpec, ConvertError, VectorSpec
from sinew.families.evo1.parts import Parts
from sinew.steps.image.resize import Resize

WEIGHTS, STATISTICS = "mp_rank_00_model_states.pt", "norm_stats.json"
# Number of layers of the language model. It is a constant in the original code.
LAYERS = 14
# Constants of the original repository's server and embedder: pixels, views, prompt tokens and solver steps.
SIDE, VIEWS, TOKENS, STEPS = 448, 3, 1024, 50
VECTOR = 24  # size of every normalised vector in the original server
RESIZE = Resize(height=SIDE, width=SIDE, method="cv_bilinear")
VLM = "OpenGVLab/InternVL3-1B"
EPS = 1e-8
# Fields of config.json that are not read. They concern training, except the number of solver steps, which is a constant
# in the original server.
UNREAD_FIELDS = (
    "device run_name disable_wandb wandb_project debug dataset_type data_paths dataset_config_path use_augmentation"
    " max_samples_per_file video_backend cache_dir lr batch_size num_workers prefetch_factor pin_memory"
    " persistent_workers max_steps warmup_steps grad_clip_norm weight_decay fused_adamw non_finite_max_streak"
    " log_interval ckpt_interval save_dir resume resume_path resume_pretrain dropout num_inference_timesteps"
    " enable_gradient_checkpointing gradient_checkpointing_use_reentrant finetune_vlm finetune_language_model"
    " finetune_vision_model finetune_action_head"
)
SUPPORTED_VALUES = {"action_head": "flowmatching", "binarize_gripper": False, "vision_masked": False}
MODES: dict[str, tuple[Literal["mean_std", "min_max", "quantiles"], tuple[str, str]]] = {
    "normal": ("mean_std", ("mean", "std")),
    "bounds": ("min_max", ("min", "max")),
    "bounds_q99": ("quantiles", ("q01", "q99")),
}


def is_original(path: Path) -> bool:
    """Return True for a folder with a configuration of the original repository."""
    config = directory_config(path)
    return config.get("action_head") == "flowmatching" and "vlm_name" in config and "type" not in config


def read(path: Path, options: ConvertOptions) -> Parts:
    """Read an Evo-1 checkpoint in the layout of the original repository.

    Raises:
        ConvertError: The checkpoint is not supported.
    """
    config = JsonRecord(path / "config.json")
    horizon = config.get("horizon", 16)
    config.expect(return_cls_only=False, image_size=SIDE, action_horizon=horizon)
    file = options.stats or path / STATISTICS
    if not file.is_file():
        raise ConvertError(f"{path}: {STATISTICS} is missing. Pass the statistics with --stats FILE")
    key, table = choose(JsonRecord(file), options.stats_key)
    selected = MODES.get(str(config.get("normalization_type", "bounds")))
    if selected is None:
        raise ConvertError(
            f"{config.path}: normalization_type: expected one of {', '.join(MODES)},"
            f" got {config['normalization_type']!r}"
        )
    mode, names = selected
    notes = [
        f"statistics of {key!r}",
        f"{STEPS} solver steps, as in the original server, which ignores the value in config.json",
    ]
    state, action = table.part("observation.state"), table.part("action")
    if mode == "quantiles" and not all(name in part.content for name in names for part in (state, action)):
        mode, names = MODES["bounds"]
        notes.append("the statistics q01 and q99 are missing; using min and max, as the original server does")
    width = int(options.setting("state_dim", 0))
    state_stats, action_stats = _statistics(state, names, width), _statistics(action, names, 0)
    cameras = options.cameras or tuple(f"image_{index}" for index in range(VIEWS))
    if len(cameras) > VIEWS:
        raise ConvertError(f"--cameras: expected at most {VIEWS}, got {len(cameras)}")
    category = options.embodiment or "0"
    if not category.isdecimal() or int(category) >= config.get("num_categories", 1):
        raise ConvertError(
            f"--embodiment {category}: expected the number of a category, 0 to {config.get('num_categories', 1) - 1}"
        )
    weights = path / WEIGHTS
    if not weights.is_file():
        raise ConvertError(
            f"{path}: the file of weights {WEIGHTS} is missing. Copy it from the training run to the folder"
        )
    sources = read_torch(weights)
    tensors = {n.removeprefix("module."): source for n, source in sources.items() if n.startswith("module.")}
    if not tensors:
        raise ConvertError(
            f"{weights}: expected a dictionary 'module' with the model's tensors. Use the file that DeepSpeed saved"
        )
    return Parts(
        format="evo1",
        name=path.resolve().name,
        vlm=str(config.get("vlm_name", VLM)),
        layers=LAYERS,
        views=VIEWS,
        category=int(category),
        max_tokens=TOKENS,
        side=SIDE,
        resize=RESIZE,
        every_row=True,
        sizes={
            "chunk_size": horizon,
            "max_state_dim": config["state_dim"],
            "max_action_dim": config["per_action_dim"],
            "head_size": config.get("embed_dim", 896),
            "decoder_size": config.get("hidden_dim", 1024),
            "state_size": config.get("state_hidden_dim", 1024),
            "head_heads": config.get("num_heads", 8),
            "head_layers": config.get("num_layers", 8),
        },
        cameras=tuple(CameraSpec(name, SIDE, SIDE) for name in cameras),
        state=VectorSpec(len(state_stats[names[0]])),
        action=VectorSpec(len(action_stats[names[0]])),
        state_normalization=Normalization(mode, state_stats, EPS, "openpi", clip=mode != "mean_std"),
        action_normalization=Normalization(mode, action_stats, EPS, "openpi"),
        action_steps=(),
        solver_steps=STEPS,
        n_action_steps=0,
        control_hz=options.control_hz,
        embodiment=key,
        optional_cameras=len(cameras) - 1,
        tensors=tensors,
        files=[config.path, file, weights],
        notes=(
            *notes,
            *unread_note(weights, sources, "module"),
            *config.leftover(UNREAD_FIELDS, SUPPORTED_VALUES),
        ),
    )


def choose(stats: JsonRecord, option: str) -> tuple[str, JsonRecord]:
    """Choose one set of statistics from a file that may contain several sets.

    Args:
        stats: The statistics file.
        option: The value of --stats-key, or "" for the only statistics.

    Returns:
        The key ("arm" or "arm/dataset") and the statistics.

    Raises:
        ConvertError: The choice is missing or wrong.
    """
    tables: dict[str, JsonRecord] = {}
    for arm in stats.content:
        table = stats.part(arm)
        if "observation.state" in table.content or "action" in table.content:
            tables[arm] = table
        else:
            tables |= {f"{arm}/{dataset}": table.part(dataset) for dataset in table.content}
    key = option or (next(iter(tables)) if len(tables) == 1 else "")
    if key not in tables:
        prefix = f"--stats-key {option}: " if option else ""
        raise ConvertError(
            f"{stats.path}: {prefix}expected --stats-key with one of: {', '.join(tables) or 'none'}"
        )
    return key, tables[key]


def _statistics(part: JsonRecord, names: tuple[str, ...], width: int) -> dict[str, tuple[float, ...]]:
    """Return the statistics by name, padded with zeros to ``width`` as in the original server."""
    stats: dict[str, Any] = {name: np.asarray(part[name], np.float32) for name in names}
    for name, values in stats.items():
        if values.ndim != 1 or not 1 <= len(values) <= VECTOR or len(values) != len(stats[names[0]]):
            raise ConvertError(
                f"{part.path}: {part.name}{name}: expected a list of 1 to {VECTOR} numbers, got {list(values.shape)}"
            )
        if width and width < len(values):
            raise ConvertError(
                f"--set state_dim={width}: expected at least {len(values)}, the size of the statistics"
            )
    return {
        name: tuple(map(float, np.pad(values, (0, max(width - len(values), 0)))))
        for name, values in stats.items()
    }
