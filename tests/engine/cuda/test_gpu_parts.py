"""Parts of ``make gpu``: clocks, time stamps of the host, low-bit weights, library products, two trees in turns."""

from __future__ import annotations

import json
import os
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import carry, compare, host, lowbit
from benchmarks.gpu import library as libraries
from benchmarks.gpu.clocks import FIELDS, Clocks
from benchmarks.gpu.models import MODELS, TARGETS, processing, random_model, samples
from benchmarks.gpu.rungs import Engine, cuda_engine, plan_of
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.session import Session, shrunk
from benchmarks.gpu.table import markdown
from sinew.engine.cuda import engine as engines
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.kernels import weight_only_linear
from sinew.engine.cuda.lowbit.weights import WeightOnly
from tests.engine.cuda.kernel_checks import needs_triton

pytestmark = pytest.mark.kernels
ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


# ----------------------------------------------------------------------------- clocks


def smi(folder: Path, lines: list[str]) -> str:
    """A program that prints these lines, one each 20 ms, and then waits."""
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\nsleep 0.02\n" for line in lines) + "sleep 600\n")
    path.chmod(0o755)
    return str(path)


def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing changed in 30 s")


def test_clocks_are_recorded_by_section(tmp_path: Path) -> None:
    lines = ["1980, 2619, 120.5, 35", "1200, 2619, 699.0, 60", "1500, 2619, [N/A], 61"]
    with Clocks("GPU-1", smi(tmp_path, lines)) as clocks:
        until(lambda: len(clocks.samples) == 3)
        assert clocks.since(clocks.start) == {
            "count": 3,
            "sm_mhz": [1200.0, 1500.0, 1980.0],
            "memory_mhz": [2619.0, 2619.0, 2619.0],
            "power_w": [120.5, 409.75, 699.0],
            "celsius": [35.0, 60.0, 61.0],
        }
        assert clocks.since(time.monotonic() + 1) == {"count": 0}
        clocks.samples[0] = (-1.0, *clocks.samples[0][1:])  # an earlier section
        assert clocks.since(clocks.start)["sm_mhz"] == [1200.0, 1350.0, 1500.0]
    record = clocks.record()
    assert record["fields"] == ["seconds", *FIELDS]
    assert record["samples"][2][1:] == (1500.0, 2619.0, None, 61.0)
    json.dumps(record, allow_nan=False)
    table = markdown(
        {
            "gpu": "x",
            "date": "2026-11-21",
            "sections": {"machine": {"status": "done", "rows": [], "clocks": clocks.since(clocks.start)}},
        }
    )
    assert "| machine | 2 | 1200, 1350, 1500 | 699, 699, 699 | 60, 60, 61 |" in table


def test_a_missing_record_has_its_reason(tmp_path: Path) -> None:
    with Clocks("0", str(tmp_path / "nvidia-smi")) as clocks:
        pass
    assert clocks.record()["missing"].endswith("nvidia-smi: No such file or directory")
    assert clocks.since(0.0) == {"count": 0}
    with Clocks("7", smi(tmp_path, ["No devices were found"])) as clocks:
        until(lambda: clocks.missing)
    assert clocks.record()["missing"] == "No devices were found"


