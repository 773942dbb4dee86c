"""MolmoAct2's checkpoints: what is read of them and what is rejected; frames, prompts, states and masks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError, ObservationError
from sinew.families.molmoact2.model import ConnectorConfig, PatchPooling
from sinew.policy import Policy, load
from sinew.processing.image import apply_image_steps
from sinew.steps.image.resample import resize_plain
from sinew.steps.prompt.state_tokens import StateTokens
from sinew.steps.prompt.task import normalized
from tests.golden import Golden
from tests.models.stages import observation

NETWORK, PICTURES = "vlm/config.json", "vlm/processor_config.json"
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
CASES = ("molmoact2-2cam", "molmoact2-3cam")


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return copied(golden, tmp_path, "molmoact2-2cam")


def copied(golden: Path, folder: Path, case: str) -> Path:
    shutil.copytree(golden / case / "checkpoint", folder / "molmoact2", copy_function=shutil.copyfile)
    return folder / "molmoact2"


def run(checkpoint: Path, file: str = "config.json", drop: tuple[str, ...] = (), **changes: Any) -> Bundle:
    """Convert with changed entries of a file; a name with two underscores is inside of another entry."""
    record = json.loads((checkpoint / file).read_text())
    for name, value in changes.items():
        part, _, inner = name.partition("__")
        (record[part] if inner else record)[inner or part] = value
    for name in drop:
        del record[name]
    (checkpoint / file).write_text(json.dumps(record))
    return Bundle(convert(checkpoint, checkpoint.parent / "out.gguf"))


def run_step(checkpoint: Path, file: str, step: str, **changes: Any) -> Bundle:
    """Convert with changed entries of a step's configuration."""
    record = json.loads((checkpoint / file).read_text())
    for each in record["steps"]:
        if each["registry_name"] == step:
            each["config"].update(changes)
    (checkpoint / file).write_text(json.dumps(record))
    return Bundle(convert(checkpoint, checkpoint.parent / "out.gguf"))


@pytest.fixture
def policy(case_bundle: Any) -> Policy:
    return load(case_bundle("molmoact2-2cam"), engine="eager", dtype="float32")


