"""GR00T N1.7, OpenVLA-OFT and OpenVLA behind one server with every wire: the answers are those of ``Policy.infer``."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client
from sinew_client.control import Earlier, Loop, NoObservation, Pace, Settings
from sinew_client.control.servers import Servers
from sinew_client.history import History

from benchmarks.wire_clients import connect
from sinew.convert import convert
from sinew.core import ClientError, Moment, Observation, ObservationError, PolicySpec
from sinew.policy import Policy, load
from sinew.records.recorder import read_records
from tests import processes
from tests.convert.test_groot import observation as groot_observation
from tests.covering import some
from tests.golden import Golden
from tests.models.stages import memory_observation
from tests.models.stages import observation as case_observation
from tests.serve import groot_client
from tests.serve.test_server import START_S, serving

pytest.importorskip("websockets.sync.client", reason="the client of the openpi wire needs websockets")
SEED = 7
SCHEMES = {"openpi": "ws", "http": "http"}


def serve(tmp_path: Path, bundle: Path, wires: tuple[str, ...]):
    ports = {wire: processes.free_port() for wire in wires}
    words = [word for wire, port in ports.items() for word in ("--wire", f"{wire}:{port}")]
    return serving(tmp_path, bundle, *words, "--threads", 1), {
        wire: f"{SCHEMES.get(wire, 'tcp')}://127.0.0.1:{port}" for wire, port in ports.items()
    }


def ask_everywhere(addresses: dict[str, str], given: Observation) -> dict[str, np.ndarray]:
    """Return the answer of each wire. Moments have an axis of their own on those whose messages are arrays."""
    found = {}
    images, state = dict(given.images), np.float32(given.state)
    if given.earlier:
        images = {name: np.stack([each.images[name] for each in given.moments]) for name in images}
        state = np.stack([np.float32(each.state) for each in given.moments])
    for wire in ("native", "openpi", "http"):
        client = connect(wire, addresses[wire])
        if wire == "native" and given.earlier:
            found[wire] = client.client.infer(replace(given, seed=SEED)).actions
        else:
            found[wire] = client.ask(images, state, given.prompt, SEED).actions
        client.close()
    return found


def expected(policy: Policy, given: Observation) -> np.ndarray:
    record = {"images": given.images, "state": given.state, "prompt": given.prompt, "earlier": given.earlier}
    return policy.infer(record if policy.spec.solver.noise == "zeros" else record | {"seed": SEED}).actions


@pytest.mark.proves(wire=("native", "openpi", "http", "groot"), family="gr00t_n1_7")
def test_n17_answers_alike_on_every_wire(golden, groot_bundle, tmp_path):
    g, bundle = Golden(golden / "groot-n17"), groot_bundle("groot-n17")
    given = groot_observation(g)
    wanted = expected(load(bundle), given)
    server, addresses = serve(tmp_path, bundle, ("native", "openpi", "http", "groot"))
    with server:
        answers = ask_everywhere(addresses, given)
        host, port = addresses["groot"].removeprefix("tcp://").split(":")
        client = groot_client.PolicyClient(host, int(port), dialect="n1.7")
        sizes = json.loads(g.metadata["state_keys"])
        parts = np.split(np.float32(given.state), np.cumsum([size for _, size in sizes])[:-1])
        asked = {
            "video": {key: frame[None, None] for key, frame in given.images.items()},
            "state": {key: part[None, None] for (key, _), part in zip(sizes, parts, strict=True)},
            "language": {client.get_modality_config()["language"].modality_keys[0]: [[given.prompt]]},
        }
        actions, _ = client.get_action(asked, {"seed": SEED})
        client.close()
    answers["groot"] = np.concatenate([part[0] for part in actions.values()], axis=-1)
    for wire, found in answers.items():
        np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0, err_msg=wire)


@pytest.mark.proves(wire=("native", "openpi", "http"), family="diffusion")
def test_diffusion_answers_alike_on_every_wire(golden, tmp_path):
    """Of one moment, which each answer says, of two; noise of each step as data, where a wire has it. Of ten steps."""
    given = case_observation("diffusion-ddpm", Golden(golden / "diffusion-ddpm"))
    checkpoint, bundle = tmp_path / "checkpoint", tmp_path / "ten.gguf"
    shutil.copytree(golden / "diffusion-ddpm" / "checkpoint", checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_inference_steps": 10}))
    convert(checkpoint, bundle)
    given = replace(given, noise=given.noise[:10])
    alone, policy = replace(given, earlier=(), noise=None), load(bundle)
    server, addresses = serve(tmp_path, bundle, ("native", "openpi", "http"))
    with server, Client(addresses["native"], timeout=START_S) as client:
        for wire, found in ask_everywhere(addresses, alone).items():
            np.testing.assert_allclose(found, expected(policy, alone), atol=1e-5, rtol=0, err_msg=wire)
        both, wanted = replace(given, noise=None), expected(policy, replace(given, noise=None))
        assert np.abs(wanted - expected(policy, alone)).max() > 1e-2
        for wire, found in ask_everywhere(addresses, both).items():
            np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0, err_msg=wire)
        noisy = replace(alone, noise=given.noise)
        answer = client.infer(noisy)
        np.testing.assert_allclose(answer.actions, policy.infer(noisy).actions, atol=1e-5, rtol=0)
        assert any("uses 2 observation steps and got 1" in warning for warning in answer.warnings)
        with pytest.raises(ClientError, match=r"noise: expected 0 or 1440 values \(10 x 16 x 9\), got 144"):
            client.infer(replace(noisy, noise=given.noise[0]))
        assert not client.infer(given).warnings
        three = replace(given, earlier=2 * tuple(given.earlier))
        with pytest.raises(ClientError, match="each camera once for each of at most 2 observation steps"):
            client.infer(three)
        with pytest.raises(
            ObservationError, match=r"earlier\[0\]: expected an observation step with images and state"
        ):
            client.infer(replace(given, earlier=[given.images]))
        with pytest.raises(
            ObservationError, match="the same cameras and state size in all observation steps"
        ):
            client.infer(replace(given, earlier=[Moment({}, given.state)]))
        assert (client.spec.history, client.spec.noises()) == (2, (10, 16, 9))


@pytest.mark.slow  # the wires are the same; three families of other forms are above and below
@pytest.mark.proves(wire=("native", "openpi", "http"), family="xvla")
def test_xvla_answers_alike_on_every_wire(golden, case_bundle, tmp_path):
    given = replace(case_observation("xvla-auto", Golden(golden / "xvla-auto")), noise=None)
    bundle = case_bundle("xvla-auto")
    wanted = expected(load(bundle), given)
    server, addresses = serve(tmp_path, bundle, ("native", "openpi", "http"))
    with server:
        for wire, found in ask_everywhere(addresses, given).items():
            np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0, err_msg=wire)


@pytest.mark.slow
@pytest.mark.proves(wire=("native", "openpi", "http"), family="act")
def test_cameras_of_two_sizes_answer_alike_on_every_wire(golden, case_bundle, tmp_path):
    """A frame of the larger camera's size is wrong for the smaller one, and no wire resizes it."""
    given, bundle = case_observation("act-sizes", Golden(golden / "act-sizes")), case_bundle("act-sizes")
    wanted = expected(load(bundle), given)
    server, addresses = serve(tmp_path, bundle, ("native", "openpi", "http"))
    with server, Client(addresses["native"], timeout=START_S) as client:
        for wire, found in ask_everywhere(addresses, given).items():
            np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0, err_msg=wire)
        assert [(c.name, c.height, c.width) for c in client.spec.cameras] == [
            ("top", 96, 128),
            ("wrist", 45, 45),
        ]
        swapped = replace(given, images=dict.fromkeys(given.images, given.images["top"]))
        with pytest.raises(ClientError, match="images.wrist: expected exactly 45 x 45, got 96 x 128"):
            client.infer(swapped)


