"""The edge adapter: its file and what is refused of it, its numbers against the network that is trained, and what a
controller, a loop and a journal do with its rows."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.control import (
    Adapter,
    AdapterError,
    CommandListener,
    Journal,
    Loop,
    Refinement,
    Settings,
    repeat,
)
from sinew_client.control.adapter import _convolved, _norm, _points
from sinew_client.control.adapter_file import KEY, CameraEncoder, Form, parse, write
from sinew_client.control.robots import Dry

OFFSETS = {"kind": "offsets", "action": [0], "state": [1], "scale": 0.5}
FORM = Form("toy", 20.0, 4, 2, 2, 3, 12, 1, [CameraEncoder("front", 12, 10, [2, 1])], OFFSETS)
POLICY: dict[str, Any] = {
    "chunk_size": 4,
    "cameras": [{"name": "front", "height": 12, "width": 10}],
    "state": {"dim": 2},
    "action": {"dim": 2},
}


def tensors(form: Form = FORM, width: int = 6, channels: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for eye in form.cameras:
        for i, (before, kernel) in enumerate(((3, 4), (channels, 3))):
            found[f"camera.{eye.name}.{i}.weight"] = rng.normal(size=(channels, before, kernel, kernel)) / 6
            found[f"camera.{eye.name}.{i}.bias"] = rng.normal(size=channels)
    features = 3 * channels * len(form.cameras)
    shapes = {
        "input.weight": (width, form.chunk * form.action + 2 * form.state + 1 + 2 * features),
        "input.bias": (width,),
        "output.weight": (form.rows * form.action, width),
        "output.bias": (form.rows * form.action,),
        "output.norm.weight": (width,),
        "output.norm.bias": (width,),
    }
    for i in range(form.blocks):
        shapes[f"block.{i}.linear.weight"] = (width, width)
        shapes |= {f"block.{i}.{name}": (width,) for name in ("linear.bias", "norm.weight", "norm.bias")}
    found |= {name: rng.normal(size=shape) / 3 for name, shape in shapes.items()}
    for name, size in (("state", form.state), ("rows", form.action), ("action", form.action)):
        found[f"{name}.mean"], found[f"{name}.std"] = rng.normal(size=size), rng.uniform(0.5, 2, size)
    return {name: value.astype(np.float32) for name, value in found.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "toy.safetensors"
    write(path, FORM, tensors())
    return path


def seen(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "images": {"front": rng.integers(0, 256, (12, 10, 3), np.uint8)},
        "state": rng.normal(size=2).astype(np.float32),
    }


# ----------------------------------------------------------------------------- the file and the network


def test_safetensors_reads_the_file(file: Path) -> None:
    from safetensors.numpy import load_file

    assert set(load_file(file)) == set(tensors())
    assert Adapter.read(file).form == replace(FORM, cameras=[CameraEncoder("front", 12, 10, [2, 1])])


@pytest.mark.parametrize("name", ["blocks", "pen"])
def test_numbers_are_those_of_the_network_that_is_trained(name: str, tmp_path: Path) -> None:
    """A packaged adapter's form with random weights, float16 in the file."""
    torch = pytest.importorskip("torch")
    edge = pytest.importorskip("research.policies.edge")
    torch.manual_seed(0)
    network = edge.Network(edge.TASKS[name]).half().float()  # rounded as the file's
    rng, form = np.random.default_rng(1), network.form
    H, A, S = form.chunk, form.action, form.state

    stats = {
        name: tuple(rng.integers(8, 32, (2, size)).astype(np.float32) / 16)
        for name, size in (("state", S), ("rows", A), ("action", A))
    }
    edge.export(network, stats, tmp_path / "a.safetensors")
    adapter = Adapter.read(tmp_path / "a.safetensors")
    chunk, states = rng.normal(size=(H, A)).astype(np.float32), rng.normal(size=(2, S)).astype(np.float32)
    frames = rng.integers(0, 256, (2, 2, 64, 64, 3), np.uint8)
    moments = [
        (adapter.see(dict(zip((eye.name for eye in form.cameras), both, strict=True))), state)
        for both, state in zip(frames, states, strict=True)
    ]

    def normal(name: str, values: np.ndarray) -> Any:
        mean, std = stats[name]
        return torch.from_numpy((values - mean) / std)

    with torch.no_grad():
        features = network.see(torch.from_numpy(frames).permute(0, 1, 4, 2, 3).float() / 127.5 - 1)
        rows, _ = network(
            normal("rows", adapter.rebased(chunk, *states))[None],
            normal("state", states).reshape(1, -1),
            torch.tensor([[60 / form.max_age]]),
            features[:1],
            features[1:],
        )
    np.testing.assert_allclose(np.stack([m[0] for m in moments]), features.numpy(), atol=2e-4)
    mean, std = stats["action"]
    np.testing.assert_allclose(adapter.refine(chunk, *moments, 60), rows[0].numpy() * std + mean, atol=4e-4)


