"""VLA-JEPA: Qwen3-VL, and GR00T's action head over the outputs at special tokens.

The head denoises the action chunk by flow matching. The world model of VLA-JEPA is only for training. Sinew converts
checkpoints in LeRobot's layout. Reference implementation: LeRobot ``policies/vla_jepa``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"vla_jepa": "model:VLAJepa"},
    backbones={"vla_jepa": "Qwen3-VL"},
    converters=("convert",),
    units={"vla_jepa": ("recorded",)},
    base="gr00t",
)