@pytest.mark.slow
@pytest.mark.proves(wire=("native", "openpi", "http"), family="pi05")
def test_memory_answers_alike_on_every_wire(golden, case_bundle, tmp_path):
    """Of one moment, as an episode begins, of two and of three."""
    g, bundle = Golden(golden / "pi05-mem"), case_bundle("pi05-mem")
    policy, found = load(bundle), []
    server, addresses = serve(tmp_path, bundle, ("native", "openpi", "http"))
    with server, Client(addresses["native"], timeout=START_S) as client:
        for step in (0, 2, 5):
            given = replace(memory_observation(g, step), noise=None)
            found.append(expected(policy, given))
            for wire, answer in ask_everywhere(addresses, given).items():
                np.testing.assert_allclose(answer, found[-1], atol=1e-5, rtol=0, err_msg=f"{wire} {step}")
            assert any("and got 1" in warning for warning in client.infer(given).warnings) == (step == 0)
        assert min(np.abs(one - other).max() for one, other in itertools.combinations(found, 2)) > 1e-2
        spec = client.spec
        assert (spec.history, spec.history_stride, spec.history_padding) == (3, 2, "mask")
        with pytest.raises(ClientError, match="each camera once for each of at most 3 observation steps"):
            client.infer(replace(given, earlier=2 * tuple(given.earlier)))


