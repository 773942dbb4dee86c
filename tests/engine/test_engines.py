"""The engines behind one facade: chosen by name, and ONNX Runtime in processes that cannot import torch."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sinew_client import Client
from sinew_perf.rewrites import cost

from sinew.bundle import Bundle
from sinew.checks.validate.observations import random_observations
from sinew.checks.validate.parity import compare
from sinew.cli import main
from sinew.core import BundleError, SinewError
from sinew.engine.clone import on_meta
from sinew.engine.example import Shapes
from sinew.engine.onnx import opening, providers
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.plan.plan import Plan
from sinew.models.solvers import FLOW
from sinew.policy import load
from tests.golden import Golden, assert_parity
from tests.serve.test_server import START_S

CASE = "smolvla-2cam"
# Run `sinew ARGUMENTS` where torch cannot be imported.
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from sinew.cli import main; sys.exit(main(sys.argv[1:]))"
)
STATE = "-0.1,0.2,0,0,0,1"


@pytest.fixture(scope="module")
def bundle(exported, tmp_path_factory) -> Path:
    """A bundle with its graphs beside it."""
    return exported(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def folder(bundle, tmp_path_factory) -> Path:
    """What ``sinew export`` makes of it."""
    out = tmp_path_factory.mktemp("exported") / "robot"
    assert main(["export", str(bundle), "--onnx", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def g(golden) -> Golden:
    return Golden(golden / CASE)


def run_without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("engine", ["eager", "plan", "onnx"])
def test_engines_by_name(bundle, g, engine):
    policy = load(bundle, engine=engine, threads=1)
    assert (policy.engine_name, policy.threads, str(policy.device)) == (engine, 1, "cpu")
    assert policy.facts.recipe == {}
    assert_parity(policy.infer(g.observation()).actions, g.numpy("actions")[0])


def test_wrong_names_are_refused(bundle, folder):
    with pytest.raises(
        SinewError, match="engine: expected one of auto, cuda, cpu, onnx, plan, eager, got 'fast'"
    ):
        load(bundle, engine="fast")
    with pytest.raises(SinewError, match="provider cuda: expected engine onnx, got eager"):
        load(bundle, engine="eager", providers=["cuda"])
    with pytest.raises(SinewError, match="engine plan: .* contains graphs and no weights; use engine onnx"):
        load(folder, engine="plan")
    with pytest.raises(SinewError, match="runs fp32 on cpu, not fp32 on cuda:0"):
        load(bundle, device="cuda:0", dtype="float32", engine="onnx")
    with pytest.raises(
        BundleError, match="expected a bundle, a checkpoint, or a folder of `sinew export` with policy.gguf"
    ):
        load(folder.parent)


def test_an_exported_folder_runs_by_itself(bundle, folder, g, tmp_path):
    """Also after a move, and with nothing of the bundle left."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    policy = load(moved)
    assert policy.engine_name == "onnx"
    assert policy.engine.directory == moved
    wanted = load(bundle, engine="onnx").infer(g.observation()).actions
    assert np.array_equal(policy.infer(g.observation()).actions, wanted)
    head = Bundle(moved / "policy.gguf")
    assert not head.infos
    assert head.manifest == Bundle(bundle).manifest
    assert head.path.stat().st_size < bundle.stat().st_size / 10
    assert not any(str(Path.cwd()).encode() in path.read_bytes() for path in moved.iterdir())
    assert oct(moved.stat().st_mode & 0o777) == oct(
        tmp_path.joinpath("new").mkdir() or (tmp_path / "new").stat().st_mode & 0o777
    )


def test_export_does_not_overwrite(bundle, folder, capsys):
    assert main(["export", str(bundle), "--onnx", str(folder)]) == 1
    assert "the folder already exists; choose a new one" in capsys.readouterr().err.replace("\n", " ")
    assert not list(folder.parent.glob("robot.*"))


def test_graphs_of_another_architecture_are_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    record = json.loads((other / "graphs.json").read_text())
    (other / "graphs.json").write_text(json.dumps(record | {"architecture": "pi0"}))
    with pytest.raises(BundleError, match="expected graphs of smolvla, got pi0"):
        load(other)


# ----------------------------------------------------------------------------- without torch


@pytest.mark.parametrize("what", ["bundle", "folder"])
def test_infer_without_torch(what, bundle, folder, tmp_path):
    frames, flags = {}, []
    rng = np.random.default_rng(1)
    for camera in ("camera1", "camera2"):
        frames[camera] = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(frames[camera]).save(tmp_path / f"{camera}.png")
        flags += ["--image", f"{camera}={tmp_path / camera}.png"]
    flags += ["--state", STATE, "--prompt", "pick up the cube", "--seed", 7, "--json", "--engine", "onnx"]
    done = run_without_torch("infer", bundle if what == "bundle" else folder, *flags)
    assert done.returncode == 0, done.stderr
    state = np.array(STATE.split(","), np.float32)
    request = {"images": frames, "state": state, "prompt": "pick up the cube", "seed": 7}
    wanted = load(bundle, engine="onnx").infer(request).actions
    assert np.array_equal(np.array(json.loads(done.stdout)["actions"], np.float32), wanted)


