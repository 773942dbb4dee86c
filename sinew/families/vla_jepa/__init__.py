"""VLA-JEPA: GR00T's head over a language model that is read at marked tokens, in LeRobot's layout."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"vla_jepa": "model:VLAJepa"},
    backbones={"vla_jepa": "Qwen3-VL"},
    converters=("convert",),
    units={"vla_jepa": ("recorded",)},
    base="gr00t",
)
