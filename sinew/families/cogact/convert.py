"""Convert CogACT runs: the files that microsoft/CogACT's training writes, and its hub repositories.

A run consists of ``config.json``, ``dataset_statistics.json`` and ``checkpoints/*.pt``. You may pass the folder or one
of the .pt files. The tensors have the names of Prismatic, which the converter changes to the names of OpenVLA's files.
No file contains the sizes of the vision towers and the language model. The field ``base_vlm`` in config.json contains
their name. The tokenizer is Llama 2's (``--tokenizer``). Sources: microsoft/CogACT (vla/load.py, vla/cogactvla.py,
action_model/), openvla/openvla (prismatic/conf/models.py, vla-scripts/extern/convert_openvla_weights_to_hf.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.schema import Normalization, Processing
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.options import SOLVER_STEPS_SETTING, ConvertOptions, Setting
from sinew.convert.read.files import directory_config, named
from sinew.convert.read.record import JsonRecord
from sinew.convert.read.torch_zip import read_torch, unread_note
from sinew.convert.tensors import Rule, apply, constant, renames
from sinew.convert.tokenizer_files import find_tokenizer
from sinew.core import ConvertError
from sinew.families.cogact.model import LEVELS, CogACT, CogACTConfig
from sinew.families.openvla import convert as openvla
from sinew.families.openvla.prismatic import HEADS, LANGUAGE, OPENVLA, PROJECTOR, PrismaticCheckpoint, towers
from sinew.layers.decoder import DecoderConfig
from sinew.layers.vit import BlockConfig
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.resize import Resize
from sinew.steps.prompt.last import Last

NAMES = ("cogact",)
# Fields of config.json that only concern Prismatic's training.
UNREAD_FIELDS = (
    "data_root_dir run_root_dir pretrained_checkpoint is_resume resume_step resume_epoch run_id run_id_note"
    " save_interval image_aug seed hf_token trackers wandb_project wandb_entity repeated_diffusion_steps"
    " load_all_data_for_training use_ema stage"
)
OPTIONS = ("tokenizer", "stats", "stats_key", "cameras")
SETTINGS = {
    "guidance_scale": Setting(
        float,
        "scale of classifier-free guidance; 1 turns guidance off, with one head run per step (default 1.5)",
        1,
        100,
    ),
    "solver_steps": SOLVER_STEPS_SETTING,
}
# Both values of ``base_vlm`` refer to the same vision towers and the same language model.
BASES = ("prism-dinosiglip-224px+7b", "prism-dinosiglip-224px-controlled+7b")
SIDE = 224
# Pixel statistics of the towers: timm's values for DINOv2 and SigLIP.
MEAN, STD = (
    (0.485, 0.456, 0.406, 0.5, 0.5, 0.5),
    (0.229, 0.224, 0.225, 0.5, 0.5, 0.5),
)
# Values of meta-llama/Llama-2-7b-hf. OpenVLA's own files use the default of 1e-6.
LLAMA_HEADS, LLAMA_EPS = 32, 1e-5
DIT_HEADS = {"DiT-S": 4, "DiT-B": 12, "DiT-L": 16}
# Key: width of the head. Value: its name. Used if config.json does not contain the name.
DIT_WIDTHS = {384: "DiT-S", 768: "DiT-B", 1024: "DiT-L"}
STEPS, GUIDANCE = 10, 1.5  # defaults of CogACT's examples and servers
# Index of the gripper value, which CogACT rounds to 0 or 1, and the threshold.
GRIPPER, OPEN_AT = 6, 0.5
# The token table has Llama's 32000 rows and <PAD>, and is padded to a multiple of this number.
TOKEN_TABLE_MULTIPLE = 64
SECTIONS = ("vision_backbone", "projector", "llm_backbone", "action_model")
NATIVE = [
    Rule(r"vision_backbone\.dino_featurizer\.(.*)\.gamma", (r"vision_backbone.featurizer.\1.scale_factor",)),
    *renames(
        r"vision_backbone\.",
        "vision_backbone.",
        "dino_featurizer=featurizer siglip_featurizer=fused_featurizer",
    ),
    *renames(r"projector\.projector\.", "projector.", "0=fc1 2=fc2 4=fc3"),
    *renames(r"llm_backbone\.", "", "llm=language_model"),
]
NET = r"action_model\.net\."
BLOCK = NET + r"blocks\.(\d+)\."
HEAD = [
    *renames(BLOCK, r"head.layers.\1.", "attn.qkv=attn.{qkv}_proj attn.proj=attn.o_proj mlp"),
    Rule(NET + r"z_embedder\.uncondition", ("head.none",)),
    Rule(NET + "positional_embedding", ("head.places",)),
    *renames(NET, "head.", "z_embedder.linear=condition t_embedder.mlp.0=time_in t_embedder.mlp.2=time_out"),
    *renames(NET, "head.", "x_embedder.linear=action_in final_layer.linear=action_out"),
]
UNUSED_TENSORS = ("language_model.lm_head.", "action_model.net.history_embedder.", "ema_diffusion.")


def run_of(path: Path) -> Path:
    """Return the folder of a training run. ``path`` is this folder, or a file in its subfolder ``checkpoints``."""
    return path.parents[1] if path.suffix == ".pt" and path.parent.name == "checkpoints" else path


def recognises(path: Path) -> bool:
    """Return True for a run of Prismatic's training whose configuration names a base VLM."""
    vla = directory_config(run_of(path)).get("vla")
    return isinstance(vla, dict) and "base_vlm" in vla