def test_rows_are_rebased_on_the_newest_state(file: Path) -> None:
    adapter = Adapter.read(file)
    chunk = np.array([[1, 9], [1, 8], [-1, 7], [0, 6]], np.float32)
    moved = adapter.rebased(chunk, np.array([5.0, 2.0]), np.array([5.0, 3.0]))
    np.testing.assert_allclose(moved, [[-0.5, 9], [0, 8], [-0.5, 7], [-0.5, 6]])


def test_what_does_not_fit_is_named(file: Path, tmp_path: Path) -> None:
    good = tensors()
    for change, message in (
        ({"odd": np.zeros(1)}, "odd: unknown tensor"),
        ({"rows.std": np.zeros(2)}, r"rows\.std: expected numbers above 0"),
        ({"output.bias": np.array([0, 0, np.nan, 0, 0, 0])}, r"output\.bias: expected finite"),
    ):
        write(tmp_path / "a", FORM, {**good, **change})
        with pytest.raises(AdapterError, match=message):
            Adapter.read(tmp_path / "a")
    for form, message in (
        (replace(FORM, motion={"kind": "warp"}), "motion.kind"),
        (replace(FORM, motion={**OFFSETS, "state": [2]}), "motion"),
        (replace(FORM, hz=float("nan")), "hz: expected a number above 0"),
        (
            replace(FORM, cameras=[CameraEncoder("front", 3, 10, [2, 1])]),
            r"camera\.front\.0\.weight: expected a kernel that is not larger than the frame, got 4",
        ),
    ):
        write(tmp_path / "a", form, good)
        with pytest.raises(AdapterError, match=message):
            Adapter.read(tmp_path / "a")
    with pytest.raises(AdapterError, match="No such file"):
        Adapter.read(tmp_path / "nowhere")
    adapter = Adapter.read(file)
    adapter.check(POLICY, 20.0)
    for policy, hz, message in (
        (POLICY, 30.0, "control rate: expected 20.0, got 30.0"),
        ({**POLICY, "chunk_size": 8}, 20.0, "actions per chunk: expected 4, got 8"),
        ({**POLICY, "cameras": [{"name": "top"}]}, 20.0, "camera: expected front"),
        ({**POLICY, "state": {"dim": 3}}, 20.0, "values of the state: expected 2, got 3"),
        ({**POLICY, "action": {"dim": 1}}, 20.0, "values of an action: expected 2, got 1"),
    ):
        with pytest.raises(AdapterError, match=message):
            adapter.check(policy, hz)
    with pytest.raises(AdapterError, match="images: expected front, got none"):
        adapter.see({})
    with pytest.raises(AdapterError, match=r"images\.front: expected uint8 \[12, 10, 3\]"):
        adapter.see({"front": np.zeros((6, 5, 3), np.uint8)})