DISCRETE = "discrete action tokens are not supported, because Sinew computes only the action expert"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_mode": "discrete"}, f'action_mode="discrete": {DISCRETE}'),
        ({"inference_action_mode": "discrete"}, f'inference_action_mode="discrete": {DISCRETE}'),
        ({"inference_action_mode": "fast"}, "inference_action_mode: expected one of continuous, got 'fast'"),
        ({"action_mode": "text"}, "action_mode: expected one of continuous, both, got 'text'"),
        ({"expected_max_action_dim": 16}, "expected_max_action_dim=16 is not supported yet, expected 32"),
        ({"mask_action_dim_padding": False}, "mask_action_dim_padding=false is not supported yet"),
        ({"chunk_size": 0}, "chunk_size: expected a whole number from 1"),
        ({"num_inference_steps": -1}, "num_inference_steps: expected a whole number from 1"),
        ({"depth_tokens": 100}, "depth_tokens=100 is not understood"),
    ],
)
def test_a_policy_that_is_not_computed_is_rejected(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_expert_depth_gate": True}, "action_expert_depth_gate: expected False, got True"),
        ({"enable_depth_reasoning": True}, "enable_depth_reasoning: expected False, got True"),
        ({"add_action_expert": False}, "add_action_expert: expected True, got False"),
        ({"state_format": "continuous"}, "state_format: expected 'discrete', got 'continuous'"),
        ({"max_action_dim": 16}, "max_action_dim: expected 32, got 16"),
        ({"action_mode": "discrete"}, "action_mode: expected both or continuous, got 'discrete'"),
        ({"text_config__norm_after": True}, "text_config.norm_after: expected False, got True"),
        ({"text_config__hidden_act": "gelu"}, "text_config.hidden_act: expected 'silu', got 'gelu'"),
        ({"text_config__qk_norm_type": "olmo"}, "text_config.qk_norm_type: expected 'qwen3', got 'olmo'"),
        ({"text_config__rope_scaling": {"type": "yarn"}}, "text_config.rope_scaling: expected None, got"),
        ({"text_config__rope_scaling_layers": [1]}, "text_config.rope_scaling_layers: expected None"),
        (
            {"text_config__rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "text_config.rope_parameters.rope_type: expected 'default', got 'yarn'",
        ),
        ({"action_expert_config__num_layers": 2}, "action_expert_config.num_layers: expected 3, got 2"),
        ({"action_expert_config__context_layer_norm": False}, "context_layer_norm: expected True, got False"),
        ({"action_expert_config__qk_norm": False}, "action_expert_config.qk_norm: expected True, got False"),
        ({"action_expert_config__rope": False}, "action_expert_config.rope: expected True, got False"),
        (
            {"action_expert_config__causal_attn": True},
            "action_expert_config.causal_attn: expected False, got True",
        ),
        (
            {"action_expert_config__num_heads": 5},
            "expert.hidden_size: expected a multiple of 10, two values for each head, got 56",
        ),
        (
            {"action_expert_config__timestep_embed_dim": 7},
            "expert.time_size: expected an even number of at least 4, got 7",
        ),
        ({"vit_config__hidden_act": "gelu"}, "vit_config.hidden_act: expected 'gelu_pytorch_tanh'"),
        ({"vit_config__num_key_value_heads": 1}, "vit_config.num_key_value_heads: expected 3, got 1"),
        ({"vit_config__image_num_pos": 577}, "expected a square whose 577 patches have a position each"),
        ({"vit_config__image_default_input_size": [30, 36]}, "got 30 x 36 pixels with patches of 6"),
        (
            {"adapter_config__vit_layers": [-9]},
            r"adapter_config.vit_layers: expected layers of 6, got \[-9\]",
        ),
        (
            {"adapter_config__attn_implementation": "flash_attention_2"},
            "adapter_config.attn_implementation: expected eager or sdpa, got 'flash_attention_2'",
        ),
        ({"adapter_config__text_hidden_size": 40}, "adapter_config.text_hidden_size: expected 48, got 40"),
        ({"text_config__num_hidden_layers": 4, "action_expert_config__num_layers": 4}, "is missing"),
    ],
)
def test_a_network_that_is_not_computed_is_rejected(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, NETWORK, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"crop_mode": "overlap-and-resize-c2"},
            "crop_mode: expected 'resize', got 'overlap-and-resize-c2'. Sinew does not cut frames into several",
        ),
        ({"crop_mode": None}, "crop_mode: expected 'resize', got 'overlap-and-resize-c2'"),
        ({"resample": 3}, "image_processor.resample: expected 2, got 3"),
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_processor.image_mean: expected"),
        ({"patch_size": 5}, "image_processor.patch_size: expected 6, got 5"),
        ({"size": {"height": 36, "width": 36}}, "image_processor.size: expected"),
    ],
)
def test_another_image_processor_is_rejected(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, PICTURES, **{f"image_processor__{name}": value for name, value in changes.items()})


@pytest.mark.parametrize(
    ("file", "step", "changes", "message"),
    [
        (PRE, "molmoact2_pack_inputs", {"max_action_dim": 16}, "max_action_dim: expected 32, got 16"),
        (
            PRE,
            "molmoact2_pack_inputs",
            {"image_keys": ["observation.images.top"]},
            "image_keys: expected cameras of config.json, front, wrist, got top",
        ),
        (PRE, "molmoact2_pack_inputs", {"question": "?"}, "question='\\?' is not understood"),
        (
            POST,
            "molmoact2_action_frame_transform",
            {"joint_signs": [1.0] * 8, "joint_offsets": [0.0] * 8},
            "expected at most 7 joint_signs and as many joint_offsets, got 8 and 8",
        ),
        (
            PRE,
            "molmoact2_state_frame_transform",
            {"joint_signs": ["1"], "joint_offsets": [0.0]},
            "joint_signs: expected a list of numbers",
        ),
    ],
)
def test_a_step_that_is_not_computed_is_rejected(
    checkpoint: Path, file: str, step: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConvertError, match=message):
        run_step(checkpoint, file, step, **changes)


