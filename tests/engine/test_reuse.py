"""What observations repeat is not computed again, and no bit of an answer shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client

import sinew
from sinew.cli import main
from sinew.core import Observation, SinewError
from sinew.engine.reuse import Reuse
from sinew.engine.watch import Watch
from sinew.policy import Policy
from sinew.processing import ModelInputs
from tests.golden import Golden
from tests.models.stages import observation as case_observation
from tests.serve.test_server import serving
from tests.shape_rounding import RoundedByShape

ENGINES = ("eager", "plan", "onnx")


def loaded(source: str, engine: str, **options: Any) -> Policy:
    if engine == "onnx":
        pytest.importorskip("onnxruntime")
    policy = sinew.load(source, device="cpu", engine=engine, threads=1, **options)
    policy.warm_up()
    return policy


def frames(policy: Policy, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {c.name: rng.integers(0, 256, (c.height, c.width, 3), dtype=np.uint8) for c in policy.spec.cameras}


def seen(policy: Policy, seed: int = 0) -> Observation:
    state = np.random.default_rng(seed).uniform(-0.2, 0.2, policy.spec.state.dim).astype(np.float32)
    return Observation(frames(policy, seed), state, prompt="put the red block into the left bin", seed=seed)


@pytest.fixture(scope="module", params=[(e, True) for e in ENGINES] + [(e, False) for e in ENGINES], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Policy, Policy]]:
    """One that keeps what is repeated, one that computes all; and as on processors whose products round by shape."""
    engine, by_shape = request.param
    with RoundedByShape() if by_shape else contextlib.nullcontext():
        yield loaded("blocks", engine, reuse=True), loaded("blocks", engine)


def single_views(reuse: str) -> bool:
    """Whether views are kept one by one: not where products round by shape, and the policy says so."""
    alone = "the prefix, but no single view: a view's tokens depend on the other views, at least in their rounding"
    assert reuse in ("views and the prefix", alone)
    return reuse != alone


def test_every_kind_of_repetition_gives_the_bits_of_computing_it(
    pair: tuple[Policy, Policy], request: pytest.FixtureRequest
) -> None:
    keeps, computes = pair
    single = single_views(keeps.describe()["reuse"])
    assert not (single and request.node.callspec.params["pair"][1])
    assert computes.describe()["reuse"] == "off"
    first, views = seen(keeps), len(keeps.spec.cameras)
    assert views > 1
    camera = keeps.spec.cameras[0].name
    moved = replace(first, images={**first.images, camera: frames(keeps, 5)[camera]})
    for observation, reused, prefix in (
        (first, 0, False),
        (first, views, True),
        (replace(first, seed=9), views, True),
        (replace(first, solver_steps=None, prompt="another task"), views, False),
        (replace(first, state=first.state + np.float32(0.125)), views, False),
        (moved, views - 1, False),
        (moved, views, True),
        (seen(keeps, 3), 0, False),
        (first, views, False),  # its views are still there, its context has gone
    ):
        chunk = keeps.infer(observation)
        reused = reused if single or prefix else 0
        assert (chunk.timing.reused_views, chunk.timing.reused_prefix) == (reused, prefix)
        wanted = computes.infer(observation)
        assert np.array_equal(chunk.actions, wanted.actions)
        assert (wanted.timing.reused_views, wanted.timing.reused_prefix) == (0, False)


def test_a_trace_is_of_what_is_computed(pair: tuple[Policy, Policy]) -> None:
    keeps, _ = pair
    prepared = keeps.prepare(seen(keeps, 7))  # which no other test of the pair asks for, whatever their order
    inputs, noise = prepared.inputs.batched(), prepared.noise[None]
    keeps.engine.run(inputs, noise, prepared.steps)
    trace = keeps.engine.trace(inputs, noise, prepared.steps)
    assert trace.vision.size
    assert trace.prefix


def test_other_weights_forget_what_the_old_ones_gave() -> None:
    keeps, computes = loaded("blocks", "eager", reuse=True), loaded("blocks", "eager")
    observation = seen(keeps)
    old = keeps.infer(observation)
    weights = {name: 1.25 * weight for name, weight in keeps.engine.model.state_dict().items()}
    for policy in (keeps, computes):
        policy.exchange(weights)
    chunk = keeps.infer(observation)
    assert (chunk.timing.reused_views, chunk.timing.reused_prefix) == (0, False)
    assert np.array_equal(chunk.actions, computes.infer(observation).actions)
    assert not np.array_equal(chunk.actions, old.actions)
    assert keeps.infer(observation).timing.reused_prefix


def test_an_engine_that_cannot_is_refused_by_name() -> None:
    with pytest.raises(
        SinewError,
        match=(
            "reuse: expected engine cpu, onnx, plan or eager, which reuses results of repeated observations, got"
            " engine cuda"
        ),
    ):
        sinew.load("pen", device="cpu", engine="cuda", reuse=True)


def test_a_server_keeps_what_requests_repeat_and_says_so(tmp_path: Path) -> None:
    with serving(
        tmp_path, "blocks", "--reuse", "--engine", "plan", "--wire", "native:0", "--threads", 1
    ) as server:
        with Client(server.address, timeout=60.0) as client:
            observation = {
                "images": {name: np.full((64, 64, 3), 90, np.uint8) for name in ("front", "wrist")},
                "state": np.zeros(client.spec.state.dim), "prompt": "put the red block into the left bin", "seed": 1,
            }  # fmt: skip
            chunks = [client.infer(observation) for _ in range(2)]
            chunks.append(client.infer({**observation, "state": np.full(client.spec.state.dim, 0.125)}))
            single = single_views(client.metadata()["server"]["reuse"])
        counts = [(chunk.timing.reused_views, chunk.timing.reused_prefix) for chunk in chunks]
        assert counts == [(0, False), (2, True), (2 if single else 0, False)]
        assert np.array_equal(chunks[0].actions, chunks[1].actions)
        assert server.stop() == 0


def test_a_recording_reuses_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--replay", str(tmp_path), "--reuse"]) == 1
    assert "--reuse: cannot be combined with --replay" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["eo1-2cam", "diffusion-ddpm", "act-sizes"])
def test_views_of_different_kinds_are_computed_together(
    case: str, golden: Path, case_bundle: Callable[[str], Path]
) -> None:
    """Views of different sizes, or with an encoder for each camera: which view it is says how it is encoded."""
    keeps, computes = (
        loaded(str(case_bundle(case)), "eager", dtype="float32", reuse=reuse) for reuse in (True, False)
    )
    assert keeps.describe()["reuse"] == "the prefix, but no single view: the model encodes its views together"
    given = case_observation(case, Golden(golden / case))
    name = keeps.spec.cameras[0].name
    moved = replace(given, images={**given.images, name: 255 - given.images[name]})
    for each, again in ((given, False), (given, True), (moved, False)):
        chunk = keeps.infer(each)
        assert chunk.timing.reused_prefix is again
        assert np.array_equal(chunk.actions, computes.infer(each).actions)


def test_a_graph_of_all_views_is_given_all(case_bundle: Callable[[str], Path]) -> None:
    policy = loaded(str(case_bundle("act-sizes")), "onnx", reuse=True)
    assert (
        policy.describe()["reuse"] == "the prefix, but no single view: the model encodes its views together"
    )


def test_views_that_a_trial_finds_to_depend_on_each_other_are_computed_together() -> None:
    """Encoders whose views see each other, by much or by a rounding, or that add one of their own."""
    calls: list[int] = []

    def of(encode: Any) -> Reuse:
        def counted(pixels: np.ndarray) -> np.ndarray:
            calls.append(pixels.shape[1])
            return encode(pixels)

        return Reuse(counted, lambda parts: np.concatenate(parts, 1), np.array_equal, lambda: 1)

    pixels = np.random.default_rng(1).uniform(-1, 1, (1, 2, 3, 4, 4)).astype(np.float32)

    def apart(p: np.ndarray) -> np.ndarray:
        return p.reshape(*p.shape[:2], 12, -1)

    for encode, why in (
        (lambda p: apart(p) - p.mean(), "a view's tokens depend on the other views"),
        (
            lambda p: apart(np.cumsum(p, 1)),
            "a view's tokens depend on the other views",
        ),  # of the others those before
        (
            lambda p: apart(np.cumsum(p[:, ::-1], 1)[:, ::-1]),
            "a view's tokens depend on the other views",
        ),  # those behind
        (lambda p: apart(p) * np.float32(1 + 2**-23 * (p.shape[1] > 1)), "at least in their rounding"),
        (lambda p: np.concatenate([apart(p)[:, :1], apart(p)], 1), "encodes 3 views of 2 in the observation"),
    ):
        reuse = of(encode)
        assert why in reuse.try_views(pixels.shape)
        calls.clear()
        for _ in range(2):
            assert np.array_equal(reuse.tokens(pixels, watch := Watch()), encode(pixels))
        assert (calls, watch.reused_views) == ([2, 2], 0)
    reuse = of(apart)
    assert reuse.tokens(pixels, Watch()) is not None
    assert not reuse._views
    assert reuse.try_views(pixels.shape) == ""
    calls.clear()
    found = [reuse.tokens(given, Watch()) for given in (pixels, pixels, pixels[:, ::-1].copy())]
    assert calls == [2]
    assert np.array_equal(found[2], apart(pixels[:, ::-1]))
    for number in range(9):  # one camera stands still beside one that moves
        pixels[0, 1] += np.float32(number + 1)
        assert np.array_equal(reuse.tokens(pixels, watch := Watch()), apart(pixels))
        assert watch.reused_views == 1


def test_a_state_that_the_head_reads_needs_no_new_prefix() -> None:
    def arrays(state: float) -> ModelInputs:
        ones = np.ones((1, 1), bool)
        return ModelInputs(
            np.zeros((1, 1, 3, 2, 2), np.float32), ones, np.ones((1, 1), np.int64), ones,
            np.full((1, 2), state, np.float32),
        )  # fmt: skip

    def made(renew: Any) -> Reuse:
        return Reuse(lambda p: p, lambda parts: parts[0], np.array_equal, lambda: 1, renew)

    for renew, wanted in (
        (lambda context, state: (*context, float(state[0, 0])), ("read", 2.0)),
        (None, None),
    ):
        reuse = made(renew)
        reuse.keep(arrays(1.0), ("read",))
        assert reuse.context(arrays(1.0), Watch()) == ("read",)
        assert reuse.context(arrays(2.0), watch := Watch()) == wanted
        assert watch.reused_prefix == (wanted is not None)
    assert made(None).context(arrays(-0.0), Watch()) is None
    reuse.keep(arrays(0.0), ("zero",))
    assert reuse.context(arrays(-0.0), Watch()) is None  # other bytes, whatever they mean


def test_what_is_kept_is_of_the_newest_few_and_of_its_threads() -> None:
    """Eight views; sums on other threads may be others."""
    threads, encoded = [1], []

    def encode(pixels: np.ndarray) -> np.ndarray:
        encoded.append(pixels.shape[:2])
        return pixels.copy()

    reuse = Reuse(encode, lambda parts: np.concatenate(parts, 1), np.array_equal, lambda: threads[0])
    views = [np.full((1, 1, 3, 2, 2), number, np.float32) for number in range(9)]
    for threads[0] in (1, 2):
        assert reuse.try_views(views[0].shape) == ""
        assert len(encoded) == 1
        assert reuse.try_views(views[0].shape) == ""
        assert len(encoded) == 1
        for given, reused in (
            (0, 0),
            *((number, 0) for number in range(1, 8)),
            (0, 1),
            (8, 0),
            (1, 0),
            (0, 1),
        ):
            found = reuse.tokens(views[given], watch := Watch())
            assert (found[0, 0, 0, 0, 0], watch.reused_views) == (given, reused)
        encoded.clear()
    reuse.forget()
    reuse.tokens(views[0], watch := Watch())
    assert (len(encoded), watch.reused_views) == (1, 0)
    encoded.clear()
    pair = np.concatenate([views[0], views[0]])  # a batch is nobody's
    for _ in range(2):
        assert len(reuse.tokens(pair, watch := Watch())) == 2
    assert (encoded, watch.reused_views) == ([(2, 1)] * 2, 0)


def test_a_context_is_of_all_that_was_read() -> None:
    threads = [1]
    reuse = Reuse(np.copy, lambda parts: parts[0], np.array_equal, lambda: threads[0])

    def read(number: int, count: int = 1, **other: np.ndarray) -> ModelInputs:
        ones = np.ones((count, 2), bool)
        pixels = np.full((count, 2, 3, 2, 2), number, np.float32)
        made = ModelInputs(
            pixels, ones, np.ones((count, 2), np.int64), ones, np.zeros((count, 2), np.float32)
        )
        return replace(made, **other)

    reuse.keep(kept := read(0), "0")
    kept.pixels[:] = 7  # its own copy
    found = reuse.context(read(0), watch := Watch())
    assert (found, watch.reused_views, watch.reused_prefix) == ("0", 2, True)
    assert watch._laps.keys() == {"vision", "prefix"}
    for other in (
        {"camera_mask": np.zeros((1, 2), bool)},
        {"tokens": np.zeros((1, 2), np.int64)},
        {"tokens": np.ones((2, 1), np.int64)},
        {"tokens": np.ones((1, 2), np.uint64)},
        {"token_mask": np.zeros((1, 2), bool)},
        {"state": np.ones((1, 2), np.float32)},
    ):
        assert reuse.context(read(0, **other), watch := Watch()) is None
        assert (watch.reused_views, watch.reused_prefix) == (0, False)
    threads[0] = 2
    assert reuse.context(read(0), Watch()) is None
    threads[0] = 1
    reuse.keep(read(1, count=2), "a batch")
    assert reuse.context(read(1, count=2), Watch()) is None
    reuse.keep(read(1), "1")
    assert [reuse.context(read(number), Watch()) for number in (0, 1)] == ["0", "1"]
    reuse.keep(read(2), "2")
    assert [reuse.context(read(number), Watch()) for number in (0, 1, 2)] == [None, "1", "2"]
    large = [np.zeros((1, 2, 3, 64, 64), np.float32) for _ in range(2)]
    large[1][0, 1, 2, -1, -1] = 1  # beyond what most frames are told apart by
    reuse.keep(read(0, pixels=large[0]), "large")
    assert reuse.context(read(0, pixels=large[1]), Watch()) is None
    reuse.forget()
    assert reuse.context(read(2), Watch()) is None
