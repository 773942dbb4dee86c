"""OmniVLA and OmniVLA-edge (Hirose et al. 2025, arXiv 2509.19480): navigation policies with several kinds of goals.

A goal is a picture, a pose, a satellite picture, a text, or a combination of these. Both policies return a path in one
pass: OmniVLA with OpenVLA-OFT's network, OmniVLA-edge with small vision towers. Reference implementation:
NHirose/OmniVLA.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"omnivla": "model:OmniVLA", "omnivla_edge": "edge:OmniVLAEdge"},
    backbones={"omnivla": "Llama 2 7B, DINOv2, SigLIP", "omnivla_edge": "EfficientNet-B0, CLIP ViT-B/32"},
    converters=("convert", "convert_edge"),
    base="openvla",
)