class CogACTCheckpoint(PrismaticCheckpoint):
    """A CogACT run. Its tensors have the names of OpenVLA's files."""

    format = "cogact"

    def __init__(self, path: Path, options: ConvertOptions):
        self.path, self.options = run_of(path), options
        self.record = JsonRecord(self.path / "config.json")
        self.files = [self.record.path]
        self.weights = path if path != self.path else only_checkpoint(path)
        if (base := self.record.part("vla")["base_vlm"]) not in BASES:
            raise ConvertError(
                f"{self.record.path}: vla.base_vlm: expected {' or '.join(BASES)}, got {base!r}"
            )
        self.record.expect(past_action_window_size=0)
        facts = {"timm_model_ids": list(HEADS), "image_sizes": [SIDE, SIDE]}
        self.config = JsonRecord(self.record.path, facts)

    @cached_property
    def tensors(self) -> dict[str, TensorSource]:
        sources = read_torch(self.weights)
        self.files.append(self.weights)
        self.unread = unread_note(self.weights, sources, "model")
        inside = {name.removeprefix("model."): t for name, t in sources.items() if name.startswith("model.")}
        sections = {name.partition(".")[0] for name in inside}
        if missing := [name for name in SECTIONS if name not in sections]:
            hint = ""
            if missing == ["action_model"]:
                hint = ". These are weights of OpenVLA or of a language model. CogACT's weights have a head"
            raise ConvertError(
                f"{self.weights}: expected the modules {', '.join(SECTIONS)}, got no {', '.join(missing)}{hint}"
            )
        return apply(inside, NATIVE)


