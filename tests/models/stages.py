"""The stages of every family in the order of their computation, with the outputs that the reference stored.

``stages(case, policy, golden)`` computes a golden case, and computes it again with noise. It yields each stored
tensor. The parity tests require that all of them agree. The planted errors (test_planted_errors.py) state which
tensor must differ first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sinew.core import Moment, Observation
from sinew.models.base import AutoregressiveModel
from sinew.models.solvers import solve
from sinew.policy import Policy
from tests.closeness import Rounding, Run, runs
from tests.convert.test_groot import observation as groot_observation
from tests.convert.test_groot import reference_pixels
from tests.golden import Golden, integrate


class Stage(NamedTuple):
    """A tensor of Sinew, and the same tensor of the reference."""

    name: str
    found: Tensor
    expected: Tensor


STATES = ("state_raw", "environment_state_raw")
CASES = (
    *("smolvla-2cam", "smolvla-3cam-padded", "pi0-2cam", "pi05-2cam", "pi05-mem", "pi0fast-2cam"),
    *("groot-n17", "groot-n16", "groot-n15"),
    *("evo1", "evo1-mint", "openvla-oft", "openvla-ar", "vla-adapter", "bitvla", "vla-jepa"),
    *("cogact", "omnivla", "omnivla-edge"),
    *("act-2cam", "act-env", "diffusion-ddim", "diffusion-ddpm", "xvla-ee6d", "xvla-auto"),
    *("vqbet-parallel", "vqbet-sequential", "mtdit-ddim", "mtdit-ddpm"),
    *("eo1-2cam", "eo1-fast", "wallx-2cam", "wallx-3cam"),
    *("act-sizes", "act-3cam"),
    *("turbovla", "turbovla-3cam"),
    *("molmoact2-2cam", "molmoact2-3cam"),
)
LARGE = ("evo1-mint", "vla-adapter", "diffusion-ddpm")  # these cases take a third of the time of all cases


def each(cases: Collection[str]) -> pytest.MarkDecorator:
    """Parametrize a test by ``case``. The large cases are slow."""
    params = [pytest.param(case, marks=[pytest.mark.slow] * (case in LARGE)) for case in cases]
    return pytest.mark.parametrize("case", params)


def stages(case: str, policy: Policy, g: Golden) -> Iterator[tuple[str, Rounding, Tensor]]:
    """Yield the name, Sinew's result with its rounding, and the reference's result, for every stage of a golden
    case."""
    plainly, (noisily,) = runs(1)
    every = zip(computed(case, policy, g, plainly), computed(case, policy, g, noisily), strict=True)
    for (name, found, expected), (_, noisy, _) in every:
        shape = expected.shape
        yield name, Rounding(found.reshape(shape), [noisy.reshape(shape)]), expected


def computed(case: str, policy: Policy, g: Golden, run: Run) -> Iterator[Stage]:
    """Yield every stage, computed with ``run``. The last stage is the actions of the whole policy."""
    family = next(steps for prefix, steps in FAMILIES.items() if case.startswith(prefix))
    given = observation(case, g)
    yield from family(policy, g, given, run)
    found = torch.from_numpy(run(policy.infer, given).actions)
    if policy.facts.chooses_tokens:  # numpy makes a chunk from equal token ids, and its rounding has no noise
        found = run(torch.mul, found, 1.0)
    expected = g["actions"].reshape(-1, g["actions"].shape[-1])[:, : found.shape[1]]
    yield Stage("actions", found, expected)


def observation(case: str, g: Golden) -> Observation:
    """Return the observation that the reference got."""
    if case.startswith("groot"):
        return groot_observation(g)
    if case.startswith("evo1"):
        return evo1_observation(g)
    if case.startswith("pi0fast"):
        return fast_observation(g, 0)
    if case.startswith(("diffusion", "mtdit")):
        return moments_observation(g, diffusion_noise(g))
    if case.startswith("vqbet"):
        return moments_observation(g, code_noise(g))
    if case == "pi05-mem":
        return memory_observation(g)
    if case == "omnivla-edge":
        return navigation_observation(g)
    given = {
        "images": {name.removeprefix("observation.images."): g.numpy(f"frame.{name}") for name in g.cameras},
        "state": np.concatenate([np.zeros(0, np.float32), *(g.numpy(n) for n in STATES if n in g.tensors)]),
        "prompt": g.metadata["task"],
    }
    if "noise" in g.tensors:
        given["noise"] = g.numpy("noise").reshape(g["noise"].shape[-2:])
    return Observation.from_mapping(given)


def fast_observation(g: Golden, number: int) -> Observation:
    """Return one of the observations of pi0-FAST, which share their frames."""
    given = {
        "images": {name.removeprefix("observation.images."): g.numpy(f"frame.{name}") for name in g.cameras},
        "state": g.numpy(f"case{number}.state_raw"),
        "prompt": json.loads(g.metadata["task"])[number],
    }
    return Observation.from_mapping(given)


def moments_observation(g: Golden, noise: np.ndarray) -> Observation:
    """Return the observation of a policy with an observation history."""
    moments = [
        Moment(
            {name.removeprefix("observation.images."): g.numpy(f"frame.{name}")[i] for name in g.cameras},
            state,
        )
        for i, state in enumerate(g.numpy("state_raw"))
    ]
    *earlier, newest = moments
    task = g.metadata["task"]
    return Observation(newest.images, newest.state, prompt=task, noise=noise, earlier=tuple(earlier))


def diffusion_noise(g: Golden) -> np.ndarray:
    """Return the noise of Diffusion Policy, including the noise of each step if the sampler needs it."""
    noise = g.numpy("noise")[0]
    if "step_noise" in g.tensors:
        noise = np.concatenate([noise[None], g.numpy("step_noise")[:, 0]])
    return noise


def code_noise(g: Golden, draws: int | None = 0) -> np.ndarray:
    """Return VQ-BeT's noise for a set of draws. None gives the most likely codes. Further numbers are not read."""
    rows, dim = g["actions"].shape[1:]
    layers, codes = g["code_noise"].shape[2:]
    noise = np.ones((max(rows, layers), max(dim, codes)), np.float32)
    if draws is not None:
        noise[:layers, :codes] = g.numpy("code_noise")[draws, len(g["state_raw"]) - 1]
    return noise


