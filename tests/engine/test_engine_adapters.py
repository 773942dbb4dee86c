"""Adapters over one set of weights: each request's answer is that of the merged bundle, and nothing is copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sinew
from sinew.bundle import Bundle
from sinew.bundle.adapter import fitted, open_adapter
from sinew.bundle.schema import Manifest
from sinew.bundle.writer import rewrite
from sinew.core import ActionChunk, BundleError, CameraSpec, Observation, ObservationError, SinewError
from sinew.engine.adapters import _check_factors, with_adapter
from sinew.engine.plan.packing import pack
from sinew.layers.linear import Embedding, Linear, hold
from sinew.layers.stores.codes import codes
from sinew.layers.stores.half import HALF
from sinew.layers.stores.low_rank import LowRank
from sinew.layers.stores.plain import PLAIN
from sinew.policy import Policy
from sinew.processing import Processor
from sinew.stream.split import read_context
from tests.adapters import Adapters, Make
from tests.closeness import Rounding, assert_close, rounding
from tests.covering import pairs, some
from tests.golden import Golden
from tests.models.stages import observation as golden_observation

CASES = ("smolvla-2cam", "pi0-2cam", "pi05-2cam")
ENGINES = ("eager", "plan")
CASE = CASES[0]


def seen(case: str, golden: Path, adapter: str = "", **more: Any) -> Observation:
    return replace(golden_observation(case, Golden(golden / case)), adapter=adapter, **more)


def opened(found: Adapters, **options: Any) -> Policy:
    return sinew.load(found.base, "cpu", adapters=found.files, **options)


@pytest.fixture(scope="module")
def policy(adapters: Make) -> Policy:
    return opened(adapters(CASE), engine="eager")


@pytest.fixture(scope="module")
def merged(adapters: Make, golden: Path) -> Callable[[str], dict[str, Rounding]]:
    """Return what the reference computes of each merged bundle of a case, and what rounding does to it."""

    def of(file: Path, case: str) -> Rounding:
        policy, given = sinew.load(file, "cpu", engine="eager"), seen(case, golden)
        return rounding(lambda: policy.infer(given).actions)

    return cache(lambda case: {name: of(file, case) for name, file in adapters(case).merged.items()})


@pytest.mark.parametrize(
    ("case", "engine"),
    pairs(CASES, ENGINES, ("smolvla-2cam", "eager"), ("pi0-2cam", "plan"), ("pi05-2cam", "plan")),
)
def test_each_request_is_answered_as_by_its_merged_bundle(
    case: str, engine: str, adapters: Make, merged: Callable[[str], dict[str, Rounding]], golden: Path
) -> None:
    """As it is computed by the reference, whatever the engine of the adapters; the base as by its own engine."""
    found = adapters(case)
    policy, base = opened(found, engine=engine), sinew.load(found.base, "cpu", engine=engine)
    wanted = merged(case)
    alone = base.infer(seen(case, golden)).actions
    answers: dict[str, list[np.ndarray]] = {}
    for name in ("arm", "", "kitchen", "arm", "kitchen", "kitchen", "", "arm"):
        chunk = policy.infer(seen(case, golden, name))
        assert chunk.adapter == name
        answers.setdefault(name, []).append(chunk.actions)
    for name, chunks in answers.items():
        assert all(np.array_equal(each, chunks[0]) for each in chunks)  # of others nothing stays
        if name:
            assert_close(wanted[name], chunks[0], name)
        else:
            assert np.array_equal(chunks[0], alone)  # to the bit
    largest = np.abs(alone).max()
    for one, other in (("arm", ""), ("kitchen", ""), ("arm", "kitchen")):
        assert np.abs(answers[one][0] - answers[other][0]).max() > 1e-2 * largest


def test_statistics_are_the_adapters_own(policy: Policy, adapters: Make, golden: Path) -> None:
    found = adapters(CASE)
    assert Bundle(found.base).manifest.processing != Bundle(found.merged["arm"]).manifest.processing
    for name, file in found.merged.items():
        merged = sinew.load(file, "cpu", engine="eager")
        one, other = policy.prepare(seen(CASE, golden, name)), merged.prepare(seen(CASE, golden))
        assert np.array_equal(one.inputs.state, other.inputs.state)
        assert not np.array_equal(one.inputs.state, policy.prepare(seen(CASE, golden)).inputs.state)
    tokenizers = {id(each.prompter.tokenizer) for each in policy.processors.values()}
    assert len(tokenizers) == 1  # of PaliGemma's each would be 100 MB


def test_a_running_chunk_is_continued_with_the_adapter(policy: Policy, adapters: Make, golden: Path) -> None:
    running = policy.infer(seen(CASE, golden, "kitchen")).actions[2:]
    given = seen(CASE, golden, previous=running + 0.1, delay=2, horizon=4)
    merged = sinew.load(adapters(CASE).merged["kitchen"], "cpu", engine="eager")
    wanted = rounding(lambda: merged.infer(given).actions, derivatives=True)
    assert_close(wanted, policy.infer(replace(given, adapter="kitchen")).actions)
    assert wanted.refusal(merged.infer(seen(CASE, golden)).actions)


def test_adapters_are_warm_before_they_serve(adapters: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = opened(adapters(CASE), engine="eager", threads=1)
    read: list[str] = []
    for name, engine in policy.engine.adapters.items():
        first = engine.read
        monkeypatch.setattr(engine, "read", lambda *given, n=name, do=first: read.append(n) or do(*given))
    assert policy.warm_up().adapter == ""
    assert read == ["arm", "kitchen"]


# ----------------------------------------------------------------------------- memory


def held(*models: torch.nn.Module) -> dict[int, int]:
    """Return the bytes of all tensors of models by where they begin in memory: what is shared counts once."""
    tensors: list[Tensor] = [each for model in models for each in (*model.parameters(), *model.buffers())]
    return {each.data_ptr(): each.nbytes for each in tensors}


@pytest.mark.parametrize("case", some(CASES, "pi05-2cam"))
def test_weights_are_in_memory_once(case: str, adapters: Make) -> None:
    found = adapters(case)
    policy = opened(found, engine="eager")
    base = held(policy.engine.model)
    everything = held(policy.engine.model, *(each.model for each in policy.engine.adapters.values()))
    own = sum(info.nbytes for each in policy.adapters.values() for info in each.infos.values())
    assert sum(everything.values()) == sum(base.values()) + own
    assert own < sum(base.values()) / 2
    assert policy.facts.weights_nbytes == sum(p.nbytes for p in policy.engine.model.parameters())
    changed = [
        module
        for module in policy.engine.model.modules()
        if isinstance(getattr(module, "store", None), LowRank)
    ]
    assert not changed


@pytest.mark.parametrize("case", some([*CASES, "smolvla-bf16-vlm"], "pi05-2cam", "smolvla-bf16-vlm"))
def test_rewritten_weights_are_in_memory_once(case: str, adapters: Make) -> None:
    """Also those that a rewrite makes, as joined queries, keys and values in another precision than the file's. An
    adapter of layers that the base's plan has multiplied out keeps those layers."""
    policy = opened(adapters(case), engine="plan")
    plan = policy.engine.model
    base, names = held(plan), {name for name, _ in plan.named_parameters()}
    for name, engine in policy.engine.adapters.items():
        own, state = policy.adapters[name].infos, engine.model.state_dict(keep_vars=True)
        factors = {each: tensor for each, tensor in state.items() if ".lora_" in each}
        packed = [each for each in factors if "qkv_proj" in each or "kv_proj" in each]
        assert packed, case
        given = sum(info.nbytes for each, info in own.items() if ".lora_" in each)
        assert sum(tensor.nbytes for tensor in factors.values()) < 3 * given
        more = {each for each, t in state.items() if t.data_ptr() not in base} - set(factors) - set(own)
        assert not more & names
        assert {each.rpartition(".")[0] for each in more} <= {"action_in_proj", "action_time_mlp_in"}
        assert all(each.model is not plan for each in policy.engine.adapters.values())


