"""The robots of openpi's published training configurations, as data.

Sources: openpi ``policies/{aloha,droid,libero}_policy.py`` and ``training/config.py``. Names of cameras are the model's
names. ``keys`` has the names of the same data in the messages of openpi's robot scripts.
"""

from __future__ import annotations

from dataclasses import dataclass

from sinew.core import KeyMap, MotionSpec, VectorSpec
from sinew.steps.vector.affine import Affine
from sinew.steps.vector.base import VectorStep
from sinew.steps.vector.linear_to_angle import LinearToAngle

BASE, LEFT, RIGHT = "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"


@dataclass(frozen=True)
class PiEmbodiment:
    """A robot of openpi.

    Attributes:
        name: Name of the robot.
        cameras: The model's names of those camera views that the robot has.
        state: Names and units of the state.
        action: Names and units of an action.
        keys: Names of the robot's data in openpi's messages.
        relative: Action dimensions that are relative to the state, if the policy was trained on relative actions.
        state_steps: Conversions of the state before the model.
        action_steps: Conversions of the actions after the model.
    """

    name: str
    cameras: tuple[str, ...]
    state: VectorSpec
    action: VectorSpec
    keys: KeyMap
    relative: tuple[int, ...] = ()
    state_steps: tuple[VectorStep, ...] = ()
    action_steps: tuple[VectorStep, ...] = ()


def _joints(side: str) -> tuple[str, ...]:
    joints = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
    return tuple(f"{side}_{joint}" for joint in joints)


# The robot measures a gripper's opening in linear units between 0.01844 and 0.05800 m, and its commands are on the
# scale of the gripper joint. The model was trained on the servo's angle, on the scale [0.5476, 1.6296] rad.
_ALOHA_FLIPPED, _ALOHA_GRIPPERS = (1, 2, 8, 9), (6, 13)
_FLIP = Affine(_ALOHA_FLIPPED, scale=-1.0)
ALOHA = PiEmbodiment(
    name="aloha",
    cameras=(BASE, LEFT, RIGHT),
    state=VectorSpec(14, _joints("left") + _joints("right"), (("rad",) * 6 + ("normalized",)) * 2),
    action=VectorSpec(14, _joints("left") + _joints("right"), (("rad",) * 6 + ("normalized",)) * 2),
    keys=KeyMap(
        wire="openpi",
        images={"images/cam_high": BASE, "images/cam_left_wrist": LEFT, "images/cam_right_wrist": RIGHT},
        state=("state",),
        channels_first=True,
        unread=("images/cam_low",),
    ),
    relative=(0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12),
    state_steps=(
        _FLIP,
        Affine(_ALOHA_GRIPPERS, scale=0.05800 - 0.01844, offset=0.01844),
        LinearToAngle(_ALOHA_GRIPPERS, arm=0.036, horn=0.022),
        Affine(_ALOHA_GRIPPERS, scale=1 / (1.6296 - 0.5476), offset=-0.5476 / (1.6296 - 0.5476)),
    ),
    action_steps=(
        _FLIP,
        Affine(
            _ALOHA_GRIPPERS,
            scale=1 / (1.4910 + 0.6213),
            offset=(0.5476 + 0.6213) / (1.4910 + 0.6213),
        ),
    ),
)
DROID = PiEmbodiment(
    name="droid",
    cameras=(BASE, LEFT),
    state=VectorSpec(8, (*(f"joint_{i}" for i in range(1, 8)), "gripper"), ("rad",) * 7 + ("normalized",)),
    action=VectorSpec(8, (*(f"joint_{i}" for i in range(1, 8)), "gripper")),
    keys=KeyMap(
        wire="openpi",
        images={"observation/exterior_image_1_left": BASE, "observation/wrist_image_left": LEFT},
        state=("observation/joint_position", "observation/gripper_position"),
    ),
    relative=tuple(range(7)),
)
LIBERO = PiEmbodiment(
    name="libero",
    cameras=(BASE, LEFT),
    state=VectorSpec(
        8,
        ("x", "y", "z", "axis_x", "axis_y", "axis_z", "finger_left", "finger_right"),
        ("m",) * 3 + ("rad",) * 3 + ("m",) * 2,
    ),
    action=VectorSpec(7, ("dx", "dy", "dz", "drx", "dry", "drz", "gripper")),
    keys=KeyMap(
        wire="openpi",
        images={"observation/image": BASE, "observation/wrist_image": LEFT},
        state=("observation/state",),
    ),
    relative=tuple(range(6)),
)


