"""pi0.5 with memory against LeRobot's stored episode of six control steps; its stages are in test_stages.py.

Three moments, two control steps apart: the first two steps of the episode read one moment, the next two read two.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sinew_client.history import History
from sinew_perf.machine.measure_engine import measure_engine, requests_of
from sinew_perf.program import PublishedProgram

from sinew.bench.measure import describe, make_observation
from sinew.bundle import Bundle
from sinew.checks.validate.observations import random_observations
from sinew.convert import convert
from sinew.core import BundleError, ConvertError, Observation, ObservationError, machine
from sinew.families.pi.video import VideoTransformer, frame_ages
from sinew.layers.vit import VisionTransformer, ViTConfig
from sinew.policy import Policy, load
from sinew.records.recorder import Recorder
from sinew.serve.replay import Replay
from sinew.vlacpp.write import export_vlacpp
from tests.bundle.test_bundle import with_manifest
from tests.engines import needs_half
from tests.golden import Golden, assert_parity, relative_l2
from tests.models.stages import arguments, memory_observation

STEPS, EARLIER = 6, (0, 0, 1, 1, 2, 2)  # moments before each of them
NO_STATES = "model.proprio_history_proj."


@pytest.fixture
def g(golden: Path) -> Golden:
    return Golden(golden / "pi05-mem")


@pytest.fixture
def policy(case_bundle: Callable[[str], Path]) -> Policy:
    return load(case_bundle("pi05-mem"), "cpu", "float32", "eager")


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A writable copy of the golden checkpoint, with ``arch.json`` beside it."""
    shutil.copytree(
        golden / "pi05-mem" / "checkpoint", tmp_path / "checkpoint", copy_function=shutil.copyfile
    )
    shutil.copyfile(golden / "pi05-mem" / "arch.json", tmp_path / "arch.json")
    return tmp_path / "checkpoint"


