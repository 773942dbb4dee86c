"""Convert OmniVLA checkpoints: directories with the files of OpenVLA, and torch files with the action head and the pose
projector.

Source: NHirose/OmniVLA (inference/run_omnivla.py, prismatic/extern/hf/, prismatic/models/action_heads.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions
from sinew.convert.read.files import directory_config, named
from sinew.convert.tensors import apply, constant
from sinew.convert.tokenizer_files import find_tokenizer
from sinew.core import CameraSpec, ConvertError, PolicySpec
from sinew.families.omnivla import robot
from sinew.families.omnivla.goals import GOALS, POSE, table
from sinew.families.omnivla.model import OmniVLAConfig
from sinew.families.openvla import convert as openvla
from sinew.families.openvla.prismatic import (
    BLOCKS,
    ENDS,
    LANGUAGE,
    PROJECTOR,
    STATE,
    PrismaticCheckpoint,
    towers,
)
from sinew.models.solvers import SINGLE
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.resize import Resize
from sinew.steps.prompt.only_for import OnlyFor

NAMES = ("omnivla",)
OPTIONS = ("tokenizer",)
SETTINGS = robot.SETTINGS
CLASS = "OpenVLAForActionPrediction_MMNv1"
# OmniVLA's runner does not support goals with satellite pictures.
SUPPORTED_GOALS = tuple(n for n, goal in enumerate(GOALS) if "satellite" not in goal)
TEXT_GOALS = tuple(float(n) for n, goal in enumerate(GOALS) if "language" in goal)
NO_TEXT_PROMPT = "In: No language instruction\nOut:"
CAMERAS = ("current", "goal")
CHUNK = 8  # a constant in prismatic/vla/constants.py


def recognises(path: Path) -> bool:
    """Return True for an OpenVLA directory with a pose projector, or with OmniVLA's class in config.json."""
    config = directory_config(path)
    if config.get("model_type") != "openvla":
        return False
    return config.get("architectures") == [CLASS] or any(path.glob("pose_projector--*.pt"))


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported OmniVLA.
    """
    checkpoint = PrismaticCheckpoint(path, options)
    head, pose = checkpoint.part("action_head"), checkpoint.part("pose_projector")
    # The first OmniVLA checkpoints named this file proprio_projector.
    pose = pose or checkpoint.part("proprio_projector")
    for what, part in (("action_head", head), ("pose_projector", pose)):
        if not part:
            raise ConvertError(
                f"{path}: no {what}--*_checkpoint.pt next to the weights. Copy this file of the checkpoint to the"
                " folder"
            )
    text = checkpoint.text_config(openvla.TEXT)
    vision, rules, dead = towers(checkpoint)
    tokenizer = find_tokenizer(options, path, whose="the checkpoint's")
    with named(checkpoint.config.path):
        config = OmniVLAConfig(
            vision=vision,
            projector=(4 * sum(tower.hidden_size for tower in vision), text["hidden_size"]),
            language=openvla.decoder(text),
            vocab_size=text["vocab_size"],
            chunk_size=CHUNK,
            max_action_dim=POSE,
            max_state_dim=POSE + 1,
            stop_token=tokenizer.token_id("</s>"),
        )
    state, state_steps = robot.state(SUPPORTED_GOALS, True, options)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else checkpoint.config["pad_token_id"]
    prompt = openvla.openvla_prompt(tokenizer)
    whole = openvla.image_recipe(checkpoint)
    image = ImageRecipe(
        whole.height,
        whole.width,
        (Resize(whole.height, whole.width, "pil_bicubic"),),
        whole.mean,
        whole.std,
    )
    weights = checkpoint.tensors | head | pose
    reads = constant("reads", np.array(table(range(len(GOALS))), np.float32))
    return Conversion(
        format="omnivla",
        config=config,
        spec=PolicySpec(
            architecture="omnivla",
            name=checkpoint.name,
            cameras=tuple(CameraSpec(name, *robot.FRAME) for name in CAMERAS),
            state=state,
            action=robot.ACTION,
            chunk_size=CHUNK,
            noise_dim=0,
            solver_steps=1,
            max_prompt_tokens=openvla.MAX_TOKENS,
            solver=SINGLE,
            control_hz=robot.HZ,
            n_action_steps=1,
        ),
        processing=Processing(
            image=image,
            prompt=PromptRecipe(
                max_tokens=openvla.MAX_TOKENS,
                vocab_size=config.vocab_size,
                pad_token_id=pad,
                steps=(*prompt[:-1], OnlyFor(POSE, TEXT_GOALS, NO_TEXT_PROMPT), prompt[-1]),
            ),
            state=Normalization("identity"),
            action=Normalization("identity"),
            state_steps=state_steps,
            action_steps=robot.path_steps(options),
            padded_state_dim=POSE + 1,
            padded_action_dim=POSE,
            all_cameras=True,
        ),
        tokenizer=tokenizer.text,
        tensors=apply(weights, [*rules, *LANGUAGE, *PROJECTOR, *ENDS, *BLOCKS, *STATE]) | {"reads": reads},
        dead=(*dead, "language_model.lm_head."),
        sources=[*dict.fromkeys(checkpoint.files), tokenizer.path],
        notes=(
            *robot.notes(SUPPORTED_GOALS, True, options),
            "goals with satellite pictures are rejected, because OmniVLA's runner does not support them",
            *checkpoint.config.leftover(openvla.UNREAD_FIELDS, openvla.SUPPORTED_VALUES),
        ),
    )