def test_tensors_are_those_of_the_form_and_within_bounds(tmp_path: Path) -> None:
    form = replace(FORM, cameras=[CameraEncoder("front", 16, 15, [2, 1])])
    good, first = tensors(form), "camera.front.0.weight"
    kernels = f"{first}: expected [out, 3, k, k] with k up to 15, got "
    one = {
        first: np.zeros((1, 3, 4, 4)),
        "camera.front.0.bias": np.zeros(1),
        "camera.front.1.weight": np.zeros((5, 1, 3, 3)),
    }
    for changes in ({}, {first: np.zeros((5, 3, 15, 15))}, {first: np.zeros((5, 3, 1, 1))}, one):
        Adapter(form, {**good, **changes})
    for width in (1, 4096):
        Adapter(replace(form, blocks=0), tensors(replace(form, blocks=0), width))
    refused: list[tuple[str, Any, str]] = [
        (first, shape, f"{kernels}{list(shape)}")
        for shape in (
            (5, 3, 16, 16),
            (5, 3, 0, 0),
            (5, 3, 4, 3),
            (5, 3, 4),
            (5, 3, 4, 4, 1),
            (5, 2, 4, 4),
            (0, 3, 4, 4),
        )
    ]
    refused += [
        ("input.bias", shape, f"input.bias: expected [N] with N up to 4096, got {list(shape)}")
        for shape in ((0,), (4097,), (6, 1))
    ]
    refused += [
        (name, (*value.shape, 1), f"{name}: expected shape {list(value.shape)}, got {[*value.shape, 1]}")
        for name, value in good.items()
        if name != "input.bias" and not (name.startswith("camera") and value.ndim == 4)
    ]
    for name, shape, message in refused:
        with pytest.raises(AdapterError) as error:
            Adapter(form, {**good, name: np.zeros(shape)})
        assert str(error.value) == message
    for name in good:
        with pytest.raises(AdapterError, match=rf"^{re.escape(name)}: (missing tensor|expected .*got \[\])$"):
            Adapter(form, {other: value for other, value in good.items() if other != name})
    with pytest.raises(AdapterError, match=r"^action\.std: expected numbers above 0$"):
        Adapter(form, {**good, "action.std": np.array([0.0, 1.0])})
    for size, message in (
        (1 << 24, "whose header is not JSON"),
        ((1 << 24) + 1, "expected at most 16777216 bytes, got more"),
    ):
        with (tmp_path / "large").open("wb") as large:
            large.truncate(size)
        with pytest.raises(AdapterError, match=message):
            Adapter.read(tmp_path / "large")


def test_what_is_refined_has_the_sizes_of_the_form_and_an_age_up_to_the_greatest() -> None:
    adapter = Adapter(FORM, tensors())
    chunk, moment = np.ones((4, 2)), (adapter.see(seen(0)["images"]), np.zeros(2))
    short = (moment[0], np.zeros(3))
    rows = {age: adapter.refine(chunk, moment, moment, age) for age in (11, 12, 13)}
    np.testing.assert_array_equal(rows[12], rows[13])
    assert np.abs(rows[11] - rows[12]).max() > 0
    for what, message in (
        ((chunk[1:], moment, moment), "chunk: expected shape [4, 2], got [3, 2]"),
        ((chunk, short, moment), "state then: expected 2 numbers, got shape [3]"),
        ((chunk, moment, short), "state now: expected 2 numbers, got shape [3]"),
    ):
        with pytest.raises(AdapterError) as error:
            adapter.refine(*what, 1)
        assert str(error.value) == message
    for frame in (np.zeros((12, 10, 3), np.float32), np.zeros((12, 10, 4), np.uint8)):
        with pytest.raises(AdapterError, match=rf"got {frame.dtype} {re.escape(str(list(frame.shape)))}$"):
            adapter.see({"front": frame})


