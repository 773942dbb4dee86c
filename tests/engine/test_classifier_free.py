"""Advantages and classifier-free guidance against a loop over the model's four calls: two whole runs, combined by the
formula in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sinew.bundle import Bundle, write_bundle
from sinew.bundle.writer import rewrite
from sinew.capabilities import Capabilities
from sinew.convert import convert
from sinew.core import Observation, ObservationError, SinewError
from sinew.engine.backend import Backend, EngineOptions
from sinew.engine.capability import Capability, Refusal
from sinew.engine.guidance import guidance_weight
from sinew.lowbit.sources import lowbit_sources, plan_formats
from sinew.policy import Policy, load
from sinew.steps.prompt.advantage import Advantage
from tests.cases import cases
from tests.closeness import Rounding, assert_close, rounding
from tests.covering import pairs, some
from tests.golden import Golden

ASSETS = Path(__file__).parents[2] / "sinew" / "assets"
STEPS = 5
CASES = ("pi05-2cam", "pi0-2cam", "smolvla-2cam")
SCALES = (0.5, 3.0)
ENGINES = ("eager", "plan")
RTC = ("no-jacobian", "guided", "ramp")
FLOWS = ("evo1", "groot-n15", "groot-n17", "vla-jepa")  # whose time runs the other way
OTHERS = ("openvla-oft", "pi0fast-2cam", "xvla-ee6d")
FAMILIES = {"pi0": "\nAdvantage: {advantage}", "pi05": r"\nAdvantage: {advantage}", "smolvla": " {advantage}"}


@pytest.fixture(scope="module")
def conditioned(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts a golden checkpoint as one that was trained with advantages; SmolVLA's has room for few tokens."""
    folder = tmp_path_factory.mktemp("advantages")

    def make(name: str) -> Path:
        case, out = cases()[name], folder / f"{name}.gguf"
        if not out.exists():
            home = golden / case.home
            given = case.options(home)
            settings = {**given.pop("settings", {}), "advantage": "good,bad"}
            settings["advantage_words"] = FAMILIES.get(case.architecture, " {advantage}")
            if name in CASES:
                settings["solver_steps"] = STEPS
            convert(home / case.checkpoint, out, settings=settings, **given)
        return out

    return make


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, conditioned: Callable[[str], Path], golden: Path
) -> tuple[Path, dict[str, Any]]:
    return conditioned(request.param), Golden(golden / request.param).observation() | {"prompt": "pick it"}


@cache
def opened(path: Path, engine: str = "eager") -> Policy:
    return load(path, device="cpu", dtype="float32", engine=engine, threads=1, allow_missing_cameras=True)


@torch.no_grad()
def written_out(
    policy: Policy,
    observation: dict[str, Any],
    scale: float,
    advantage: str = "good",
    correct: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None = None,
    begun: torch.Tensor | None = None,
) -> np.ndarray:
    """v = v_without + scale * (v_with - v_without), Euler steps, with frames and prompts read one by one.

    correct: (x, v, t) -> v of real-time chunking. Returns the chunk in model units, [1, H, A].
    """
    model, prefixes = policy.engine.model, []
    for each in (advantage, ""):
        inputs = policy.processor.inputs(Observation.from_mapping({**observation, "advantage": each}))
        arrays = (inputs.pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)
        pixels, *rest = (torch.from_numpy(array)[None] for array in arrays)
        prefixes.append(model.read(model.embed_images(pixels), *rest))
    x = torch.from_numpy(observation["noise"])[None] if begun is None else begun
    solver, steps = policy.spec.solver, policy.spec.solver_steps
    for step in range(steps):
        t = solver.start + (solver.end - solver.start) * step / steps
        time = model.embed_time(torch.tensor([t], dtype=torch.float64))
        conditional, unconditional = (model.act(x, time, prefix) for prefix in prefixes)
        v = unconditional + scale * (conditional - unconditional)
        x = x + (solver.end - solver.start) / steps * (v if correct is None else correct(x, v, t))
    return x.numpy()


def world(policy: Policy, chunk: np.ndarray, observation: dict[str, Any]) -> np.ndarray:
    return policy.processor.actions(chunk[0], Observation.from_mapping(observation))


def answer(policy: Policy, asked: dict[str, Any], derivatives: bool = False) -> Rounding:
    """Return a policy's actions and what rounding does to them: two prompts in one batch, and the formula's own."""
    return rounding(lambda: policy.infer(asked).actions, derivatives=derivatives)