def memory_observation(g: Golden, step: int = 5, moments: int = 3, stride: int = 2) -> Observation:
    """Return the observation at a control step of pi0.5 with memory. At the start of the episode, its history is
    shorter."""
    *earlier, newest = (
        Moment(
            {name.removeprefix("observation.images."): g.numpy(f"frame.{name}")[at] for name in g.cameras},
            g.numpy("state_raw")[at],
        )
        for at in range(step - (moments - 1) * stride, step + 1, stride)
        if at >= 0
    )
    task, noise = g.metadata["task"], g.numpy("noise")[0]
    return Observation(newest.images, newest.state, prompt=task, noise=noise, earlier=tuple(earlier))


def navigation_observation(g: Golden, goal: int | None = None) -> Observation:
    """Return the observation of OmniVLA-edge: a frame for each observation step, and the pictures of the goal.

    Args:
        g: The golden case.
        goal: Number of the goal.
    """
    named = [name.partition(".") for name in g.cameras]
    still = {name: g.numpy(f"frame.{name}") for name, dot, _ in named if not dot}
    state = g.numpy("state_raw").copy()
    if goal is not None:
        state[-1] = goal
    *earlier, newest = (
        Moment({"current": g.numpy(f"frame.{name}.{at}"), **still}, state) for name, dot, at in named if dot
    )
    return Observation(newest.images, newest.state, prompt=g.metadata["task"], earlier=tuple(earlier))


def evo1_observation(g: Golden, **changes: Any) -> Observation:
    """Return the observation of Evo-1. Its original server swaps the colours, because its clients send BGR."""
    cameras = [name for name in g.cameras if f"frame.{name}" in g.tensors]
    order = -1 if g.metadata["family"] == "evo1-mint" else 1
    frames = {name: np.ascontiguousarray(g.numpy(f"frame.{name}")[..., ::order]) for name in cameras}
    given = {"images": frames, "state": g.numpy("state_raw"), "prompt": g.metadata["task"]}
    return Observation.from_mapping({**given, "noise": g.numpy("noise")[0], **changes})


def arguments(policy: Policy, given: Observation, padded: bool = False) -> tuple[Tensor, ...]:
    """Return pixels, camera mask, tokens, token mask and state as inputs of the model, with a batch axis."""
    inputs = policy.processor.inputs(given, padded=padded)
    arrays = (inputs.pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)
    return tuple(torch.from_numpy(np.asarray(array))[None] for array in arrays)


class Outputs(list[Tensor]):
    """Within the block, record the outputs of modules."""

    def __init__(self, modules: Any):
        super().__init__()
        self._modules = modules

    def __enter__(self) -> Outputs:
        self._hooks = [module.register_forward_hook(self._note) for module in self._modules]
        return self

    def _note(self, _module: Any, _inputs: Any, output: Any) -> None:
        self.append(output[0] if isinstance(output, tuple) else output)

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


class Inputs(Outputs):
    """Within the block, record the inputs of modules."""

    def _note(self, _module: Any, inputs: Any, _output: Any) -> None:
        self.append(inputs[0])


# ----------------------------------------------------------------------------- SmolVLA, pi0, pi0.5