def test_packed_factors_are_those_of_their_parts() -> None:
    """Queries and values have an adapter of two ranks, keys none; biases and the joined weight are as without."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=random)
    layers = []
    for rows, rank in ((6, 2), (4, 0), (4, 3)):
        layer = Linear(8, rows).requires_grad_(False)
        if rank:
            hold(layer, LowRank(PLAIN, rank, 8))
            for part in (layer.lora_a, layer.lora_b):
                assert part is not None
                part.normal_(generator=random)
        layers.append(layer)
    packed = pack(layers)
    assert isinstance(packed, Linear)
    assert packed.store == LowRank(PLAIN, 5, 8)
    torch.testing.assert_close(packed(x), torch.cat([layer(x) for layer in layers], -1))
    layers[1].store = HALF
    assert pack(layers) == "mixed precision"
    layers[2].store = LowRank(codes("int8", 8, 1), 3, 8)
    assert "plain with an adapter" not in str(pack(layers))
    assert isinstance(pack(layers), str)


# ----------------------------------------------------------------------------- batches


def test_requests_of_different_adapters_share_no_batch(policy: Policy, golden: Path) -> None:
    prepared = {
        name: [policy.prepare(seen(CASE, golden, name, seed=seed, noise=None)) for seed in (1, 2)]
        for name in ("", "arm", "kitchen")
    }
    keys = {name: {policy.batch_key(each) for each in members} for name, members in prepared.items()}
    assert all(len(each) == 1 for each in keys.values())
    assert len(set.union(*keys.values())) == 3
    for name, members in prepared.items():
        both = policy.run_batch(members)
        for one, member in zip(both, members, strict=True):
            assert isinstance(one, ActionChunk)
            assert one.adapter == name
            assert_close(rounding(lambda member=member: policy.run(member).actions), one.actions)
    with pytest.raises(SinewError, match="expected observations with the same batch_key"):
        policy.run_batch([prepared["arm"][0], prepared["kitchen"][0]])
    with pytest.raises(SinewError, match="expected observations with the same batch_key"):
        policy.run_batch([prepared[""][0], prepared["kitchen"][0]])


# ----------------------------------------------------------------------------- what is refused


def test_an_unknown_name_is_refused_with_those_that_are_known(
    policy: Policy, adapters: Make, golden: Path
) -> None:
    given = seen(CASE, golden, "kitchn")
    for ask in (policy.infer, policy.check, policy.prepare):
        with pytest.raises(
            ObservationError, match="adapter: expected one of arm, kitchen, or none.* 'kitchn'.*"
        ):
            ask(given)
    with pytest.raises(ObservationError, match="adapter: expected a text, got int"):
        policy.infer(replace(given, adapter=3))
    alone = sinew.load(adapters(CASE).base, "cpu", engine="eager")
    with pytest.raises(
        ObservationError, match="adapter: expected no adapter, because this policy was opened without any"
    ):
        alone.infer(given)
    with pytest.raises(ObservationError, match="adapter: expected none for this policy, got 'kitchn'"):
        policy.processor.prepare(given)
    with pytest.raises(
        ObservationError, match="adapter: expected none, because the robot runs the base policy's head"
    ):
        read_context(policy, policy.prepare(replace(given, adapter="arm")), "fp32")


@pytest.mark.parametrize("engine", ["onnx", "cpu", "cuda"])
def test_engines_that_compute_none_say_so(adapters: Make, engine: str) -> None:
    with pytest.raises(
        SinewError, match=f"engine {engine} cannot compute adapters .arm, kitchen.; use engine plan or eager"
    ):
        opened(adapters(CASE), engine=engine)


def test_auto_says_why_it_takes_which(adapters: Make) -> None:
    policy = opened(adapters(CASE))
    assert policy.engine_name == "plan"
    assert "among the engines that compute adapters (arm, kitchen)" in policy.choice.engine_reason
    described = policy.describe()["adapters"]
    assert {name: each["policy"] for name, each in described.items()} == {"arm": "arm", "kitchen": "kitchen"}
    assert len({each["hash"] for each in described.values()}) == 2


def written(file: Path, out: Path, **changes: Any) -> Path:
    """Copy a bundle or adapter with another manifest."""
    found = Bundle(file)
    rewrite(found, replace(found.manifest, **changes), out)
    return out


def test_an_adapter_of_another_base(adapters: Make, case_bundle: Any, tmp_path: Path) -> None:
    found, other = adapters(CASE), adapters("pi0-2cam")
    arm = found.files["arm"]
    refused = {
        "this adapter is for the architecture pi0, and .* has smolvla": (found.base, other.files["arm"]),
        "whose weights have .* the weights of .*3cam-padded": (case_bundle("smolvla-3cam-padded"), arm),
        "whose weights have .*a quantised or merged bundle": (found.merged["kitchen"], arm),
        "a whole policy and not an adapter": (found.base, found.merged["arm"]),
    }
    for words, (base, file) in refused.items():
        with pytest.raises(BundleError, match=words):
            sinew.load(base, "cpu", adapters={"arm": file})
    base = Bundle(found.base)
    base.hashes = None
    with pytest.raises(BundleError, match="contains no hashes"):
        Policy(base, "cpu", adapters={"arm": arm})
    for name in ("", "a b", "x" * 65, "-a"):
        with pytest.raises(BundleError, match="adapters: expected names of at most 64 letters"):
            sinew.load(found.base, "cpu", adapters={name: arm})
    with pytest.raises(
        SinewError,
        match="an adapter of 'checkpoint' and has no base weights; run `sinew serve BASE --adapter",
    ):
        sinew.load(arm, "cpu")
    said = Bundle(arm).manifest
    assert said.base is not None
    config = said.config | {"min_period": 1.0}
    with pytest.raises(BundleError, match="config.min_period differs from that of the base"):
        open_adapter(written(arm, tmp_path / "c.gguf", config=config), Bundle(found.base))
    tokenizer = replace(said.base, tokenizer="0" * 64)
    with pytest.raises(BundleError, match="the tokenizer differs from that of the base"):
        open_adapter(written(arm, tmp_path / "t.gguf", base=tokenizer), Bundle(found.base))


def test_robots_of_another_form(adapters: Make, tmp_path: Path) -> None:
    found = adapters(CASE)
    base, arm = Bundle(found.base), found.files["arm"]
    spec = Bundle(arm).manifest.spec
    first, *rest = spec.cameras

    def refusal(**changes: Any) -> str:
        changed = written(arm, tmp_path / "changed.gguf", spec=replace(spec, **changes))
        with pytest.raises(BundleError) as caught:
            open_adapter(changed, base)
        assert "serve it as a separate policy (--policy)" in str(caught.value)
        return str(caught.value)

    camera = CameraSpec("belly", first.height, first.width)
    assert "spec.cameras: expected ['camera1', 'camera2']" in refusal(cameras=(camera, *rest))
    names = tuple("abcdefghijklmnop"[: spec.action.dim])
    named = replace(spec.action, names=names)
    sized = replace(spec, cameras=(CameraSpec(first.name, 10, 10), *rest), action=named, control_hz=30.0)
    open_adapter(written(arm, tmp_path / "stated.gguf", spec=sized), base)  # what only one of them states
    both = Bundle(
        written(found.base, tmp_path / "base.gguf", spec=replace(base.manifest.spec, control_hz=10.0))
    )
    with pytest.raises(BundleError, match="spec.control_hz: expected 10.0 like the base, got 30.0"):
        open_adapter(tmp_path / "stated.gguf", both)


def test_an_adapter_that_asks_of_the_model_what_it_cannot_do(
    policy: Policy, adapters: Make, tmp_path: Path
) -> None:
    arm = adapters(CASE).files["arm"]
    spec = Bundle(arm).manifest.spec
    longer = written(arm, tmp_path / "longer.gguf", spec=replace(spec, chunk_size=spec.chunk_size + 1))
    with pytest.raises(
        BundleError, match="sinew.spec or sinew.processing disagrees with sinew.config about sizes"
    ):
        with_adapter(policy.engine.model, Bundle(longer))


def test_cameras_that_are_renamed(adapters: Make, golden: Path) -> None:
    found = adapters(CASE)
    given = seen(CASE, golden, "arm")
    first, *_ = given.images
    policy = opened(found, engine="eager", rename={"front": first})
    images = {"front" if name == first else name: frame for name, frame in given.images.items()}
    plain = opened(found, engine="eager").infer(given).actions
    assert np.array_equal(policy.infer(replace(given, images=images)).actions, plain)


def test_a_file_that_changes_is_noticed(adapters: Make, golden: Path, tmp_path: Path) -> None:
    found = adapters(CASE)
    file = shutil.copy(found.files["arm"], tmp_path / "arm.gguf")
    policy = sinew.load(found.base, "cpu", engine="eager", adapters={"arm": file})
    policy.infer(seen(CASE, golden, "arm"))
    with Path(file).open("r+b") as out:
        out.seek(-64, 2)
        out.write(b"\0" * 64)
    with pytest.raises(BundleError, match=r"arm\.gguf"):
        policy.infer(seen(CASE, golden, "arm"))


# ----------------------------------------------------------------------------- tensors that do not fit


class Tensors:
    """An adapter's file with other tensors."""

    def __init__(self, found: Bundle, tensors: dict[str, Tensor]):
        self.path, self.manifest, self.infos, self._tensors = found.path, found.manifest, found.infos, tensors

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors


