"""BitVLA computes as OpenVLA-OFT does; which weights are ternary is in its configuration."""

from sinew.families.openvla.model import OpenVLAOFT

__all__ = ["OpenVLAOFT"]
