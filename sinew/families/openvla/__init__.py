"""OpenVLA (Kim et al. 2024, arXiv 2406.09246), and OpenVLA-OFT and VLA-Adapter, which use its vision towers and files.

OpenVLA generates an action token by token. OpenVLA-OFT and VLA-Adapter return a whole action chunk in one pass.
Reference implementations: openvla/openvla, moojink/openvla-oft and VLA-Adapter.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={
        "openvla": "model:OpenVLA",
        "openvla_oft": "model:OpenVLAOFT",
        "vla_adapter": "adapter:VLAAdapter",
    },
    backbones={
        "openvla": "Llama 2 7B, DINOv2, SigLIP",
        "openvla_oft": "Llama 2 7B, DINOv2, SigLIP",
        "vla_adapter": "Qwen2.5-0.5B, DINOv2, SigLIP",
    },
    converters=("convert",),
    units={"openvla": ("opening",), "openvla_oft": ("opening",), "vla_adapter": ("opening",)},
)
