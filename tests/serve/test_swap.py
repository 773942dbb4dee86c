"""Policies of a running server are loaded, exchanged, unloaded: requests are answered by the one that they came to."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import sys
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from sinew_client import Client
from sinew_client.errors import UnsafeChunk
from sinew_client.form import Fitted, differing, form

from sinew.core import (
    ActionChunk,
    BundleError,
    BusyError,
    CameraSpec,
    KeyMap,
    MotionSpec,
    Observation,
    RequestError,
    VectorSpec,
)
from sinew.serve.access import is_loopback
from sinew.serve.policies import DEFAULT, Deployment
from sinew.serve.scheduler import Scheduler
from sinew.serve.swap import FORM, Forms, MemoryNeed, Swapper
from sinew.serve.transport.ledger import MemoryLedger
from tests import processes
from tests.serve.puppet import GOOD, SPEC, WAIT_S, Puppet, desk, until


class Other(Puppet):
    """Answers with 100 more."""

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        chunk = super().run(observation, cancel=cancel)
        return replace(chunk, actions=chunk.actions + 100)


@contextlib.contextmanager
def exchanging(
    tmp_path: Path, wires=("native",), budget: int | None = None, **options
) -> Iterator[SimpleNamespace]:
    """A desk whose policy can be exchanged for the files of ``tmp_path``: their names say which puppet they are.

    Puppets hold no memory that garbage would keep, and a search of all that this process has takes half a second.
    """
    for name in ("first", "other", "wide", "degrees", "radians"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    opened: list[Scheduler] = []
    with desk(wires, **options) as at, mock.patch("sinew.serve.swap.gc"):

        def need(source: str) -> MemoryNeed:
            if not (tmp_path / source).exists():
                raise BundleError(f"{source}: no such file or folder")
            return MemoryNeed((tmp_path / source).stat().st_size, 1 << 20)

        def open_source(source: str) -> Deployment:
            puppet = Puppet() if source == "first" else Other()
            puppet.spec = {
                "wide": replace(SPEC, chunk_size=9),
                "degrees": replace(SPEC, action=VectorSpec(2, units=("deg", "deg")), control_hz=200.0),
                "radians": replace(SPEC, action=VectorSpec(2, units=("rad", "rad")), control_hz=20.0),
            }.get(source, SPEC)
            scheduler = Scheduler(puppet, supervisor=at.service.supervisor)
            scheduler.start()
            opened.append(scheduler)
            return Deployment(scheduler, puppet.spec, {"policy": puppet.spec.to_dict(), "name": source})

        at.swapper = at.service.swapper = Swapper(
            at.service, open_source, need, "first", budget, "--memory-gib 1"
        )
        at.swap = lambda source: at.swapper.load(DEFAULT, source)
        at.opened_schedulers = opened
        try:
            yield at
        finally:
            for scheduler in opened:
                scheduler.stop()
                assert scheduler.join(WAIT_S)


def test_requests_on_their_way_are_answered_by_the_policy_that_they_came_to(tmp_path):
    with exchanging(tmp_path) as at, Client(at.native, timeout=WAIT_S) as held, Client(at.native) as client:
        found: list = []
        asking = threading.Thread(target=lambda: found.append(held.infer({**GOOD, "prompt": "wait"})))
        asking.start()
        until(lambda: at.scheduler.stats()["running"])
        told: list = []
        changing = threading.Thread(target=lambda: told.append(at.swap("other")))
        changing.start()
        until(lambda: at.service.scheduler is not at.scheduler)
        assert client.infer(GOOD, timeout=WAIT_S).actions[0, 0] == 100  # beside the one that still runs
        assert client.metadata()["name"] == "other"
        with pytest.raises(BusyError, match="another change"):
            at.swap("first")
        at.puppet.release.set()
        asking.join(WAIT_S)
        changing.join(WAIT_S)
        assert found[0].actions[0, 0] == 0
        assert told[0].keys() == {"name", "policy", "memory_mib", "load_s", "drain_s"}
        assert len(at.service.policies.schedulers) == 1
        health = client.health()
        assert (health["served"], health["running"], health["status"]) == (2, False, "ok")


def test_a_client_that_leaves_the_old_policy(tmp_path):
    with exchanging(tmp_path) as at:
        client = Client(at.native, timeout=WAIT_S)
        asking = threading.Thread(target=lambda: _ask_in_vain(client))
        asking.start()
        until(lambda: at.scheduler.stats()["running"])
        changing = threading.Thread(target=lambda: at.swap("other"))
        changing.start()
        until(lambda: at.service.scheduler is not at.scheduler)
        (job,) = at.scheduler._running
        job.abandon()  # the one that holds the old policy back
        changing.join(WAIT_S)
        asking.join(WAIT_S)
        assert not changing.is_alive()
        client.close()


def _ask_in_vain(client: Client) -> None:
    with contextlib.suppress(Exception):
        client.infer({**GOOD, "prompt": "wait"})


def test_none_is_lost_under_load(tmp_path):
    with exchanging(tmp_path) as at:
        answers: list[float] = []
        stop = threading.Event()

        def robot(number: int) -> None:
            with Client(at.native, timeout=WAIT_S) as client:
                while not stop.is_set():
                    answers.append(
                        client.infer({**GOOD, "state": np.full(2, number)}).actions[0, 0] % 100 - number
                    )

        robots = [threading.Thread(target=robot, args=(number,)) for number in range(4)]
        for each in robots:
            each.start()
        for source in ("other", "first", "other"):
            before = len(answers)
            at.swap(source)
            until(lambda before=before: len(answers) > before + 8)
        stop.set()
        for each in robots:
            each.join(WAIT_S)
        stats = at.service.policies.stats()
        assert (stats["served"], stats["failed"]) == (len(answers), 0)
        assert not np.any(answers)


def test_what_does_not_fit_leaves_the_old_policy(tmp_path):
    with exchanging(tmp_path, budget=3 << 20) as at, Client(at.native, timeout=WAIT_S) as client:
        with pytest.raises(
            RequestError,
            match=r"source: the policy needs 2 MiB \(weights 1 MiB, activations 1 MiB\), but only 1 MiB of 3 MiB"
            r" \(--memory-gib 1\) are free with the loaded policies \(default 2 MiB\)",
        ):
            at.swap("other")
        at.swapper._budget = 4 << 20
        with pytest.raises(RequestError, match=r"chunk_size: expected 3 \(the present policy's\), got 9"):
            at.swap("wide")
        assert at.opened_schedulers[0].join(0.0)
        with pytest.raises(BundleError, match="no such file"):
            at.swap("missing")
        assert client.infer(GOOD).actions[0, 0] == 0
        assert client.health()["status"] == "ok"
        at.swap("other")
        assert client.infer(GOOD).actions[0, 0] == 100


def test_what_a_change_took_is_told_and_what_it_takes_is_counted(tmp_path, monkeypatch):
    moments = iter((10.0, 11.23456, 13.5, 20.0, 20.45678))
    clock = SimpleNamespace(perf_counter=lambda: next(moments))
    with exchanging(tmp_path, (), budget=6 << 20) as at:
        assert at.swapper.budget == 6 << 20
        with monkeypatch.context() as patched:
            patched.setattr("sinew.serve.swap.time", clock)
            assert at.swapper.load("arm", "other", need=MemoryNeed(1_460_000)) == {
                "name": "arm",
                "policy": "puppet",
                "memory_mib": 1.4,
                "load_s": 1.235,
                "drain_s": 2.265,
            }
            assert at.swapper.budget == (6 << 20) - 1_460_000
            assert at.swapper.unload("arm") == {"name": "arm", "drain_s": 0.457}
        assert at.swapper.budget == 6 << 20
        at.swapper.load("arm", "other")
        at.swapper.load("arm", "other")  # beside its like
        assert at.swapper.budget == 4 << 20
        with pytest.raises(
            RequestError,
            match=r"only 2 MiB of 6 MiB .* are free with the loaded policies \(default 2 MiB, arm 2 MiB\)",
        ):
            at.swapper.load("arm", "other", need=MemoryNeed((2 << 20) + 1))
        at.swapper.unload("arm")
        known = MemoryNeed((2 << 20) + 1)  # of what stands there
        with pytest.raises(
            RequestError, match=r"needs 2 MiB of weights, but only .* of 6 MiB .*\(default 2 MiB, arm 2 MiB\)"
        ):
            at.swapper.load("arm", "other", need=known)
    assert (MemoryNeed(5).total, str(MemoryNeed(3 << 20))) == (5, "3 MiB of weights")
    with exchanging(tmp_path, ()) as at:
        assert at.swapper.budget is None


def test_what_is_opened_and_not_wanted_ends(tmp_path):
    def refuse(_found: Deployment) -> None:
        raise RequestError("not that one")

    with exchanging(tmp_path, ()) as at:
        with pytest.raises(RequestError, match="^not that one$"):
            at.swapper.load("arm", "other", check=refuse)
        assert at.opened_schedulers[-1].join(0.0)
        assert at.service.policies.names == (DEFAULT,)
        with pytest.raises(RequestError, match="expected a name"):
            at.swapper.load("-", "other")
        assert len(at.opened_schedulers) == 1
        at.swapper.load("arm", "radians")
        at.swapper.unload("arm")
        for source in ("other", "degrees"):  # of other robots
            at.swapper.load("arm", source)


def ask(
    address: str, body: bytes | None, key: str = "", method: str = "PUT", path: str = "/default"
) -> tuple[int, dict]:
    request = urllib.request.Request(
        f"{address.replace('ws', 'http', 1)}/v1/policies{path}",
        body,
        {"X-API-Key": key} if key else {},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_over_http_with_the_key(tmp_path):
    with exchanging(tmp_path, ("web",), api_key="secret") as at:
        good = b'{"source": "other"}'
        assert ask(at.web, good)[0] == ask(at.web, good, "another")[0] == 401
        for body in (b"", b"[]", b'{"source": 3}', b'{"source": ""}', b"[" * 9999):
            assert ask(at.web, body, "secret")[0] == 400
        for source, told in (("x" * 300, "File name too long"), ("x" * 200_000, ""), ("a/" * 2_500, "4096")):
            status, error = ask(at.web, json.dumps({"source": source}).encode(), "secret")
            assert (status, told in error["error"]["message"]) == (400, True), error
        status, told = ask(at.web, good, "secret")
        assert (status, told["policy"], told["name"]) == (200, "puppet", "default")
        for path in ("/-b", "/" + 65 * "b", "/b%2Fc"):
            assert "expected a name" in ask(at.web, good, "secret", path=path)[1]["error"]["message"]
        assert ask(at.web, good, "secret", path="/b")[0] == 200
        assert ask(at.web, None, "secret", "GET", "")[1]["policies"].keys() == {"default", "b"}
        assert ask(at.web, None, "", "DELETE", "/b")[0] == 401
        assert ask(at.web, None, "secret", "DELETE", "/b")[1]["name"] == "b"
        assert ask(at.web, None, "secret", "DELETE", "/b")[0] == 404
        assert "not unloaded" in ask(at.web, None, "secret", "DELETE")[1]["error"]["message"]
        at.service.swapper = None
        assert "cannot change its policies" in ask(at.web, good, "secret")[1]["error"]["message"]


def test_another_form_is_refused_unless_it_is_asked_for_by_name(tmp_path):
    """A signature of the defect: degrees for radians at ten times the rate, and robots went on without a word."""
    with exchanging(tmp_path, ("native", "web"), api_key="secret") as at:
        put = lambda source, *accept: ask(  # noqa: E731
            at.web, json.dumps({"source": source, "accept": accept}).encode(), "secret"
        )
        assert put("radians")[0] == 200  # the first one states neither
        status, told = put("degrees")
        assert status == 400
        assert told["error"]["message"].startswith(
            'source (list in "accept" the differences that your robots support): action.units: expected rad, rad'
            " (the present policy's), got deg, deg; control_hz: expected 20 (the present policy's), got 200"
        )
        assert put("other")[0] == 200  # states neither, and its robots still take it for radians
        status, told = put("degrees", "units")
        assert status == 400
        assert "units" not in told["error"]["message"]
        assert "control_hz: expected 20" in told["error"]["message"]
        for accept, why in (
            ("units", "a list"),
            (["speed"], "expected some of cameras, state.dim"),
            ([3], "a list"),
        ):
            body = json.dumps({"source": "degrees", "accept": accept}).encode()
            assert why in ask(at.web, body, "secret")[1]["error"]["message"]
        with Client(at.native, api_key="secret") as client:
            assert client.infer(GOOD).warnings == ()
            assert "changed" not in client.metadata()
            status, told = put("degrees", "action.units", "control_hz")
            changed = [
                "action.units: expected rad, rad (the present policy's), got deg, deg",
                "control_hz: expected 20 (the present policy's), got 200",
            ]
            assert (status, told["changed"]) == (200, changed)
            assert list(client.infer(GOOD).warnings) == client.metadata()["changed"] == changed
            assert client.health()["policies"]["default"]["changed"] == changed
            assert put("degrees")[0] == 200  # the same again
            assert client.infer(GOOD).warnings == ()


ARM = replace(
    SPEC,
    state=VectorSpec(2, ("a", "b"), ("rad", "rad")),
    action=VectorSpec(2, ("a", "b"), ("rad", "rad")),
    control_hz=20.0,
    embodiment="droid",
    motion=MotionSpec("relative", (0,), (1,)),
    keys=(KeyMap("openpi", {"image": "front"}, ("joints", "gripper")),),
)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cameras", {"cameras": (CameraSpec("wrist", 48, 64),)}),
        ("state.dim", {"state": VectorSpec(3)}),
        ("state.names", {"state": VectorSpec(2, ("b", "a"))}),
        ("state.units", {"state": VectorSpec(2, (), ("deg", "rad"))}),
        ("action.dim", {"action": VectorSpec(1)}),
        ("action.names", {"action": VectorSpec(2, ("a", "c"))}),
        ("action.units", {"action": VectorSpec(2, (), ("", "deg"))}),
        ("chunk_size", {"chunk_size": 9, "noise_rows": 3}),
        ("noise", {"noise_dim": 3}),
        ("control_hz", {"control_hz": 21.0}),
        ("embodiment", {"embodiment": "aloha"}),
        ("motion", {"motion": MotionSpec("absolute")}),
        ("keys", {"keys": (KeyMap("openpi", {"image": "front"}, ("gripper", "joints")),)}),
    ],
)
def test_what_robots_take_for_granted(name, fields):
    new = replace(ARM, **fields)
    with pytest.raises(RequestError, match=rf"source .*: {re.escape(name)}[a-z.]*: expected .*, got "):
        Forms().check("arm", ARM, new)
    assert len(Forms().check("arm", ARM, new, [name])) == 1
    assert (
        len(Forms().check("arm", ARM, new, [name.rpartition(".")[2]] if "dim" not in name else [name])) == 1
    )
    assert name.partition(".")[0] in {each.partition(".")[0] for each in FORM}


def test_what_one_of_them_does_not_state_is_not_compared():
    silent = replace(
        ARM,
        state=VectorSpec(2),
        action=VectorSpec(2, (), ("", "rad")),
        control_hz=None,
        embodiment="",
        motion=None,
        keys=(),
    )
    assert Forms().check("arm", ARM, silent) == Forms().check("arm", silent, ARM) == ()
    assert Forms().check("arm", ARM, replace(ARM, name="newer", architecture="other", solver_steps=4)) == ()
    forms = Forms()
    forms.check("arm", ARM, silent)
    forms.put("arm", silent)
    with pytest.raises(RequestError, match=r"embodiment: expected droid \(the present policy's\), got aloha"):
        forms.check("arm", silent, replace(silent, embodiment="aloha"))
    forms.forget("arm")
    assert forms.check("arm", silent, replace(silent, embodiment="aloha")) == ()


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (("ab", "cd"), ("ab",), "expected ab, cd, got ab"),
        (("a", "b"), ("a", "c"), "expected a, b, got a, c"),
        ((("kind", "absolute"),), (("kind", 1),), "expected {'kind': 'absolute'}, got {'kind': 1}"),
        ((("one",), ("two",)), (3, 2), "expected ('one',), ('two',), got 3, 2"),
        (20.0, 12.5, "expected 20, got 12.5"),
        (0, "", "expected 0, got "),
        ("x" * 200, "y" * 201, f"expected {200 * 'x'}, got {200 * 'y'} ..."),
        ("", "rad", ""),  # says nothing
        (("rad", ""), ("", "deg"), ""),
        ((1, "a"), (1, ""), ""),
        ("rad", "rad", ""),
    ],
)
def test_a_difference_is_said_in_a_sentence(was, now, said):
    for before, after, sentence in ((was, now, said), (now, was, "")):
        found = differing({"part": before, "gone": 1}, {"part": after, "new": 2})
        assert found.keys() == ({"part"} if said else set())
        assert not sentence or found["part"] == f"part: {sentence}"


def test_a_form_is_what_the_policy_states():
    assert form(ARM, ("state", "motion")) == {
        "state.dim": 2, "state.names": ("a", "b"), "state.units": ("rad", "rad"),
        "motion": tuple(asdict(MotionSpec("relative", (0,), (1,))).items()),
    }  # fmt: skip
    silent = {"cameras", "state.dim", "state.names", "action.dim", "chunk_size", "noise"}
    assert form(SPEC).keys() == silent
    assert form(ARM).keys() == silent | {
        "state.units", "action.names", "action.units", "control_hz", "embodiment", "motion", "keys.openpi",
    }  # fmt: skip
    Fitted(None).check(SimpleNamespace(spec=ARM))
    Fitted(ARM.to_dict()).check(SimpleNamespace(spec=replace(ARM, chunk_size=9)))
    with pytest.raises(UnsafeChunk) as error:
        Fitted(ARM.to_dict()).check(SimpleNamespace(spec=replace(ARM, control_hz=10.0, embodiment="aloha")))
    assert str(error.value) == (
        "the server has another policy than at the start of this run: control_hz: expected 20, got 10;"
        " embodiment: expected droid, got aloha; start the run again with the new policy"
    )


def test_loading_takes_as_long_as_it_takes(tmp_path, monkeypatch):
    """The request was there as a whole: no watch over slow senders ends it."""
    sweep, swept = MemoryLedger.sweep, threading.Semaphore(0)

    def later(ledger: MemoryLedger, now: float) -> None:
        sweep(ledger, now + 1000)
        swept.release()

    monkeypatch.setattr(MemoryLedger, "sweep", later)
    with exchanging(tmp_path, ("web",), api_key="secret") as at:
        opened = at.swapper._open

        def slowly(source: str) -> Deployment:
            for _ in range(2):
                assert swept.acquire(timeout=WAIT_S)
            return opened(source)

        at.swapper._open = slowly
        assert ask(at.web, b'{"source": "other"}', "secret")[0] == 200


def test_never_without_a_key(tmp_path):
    with exchanging(tmp_path, ("web",)) as at:
        assert ask(at.web, b'{"source": "other"}')[0] == 401
        assert ask(at.web, None, method="DELETE")[0] == 401
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    for address in (None, "", "192.0.2.1", "localhost.evil"):
        assert not is_loopback(address)


def test_an_exchange_leaves_no_library_in_the_server():
    """What counts a policy's memory traces it, with libraries of 150 MiB that stayed in the server for good."""
    program = """
import sys
from sinew.cli.options import CAMERAS, RUNS
from sinew.memory import memory_need
options = RUNS.keywords() | CAMERAS.keywords() | {"engine": "eager", "device": "cpu"}
weights, computed = memory_need(sys.argv[1], options, 1, 1, apart=True)
assert weights and computed, (weights, computed)
print(*(name for name in sys.modules if name == "sinew_perf.memory"))
"""
    bundle = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
    found = processes.run([sys.executable, "-c", program, str(bundle)], timeout=600)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []


def test_the_memory_of_an_exchanged_policy_comes_back():
    """Also that of the first one, which is frozen out of the search for garbage when a server begins.

    In a process of its own: a search of a worker is a search of the whole suite, two CPU seconds for each exchange.
    """
    program = "from tests.serve.test_swap import exchange_and_search; exchange_and_search()"
    found = processes.run([sys.executable, "-c", program], cwd=processes.ROOT)
    assert found.returncode == 0, found.stderr


def exchange_and_search() -> None:
    from sinew.cli.options import CAMERAS, RUNS
    from sinew.cli.serve import Bounds
    from sinew.memory import memory_need
    from sinew.serve.deploy import PolicyHost, deploy
    from sinew.serve.launch import loader, swapper
    from sinew.serve.service import Service

    bundle = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"
    options = RUNS.keywords() | CAMERAS.keywords() | {"engine": "eager", "device": "cpu"}
    host = PolicyHost()

    def watched(scheduler):
        policy = scheduler.policy
        policy.itself = policy  # a cycle, which only a search for garbage ends
        return weakref.ref(policy)

    found = deploy(loader(bundle, options, 1)(), Bounds(), host)
    service = Service(found)
    changing = swapper(service, host, bundle, options, 1, Bounds(), None, memory_need)
    gone = [watched(found.scheduler)]
    del found
    gc.freeze()
    for name in (DEFAULT, "arm", "arm"):
        changing.load(name, str(bundle))
        gone.append(watched(service.policies.get(name).scheduler))
    changing.unload("arm")
    assert gc.get_freeze_count()  # as before
    assert [each() is None for each in gone] == [True, False, True, True]
    assert list(host.begun) == [service.policies.get().scheduler]
    service.policies.get().scheduler.stop()