class Clock(Pace):
    """Real time, which says what control step it is."""

    step = 0

    def next(self) -> int:
        self.step = super().next()
        return self.step


class Walker:
    """A robot whose state says the control step, divided by a thousand, and its frames in their colour. Its control
    steps take as long as this machine, which may be busy, needs for a chunk, and 50 ms at least: on a clock of
    its own it would be somewhere else whenever an answer comes.

    at: added to the step, by which robots differ. blind: it sees nothing at the last two steps of so many; 0: at none.
    seen: the steps that it has seen something at.
    """

    def __init__(self, policy: Policy, at: int = 0, blind: int = 0):
        began = time.perf_counter()
        policy.infer(replace(policy.dummy_observation(), solver_steps=1))
        self.clock, self.seen = Clock(max(1 / 20, time.perf_counter() - began)), list[int]()
        self._spec, self._at, self._blind = policy.spec, at, blind

    def observe(self) -> dict[str, Any]:
        step = self.clock.step + self._at
        if self._blind and step % self._blind >= self._blind - 2:
            raise NoObservation("no message")
        self.seen.append(step)
        frames = {c.name: np.full((c.height, c.width, 3), step % 256, np.uint8) for c in self._spec.cameras}
        state = np.full(self._spec.state.dim, step / 1000, np.float32)
        return {"images": frames, "state": state, "session": "robot", "solver_steps": 1}

    def act(self, row: np.ndarray) -> None: ...

    def hold(self) -> None: ...

    def loop(self, port: int, prompt: str = "push") -> Loop:
        """Return its loop, which asks every four steps."""
        settings, history = (
            Settings(hz=1 / self.clock.period, handover="aligned", replan="4"),
            History.of(self._spec.to_dict()),
        )
        servers, dim = Servers([f"tcp://127.0.0.1:{port}"]), self._spec.action.dim
        return Loop(self, servers, settings, dim, prompt, self.clock, [Earlier(history)])

    def moments(self, step: int) -> list[int]:
        """Return the steps whose moments a request has to have: of those at which nothing was seen, the one before."""
        spec, found = self._spec, []
        for wanted in range(step - (spec.history - 1) * spec.history_stride, step + 1, spec.history_stride):
            there = [at for at in self.seen if at <= wanted]
            if there or spec.history_padding == "repeat":
                found.append(there[-1] if there else self.seen[0])
        return found


