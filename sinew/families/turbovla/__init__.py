"""TurboVLA (2026, arXiv 2607.27205): DINOv3 and BERT encoders, cross-attention between them, and ACT's decoder.

The decoder returns the whole action chunk in one pass. Reference implementation: H-EmbodVis/TurboVLA.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"turbovla": "model:TurboVLA"},
    backbones={"turbovla": "DINOv3 ViT-B/16, BERT base"},
    converters=("convert",),
    units={"turbovla": ("recorded",)},
)
