"""The pi0 and pi0.5 policies of Physical Intelligence: PaliGemma (a vision-language model), and an action expert,
which is a second, smaller transformer.

The expert denoises the action chunk by flow matching. Sinew converts checkpoints in the layouts of LeRobot and of
openpi. Papers: pi0 (Black et al. 2024, arXiv 2410.24164) and pi0.5 (2025, arXiv 2504.16054). Reference
implementations: openpi and LeRobot ``policies/pi0`` and ``policies/pi05``.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"pi0": "model:PI0", "pi05": "model:PI05"},
    backbones={"pi0": "PaliGemma", "pi05": "PaliGemma"},
    converters=("convert",),
    guesses=("openpi.convert",),
    units={"pi0": ("recorded",), "pi05": ("recorded",)},
)
