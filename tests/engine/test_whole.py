"""``sinew export --whole``: one graph from frames, state, tokens and noise to actions, against eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from sinew.bundle import Bundle
from sinew.bundle.writer import rewrite
from sinew.checks.validate.exported import prove_whole
from sinew.cli import main
from sinew.core import SinewError
from sinew.engine.onnx.graphs import GraphSet
from sinew.engine.onnx.whole.graph import WHOLE, affine, frame_map, open_whole, write_whole
from sinew.policy import load
from sinew.processing.image import prepare_frame
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.letterbox import Letterbox


@pytest.fixture(scope="module")
def folder(exported: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle and its export with one graph of the whole policy."""
    home = tmp_path_factory.mktemp("whole")
    bundle = exported(home)
    assert main(["export", str(bundle), "--onnx", str(home / "robot"), "--whole"]) == 0
    return bundle, home / "robot"


def shapes(path: Path) -> dict[str, list[int]]:
    import onnxruntime  # whose import starts a thread

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return {node.name: node.shape for node in (*session.get_inputs(), *session.get_outputs())}


def test_it_computes_what_eager_does_in_fixed_shapes(
    folder: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, made = folder
    assert prove_whole(Bundle(bundle), made, *open_whole(made)) < 1e-5
    found, spec = shapes(made / WHOLE), load(made).spec
    assert all(isinstance(size, int) for shape in found.values() for size in shape)
    assert found["camera1"] == [spec.cameras[0].height, spec.cameras[0].width, 3]
    assert found["actions"] == [1, spec.chunk_size, spec.action.dim]
    graph = onnx.load(made / WHOLE, load_external_data=False)
    assert not graph.functions  # which OpenVINO does not know
    assert (made / WHOLE).stat().st_size < 0.5 * sum(path.stat().st_size for path in made.glob("*.data"))
    assert main(["doctor", str(made)]) == 0  # the folder is what it was


@pytest.mark.slow  # one more export
def test_a_runge_kutta_solution_is_one_graph(folder: tuple[Path, Path], tmp_path: Path) -> None:
    """Its steps add the x of earlier steps, which no other solver does."""
    bundle = Bundle(folder[0])
    spec = bundle.manifest.spec
    solver = replace(spec.solver, kind="rk4")
    changed = replace(bundle.manifest, spec=replace(spec, solver=solver, solver_steps=8))
    path = tmp_path / "policy.gguf"
    rewrite(bundle, changed, path)
    assert main(["export", str(path), "--onnx", str(tmp_path / "robot"), "--whole"]) == 0
    assert prove_whole(Bundle(path), tmp_path / "robot", *open_whole(tmp_path / "robot")) < 1e-5


def test_the_only_instruction_is_a_part_of_the_graph(
    folder: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = folder
    line = ["export", str(bundle), "--onnx", str(tmp_path / "robot"), "--whole", "--prompt", "stack the cups"]
    assert main(line) == 0
    assert "policy.onnx is within" in capsys.readouterr().out
    assert {"tokens", "token_mask"}.isdisjoint(shapes(tmp_path / "robot" / WHOLE))
    assert main([*line[:3], str(tmp_path / "other"), "--prompt", "go"]) == 1
    assert "--prompt requires --whole" in capsys.readouterr().err


def test_a_graph_that_computes_something_else_is_refused(folder: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, made = folder
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    graph = onnx.load(tmp_path / WHOLE, load_external_data=False)
    last = next(node for node in graph.graph.node if "actions" in node.output)
    offset = next(each for each in graph.graph.initializer if each.name == last.input[1])
    offset.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(offset) + 1, offset.name))
    onnx.save_model(graph, str(tmp_path / WHOLE))
    with pytest.raises(SinewError, match="one graph: expected the actions of eager within"):
        prove_whole(Bundle(bundle), made, *open_whole(tmp_path))


@pytest.mark.parametrize(
    ("case", "prompt", "message"),
    [
        ("diffusion-ddim", "", "expected a policy that reads one observation step, got a history of 2"),
        (
            "pi05-2cam",
            "go",
            "--prompt: this policy writes the state into its prompt, so the prompt cannot be constant",
        ),
    ],
)
def test_what_is_no_fixed_graph_is_refused_by_name(
    case: str, prompt: str, message: str, folder: tuple[Path, Path], case_bundle: Callable[[str], Path]
) -> None:
    with pytest.raises(SinewError, match=message):
        write_whole(Bundle(case_bundle(case)).manifest, folder[1], prompt)


def test_graphs_without_weights_are_refused_by_name(folder: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, made = folder
    graphs = GraphSet.load(made)
    record = replace(graphs, borrows={"vision": ("a",)})
    record.save(tmp_path)
    with pytest.raises(SinewError, match="expected graphs with weights"):
        write_whole(Bundle(bundle).manifest, tmp_path)


@pytest.mark.parametrize(
    ("method", "frame", "linear"),
    [("bilinear", (48, 64), True), ("pil_bilinear", (48, 64), False), ("pil_bilinear", (32, 32), True)],
)
def test_frames_become_pixels_by_a_linear_map_or_not_at_all(
    method: str, frame: tuple[int, int], linear: bool
) -> None:
    recipe = ImageRecipe(32, 32, (Letterbox(32, 32, method, "top_left"),))
    found = frame_map(recipe, *frame)
    assert (found is not None) == linear
    if found is not None:
        seen = np.random.default_rng(5).integers(0, 256, (*frame, 3), np.uint8)
        np.testing.assert_allclose(found(seen), prepare_frame(seen, recipe), atol=1e-5)


@pytest.mark.parametrize("index", [0, 1])
def test_a_picture_in_the_corner_becomes_pixels_by_a_linear_map(index: int) -> None:
    """The middle of the pixels is black where a camera's picture is small."""
    sizes = ((20, 32), (9, 7))
    recipe = ImageRecipe(20, 32, sizes=sizes).of_camera(index)
    found = frame_map(recipe, *sizes[index])
    assert found is not None
    seen = np.random.default_rng(5).integers(0, 256, (*sizes[index], 3), np.uint8)
    np.testing.assert_allclose(found(seen), prepare_frame(seen, recipe), atol=1e-5)


def test_an_affine_function_is_found() -> None:
    rng = np.random.default_rng(0)
    matrix, offset = rng.standard_normal((3, 5)), rng.standard_normal(5)
    got = affine(lambda x: x @ matrix + offset, rng.standard_normal(3))
    np.testing.assert_allclose(got[0], matrix, atol=1e-12)
    np.testing.assert_allclose(got[1], offset, atol=1e-12)