BLOCK = "model.model.transformer.blocks.0.mlp.ff_out"


def with_adapter(checkpoint: Path, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Write the weights as LeRobot saves them while PEFT's layers are inside, and return the factors of one layer."""
    weights, generator = load_file(checkpoint / "model.safetensors"), np.random.default_rng(0)
    outputs, inputs = weights[f"{BLOCK}.weight"].shape
    down, up = (generator.normal(size=size).astype(np.float32) for size in ((rank, inputs), (outputs, rank)))
    wrapped = {name.replace("model.", "model.base_model.model.", 1): value for name, value in weights.items()}
    layer = BLOCK.replace("model.", "model.base_model.model.", 1)
    wrapped[f"{layer}.base_layer.weight"] = wrapped.pop(f"{layer}.weight")
    wrapped |= {f"{layer}.lora_A.default.weight": down, f"{layer}.lora_B.default.weight": up}
    save_file(wrapped, checkpoint / "model.safetensors")
    return down, up


def test_adapters_inside_are_merged(checkpoint: Path, case_bundle: Any) -> None:
    """LeRobot computes W x + alpha / rank * B (A x). Its own run of such a checkpoint had the actions of the bundle."""
    down, up = with_adapter(checkpoint, 4)
    found = run(checkpoint, lora_rank=4, lora_alpha=6)
    before, name = Bundle(case_bundle("molmoact2-2cam")), "language.layers.0.mlp.down_proj.weight"
    assert found.infos.keys() == before.infos.keys()
    old, new = (load(bundle, engine="eager", dtype="float32") for bundle in (before.path, found.path))
    for key, value in new.engine.model.state_dict().items():  # type: ignore[attr-defined]
        expected = old.engine.model.state_dict()[key]  # type: ignore[attr-defined]
        if key == name:
            expected = expected + torch.from_numpy(up @ down) * 1.5
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rank", "drop", "message"),
    [
        (8, "", r"ff_out: expected lora_A \[8, inputs\] and lora_B \[outputs, 8\] for a weight"),
        (4, ".lora_B.default.weight", "ff_out: lora_B is missing; copy the complete checkpoint"),
        (4, ".base_layer.weight", "ff_out: weight is missing; copy the complete checkpoint"),
    ],
)
def test_an_adapter_that_does_not_fit_is_rejected(
    checkpoint: Path, rank: int, drop: str, message: str
) -> None:
    with_adapter(checkpoint, 4)
    weights = load_file(checkpoint / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not (drop and name.endswith(f"ff_out{drop}"))}
    if drop == ".base_layer.weight":  # of the first layer alone, which has the adapter
        assert len(kept) == len(weights) - 1
    save_file(kept, checkpoint / "model.safetensors")
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, lora_rank=rank, lora_alpha=6)


