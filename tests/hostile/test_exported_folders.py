"""Folders of exported graphs that come from elsewhere, or were damaged on the way."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from sinew_client.untrusted import open_regular

from sinew.bundle import Bundle, digests
from sinew.core import BundleError
from sinew.engine.onnx.borrowed import shipped_folder
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.graphs import GraphSet, check_operators

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
pytestmark = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
onnx = pytest.importorskip("onnx")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shipped_folder(PEN), tmp_path / "graphs"))


def opened(folder: Path) -> OnnxEngine:
    bundle = Bundle(PEN)
    return OnnxEngine(folder, threads=1, solver=bundle.manifest.spec.solver, bundle=bundle)


def scaled(path: Path) -> None:
    """The head's weights times 1.5: actions that look like actions."""
    model = onnx.load(str(path), load_external_data=False)
    (outputs,) = (value.name for value in model.graph.output)
    (last,) = (node for node in model.graph.node if outputs in node.output)
    last.output[:] = ["before"]
    value = onnx.helper.make_tensor("half_more", onnx.TensorProto.FLOAT, [], [1.5])
    model.graph.initializer.append(value)
    model.graph.node.append(onnx.helper.make_node("Mul", ["before", "half_more"], [outputs]))
    onnx.save_model(model, str(path))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [scaled, cut, gone], ids=lambda each: each.__name__)
def test_files_that_are_not_as_they_were_written_are_refused(
    folder: Path, change: Callable[[Path], None]
) -> None:
    opened(folder)
    change(folder / "step.onnx")
    with pytest.raises(
        BundleError, match=r"step\.onnx: (was changed after the export|is missing).*export again"
    ):
        opened(folder)


def test_weights_are_hashed_once_and_again_when_they_were_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "RACY_NS", -(10**12))  # as if the files were older than the look
    graphs, read = GraphSet.load(folder), []
    monkeypatch.setattr(digests, "open_regular", lambda path: read.append(path.name) or open_regular(path))
    graphs.check(folder)
    assert sorted(read) == sorted(graphs.sha256)
    read.clear()
    graphs.check(folder)
    assert not read
    found = (folder / "step.onnx").stat()
    scaled(folder / "step.onnx")
    os.utime(folder / "step.onnx", ns=(found.st_atime_ns, found.st_mtime_ns))  # its time is set back
    with pytest.raises(BundleError, match=r"step\.onnx: was changed after the export"):
        graphs.check(folder)
    assert read == ["step.onnx"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # where nothing can be kept all is read
    read.clear()
    with pytest.raises(BundleError, match=r"step\.onnx: was changed after the export"):
        graphs.check(folder)
    assert sorted(read) == sorted(graphs.sha256)


def test_a_file_that_no_export_wrote_is_refused(folder: Path) -> None:
    shutil.copyfile(folder / "step.onnx", folder / "step.onnx.data")
    with pytest.raises(BundleError, match=r"step\.onnx\.data: does not belong to this export"):
        opened(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_does_not_hang(folder: Path) -> None:
    (folder / "step.onnx").unlink()
    os.mkfifo(folder / "step.onnx")
    said: list[str] = []

    def attempt() -> None:
        with pytest.raises(BundleError, match="expected a regular file") as caught:
            opened(folder)
        said.append(str(caught.value))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(120)
    assert said


def test_a_loop_without_end_is_refused_before_it_runs(folder: Path) -> None:
    """2^62 rounds in the step, with hashes that are right: whoever alters a folder can write them too."""
    model = onnx.load(str(folder / "step.onnx"), load_external_data=False)
    make, proto = onnx.helper, onnx.TensorProto
    body = make.make_graph(
        [make.make_node("Identity", ["go"], ["goes"])],
        "for ever",
        [
            make.make_tensor_value_info("round", proto.INT64, []),
            make.make_tensor_value_info("go", proto.BOOL, []),
        ],
        [make.make_tensor_value_info("goes", proto.BOOL, [])],
    )
    model.graph.initializer.extend(
        [
            make.make_tensor("rounds", proto.INT64, [], [1 << 62]),
            make.make_tensor("yes", proto.BOOL, [], [True]),
        ]
    )
    model.graph.node.append(make.make_node("Loop", ["rounds", "yes"], [], body=body))
    onnx.save_model(model, str(folder / "step.onnx"))
    GraphSet.load(folder).save(folder)
    with pytest.raises(BundleError, match=r"step\.onnx: Sinew does not run graphs with the operator Loop"):
        opened(folder)


def test_a_name_that_looks_like_an_operator_is_no_operator(tmp_path: Path) -> None:
    """The quick look finds the bytes of a field with the text If; the graph itself says that it is a name."""
    make = onnx.helper
    node = make.make_node("Identity", ["x"], ["y"], name='"\x02If')
    value = [make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    onnx.save_model(
        make.make_model(make.make_graph([node], "g", value[:1], value[1:])), str(tmp_path / "a.onnx")
    )
    assert b'"\x02If' in (tmp_path / "a.onnx").read_bytes()
    check_operators(tmp_path / "a.onnx")


def test_an_output_of_another_shape_is_refused(folder: Path) -> None:
    model = onnx.load(str(folder / "step.onnx"), load_external_data=False)
    model.graph.output[0].name = "wide"
    for node in model.graph.node:
        node.output[:] = ["wide" if name == "output" else name for name in node.output]
    for name, array in (("from", [0]), ("to", [1]), ("axis", [1])):
        model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], array))
    model.graph.node.append(onnx.helper.make_node("Slice", ["wide", "from", "to", "axis"], ["output"]))
    model.graph.output[0].CopyFrom(
        onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ["batch", 1, 1])
    )
    onnx.save_model(model, str(folder / "step.onnx"))
    GraphSet.load(folder).save(folder)
    with pytest.raises(BundleError, match="expected an output of x's shape"):
        opened(folder)
