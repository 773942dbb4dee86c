"""Every engine has the two verbs, and everything else is made of them: one table, engines x what is promised."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinew.core import CancelledError, ObservationError, SinewError
from sinew.engine.backend import BACKENDS, GROUP, ORDER
from sinew.engine.capability import Capability
from sinew.engine.watch import Watch
from sinew.models.base import Model
from sinew.policy import Policy, load
from sinew.processing import ModelInputs, stack
from sinew.stream import Session, StreamSettings
from sinew.stream.session import StateSample
from tests.closeness import assert_close, rounding
from tests.engines import eager_rounding

ASSETS = Path(__file__).resolve().parents[2] / "sinew" / "assets"
STEPS = 10
ENGINES = [
    name for name in ORDER if name != "cpu"
]  # which wants weights of few bits: tests/engine/cpu has its rows


@pytest.fixture(scope="module", params=ENGINES)
def policy(request: pytest.FixtureRequest) -> Policy:
    if request.param == "onnx":
        pytest.importorskip("onnxruntime")
    return load(ASSETS / "pen.gguf", device="cpu", engine=request.param, threads=1)


@pytest.fixture(scope="module")
def eager() -> Policy:
    """The reference, whose rounding bounds what other orders of sums may change."""
    return load(ASSETS / "pen.gguf", device="cpu", engine="eager", threads=1)


@pytest.fixture(scope="module")
def reference(eager: Policy) -> Model:
    model: Model = eager.engine.model
    return model


def seen(policy: Policy, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    cameras = policy.spec.cameras
    frames = {c.name: rng.integers(0, 256, (c.height, c.width, 3), dtype=np.uint8) for c in cameras}
    state = rng.uniform(-0.5, 0.5, policy.spec.state.dim).astype(np.float32)
    return {"images": frames, "state": state, "prompt": "draw a circle", "seed": seed}


def batch(policy: Policy, seed: int) -> tuple[ModelInputs, np.ndarray]:
    prepared = policy.prepare(seen(policy, seed))
    return prepared.inputs.batched(), prepared.noise[None]


def test_run_is_read_then_solve(policy: Policy) -> None:
    engine = policy.engine
    (inputs, noise), (other, _) = batch(policy, 1), batch(policy, 2)
    whole = engine.run(inputs, noise, STEPS)
    context = engine.read(inputs)
    engine.run(other, noise, STEPS)  # what is read later leaves a context as it is
    for _ in range(2):
        assert np.array_equal(engine.solve(context, noise, STEPS), whole)
    assert not np.array_equal(engine.run(other, noise, STEPS), whole)


def test_a_policy_is_its_engine_between_two_translations(policy: Policy) -> None:
    prepared = policy.prepare(seen(policy, 1))
    (solved,) = policy.engine.run(prepared.inputs.batched(), prepared.noise[None], prepared.steps)
    actions = policy.processor.finish(solved, prepared.state, normalized=not policy.facts.world_units)
    assert np.array_equal(policy.run(prepared).actions, actions)


def test_a_watch_times_each_stage_and_keeps_what_it_computed(policy: Policy) -> None:
    inputs, noise = batch(policy, 3)
    watch = Watch()
    solved = policy.engine.run(inputs, noise, STEPS, watch=watch)
    whole = watch.timing()
    assert len(whole.step_ms) == (1 if policy.facts.one_graph else STEPS)
    apart = Watch(apart=True)
    assert np.array_equal(policy.engine.run(inputs, noise, STEPS, watch=apart), solved)
    timing = apart.timing()
    assert min(timing.vision_ms, timing.prefix_ms, *timing.step_ms) > 0
    assert len(timing.step_ms) == STEPS
    trace = policy.engine.trace(inputs, noise, STEPS)
    assert len(trace.head) == STEPS + 1
    assert trace.prefix
    assert trace.vision.shape[0] == len(policy.spec.cameras)
    if not policy.facts.world_units:
        assert np.array_equal(trace.head[-1], solved[0])


def test_a_cancelled_run_ends_between_two_stages(policy: Policy) -> None:
    inputs, noise = batch(policy, 4)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        policy.engine.run(inputs, noise, STEPS, watch=Watch(cancel))


def test_a_batch_is_its_members(policy: Policy, reference: Model) -> None:
    members = [policy.prepare(seen(policy, seed)) for seed in (5, 6)]
    assert not policy.unbatched
    inputs = stack([member.inputs for member in members], policy.manifest.processing.prompt)
    together = policy.engine.run(inputs, np.stack([member.noise for member in members]), STEPS)
    for member, found in zip(members, together, strict=True):
        (alone,) = policy.engine.run(member.inputs.batched(), member.noise[None], STEPS)
        assert_close(eager_rounding(reference, member.inputs, member.noise, STEPS).about(alone), found)


def test_prompts_over_the_same_views_are_as_over_copies_of_them(policy: Policy, reference: Model) -> None:
    """Pixels once, everything else twice: what classifier-free guidance reads."""
    first, second = (
        policy.prepare({**seen(policy, 7), "prompt": text}) for text in ("draw a circle", "draw")
    )
    second = replace(second, inputs=replace(second.inputs, pixels=first.inputs.pixels))
    assert (Capability.TWO_PROMPTS in policy.facts.refusals) == (policy.engine_name == "cuda")
    if policy.engine_name == "cuda":
        return
    whole = stack([first.inputs, second.inputs], policy.manifest.processing.prompt)
    noise = np.stack([first.noise, second.noise])
    shared = replace(whole, pixels=whole.pixels[:1])
    wanted = policy.engine.run(whole, noise, STEPS)
    found = policy.engine.run(shared, noise, STEPS)
    for member, expected, chunk in zip((first, second), wanted, found, strict=True):
        assert_close(eager_rounding(reference, member.inputs, member.noise, STEPS).about(expected), chunk)
    assert not np.array_equal(found[0], found[1])


def test_the_verbs_run_at_once_on_two_threads(policy: Policy) -> None:
    """As a stream's loops call them."""
    engine = policy.engine
    if Capability.STREAM in policy.facts.refusals:
        with pytest.raises(SinewError, match="stream: expected engine"):
            Session(policy, StreamSettings(30.0), "go")
        return
    pool = [batch(policy, seed) for seed in range(4)]
    wanted = [engine.run(inputs, noise, STEPS) for inputs, noise in pool]
    context = engine.read(pool[0][0])
    with ThreadPoolExecutor(2) as threads:
        for index, (inputs, noise) in enumerate(pool[1:], 1):
            newer = threads.submit(engine.read, inputs)
            solved = threads.submit(engine.solve, context, pool[0][1], STEPS)
            assert np.array_equal(solved.result(), wanted[0])
            assert np.array_equal(engine.solve(newer.result(), noise, STEPS), wanted[index])


