"""CogACT (Li et al. 2024, arXiv 2411.19650): the vision towers and the language model of OpenVLA, followed by a
diffusion transformer.

The diffusion transformer reads one hidden state of the language model, and denoises the action chunk in several steps.
Reference implementation: microsoft/CogACT.
"""

from sinew.core.registry import Family

FAMILY = Family(
    models={"cogact": "model:CogACT"},
    backbones={"cogact": "Llama 2 7B, DINOv2, SigLIP"},
    converters=("convert",),
    units={"cogact": ("opening",)},
    base="openvla",
)
