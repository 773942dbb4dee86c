"""Which engine runs a bundle: the fastest that follows its recipe and is proved for it, or an error that says which."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from sinew import load
from sinew.bundle import Bundle, write_bundle
from sinew.bundle.schema import Quantization
from sinew.cli import main
from sinew.core import SinewError, machine
from sinew.core.extras import install
from sinew.core.registry import architectures
from sinew.engine import measured, prepared, proofs
from sinew.engine.backend import (
    BACKENDS,
    EngineOptions,
    candidates,
    choose,
    unmeasured,
    unproved,
    unstreamed,
)
from sinew.engine.capability import Capability
from sinew.engine.cpu.kernels.library import extension
from sinew.engine.onnx.backend import Onnx
from sinew.engine.onnx.cache import graphs_folder
from sinew.lowbit.quantization import write
from sinew.lowbit.sources import lowbit_sources, plan_formats
from tests.proofs import NAMES

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
INT8 = {"vision": "int8", "language": "int8", "head": "fp32"}
FP8 = {"vision": "fp8", "language": "fp8", "head": "fp32"}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def with_recipe(tmp_path: Path):
    """Write the pen policy with a recipe in its header, and no graphs beside it."""

    def make(recipe: dict[str, str]) -> Path:
        out = tmp_path / "small.gguf"
        write(Bundle(PEN), Quantization(recipe, 7, 0.01, 0.02, 1, "a test", "a test"), out)
        return out

    return make


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ----------------------------------------------------------------------------- what is proved


def test_every_architecture_has_a_record_of_its_proofs() -> None:
    assert set(NAMES) == set(architectures())
    for architecture in architectures():
        assert "fp32" in proofs.proved(architecture, "eager")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_proof_in_fp32_is_one_of_fp32(dtype: str) -> None:
    bundle = SimpleNamespace(
        path=PEN, manifest=SimpleNamespace(architecture="evo1", quantization=None), lowbit=False
    )
    found = unproved(BACKENDS["plan"], bundle, EngineOptions("cpu", dtype))
    assert (found == "") == (dtype == "fp32")
    int8 = Quantization(INT8, 7, 0.01, 0.02, 1, "a test", "a test")
    bundle.manifest.quantization = int8
    assert "not validated" in unproved(BACKENDS["onnx"], bundle, EngineOptions("cpu", "fp32"))


# ----------------------------------------------------------------------------- recipes


def test_a_recipe_chooses_the_engine_that_follows_it(with_recipe) -> None:
    choice = choose(Bundle(with_recipe(INT8)), device="cpu")
    assert choice.engine == "onnx"
    assert choice.engine_reason.startswith("it follows the bundle's recipe")
    assert choice.precision_text == "vision int8, language int8, head fp32"


@pytest.mark.parametrize("engine", ["eager", "plan", "cuda"])
def test_an_engine_that_does_not_follow_the_recipe_is_refused(with_recipe, engine: str) -> None:
    with pytest.raises(SinewError) as caught:
        load(with_recipe(INT8), "cpu", engine=engine)
    for words in (
        "vision int8, language int8",
        f"engine {engine} does not",
        "engine onnx computes it",
        "ignore_recipe=True runs the bundle unquantised",
    ):
        assert words in str(caught.value)


def test_a_recipe_that_nothing_here_follows_is_an_error(with_recipe) -> None:
    with pytest.raises(SinewError, match="no engine can run this bundle on cpu: .*engine cuda computes it"):
        choose(Bundle(with_recipe(FP8)), device="cpu")


def test_an_ignored_recipe_is_said_in_every_report(with_recipe, capsys) -> None:
    bundle = with_recipe(INT8)
    policy = load(bundle, "cpu", ignore_recipe=True)
    wide = load(PEN, "cpu")
    assert policy.engine_name == "plan"
    words = "IGNORED: vision int8, language int8"
    assert words in policy.precision_text
    assert words in repr(policy)
    assert policy.describe()["ignored_recipe"] == "vision int8, language int8"
    chunk = policy.infer(policy.dummy_observation())
    np.testing.assert_array_equal(chunk.actions, wide.infer(policy.dummy_observation()).actions)
    assert any("vision int8, language int8" in warning for warning in chunk.warnings)
    assert main(["bench", str(bundle), "--runs", "1", "--ignore-recipe", "--device", "cpu", "--json"]) == 0
    assert words in json.loads(capsys.readouterr().out)["policy"]["dtype"]


def test_a_recipe_cannot_be_ignored_in_graphs_that_follow_it(with_recipe) -> None:
    with pytest.raises(SinewError, match="use engine plan to ignore the recipe"):
        choose(Bundle(with_recipe(INT8)), "onnx", ignore_recipe=True)


@pytest.mark.parametrize("verb", ["infer", "serve", "bench", "eval"])
def test_every_verb_refuses(with_recipe, verb: str, capsys, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(picture)
    spec = Bundle(PEN).manifest.spec
    images = [part for camera in spec.cameras for part in ("--image", f"{camera.name}={picture}")]
    state = ",".join(["0"] * spec.state.dim)
    flags = [*images, "--state", state, "--prompt", "go"] if verb == "infer" else []
    assert main([verb, str(with_recipe(INT8)), "--engine", "plan", *flags]) == 1
    assert "which engine plan does not compute; engine onnx computes it" in capsys.readouterr().err.replace(
        "\n", " "
    )


# ----------------------------------------------------------------------------- what is chosen where all is open


def test_graphs_decide_between_plan_and_onnx(tmp_path: Path) -> None:
    bundle = tmp_path / "pen.gguf"
    bundle.write_bytes(PEN.read_bytes())
    before = choose(Bundle(bundle), device="cpu")
    assert before.engine == "plan"
    assert "that come with Sinew and support no guidance; engine='onnx' runs them" in before.engine_reason
    folder = graphs_folder(Bundle(bundle))
    folder.mkdir()
    (folder / "graphs.json").touch()
    assert choose(Bundle(bundle), device="cpu").engine == "onnx"
    assert choose(Bundle(bundle), device="cpu", dtype="bf16").engine == "plan"  # the graphs are fp32


def test_an_architecture_without_a_proof_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "proved", lambda *_: frozenset())
    bundle = Bundle(PEN)
    choice = choose(bundle, device="cpu")
    assert choice.engine == "eager"
    assert f"`sinew validate {PEN} --engine plan --device cpu`" in choice.engine_reason
    proofs.keep(PEN, "plan", "cpu", {"passed": True})
    assert choose(bundle, device="cpu").engine == "plan"
    proofs.keep(PEN, "plan", "cpu", {"passed": False})
    refused = choose(bundle, device="cpu")
    assert refused.engine == "eager"
    assert "failed its validation" in refused.engine_reason
    path = proofs.keep(PEN, "plan", "cpu", {"passed": True})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hardware": "another processor"}))
    assert "on another processor: run `sinew validate" in choose(bundle, device="cpu").engine_reason


def test_the_references_are_never_chosen(with_recipe) -> None:
    assert choose(Bundle(PEN), device="cpu").engine != "cuda"
    assert choose(Bundle(PEN), "cuda").options.device == "cuda"  # not the processor


# ----------------------------------------------------------------------------- devices


@no_gpu
@pytest.mark.parametrize("engine", ["auto", "eager", "plan", "cuda"])
def test_a_gpu_that_is_not_there_is_said_plainly(engine: str) -> None:
    with pytest.raises(SinewError, match=r"cuda: torch .* finds no CUDA device; run `sinew doctor`"):
        load(PEN, "cuda", engine=engine)


@no_gpu
@pytest.mark.parametrize(
    "command",
    [
        ["bench", PEN, "--runs", "1", "--device", "cuda"],
        ["serve", PEN, "--wire", "http:0", "--device", "cuda"],
        ["doctor", PEN, "--device", "cuda"],
        ["bench", PEN, "--runs", "1", "--engine", "cuda"],
    ],
    ids=lambda command: f"{command[0]}-{command[-1]}",
)
def test_no_traceback_for_a_missing_gpu(command: list[object], capsys) -> None:
    assert main(list(map(str, command))) == 1
    said = capsys.readouterr()
    assert "finds no CUDA device" in (said.out + said.err).replace("\n", " ")
    assert "Traceback" not in said.out + said.err


def test_wrong_devices_and_precisions_name_what_is_expected() -> None:
    with pytest.raises(SinewError, match="device: expected a device such as cpu, cuda or cuda:0, got 'gpu'"):
        load(PEN, "gpu")
    with pytest.raises(SinewError, match="dtype: expected one of fp32, bf16, fp16, native, got 'int3'"):
        load(PEN, "cpu", "int3")


def test_the_reported_precision_is_what_is_loaded(monkeypatch) -> None:
    monkeypatch.setattr(machine, "half_units", lambda dtype: "a test")
    assert load(PEN, "cpu", "bf16").facts.precision["vision"] == "bf16"
    assert load(PEN, "cpu", "bfloat16").facts.precision == load(PEN, "cpu", "bf16").facts.precision
    assert load(PEN, "cpu").facts.precision == {"vision": "fp32", "language": "fp32", "head": "fp32"}
    assert replace(choose(Bundle(PEN), device="cpu"), ignored="x").precision_text.endswith("IGNORED: x)")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_that_pytorch_cannot_compute_is_rejected(dtype: str, monkeypatch) -> None:
    """Its attention asks oneDNN for tiles, and raises where kernels without AVX-512 were chosen."""
    flags = {"avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_fp16", "avx512_fp16"}
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset(flags))
    bundle = Bundle(PEN)
    for setting in ("avx2", "default"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", setting)
        words = f"cannot compute {dtype}: PyTorch's attention fails with ATEN_CPU_CAPABILITY={setting}"
        words += " on a CPU with AMX"
        for engine in ("plan", "eager"):
            with pytest.raises(
                SinewError, match=f"engine {engine} {words}; unset ATEN_CPU_CAPABILITY, or choose"
            ):
                choose(bundle, engine, "cpu", dtype)
        with pytest.raises(SinewError, match=f"engine plan or eager {words}"):
            choose(bundle, device="cpu", dtype=dtype)
        assert choose(bundle, device="cpu").options.dtype == "fp32"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx512")
    assert choose(bundle, "eager", "cpu", dtype).options.dtype == dtype
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    assert choose(bundle, "eager", "cpu", dtype).options.dtype == dtype
    # Without AMX, PyTorch computes bf16 with any of its kernels
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512_bf16", "avx512_fp16"}))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert choose(bundle, "eager", "cpu", dtype).options.dtype == dtype


# ----------------------------------------------------------------------------- two engines that follow a recipe


def stored_in_int8(out: Path, vision: str = "int8") -> Bundle:
    """The pen policy with every layer in int8, as both engines take it, and the folder of graphs that it would have.
    vision: another precision of these layers."""
    bundle = Bundle(PEN)
    recipe = {"vision": vision, "language": "int8", "head": "int8"}
    manifest = replace(
        bundle.manifest, quantization=Quantization(recipe, 8, 0.01, 0.02, 1, "a test", "a test")
    )
    write_bundle(out, lambda: manifest, lowbit_sources(bundle, plan_formats(bundle, recipe)))
    made = Bundle(out)
    graphs = graphs_folder(made)
    graphs.mkdir()
    (graphs / "graphs.json").touch()
    return made


needs_kernels = pytest.mark.skipif(not extension().compiled, reason=extension().reason)


def times(bundle: Bundle, **seconds: float) -> None:
    """Store the seconds of chunks on this machine, with one thread."""
    measured.store(measured.Conditions(bundle.path, "cpu", "fp32"), chunks=seconds)


@needs_kernels
def test_of_two_that_follow_a_recipe_the_one_that_was_measured_is_taken(tmp_path) -> None:
    """Graphs alone say nothing: what they are worth here, `sinew prepare` finds out."""
    bundle = stored_in_int8(tmp_path / "small.gguf")
    proofs.keep(bundle.path, "onnx", "cpu", {"passed": True})
    choice = choose(bundle, device="cpu", threads=1)
    assert choice.engine == "cpu"
    assert choice.engine_reason.startswith(
        "it follows the bundle's recipe; ms of a small product, measured on"
    )
    told = f"; engine onnx was not compared with it yet: run `sinew prepare {bundle.path}` to measure it"
    assert told in choice.engine_reason
    assert unmeasured(bundle, choice) == ["onnx", "plan"]
    times(bundle, onnx=1.0, plan=2.0)
    assert told in choose(bundle, device="cpu").engine_reason
    for seconds, engine in ((1.0, "onnx"), (2.9, "cpu"), (3.5, "cpu")):
        times(bundle, onnx=seconds, cpu=3.0, plan=4.0)
        choice = choose(bundle, device="cpu")
        assert choice.engine == engine
        words = "it follows the bundle's recipe; processor ms of a chunk, measured on this machine: onnx"
        assert choice.engine_reason.startswith(words)
        assert (candidates(bundle, choice), unmeasured(bundle, choice)) == ([], [])
    times(bundle, onnx=3.0, cpu=3.0, plan=1.0)
    choice = choose(bundle, device="cpu")
    assert choice.engine == "plan"
    assert choice.engine_reason.startswith(
        "it is the fastest by measurements on this machine, although it widens weights stored as int8"
    )
    prepared.EngineFinding("onnx", "cpu", False, "it differs").keep(bundle.path)
    times(bundle, onnx=1.0, cpu=3.0, plan=4.0)
    choice = choose(bundle, device="cpu")
    assert choice.engine == "cpu"
    assert choice.engine_reason.endswith("; it differs")


def test_a_reason_leaves_out_engines_for_other_weights(smolvla_bundle) -> None:
    bundle = Bundle(smolvla_bundle("smolvla-2cam"))
    assert "low-bit" not in choose(bundle, device="cpu").engine_reason
    with pytest.raises(
        SinewError, match="engine cpu needs low-bit weights, .*; make them with `sinew quantize`$"
    ):
        choose(bundle, "cpu", device="cpu")


@needs_kernels
def test_nothing_is_said_where_there_is_nothing_to_choose(tmp_path, monkeypatch) -> None:
    bundle = stored_in_int8(tmp_path / "small.gguf")
    assert choose(bundle, "cpu", device="cpu").engine_reason == "asked for"
    assert choose(bundle, device="cpu", ignore_recipe=True).engine == "cpu"
    (graphs_folder(bundle) / "graphs.json").unlink()
    without_graphs = choose(bundle, device="cpu")
    assert without_graphs.engine == "cpu"
    assert "engine onnx has no graphs of this bundle yet" in without_graphs.engine_reason
    with monkeypatch.context() as patch:
        patch.setattr("sinew.engine.onnx.backend.MAKERS", ("no_such_maker",))
        told = choose(bundle, device="cpu")
        assert "this bundle yet: an export needs no_such_maker: pip install" in told.engine_reason
        assert "sinew prepare" not in told.engine_reason  # which would say the same again
        assert candidates(bundle, told) == []
    monkeypatch.setattr(Onnx, "packages", ("no_such_runtime",))
    times(bundle, cpu=1.0)
    told = choose(bundle, device="cpu").engine_reason
    assert told.startswith(
        "it follows the bundle's recipe; ms of a small product, measured on this machine: cpu "
    )
    assert told.endswith(f"; engine onnx needs no_such_runtime: {install('no_such_runtime')}")
    monkeypatch.setattr(type(BACKENDS["cpu"]), "packages", ("no_such_kernels",))
    widening = choose(bundle, device="cpu")
    assert widening.engine == "plan"
    assert widening.engine_reason.startswith(
        "it widens weights stored as int8, because no engine on this machine computes with them; engine"
    )


def test_without_a_compiler_nobody_waits_for_an_export_that_widens(tmp_path, monkeypatch) -> None:
    """int8 is what ONNX Runtime computes; 4 bits it widens as others do, behind minutes and gigabytes of an export."""
    found = SimpleNamespace(compiled=False, reason="no C++ compiler")
    monkeypatch.setattr("sinew.engine.cpu.kernels.library.extension", lambda: found)
    four, eight = stored_in_int8(tmp_path / "four.gguf", "q4_0"), stored_in_int8(tmp_path / "eight.gguf")
    assert (choose(four, device="cpu").engine, choose(eight, device="cpu").engine) == ("onnx", "onnx")
    for bundle in (four, eight):
        (graphs_folder(bundle) / "graphs.json").unlink()
    choice = choose(four, device="cpu")
    assert choice.engine == "plan"
    assert "engine onnx also widens these weights, after an export" in choice.engine_reason
    assert choose(eight, device="cpu").engine == "onnx"


# ----------------------------------------------------------------------------- streams


def test_a_stream_gets_an_engine_that_runs_it(rolling_bundle: Path) -> None:
    """What is said before it is opened is what the open engine says."""
    bundle = Bundle(PEN)
    for guidance in ("none", "guided", "no-jacobian", "ramp"):
        found = choose(bundle, device="cpu", stream=guidance)
        policy = load(PEN, "cpu", threads=1, stream=guidance)
        assert policy.engine_name == found.engine
        assert Capability.STREAM not in policy.facts.refusals
        assert guidance in ("none", *policy.facts.guides)
    for engine, guidance, words in (
        (
            "cuda",
            "guided",
            r"stream: expected a guidance of none, no-jacobian, ramp on engine cuda, got guided",
        ),
        (
            "onnx",
            "guided",
            r"stream: expected a guidance of none, no-jacobian, ramp on engine onnx, got guided",
        ),
    ):
        with pytest.raises(SinewError, match=words):
            choose(bundle, engine, "cpu", stream=guidance)
    assert choose(bundle, "onnx", "cpu", stream="ramp").engine == "onnx"
    assert choose(bundle, "cuda", "cpu", stream="ramp").engine == "cuda"
    for engine in ("onnx", "cuda"):
        with pytest.raises(
            SinewError,
            match=f"engine cpu, plan or eager, which denoises each action at its own time, got engine {engine}",
        ):
            choose(Bundle(rolling_bundle), engine, "cpu", stream="none")
    options = EngineOptions("cuda:0", "fp32")
    assert "where both share one CUDA stream" in unstreamed(BACKENDS["plan"], bundle, options, "none")
    assert not unstreamed(BACKENDS["cuda"], bundle, options, "none")
