"""SmolVLA (Shukor et al. 2025, arXiv 2506.01844) in LeRobot's checkpoint layout."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"smolvla": "model:SmolVLA"},
    backbones={"smolvla": "SmolVLM2"},
    converters=("convert",),
    units={"smolvla": ("recorded",)},
    demo="random_checkpoint.write:write_demo",
    golden="golden:check",
)