def test_all_files_of_a_run_are_one_archive(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("a.json", "a.md", "a-pi0.json.gz"):
        (tmp_path / "run" / name).write_text(name)
    gpu.pack(tmp_path / "run", tmp_path / "out" / "a.tgz")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.tgz"]
    with tarfile.open(tmp_path / "out" / "a.tgz") as tar:
        assert tar.getnames() == ["a-pi0.json.gz", "a.json", "a.md"]


# ----------------------------------------------------------------------------- two CUDA streams


def test_prefixes_and_heads_are_measured_on_two_streams() -> None:
    rows: list[dict] = []
    SECTIONS["streams pi0"][0](Session(CPU, 1500.0, rows.append, tiny=True))
    bits, prefix, head, paced, free, alone, both = rows
    assert bits == {"what": "the bits of one graph", "equal": True}
    assert [row["what"] for row in (prefix, head)] == ["prefix alone", "head alone"]
    assert paced["what"] == "prefixes at 30 Hz, heads at 480 Hz"
    for row in (paced, free):
        assert min(row["prefix_hz"], row["head_hz"], row["prefix"]["calls"]) > 0
    for row in (alone, both):
        assert (row["differ"], row["answers_hz"] > 0) == (0, True)
    text = markdown(
        {"gpu": "x", "date": "2026-11-30", "sections": {"streams pi0": {"status": "done", "rows": rows}}}
    )
    assert "## Two CUDA streams" in text
    assert text.count("| pi0 |") == len(rows) - 1


def test_actions_that_differ_fail_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = CudaEngine.solve
    monkeypatch.setattr(CudaEngine, "solve", lambda *arguments, **options: solve(*arguments, **options) + 1)
    with pytest.raises(RuntimeError, match="differ from the actions of one graph"):
        SECTIONS["streams pi0"][0](Session(CPU, 1500.0, lambda row: None, tiny=True))


# ----------------------------------------------------------------------------- the host


def tiny_engine(model: str, **options) -> tuple[Engine, list]:
    base = random_model(model, CPU, tiny=True)
    case = shrunk(TARGETS[model], True)
    inputs = samples(case, base.config, 2, (24, 32))
    made = Engine(cuda_engine(plan_of(base), processing(model, base.config), CPU, **options))
    for sample in inputs:
        made.run(sample)
    return made, inputs


@pytest.mark.parametrize("model", ["pi0", "groot"])
def test_the_parts_of_a_chunk_on_the_host_follow_each_other(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delay planted in one part is in that part alone. Afterwards, the engine has its own methods again."""
    made, inputs = tiny_engine(model)
    program = made.engine.programs[made.engine.programs.keys()[-1]]
    replay, delay = program.recorded("chunk").replay, 0.3
    rows = {}
    for part, owner, name in (
        ("copy", program, "write"),
        ("launch", program.recorded("chunk"), "replay"),
        ("wait", made.engine.prefix_stream, "wait"),
    ):
        real = getattr(owner, name)

        def slow(*arguments, real=real):
            time.sleep(delay)
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, slow)
            rows[part] = host.host_row(made, inputs, 3)
    assert program.recorded("chunk").replay is replay
    assert "write" not in vars(program)
    assert "wait" not in vars(made.engine.prefix_stream)
    for part, row in rows.items():
        assert list(row) == [f"{each}_us" for each in host.PARTS]
        assert row[f"{part}_us"] > 1e6 * delay
        assert all(row[f"{part}_us"] > other[f"{part}_us"] for name, other in rows.items() if name != part)


def test_a_chunk_of_several_waits_is_refused() -> None:
    made, inputs = tiny_engine("pi0")
    made.apart = True  # the engine waits after each stage
    with pytest.raises(RuntimeError, match="expected 4 time stamps in a call, got"):
        host.host_row(made, inputs, 1)


# ----------------------------------------------------------------------------- low-bit weights


@pytest.mark.parametrize(("form", "most"), [("int8", 6e-3), ("q4_0", 8e-2)])
def test_rounded_weights_are_read_by_the_kernels_reference(form: str, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64) * torch.logspace(-2, 1, 48)[:, None]
    codes, scales = lowbit.rounded(weight, form)
    shape, kind = ((48, 64), torch.int8) if form == "int8" else ((48, 32), torch.uint8)
    assert (tuple(codes.shape), codes.dtype) == (shape, kind)
    wide = weight_only_linear.widened(codes, scales)
    error = (wide - weight).norm(dim=1) / weight.norm(dim=1)
    assert 0 < float(error.max()) < most * 2
    x = torch.randn(3, 64)
    got = weight_only_linear.reference(x, codes, scales)
    torch.testing.assert_close(got, x @ wide.T, rtol=1e-4, atol=1e-3)


def test_low_bit_layers_are_those_of_the_chosen_components() -> None:
    model = random_model("pi0", CPU, tiny=True)
    copy = lowbit.low_bit(model, "q4_0", ("head",))
    kinds = {name: type(getattr(layer, "store", None)) for name, layer in copy.named_modules()}
    coded = {name for name, kind in kinds.items() if kind is WeightOnly}
    assert coded
    assert {copy.component_of(name) for name in coded} == {"head"}
    assert not any(isinstance(getattr(layer, "store", None), WeightOnly) for layer in model.modules())
    other = next(name for name in lowbit.linear_layers(model) if name not in coded)
    assert copy.get_submodule(other).weight.data_ptr() == model.get_submodule(other).weight.data_ptr()


def test_the_engines_rule_keeps_the_head_of_the_targets_low_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200's balance. pi0.5's language model has 968 rows and SmolVLA's 177."""
    monkeypatch.setattr(lowbit.tiles, "capability", lambda device: 90)
    found = {name: lowbit.few_rows(TARGETS[name], CPU, tiny=False) for name in MODELS}
    assert found["pi0.5"] == found["pi0"] == ("head",)
    assert found["smolvla"] == ("language", "head")


# ----------------------------------------------------------------------------- library products


@needs_triton
def test_products_of_the_library_are_rows_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "References", lambda: Kernels(CPU))
    rows: list[dict] = []
    libraries.library("pi0.5", Session(CPU, 1500.0, rows.append, tiny=True))
    assert not [row for row in rows if any(name.endswith("_error") for name in row)]
    by_kernel = {
        kernel: [row for row in rows if row["kernel"] == kernel] for kernel in {r["kernel"] for r in rows}
    }
    assert set(by_kernel) == {"library", "qkv_rope", "gated_mlp", "splitk_linear", "norm_linear"}
    for kernel, each in by_kernel.items():
        assert all(row["cublas_us"] > 0 and row["cublaslt_us"] > 0 for row in each)
        assert all(("ours_us" in row) == (kernel != "library") for row in each)
    (fc1,) = [row for row in rows if row["product"].endswith("fc1")]
    assert fc1["gelu_us"] > 0
    config = MODELS["pi0.5"].tiny
    views = TARGETS["pi0.5"].views
    assert (fc1["M"], fc1["N"], fc1["K"]) == (views * (config.vision.image_size // 14) ** 2, 64, 32)
    assert fc1["runs"] == config.vision.num_layers
    (gated,) = by_kernel["gated_mlp"][:1]
    assert gated["e4m3_us"] > 0
    text = markdown(
        {"gpu": "x", "date": "2026-11-21", "sections": {"library pi0.5": {"status": "done", "rows": rows}}}
    )
    assert f"| vision.layers.mlp.fc1 | {fc1['M']} | 64 | 32 | 2 | library |" in text


def test_a_way_that_the_device_lacks_is_a_row_with_its_error() -> None:
    def lacking() -> None:
        raise RuntimeError("no cublasLt")

    row = libraries._time("gelu_us", [lacking], Session(CPU, 1.0, print, tiny=True))
    assert row == {"gelu_us": None, "gelu_us_error": "RuntimeError: no cublasLt"}


def test_the_librarys_ways_compute_the_same_product() -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(5, 32).bfloat16(),
        (torch.randn(48, 32) / 6).bfloat16(),
        torch.randn(48).bfloat16(),
    )
    wide = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    wanted = torch.nn.functional.gelu(wide, approximate="tanh")
    assert float((libraries.with_gelu(x, weight, bias).float() - wanted).norm() / wanted.norm()) < 1e-2
    ones = torch.ones(5, 1), torch.ones(1, 48)
    narrow = libraries.scaled(x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn), *ones).float()
    plain = x.float() @ weight.float().T
    assert 1e-3 < float((narrow - plain).norm() / plain.norm()) < 0.06


# ----------------------------------------------------------------------------- two trees


def test_a_difference_has_the_interval_of_its_pairs() -> None:
    turns = [
        (10.0 + drift, 9.0 + drift + noise) for drift, noise in zip(range(20), [0.1, -0.1] * 10, strict=True)
    ]
    row = compare.difference(turns)
    assert row["pairs"] == 20
    assert row["difference_ms"] == pytest.approx(-1.0)
    assert (
        -1.2 < row["low_ms"] <= row["difference_ms"] <= row["high_ms"] < -0.8
    )  # although base and new drift by 20
    assert row["turns_ms"][0] == [10.0, 9.1]
    assert compare.distance([3.0, 4.0], [3.0, 4.0]) == 0
    assert compare.distance([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.1)


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of this checkout whose rungs wait, and whose actions are twice as large."""
    folder = tmp_path_factory.mktemp("base")
    archive, place = folder / "base.tgz", "benchmarks/gpu/rungs.py"
    before, text = "        return chunk, watch.timing(", (ROOT / place).read_text()
    assert before in text
    planted = before.replace("return chunk", "time.sleep(0.5)\n        return 2 * chunk")
    (folder / "rungs.py").write_text(text.replace(before, planted))
    with tarfile.open(archive, "w") as tar:
        for name in (
            "sinew",
            "benchmarks",
            "perf/sinew_perf",
            "packages/sinew-client/src",
            "tests/__init__.py",
        ):
            tar.add(ROOT / name, f"tree/{name}", filter=small)
        tar.add(folder / "rungs.py", f"tree/{place}")
    return archive


def small(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith((".gguf", ".pyc", ".safetensors")) else member


def test_two_trees_are_compared_in_turns(
    slower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The planted delay of the base is in the difference, and its planted actions are in the distance."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(compare, "RUNGS", ("engine",))
    monkeypatch.setattr(compare, "MOST", compare.LEAST)
    command = ["--device", "cpu", "--tiny", "--base", str(slower), "--only", "pi0", "--out", str(tmp_path)]
    assert gpu.main(command) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads((tmp_path / last["file"]).read_text())
    (row,) = document["sections"]["pi0"]["rows"]
    assert row["pairs"] == compare.LEAST
    assert row["high_ms"] < 0
    assert row["l2"] == pytest.approx(0.5)
    assert "| engine | 6 |" in (tmp_path / last["file"]).with_suffix(".md").read_text()


def test_a_base_that_cannot_run_fails_the_comparison(tmp_path: Path) -> None:
    archive = tmp_path / "base.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(ROOT / "README.md", "README.md")
    record = compare.compared(archive, "cpu", True, "pi0", 60.0)
    assert record["status"] == "failed"
    assert "expected the folders sinew, perf, packages and benchmarks" in record["reason"]
    assert compare.compared(tmp_path / "absent.tgz", "cpu", True, "pi0", 60.0)["status"] == "failed"
    broken = tmp_path / "broken.tgz"
    (tmp_path / "rungs.py").write_text("raise ImportError('no engine')\n")
    with tarfile.open(broken, "w:gz") as tar:
        tar.add(ROOT / "sinew" / "core", "sinew/core")
        tar.add(tmp_path / "rungs.py", "benchmarks/gpu/rungs.py")
    record = compare.compared(broken, "cpu", True, "pi0", 60.0)
    assert record["reason"] == "ValueError: the process of a tree ended; its messages are above"


def test_the_base_of_a_comparison_is_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "OUT", tmp_path / "carry.tgz")
    monkeypatch.setattr(carry, "files", lambda fixtures: ["README.md"])
    monkeypatch.setattr(carry, "BASE", tmp_path / "base.tgz")
    assert carry.main(["--base", "HEAD"]) == 0
    tree = compare.unpacked(tmp_path / "base.tgz", tmp_path)
    assert (tree / "perf" / "sinew_perf").is_dir()
    assert not (tree / "sinew" / "assets").exists()
    assert (tmp_path / "base.tgz").stat().st_size < carry.MOST // 4


def test_a_comparison_takes_models(capsys, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--tiny", "--base", str(tmp_path / "x"), "--only", "machine"])
    assert "--only: expected some of pi0.5, pi0, smolvla, groot, got machine" in capsys.readouterr().err
    assert os.environ.get("PYTHONSAFEPATH") is None