def smolvla(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    image_tokens = yield from views(policy, g, run)
    spare = policy.padded_state_dim - policy.spec.state.dim
    state = torch.nn.functional.pad(g["state_normalized"], (0, spare))
    mask = torch.ones(1, len(g.cameras), dtype=torch.bool)
    x, valid, _ = run(model.embed_prefix, image_tokens, mask, g["lang_tokens"], g["lang_mask"], state)
    yield Stage("prefix_embs", x, g["prefix_embs"])
    hidden, cache = run(model.language, x, valid.long().cumsum(1) - 1, g["prefix_att_2d"])
    for layer, (k, v) in enumerate(cache):
        yield Stage(f"kv.{layer}.k", k, g[f"kv.{layer}.k"])
        yield Stage(f"kv.{layer}.v", v, g[f"kv.{layer}.v"])
    yield Stage("prefix_out_normed", run(model.language.norm, hidden), g["prefix_out_normed"])
    rest = arguments(policy, given)[1:]
    yield from velocities(policy, g, run, run(model.prefix, image_tokens, *rest))


def pi(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    _, *rest = arguments(policy, given, padded=True)
    image_tokens = yield from views(policy, g, run)
    yield from of_the_prefix(model, g, image_tokens, rest, run)
    yield from velocities(policy, g, run, run(model.prefix, image_tokens, *rest))


def of_the_prefix(
    model: Any, g: Golden, image_tokens: Tensor, rest: list[Tensor], run: Run
) -> Iterator[Stage]:
    """Yield the prefix, the outputs of the language model, and the time embeddings. rest: further arguments of
    ``read``."""
    x, valid, _ = run(model.embed_prefix, image_tokens, *rest)
    assert torch.equal(valid, g["prefix_pad_masks"])
    yield Stage("prefix_embs", x, g["prefix_embs"])
    mask = model.prefix_mask(valid, torch.zeros_like(valid))
    _, cache = run(model.language, x, valid.long().cumsum(1) - 1, mask)
    for layer, (k, v) in enumerate(cache):
        # The padded rows are never read, and upstream's differ because its mask rounds differently.
        yield Stage(f"kv.{layer}.k", k[valid], g[f"kv.{layer}.k"].transpose(1, 2)[valid])
        yield Stage(f"kv.{layer}.v", v[valid], g[f"kv.{layer}.v"].transpose(1, 2)[valid])
    if "adarms_cond" in g.tensors:
        for step, t in enumerate(g["t"]):
            yield Stage(f"adarms_cond.{step}", run(model.condition, t), g["adarms_cond"][step])


def memory(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    """Yield the stages from the reference's own pixels on. test_pi_memory.py compares Sinew's pixels."""
    model: Any = policy.engine.model
    _, *rest = arguments(policy, given, padded=True)
    pixels = torch.stack([g[f"pixel_values.{name}"][0] for name in g.cameras], dim=1).flatten(0, 1)[None]
    with Outputs(layer.attn.o_proj for layer in model.vision.layers[1::2]) as outputs:
        image_tokens = run(model.embed_images, pixels)
    # the outputs of the first camera; the last such layer has only the newest frame
    for index, output in enumerate(outputs):
        found, stored = output[: len(output) // len(g.cameras)], g[f"space_time.{index}"]
        found = found.reshape(-1, *stored.shape[2:])
        yield Stage(f"vision.space_time.{index}", found, stored[0, -len(found) :])
    for view, camera in enumerate(g.cameras):
        yield Stage(f"image_tokens.{camera}", image_tokens[:, view], g[f"image_tokens.{camera}"])
    yield from of_the_prefix(model, g, image_tokens, rest, run)
    yield from velocities(policy, g, run, run(model.prefix, image_tokens, *rest))


def views(policy: Policy, g: Golden, run: Run) -> Iterator[Stage]:
    """Yield the stages of the vision tower, from the reference's own pixels."""
    pixels = torch.stack([g[f"pixel_values.{camera}"][0] for camera in g.cameras])[
        None
    ]  # shape [1, V, 3, H, W]
    image_tokens = run(policy.engine.model.embed_images, pixels)
    for view, camera in enumerate(g.cameras):
        yield Stage(f"image_tokens.{camera}", image_tokens[:, view], g[f"image_tokens.{camera}"])
    return image_tokens


def velocities(policy: Policy, g: Golden, run: Run, prefix: Any) -> Iterator[Stage]:
    """Yield the velocities at the reference's own points, then the result of the whole integration."""
    model: Any = policy.engine.model
    for step, (t, x_t, v_t) in enumerate(zip(g["t"], g["x_t"], g["v_t"], strict=True)):
        yield Stage(f"v_t.{step}", run(model.velocity, x_t, t, prefix), v_t)
    chunk = run(integrate, lambda x, t: model.velocity(x, t, prefix), g["noise"], len(g["t"]))
    yield Stage("chunk_normalized", chunk[..., : policy.spec.action.dim], g["chunk_normalized"])


# ----------------------------------------------------------------------------- GR00T, VLA-JEPA


def groot(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, tokens = torch.from_numpy(reference_pixels(g)), g["input_ids"]
    valid, state = g["attention_mask"] == 1, g["state_normalized"][:, 0]
    image_tokens = run(model.embed_images, pixels[None])
    tower, *taps = image_tokens.split(model.config.language.hidden_size, dim=-1)
    assert len(taps) == sum(name.startswith("deepstack.") for name in g.tensors)
    if not taps:
        yield Stage("vision_last_hidden", run(model.vision, pixels), g["vision_last_hidden"])
    for index, tap in enumerate(taps):
        yield Stage(f"deepstack.{index}", tap, g[f"deepstack.{index}"])
    yield Stage("image_tokens", tower, g["image_tokens"])
    is_image = tokens == model.config.image_token
    yield Stage("inputs_embeds", run(model.embed, image_tokens, is_image, tokens)[0], g["inputs_embeds"])
    with Outputs(model.language.layers) as outputs:
        features = run(model.features, image_tokens, is_image, tokens, valid)
    assert len(outputs) == sum(name.startswith("lm_layer.") for name in g.tensors)
    for index, output in enumerate(outputs):
        yield Stage(f"lm_layer.{index}", output, g[f"lm_layer.{index}"])
    yield Stage("backbone_features", features, g["backbone_features"])
    yield Stage("vl_embeds", run(model.head.refine, g["backbone_features"], valid), g["vl_embeds"])
    cameras = torch.ones(1, len(g.cameras), dtype=torch.bool)
    context = run(model.read, image_tokens, cameras, tokens, valid, state)
    yield Stage("state_token", context.prefix[:, :1], g["state_token"])
    with Outputs([model.head.dit]) as outputs:
        run(model.act, g["x_t"][0], embed_time(model, 0.0, run), context)
    yield Stage("dit_out_step0", outputs[0], g["dit_out_step0"])
    yield from outputs_of_the_head(model, g, context, run)


def jepa(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    image_tokens = run(model.embed_images, pixels)
    tower, *taps = image_tokens.split(model.config.language.hidden_size, dim=-1)
    assert len(taps) == 3
    for index, tap in enumerate(taps):
        yield Stage(f"deepstack.{index}", tap, g[f"deepstack.{index}"])
    yield Stage("image_tokens", tower, g["image_tokens"])
    is_image, valid = model.seen(image_tokens, cameras, tokens, mask)
    yield Stage("inputs_embeds", run(model.embed, image_tokens, is_image, tokens)[0], g["inputs_embeds"])
    features = run(model.features, image_tokens, is_image, tokens, valid)
    last = features[0, -len(g["last_hidden_prenorm"]) :]
    yield Stage("last_hidden_prenorm", last, g["last_hidden_prenorm"])
    yield Stage("conditioning", features[:, model.marked(tokens, valid)[0]], g["conditioning"])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    yield from outputs_of_the_head(model, g, context, run)


def outputs_of_the_head(model: Any, g: Golden, context: Any, run: Run) -> Iterator[Stage]:
    """Yield the outputs of the head at each of the reference's own points."""
    for step, (time, x_t, v_t) in enumerate(zip(model.solver.times(4), g["x_t"], g["v_t"], strict=True)):
        x = x_t.reshape(1, *x_t.shape[-2:])
        yield Stage(f"v_t.{step}", run(model.act, x, embed_time(model, time, run), context), v_t)


def embed_time(model: Any, time: float, run: Run) -> Tensor:
    return run(model.embed_time, torch.tensor([time], dtype=torch.float64))


# ----------------------------------------------------------------------------- Evo-1


def evo1(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    dims = policy.spec.action.dim
    every = torch.from_numpy(policy.processor.inputs(given, padded=True).pixels)
    assert len(every) == 3
    if "vision_last_hidden" in g.tensors:  # the result includes the class token
        yield Stage("vision_last_hidden", run(model.vision, every), g["vision_last_hidden"][:, 1:])
    else:
        stored = g["vision_last_hidden_head"][:1, 1:]
        found = run(model.vision, every[:1])[:, : stored.shape[1]]
        yield Stage("vision_last_hidden_head", found, stored)
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    image_tokens = run(model.embed_images, pixels)
    if model.config.blank:  # the black view comes first
        yield Stage("image_tokens", image_tokens[0][:, ::8], g["image_tokens"][[2, 0, 1]])
    else:
        yield Stage("image_tokens", image_tokens[0], g["image_tokens"][: len(image_tokens[0])])
    x, valid = run(model.embed, image_tokens, cameras, *model.filled(tokens, mask))
    with Outputs(model.language.layers) as outputs:
        features = run(model.features, x, valid)
    if (
        "rows" in g.tensors
    ):  # this case compares every row, including the rows of padding and of the black view
        yield Stage("backbone_features", features[:, g["rows"]], g["backbone_features"])
    else:
        seen = valid[0]
        yield Stage("inputs_embeds", x[:, seen], g["inputs_embeds"][:, seen])
        for index, output in enumerate(outputs):
            yield Stage(f"lm_layer.{index}", output[:, seen], g[f"lm_layer.{index}"][:, seen])
        yield Stage("backbone_features", features[:, seen], g["backbone_features"][:, seen])
    yield Stage("state_token", run(model.head.state_encoder, state), g["state_token"])
    rows = torch.ones_like(valid) if model.config.rows else valid
    context = run(model.head.context, features, rows, state)
    count = 7 if "steps" not in g.tensors else 50
    times = model.solver.times(count)
    steps = g["steps"].tolist() if "steps" in g.tensors else range(count)
    for step, x_t, v_t in zip(steps, g["x_t"], g["v_t"], strict=True):
        found = run(model.act, x_t, embed_time(model, times[step], run), context)
        yield Stage(f"v_t.{step}", found[..., :dims], v_t[..., :dims])


# ----------------------------------------------------------------------------- ACT


def act(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    behind = model.all_places(len(g.cameras))[model.first_tokens :]
    for view, camera in enumerate(g.cameras):
        height, width = g[f"pixel_values.{camera}"].shape[-2:]  # only the last two sizes are needed
        yield Stage(
            f"pixel_values.{camera}", pixels[:, view, :, :height, :width], g[f"pixel_values.{camera}"]
        )
        with Outputs(model.vision.stages) as outputs:
            features = run(model.vision, g[f"pixel_values.{camera}"])
        for index, output in enumerate(outputs[:3], 1):
            name = f"backbone.layer{index}.{camera}"
            yield Stage(name, output[:, : g[name].shape[1]], g[name])
        yield Stage(f"feature_map.{camera}", features, g[f"feature_map.{camera}"])
        table = g[f"pos_embed_2d.{camera}"][0].flatten(1).T
        places, behind = behind.split([len(table), len(behind) - len(table)])
        yield Stage(f"pos_embed_2d.{camera}", places, table)
    image_tokens = run(model.embed_images, pixels)
    x, places = run(model.embed, image_tokens, state), model.all_places(len(g.cameras))
    yield Stage("encoder_in", x[0], g["encoder_in"][:, 0])
    yield Stage("encoder_pos_embed", places, g["encoder_pos_embed"][:, 0])
    with Outputs(model.encoder) as outputs:
        x = run(model.encode, x, places, torch.ones(x.shape[:2], dtype=torch.bool))
    for index, output in enumerate(outputs):
        yield Stage(f"encoder_layer.{index}", output[0], g[f"encoder_layer.{index}"][:, 0])
    yield Stage("encoder_out", x[0], g["encoder_out"][:, 0])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    with Outputs([model.decoder_norm]) as outputs:
        chunk = run(model.regress, context)
    yield Stage("decoder_out", outputs[0][0], g["decoder_out"][:, 0])
    yield Stage("chunk_normalized", chunk, g["chunk_normalized"])


# ----------------------------------------------------------------------------- Diffusion Policy


def diffusion(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    for camera, name in enumerate(g.cameras):
        own = pixels[
            0, camera :: len(g.cameras)
        ]  # shape [T, 3, h, w]; numpy made these pixels, so they have no noise
        yield from keypoints(model.vision[camera % len(model.vision)], own, g, name, run)
    image_tokens = run(model.embed_images, pixels)
    for camera, name in enumerate(g.cameras):
        found = image_tokens[0, camera :: len(g.cameras), 0]
        yield Stage(f"image_feature.{name}", found, g[f"image_feature.{name}"])
    yield Stage("global_cond", run(model.condition, image_tokens, state), g["global_cond"])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    with Outputs([model.time_out]) as outputs:
        time = embed_time(model, float(g["t"][0]), run)
    yield Stage("unet_step0.step_embedding", outputs[0], g["unet_step0.step_embedding"])
    blocks = {
        f"{kind}.{stage}.{index}": block
        for kind, stages in (("down", model.unet.down), ("up", model.unet.up))
        for stage, each in enumerate(stages)
        for index, block in enumerate((each.first, each.second, each.resample))
    }
    blocks |= {
        f"mid.{index}": block
        for index, block in enumerate((model.unet.middle.first, model.unet.middle.second))
    }
    names = [
        name for name in g.tensors if name.startswith(("unet_step0.down", "unet_step0.mid", "unet_step0.up"))
    ]
    names.sort(key=lambda name: ("down", "mid", "up").index(name.split(".")[1]))
    with Outputs(blocks[name.removeprefix("unet_step0.")] for name in names) as outputs:
        run(model.act, g["x_t"][0], time, context)
    for name, output in zip(names, outputs, strict=True):
        yield Stage(name, output, g[name])
    for step in sorted({0, 1, len(g["t"]) // 2, len(g["t"]) - 1}):
        found = run(model.act, g["x_t"][step], embed_time(model, float(g["t"][step]), run), context)
        yield Stage(f"model_output.{step}", found, g["model_output"][step])


def keypoints(encoder: Any, pixels: Tensor, g: Golden, name: str, run: Run) -> Iterator[Stage]:
    """Yield the stages of one camera's frames, up to their keypoints."""
    first = run(encoder.tower.begin, pixels)
    stored = g[f"backbone.maxpool.{name}"]
    yield Stage(f"backbone.maxpool.{name}", first[:, : stored.shape[1]], stored)
    with Outputs(encoder.tower.stages) as outputs:
        features = run(encoder.tower, pixels)
    for index, output in enumerate(outputs[:3], 1):
        stored = g[f"backbone.layer{index}.{name}"]
        yield Stage(f"backbone.layer{index}.{name}", output[:, : stored.shape[1]], stored)
    yield Stage(f"feature_map.{name}", features, g[f"feature_map.{name}"])
    yield Stage(f"keypoints.{name}", run(encoder.keypoints, features), g[f"keypoints.{name}"])


# ----------------------------------------------------------------------------- VQ-BeT


def vqbet(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    """Yield the stages up to the newest observation step. The reference also computes action tokens of the future."""
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    (name,) = g.cameras
    yield from keypoints(model.vision, pixels[0], g, name, run)
    image_tokens = run(model.embed_images, pixels)
    yield Stage(f"image_feature.{name}", image_tokens[0, :, 0], g[f"image_feature.{name}"])
    x = run(model.embed, image_tokens, state)
    count, newest = x.shape[1], len(g["state_raw"]) - 1
    yield Stage("gpt_in", x, g["gpt_in"][:, :count])
    with Outputs([*model.layers, model.feature_proj]) as outputs:
        run(model.encode, x)
    names = *(f"gpt_layer.{index}" for index in range(len(model.layers))), "gpt_out"
    for name, output in zip(names, outputs, strict=True):
        yield Stage(name, output, g[name][:, :count])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    if "code_logits" in g.tensors:
        yield Stage("code_logits", context.logits[0], g["code_logits"][0, newest])
    yield Stage("offsets_all", context.offsets[0].reshape(g["offsets_all"].shape), g["offsets_all"])
    noise = torch.from_numpy(np.asarray(given.noise))[None]
    drawn = model.choose(context.logits, noise[:, :2, : model.config.codes])
    assert [int(code) for code in drawn] == g["codes"][0, newest].tolist()
    yield Stage("decoded", run(model.decode, drawn).reshape(g["decoded"][:1].shape), g["decoded"][:1])
    chunk = run(model.act, noise, embed_time(model, 0.0, run), context)
    rows, dim = g["chunk_normalized"].shape[1:]
    yield Stage("chunk_normalized", chunk[:, :rows, :dim], g["chunk_normalized"])


# ----------------------------------------------------------------------------- multi-task DiT


def multi_task(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    for camera, name in enumerate(g.cameras):
        own = pixels[
            0, camera :: len(g.cameras)
        ]  # shape [T, 3, h, w]; numpy made these pixels, so they have no noise
        tower = model.vision[camera % len(model.vision)]
        embedded = f"vision_embeddings.{name}"
        yield Stage(embedded, run(tower.embed, own), g[embedded])
        with Outputs(tower.layers) as outputs:
            feature = run(tower, own)
        for index, output in enumerate(outputs):
            yield Stage(f"vision_layer.{index}.{name}", output, g[f"vision_layer.{index}.{name}"])
        yield Stage(f"image_feature.{name}", feature, g[f"image_feature.{name}"])
    count = int(g["lang_mask"].sum())
    assert tokens.tolist() == g["lang_tokens"][:, :count].tolist()
    with Outputs(model.language.layers) as outputs:
        pooled = run(model.language.encode, tokens, mask)
    for index, output in enumerate(outputs):
        yield Stage(f"text_layer.{index}", output, g[f"text_layer.{index}"][:, :count])
    yield Stage("text_pooled", pooled, g["text_pooled"])
    text = run(model.language, tokens, mask)
    yield Stage("text_feature", text, g["text_feature"])
    image_tokens = run(model.embed_images, pixels)
    yield Stage("conditioning", run(model.condition, image_tokens, text, state), g["conditioning"])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    with Outputs([model.time_out]) as outputs:
        time = embed_time(model, float(g["t"][0]), run)
    features = run(torch.nn.functional.gelu, outputs[0])
    yield Stage("step0.time_features", features, g["step0.time_features"])
    width = g["step0.modulation.0"].shape[1]
    first = run(torch.add, context.modulation, time)[:, :width]
    yield Stage("step0.modulation.0", first, g["step0.modulation.0"])
    with Outputs(model.layers) as outputs:
        run(model.act, g["x_t"][0], time, context)
    for index, output in enumerate(outputs):
        yield Stage(f"step0.block.{index}", output, g[f"step0.block.{index}"])
    for step in sorted({0, 1, len(g["t"]) // 2, len(g["t"]) - 1}):
        found = run(model.act, g["x_t"][step], embed_time(model, float(g["t"][step]), run), context)
        yield Stage(f"model_output.{step}", found, g["model_output"][step])


# ----------------------------------------------------------------------------- EO-1


def qwen25_tower(model: Any, pixels: Tensor, g: Golden, run: Run) -> Iterator[Stage]:
    """Yield the stages of the tower. The reference sorts the patches of all views by window, and Sinew keeps the
    token order."""
    area, frames = model.config.vision.merge**2, model.config.frames
    counts = [rows * cols for rows, cols in model.config.grids]
    order = torch.argsort(g["vision.window_index"])
    for view, (height, width) in enumerate(frames):
        with Outputs(model.vision.layers) as outputs:
            run(model.vision, pixels[:, view, :, :height, :width])
        first = sum(counts[:view])
        for index, output in enumerate(outputs):
            stored = g[f"vision.block.{index}"].unflatten(0, (-1, area))[order]
            own = stored[first : first + counts[view]].flatten(0, 1)
            yield Stage(f"vision.block.{index}.{view}", output[0], own)


def eo1(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    yield from qwen25_tower(model, pixels, g, run)
    image_tokens = run(model.embed_images, pixels)
    yield Stage("image_tokens", model.flat(image_tokens)[0], g["image_tokens"])
    count = g["prefix_embeds"].shape[1]
    assert tokens.tolist() == g["input_ids"][:, :count].tolist()
    x = run(model.embed, image_tokens, tokens, mask, state)
    yield Stage("prefix_embeds", x, g["prefix_embeds"])
    positions, following = model.positions(tokens, mask)
    assert torch.equal(positions.permute(2, 0, 1), g["prefix_position_ids"])
    assert int(following) == int(g["action_position_ids"][0, 0, 0])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    for index, (keys, values) in enumerate(context.kv if "prefix.key.0" in g.tensors else ()):
        yield Stage(f"prefix.key.{index}", keys.transpose(1, 2), g[f"prefix.key.{index}"])
        yield Stage(f"prefix.value.{index}", values.transpose(1, 2), g[f"prefix.value.{index}"])
    for step, t in enumerate(g["t"][:, 0]):
        time, x_t = embed_time(model, float(t), run), g["x_t"][step]
        suffix = run(model.embed_actions, x_t, time)
        yield Stage(f"suffix_embeds.{step}", suffix, g["suffix_embeds"][step])
        with Outputs([*model.language.layers, model.language.norm]) as outputs:
            velocity = run(model.act, x_t, time, context)
        yield Stage(f"action_hidden.{step}", outputs[-1], g["action_hidden"][step])
        yield Stage(f"v_t.{step}", velocity, g["v_t"][step])


# ----------------------------------------------------------------------------- TurboVLA


def turbovla(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    # The reference multiplies by 1/255 and Sinew divides by 255, so the last bit of a pixel may differ.
    torch.testing.assert_close(pixels[0], g["pixel_values"], rtol=0, atol=5e-7)
    yield Stage("state_normalized", state[0], g["state_normalized"])
    count = len(g["tokens"])
    assert torch.equal(tokens[0, :count], g["tokens"])
    layout = model.language.layout(tokens, mask)
    assert torch.equal(layout.sees[0], g["text_sees"])
    assert torch.equal(layout.words[0], g["text_words"])
    yield Stage("vit_features", run(model.vision, pixels[0]), g["patches"])
    image_tokens = run(model.embed_images, pixels)
    yield Stage("vision_tokens", image_tokens[0], g["vision_tokens"])
    with Outputs(model.language.layers) as outputs:
        text = run(model.language, tokens, layout)
    yield Stage("text_hidden", outputs[-1][0, :count], g["bert_hidden"][:count])
    yield Stage("text_tokens", text[0], g["text_tokens"])
    pairs: list[tuple[Tensor, Tensor]] = []
    hooks = [layer.register_forward_hook(lambda *each: pairs.append(each[2])) for layer in model.fusion]
    with Outputs(model.text_layers) as outputs:
        context = run(model.read, image_tokens, cameras, tokens, mask, state)
    for hook in hooks:
        hook.remove()
    for index, ((v, text), output) in enumerate(zip(pairs, outputs, strict=True)):
        yield Stage(f"fusion.{index}.visual", v[0], g[f"fusion.{index}.visual"])
        yield Stage(f"fusion.{index}.text", text[0], g[f"fusion.{index}.text"])
        yield Stage(f"fusion.{index}.layer", output[0], g[f"text_layer.{index}"])
    with Outputs(model.decoder) as outputs:
        chunk = run(model.regress, context)
    for index, output in enumerate(outputs):
        yield Stage(f"decoder.{index}", output[0], g[f"decoder.{index}"])
    yield Stage("chunk_normalized", chunk, g["chunk_normalized"])


# ----------------------------------------------------------------------------- Wall-X


def wallx(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    """Yield the stages. The reference computes prompt and chunk in one sequence in each step. Sinew computes the
    prompt once."""
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    yield from qwen25_tower(model, pixels, g, run)
    image_tokens = run(model.embed_images, pixels)
    yield Stage("image_tokens", model.flat(image_tokens)[0], g["image_tokens"])
    count, chunk = tokens.shape[1], model.config.chunk_size
    assert tokens.tolist() == g["input_ids"][:, :count].tolist()
    assert g["input_ids"].shape[1] == count + chunk
    yield Stage("state", state[:, None], g["proprioception"])
    yield Stage("propri_token", run(model.state_row, state)[:, None], g["propri_token"])
    x = run(model.embed, image_tokens, tokens, mask, state)
    stored = g["step0_inputs_embeds"].shape[1] - chunk  # the last stored tokens of the prompt
    yield Stage("step0_inputs_embeds", x[:, -stored:], g["step0_inputs_embeds"][:, :stored])
    positions, following = model.positions(tokens, mask)
    assert torch.equal(positions.permute(2, 0, 1), g["position_ids"][..., :count])
    assert int(following) == int(g["position_ids"][0, 0, count])
    with Inputs([layer.input_norm for layer in model.decoder_layers[1:]]) as inputs:
        context = run(model.read, image_tokens, cameras, tokens, mask, state)
    for index, found in enumerate(inputs):
        expected = g[f"step0.lm_layer.{index}"][:, :stored]
        yield Stage(f"prefix.lm_layer.{index}", found[:, -stored:], expected)
    assert torch.equal(context.mask, g["attention_allowed"][:, count:])
    for step, t in enumerate(g["t"][:, 0]):
        time, x_t = embed_time(model, float(t), run), g["x_t"][step]
        embedded = run(model.embed_actions, x_t, time)
        yield Stage(f"action_embeds.{step}", embedded, g["action_embeds"][step])
        with Outputs([*model.experts, model.language.norm]) as outputs:
            velocity = run(model.act, x_t, time, context)
        for index, output in enumerate(outputs[:-1] if step == 0 else ()):
            yield Stage(f"step0.lm_layer.{index}", output, g[f"step0.lm_layer.{index}"][:, stored:])
        yield Stage(f"action_hidden.{step}", outputs[-1], g["action_hidden"][step])
        yield Stage(f"v_t.{step}", velocity, g["v_t"][step])


# ----------------------------------------------------------------------------- MolmoAct2


def molmoact2(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    """Of the language model and of what the expert reads of it, the last tokens; of the tower, the first view."""
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    assert tokens.tolist() == g["input_ids"].tolist()
    yield Stage("state", state[None], g["state_normalized"])
    resized = torch.stack([g[f"resized.{name}"] for name in g.cameras]).permute(0, 3, 1, 2)
    yield Stage("pixels", pixels[0], resized / 255 * 2 - 1)
    with Outputs(model.vision.layers) as outputs:
        features = run(model.vision, pixels.flatten(0, 1))
    for index, output in enumerate(outputs):
        yield Stage(f"vision_layer.{index}", output[:1], g[f"vision_layer.{index}"])
    pooled = run(model.connector.pool, features, *model.grid_of(*pixels.shape[-2:]))
    yield Stage("pooled", pooled.flatten(0, 1)[:, None], g["pooled"])
    image_tokens = run(model.embed_images, pixels)
    yield Stage("image_tokens", image_tokens.flatten(0, 2), g["image_tokens"])
    x, last = run(model.embed, image_tokens, tokens, mask), slice(-g["inputs_embeds"].shape[1], None)
    yield Stage("inputs_embeds", x[:, last], g["inputs_embeds"])
    with Outputs(model.language.layers) as outputs:
        context = run(model.read, image_tokens, cameras, tokens, mask, state)
    for index, output in enumerate(outputs):
        yield Stage(f"lm_layer.{index}", output[:, last], g[f"lm_layer.{index}"])
    for index, kv in enumerate(context.kv):
        for name, heads in zip("kv", kv, strict=True):
            expected = g[f"context.{index}.{name}"]
            yield Stage(f"context.{index}.{name}", heads[:, -expected.shape[1] :], expected)
    assert torch.equal(context.reads[:, 0], g["encoder_mask"])
    for step, t in enumerate(g["t"]):
        time, x_t = embed_time(model, float(t), run), g["x_t"][step][None]
        condition = run(model.condition, torch.tensor([float(t)], dtype=torch.float64))
        yield Stage(f"conditioning.{step}", condition, g["conditioning"][step][None])
        with Outputs(model.blocks) as outputs:
            velocity = run(model.act, x_t, time, context)
        for index, output in enumerate(outputs if step == 0 else ()):
            yield Stage(f"expert_block.{index}", output, g[f"expert_block.{index}"])
        # The reference sets the padding to zero after its network.
        yield Stage(f"v_t.{step}", velocity, g["v_t"][step][None] * model.action_mask)


# ----------------------------------------------------------------------------- X-VLA


def xvla(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    """Yield the stages from the reference's own pixels on. tests/convert/test_xvla.py compares Sinew's pixels, which
    numpy makes without noise.
    """
    model: Any = policy.engine.model
    _, cameras, tokens, mask, state = arguments(policy, given)
    pixels = g["pixel_values"][:, : len(g.cameras)]  # shape [1, V, 3, h, w]
    x = pixels[0]
    for index, stage in enumerate(model.vision.stages):
        x = run(stage.begin, x)
        yield Stage(f"vision.conv.{index}", x, g[f"vision.conv.{index}"])
        for number, block in enumerate(stage.blocks):
            x = run(block, x)
            yield Stage(f"vision.block.{index}.{number}", x, g[f"vision.block.{index}.{number}"])
    image_tokens = run(model.embed_images, pixels)
    yield Stage("image_tokens", image_tokens[0], g["image_tokens"])
    every = run(model.views_of, image_tokens, cameras)
    yield Stage("aux_visual_inputs", every[:, 1:].flatten(1, 2), g["aux_visual_inputs"])
    x = run(model.embed_text, every[:, 0], model.filled(tokens, mask))
    yield Stage("encoder_inputs_embeds", x, g["encoder_inputs_embeds"])
    with Outputs(model.language.layers) as outputs:
        text = run(model.language, x)
    for index, output in enumerate(outputs):
        yield Stage(f"encoder_layer.{index}", output, g[f"encoder_layer.{index}"])
    yield Stage("vlm_features", text, g["vlm_features"])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    times = [embed_time(model, float(t), run) for t in g["t"][:, 0]]
    x = run(model.embed_actions, g["x_t"][0], times[0], context)
    yield Stage("step0.action_tokens", x, g["step0.action_tokens"])
    with Outputs(model.layers) as outputs:
        run(model.act, g["x_t"][0], times[0], context)
    for index, output in enumerate(outputs):
        yield Stage(f"step0.block.{index}", output, g[f"step0.block.{index}"])
    for step, (x_t, time) in enumerate(zip(g["x_t"], times, strict=True)):
        expected = model.closed(g["model_output"][step])
        yield Stage(f"model_output.{step}", run(model.act, x_t, time, context), expected)
    steps = model.solver.steps(len(times))
    chunk = run(solve, lambda x, time: model.act(x, time, context), g["noise"], steps, times)
    yield Stage("chunk_normalized", chunk[..., : policy.spec.action.dim], g["chunk_normalized"])


# ----------------------------------------------------------------------------- OpenVLA, OFT, VLA-Adapter, BitVLA


def prismatic(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    features = run(model.vision.features, pixels[0]).flatten(0, 1)
    stored = g["vit_features"].reshape(-1, features.shape[1])
    first = (
        len(features) - len(stored)
    ) // 2  # if only some rows are stored, they are those in the middle, between the two views
    yield Stage("vit_features", features[first : first + len(stored)], stored)
    image_tokens = run(model.embed_images, pixels)
    yield Stage("image_tokens", image_tokens[0], g["image_tokens"])
    if "proprio_token" in g.tensors:
        yield Stage("proprio_token", run(model.state_proj, state), g["proprio_token"])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    if hasattr(context, "queries"):
        yield Stage("lm_layer.1", context.task[0, 0], g["lm_layer.1"][: context.task.shape[2]])
        yield Stage("action_hidden", context.queries[-1, 0, :-1], g["action_hidden"])
    elif hasattr(context, "hidden"):
        yield Stage("action_hidden", context.hidden, g["action_hidden"])
    if "action_logits" in g.tensors:  # compare the bins of each token; another test compares the token ids
        with Outputs([model.lm_head]) as outputs:
            run(said, model, context)
        end, bins = model.config.action_tokens_end, g["action_logits"].shape[1]
        yield Stage("action_logits", torch.cat(outputs)[:, 0, end - bins : end], g["action_logits"])
    if "chunk_normalized" in g.tensors:
        if isinstance(model, AutoregressiveModel):
            chunk = torch.from_numpy(model.action_tokens.chunk(run(said, model, context)[0].numpy()))
        else:
            chunk = run(model.regress, context)[0]
        yield Stage("chunk_normalized", chunk, g["chunk_normalized"])


def cogact(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    """Yield the stages. Of the patches, the first ones of a view are stored. Of the language model, the last row is
    stored."""
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    yield Stage("vit_features", run(model.vision.features, pixels[0])[0, :16], g["vit_features"])
    image_tokens = run(model.embed_images, pixels)
    yield Stage("image_tokens", image_tokens[0, 0, :16], g["image_tokens"])
    with Outputs(model.language.layers) as outputs:
        cognition = run(model.cognition, image_tokens, cameras, tokens, mask)
    for index, output in enumerate(outputs):
        yield Stage(f"lm_layer.{index}", output[:, -1], g[f"lm_layer.{index}"])
    yield Stage("last_hidden", cognition[0], g["last_hidden"])
    context = run(model.read, image_tokens, cameras, tokens, mask, state)
    times = [embed_time(model, float(t), run) for t in g["t"]]
    with Outputs(model.head.layers) as outputs:
        run(model.act, g["x_t"][0], times[0], context)
    for index, output in enumerate(outputs):
        yield Stage(f"step0.block.{index}", output, g[f"step0.block.{index}"])
    for step, (x_t, time) in enumerate(zip(g["x_t"], times, strict=True)):
        yield Stage(f"model_output.{step}", run(model.act, x_t, time, context), g["model_output"][step])
    steps = model.solver.steps(len(times))
    assert [step.time for step in steps] == g["t"].tolist()
    chunk = run(solve, lambda x, time: model.act(x, time, context), g["noise"], steps, times)
    yield Stage("chunk_normalized", chunk, g["chunk_normalized"])


def poses(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    """Yield the stages. Stored patches are the last ones of the first view and the first ones of the second view. Of
    the language model, the rows of actions are stored.
    """
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    yield Stage("pixel_rows", pixels[0].flatten(0, 1)[:, 100:102], g["pixel_rows"])
    yield Stage(
        "vit_features", run(model.vision.features, pixels[0]).flatten(0, 1)[248:264], g["vit_features"]
    )
    image_tokens = run(model.embed_images, pixels)
    yield Stage("image_tokens", image_tokens[0].flatten(0, 1)[248:264], g["image_tokens"])
    with Outputs([model.state_proj, *model.language.layers]) as outputs:
        context = run(model.read, image_tokens, cameras, tokens, mask, state)
    yield Stage("pose_row", outputs[0], g["pose_row"])
    rows = context.hidden.numel() // model.config.language.hidden_size
    for index, output in enumerate(outputs[1:-1]):
        yield Stage(f"lm_layer.{index}", output[0, -rows - 2 : -2], g[f"lm_layer.{index}"])
    yield Stage("action_hidden", context.hidden, g["action_hidden"])
    yield Stage("chunk_normalized", run(model.regress, context), g["chunk_normalized"])


def navigation(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    """Yield the stages. Of the pictures, only some rows are stored. Of the first map that words change, every ninth
    position is stored.
    """
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given)
    large, side = model.config.large_side, model.config.side
    newest = pixels[0, -len(model.config.cameras)]
    yield Stage("pixel_rows.large", newest[:, 100:102], g["pixel_rows.large"])
    yield Stage("pixel_rows.small", newest[:, large + 40 : large + 43, :side], g["pixel_rows.small"])
    yield Stage("text", run(model.language, tokens, mask), g["text"])
    with Outputs([model.frame_proj, model.satellite_proj, model.image_proj]) as outputs:
        image_tokens = run(model.embed_images, pixels)
    for name, output in zip(("frame_rows", "satellite_row", "image_row"), outputs, strict=True):
        yield Stage(name, output, g[name])
    with Outputs(
        [model.pose_proj, model.vision.film.blocks[0], model.vision.film, model.language_proj]
    ) as outputs:
        context = run(model.read, image_tokens, cameras, tokens, mask, state)
    outputs[1] = outputs[1][0, :, ::9, ::9]
    names = ("pose_row", "film_block.0", "film_features", "language_row")
    for name, output in zip(names, outputs, strict=True):
        yield Stage(name, output, g[name])
    with Outputs([*model.layers, model.reduce[-1]]) as outputs:
        chunk = run(model.regress, context)
    for index, output in enumerate(outputs[:-1]):
        yield Stage(f"layer.{index}", output, g[f"layer.{index}"])
    yield Stage("reduced", outputs[-1].relu(), g["reduced"])
    yield Stage("chunk_normalized", chunk, g["chunk_normalized"])


# ----------------------------------------------------------------------------- pi0-FAST, and others that generate
# text


def fast(policy: Policy, g: Golden, given: Observation, run: Run) -> Iterator[Stage]:
    model: Any = policy.engine.model
    pixels, cameras, tokens, mask, state = arguments(policy, given, padded=True)
    yield from views(policy, g, run)
    with Outputs([model.language.norm, model.lm_head]) as outputs:
        context = run(model.read, run(model.embed_images, pixels), cameras, tokens, mask, state)
        valid = context.valid
        assert torch.equal(valid, g["case0.prefix_pad_masks"])
        run(said, model, context, len(g["step_logits"]))
    hidden, logits = outputs[::2], outputs[1::2]
    yield Stage("step_hidden", torch.cat(hidden)[:, 0], g["case0.step_hidden"])
    yield Stage("step_logits", torch.cat(logits)[:, 0], g["step_logits"])


def said(model: AutoregressiveModel, context: Any, count: int = 0) -> Tensor:
    """Return the generated tokens, int64 [B, n], up to ``count`` or to the end of the longest sentence."""
    spoken = model.first(context)
    tokens = [spoken.token]
    while len(tokens) < (count or model.action_tokens.most):
        spoken = model.next(spoken, context)
        tokens.append(spoken.token)
    return torch.stack(tokens, dim=1)


FAMILIES: dict[str, Callable[[Policy, Golden, Observation, Run], Iterator[Stage]]] = {
    "smolvla": smolvla,
    "pi0fast": fast,
    "pi05-mem": memory,
    "pi": pi,
    "groot": groot,
    "evo1": evo1,
    "vla-jepa": jepa,
    "openvla": prismatic,
    "vla-adapter": prismatic,
    "bitvla": prismatic,
    "cogact": cogact,
    "omnivla-edge": navigation,
    "omnivla": poses,
    "act": act,
    "diffusion": diffusion,
    "vqbet": vqbet,
    "mtdit": multi_task,
    "eo1": eo1,
    "turbovla": turbovla,
    "wallx": wallx,
    "molmoact2": molmoact2,
    "xvla": xvla,
}