@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (4, 1), (1, 3)])
def test_each_part_of_the_network_is_its_formula(kernel: int, stride: int) -> None:
    """Of a frame that is wider than high, of a constant, and of numbers whose exponentials float32 does not have."""
    rng, edge = np.random.default_rng(0), (kernel - 1) // 2
    x = rng.normal(size=(3, 7, 10)).astype(np.float32)
    weight, bias = rng.normal(size=(4, 3, kernel, kernel)), rng.normal(size=4)
    padded = np.pad(x, ((0, 0), (edge, edge), (edge, edge)))
    down, across = ([*range(0, n + 2 * edge - kernel + 1, stride)] for n in (7, 10))
    wanted = [
        [[(padded[:, i : i + kernel, j : j + kernel] * w).sum() + b for j in across] for i in down]
        for w, b in zip(weight, bias, strict=True)
    ]
    np.testing.assert_allclose(_convolved(x, weight, bias, stride), wanted, atol=1e-5)
    for scale in (1, 500):
        values = np.float64(scale * x)
        share = np.exp(values - values.max(axis=(1, 2), keepdims=True))
        share /= share.sum(axis=(1, 2), keepdims=True)
        right, under = np.linspace(-1, 1, 10), np.linspace(-1, 1, 7)[:, None]
        points = [(share * right).sum((1, 2)), (share * under).sum((1, 2)), values.clip(0).mean((1, 2))]
        np.testing.assert_allclose(_points(scale * x), np.concatenate(points), rtol=1e-5, atol=1e-5)
    row, (gain, shift) = x[0, 0], rng.normal(size=(2, 10))
    normal = (row - row.mean()) / np.sqrt(row.var() + 1e-5) * gain + shift
    np.testing.assert_allclose(_norm(row, gain, shift), normal, atol=1e-5)
    np.testing.assert_array_equal(_norm(np.ones(10, np.float32), gain, shift), shift)


PIECES = [b"9", b"-", b'"', b"]", b"[", b"{}", b"1e9", b"null", b",", b"99999999999999999999", b"\xff"]


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_damaged_file_is_refused(file: Path, random: Any) -> None:
    """Bytes changed, cut or put in anywhere, mostly in the header: an adapter or an AdapterError, nothing else."""
    whole = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(header if random.random() < 0.9 else len(whole))
        end = at + random.choice([0, 1, 1, 30])
        whole[at:end] = random.choice(PIECES) if end - at < 30 else b""
    with contextlib.suppress(AdapterError):
        Adapter.parse(bytes(whole))


