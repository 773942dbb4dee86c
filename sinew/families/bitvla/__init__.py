"""BitVLA (Wang et al. 2025, arXiv 2506.07530): OpenVLA-OFT with ternary weights.

The language model is BitNet b1.58, and the vision tower may be ternary too. The whole action chunk is computed in one
pass. Reference implementation: ustcwhy/BitVLA.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"bitvla": "model:OpenVLAOFT"},
    backbones={"bitvla": "BitNet b1.58 2B, SigLIP"},
    converters=("convert",),
    units={"bitvla": ("opening",)},
    base="openvla",
)