def run(checkpoint: Path, settings: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Return the bundle of a checkpoint whose configuration says something else."""
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    if changes.get("use_proprioceptive_memory") is False:
        weights = load_file(checkpoint / "model.safetensors")
        kept = {name: each for name, each in weights.items() if not name.startswith(NO_STATES)}
        save_file(kept, checkpoint / "model.safetensors")
    given = {"arch": checkpoint.parent / "arch.json", "settings": settings or {}}
    return convert(checkpoint, checkpoint.parent / "out.gguf", **given)


def episode(policy: Policy, g: Golden) -> np.ndarray:
    """Return the chunk of each step, [6, H, D], of what the robot's own history gives."""
    history, chunks = History.of(policy.spec.to_dict()), []
    for step in range(STEPS):
        now = memory_observation(g, step)
        history.see(step, now.images, now.state)
        earlier = history.before(step)
        assert len(earlier) == (EARLIER[step] if policy.spec.history > 1 else 0)
        chunks.append(policy.infer(replace(now, earlier=earlier)).actions)
    return np.stack(chunks)


@pytest.mark.parametrize("engine", ["eager", "plan", "cuda"])
def test_a_whole_episode_is_the_references(engine: str, g: Golden, case_bundle: Any) -> None:
    """From its first step on, where LeRobot masks the moments before it and we leave them out."""
    policy = load(case_bundle("pi05-mem"), "cpu", "float32", engine)
    assert_parity(episode(policy, g), g["episode.actions"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_whole_episode_is_the_references_as_graphs(g: Golden, case_bundle: Any) -> None:
    """One graph of the tower for any number of moments."""
    policy = load(case_bundle("pi05-mem"), "cpu", "float32", "onnx")
    assert_parity(episode(policy, g), g["episode.actions"])


@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        ("video", {"use_proprioceptive_memory": False}, {}),
        ("states", {"use_visual_memory": False}, {}),
        ("neither", {"use_proprioceptive_memory": False, "use_visual_memory": False}, {}),
        ("bare", {}, {"state_in_prompt": "false"}),
    ],
)
def test_each_memory_is_independent(
    name: str, changes: dict, settings: dict, checkpoint: Path, g: Golden
) -> None:
    """Of frames alone, of states alone, neither, and of states that the prompt does not say as well."""
    found = episode(load(run(checkpoint, settings, **changes), engine="eager"), g)
    assert_parity(found, g[f"{name}.actions"])
    assert np.abs(found - g.numpy("episode.actions")).max() > 0.1


def test_a_memory_of_one_moment_is_the_start_of_an_episode(checkpoint: Path, g: Golden) -> None:
    policy = load(run(checkpoint, memory_frames=1), engine="eager")
    assert (policy.spec.history, policy.spec.history_padding) == (1, "mask")
    for step in range(2):
        assert_parity(policy.infer(memory_observation(g, step)).actions, g["episode.actions"][step])


def test_inputs_are_the_references(policy: Policy, g: Golden) -> None:
    pixels, mask, tokens, token_mask, state = arguments(policy, memory_observation(g), padded=True)
    for view, camera in enumerate(g.cameras):
        torch.testing.assert_close(pixels[:, view::2], g[f"pixel_values.{camera}"], atol=1e-6, rtol=0)
    assert mask.shape == (1, 6)
    assert mask.all()
    assert torch.equal(tokens, g["lang_tokens"])
    assert torch.equal(token_mask, g["lang_mask"])
    torch.testing.assert_close(state.unflatten(1, (3, -1)), g["state_normalized"], atol=1e-6, rtol=0)


def test_what_a_bundle_says(checkpoint: Path) -> None:
    bundle = Bundle(run(checkpoint))
    spec, recipe = bundle.manifest.spec, bundle.manifest.processing
    assert (spec.history, spec.history_stride, spec.history_padding, spec.views) == (3, 2, "mask", 6)
    assert (recipe.all_cameras, recipe.padded_state_dim) == (True, 3 * 12)
    assert any("--set state_in_prompt=false" in note for note in bundle.manifest.provenance.notes)
    empty = Bundle(run(checkpoint, empty_cameras=1)).manifest.processing
    assert empty.empty_cameras == 0  # upstream masks it: it is left out


def test_a_moment_that_is_not_there_costs_nothing(policy: Policy, g: Golden) -> None:
    """The tower encodes the frames that were sent, and no copies of them for those that were not."""
    encoded: list[int] = []
    model: Any = policy.engine.model
    hook = model.vision.patch_embedding.register_forward_pre_hook(
        lambda _, given: encoded.append(len(given[0]))
    )
    warnings = [policy.infer(memory_observation(g, step)).warnings for step in range(STEPS)]
    hook.remove()
    assert encoded == [2 * (1 + earlier) for earlier in EARLIER]
    said = (
        "earlier: the policy uses 3 observation steps, 2 control steps apart, and got 1, which is normal at the start"
        " of an episode only"
    )
    assert warnings == [(said,)] * 2 + [()] * 4


def test_each_moment_counts(policy: Policy, g: Golden) -> None:
    """Its frames and its state, in every place; and none of a request stays for the next."""
    given = memory_observation(g)
    expected = policy.infer(given).actions
    for place in range(2):
        moment = given.earlier[place]
        for changed in (
            replace(moment, state=moment.state + 1),
            replace(moment, images=moment.images | {"wrist": 255 - moment.images["wrist"]}),
        ):
            earlier = tuple(changed if at == place else each for at, each in enumerate(given.earlier))
            assert np.abs(policy.infer(replace(given, earlier=earlier)).actions - expected).max() > 1e-3
    turned = policy.infer(replace(given, earlier=given.earlier[::-1])).actions
    assert np.abs(turned - expected).max() > 1e-3
    np.testing.assert_array_equal(policy.infer(given).actions, expected)


def test_observations_of_as_many_moments_share_a_batch(policy: Policy, g: Golden) -> None:
    several = [policy.prepare(memory_observation(g, step)) for step in (5, 4, 2, 1)]
    keys = [policy.batch_key(each) for each in several]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    for found, step in zip(policy.run_batch(several[:2]), (5, 4), strict=True):
        assert_parity(found.actions, g["episode.actions"][step])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_frames": 17}, "memory_frames: expected a whole number from 1 to 16, got 17"),
        ({"memory_stride": 0}, "memory_stride: expected a whole number from 1 to 512, got 0"),
        ({"memory_stride": 513}, "memory_stride: expected a whole number from 1 to 512, got 513"),
        (
            {"memory_temporal_attention_every": 6},
            "memory_temporal_attention_every: expected a whole number from 1 to 5, got 6",
        ),
        (
            {"use_proprioceptive_memory": "yes"},
            "use_proprioceptive_memory: expected true or false, got 'yes'",
        ),
    ],
)
def test_a_wrong_configuration_is_refused(checkpoint: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, **changes)


