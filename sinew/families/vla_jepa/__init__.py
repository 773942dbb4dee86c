"""VLA-JEPA in LeRobot's layout: Qwen3-VL, and GR00T's action head over the outputs at special tokens."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"vla_jepa": "model:VLAJepa"},
    backbones={"vla_jepa": "Qwen3-VL"},
    converters=("convert",),
    units={"vla_jepa": ("recorded",)},
    base="gr00t",
)
