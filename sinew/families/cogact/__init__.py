"""CogACT (Li et al. 2024, arXiv 2411.19650): OpenVLA's eyes and language model, and a diffusion transformer that reads
one state of theirs."""

from sinew.core.registry import Family

FAMILY = Family(
    models={"cogact": "model:CogACT"},
    backbones={"cogact": "Llama 2 7B, DINOv2, SigLIP"},
    converters=("convert",),
    units={"cogact": ("opening",)},
    base="openvla",
)