@pytest.mark.parametrize(
    ("case", "scale"), pairs(CASES, SCALES, ("pi05-2cam", 0.5), ("smolvla-2cam", 3.0)), indirect=["case"]
)
def test_guidance_is_two_runs_and_the_formula(case: tuple[Path, dict[str, Any]], scale: float) -> None:
    path, observation = case
    policy = opened(path)
    wanted = world(policy, written_out(policy, observation, scale), observation)
    asked = {**observation, "advantage": "good", "guidance_scale": scale}
    found, bad = answer(policy, asked), answer(policy, {**asked, "advantage": "bad"})
    assert_close(found, wanted)
    assert_close(found, opened(path, "plan").infer(asked).actions)
    assert_close(bad, world(policy, written_out(policy, observation, scale, "bad"), observation))
    assert bad.refusal(wanted)  # the words are read


def drawn(policy: Policy) -> dict[str, Any]:
    """Return an observation that fits a policy, with its noise."""
    rng = np.random.default_rng(0)
    frames = {
        each.name: rng.integers(0, 256, (each.height, each.width, 3), np.uint8)
        for each in policy.spec.cameras
    }
    found = {**vars(policy.dummy_observation()), "images": frames, "prompt": "pick it"}
    noise, _ = policy.processor.noise(Observation.from_mapping(found))
    # not the policy's own of seed 0, from which VLA-JEPA goes where rounding grows a hundredfold
    drawn = np.random.default_rng(1).normal(size=noise.shape).astype(np.float32)
    return {**found, "noise": drawn, "seed": None}


@pytest.mark.parametrize("name", some(FLOWS, "evo1", "groot-n17"))
def test_every_policy_that_integrates_a_velocity_is_guided(
    name: str, conditioned: Callable[[str], Path]
) -> None:
    policy = opened(conditioned(name))
    observation = drawn(policy)
    wanted = world(policy, written_out(policy, observation, 2.0), observation)
    asked = {**observation, "advantage": "good", "guidance_scale": 2.0}
    found = answer(policy, asked)
    assert_close(found, wanted)
    assert_close(found, opened(conditioned(name), "plan").infer(asked).actions)
    assert found.refusal(policy.infer({**observation, "advantage": "good"}).actions)


@pytest.mark.parametrize("name", OTHERS)
def test_others_read_an_advantage_and_refuse_a_scale(name: str, conditioned: Callable[[str], Path]) -> None:
    """A single pass, tokens that are said, a sampler that adds noise again: no velocity to combine."""
    policy = opened(conditioned(name))
    observation = drawn(policy) | {"noise": None, "seed": 0}
    member = policy.prepare({**observation, "advantage": "good"})
    plain = policy.prepare(observation)
    assert len(member.inputs.tokens) != len(plain.inputs.tokens)
    for scale, wanted in ((1.0, member), (0.0, plain)):
        same = policy.prepare({**observation, "advantage": "good", "guidance_scale": scale})
        assert np.array_equal(same.inputs.tokens, wanted.inputs.tokens)
    with pytest.raises(
        ObservationError, match="^guidance_scale: expected a policy that integrates a velocity"
    ):
        policy.check({**observation, "advantage": "good", "guidance_scale": 2.0})


@pytest.mark.parametrize(
    ("case", "engine"),
    pairs(CASES, ENGINES, ("pi0-2cam", "eager"), ("smolvla-2cam", "plan")),
    indirect=["case"],
)
def test_one_and_zero_are_the_plain_chunks_to_the_bit(case: tuple[Path, dict[str, Any]], engine: str) -> None:
    """As they need one prompt: nothing is computed twice."""
    path, observation = case
    policy = opened(path, engine)
    conditional = policy.infer({**observation, "advantage": "good"}).actions
    unconditional = policy.infer(observation).actions
    assert float(np.abs(conditional - unconditional).max()) > 1e-3
    for scale, wanted in ((1.0, conditional), (0, unconditional)):
        asked = {**observation, "advantage": "good", "guidance_scale": scale}
        assert policy.prepare(asked).unconditional is None
        assert np.array_equal(policy.infer(asked).actions, wanted)
    assert np.array_equal(policy.infer({**observation, "advantage": ""}).actions, unconditional)
    if engine == "eager":  # and the formula agrees with both
        for scale, asked in ((1.0, {**observation, "advantage": "good"}), (0.0, observation)):
            formula = world(policy, written_out(policy, observation, scale), observation)
            assert_close(answer(policy, asked), formula)