# DROID's actions are joint velocities. Its controller converts them to changes of up to 0.2 rad from the measured
# joints, 15 times a second (droid-dataset/droid, robot_ik/robot_ik_solver.py, joint_velocity_to_delta). The gripper
# action is a position.
JOINT_VELOCITY = MotionSpec("offsets", tuple(range(7)), tuple(range(7)), 0.2, -1.0, 1.0)
DROID_HZ = 15.0


@dataclass(frozen=True)
class OpenPIConfig:
    """The parts of openpi's training configuration that are not in a checkpoint.

    Attributes:
        embodiment: The robot.
        pi05: True for pi0.5, False for pi0.
        chunk_size: Actions in a chunk.
        relative_actions: True if the model's actions are relative to the state.
        state_in_prompt: True if the prompt of pi0.5 contains the state.
        default_prompt: Prompt that is used if a request has none.
        lora: True if the training used LoRA. A checkpoint without LoRA factors is then incomplete.
        motion: Meaning of the robot's actions (absolute or relative), if no processing step defines it.
        control_hz: Rate of the robot's own controller, in Hz.
    """

    embodiment: PiEmbodiment
    pi05: bool
    chunk_size: int = 50
    relative_actions: bool = False
    state_in_prompt: bool = True
    default_prompt: str = ""
    lora: bool = False
    motion: MotionSpec | None = None
    control_hz: float | None = None


OPENPI_CONFIGS = {
    "pi0_aloha": OpenPIConfig(ALOHA, False, relative_actions=True),
    "pi05_aloha": OpenPIConfig(ALOHA, True, relative_actions=True),
    "pi0_aloha_towel": OpenPIConfig(ALOHA, False, relative_actions=True, default_prompt="fold the towel"),
    "pi0_aloha_tupperware": OpenPIConfig(
        ALOHA,
        False,
        relative_actions=True,
        default_prompt="open the tupperware and put the food on the plate",
    ),
    "pi0_aloha_pen_uncap": OpenPIConfig(ALOHA, False, relative_actions=True, default_prompt="uncap the pen"),
    "pi05_aloha_pen_uncap": OpenPIConfig(ALOHA, True, relative_actions=True, default_prompt="uncap the pen"),
    "pi0_aloha_sim": OpenPIConfig(
        ALOHA, False, default_prompt="Transfer cube", motion=MotionSpec("absolute")
    ),
    "pi0_droid": OpenPIConfig(DROID, False, chunk_size=10, motion=JOINT_VELOCITY, control_hz=DROID_HZ),
    "pi05_droid": OpenPIConfig(DROID, True, chunk_size=15, motion=JOINT_VELOCITY, control_hz=DROID_HZ),
    "pi05_droid_finetune": OpenPIConfig(
        DROID, True, chunk_size=16, motion=JOINT_VELOCITY, control_hz=DROID_HZ
    ),
    "pi05_full_droid_finetune": OpenPIConfig(
        DROID, True, chunk_size=16, relative_actions=True, control_hz=DROID_HZ
    ),
    "pi0_libero": OpenPIConfig(LIBERO, False, relative_actions=True),
    "pi0_libero_low_mem_finetune": OpenPIConfig(LIBERO, False, relative_actions=True, lora=True),
    "pi05_libero": OpenPIConfig(LIBERO, True, chunk_size=10, state_in_prompt=False),
}
