"""BitVLA's model, which is OpenVLA-OFT's. The configuration defines which weights are ternary."""

from sinew.families.openvla.model import OpenVLAOFT

__all__ = ["OpenVLAOFT"]