def test_headers_of_other_kinds_are_refused() -> None:
    def packed(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text

    for header in (
        {},
        {"__metadata__": []},
        {"__metadata__": {KEY: "{"}},
        {"__metadata__": {KEY: "[" * 100_000}},
    ):
        with pytest.raises(AdapterError):
            Adapter.parse(packed(header))


def test_a_form_is_refused_by_its_field() -> None:
    form = FORM.to_dict()

    def camera(**changes: Any) -> dict[str, Any]:
        return {"cameras": [{**form["cameras"][0], **changes}]}

    bounds: list[dict[str, Any]] = [
        {"chunk": 4096, "blocks": 1, "hz": 1e5},
        {"hz": 1},
        camera(height=2048, width=1, strides=[16, 1]),
    ]
    for changes in bounds:
        found = Form.parse({**form, **changes}).to_dict()
        assert {name: found[name] for name in changes} == changes
    sides, numbers = "cameras: expected name, height, width and strides", "expected a whole number from 1 to"
    refused: list[tuple[Any, str]] = [
        ({"rows": 4097}, f"rows: {numbers} 4096, got 4097"),
        ({"blocks": 0}, f"blocks: {numbers} 4096, got 0"),
        ({"state": True}, f"state: {numbers} 4096, got True"),
        ({"hz": True}, "hz: expected a number above 0, got True"),
        ({"hz": 0}, "hz: expected a number above 0, got 0"),
        ({"hz": 100_001}, "hz: expected a number above 0, got 100001"),
        ({"hz": "x" * 99}, f"hz: expected a number above 0, got '{'x' * 76}..."),
        ({"policy": 1}, "expected a text in the field policy and an object in the field motion"),
        ({"motion": []}, "expected a text in the field policy and an object in the field motion"),
        ({"more": 1}, "more: unknown field"),
        ({"schema": "other"}, "expected an object with schema sinew.adapter/1, got "),
        ({"cameras": []}, "cameras: expected a list of cameras, got []"),
        ({"cameras": {}}, "cameras: expected a list of cameras, got {}"),
        ({"cameras": [1]}, f"{sides}, got 1"),
        (camera(more=1), f"{sides}, got "),
        (camera(name=1), "cameras: expected a name and a list of strides, got "),
        (camera(strides=[]), "cameras: expected a name and a list of strides, got "),
        (camera(strides=1), "cameras: expected a name and a list of strides, got "),
        (camera(height=2049), f"height: {numbers} 2048, got 2049"),
        (camera(width=0), f"width: {numbers} 2048, got 0"),
        (camera(strides=[2, 17]), f"strides: {numbers} 16, got 17"),
    ]
    for changes, message in refused:
        with pytest.raises(AdapterError) as error:
            Form.parse({**form, **changes})
        assert str(error.value).startswith(f"{KEY}: {message}")
    del form["rows"]
    with pytest.raises(AdapterError, match="rows: the field is missing$"):
        Form.parse(form)


def test_bytes_that_are_no_safetensors_are_refused_by_what_they_are(file: Path) -> None:
    whole = file.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    beyond = len(whole) - length
    assert length % 8 == 0  # as readers that map the file want it
    header = json.loads(whole[8:length])

    def with_entry(**changes: Any) -> bytes:
        text = json.dumps({**header, "input.bias": {**header["input.bias"], **changes}}).encode()
        return len(text).to_bytes(8, "little") + text + whole[length:]

    Adapter.parse(with_entry())
    for shape in ([0], [2, 0]):
        empty = parse(with_entry(shape=shape, data_offsets=[0, 0]))[1]["input.bias"]
        assert empty.shape == tuple(shape)
    number = parse(with_entry(shape=[], data_offsets=[beyond - 2, beyond]))[1]["input.bias"]
    assert number.shape == ()
    begin, end = header["input.bias"]["data_offsets"]
    assert (end - begin, header["input.bias"]["dtype"]) == (12, "F16")
    tensor = "input.bias: expected dtype F16 or F32, a shape and a byte range that fits, got "
    for data, message in (
        (whole[:7], "expected a safetensors file, got 7 bytes and a header of "),
        (
            whole[:7] + b"\1" + whole[8:],
            f"expected a safetensors file, got {len(whole)} bytes and a header of ",
        ),
        (
            whole[: length - 1],
            f"expected a safetensors file, got {length - 1} bytes and a header of {length - 8}",
        ),
        (b"\2" + bytes(7) + b"[]", "expected a safetensors file with an object as header, got []"),
        (b"\2" + bytes(7) + b"[x", "expected a safetensors file, got one whose header is not JSON"),
        (with_entry(data_offsets=[beyond - 11, beyond + 1]), f"{tensor}ValueError('bytes {beyond - 11} to"),
        (with_entry(data_offsets=[-12, 0]), f"{tensor}ValueError('bytes -12 to 0"),
        (with_entry(data_offsets=[end, begin]), f"{tensor}ValueError('bytes {end} to {begin}"),
        (with_entry(shape=[-1]), f"{tensor}ValueError('bytes"),
        (with_entry(shape=[6, -1]), f"{tensor}ValueError('bytes"),
        (with_entry(shape=[0], data_offsets=[-1, 0]), f"{tensor}ValueError('bytes -1 to 0"),
        (with_entry(dtype="I8"), f"{tensor}KeyError('I8')"),
    ):
        with pytest.raises(AdapterError) as error:
            Adapter.parse(data)
        assert str(error.value).startswith(message)


# ----------------------------------------------------------------------------- beside a controller


def controlled(adapter: Adapter, replan: str = "2") -> tuple[Loop, Refinement]:
    """Return a loop that runs no ticks, and its adapter."""
    edge = Refinement(adapter)
    chosen = Settings(20.0, "aligned", replan, refine=adapter.form.max_age)
    return Loop(Dry(POLICY), lambda: None, chosen, 2, "go", listeners=[edge]), edge  # type: ignore[arg-type, return-value]


def asked(loop: Loop, edge: Refinement, step: int) -> None:
    """Make a request of what was seen in a control step."""
    loop.observer.observation = seen(step)
    edge.request(step, {})
    loop.controller.ask(step, step, seen(step)["state"])


def answered(loop: Loop, edge: Refinement, step: int, chunk: np.ndarray) -> None:
    request = loop.controller.request
    assert request is not None
    assert loop.controller.arrived(step, chunk)
    edge.answered(chunk, request)


def test_refined_rows_are_executed_up_to_the_greatest_age(file: Path) -> None:
    """One chunk of four rows: aligned executes them and stops; the adapter goes on for its twelve steps."""
    adapter = Adapter.read(file)
    loop, edge = controlled(adapter)
    controller = loop.controller
    chunk = np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)
    rows, told = [], {}
    controller.listeners.append(
        lambda event, values: told.update({values["step"]: values["state"]}) if event == "refined" else None
    )
    for step in range(16):
        if step == 0:
            asked(loop, edge, 0)
        if step == 2:
            answered(loop, edge, step, chunk)
        assert controller.refines(step) == (2 <= step < 13)
        edge.before(step, seen(step))
        rows.append(controller.command(step).row)
    assert {step: list(state) for step, state in told.items()} == {
        step: list(seen(step)["state"]) for step in range(2, 13)
    }
    then = (adapter.see(seen(0)["images"]), seen(0)["state"])
    for step in range(2, 13):
        now = (adapter.see(seen(step)["images"]), seen(step)["state"])
        np.testing.assert_array_equal(rows[step], adapter.refine(chunk, then, now, step)[0])
    # Beyond its age the rows of its last answer are left (R = 3); then the robot holds.
    assert rows[13] is not None
    assert rows[14] is not None
    assert [row is None for row in rows[:2] + rows[15:]] == [True, True, True]
    assert controller.wants_chunk(16)