def test_a_checkpoint_without_its_new_tokens_is_rejected(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.model.transformer.wte.new_embedding"]
    save_file(weights, checkpoint / "model.safetensors")
    with pytest.raises(ConvertError, match="wte.new_embedding is missing in the checkpoint"):
        run(checkpoint)


def test_unread_tensors_are_named(case_bundle: Any) -> None:
    dropped = Bundle(case_bundle("molmoact2-2cam")).manifest.provenance.dropped
    assert sorted(dropped) == ["model.lm_head.weight", "model.model.transformer.rotary_emb.inv_freq"]


def test_an_entry_of_the_network_that_nothing_reads_is_named(checkpoint: Path) -> None:
    notes = run(checkpoint, NETWORK, text_config__window=7).manifest.provenance.notes
    assert any("not understood, and ignored: text_config.window=7" in note for note in notes)
    assert len(notes) == 1


@pytest.mark.parametrize("case", CASES)
def test_frames_become_the_references_pixels(case: str, golden: Path, case_bundle: Any) -> None:
    g, image = Golden(golden / case), Bundle(case_bundle(case)).manifest.processing.image
    for name in g.cameras:
        found = apply_image_steps(g.numpy(f"frame.{name}"), image)
        assert np.array_equal(found, g.numpy(f"resized.{name}"))


@pytest.mark.parametrize("size", [(40, 52), (24, 24), (77, 31), (30, 30)])
def test_a_resize_is_torchs(size: tuple[int, int]) -> None:
    """torch's sum may be rounded otherwise on another processor, so a byte near a tie may differ by one."""
    frame = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    planes = torch.from_numpy(frame).permute(2, 0, 1)[None].float()
    expected = F.interpolate(planes, (30, 30), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
    found = resize_plain(frame, 30, 30).astype(np.float32)
    assert np.abs(found - expected.numpy()).max() <= 0.5 + 1e-4


def test_the_prompt(golden: Path, case_bundle: Any) -> None:
    first, second = (Bundle(case_bundle(case)).manifest.processing.prompt.template for case in CASES)
    assert first == (
        "<|im_end|>Image 1<im_start>{image}<im_end>Image 2<im_start>{image}<im_end><|im_start|>user\n"
        "The task is to {prompt}. The setup is <setup_start>single arm robot<setup_end>."
        " The current state of the robot is <state_start>{state}<state_end>."
        " The expected control mode is <control_start>absolute joint pose<control_end>."
        " Given these, what action should the robot take to complete the task?<|im_end|>\n"
        "<|im_start|>assistant\n<action_output>"
    )
    assert second.startswith("<|im_end|>Image 1<im_start>{image}<im_col>{image}<im_col><im_end>Image 2<im_s")
    assert "The setup is two arms. The current" in second  # without marks


def test_one_view_has_no_name(checkpoint: Path) -> None:
    made = run_step(checkpoint, PRE, "molmoact2_pack_inputs", image_keys=["observation.images.wrist"])
    assert made.manifest.processing.prompt.template.startswith("<|im_end|><im_start>{image}<im_end><|im_s")
    assert [camera.name for camera in made.manifest.spec.cameras] == ["wrist"]
    assert any("image_keys omits front" in note for note in made.manifest.provenance.notes)


def test_the_order_of_views(checkpoint: Path) -> None:
    keys = ["observation.images.wrist", "observation.images.front"]
    spec = run_step(checkpoint, PRE, "molmoact2_pack_inputs", image_keys=keys).manifest.spec
    assert [(camera.name, camera.height, camera.width) for camera in spec.cameras] == [
        ("wrist", 36, 36),
        ("front", 40, 52),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # by LeRobot 0.6.1
        ('Task: "Put the red cup on the plate."', "put the red cup on the plate"),
        ("Open the drawer! Take the block.", "open the drawer; take the block"),
        ("  the task   is to\nPICK up (the cube) ", "pick up (the cube"),
        ("Your task is to: go", "your task is to: go"),
        ("[Instruction - 'Move 0.5 m, then stop\u2026']", "move 0; 5 m, then stop"),
        ("goal:goal: go!!", "go"),
        ("\u2026", ""),
        ("\u201cStack it.\u201d, please?!", "stack it; \u201d, please"),
        ("language_instruction: task: (wipe) the table;", "wipe) the table"),
        ("no. 7", "no; 7"),
        ('{"a"}', "a"),
        ("the task is to", "the task is to"),
        ("Tasks: none", "tasks: none"),
    ],
)
def test_an_instruction_is_cleaned_as_in_training(text: str, expected: str) -> None:
    assert normalized(text) == expected


def test_an_instruction_stays_as_it_is_where_training_left_it(checkpoint: Path) -> None:
    made = run_step(checkpoint, PRE, "molmoact2_pack_inputs", normalize_language=False)
    assert not any(step.kind == "task" for step in made.manifest.processing.prompt.steps)


def test_a_state_becomes_the_nearest_level() -> None:
    values = np.array([-1, 1, 0, 0.004, -2, 3, 0.00392, 0.0039215686, -0.0039215686], np.float32)
    assert StateTokens(256).numbers(values) == [0, 255, 128, 128, 0, 255, 128, 128, 127]  # by LeRobot 0.6.1
    assert StateTokens(5).numbers(np.array([0.5, -0.5, 0.1, 0.3], np.float32)) == [3, 1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("open <im_patch>", "prompt: expected 18 image tokens"),
        ("open <action_start>", "prompt: expected 0 marking tokens"),
        ("open it " * 300, "prompt: expected .*576"),
    ],
)
def test_an_instruction_that_would_be_read_otherwise_is_rejected(
    policy: Policy, golden: Path, prompt: str, message: str
) -> None:
    given = observation("molmoact2-2cam", Golden(golden / "molmoact2-2cam"))
    with pytest.raises(ObservationError, match=message):
        policy.infer(replace(given, prompt=prompt))


