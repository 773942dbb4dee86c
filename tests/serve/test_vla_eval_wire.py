"""vla-eval's WebSocket: its own client and orchestrator from the wheel, bytes that they wrote, hostile messages."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import msgpack
import numpy as np
import pytest
import sinew_eval.sim  # noqa: F401 - registers the tasks
from sinew_client.history import History

from benchmarks.wire_clients import VlaEval
from sinew.core import ActionChunk, KeyMap, ObservationError, RequestError, SinewError, VectorSpec
from sinew.policy import load
from sinew.serve.access import key_of
from sinew.serve.request import WireMessage
from sinew.serve.transport.routes import Dialect
from sinew.serve.wires import vla_eval
from tests import processes
from tests.golden import Golden
from tests.hostile.decoders import image, mutate, targets
from tests.models.stages import observation as case_observation
from tests.serve.puppet import FRAME, SPEC, WAIT_S, Puppet, desk, until
from tests.serve.vla_eval_package import environment, installed, nursery, recorded

websockets = pytest.importorskip("websockets.sync.client", reason="the client side needs websockets")

BLOCKS = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "blocks.gguf"
PICTURE = (np.arange(48 * 64 * 3) % 251).astype(np.uint8).reshape(48, 64, 3)
GO = {"images": {"front": PICTURE}, "states": np.array([0.25, 0.5]), "task_description": "go"}


def message(kind: str, payload: Any, seq: int = 1) -> bytes:
    return vla_eval.pack({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0})


def read(payload: Any, spec: Any = SPEC) -> Any:
    talk = vla_eval.Conversation(spec, {})
    return vla_eval.observation(talk.read(message("observation", payload)), spec)


def unpacked(data: bytes) -> Any:
    from benchmarks.wire_clients import _unpack_text

    return msgpack.unpackb(data, object_hook=_unpack_text)


# ----------------------------------------------------------------------------- its own bytes


def test_messages_that_the_package_wrote() -> None:
    """Pictures as PNG, which is its default, as JPEG and as pixels; arrays; an episode with the name of a recording."""
    talk = vla_eval.Conversation(SPEC, {"server": {"engine": "puppet"}})
    hello, start, png, end, jpeg, raw = msgpack.unpackb(recorded().read_bytes())
    said = unpacked(talk.read(hello).reply)
    assert (said["type"], said["seq"]) == ("hello", 1)
    assert said["payload"]["observation_params"] == {"send_state": True}
    assert said["payload"]["server"] == {"engine": "puppet"}
    begun = talk.read(start)
    assert (begun.endpoint, begun.session) == ("reset", "e")
    seen = vla_eval.observation(talk.read(png), SPEC)
    np.testing.assert_array_equal(seen.images["front"], PICTURE)
    assert (seen.state.tolist(), seen.prompt, seen.session) == ([0.25, 0.5], "go", "e")
    assert talk.read(end).endpoint == "answered"
    assert talk.read(end).reply is None
    near = vla_eval.observation(talk.read(jpeg), SPEC).images["front"]
    assert near.shape == PICTURE.shape
    assert np.abs(near.astype(int) - PICTURE).mean() < 40  # a pattern that JPEG does not like
    np.testing.assert_array_equal(vla_eval.observation(talk.read(raw), SPEC).images["front"], PICTURE)


@pytest.mark.slow  # its orchestrator speaks below
@installed
def test_the_package_still_writes_these_bytes(tmp_path: Path) -> None:
    found = processes.run(
        [sys.executable, "-c", RECORD, str(tmp_path / "found")],
        env=environment(),
        nursery=nursery(),
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    theirs = msgpack.unpackb((tmp_path / "found").read_bytes())
    names = ("hello", "start", "png", "end", "jpeg", "raw")
    for name, before, now in zip(names, msgpack.unpackb(recorded().read_bytes()), theirs, strict=True):
        assert name == "jpeg" or before == now, name  # whose bytes are its library's


RECORD = """
import sys, msgpack, numpy as np
from vla_eval.protocol.messages import Message, MessageType, make_hello_payload, pack_message
from vla_eval.protocol.numpy_codec import set_image_format
from tests.serve.test_vla_eval_wire import GO
start = {"task": {"name": "go", "episode_idx": 3},
         "recording": {"sid": "s", "eid": "e", "eval_id": "v", "db_path": "/d"}}