def test_the_prompt_is_asked_about_where_it_matters(checkpoint: Path) -> None:
    with pytest.raises(ConvertError, match="state_in_prompt: only a pi0.5 with use_proprioceptive_memory"):
        run(checkpoint, {"state_in_prompt": "true"}, use_proprioceptive_memory=False)


@pytest.mark.parametrize("changes", [{"history": 2}, {"history_padding": "repeat"}])
def test_a_bundle_that_contradicts_its_weights_is_refused(
    changes: dict, case_bundle: Any, tmp_path: Path
) -> None:
    manifest = Bundle(case_bundle("pi05-mem")).manifest
    path = with_manifest(
        case_bundle("pi05-mem"), tmp_path / "other.gguf", spec=replace(manifest.spec, **changes)
    )
    with pytest.raises(
        BundleError, match="requires an observation history of 1 to 3 steps with 2 views each, got"
    ):
        load(path, engine="eager")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"temporal_every": 99},
            "sinew.config: vision: expected attention across frames every 1 to 5 layers",
        ),
        ({"moments": 0}, "moments: expected 1 to"),
        ({"moments": 5}, "disagrees with sinew.config about sizes"),
        (
            {"cameras": 3},
            "requires an observation history of 1 to 3 steps with 3 views each, got an observation history of 1",
        ),
        ({"states": False}, "proprio_history_proj.weight is not a part of the model"),
        ({"ages": 1}, "unknown field 'memory.ages'"),
    ],
)
def test_a_strangers_memory_is_refused(changes: dict, message: str, case_bundle: Any, tmp_path: Path) -> None:
    config = Bundle(case_bundle("pi05-mem")).manifest.config
    path = with_manifest(
        case_bundle("pi05-mem"),
        tmp_path / "other.gguf",
        config={**config, "memory": {**config["memory"], **changes}},
    )
    with pytest.raises(BundleError, match=message):
        load(path, engine="eager")


@pytest.mark.parametrize("stride", [0, 513])
def test_a_stride_without_bounds_is_refused(stride: int, case_bundle: Any) -> None:
    manifest = Bundle(case_bundle("pi05-mem")).manifest
    with pytest.raises(
        BundleError, match="spec.history_stride: expected 1 or more, 1024 control steps in all"
    ):
        replace(manifest, spec=replace(manifest.spec, history_stride=stride)).check()


def test_observations_that_do_not_fit_are_refused(policy: Policy, g: Golden) -> None:
    given = memory_observation(g)
    with pytest.raises(
        ObservationError, match="earlier: expected at most 2, because this policy reads 3, got 4"
    ):
        policy.infer(replace(given, earlier=2 * given.earlier))
    alone = replace(given.earlier[0], images={"front": given.images["front"]})
    with pytest.raises(ObservationError, match=r"earlier\[0\].images.wrist: expected a frame of each"):
        policy.infer(replace(given, earlier=(alone, given.earlier[1])))
    with pytest.raises(ObservationError, match="images.wrist: expected a frame of each"):
        policy.infer(Observation({"front": given.images["front"]}, given.state, "go"))


