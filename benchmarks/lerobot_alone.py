"""Time one of LeRobot's own policies with random weights, for the column "LeRobot" of benchmarks/every_family.py.

    PYTHON -m benchmarks.lerobot_alone NAME THREADS RUNS DTYPE

PYTHON belongs to an environment with LeRobot 0.6.1 and transformers (``python -m benchmarks.peers --how``). The policy
has the published size, as LeRobot's own configuration makes it. The observation is already normalised and tokenised, so
only the model is timed. DTYPE is "bfloat16" or "float32", for the policies whose configuration has this choice (pi0 and
pi0.5). The last line of the output is JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from types import SimpleNamespace
from typing import Any

IMAGES, STATE, TOKENS = "observation.images", "observation.state", "observation.language"
SMOLVLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
CLIP = "openai/clip-vit-base-patch16"
PI = {"cameras": 3, "frame": (224, 224), "state": 32, "action": 32, "typed": True}
# Size of the vision and language model of X-VLA (Florence-2 large), as its checkpoints state it.
FLORENCE = {
    "projection_dim": 1024,
    "vision_config": {
        "embed_dim": [256, 512, 1024, 2048], "depths": [1, 1, 9, 1], "num_heads": [8, 16, 32, 64],
        "num_groups": [8, 16, 32, 64], "patch_size": [7, 3, 3, 3], "patch_stride": [4, 2, 2, 2],
        "patch_padding": [3, 1, 1, 1], "patch_prenorm": [False, True, True, True], "window_size": 12,
        "projection_dim": 1024,
    },
    "text_config": {
        "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "vocab_size": 51289,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
# name of the preset -> LeRobot's type, the sizes of its inputs and outputs, and what differs from LeRobot's defaults
POLICIES: dict[str, dict[str, Any]] = {
    "smolvla": {"type": "smolvla", "cameras": 3, "frame": (512, 512), "state": 32, "action": 32, "tokens": 48},
    "pi0": PI | {"type": "pi0", "tokens": 48},
    "pi0.5": PI | {"type": "pi05", "tokens": 200},
    "act": {"type": "act", "cameras": 2, "frame": (480, 640), "state": 14, "action": 14},
    "diffusion": {
        "type": "diffusion", "cameras": 1, "frame": (84, 84), "state": 2, "action": 2, "moments": 2,
        "config": {"crop_shape": None, "num_inference_steps": 100},
    },
    "vqbet": {
        "type": "vqbet", "cameras": 1, "frame": (84, 84), "state": 2, "action": 2, "moments": 5,
        "config": {"crop_shape": None},
    },
    "multi_task_dit": {
        "type": "multi_task_dit", "cameras": 2, "frame": (224, 224), "state": 6, "action": 6, "tokens": 77,
        "moments": 2, "config": {"image_crop_shape": None, "num_inference_steps": 100},
    },
    "xvla": {
        "type": "xvla", "cameras": 3, "frame": (224, 224), "state": 20, "action": 20, "tokens": 64,
        "config": {"florence_config": FLORENCE, "num_image_views": 3},
    },
}  # fmt: skip


def replace_downloads() -> None:
    """Make transformers build the parts that LeRobot downloads with random weights from configurations of this file."""
    import transformers
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        AutoProcessor,
        CLIPTextConfig,
        CLIPVisionConfig,
    )

    from benchmarks.checkpoints.smolvla import vlm_config
    from benchmarks.checkpoints.smolvla_layout import Widths

    about = vlm_config(Widths())
    smolvlm = transformers.SmolVLMConfig(**{key: each for key, each in about.items() if key != "model_type"})
    vision = CLIPVisionConfig(patch_size=16)
    text = CLIPTextConfig()

    def build(cls: Any, name: str, **more: Any) -> Any:
        import torch

        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, str(more.get("torch_dtype", "float32"))))
        try:
            if name == SMOLVLM:
                smolvlm.text_config.dtype = torch.get_default_dtype()
                return transformers.SmolVLMForConditionalGeneration(smolvlm)
            return cls(vision if cls.config_class is CLIPVisionConfig else text)
        finally:
            torch.set_default_dtype(before)

    ids = SimpleNamespace(fake_image_token_id=0, global_image_token_id=1)
    for owner in (AutoModelForImageTextToText, transformers.CLIPVisionModel, transformers.CLIPTextModel):
        owner.from_pretrained = classmethod(build)
    AutoConfig.from_pretrained = lambda *_, **__: smolvlm
    AutoProcessor.from_pretrained = lambda *_, **__: SimpleNamespace(tokenizer=ids)


def build_policy(about: dict[str, Any], dtype: str) -> Any:
    """Return LeRobot's policy of published size with random weights, in ``dtype`` if its configuration has a type."""
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_policy_config

    more: dict[str, Any] = (
        {"pretrained_backbone_weights": None} if about["type"] in ("act", "diffusion", "vqbet") else {}
    )
    more |= about.get("config", {}) | ({"dtype": dtype} if "typed" in about else {})
    config = make_policy_config(about["type"], device="cpu", push_to_hub=False, **more)
    for number in range(about["cameras"]):
        config.input_features[f"{IMAGES}.camera{number}"] = PolicyFeature(
            FeatureType.VISUAL, (3, *about["frame"])
        )
    config.input_features[STATE] = PolicyFeature(FeatureType.STATE, (about["state"],))
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (about["action"],))}
    # The largest policies would not fit the memory in float32 before LeRobot rounds them.
    half = "typed" in about and dtype == "bfloat16"
    torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
    policy = get_policy_class(about["type"])(config).eval()
    torch.set_default_dtype(torch.float32)
    if half:  # LeRobot keeps the projections of actions, state and time in float32
        for name, module in policy.model.named_children():
            if name != "paligemma_with_expert":
                module.float()
    return policy


