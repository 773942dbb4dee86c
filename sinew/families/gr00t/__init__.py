"""GR00T N1.5, N1.6 and N1.7 (NVIDIA 2025, arXiv 2503.14734): a vision-language model and a diffusion transformer.

The diffusion transformer denoises the action chunk by flow matching. Sinew converts checkpoints in the layouts of
NVIDIA and of LeRobot. Reference implementations: NVIDIA's Isaac-GR00T and LeRobot ``policies/groot``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={
        "gr00t_n1_5": "model:Gr00tEagle",
        "gr00t_n1_6": "model:Gr00tEagle",
        "gr00t_n1_7": "model:Gr00tQwen",
    },
    backbones={"gr00t_n1_5": "Eagle 2.5", "gr00t_n1_6": "Eagle 3", "gr00t_n1_7": "Cosmos-Reason2"},
    converters=("convert",),
    hints={"gr00t_n1_5": ("groot: json text",)},
    units={
        "gr00t_n1_5": ("recorded",),
        "gr00t_n1_6": ("opening", "axis-angle"),
        "gr00t_n1_7": ("opening", "axis-angle"),
    },
)