def recorded_steps(observation: Observation, spec: PolicySpec) -> list[int]:
    """Return the steps of a request's moments, oldest first, each by its state and by the frames of all cameras."""
    found = []
    for moment in observation.moments:
        step = round(1000 * float(moment.state[0]))
        for camera in spec.cameras:
            assert (moment.images[camera.name] == step % 256).all()
        found.append(step)
    return found


def drive(loop: Loop, chunks: int) -> None:
    while loop.report().chunks < chunks:
        loop.run(loop.steps + 1)


WITH_HISTORY = pytest.mark.parametrize("case", some(["diffusion-ddim", "pi05-mem"], "pi05-mem"))


@WITH_HISTORY
def test_a_server_that_starts_again_costs_no_moments(case, case_bundle, tmp_path):
    """The robot's loop keeps them: two servers, one after the other, record those of the right steps."""
    bundle, port, folder = case_bundle(case), processes.free_port(), tmp_path / "records"
    words = ("--wire", f"native:{port}", "--threads", 1, "--record", folder)
    robot = Walker(policy := load(bundle))
    spec = policy.spec
    loop = robot.loop(port)
    try:
        for server in range(2):
            with serving(tmp_path, bundle, *words) as running:
                drive(loop, 3 * (server + 1))
                assert running.stop() == 0  # who is killed may not have written the newest record
            loop.run(loop.steps + 20)  # nobody answers
    finally:
        loop.close()
    seen = [recorded_steps(record.observation, spec) for record in read_records(folder)]
    assert len(seen) >= 6
    assert seen == [robot.moments(each[-1]) for each in seen]


@WITH_HISTORY
def test_frames_that_are_lost_are_stood_for(case, case_bundle, tmp_path):
    """A step that saw nothing holds the robot, and the one before stands for it in later requests."""
    bundle, port, folder = case_bundle(case), processes.free_port(), tmp_path / "records"
    robot = Walker(policy := load(bundle), blind=7)
    spec = policy.spec
    loop = robot.loop(port)
    try:
        with serving(tmp_path, bundle, "--wire", f"native:{port}", "--threads", 1, "--record", folder):
            drive(loop, 8)
    finally:
        loop.close()
    seen = [recorded_steps(record.observation, spec) for record in read_records(folder)]
    assert seen == [robot.moments(each[-1]) for each in seen]
    apart = {newer - older for each in seen for older, newer in itertools.pairwise(each)}
    assert apart - {0, spec.history_stride}  # something stood for a step that was lost


@WITH_HISTORY
def test_two_robots_of_one_session_name_share_no_moment(case, case_bundle, tmp_path):
    bundle, port, folder, apart = case_bundle(case), processes.free_port(), tmp_path / "records", 300
    policy = load(bundle)
    spec, robots = policy.spec, [Walker(policy, at=at) for at in (0, apart)]
    loops = [robot.loop(port, prompt) for robot, prompt in zip(robots, ("push", "pull"), strict=True)]
    try:
        with (
            serving(tmp_path, bundle, "--wire", f"native:{port}", "--threads", 1, "--record", folder),
            ThreadPoolExecutor(2) as threads,
        ):
            for done in [threads.submit(drive, loop, 6) for loop in loops]:
                done.result(START_S)
    finally:
        for loop in loops:
            loop.close()
    records = [record.observation for record in read_records(folder)]
    assert {each.session for each in records} == {"robot"}
    seen = [(each.prompt == "pull", recorded_steps(each, spec)) for each in records]
    assert {second for second, _ in seen} == {False, True}
    assert all(steps == robots[second].moments(steps[-1]) for second, steps in seen), seen


# ----------------------------------------------------------------------------- /act


def json_numpy(value: Any) -> Any:
    """What the package json_numpy makes of arrays inside ``json.dumps``."""
    if isinstance(value, np.ndarray | np.generic):
        data = np.ascontiguousarray(value).tobytes()
        return {
            "__numpy__": base64.b64encode(data).decode(),
            "dtype": np.lib.format.dtype_to_descr(value.dtype),
            "shape": value.shape,
        }
    raise TypeError(type(value).__name__)