def observation_of(about: dict[str, Any]) -> dict[str, Any]:
    """Return a random observation as LeRobot's policies get it from their processors."""
    import torch

    moments = (about["moments"],) if "moments" in about else ()
    batch = {
        f"{IMAGES}.camera{n}": torch.rand(1, *moments, 3, *about["frame"]) for n in range(about["cameras"])
    }
    batch[STATE] = torch.rand(1, *moments, about["state"])
    if "tokens" in about:
        batch[f"{TOKENS}.tokens"] = torch.randint(0, 1000, (1, about["tokens"]))
        batch[f"{TOKENS}.attention_mask"] = torch.ones(1, about["tokens"], dtype=torch.bool)
    return batch


def measure(name: str, threads: int, runs: int, dtype: str, began: float) -> dict[str, Any]:
    """Return the processor seconds of one chunk, the peak memory, and the seconds to the first chunk."""
    import torch

    from benchmarks.peers import imported

    imported()
    torch.set_num_threads(threads)
    replace_downloads()
    about = POLICIES[name]
    policy, batch = build_policy(about, dtype), observation_of(about)

    def infer() -> Any:
        with torch.inference_mode():
            if about["type"] == "vqbet":
                images = torch.stack([batch[key] for key in policy.config.image_features], dim=2)
                return policy.vqbet({IMAGES: images, STATE: batch[STATE]}, rollout=True)
            if about["type"] == "multi_task_dit":
                return policy._generate_actions(policy._prepare_batch(batch))  # noqa: SLF001 LeRobot has no public way
            return policy.predict_action_chunk(dict(batch))

    infer()
    ready = time.time() - began
    cpu, clock = time.process_time(), time.perf_counter()
    for _ in range(runs):
        infer()
    kinds = sorted({str(each.dtype)[6:] for each in policy.parameters()})
    return {
        "cpu_s": round((time.process_time() - cpu) / runs, 4),
        "clock_s": round((time.perf_counter() - clock) / runs, 4),
        "ready_s": round(ready, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "about": f"LeRobot 0.6.1, {' and '.join(kinds)}",
        "parameters": sum(each.numel() for each in policy.parameters()),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], time.time())))