def test_an_adapter_brings_the_states_projection(checkpoint: Path, g: Golden, tmp_path: Path) -> None:
    """As LeRobot trains memory on a base that has none: the projection is saved whole, and factors are zero here."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(checkpoint, base)
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    weights = load_file(checkpoint / "model.safetensors")
    new = {name: each for name, each in weights.items() if name.startswith(NO_STATES)}
    save_file({name: each for name, each in weights.items() if name not in new}, base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    for name in ("use_visual_memory", "use_proprioceptive_memory"):
        config[name] = False
    (base / "config.json").write_text(json.dumps(config))
    query = "model.paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj"
    outputs, inputs = weights[f"{query}.weight"].shape
    new |= {
        f"{query}.lora_A.weight": torch.ones(2, inputs),
        f"{query}.lora_B.weight": torch.zeros(outputs, 2),
    }
    save_file(
        {f"base_model.model.{name}": each for name, each in new.items()}, folder / "adapter_model.safetensors"
    )
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": "q_proj"}

    def merged(*saved: str) -> Path:
        (folder / "adapter_config.json").write_text(json.dumps(said | {"modules_to_save": list(saved)}))
        return convert(folder, tmp_path / "merged.gguf", arch=tmp_path / "arch.json", base=base)

    with pytest.raises(ConvertError, match="proprio_history_proj"):
        merged()
    assert_parity(
        episode(load(merged("model.proprio_history_proj"), engine="eager"), g), g["episode.actions"]
    )


def test_a_file_without_a_place_for_it_is_not_written(case_bundle: Any, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="config.memory is .* which vla.cpp's file does not support"):
        export_vlacpp(Bundle(case_bundle("pi05-mem")), tmp_path / "out.gguf")


@needs_half
@pytest.mark.slow
def test_half_precision_is_no_further_off_than_the_plain_policy(
    case_bundle: Any, checkpoint: Path, g: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 against float32 on the same weights, relative L2: 0.051 on eager and plan, 0.056 without memory."""
    monkeypatch.setattr(machine, "half_units", lambda dtype: "a test")  # or this CPU may compute in float32
    plain = run(checkpoint, use_proprioceptive_memory=False, use_visual_memory=False)

    def off(path: Path, engine: str) -> float:
        exact, half = (
            torch.from_numpy(episode(load(path, "cpu", *how), g))
            for how in (("float32", "eager"), ("bfloat16", engine))
        )
        return relative_l2(half, exact)

    eager, planned, without = (
        off(case_bundle("pi05-mem"), "eager"),
        off(case_bundle("pi05-mem"), "plan"),
        off(plain, "eager"),
    )
    assert 1e-3 < eager < 1.5 * without
    assert planned <= 1.5 * eager


def test_engines_are_held_against_eager_for_every_number_of_moments(policy: Policy) -> None:
    seen = itertools.islice(random_observations(policy), 4)
    assert [1 + len(each.earlier) for each in seen] == [3, 2, 1, 3]


def test_costs_are_those_of_all_moments(case_bundle: Any, policy: Policy) -> None:
    """What `sinew bench` times and `sinew perf fit` counts, as no request costs more."""
    given = make_observation(policy.spec, None, "go", None)
    assert describe(policy, given)["views"] == 6
    assert len(policy.processor.inputs(Observation.from_mapping(given)).pixels) == 6
    assert PublishedProgram.load(case_bundle("pi05-mem")).fixed == {"cameras": 6}
    requests = requests_of(policy)[:1]
    assert requests[0].views == 6
    assert {time.stage for time in measure_engine(policy, requests, runs=1)} == {"vision", "prefix", "head"}


