"""The model of BitVLA. It has the same network as OpenVLA-OFT, and the configuration states which weights are
ternary."""

from sinew.families.openvla.model import OpenVLAOFT

__all__ = ["OpenVLAOFT"]
