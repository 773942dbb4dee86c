"""LeRobot's own inference of the ACT of research/policies/libero.py: ``python -m research.policies.libero_reference
libero-act.gguf OUT``.

Writes the bundle's weights into OUT as LeRobot's checkpoint of an ``act``, in an environment with LeRobot and Sinew,
and serves it by ``lerobot_policy_sinew.reference``; then ``sinew eval libero-act.gguf --compare tcp://...`` pairs both.

The pipeline, both norms, the transformer and its positions are LeRobot's. Two things it has no name for and are given
to it here: a backbone of 16 channels with norms over groups (torchvision's blocks; a ``vision_backbone`` is a function
of ``torchvision.models``), and a step that halves frames as OpenCV does.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import torch
import torchvision
from lerobot.processor.pipeline import ObservationProcessorStep
from lerobot_policy_sinew import reference
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import sinew
from sinew.core import SinewError
from sinew.families.act.model import ActConfig
from sinew.layers.resnet import ResNetConfig

BACKBONE = "resnet_of_groups"
LATENT = 1  # LeRobot projects a latent of zeros, of which the bias is left
# The backbone's modules here -> torchvision's, then all others -> LeRobot's.
NAMES = (
    (r"vision\.stages\.(\d)\.", lambda found: f"backbone.layer{int(found[1]) + 1}."),
    (r"vision\.stem\.", "backbone.conv1."),
    (r"vision\.stem_norm\.", "backbone.bn1."),
    (r"(backbone.*)\.norm(\d)\.", r"\1.bn\2."),
    (r"(backbone.*)\.shortcut\.", r"\1.downsample.0."),
    (r"(backbone.*)\.shortcut_norm\.", r"\1.downsample.1."),
    (r"((?:en|de)coder)\.(\d)\.", r"\1.layers.\2."),
    (r"((?:en|de)coder)_norm\.", r"\1.norm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.cross\.", ".multihead_attn."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.fc(\d)\.", r".linear\1."),
    (r"^queries\.", "decoder_pos_embed."),
    (r"^places\.", "encoder_1d_feature_pos_embed."),
    (r"^state_proj\.", "encoder_robot_state_input_proj."),
    (r"^latent$", "encoder_latent_input_proj.bias"),
    (r"^connector\.", "encoder_img_feat_input_proj."),
    (r"^action_proj\.", "action_head."),
)


class Halved(ObservationProcessorStep):
    """Frames of any size -> ``side`` pixels, as OpenCV's INTER_AREA makes them of bytes."""

    def __init__(self, side: int):
        self.side = side

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Resize frames, float32 [1, 3, h, w] in [0, 1]."""
        small = {name: self._small(value) for name, value in observation.items() if "image" in name}
        return {**observation, **small}

    def _small(self, frame: Tensor) -> Tensor:
        pixels = (255 * frame[0]).round().to(torch.uint8).permute(1, 2, 0).numpy()
        found = cv2.resize(pixels, (self.side, self.side), interpolation=cv2.INTER_AREA)
        return torch.from_numpy(found).permute(2, 0, 1)[None].float() / 255

    def transform_features(self, features: Any) -> Any:
        """Return the features as they are: the policy's config has the small frames'."""
        return features


class OfGroups(ResNet):
    """torchvision's network with stages of ``config.width`` channels and more."""

    def __init__(self, config: ResNetConfig, **_given: object):
        self.scale = config.width
        groups = lambda channels: nn.GroupNorm(channels // config.group, channels)  # noqa: E731
        super().__init__(BasicBlock, list(config.blocks), norm_layer=groups)
        self.conv1 = nn.Conv2d(3, config.width, 7, 2, 3, bias=False)
        self.bn1 = groups(config.width)
        self.fc = nn.Linear(config.out_channels, 1)  # not run: its width is read

    def _make_layer(self, block: Any, planes: int, *more: Any, **named: Any) -> nn.Sequential:
        if planes == 64:
            self.inplanes = self.scale
        return super()._make_layer(block, planes * self.scale // 64, *more, **named)


def write(bundle: Path, out: Path) -> None:
    """Write LeRobot's checkpoint. Raises :class:`SinewError` for another kind of policy."""
    with sinew.load(bundle, engine="eager") as policy:
        spec, config, recipe = policy.spec, policy.engine.model.config, policy.manifest.processing
        if not isinstance(config, ActConfig) or not config.vision.group or config.environment_dim:
            raise SinewError(
                f"{bundle}: expected the ACT of research/policies/libero.py, got {spec.architecture}"
            )
        own = {name: weight.float() for name, weight in policy.engine.model.state_dict().items()}
    side = recipe.image.height
    frames = [f"observation.images.{camera.name}" for camera in spec.cameras]
    inputs = {name: {"type": "VISUAL", "shape": [3, side, side]} for name in frames}
    inputs["observation.state"] = {"type": "STATE", "shape": [spec.state.dim]}
    outputs = {"action": {"type": "ACTION", "shape": [spec.action.dim]}}
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
    settings = {
        "type": "act",
        "device": "cpu",
        "input_features": inputs,
        "output_features": outputs,
        "normalization_mapping": modes,
        "chunk_size": config.chunk_size,
        "n_action_steps": config.chunk_size,
        "vision_backbone": BACKBONE,
        "pretrained_backbone_weights": None,
        "pre_norm": config.pre_norm,
        "dim_model": config.hidden_size,
        "n_heads": config.num_heads,
        "dim_feedforward": config.intermediate_size,
        "feedforward_activation": config.activation,
        "n_encoder_layers": config.encoder_layers,
        "n_decoder_layers": config.decoder_layers,
        "use_vae": False,
        "latent_dim": LATENT,
    }
    norm = {"eps": recipe.state.eps, "features": inputs | outputs, "norm_map": modes}
    before, after = "before.safetensors", "after.safetensors"
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", settings)
    steps = [
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "device_processor", "config": {"device": "cpu"}},
        {"class": f"research.policies.libero_reference.{Halved.__name__}", "config": {"side": side}},
        {"registry_name": "normalizer_processor", "config": norm, "state_file": before},
    ]
    write_json(out / "policy_preprocessor.json", {"name": "policy_preprocessor", "steps": steps})
    back = [{"registry_name": "unnormalizer_processor", "config": norm, "state_file": after}]
    write_json(out / "policy_postprocessor.json", {"name": "policy_postprocessor", "steps": back})
    stats = {"observation.state": recipe.state.stats, "action": recipe.action.stats}
    stats |= {name: {"mean": recipe.image.mean, "std": recipe.image.std} for name in frames}
    numbers = {
        f"{feature}.{name}": torch.tensor(values).reshape(-1, *([1, 1] if feature in frames else []))
        for feature, each in stats.items()
        for name, values in each.items()
    }
    save_file(numbers, out / before)
    save_file(numbers, out / after)
    save_file({f"model.{name}": weight for name, weight in renamed(own).items()}, out / "model.safetensors")


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file. `sinew_eval` has such a function too, but this environment does not have `sinew_eval`."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def renamed(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors under LeRobot's names; what it computes itself is left out."""
    out: dict[str, Tensor] = {}
    for name, weight in own.items():
        if name == "view_places":
            continue
        theirs = name
        for pattern, to in NAMES:
            theirs = re.sub(pattern, to, theirs)
        if found := re.fullmatch(r"(.+_attn)\.q_proj\.(\w+)", theirs):
            parts = [own[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            out[f"{found[1]}.in_proj_{found[2]}"] = torch.cat(parts)
        elif not re.search(r"\.[kv]_proj\.", theirs):
            out[theirs] = weight.contiguous()
    pixel = "encoder_img_feat_input_proj.weight"  # a convolution of one pixel
    out[pixel] = out[pixel][..., None, None]
    out["encoder_latent_input_proj.weight"] = torch.zeros(
        *out["encoder_latent_input_proj.bias"].shape, LATENT
    )
    return out


def main() -> None:
    """Write the checkpoint, and serve it with what else the line says (``--port``)."""
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    bundle, out, *more = sys.argv[1:]
    write(Path(bundle), Path(out))
    with sinew.load(bundle, engine="eager") as policy:
        vision = policy.engine.model.config.vision
    setattr(torchvision.models, BACKBONE, partial(OfGroups, vision))
    sys.argv[1:] = [out, "--bundle", bundle, *more]
    reference.main()


if __name__ == "__main__":
    main()