class Counted:
    """What a policy's model was called with."""

    def __init__(self, policy: Policy, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[tuple[str, int]] = []
        for name in ("embed_images", "read", "act"):
            self._count(policy.engine.model, name, monkeypatch)

    def _count(self, model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = getattr(model, name)

        def counted(first: torch.Tensor, *rest: Any) -> Any:
            self.calls.append((name, len(first)))
            return inner(first, *rest)

        monkeypatch.setattr(model, name, counted)


@pytest.mark.parametrize(
    ("case", "engine"), pairs(CASES, ENGINES, ("pi05-2cam", "eager"), ("pi0-2cam", "plan")), indirect=["case"]
)
def test_frames_are_encoded_once_and_it_costs_less_than_two(
    case: tuple[Path, dict[str, Any]], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By calls, and by floating-point operations of the products: vision once, prefix and head twice."""
    path, observation = case
    policy = opened(path, engine)
    flops, whole = {}, {}
    for scale in (1.0, 2.0):
        with monkeypatch.context() as patched:
            counted = Counted(policy, patched)
            policy.infer({**observation, "advantage": "good", "guidance_scale": scale})
            rows = 1 if scale == 1.0 else 2
            assert counted.calls == [("embed_images", 1), ("read", rows), *[("act", rows)] * STEPS]
        member = policy.prepare({**observation, "advantage": "good", "guidance_scale": scale})
        with FlopCounterMode(display=False) as meter:
            policy.run(member)
        whole[scale] = meter.get_total_flops()
        with FlopCounterMode(display=False) as meter, torch.no_grad():
            policy.engine.model.embed_images(torch.from_numpy(member.inputs.pixels)[None])
        flops[scale] = meter.get_total_flops()
    vision = flops[1.0]
    assert flops[2.0] == vision > 0
    # The shorter prompt is padded to the longer one: frames alone make the difference, and on eager the time's layers.
    once = 2 * whole[1.0] - whole[2.0]
    assert once == vision if engine == "plan" else vision <= once < 1.2 * vision
    assert whole[2.0] < 2 * whole[1.0]


@pytest.mark.parametrize(
    ("case", "engine"),
    pairs(CASES, ENGINES, ("smolvla-2cam", "eager"), ("pi05-2cam", "plan")),
    indirect=["case"],
)
def test_two_scales_share_an_inference(case: tuple[Path, dict[str, Any]], engine: str) -> None:
    path, observation = case
    policy = opened(path, engine)
    other = {name: frame[::-1].copy() for name, frame in observation["images"].items()}
    asked = [
        {**observation, "advantage": "good", "guidance_scale": 0.5},
        {**observation, "advantage": "bad", "guidance_scale": 3.0, "prompt": "drop"},
        {
            **observation,
            "advantage": "good",
            "guidance_scale": 2.0,
            "noise": -observation["noise"],
            "images": other,
        },
    ]
    members = [policy.prepare(each) for each in asked]
    keys = {policy.batch_key(member)._replace(prompt=0) for member in members}
    assert len(keys) == 1
    assert next(iter(keys)).scaled
    plain = policy.prepare({**observation, "advantage": "good"})
    assert policy.batch_key(plain) != policy.batch_key(members[0])  # who asks for one prompt pays for one
    with pytest.raises(SinewError, match="expected observations with the same batch_key"):
        policy.run_batch([plain, members[0]])
    same = [member for member in members if policy.batch_key(member) == policy.batch_key(members[0])]
    assert len(same) >= 2
    for chunk, member in zip(policy.run_batch(same), same, strict=True):
        assert not isinstance(chunk, SinewError)
        assert_close(rounding(lambda member=member: policy.run(member).actions), chunk.actions)


@pytest.mark.parametrize(
    ("case", "kind"), pairs(CASES, RTC, *zip(CASES, RTC, strict=True)), indirect=["case"]
)
def test_a_chunk_is_continued_by_the_guided_policy(case: tuple[Path, dict[str, Any]], kind: str) -> None:
    """Real-time chunking steers the velocity that the two prompts give together, its Jacobian included."""
    path, observation = case
    policy, scale, beta = opened(path), 2.0, 4.0
    rows = policy.spec.chunk_size
    previous = np.random.default_rng(1).normal(size=(rows, policy.spec.action.dim)).astype(np.float32)
    asked = {
        **observation,
        "advantage": "good",
        "guidance_scale": scale,
        "previous": previous,
        "delay": 1,
        "rtc": kind,
        **({} if kind == "ramp" else {"beta": beta}),
    }
    member = policy.prepare(asked)
    wanted = member.continuation
    assert wanted is not None
    target, weights = (torch.from_numpy(array)[None] for array in (wanted.target, wanted.weights))
    begun = torch.from_numpy(observation["noise"])[None].clone()
    model, prefixes = policy.engine.model, []
    if kind == "guided":
        for tokens in (member.inputs.tokens, member.unconditional):
            inputs = replace(member.inputs, tokens=tokens, token_mask=np.ones(len(tokens), bool)).batched()
            with torch.no_grad():
                pixels, *rest = (
                    torch.from_numpy(getattr(inputs, name))
                    for name in ("pixels", "camera_mask", "tokens", "token_mask", "state")
                )
                prefixes.append(model.read(model.embed_images(pixels), *rest))

    def correct(x: torch.Tensor, v: torch.Tensor, t: float) -> torch.Tensor:
        if kind == "ramp":
            return v * weights
        g = guidance_weight(1.0 - t, beta)
        error = (target - (x - t * v)) * weights
        if kind == "no-jacobian":
            return v - g * error
        time = model.embed_time(torch.tensor([t], dtype=torch.float64))

        def denoised(x: torch.Tensor) -> torch.Tensor:
            conditional, unconditional = (model.act(x, time, prefix) for prefix in prefixes)
            return x - t * (unconditional + scale * (conditional - unconditional))

        return v - g * torch.func.vjp(denoised, x)[1](error)[0]

    if kind == "ramp":
        known = (weights[0] < 1.0)[: wanted.overlap]
        begun[0, : wanted.overlap][known] = target[0, : wanted.overlap][known]
    chunk = written_out(policy, observation, scale, correct=correct, begun=begun)
    assert_close(answer(policy, asked, kind == "guided"), world(policy, chunk, observation))


@pytest.mark.parametrize("engine", ["eager", "plan"])
def test_committed_rows_have_times_of_their_own(engine: str, tmp_path: Path) -> None:
    """A policy that was trained to continue a chunk: both prompts see the committed rows as actions."""
    bundle = Bundle(ASSETS / "blocks-rtc.gguf")
    step = Advantage((("good", " the left"), ("bad", " the right")))  # words of its vocabulary
    processing = bundle.manifest.processing
    prompt = replace(processing.prompt, steps=(step, *processing.prompt.steps))
    rewrite(
        bundle, replace(bundle.manifest, processing=replace(processing, prompt=prompt)), tmp_path / "o.gguf"
    )
    policy, eager = opened(tmp_path / "o.gguf", engine), opened(tmp_path / "o.gguf")
    observation = drawn(policy) | {"prompt": "put the red block into"}
    rows, steps = policy.spec.chunk_size, policy.spec.solver_steps
    previous = 0.1 * np.random.default_rng(2).normal(size=(rows, 4)).astype(np.float32)
    asked = {**observation, "advantage": "good", "guidance_scale": 2.0, "previous": previous, "delay": 3}
    wanted = policy.prepare(asked).continuation
    assert wanted is not None
    assert wanted.kind == "trained"
    model, prefixes = eager.engine.model, []
    committed = torch.arange(rows)[None] < 3
    x = torch.from_numpy(observation["noise"])[None].clone()
    x[committed] = torch.from_numpy(wanted.target)[None][committed]
    with torch.no_grad():
        for advantage in ("good", ""):
            inputs = eager.processor.inputs(Observation.from_mapping({**observation, "advantage": advantage}))
            arrays = (inputs.pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)
            pixels, *rest = (torch.from_numpy(array)[None] for array in arrays)
            prefixes.append(model.read(model.embed_images(pixels), *rest))
        for number in range(steps):
            times = torch.where(committed, 0.0, torch.tensor(1.0 - number / steps, dtype=torch.float64))
            time = model.embed_time(times)
            conditional, unconditional = (model.act(x, time, prefix) for prefix in prefixes)
            v = unconditional + 2.0 * (conditional - unconditional)
            x = x - torch.where(committed[..., None], 0.0, v) / steps
    found = answer(eager, asked)
    assert_close(found, policy.infer(asked).actions)
    assert_close(found, world(policy, x.numpy(), observation))


def test_an_engine_that_reads_one_prompt_refuses_by_name(
    conditioned: Callable[[str], Path], golden: Path
) -> None:
    policy = opened(conditioned("pi05-2cam"), "cuda")
    observation = Golden(golden / "pi05-2cam").observation() | {"advantage": "good"}
    assert policy.capabilities.why_not(Capability.TWO_PROMPTS) == policy.describe()["unscaled"]
    for asked in (policy.check, policy.prepare):
        with pytest.raises(
            ObservationError, match="^guidance_scale: expected engine cpu, onnx, plan or eager"
        ):
            asked({**observation, "guidance_scale": 2.0})
    eager = opened(conditioned("pi05-2cam"))
    for scale in (0.0, 1.0):  # which need no second prompt
        asked = {**observation, "guidance_scale": scale}
        assert_close(answer(eager, asked), policy.infer(asked).actions)


@pytest.mark.slow  # an export
def test_graphs_read_two_prompts_too(
    conditioned: Callable[[str], Path], golden: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "policy.gguf"
    path.write_bytes(conditioned("pi05-2cam").read_bytes())
    eager, graphs = opened(path), opened(path, "onnx")
    assert Capability.TWO_PROMPTS not in graphs.capabilities.refusals
    observation = Golden(golden / "pi05-2cam").observation() | {"advantage": "good"}
    previous = np.zeros((eager.spec.chunk_size, eager.spec.action.dim), np.float32)
    continued = {"previous": previous, "delay": 1, "rtc": "no-jacobian"}
    other = {name: frame[::-1].copy() for name, frame in observation["images"].items()}
    members = []
    for more in (
        {"guidance_scale": 2.0},
        {"guidance_scale": 0.25, "images": other},
        {"guidance_scale": 3.0, **continued},
    ):
        asked = {**observation, **more}
        assert_close(answer(eager, asked), graphs.infer(asked).actions)
        members.append(graphs.prepare(asked))
    for chunk, member in zip(graphs.run_batch(members[:2]), members, strict=False):
        assert not isinstance(chunk, SinewError)
        rounded = rounding(lambda member=member: eager.run(member).actions)
        assert_close(rounded.about(graphs.run(member).actions), chunk.actions)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"advantage": "positve"},
            "advantage: expected one of good, bad, or an empty text for none, got 'positve'",
        ),
        ({"advantage": "x" * 100_000}, "advantage: expected one of good, bad"),
        ({"advantage": 1}, "advantage: expected text, got int"),
        (
            {"advantage": "good", "guidance_scale": float("nan")},
            "guidance_scale: expected a number from 0 to 100",
        ),
        (
            {"advantage": "good", "guidance_scale": float("inf")},
            "guidance_scale: expected a number from 0 to 100",
        ),
        (
            {"advantage": "good", "guidance_scale": -0.1},
            "guidance_scale: expected a number from 0 to 100, got -0.1",
        ),
        ({"advantage": "good", "guidance_scale": 10**400}, "guidance_scale: expected a number from 0 to 100"),
        ({"advantage": "good", "guidance_scale": True}, "guidance_scale: expected a number, got bool"),
        ({"advantage": "good", "guidance_scale": "2"}, "guidance_scale: expected a number, got str"),
        (
            {"guidance_scale": 2.0},
            "guidance_scale: expected an advantage with it, such as good, bad, got none",
        ),
        ({"advantage": "", "guidance_scale": 1.0}, "guidance_scale: expected an advantage with it"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    conditioned: Callable[[str], Path], golden: Path, fields: dict[str, Any], message: str
) -> None:
    policy = opened(conditioned("pi05-2cam"))
    observation = Golden(golden / "pi05-2cam").observation()
    for asked in (policy.check, policy.prepare, policy.infer):
        with pytest.raises(ObservationError) as caught:
            asked({**observation, **fields})
        assert str(caught.value).startswith(message)
        assert len(str(caught.value)) < 400


def test_weights_of_few_bits_too(case: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, observation = case
    bundle, small = Bundle(path), tmp_path / "small.gguf"
    formats = plan_formats(bundle, dict.fromkeys(("vision", "language", "head"), "int8"))
    write_bundle(small, lambda: bundle.manifest, lowbit_sources(bundle, formats))
    policy = load(small, device="cpu", engine="cpu", threads=1, allow_missing_cameras=True)
    wanted, exact = (
        world(each, written_out(each, observation, 2.0), observation) for each in (policy, opened(path))
    )
    # Two prompts in one batch round otherwise, but by no more than few bits round float32.
    least = np.abs(exact - wanted).max()
    found, other = (
        policy.infer({**observation, "advantage": "good", "guidance_scale": scale}).actions
        for scale in (2.0, 1.0)
    )
    assert np.abs(found - wanted).max() <= least < np.abs(other - wanted).max()
    # Graphs of such a prefix have one scale for all tokens of a batch: prompts of two lengths would move it.
    refusals = {Capability.TWO_PROMPTS: Refusal("a prefix that reads prompts of two lengths", "int8")}
    policy.capabilities = Capabilities.of(policy.manifest, replace(policy.facts, refusals=refusals), "onnx")
    with pytest.raises(ObservationError, match="guidance_scale: expected a prefix that reads prompts of two"):
        policy.check({**observation, "advantage": "good", "guidance_scale": 2.0})


def test_tokens_of_the_client_hold_an_advantage_or_not(
    conditioned: Callable[[str], Path], golden: Path
) -> None:
    policy = opened(conditioned("pi05-2cam"))
    observation = Golden(golden / "pi05-2cam").observation()
    tokens = policy.prepare({**observation, "advantage": "good"}).inputs.tokens
    told = {**observation, "prompt": "", "tokens": tokens}
    wanted = policy.infer({**observation, "advantage": "good"}).actions
    assert np.array_equal(policy.infer(told).actions, wanted)
    with pytest.raises(ObservationError, match="advantage: expected no advantage together with tokens"):
        policy.check({**told, "advantage": "good"})
    with pytest.raises(ObservationError, match="guidance_scale: expected none together with tokens"):
        policy.check({**told, "guidance_scale": 2.0})


def test_a_policy_without_a_place_refuses_both(smolvla_bundle: Callable[..., Path], golden: Path) -> None:
    policy = opened(smolvla_bundle())
    observation = Golden(golden / "smolvla-2cam").observation()
    assert policy.capabilities.advantages == ()
    assert policy.describe()["advantages"] == []
    assert "a policy whose prompt contains an advantage" in policy.describe()["unscaled"]
    for field, value in (("advantage", "positive"), ("guidance_scale", 2.0), ("guidance_scale", 1.0)):
        with pytest.raises(
            ObservationError, match=f"^{field}: expected none for this policy, because its prompt contains"
        ):
            policy.infer({**observation, field: value})


def test_the_usual_advantage_is_the_bundles(golden: Path, tmp_path: Path) -> None:
    """A client that knows nothing of advantages, as a standard one of openpi, gets the policy that was meant."""
    case = cases()["pi05-2cam"]
    home = golden / case.home
    settings = {"advantage": "positive,negative", "usual_advantage": "positive", "solver_steps": STEPS}
    path = convert(home / case.checkpoint, tmp_path / "o.gguf", settings=settings, **case.options(home))
    policy, observation = opened(path), Golden(home).observation()
    assert policy.describe()["usual_advantage"] == "positive"
    usual = policy.infer(observation).actions
    assert np.array_equal(usual, policy.infer({**observation, "advantage": "positive"}).actions)
    none = policy.infer({**observation, "advantage": ""}).actions
    assert not np.array_equal(usual, none)
    guided = world(policy, written_out(policy, observation, 2.0, "positive"), observation)
    assert_close(answer(policy, {**observation, "guidance_scale": 2.0}), guided)
    text = policy.processor.prompter.text("pick_it up", np.zeros(7, np.float32), advantage="negative")
    assert text.startswith("Task: pick it up Advantage: negative, State: ")  # as RLinf's tokenizer cleans it


def test_an_engine_that_does_not_say_so_is_not_trusted_with_two_prompts(
    conditioned: Callable[[str], Path], golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another package, which may take the first prompt alone."""
    policy = opened(conditioned("pi05-2cam"))
    observation = Golden(golden / "pi05-2cam").observation() | {"advantage": "good", "guidance_scale": 2.0}

    class Silent(Backend):
        name, opens = "silent", "sinew.engine.eager.engine:open_eager"

    facts = Silent().open(policy.bundle, EngineOptions()).facts
    unstated = Capabilities.of(policy.manifest, facts, "silent")
    monkeypatch.setattr(policy, "capabilities", unstated)  # others ask the same policy
    with pytest.raises(ObservationError, match="guidance_scale: expected engine cpu, onnx, plan or eager"):
        policy.infer(observation)