def only_checkpoint(run: Path) -> Path:
    """Return the file with the weights of a training run, which must be the only one.

    Raises:
        ConvertError: There is no such file, or more than one.
    """
    files = sorted(run.glob("checkpoints/*.pt"))
    if len(files) != 1:
        named_ = f"; pass one of them: {', '.join(map(str, files[:4]))}" if files else ""
        raise ConvertError(f"{run}: expected one file checkpoints/*.pt, got {len(files)}{named_}")
    return files[0]


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a run. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The run is not a supported CogACT.
    """
    checkpoint = CogACTCheckpoint(path, options)
    vision, rules, dead = towers(checkpoint)
    with named(checkpoint.weights):
        config = model_config(checkpoint, vision)
    steps = options.setting("solver_steps", STEPS)
    if steps not in (near := LEVELS.possible(steps)):
        raise ConvertError(f"--set solver_steps: expected {' or '.join(map(str, near))}, got {steps}")
    robot = replace(OPENVLA, chunk=config.chunk_size, cameras=options.cameras or OPENVLA.cameras)
    if len(robot.cameras) != 1:
        raise ConvertError(
            f"--cameras: expected one name, because CogACT reads one camera, got {len(robot.cameras)}"
        )
    # Check the statistics now, before the user is told to pass a tokenizer.
    checkpoint.statistics  # noqa: B018
    tokenizer = find_tokenizer(
        options,
        checkpoint.path,
        whose="Llama 2's tokenizer, which is not part of a run (OpenVLA's repository has it),",
    )
    prompt = (*openvla.openvla_prompt(tokenizer), Last(tokenizer.token_id("</s>")))
    head = openvla.HeadPart("cogact", config, HEAD, UNUSED_TENSORS, prompt)
    image = ImageRecipe(SIDE, SIDE, (Resize(SIDE, SIDE, method="pil_bicubic"),), MEAN, STD)
    pad = config.vocab_size - TOKEN_TABLE_MULTIPLE
    processing = openvla.processing(checkpoint, head, robot, pad, image)
    return Conversion(
        format=checkpoint.format,
        config=config,
        spec=replace(
            openvla.spec(checkpoint, head, robot),
            noise_dim=config.max_action_dim,
            solver_steps=steps,
            solver=CogACT.solver,
        ),
        processing=replace(processing, action=snapped(processing), action_parts=()),
        tokenizer=tokenizer.text,
        tensors=apply(checkpoint.tensors, [*rules, *LANGUAGE, *PROJECTOR, *HEAD]) | plain_norms(config),
        dead=(*dead, *UNUSED_TENSORS),
        sources=[*dict.fromkeys(checkpoint.files), tokenizer.path],
        notes=notes(checkpoint, config, robot.cameras[0]),
    )


def model_config(checkpoint: CogACTCheckpoint, vision: tuple[Any, ...]) -> CogACTConfig:
    """Read the model's sizes from the shapes of the tensors. The sizes in ``config.json`` must be the same."""
    tensors = checkpoint.tensors

    def shape(name: str) -> tuple[int, ...]:
        return tensors[name].shape

    def count(pattern: str) -> int:
        return len({int(m[1]) for name in tensors if (m := re.match(pattern, name))})

    vocabulary, width = shape("language_model.model.embed_tokens.weight")
    layer = "language_model.model.layers.0."
    size, dim = shape("action_model.net.x_embedder.linear.weight")
    rows = shape("action_model.net.positional_embedding")[0]
    checkpoint.record.expect(future_action_window_size=rows - 2, action_dim=dim)
    if dim <= GRIPPER:
        raise ConvertError(
            f"{checkpoint.weights}: actions: expected at least {GRIPPER + 1} values, of which the last is the"
            f" gripper, got {dim}"
        )
    kind = checkpoint.record.get("action_model_type", DIT_WIDTHS.get(size))
    # Use a tuple, because the value in the file may be a list, which cannot be hashed.
    if kind not in tuple(DIT_HEADS):
        raise ConvertError(
            f"{checkpoint.record.path}: action_model_type: expected {', '.join(DIT_HEADS)}, got {kind!r}"
        )
    head_dim = width // LLAMA_HEADS
    return CogACTConfig(
        vision=vision,
        projector=(4 * sum(tower.hidden_size for tower in vision), width),
        language=DecoderConfig(
            hidden_size=width,
            intermediate_size=shape(f"{layer}mlp.gate_proj.weight")[0],
            num_layers=count(r"language_model\.model\.layers\.(\d+)\."),
            num_heads=LLAMA_HEADS,
            num_kv_heads=LLAMA_HEADS,
            head_dim=head_dim,
            norm_eps=LLAMA_EPS,
            rope_theta=10_000.0,
        ),
        vocab_size=vocabulary,
        chunk_size=rows - 1,
        max_action_dim=dim,
        head=BlockConfig(
            size, shape("action_model.net.blocks.0.mlp.fc1.weight")[0], count(BLOCK), DIT_HEADS[kind]
        ),
        guidance_scale=checkpoint.options.setting("guidance_scale", GUIDANCE),
    )


def snapped(processing: Processing) -> Normalization:
    """Return CogACT's normalisation of actions.

    Each value is clipped to [-1, 1], and the gripper is rounded to 0 or 1. Then values that the mask includes are
    scaled by quantiles. The other values get the range -1 to 1, which does not change them.
    """
    parts = [(part.dim, part.normalization.stats) for part in processing.action_parts]
    parts = parts or [(processing.padded_action_dim, processing.action.stats)]
    stats = {
        name: tuple(value for dim, stats in parts for value in stats.get(name, (end,) * dim))
        for name, end in (("q01", -1.0), ("q99", 1.0))
    }
    return Normalization(
        "quantiles", stats, eps=0.0, convention="openpi", clip=True, snap=(GRIPPER,), snap_at=OPEN_AT
    )


def plain_norms(config: CogACTConfig) -> dict[str, TensorSource]:
    """Return ones and zeros as weights of the head's norms.

    Sinew's norm layers need weights, and the norms in the checkpoint have none.
    """
    size = config.head.hidden_size
    norms = ["norm", *(f"layers.{i}.norm{n}" for i in range(config.head.num_layers) for n in (1, 2))]
    return {
        name: constant(name, np.full(size, value))
        for norm in norms
        for name, value in ((f"head.{norm}.weight", 1.0), (f"head.{norm}.bias", 0.0))
    }


def notes(checkpoint: CogACTCheckpoint, config: CogACTConfig, camera: str) -> tuple[str, ...]:
    """Return notes for the user about facts that no file of the checkpoint contains, and about parts of the files
    that are ignored."""
    is_default = "guidance_scale" not in checkpoint.options.settings
    reason = (
        ", the default of CogACT's servers; change it with --set guidance_scale=SCALE"
        if is_default
        else ", as set by the user"
    )
    lines = [
        f"statistics {checkpoint.statistics[0]!r} (bounds_q99); camera {camera}",
        f"guidance scale {config.guidance_scale:g}{reason}",
    ]
    lines += checkpoint.unread
    if any(name.startswith("ema_diffusion.") for name in checkpoint.tensors):
        lines.append("the moving average of the head (ema_diffusion) is ignored, as in CogACT's inference")
    return (*lines, *checkpoint.record.leftover(UNREAD_FIELDS))