def test_the_length_of_a_prompt(checkpoint: Path) -> None:
    """LeRobot's limit: 196 tokens of each view, 144 of text and one per value of the state, as a multiple of 64."""
    assert run(checkpoint).manifest.processing.prompt.max_tokens == 576
    shutil.rmtree(checkpoint.parent / "out.gguf", ignore_errors=True)
    (checkpoint.parent / "out.gguf").unlink()
    made = run_step(checkpoint, PRE, "molmoact2_pack_inputs", max_sequence_length=130)
    assert made.manifest.processing.prompt.max_tokens == 130


def test_a_gripper_keeps_its_units(policy: Policy, golden: Path) -> None:
    """Its state is not normalised, and LeRobot rejects it outside of -1 to 1. Its actions are clipped to that range."""
    g = Golden(golden / "molmoact2-2cam")
    given = observation("molmoact2-2cam", g)
    assert g["actions"][:, 6].min() == -1.0
    assert g["chunk_normalized"][0, :, 6].min() < -1.1
    state = given.state.copy()
    state[6] = 1.25
    with pytest.raises(ObservationError, match=r"state\[6\]: expected a value from -1 to 1, got 1.25"):
        policy.infer(replace(given, state=state))


def test_a_mask_of_all_values_makes_no_parts(case_bundle: Any) -> None:
    first, second = (Bundle(case_bundle(case)).manifest.processing for case in CASES)
    assert [(part.dim, part.normalization.mode) for part in first.action_parts] == [
        (6, "quantiles"),
        (1, "identity"),
    ]
    assert second.state_parts == second.action_parts == ()
    assert second.state.clip
    assert second.action.clip


def test_frames_of_joints_that_differ_are_named(golden: Path, tmp_path: Path) -> None:
    """LeRobot 0.6.1 writes the second step into fine-tuned checkpoints too, whose actions do not need it."""
    checkpoint = copied(golden, tmp_path, "molmoact2-3cam")
    none = {"joint_signs": None, "joint_offsets": None}
    made = run_step(checkpoint, POST, "molmoact2_action_frame_transform", **none)
    assert made.manifest.processing.action_steps == ()
    assert [str(step) for step in made.manifest.processing.state_steps] == [
        "x * -1 + 0.5 of 0",
        "x * 1 + -0.25 of 1",
        "x * -1 + 0 of 2",
    ]
    assert any("have different signs or offsets" in note for note in made.manifest.provenance.notes)


@pytest.mark.parametrize(
    ("later", "mode", "network", "hidden"),
    [
        (False, "continuous", "both", True),
        (False, "both", "both", True),
        (False, "continuous", "continuous", False),
        (True, "continuous", "both", False),
        (True, "both", "both", True),
        (True, "both", "continuous", False),
    ],
)
def test_whose_mode_hides_the_end_token(
    checkpoint: Path, later: bool, mode: str, network: str, hidden: bool
) -> None:
    """LeRobot 0.6.1 hides it by the network's mode, and later versions, which write train_mode_vlm, by the policy's."""
    record = json.loads((checkpoint / NETWORK).read_text())
    (checkpoint / NETWORK).write_text(json.dumps(record | {"action_mode": network}))
    changes = {"train_mode_vlm": "fft", "dtype": "float32", "llm_residual_dropout": 0.1} if later else {}
    old = ("enable_lora_vlm", "enable_lora_action_expert", "train_action_expert_only", "model_dtype")
    made = run(checkpoint, drop=old if later else (), action_mode=mode, **changes)
    assert made.manifest.config["skipped_tokens"] == ([record["eos_token_id"]] if hidden else [])


