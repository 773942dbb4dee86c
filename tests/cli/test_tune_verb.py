"""``sinew tune``, and the variants in which it times a whole graph, without a GPU."""

# ruff: noqa: F811 - fixtures are imported, and are parameters of the same name

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.models import random_model
from sinew.bundle import Bundle
from sinew.cli import main
from sinew.cli import tune as verb
from sinew.core import SinewError
from sinew.engine.cuda import variants
from sinew.engine.cuda.device import describe
from sinew.engine.cuda.options import CudaOptions
from tests.engine.cuda.cuda_cases import ASSETS
from tests.engine.cuda.kernel_checks import needs_triton
from tests.engine.cuda.tune_cases import CPU, cache, even, gpu, one_tile, tiny  # noqa: F401

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.kernels]
PEN = ASSETS / "pen.gguf"


# ----------------------------------------------------------------------------- variants of the graph


class Made:
    """An engine whose chunk and time depend on its options."""

    def __init__(self, options: CudaOptions, difference: float):
        self.options = options
        self.chunk = np.full((2, 3), difference if options.pdl else 0.0)


def settled(device: torch.device, plain: float, pdl: float, difference: float = 0.0) -> dict:
    model = random_model("pi0", CPU, tiny=True)
    return variants.choose(
        CudaOptions(),
        device,
        model,
        lambda options: Made(options, difference),
        lambda engine: [engine.chunk],
        lambda engine: pdl if engine.options.pdl else plain,
    )


@pytest.mark.parametrize(
    ("plain", "pdl", "difference", "chosen"),
    [(2.0, 1.5, 0.0, True), (2.0, 1.999, 0.0, False), (2.0, 2.5, 0.0, False), (2.0, 1.5, 1e-7, False)],
)
def test_dependent_launch_is_used_where_it_helped(gpu, plain, pdl, difference, chosen) -> None:
    model = random_model("pi0", CPU, tiny=True)
    off = CudaOptions(pdl=False, prefetch=False)
    assert variants.resolve(CudaOptions(), gpu, model) == (off, variants.UNTUNED)
    entry = settled(gpu, plain, pdl, difference)
    options, reason = variants.resolve(CudaOptions(), gpu, model)
    assert options == CudaOptions(pdl=chosen, prefetch=False)
    assert reason == entry["reason"]
    assert f"{plain:.4f} ms" in reason
    if difference:
        assert "differs from the plain graph by 1e-07" in entry["failed"]["dependent launch"]
    # Another model, or other layers in FP8, is another policy; what is asked for is not looked up.
    other = random_model("pi0.5", CPU, tiny=True)
    assert variants.resolve(CudaOptions(), gpu, other)[1] == variants.UNTUNED
    assert variants.resolve(CudaOptions(fp8=("vision",)), gpu, model)[1] == variants.UNTUNED
    asked = CudaOptions(pdl=not chosen, prefetch=False)
    assert variants.resolve(asked, gpu, model) == (asked, "as asked for")
    assert variants.resolve(CudaOptions(graph=False), gpu, model)[0].pdl is False


def test_prefetch_goes_with_dependent_launch(gpu: torch.device) -> None:
    model = random_model("pi0", CPU, tiny=True)

    def measure(engine) -> float:
        return 2.0 - engine.options.pdl * 0.5 - engine.options.prefetch * 0.25

    variants.choose(
        CudaOptions(), gpu, model, lambda options: Made(options, 0.0), lambda e: [e.chunk], measure
    )
    resolve = variants.resolve
    assert resolve(CudaOptions(), gpu, model)[0] == CudaOptions(pdl=True, prefetch=True)
    assert resolve(CudaOptions(prefetch=False), gpu, model)[0] == CudaOptions(pdl=True, prefetch=False)
    assert resolve(CudaOptions(pdl=False), gpu, model)[0] == CudaOptions(pdl=False, prefetch=False)
    with pytest.raises(SinewError, match="prefetch: expected pdl beside it"):
        CudaOptions(pdl=False, prefetch=True)


def test_without_a_plain_graph_nothing_is_kept(gpu: torch.device) -> None:
    def make(options: CudaOptions):
        if not options.pdl:
            raise RuntimeError("out of memory")
        return Made(options, 0.0)

    model = random_model("pi0", CPU, tiny=True)
    with pytest.raises(RuntimeError, match=r"nothing runs .*out of memory.*nothing to compare with"):
        variants.choose(CudaOptions(), gpu, model, make, lambda e: [e.chunk], lambda e: 1.0)
    assert variants.resolve(CudaOptions(), gpu, model)[1] == variants.UNTUNED