def test_a_recording_is_played_to_robots_of_a_whole_history(
    policy: Policy, g: Golden, tmp_path: Path
) -> None:
    """Whose first record, of an episode's start, has fewer moments."""
    recorder = Recorder(tmp_path / "records")
    for step in (0, 5):
        given = memory_observation(g, step)
        recorder.put("native", "", given, policy.infer(given))
    recorder.close()
    replayed = Replay(tmp_path / "records")
    assert replayed.spec.history == 3
    assert replayed.infer(memory_observation(g)).actions.shape == (10, 7)


def test_graphs_are_recorded_for_every_number_of_moments(case_bundle: Any) -> None:
    """Before a robot's first request, whose episode begins with one moment."""
    policy = load(case_bundle("pi05-mem"), "cpu", "float32", "cuda")
    policy.warm_up()
    engine: Any = policy.engine
    assert {key.views for key in engine.programs.keys()} == {2, 4, 6}  # noqa: SIM118 - not a dict


# ----------------------------------------------------------------------------- the tower

SMALL = ViTConfig(16, 32, 5, 4, 16, 8, 1e-6)


@torch.inference_mode()
def test_one_frame_is_the_plain_tower() -> None:
    """A softmax over one moment is the identity, and its age is zero."""
    torch.manual_seed(0)
    video = VideoTransformer(SMALL, 2).eval()
    plain = VisionTransformer(SMALL).eval()
    plain.load_state_dict(video.state_dict())
    frames = torch.randn(3, 1, 3, 16, 16)
    torch.testing.assert_close(video.watch(frames), plain(frames[:, 0]), atol=1e-6, rtol=0)
    assert not frame_ages(4, 16, torch.device("cpu"))[-1].any()


@torch.inference_mode()
def test_frames_that_are_masked_are_as_if_left_out() -> None:
    """Equation 3 of appendix C, written out over four frames of which the mask hides the oldest two."""
    torch.manual_seed(0)
    video = VideoTransformer(SMALL, 2).eval().double()
    frames = torch.randn(2, 4, 3, 16, 16, dtype=torch.float64)
    seen = torch.tensor([False, False, True, True])

    x = video.patch_embedding(frames.flatten(0, 1)).flatten(2).transpose(1, 2) + video.positions(2, 2)
    x = x.unflatten(0, (2, 4))  # [B, T, P, C]
    angle = (torch.arange(4) - 3.0)[:, None] * 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    ages = torch.zeros(4, 16, dtype=torch.float64)
    ages[:, ::2], ages[:, 1::2] = angle.sin(), angle.cos() - 1
    hidden = ~(torch.ones(4, 4, dtype=torch.bool).tril() & seen | torch.eye(4, dtype=torch.bool))
    for number, layer in enumerate(video.layers, 1):
        if number % 2:
            x = layer(x.flatten(0, 1)).unflatten(0, (2, 4))
            continue
        attn, z = layer.attn, layer.norm1(x + ages[:, None])
        q, k, v = (
            part(z).unflatten(-1, (4, 4)) for part in (attn.q_proj, attn.k_proj, attn.v_proj)
        )  # [B, T, P, H, D]
        over_time = torch.einsum("bsphd,btphd->bphst", q, k) / 2
        over_time = over_time.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = torch.einsum("bphst,btphd->bsphd", over_time, v)
        over_patches = (torch.einsum("btphd,btqhd->bthpq", q, k) / 2).softmax(-1)
        x = x + attn.o_proj(torch.einsum("bthpq,btqhd->btphd", over_patches, mixed).flatten(-2))
        x = x + layer.mlp(layer.norm2(x))
    expected = video.norm(x[:, -1])

    torch.testing.assert_close(video.watch(frames[:, 2:]), expected, atol=1e-7, rtol=0)  # ages are float32
    assert (video.watch(frames) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("every", [0, 6])
def test_a_tower_without_such_a_layer_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match="expected attention across frames every 1 to 5 layers"):
        VideoTransformer(SMALL, every)