def test_solver_steps(case_bundle: Any) -> None:
    """From noise at 0 to actions at 1; in the policy's own number of steps, else in the network's."""
    for case, steps in zip(CASES, (10, 4), strict=True):
        spec = Bundle(case_bundle(case)).manifest.spec
        assert (spec.solver.start, spec.solver.end, spec.solver_steps) == (0.0, 1.0, steps)


@pytest.mark.parametrize(
    ("kernel", "mask", "expected"),
    [("sdpa", True, (True, True)), ("eager", True, (True, False)), ("sdpa", False, (False, False))],
)
def test_what_the_pooling_reads(
    checkpoint: Path, kernel: str, mask: bool, expected: tuple[bool, bool]
) -> None:
    changes = {
        "adapter_config__attn_implementation": kernel,
        "adapter_config__pooling_attention_mask": mask,
    }
    config = run(checkpoint, NETWORK, **changes).manifest.config["connector"]
    assert (config["query_mask"], config["attention_mask"]) == expected


@pytest.mark.parametrize(("query", "attention"), [(True, True), (True, False), (False, False)])
def test_the_pooling_of_a_window_at_the_border(query: bool, attention: bool) -> None:
    """The last window of a 3 x 3 grid has one patch and three positions of padding."""
    config = ConnectorConfig(8, 4, 2, (2, 2), query, attention)
    pool = PatchPooling(config, 6).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in pool.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    features = torch.randn(1, 9, 6, generator=generator, dtype=torch.float64)
    patch = features[0, 8]
    keys = torch.stack([patch, *[torch.zeros_like(patch)] * 3])
    mean = patch if query else patch / 4
    q, k, v = (
        layer(x).unflatten(-1, (2, 4))
        for layer, x in ((pool.q_proj, mean), (pool.k_proj, keys), (pool.v_proj, keys))
    )
    scores = torch.einsum("hd,khd->hk", q, k) / 2.0
    if attention:
        scores[:, 1:] = -torch.inf
    expected = pool.o_proj(torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten())
    found = pool(features, 3, 3)
    assert found.shape == (1, 4, 8)
    torch.testing.assert_close(found[0, 3], expected, rtol=0, atol=1e-5)


def test_views_see_each_other_and_text_sees_what_is_before_it(policy: Policy, golden: Path) -> None:
    """A later view changes what the first view's tokens become, and later text does not."""
    given = observation("molmoact2-2cam", Golden(golden / "molmoact2-2cam"))
    model: Any = policy.engine.model
    contexts = []
    for other in (
        given,
        replace(given, images={**given.images, "wrist": 255 - given.images["wrist"]}),
        replace(given, prompt="open it"),
    ):
        inputs = policy.processor.inputs(other, padded=False)
        pixels, tokens, mask = (
            torch.from_numpy(each)[None] for each in (inputs.pixels, inputs.tokens, inputs.token_mask)
        )
        with torch.inference_mode():
            views = torch.ones(1, 2, dtype=torch.bool)
            context = model.read(model.embed_images(pixels), views, tokens, mask, torch.zeros(1, 7))
        contexts.append(context.kv[2][1][0, :8])  # the third layer's values, of the first view's first tokens
    first, view, text = contexts
    assert (first - view).abs().amax(dim=(1, 2))[-1] > 1e-3
    torch.testing.assert_close(first, text, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_an_observation_is_the_same_in_a_batch(case: str, golden: Path, case_bundle: Any) -> None:
    policy = load(case_bundle(case), engine="eager", dtype="float32")
    given = observation(case, Golden(golden / case))
    members = [given, replace(given, prompt=f"{given.prompt} it", noise=None, seed=2)]
    both = policy.run_batch([policy.prepare(member) for member in members])
    for chunk, member in zip(both, members, strict=True):
        np.testing.assert_allclose(chunk.actions, policy.infer(member).actions, rtol=0, atol=1e-4)