def from_json_numpy(record: dict[str, Any]) -> Any:
    if "__numpy__" not in record:
        return record
    raw = np.frombuffer(base64.b64decode(record["__numpy__"]), np.lib.format.descr_to_dtype(record["dtype"]))
    return raw.reshape(shape) if (shape := record["shape"]) else raw[0]


def act(address: str, observation: dict[str, Any], encoded: bool = False) -> Any:
    """As ``get_action_from_server`` of openvla-oft: one POST of the observation, or of its text under "encoded"."""
    text = json.dumps(observation, default=json_numpy)
    body = json.dumps({"encoded": text}) if encoded else text
    request = urllib.request.Request(f"{address}/act", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=900) as reply:
        answer = json.loads(reply.read(), object_hook=from_json_numpy)
    return json.loads(answer, object_hook=from_json_numpy) if encoded else answer


@pytest.mark.proves(wire=("native", "openpi", "http", "act"), family="openvla_oft")
def test_oft_answers_alike_on_every_wire_and_its_own_client(golden, openvla_bundle, tmp_path):
    g, bundle = Golden(golden / "openvla-oft"), openvla_bundle("openvla-oft")
    frames = {camera: g.numpy(f"frame.{camera}") for camera in g.cameras}
    given = Observation(images=frames, state=g.numpy("state_raw"), prompt=g.metadata["task"])
    wanted = expected(load(bundle), given)
    server, addresses = serve(tmp_path, bundle, ("native", "openpi", "http"))
    with server:
        for wire, found in ask_everywhere(addresses, given).items():
            np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0, err_msg=wire)  # a state in float32
        payload = {**frames, "state": given.state, "instruction": given.prompt}
        for encoded in (False, True):
            rows = act(addresses["http"], payload, encoded)
            assert isinstance(rows, list)
            np.testing.assert_array_equal(
                np.stack(rows), wanted
            )  # a list of one array per action, as upstream
        # Other wrist cameras' names go by their order, so two of them are one too many.
        renamed = {"full_image": frames["full_image"], "left_wrist_image": frames["wrist_image"]}
        rest = {"state": given.state, "instruction": given.prompt}
        np.testing.assert_array_equal(np.stack(act(addresses["http"], renamed | rest)), wanted)
        with pytest.raises(urllib.error.HTTPError) as error:
            act(addresses["http"], payload | {"right_wrist_image": frames["wrist_image"]})
        assert json.loads(error.value.read())["error"]["field"] == "images"


@pytest.mark.slow
@pytest.mark.proves(wire="act", family="openvla")
def test_openvla_answers_its_own_client_and_ofts(golden, openvla_bundle, tmp_path):
    g, bundle = Golden(golden / "openvla-ar"), openvla_bundle("openvla-ar")
    frame, task, policy = g.numpy(f"frame.{g.cameras[0]}"), g.metadata["task"], load(bundle)
    wanted = policy.infer({"images": {g.cameras[0]: frame}, "state": np.zeros(0), "prompt": task}).actions
    server, addresses = serve(tmp_path, bundle, ("http",))
    with server:
        single = {"image": frame, "instruction": task}
        for encoded in (False, True):
            np.testing.assert_array_equal(act(addresses["http"], single, encoded), wanted[0])
        key = policy.spec.embodiment
        np.testing.assert_array_equal(act(addresses["http"], single | {"unnorm_key": key}), wanted[0])
        with pytest.raises(urllib.error.HTTPError) as error:
            act(addresses["http"], single | {"unnorm_key": "another_robot"})
        assert f"{key}, the statistics of this bundle" in json.loads(error.value.read())["error"]["message"]
        oft = {"full_image": frame, "state": np.zeros(8), "instruction": task}  # of which it reads no state
        np.testing.assert_array_equal(np.stack(act(addresses["http"], oft)), wanted)