def first_of(tensors: dict[str, Tensor]) -> str:
    return next(name for name in tensors if name.endswith(".lora_a")).removesuffix(".lora_a")


UNFIT: dict[str, tuple[Any, str]] = {
    "half of it": (lambda t, m: t.pop(f"{m}.lora_b"), "expected lora_a and lora_b, got lora_a alone"),
    "a width": (lambda t, m: t.update({f"{m}.lora_a": t[f"{m}.lora_a"][:, 1:]}), r"expected lora_a \[r, "),
    "rows": (lambda t, m: t.update({f"{m}.lora_b": t[f"{m}.lora_b"][1:]}), r"expected lora_a \[r, "),
    "ranks": (lambda t, m: t.update({f"{m}.lora_b": t[f"{m}.lora_b"][:, 1:]}), r"expected lora_a \[r, "),
    "no rank": (
        lambda t, m: t.update({f"{m}.lora_{x}": torch.zeros(0, 0) for x in "ab"}),
        r"expected lora_a \[r, ",
    ),
    "a vector": (lambda t, m: t.update({f"{m}.lora_a": torch.zeros(3)}), r"expected lora_a \[r, "),
    "no number": (lambda t, m: t[f"{m}.lora_a"].fill_(torch.nan), "expected finite numbers"),
    "whole numbers": (
        lambda t, m: t.update({f"{m}.lora_a": torch.zeros(1, 1, dtype=torch.uint8)}),
        "expected float32, float16 or bfloat16 weights",
    ),
    "no such layer": (
        lambda t, m: t.update({"x.lora_a": torch.zeros(1, 1)}),
        "expected a linear layer of this name in the base policy, got nothing",
    ),
    "no linear layer": (
        lambda t, m: t.update({f"expert.norm.lora_{x}": torch.zeros(1, 1) for x in "ab"}),
        "expected a linear layer of this name in the base policy, got RMSNorm",
    ),
    "no such weight": (
        lambda t, m: t.update({"x.weight": torch.zeros(1)}),
        "SmolVLA has no weight of this name",
    ),
    "a whole of another form": (
        lambda t, m: t.update({"action_out_proj.bias": torch.zeros(3)}),
        r"expected floats \[32\], got \[3\]",
    ),
    "both": (
        lambda t, m: t.update({f"{m}.weight": None}),
        "expected LoRA factors or a whole weight, got both",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_tensors_that_do_not_fit(policy: Policy, what: str) -> None:
    found = policy.adapters["arm"]
    tensors = {name: tensor.clone() for name, tensor in found.tensors().items()}
    change, words = UNFIT[what]
    module = first_of(tensors)
    change(tensors, module)
    for name, tensor in tensors.items():
        if tensor is None:
            tensors[name] = policy.engine.model.get_parameter(name).clone()
    infos: Any = dict.fromkeys(tensors, next(iter(found.infos.values())))
    damaged: Any = Tensors(found, tensors)
    damaged.infos = infos
    with pytest.raises(BundleError, match=words):
        with_adapter(policy.engine.model, damaged)


def test_processing_that_does_not_fit(policy: Policy) -> None:
    """What is checked when an adapter meets its base, beside what each of the two says of itself."""
    arm = policy.adapters["arm"]
    manifest: Manifest = policy.manifest
    narrow = replace(manifest.spec, state=replace(manifest.spec.state, dim=2, names=()))
    with pytest.raises(BundleError, match="state"):
        Processor(fitted(arm, replace(manifest, spec=narrow)))
    assert Processor(fitted(arm, manifest)).recipe == arm.manifest.processing
    assert isinstance(policy.engine.model.action_out_proj, Linear)


def test_factors_belong_to_linear_layers_alone() -> None:
    """Not to a table, nor to what may compute otherwise."""

    class Own(Linear):
        pass

    found = {"lora_a": torch.zeros(1, 3), "lora_b": torch.zeros(2, 1)}
    _check_factors("a", Linear(3, 2), found)
    for layer in (Embedding(2, 3), Own(3, 2), None):
        kind = "nothing" if layer is None else type(layer).__name__
        with pytest.raises(
            BundleError, match=f"^a: expected a linear layer of this name in the base policy, got {kind};"
        ):
            _check_factors("a", layer, found)