def test_an_adapter_does_not_keep_the_queue_full(file: Path) -> None:
    adapter = Adapter.read(file)
    loop, edge = controlled(adapter, "queue:0.5")
    asked(loop, edge, 0)
    answered(loop, edge, 0, np.ones((4, 2), np.float32))
    wants = []
    for step in range(4):
        wants.append(loop.controller.wants_chunk(step))
        edge.before(step, seen(step))
        loop.controller.command(step)
    assert wants == [False, False, True, True]


def test_rows_that_are_not_finite_hold(file: Path) -> None:
    loop, _ = controlled(Adapter.read(file))
    controller = loop.controller
    controller.ask(0, 0)
    controller.arrived(0, np.ones((4, 2), np.float32))
    controller.refined(0, np.full((3, 2), np.nan, np.float32))
    assert controller.command(0).reason == "the edge adapter's chunk is not finite"
    assert controller.command(1).row is None


class Camera(Dry):
    """A dry robot whose front camera can be unplugged."""

    def __init__(self) -> None:
        super().__init__(POLICY)
        self.unplugged = False

    def observe(self) -> dict[str, Any]:
        found = super().observe()
        return {**found, "images": {}} if self.unplugged else found


def test_a_loop_refines_journals_and_holds_without_its_camera(file: Path, tmp_path: Path) -> None:
    adapter = Adapter.read(file)
    robot = Camera()
    chosen = Settings(200.0, replan="2", deadline=30.0, refine=12)
    chunk = np.zeros((4, 2), np.float32)
    sent: list[dict[str, Any]] = []
    call = lambda seen, _limit: sent.append(seen["images"]) or chunk  # noqa: E731
    loop = Loop(robot, lambda: call, chosen, 2, listeners=[Refinement(adapter)])
    journal = Journal(tmp_path / "run.jsonl", chosen, 2)
    loop.controller.listeners.append(journal.put)
    rows = []
    CommandListener(lambda command: rows.append(command.row)).attach(loop)
    while not any(row is not None for row in rows):
        loop.run(loop.steps + 5)
    assert any(np.abs(row).max() > 0 for row in rows if row is not None)  # the chunk's own rows are 0
    robot.unplugged = True
    while not loop.controller.held["images: expected front, got none"]:
        loop.run(loop.steps + 1)
    loop.run(loop.steps + 5)
    loop.close()
    assert all("front" in images for images in sent)  # what comes of no frame could not be refined
    journal.close()
    found = repeat(tmp_path / "run.jsonl")
    assert (found.commands, found.differences) == (loop.steps, [])
    with pytest.raises(ValueError, match="handover: rtc cannot be combined with an edge adapter"):
        replace(chosen, handover="rtc").controller(2)
    with pytest.raises(ValueError, match="refine"):
        Loop(
            robot,
            lambda: lambda observation, limit: chunk,
            replace(chosen, refine=0),
            2,
            listeners=[Refinement(adapter)],
        )