def test_serve_without_torch(folder, g):
    """A real server, a real client, the same actions as the engine in this process."""
    command = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        "serve",
        str(folder),
        "--wire",
        "native:0",
        "--threads",
        "1",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        first = server.stdout.readline()
        assert first.startswith("ready on tcp://"), (
            server.stderr.read() if server.poll() is not None else first
        )
        with Client(first.split()[2], timeout=START_S) as client:
            about = client.metadata()["server"]
            got = client.infer(g.observation()).actions
        assert (about["engine"], about["threads"], about["dtype"]) == ("onnx", 1, "fp32")
        assert np.array_equal(got, load(folder, threads=1).infer(g.observation()).actions)
        server.send_signal(signal.SIGTERM)
        assert server.wait(START_S) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_doctor_compares_a_folder_with_the_chunk_that_it_carries(folder, tmp_path, capsys):
    """Graphs that compute something else are found where no weights are, and so is a chunk of another policy."""

    def parity(change: Callable[[Path], object]) -> dict[str, str]:
        other = Path(shutil.copytree(folder, tmp_path / str(len(list(tmp_path.iterdir())))))
        change(other / "reference.npy")
        code = main(["doctor", str(other), "--json"])
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        assert code == (1 if checks["bundle parity"]["status"] == "fail" else 0)
        return checks["bundle parity"]

    found = parity(lambda path: None)
    assert found["status"] == "ok"
    error, bound = re.findall(r"\d\.\de-\d+|\de-\d+", found["detail"])
    assert float(error) < 1e-4 < float(bound)

    def moved(path: Path) -> None:
        np.save(path, np.load(path) + np.float32(0.05))

    assert parity(moved)["status"] == "fail"
    for damage in (
        lambda path: np.save(path, np.zeros((1, 1), np.float32)),
        lambda path: np.save(path, np.load(path).astype(np.float64)),
        lambda path: np.save(path, np.full_like(np.load(path), np.nan)),
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.write_bytes(b"zebra"),
    ):
        found = parity(damage)
        assert found["status"] == "fail"
        assert "reference.npy" in found["detail"]
    found = parity(Path.unlink)
    assert found["status"] == "warn"
    assert "nothing was compared" in found["detail"]