end = {"metrics": {"success": True}, "steps": 1, "elapsed_sec": 0.5}
sent = [("HELLO", make_hello_payload(benchmark="x:Y")), ("EPISODE_START", start), ("OBSERVATION", GO),
        ("EPISODE_END", end), ("OBSERVATION", GO), ("OBSERVATION", GO)]
found = []
for seq, (kind, payload) in enumerate(sent, 1):
    set_image_format({5: "jpeg", 6: "raw"}.get(seq, "png"))
    found.append(pack_message(Message(MessageType[kind], payload, seq, 1000.0 + seq)))
open(sys.argv[1], "wb").write(msgpack.packb(found))
"""


# ----------------------------------------------------------------------------- its own programs


def their(*arguments: str) -> list[dict[str, Any]]:
    """Return what vla-eval's orchestrator found; it runs in an interpreter that has the wheel."""
    command = [sys.executable, "-m", "tests.serve.vla_eval_blocks", *arguments]
    found = processes.run(command, env=environment(), nursery=nursery(), timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def outcomes(results: Sequence[dict[str, Any]]) -> dict[int, tuple[bool, int]]:
    """Return episode -> success and control steps, of one or several shards; none of them twice."""
    episodes = [
        (each["episode_id"], (each["metrics"]["success"], each["steps"]))
        for result in results
        for task in result["tasks"]
        for each in task["episodes"]
    ]
    assert len(dict(episodes)) == len(episodes)
    assert not [
        each
        for result in results
        for task in result["tasks"]
        for each in task["episodes"]
        if "failure_reason" in each
    ]
    return dict(episodes)


def by_hand(policy: Any, count: int) -> dict[int, tuple[bool, int]]:
    """The same episodes by a plain loop: of each chunk a quarter is executed, its noise is of episode and chunk."""
    env, found = gymnasium.make("sinew/Blocks-v0"), {}
    for episode in range(count):
        seen, _ = env.reset(seed=5000 + episode)
        task = json.dumps({"name": "blocks", "suite": "sinew", "episode_idx": episode}, sort_keys=True)
        steps, chunks, done, info = 0, 0, False, {}
        while not done:
            drawn = bytes(8) + hashlib.sha256(task.encode()).digest() + chunks.to_bytes(8, "big")
            told = hashlib.sha256(drawn).digest()
            seed = int.from_bytes(told[:8], "big") >> 1
            observation = {
                "images": seen["images"],
                "state": seen["state"],
                "prompt": seen["prompt"],
                "seed": seed,
            }
            for row in policy.infer(observation).actions[:8]:
                seen, _, terminated, truncated, info = env.step(row)
                steps += 1
                if done := bool(terminated or truncated):
                    break
            chunks += 1
        found[episode] = (bool(info["is_success"]), steps)
    return found


@installed
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_its_orchestrator_plays_the_episodes_that_a_plain_loop_plays(count: int, tmp_path: Path) -> None:
    """One connection, and for four episodes two shards and a live loop, unmodified: the same outcomes, to the step."""
    policy = load(BLOCKS, threads=1)
    assert policy.spec.chunk_size == 32
    with desk(("vla-eval",), policy=policy) as at:
        address = getattr(at, "vla-eval")
        alone = outcomes(their(address, str(tmp_path / "alone"), str(count)))
        assert alone == by_hand(policy, count)
        assert sum(success for success, _ in alone.values()) >= count - 1
        if count == 2:
            return
        shards = outcomes(their(address, str(tmp_path / "shards"), "4", "2"))
        live = their(address, str(tmp_path / "live"), "1", "1", "live")
    assert shards == alone
    (task,) = live[0]["tasks"]
    assert "failure_reason" not in task["episodes"][0], task
    assert task["episodes"][0]["rt_metrics"]["update_count"] > 0
    assert live[0]["server_info"]["rows"] == 8  # which its results keep


@contextlib.contextmanager
def served(*flags: str) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "sinew",
        "serve",
        str(BLOCKS),
        "--wire",
        "vla-eval:0",
        "--no-prepare",
        *flags,
    ]
    with processes.Process(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert server.stdout is not None
            line = next(each for each in server.stdout if each.startswith("ready on "))
            yield line.removeprefix("ready on ").strip()
        finally:
            server.terminate()
            assert server.wait(WAIT_S) == 0


def test_sessions_share_batches_and_get_their_own_rows() -> None:
    """Four sessions at once on a server that joins requests: each gets what it gets alone."""
    from threading import Barrier, Thread

    env = gymnasium.make("sinew/Blocks-v0")
    seen = [env.reset(seed=5000 + number)[0] for number in range(4)]

    def ask(address: str, number: int, meet: Barrier | None = None) -> np.ndarray:
        client = VlaEval(address)
        try:
            client._send("episode_start", {"task": {"name": "blocks", "episode_idx": number}})
            rows = []
            for _ in range(2 * client.rows):
                if meet is not None and len(rows) % client.rows == 0:
                    meet.wait(WAIT_S)
                client._send("observation", {
                    "images": seen[number]["images"], "states": seen[number]["state"],
                    "task_description": seen[number]["prompt"],
                })  # fmt: skip
                rows.append(client._receive("action")["actions"])
            return np.stack(rows)
        finally:
            client.close()

    with served("--max-batch", "4", "--engine", "eager", "--threads", "1") as address:
        alone = [ask(address, number) for number in range(4)]
        together: dict[int, np.ndarray] = {}
        for _ in range(20):  # until some of them met in a batch
            meet = Barrier(4)
            threads = [
                Thread(target=lambda n=number, m=meet: together.__setitem__(n, ask(address, n, m)))
                for number in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            for number in range(4):
                np.testing.assert_allclose(together[number], alone[number], rtol=0, atol=1e-5)
            page = (
                urllib.request.urlopen(address.replace("ws", "http", 1) + "/metrics", timeout=WAIT_S)
                .read()
                .decode()
            )
            (ones,) = re.findall(r'^sinew_batch_size_bucket\{[^}]*le="1.0"[^}]*\} (\S+)$', page, re.MULTILINE)
            (all_of_them,) = re.findall(r"^sinew_batch_size_count\S* (\S+)$", page, re.MULTILINE)
            if float(ones) < float(all_of_them):
                break
        else:
            pytest.fail("no batch of several was made")
    assert not np.array_equal(alone[0], alone[1])


# ----------------------------------------------------------------------------- episodes and errors


def test_rows_of_a_chunk_are_handed_out_one_by_one_until_the_episode_ends() -> None:
    spec = replace(SPEC, n_action_steps=2)
    talk = vla_eval.Conversation(spec, {})
    chunk = ActionChunk(np.arange(6, dtype=np.float32).reshape(3, 2), warnings=("it is dark",))
    step = message("observation", GO, 7)
    assert talk.read(step).endpoint == "infer"
    first = unpacked(talk.answer(WireMessage(), [chunk], 0.0, None))
    assert first["payload"]["actions"].tolist() == [0, 1]
    assert first["payload"]["warnings"] == ["it is dark"]
    second = unpacked(talk.read(message("observation", GO, 8)).reply)
    assert (second["type"], second["seq"], second["payload"]["actions"].tolist()) == ("action", 8, [2, 3])
    assert talk.read(step).endpoint == "infer"  # the third row is not one that upstream executes
    talk.answer(WireMessage(), [chunk], 0.0, None)
    talk.read(message("episode_start", {"task": {}}))
    assert talk.read(step).endpoint == "infer"


def test_noise_is_that_of_the_episode_and_the_chunk_wherever_it_is_played() -> None:
    def seeds(task: Any, **query: str) -> list[int | None]:
        talk = vla_eval.Conversation(SPEC, {}, query)
        talk.read(message("episode_start", {"task": task}))
        found = []
        for _ in range(2):
            found.append(talk.read(message("observation", GO)).content.seed)
            talk.answer(WireMessage(), [ActionChunk(np.zeros((3, 2), np.float32))], 0.0, None)
        return found

    first = seeds({"name": "a", "episode_idx": 0})
    assert first == seeds({"episode_idx": 0, "name": "a"})
    assert (
        len({*first, *seeds({"name": "a", "episode_idx": 1}), *seeds({"name": "b", "episode_idx": 0})}) == 6
    )
    assert seeds({"name": "a"}) == [None, None]  # nothing tells its episodes apart
    assert not {*first} & {*seeds({"name": "a", "episode_idx": 0}, noise="1")}


def test_the_address_says_rows_and_noise() -> None:
    """An unmodified client takes an address and nothing else."""
    with desk(("vla-eval",)) as at:
        address = getattr(at, "vla-eval")
        for query, rows in (("", 1), ("?rows=2", 2), ("?rows=3&noise=7", 3)):
            with websockets.connect(address + "/" + query) as client:
                client.send(message("hello", {}))
                assert unpacked(client.recv(WAIT_S))["payload"]["rows"] == rows
        for query, told in (
            ("?rows=0", "rows: expected a whole number from 1 to 3, got '0'"),
            ("?rows=4", "rows: expected a whole number from 1 to 3, got '4'"),
            ("?rows=two", "rows: expected a whole number from 1 to 3, got 'two'"),
            ("?noise=-1", "noise: expected a whole number from 0"),
            ("?noise=" + "9" * 5000, "noise: expected a whole number from 0"),
            ("?row=2", "address: the query supports rows and noise, got 'row'"),
        ):
            request = urllib.request.Request(address.replace("ws", "http", 1) + "/anything" + query)
            request.add_header("Upgrade", "websocket")
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=WAIT_S)
            assert caught.value.code == 400
            assert told in caught.value.read().decode()


def test_an_error_is_a_message_and_the_connection_goes_on() -> None:
    with desk(("vla-eval",)) as at, websockets.connect(getattr(at, "vla-eval"), max_size=None) as client:
        for seq, (payload, told) in enumerate(
            [
                ({**GO, "states": np.zeros(3)}, "state: expected shape [2], got shape [3] [bad_observation]"),
                ({**GO, "task_description": "fail"}, "internal"),
                (
                    {"images": {"top": PICTURE}, "task_description": "go"},
                    "other keys in the message: images/top",
                ),
                (
                    {**GO, "images": {"front": {"__image__": True, "format": "gif", "data": b""}}},
                    "png, jpeg or raw",
                ),
                (
                    {**GO, "images": {"front": {"__image__": True, "format": "png", "data": b"x"}}},
                    "do not decode",
                ),
                ({**GO, "state": np.zeros(2)}, "states: expected one value, as state, got two"),
            ]
        ):
            client.send(message("observation", payload, seq))
            found = unpacked(client.recv(WAIT_S))
            assert (found["type"], found["seq"]) == ("error", seq)
            assert told in found["payload"]["error"], found
            assert "Traceback" not in str(found)
        client.send(message("observation", GO, 99))
        assert unpacked(client.recv(WAIT_S))["payload"]["actions"].tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"\xc1", "MessagePack"),
        (b"\x01", "expected a map with the keys"),
        (message("pause", {}), "type: expected one of hello"),
        (message("hello", []), "payload: expected a map, got list"),
        (vla_eval.pack({"type": "hello", "payload": {}, "seq": "1"}), "seq: expected an integer, got str"),
    ],
)
def test_what_is_no_message_ends_the_connection_with_a_reason(sent: bytes, told: str) -> None:
    from websockets.exceptions import ConnectionClosedError

    with desk(("vla-eval",)) as at, websockets.connect(getattr(at, "vla-eval")) as client:
        client.send(sent)
        with pytest.raises(ConnectionClosedError, match=re.escape(told)) as caught:
            client.recv(WAIT_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1011


def test_a_flood_behind_what_is_no_message_holds_no_connection() -> None:
    """The reader waits for the queue, whose worker has ended: the client that stays is let go."""
    with desk(("vla-eval",)) as at:
        wire = at.opened["vla-eval"]
        stranger = websockets.connect(getattr(at, "vla-eval"), max_size=None).__enter__()
        stranger.send(message("observation", {**GO, "task_description": "wait"}))
        until(lambda: at.scheduler.stats()["running"])
        stranger.send(b"\xc1")
        for seq in range(20):
            stranger.send(message("observation", GO, seq))
        assert len(wire._open) == 1
        at.puppet.release.set()
        until(lambda: not wire._open, "the end of its connection")
        with contextlib.suppress(Exception):
            stranger.close()
        with websockets.connect(getattr(at, "vla-eval")) as client:
            client.send(message("observation", GO))
            assert unpacked(client.recv(WAIT_S))["payload"]["actions"].tolist() == [0.25, 0.25]


def test_another_version_of_the_protocol_is_refused_by_name() -> None:
    with desk(("vla-eval",)) as at, websockets.connect(getattr(at, "vla-eval")) as client:
        client.send(message("hello", {"protocol_version": 2}))
        found = unpacked(client.recv(WAIT_S))
    assert (found["type"], found["payload"]["error"]) == (
        "error",
        "protocol_version: expected 1, got 2 [bad_request]",
    )


def test_many_messages_at_once_are_answered_in_their_order() -> None:
    """Episodes end and begin without an answer, and a live benchmark sends observations without waiting for any."""
    with desk(("vla-eval",)) as at, websockets.connect(getattr(at, "vla-eval")) as client:
        for seq in range(0, 60, 3):
            client.send(message("episode_end", {}, seq))
            client.send(message("episode_start", {"task": {"name": "a"}}, seq + 1))
            client.send(message("observation", {**GO, "states": np.array([seq, 0.0])}, seq + 2))
        for seq in range(0, 60, 3):
            found = unpacked(client.recv(WAIT_S))
            assert found["seq"] == seq + 2
            assert found["payload"]["actions"].tolist() == [seq, seq]


# ----------------------------------------------------------------------------- observations


def test_what_a_benchmark_sends_besides_is_left_alone() -> None:
    seen = read(
        {**GO, "images": {"front": PICTURE, "wrist": "not looked at"}, "controller_states": np.zeros(9)}
    )
    assert list(seen.images) == ["front"]


def test_a_key_map_of_the_bundle_says_which_camera_and_state_is_which() -> None:
    keys = KeyMap("vla-eval", {"images/agentview": "front"}, ("controller_states",), "task_description")
    payload = {**GO, "images": {"agentview": PICTURE}, "controller_states": np.array([1.0, 2.0])}
    seen = read(payload, replace(SPEC, keys=(keys,)))
    np.testing.assert_array_equal(seen.images["front"], PICTURE)
    assert (seen.state.tolist(), seen.prompt) == ([1.0, 2.0], "go")


@pytest.mark.parametrize(("moments", "stride"), [(2, 1), (3, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("padding", ["repeat", "mask"])
def test_a_policy_of_several_moments_reads_what_a_robot_would_have_kept(
    moments: int, stride: int, padding: Any
) -> None:
    """Against the history that a robot of ours keeps, at every step of two episodes, however many rows are executed."""
    spec = replace(SPEC, history=moments, history_stride=stride, history_padding=padding)
    for rows in ("1", "3"):
        talk = vla_eval.Conversation(spec, {}, {"rows": rows})
        kept = History(moments, stride, padding)
        for episode in range(2):
            talk.read(message("episode_start", {"task": {}}))
            kept.clear()
            for step in range(12):
                state, frame = (
                    np.array([episode, step], np.float64),
                    np.full_like(PICTURE, 12 * episode + step),
                )
                kept.see(step, {"front": frame}, state)
                sent = {**GO, "states": state, "images": {"front": frame}}
                found = talk.read(message("observation", sent))
                assert (found.endpoint == "infer") == (step % int(rows) == 0)
                seen, before = talk.observation(found, spec), kept.before(step)
                if found.endpoint == "seen":
                    talk.seen(found)
                    continue
                talk.answer(found, [ActionChunk(np.zeros((3, 2), np.float32))], 0.0, None)
                np.testing.assert_array_equal(seen.state, state)
                assert [each.state.tolist() for each in seen.earlier] == [
                    each.state.tolist() for each in before
                ]
                for ours, theirs in zip(seen.earlier, before, strict=True):
                    np.testing.assert_array_equal(ours.images["front"], theirs.images["front"])


def test_a_policy_of_two_moments_is_told_both_over_the_socket(golden: Any, case_bundle: Any) -> None:
    """Diffusion Policy, which reads two: its second answer is that of both observations."""
    given = case_observation("diffusion-ddim", Golden(golden / "diffusion-ddim"))
    policy = load(case_bundle("diffusion-ddim"), engine="eager", threads=1)
    (before,) = given.earlier
    task = {"task": {"name": "a", "episode_idx": 0}}
    drawn = vla_eval.Conversation(policy.spec, {})
    drawn.read(message("episode_start", task))
    drawn._chunks = 1  # the second chunk's
    both = replace(given, noise=None, seed=drawn._seed())
    keys = [each.name for each in policy.spec.cameras]
    with (
        desk(("vla-eval",), policy=policy) as at,
        websockets.connect(getattr(at, "vla-eval") + "/?rows=1", max_size=None) as client,
    ):
        client.send(message("episode_start", task))
        found = []
        for seen in (before, given):
            images = {key: np.asarray(seen.images[key]) for key in keys}
            client.send(message("observation", {"images": images, "states": np.asarray(seen.state)}))
            found.append(unpacked(client.recv(WAIT_S))["payload"])
    assert not any("warnings" in each for each in found)
    np.testing.assert_allclose(found[1]["actions"], policy.infer(both).actions[0], rtol=0, atol=1e-6)
    alone = policy.infer(replace(both, earlier=())).actions[0]
    assert np.abs(found[1]["actions"] - alone).max() > 1e-3


def test_only_accepted_steps_are_kept_and_their_bytes_are_bounded() -> None:
    """Messages were kept as they came, up to 256 MiB a connection, refused ones too, and no ledger counted them."""
    spec = replace(SPEC, history=4)
    talk = vla_eval.Conversation(spec, {})
    talk.observation(talk.read(message("observation", GO)), spec)
    assert talk.kept() == 0  # it is not answered
    for number in range(1, 9):
        sent = talk.read(message("observation", {**GO, "other": bytes(1 << 20)}))
        talk.observation(sent, spec)
        talk.answer(sent, [ActionChunk(np.zeros((1, 2), np.float32))], 0.0, None)
        assert talk.kept() == min(number, 4) * (PICTURE.nbytes + 16)  # float64, as it came
    large = {**GO, "images": {"front": np.zeros((2000, 2000, 3), np.uint8)}}
    with pytest.raises(ObservationError, match="send frames with the policy's sizes: front 48 x 64"):
        talk.observation(talk.read(message("observation", large)), spec)
    talk.read(message("episode_end", {}))
    assert talk.kept() == 0
    lone = vla_eval.Conversation(SPEC, {})
    sent = lone.read(message("observation", GO))
    lone.observation(sent, SPEC)
    lone.answer(sent, [ActionChunk(np.zeros((1, 2), np.float32))], 0.0, None)
    assert lone.kept() == 0  # one moment is no memory


def test_refused_steps_of_a_policy_of_several_moments_leave_no_memory() -> None:
    """Six connections with four refused messages each held 257 MiB a connection."""
    puppet = Puppet()
    puppet.spec = replace(SPEC, history=4)
    refused = message("observation", {**GO, "states": np.zeros(3), "other": bytes(8 << 20)})
    with desk(("vla-eval",), policy=puppet) as at, contextlib.ExitStack() as stack:
        ledger = at.opened["vla-eval"].ledger
        for _ in range(3):
            client = stack.enter_context(websockets.connect(getattr(at, "vla-eval"), max_size=None))
            for _ in range(4):
                client.send(refused)
                assert unpacked(client.recv(WAIT_S))["type"] == "error"
        until(lambda: ledger.held_bytes == 0)
        client.send(message("observation", GO))
        assert unpacked(client.recv(WAIT_S))["type"] == "action"
        until(
            lambda: ledger.held_bytes == PICTURE.nbytes + 16
        )  # the ledger counts the step that was accepted
        client.send(message("episode_end", {}))
        until(lambda: ledger.held_bytes == 0)


def test_a_step_between_two_chunks_is_checked_before_it_is_kept() -> None:
    """Its row is handed out once it is accepted."""
    puppet = Puppet()
    puppet.spec = replace(SPEC, history=2)
    bad = message("observation", {**GO, "states": np.zeros(3)})
    with (
        desk(("vla-eval",), policy=puppet) as at,
        websockets.connect(getattr(at, "vla-eval") + "/?rows=2") as client,
    ):
        found = []
        for sent in (message("observation", GO), bad, message("observation", GO)):
            client.send(sent)
            found.append(unpacked(client.recv(WAIT_S)))
        assert [each["type"] for each in found] == ["action", "error", "action"]
        assert "state: expected shape [2], got shape [3]" in found[1]["payload"]["error"]
        assert len(puppet.computed) == 1


# ----------------------------------------------------------------------------- text of a client


def test_a_task_is_not_written_out_before_it_is_bounded() -> None:
    """A task of 60 MiB of bytes was formatted as text on the event loop, which held every other robot for 14 s."""
    talk = vla_eval.Conversation(SPEC, {})

    def seed(task: Any) -> int | None:
        talk.read(message("episode_start", {"task": task}))
        return talk.read(message("observation", GO)).content.seed

    plain = {"name": "a", "episode_idx": 3, "more": {"suite": "b", "seeds": [1, 2.5, None, True]}}
    text = json.dumps(plain, sort_keys=True)
    drawn = hashlib.sha256(bytes(8) + hashlib.sha256(text.encode()).digest() + bytes(8)).digest()
    assert seed(plain) == int.from_bytes(drawn[:8], "big") >> 1  # as before
    assert seed({**plain, "blob": bytes(1 << 20), "array": np.zeros(1 << 20)}) == seed(plain)
    for large in ("x" * 5000, ["x"] * 5000, {str(number): 0 for number in range(5000)}):
        with pytest.raises(RequestError, match="task: expected at most 4096 characters and values"):
            talk.read(message("episode_start", {"task": {**plain, "large": large}}))


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (message("observation", GO).replace(b"observation", b"\xc4\x09observat", 1), "type: expected one of"),
        (vla_eval.pack({"type": np.zeros(9), "payload": {}, "seq": 1}), "got ndarray"),
        (vla_eval.pack({"type": bytes(1 << 20), "payload": {}, "seq": 1}), "type: expected one of"),
        (message("hello", {"protocol_version": bytes(1 << 20)}), "protocol_version: expected 1, got b'"),
    ],
)
def test_values_in_messages_are_cut_before_they_are_written(sent: bytes, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        vla_eval.Conversation(SPEC, {}).read(sent)
    assert told in str(caught.value) or "MessagePack" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_array_as_type_is_refused_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    from websockets.exceptions import ConnectionClosedError

    sent = vla_eval.pack({"type": np.zeros(9), "payload": {}, "seq": 1})
    with desk(("vla-eval",)) as at:
        for _ in range(20):
            with websockets.connect(getattr(at, "vla-eval")) as client:
                client.send(sent)
                with pytest.raises(ConnectionClosedError, match="type: expected one of"):
                    client.recv(WAIT_S)
    assert not [each for each in caplog.records if each.exc_info]
    assert len(caplog.text) < 4000


def test_a_policy_without_a_state_asks_for_none() -> None:
    spec = replace(SPEC, state=VectorSpec(0))
    talk = vla_eval.Conversation(spec, {})
    assert unpacked(talk.read(message("hello", {})).reply)["payload"]["observation_params"] == {}
    assert read({"images": {"front": PICTURE}, "task_description": "go"}, spec).state.size == 0


def test_several_cameras_ask_for_the_wrist() -> None:
    spec = replace(SPEC, cameras=(SPEC.cameras[0], replace(SPEC.cameras[0], name="wrist")))
    talk = vla_eval.Conversation(spec, {})
    said = unpacked(talk.read(message("hello", {})).reply)["payload"]
    assert said["observation_params"] == {"send_state": True, "send_wrist_image": True}


def test_pixels_are_counted_before_they_are_decoded() -> None:
    from sinew.serve.decode.frames import PixelBudget

    talk = vla_eval.Conversation(SPEC, {})
    picture = {"__image__": True, "format": "png", "data": image("PNG"), "shape": [1, 1, 3]}
    sent = talk.read(message("observation", {**GO, "images": {"front": picture}}))
    with pytest.raises(ObservationError, match="at most 3071 pixels"):
        vla_eval.observation(sent, SPEC, PixelBudget(FRAME.shape[0] * FRAME.shape[1] - 1))
    vla_eval.observation(sent, SPEC, PixelBudget(FRAME.shape[0] * FRAME.shape[1]))


def test_fuzz_mutations_of_a_good_message() -> None:
    good, decode = targets()["vla-eval"]
    read_well = 0
    for number in range(300):
        with contextlib.suppress(SinewError):
            decode(mutate(random.Random(number), good))
            read_well += 1
    assert read_well < 300


# ----------------------------------------------------------------------------- beside the WebSocket


def get(address: str, path: str, key: str = "") -> tuple[int, Any]:
    request = urllib.request.Request(address.replace("ws", "http", 1) + path)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_readiness_and_configuration_as_its_servers_have_them() -> None:
    with desk(("vla-eval",)) as at:
        address = getattr(at, "vla-eval")
        assert get(address, "/health") == (200, {"status": "ok"})
        assert get(address, "/config") == (200, {"applied": {}, "config": {}})
        status, told = get(address, "/config?max_batch_size=8")
        assert status == 422
        assert (
            "max_batch_size: cannot be changed over HTTP; restart the server with --max-batch"
            in told["errors"][0]
        )


@installed
def test_its_client_sends_the_key_that_stands_in_the_address() -> None:
    program = """
import sys, anyio, numpy as np
from vla_eval.connection import Connection
from tests.serve.test_vla_eval_wire import GO
async def main():
    async with Connection(sys.argv[1], max_retries=1) as server:
        await server.start_episode({"task": {"name": "a"}})
        print((await server.act(GO))["actions"].tolist())
anyio.run(main)
"""
    with desk(("vla-eval",), api_key="a-key") as at:
        address = getattr(at, "vla-eval")
        for given, expected in ((address, 1), (address.replace("//", "//:a-key@"), 0)):
            found = processes.run(
                [sys.executable, "-c", program, given], env=environment(), nursery=nursery(), timeout=600
            )
            assert found.returncode == expected, found.stderr
        assert found.stdout.strip() == "[0.25, 0.25]"


@installed
def test_the_program_that_serve_prints_runs_as_it_is() -> None:
    with desk(("vla-eval",)) as at:
        program = "\n".join(at.opened["vla-eval"].guide(SPEC))
        found = processes.run(
            [sys.executable, "-c", program], env=environment(), nursery=nursery(), timeout=600
        )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[0. 0.]"


def test_a_dialect_is_made_for_each_connection() -> None:
    made = vla_eval.connect(SPEC, {}, {})
    assert isinstance(made, Dialect)
    assert made.connect is None
    with pytest.raises(RequestError):
        made.read(message("action", {}))


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Basic OmEta2V5", "a-key"),  # as websockets makes it of ws://:a-key@host
        ("basic dXNlcjphOmtleQ==", "a:key"),
        ("Basic ", ""),
        ("Basic !", ""),
        ("Basic //79", ""),  # no text
        ("Basic YS1rZXk=", ""),  # no password
    ],
)
def test_the_password_of_an_address_is_a_key(header: str, key: str) -> None:
    assert key_of(header) == key