def test_a_run_between_two_steps_of_another_changes_neither(policy: Policy) -> None:
    """As a server computes a robot's request between the steps of a dear one: equal to the bit, at every step."""
    if not policy.pauses:
        assert Capability.STREAM in policy.facts.refusals or policy.facts.one_graph
        return
    outer, inner = (policy.prepare(seen(policy, seed)) for seed in (7, 8))
    wanted = [policy.run(each).actions for each in (outer, inner)]
    count, nested = 0, list[np.ndarray]()

    def between() -> None:
        nonlocal count
        count += 1
        nested.append(policy.run(inner).actions)

    assert np.array_equal(policy.run(outer, between=between).actions, wanted[0])
    assert count == STEPS
    assert all(np.array_equal(each, wanted[1]) for each in nested)


def test_a_stream_hands_out_the_policys_chunks(policy: Policy, eager: Policy) -> None:
    if reason := policy.capabilities.why_not(Capability.STREAM):
        pytest.skip(reason)
    rate = float(policy.spec.control_hz or 0)
    given = seen(policy, 7)
    stream = Session(policy, StreamSettings(rate, seed=7), given["prompt"], clock=lambda: 0.0)
    stream.push_sample(StateSample(given["state"], 0.0, 0))
    stream.push_frame(given["images"], 0.0)
    assert stream.read()
    window = stream.run()
    assert window is not None
    chunk = policy.infer(given).actions
    assert len(window.rows) > 1
    handed = np.concatenate([window.rows, chunk[len(window.rows) :]])
    assert_close(rounding(lambda: eager.infer(given).actions).about(chunk), handed)


def test_a_guidance_that_an_engine_has_not_is_refused_by_name(policy: Policy) -> None:
    if "guided" in policy.facts.guides or Capability.STREAM in policy.facts.refusals:
        pytest.skip("it has all, or does not stream")
    name = policy.engine_name
    with pytest.raises(
        ObservationError, match=f"rtc: expected one of no-jacobian, ramp, none on engine {name}"
    ):
        Session(policy, StreamSettings(30.0, "guided"), "go")


def test_backends_stand_in_their_own_folders() -> None:
    for name in ORDER:
        assert BACKENDS[name].name == name
        assert (ASSETS.parent / "engine" / name / "backend.py").is_file()
    assert [name for name, backend in BACKENDS.items() if backend.reference] == ["eager"]
    assert GROUP == "sinew.engines"


@pytest.mark.parametrize(
    "what", ["engine_name ==", "engine_name !=", "engine_name in", "getattr(self.engine"]
)
def test_nobody_asks_an_engine_for_its_name(what: str) -> None:
    """What an engine can and cannot is in its facts."""
    product = [*(ASSETS.parent).rglob("*.py")]
    assert [path.name for path in product if what in path.read_text(encoding="utf-8")] == []


def test_the_record_of_an_engine_is_what_it_does(policy: Policy) -> None:
    """What a backend's record lacks an open engine rejects, with the names of the engines that can do it."""
    name, engine = policy.engine_name, policy.engine
    inputs, noise = batch(policy, 9)
    calls: dict[Capability, Callable[[], object]] = {
        Capability.EXCHANGE: lambda: engine.exchange({}),
        Capability.REUSE: lambda: engine.start_reuse(inputs),
        Capability.ROLL: lambda: engine.evaluate(engine.read(inputs), noise, np.ones(noise.shape[:2])),
        Capability.SPEAK: lambda: engine.say_text(inputs, 1),
        Capability.AUDIT: lambda: engine.audit(inputs, STEPS),
    }
    for capability in Capability:
        refusal = policy.facts.refusals.get(capability)
        if capability not in BACKENDS[name].capabilities:
            assert refusal is not None
            able = [other for other in BACKENDS if capability in BACKENDS[other].capabilities]
            assert all(re.search(rf"\b{other}\b", refusal.expected) for other in able)
            assert not re.search(rf"\b{name}\b", refusal.expected)
            assert refusal.got == f"engine {name}"
        if capability not in calls:
            continue
        if refusal is None:
            calls[capability]()
        else:
            with pytest.raises(SinewError, match=re.escape(str(refusal))):
                calls[capability]()
    engine.reuse = None