def test_bench_without_torch(folder):
    done = run_without_torch("bench", folder, "--runs", 2, "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["policy"]["engine"], result["threads"]) == ("onnx", 1)
    assert "onnxruntime" in result["software"]
    assert result["policy"]["assigned"].startswith("CPUExecutionProvider 100.0% of ")
    assert "torch" not in result["software"]


def test_bench_against_sgemm(bundle, capsys, monkeypatch, tmp_path):
    """Without a calibration: rates of every stage against a product measured on the spot."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sinew_perf.machine.achieved.SIDE", 256)
    out = tmp_path / "out.json"
    flags = ["--engine", "onnx", "--runs", "2", "--threads", "1", "--json", str(out)]
    assert main(["bench", str(bundle), *flags]) == 0
    report = capsys.readouterr().out.splitlines()
    assert any("GFLOP/s" in line and "of sgemm" in line for line in report)
    result = json.loads(out.read_text())
    roofline = result["roofline"]
    assert 0.1 < roofline["sgemm_gflops"] < 1e5
    wanted = {"vision", "prefix", "head"}
    assert roofline["stages_ms"].keys() == wanted
    steps, image = result["policy"]["solver_steps"], load(bundle).manifest.processing.image
    shapes = Shapes(2, image.height, image.width, result["policy"]["prompt_tokens"], steps)
    flops = cost(Plan.of(on_meta(load(bundle, engine="eager").engine.model)), shapes).flops
    assert sum(row["gflop"] for row in roofline["stages_ms"].values()) == pytest.approx(
        1e-9 * flops, rel=0.05
    )
    for stage in wanted:
        cells = next(line for line in report if f" {stage} " in line and "%" in line).split("│")
        p50, rate, share = (float(cells[i].strip(" %")) for i in (2, 5, 6))
        gflop = roofline["stages_ms"][stage]["gflop"]
        assert rate == pytest.approx(1e3 * gflop / p50, rel=0.05, abs=0.1)
        assert share == pytest.approx(100 * rate / roofline["sgemm_gflops"], abs=1)


def test_doctor_without_torch(folder, bundle):
    """The onnx engine's doctor passes and says what it left out, with a policy and without."""
    for arguments in ([folder], [bundle, "--engine", "onnx"]):
        done = run_without_torch("doctor", *arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        skipped = {name for name, check in checks.items() if check["detail"].startswith("skipped: no torch")}
        wanted = {"torch", "devices", "threads", "cuda engine", "cpu kernels", "simd", "golden"}
        named = "--engine" in arguments
        assert skipped == wanted | (
            {"bundle parity"} if named else set()
        )  # a folder has no weights to compare with
        if not named:
            assert "against eager fp32 on the exporting machine" in checks["bundle parity"]["detail"]
        why = "asked for" if named else "the folder contains graphs and no weights"
        assert f"onnx ({why})" in checks["bundle engine"]["detail"]
        assert checks["bundle inference"]["status"] == "ok"
        assert "sleeping while they wait" in checks["onnxruntime"]["detail"]
    done = run_without_torch("doctor", "--json")  # what torch is for is named, and wanting it is no failure
    assert done.returncode == 0
    (torch,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "torch"]
    assert "eager, plan and `sinew export` do" in torch["detail"]


def test_what_needs_torch_says_so(smolvla_bundle, tmp_path):
    """No graphs yet: an error in one line that names the way out."""
    path = tmp_path / "fresh.gguf"
    shutil.copyfile(smolvla_bundle(CASE), path)
    done = run_without_torch("serve", path, "--engine", "onnx", "--wire", "native:0")
    assert done.returncode == 1
    assert "sinew export" in done.stderr.splitlines()[-1]
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]


# ----------------------------------------------------------------------------- providers


def test_providers_by_short_and_long_name(folder):
    assert providers.choose(())[0] == (providers.CPU,)
    engine = OnnxEngine(folder, ["CPU"], threads=1, solver=FLOW)
    assert engine.providers == [providers.CPU]
    assert engine.provider_reason == "asked for"
    with pytest.raises(
        SinewError, match="provider CUDAExecutionProvider: this onnxruntime offers .*CPUExecutionProvider"
    ):
        OnnxEngine(folder, ["cuda"], solver=FLOW)


def test_a_provider_that_is_not_offered_is_said_before_an_export(bundle, monkeypatch):
    monkeypatch.setattr(opening, "graphs_of", lambda *_, **__: pytest.fail("exported"))
    with pytest.raises(SinewError, match="provider CUDAExecutionProvider: this onnxruntime offers"):
        load(bundle, engine="onnx", providers=["cuda"])


def test_a_provider_that_runs_nothing_is_refused_and_one_that_leaves_much_is_warned_of(
    folder, capsys, caplog
):
    """ONNX Runtime opens a graph without a word where a provider takes none of its nodes, as Azure's does."""
    engine = OnnxEngine(folder, threads=1, solver=FLOW)
    (mine,) = engine.assigned.values()
    assert re.fullmatch(
        r"CPUExecutionProvider 100.0% of \d+ nodes, (\d+) of \1 products", engine.facts.assigned
    )
    azure = ["bench", str(folder), "--provider", "AzureExecutionProvider"]
    assert main(azure) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"runs none of the graphs' nodes: {engine.facts.assigned}" in said
    for left, warned in ((Counter(Erf=2), False), (Counter(MatMul=3, Erf=2), True)):
        providers.check_assigned(
            {providers.OPENVINO: Counter(Conv=20), providers.CPU: left}, [providers.OPENVINO]
        )
        assert (
            "CPUExecutionProvider 20.0% of 25 nodes, 3 of 23 products (3 MatMul, 2 Erf)" in caplog.text
        ) is warned


def test_openvino_computes_what_eager_does(bundle, folder):
    """On a CPU, stage by stage; of the products it has to take nine in ten."""
    if providers.OPENVINO not in providers.runtime().get_available_providers():
        pytest.skip(f"no {providers.OPENVINO} here, which the package onnxruntime-openvino brings")
    with (
        closing(load(bundle, engine="eager", threads=1)) as eager,
        closing(load(folder, engine="onnx", providers=["openvino"], threads=1)) as policy,
    ):
        parity = compare(policy, eager, islice(random_observations(eager), 3))
        taken = policy.engine.assigned
    assert parity.passed, parity.to_dict()
    assert {*parity.stages} == {"vision", "prefix", "head", "actions"}
    products = {name: providers._products(kinds) for name, kinds in taken.items()}
    assert products[providers.OPENVINO] > 9 * products.get(providers.CPU, 0)


def test_a_provider_that_does_not_load_is_an_error():
    class Session:
        def get_providers(self):
            return [providers.CPU]

    with pytest.raises(
        SinewError, match="provider CUDAExecutionProvider: ONNX Runtime could not load this provider"
    ):
        providers.loaded(Session(), ["CUDAExecutionProvider", providers.CPU])