def test_an_engine_says_what_it_resolved() -> None:
    engine, _ = tiny("pi0")
    assert engine.options.pdl is False
    assert engine.options_reason == "no GPU"


# ----------------------------------------------------------------------------- the verb


def session(budget: float = 1e6, measure=even, whole=lambda call: (call(), 1.0)[1]) -> verb.TuningSession:
    bundle = Bundle(PEN)
    return verb.TuningSession(
        bundle, CPU, "bfloat16", CudaOptions(max_graphs=2), measure, budget, whole=whole
    )


@needs_triton
@pytest.mark.slow
def test_a_bundle_is_tuned_for_its_prompts(one_tile, capsys) -> None:
    made = session()
    spec = made.bundle.manifest.spec
    lengths = verb.buckets(made.options, spec.max_prompt_tokens, ())
    assert lengths[0] == made.options.bucket(spec.max_prompt_tokens)
    assert lengths == sorted(lengths, reverse=True)
    made.run([4])
    result = made.result(False)
    (summary,) = result["prompt_tokens"].values()
    assert summary["tuned"] == len(result["problems"]) > 5
    assert (result["failed"], summary["failed"], summary["left out for lack of time"]) == (0, 0, 0)
    # Without a GPU dependent launch is an error, and the plain graph is what is kept.
    assert result["launch"]["way"] == "plain"
    assert "needs a GPU" in result["launch"]["failed"]["dependent launch"]
    kept = json.loads(Path(result["kept_in"][0]).read_text())
    assert len(kept) == len({(row["kernel"], tuple(row["dims"])) for row in result["problems"]})
    verb.print_report(result, verb.Console(width=200))
    said = capsys.readouterr().out
    assert all(row["kernel"] in said for row in result["problems"])
    assert result["kept_in"][0] in said.replace("\n", "")
    json.dumps(result)


@needs_triton
def test_ctrl_c_keeps_what_was_found(one_tile, capsys) -> None:
    count = 0

    def interrupted(calls) -> float:
        nonlocal count
        count += 1
        if count == 9:
            raise KeyboardInterrupt
        return even(calls)

    assert verb.reported(session(measure=interrupted), [4, 8]) == 130
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["interrupted"]
    assert 1 <= len(result["problems"]) < 9
    assert len(json.loads(Path(result["kept_in"][0]).read_text())) >= len(result["problems"])


@needs_triton
def test_when_the_budget_is_used_the_other_prompts_wait() -> None:
    made = session(budget=0.0)
    made.run([4, 8])
    assert list(made.lengths) == [4]
    assert made.lengths[4]["tuned"] == 0
    assert made.lengths[4]["left out for lack of time"] > 0
    assert made.launch["way"] == "plain"


def test_lengths_that_the_policy_does_not_take_are_refused() -> None:
    options = CudaOptions(prompt_buckets=(16, 48))
    assert verb.buckets(options, 48, ()) == [48, 16]
    assert verb.buckets(options, 48, (0, 3, 17, 40)) == [48, 16, 0]
    with pytest.raises(SinewError, match="--prompt-tokens 49: expected 0 to 48"):
        verb.buckets(options, 48, (3, 49))


def test_devices_without_tiles_are_refused(capsys) -> None:
    assert main(["tune", str(PEN), "--device", "cpu"]) == 1
    assert "have no tiles to tune" in " ".join(capsys.readouterr().err.split())
    if not torch.cuda.is_available():
        assert main(["tune", str(PEN)]) == 1
        assert "finds no CUDA device" in " ".join(capsys.readouterr().err.split())
    assert main(["tune", str(PEN), "--budget", "0"]) == 2


def test_an_untuned_engine_says_so_once_when_it_is_loaded(monkeypatch, caplog) -> None:
    """On a GPU, where it would follow the choice."""
    from sinew.engine.cuda.open import cuda_engine

    reasons = iter([variants.UNTUNED, "measured: plain 1.0000 ms"])
    monkeypatch.setattr(
        "sinew.engine.cuda.engine.resolve",
        lambda options, device, model: (variants.resolve(options, device, model)[0], next(reasons)),
    )
    cuda_engine(Bundle(PEN), CPU, "float32")
    (record,) = caplog.records
    assert f"sinew tune {PEN} --device cpu" in record.getMessage()
    cuda_engine(Bundle(PEN), CPU, "float32")
    assert len(caplog.records) == 1


def test_doctor_names_the_command(gpu: torch.device) -> None:
    assert "tiles not tuned on this device: sinew tune BUNDLE" in describe(gpu)
