"""The verbs with ``--engine cuda``, on the device that every machine has."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sinew.cli import main
from tests.engine.cuda.cuda_cases import ASSETS

PEN = str(ASSETS / "pen.gguf")


def test_bench_times_the_graph_and_its_stages(capsys):
    assert (
        main(["bench", PEN, "--engine", "cuda", "--device", "cpu", "--runs", "2", "--threads", "1", "--json"])
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["policy"]["engine"], result["policy"]["dtype"]) == ("cuda", "fp32")
    stages = result["stages_ms"]
    assert list(stages) == [
        "preprocess", "graph", "vision", "prefix", "steps", "head", "postprocess", "total"
    ]  # fmt: skip
    assert len(stages["steps"]) == result["policy"]["solver_steps"]
    assert all(stages[name]["p50"] > 0 for name in ("graph", "vision", "prefix", "head"))
    assert "cuda engine" in result["roofline"]["reason"]


def test_bench_of_other_engines_has_no_graph(capsys):
    assert main(["bench", PEN, "--runs", "1", "--threads", "1", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out.splitlines()[-1])["stages_ms"]
    assert "graph" not in stages


def test_infer_gives_eagers_actions(tmp_path, capsys):
    from PIL import Image

    flags = ["--state", "0.5", "--prompt", "pick up the cube", "--seed", "3", "--json"]
    rng = np.random.default_rng(0)
    for camera in ("now", "previous"):
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(tmp_path / f"{camera}.png")
        flags += ["--image", f"{camera}={tmp_path / camera}.png"]
    actions = {}
    for engine in ("eager", "cuda"):
        assert main(["infer", PEN, *flags, "--engine", engine, "--device", "cpu"]) == 0
        actions[engine] = np.array(json.loads(capsys.readouterr().out)["actions"])
    gap = np.abs(actions["cuda"] - actions["eager"]).max()
    assert gap <= 1e-5 * np.abs(actions["eager"]).max()


def test_doctor_says_what_would_be_used(capsys):
    assert main(["doctor", PEN, "--engine", "cuda", "--device", "cpu", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["cuda engine"]["status"] == "ok"
    if not torch.cuda.is_available():
        assert "no GPU" in checks["cuda engine"]["detail"]
    assert "cuda (asked for), " in checks["bundle engine"]["detail"]
    assert "references" in checks["bundle engine"]["detail"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("verb", ["bench", "serve"])
def test_a_missing_gpu_is_one_line(verb, capsys):
    extra = ["--wire", "native:0"] if verb == "serve" else ["--runs", "1"]
    assert main([verb, PEN, "--engine", "cuda", "--device", "cuda", *extra]) == 1
    assert "finds no CUDA device" in " ".join(capsys.readouterr().err.split())
