"""Episodes on the hosts of a Ray cluster: its actors die, its hosts lack something, bundles travel, the cluster goes.

Without Ray a pool of threads stands where its actors are; the last tests have Ray itself, on this machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the pen task needs the sim extra")

from eval.tests.test_eval import PEN, children, content, needs_pen
from eval.tests.test_farm import PATIENCE, POISON, TASK, _played, command, outcomes, pen, wait_for
from sinew.cli import main
from sinew.core import SinewError, machine
from sinew.core.extras import MissingPackageError

from sinew_eval.episodes import campaign
from sinew_eval.episodes.outside import TypedNames
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.farm import files, shards
from sinew_eval.foreign import cluster
from tests import processes

SEEDS = range(5000, 5004)
EXPERT = Variant("expert", handover="aligned")


class ActorLostError(Exception):
    """As Ray's error of an actor that has died."""


class Threads:
    """What is asked of the module ray, with a thread for each actor. hosts: names of nodes, taken in turn. lost: how
    many of the next answers of ``play`` are an actor's death."""

    exceptions = SimpleNamespace(
        RayActorError=ActorLostError, ObjectLostError=ActorLostError, RayError=ActorLostError
    )

    def __init__(self, hosts: Sequence[str] = ("one", "two"), lost: int = 0):
        self.hosts, self.lost, self.begun = list(hosts), lost, list[str]()
        self.asked: list[str] = []

    def remote(self, made: Callable[[], Any]) -> Any:
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda: self._actor(made, options))
        )

    def _actor(self, made: Callable[[], Any], options: dict[str, Any]) -> Any:
        refused = options.get("label_selector", {}).get("ray.io/node-id", "")
        there = [host for host in self.hosts if host not in refused]
        host = there[len(self.begun) % len(there)]
        self.begun.append(host)
        actor, thread, dead = made(), ThreadPoolExecutor(1), threading.Event()

        def call(name: str) -> Any:
            def run(*given: Any) -> Any:
                self.asked.append(f"{host} {name}")
                found = getattr(actor, name)(*given)
                if name == "play" and self.lost and not dead.is_set():
                    self.lost -= 1
                    dead.set()  # and all that it is asked from now on, as two groups may be under way to it
                if dead.is_set():
                    raise ActorLostError("killed")
                return {**found, "node": host, "name": host} if name == "open" else found

            return SimpleNamespace(remote=lambda *given: thread.submit(run, *given))

        return SimpleNamespace(**{name: call(name) for name in ("open", "receive", "play")}, thread=thread)

    def wait(self, refs: Sequence[Future[Any]], timeout: float) -> tuple[list[Future[Any]], None]:
        return list(wait(refs, timeout, FIRST_COMPLETED).done), None

    def get(self, ref: Future[Any]) -> Any:
        return ref.result()

    def kill(self, actor: Any) -> None:
        actor.thread.shutdown(wait=False)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": host, "Alive": True} for host in self.hosts]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an actor of ``Threads`` ask what Ray would tell it."""
    context = SimpleNamespace(get_node_id=lambda: "")
    util = SimpleNamespace(get_node_ip_address=lambda: "")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))


def begun(
    folder: Path, task: Task = TASK, variant: Variant = EXPERT
) -> tuple[files.EpisodeQueue, files.FarmPlan]:
    queue = files.EpisodeQueue(folder, "head-1.")
    queue.make()
    plan = files.FarmPlan.of(task, [variant], [(0, seed) for seed in SEEDS])
    plan.write(folder)
    return queue, plan


def names_in(folder: Path) -> TypedNames:
    """Return the names of a run whose plan is this machine's own."""
    plan = files.FarmPlan.read(folder)
    return TypedNames.of(plan.task, plan.variants)


def played(queue: files.EpisodeQueue, plan: files.FarmPlan) -> list[dict[str, Any]]:
    assert not list((queue.folder / files.LEASES).iterdir())
    return content([episode for job in plan.jobs for episode in queue.read(job, plan.keys[0]) or []])


@pytest.mark.usefixtures("here")
def test_the_same_episodes_though_actors_die(tmp_path: Path) -> None:
    queue, plan = begun(tmp_path)
    ray = Threads(lost=2)
    hosts = cluster.Hosts(ray, tmp_path, queue, 2, names_in(tmp_path))
    hosts.play()
    assert played(queue, plan) == content(campaign.run(TASK, [EXPERT], SEEDS)[0])
    assert hosts.episodes == len(SEEDS)
    assert len(ray.begun) == 4


@pytest.mark.usefixtures("here")
def test_a_group_in_which_actors_always_die_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "DEATHS", 2)
    queue, _ = begun(tmp_path)
    with pytest.raises(SinewError, match=r"a shard died 2 times at seed 5000, on one \(killed\)"):
        cluster.Hosts(Threads(["one"], lost=9), tmp_path, queue, 1, names_in(tmp_path)).play()


@needs_pen
@pytest.mark.slow  # its policy is compiled twice
@pytest.mark.usefixtures("here")
def test_a_bundle_is_sent_once_to_a_host_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The hosts of ``Threads`` share a disk; what is in the way of the driver's path there is another bundle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cluster, "BLOCK", PEN.stat().st_size // 3)
    alone = content(campaign.run(TASK, [pen_of(PEN)], SEEDS)[0])
    own = tmp_path / "own.gguf"
    shutil.copy(PEN, own)
    queue, plan = begun(tmp_path / "queue", variant=pen_of(own))
    check = files.FarmPlan.check

    def not_there(plan: files.FarmPlan, index: int) -> None:
        if plan.variants[index].target == str(own):
            raise SinewError("no such bundle")
        check(plan, index)

    monkeypatch.setattr(files.FarmPlan, "check", not_there)
    ray = Threads(["one"])
    cluster.Hosts(ray, tmp_path / "queue", queue, 2, names_in(tmp_path / "queue")).play()
    (kept,) = machine.cache_folder("bundles").iterdir()
    assert kept.read_bytes() == PEN.read_bytes()
    assert ray.asked.count("one receive") == 4
    assert caplog.text.count("one is sent own.gguf, 1.0 MB") == 1
    assert played(queue, plan) == alone


@needs_pen
def test_a_bundle_that_came_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own, data = tmp_path / "own.gguf", PEN.read_bytes()
    own.write_bytes(data)
    both = [pen_of(own), replace(pen_of(own), solver_steps=4)]
    files.FarmPlan.of(TASK, both, [(0, 5000), (1, 5000)]).write(tmp_path)
    monkeypatch.setattr(
        files.FarmPlan, "check", lambda *_: (_ for _ in ()).throw(SinewError("another one here"))
    )
    guest = cluster.RemoteWorker((tmp_path / files.PLAN).read_bytes())
    assert guest.missing() == [0]  # of which the second variant is made, too
    with pytest.raises(SinewError, match=r"own.gguf: expected SHA-256 \w{64}, got \w{64}"):
        guest.receive(0, b"GGUF of somebody else", 0, True)
    kept = machine.cache_folder("bundles")
    assert not list(kept.iterdir())
    guest.receive(0, data[:1000], 0, False)
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode: io.FileIO("/dev/full", "w"))
        with pytest.raises(OSError, match="No space left"):
            guest.receive(0, data[1000:], 1000, True)
    assert not list(kept.iterdir())
    guest.receive(0, data[:1000], 0, False)
    guest.receive(0, data[1000:], 1000, True)
    assert [path.read_bytes() for path in kept.iterdir()] == [data]


def pen_of(path: Path) -> Variant:
    return Variant(str(path), 8, handover="aligned", solver_steps=2)


@pytest.mark.usefixtures("here")
def test_hosts_that_lack_something_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue, plan = begun(tmp_path / "a")
    ray = Threads()
    made = cluster._actor()

    class Lacks(made):
        def open(self, plan: bytes, release: str) -> dict[str, Any]:
            if ray.asked[-1].startswith("two"):
                return dict(super().open(plan, "another release"))
            return dict(super().open(plan, release))

    hosts = cluster.Hosts(ray, tmp_path / "a", queue, 2, names_in(tmp_path / "a"))
    hosts._class = Lacks
    hosts._seats = [hosts._seat() for _ in range(2)]
    hosts.play()
    assert len(played(queue, plan)) == len(SEEDS)
    assert "two cannot play: expected Sinew another release on this host, got" in caplog.text

    queue, _ = begun(tmp_path / "b", Task("nowhere_there:Task-v0"))
    with pytest.raises(SinewError, match=r"no host can play: (one|two): .*nowhere_there.*; (one|two): "):
        cluster.Hosts(Threads(), tmp_path / "b", queue, 2, names_in(tmp_path / "b")).play()


def test_no_cluster_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The error is Ray's own (2.60)."""

    def init(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    monkeypatch.setattr(cluster, "AGAIN_S", 0.01)
    with pytest.raises(SinewError, match="--hosts ray: no Ray cluster answers"):
        cluster.connected("ray", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", "head:x")
    with pytest.raises(SinewError, match=r"--hosts ray \(RAY_ADDRESS=head:x\): no Ray cluster answers"):
        cluster.connected("ray", 0.0)
    monkeypatch.delenv("RAY_ADDRESS")
    assert not caplog.text
    with pytest.raises(SinewError, match="no Ray cluster answers"):
        cluster.connected("ray", 0.02)
    assert "no cluster answers; waiting up to" in caplog.text
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"--hosts needs ray: pip install .*\[ray\]"):
        cluster.connected("ray", 0.0)


def test_what_a_shard_says_reaches_people(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "shard"
    crew = shards.WorkerPool(tmp_path, 0, "", tmp_path, (shards.SHARD,))
    log.write_bytes(b"noise\nsaid: one\nsaid: tw")
    crew._hear("shard")
    with log.open("ab") as file:
        file.write(b"o\n\n3\n")
    crew._hear("shard")
    assert caplog.messages == ["one", "two"]


def test_a_process_that_ray_ended_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its library ends the process by exit status 1 where the head has gone."""
    (tmp_path / "as_ray.py").write_text(
        "import os, pathlib, sys\n"
        "try: pathlib.Path(sys.argv[3]).touch(exist_ok=False)\n"
        "except FileExistsError: print('\\n7')\n"
        "else: os._exit(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    files.EpisodeQueue(tmp_path, "").make()
    crew = shards.WorkerPool(tmp_path, 1, "head", tmp_path / files.LOGS, ("as_ray", str(tmp_path / "been")))
    while crew.tend():
        time.sleep(0.01)
    assert crew.episodes == 7
    assert caplog.messages == ["a shard ended with exit code 1; a new shard continues"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "10.0.0.1", "--shards", "2"), "--hosts: expected ray (the cluster of this machine"),
        (("--hosts", "ray://:10001", "--shards", "2"), "or ray://HOST:PORT, got 'ray://:10001'"),
        (("--hosts", "ray://head:99999", "--shards", "2"), "or ray://HOST:PORT, got 'ray://head:99999'"),
        (("--hosts", "ray"), "--hosts: also pass --shards N"),
        (("--hosts", "ray", "--realtime"), "--hosts: expected simulated time"),
        (("--hosts", "ray", "--join", "run"), "--hosts: cannot be combined with --join"),
    ],
)
def test_mistakes_are_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "expert", "--env", TASK.env, *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert main(["eval", "--repeat", "report.json", "--hosts", "ray"]) == 1
    assert "--repeat: plays only on this machine" in capsys.readouterr().err


# ----------------------------------------------------------------------------- Ray itself


@pytest.fixture
def ray_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Begin a cluster of two processors on this machine; yield the port for those outside."""
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, outside = (free.getsockname()[1] for free in (one, two))
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    place = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # names of sockets are short
    words = ["--head", "--block", f"--port={port}", f"--ray-client-server-port={outside}", "--num-cpus=2"]
    words += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--object-store-memory=100000000"]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, f"--temp-dir={place}"]
    with processes.Process(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as head:
        wait_for(lambda: not _asked(port), head)
        yield outside
        ended = children(head.pid)
        head.terminate()
        head.wait(PATIENCE)
        for pid in ended:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(place, ignore_errors=True)


def _asked(port: int) -> int:
    words = [sys.executable, "-m", "ray.scripts.scripts", "status", f"--address=127.0.0.1:{port}"]
    return subprocess.run(words, check=False, capture_output=True).returncode


@needs_pen
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_plays_the_same_episodes_whatever_is_killed(ray_address: int, tmp_path: Path) -> None:
    """An actor, the process that speaks with Ray, and the run: the same command goes on, through Ray's client."""
    seeds, out = range(5000, 5020), tmp_path / "out"
    rng = random.Random(0)
    alone = content(campaign.run(TASK, [pen()], seeds)[0])

    def progress(run: processes.Process) -> None:
        before = len(_played(out))
        wait_for(lambda: len(_played(out)) > before, run)
        time.sleep(rng.uniform(0, 0.2))

    with processes.Process(
        command(out, "--shards", 2, "--hosts", "ray", seeds=seeds), stdout=subprocess.DEVNULL
    ) as run:
        progress(run)
        os.kill(_process(lambda words: b"ray::Episodes" in words), signal.SIGKILL)
        progress(run)
        os.kill(_process(lambda words: str(out).encode() in words and b".cluster" in words), signal.SIGKILL)
        progress(run)
        run.kill()
        run.wait()
    assert len(_played(out)) < len(seeds)
    client = f"ray://127.0.0.1:{ray_address}"
    again = command(out, "--shards", 2, "--hosts", client, seeds=seeds)
    with processes.Process(again, stdout=subprocess.DEVNULL) as run:
        assert run.wait(PATIENCE) == 0
    assert [outcomes(out)[seed] for seed in seeds] == alone
    assert not (out / files.FOLDER).exists()


def _process(fits: Callable[[bytes], bool]) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if fits(path.read_bytes()):
                return int(path.parent.name)
    raise AssertionError("there is no such process")


@needs_pen
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ray_address")
def test_a_host_without_the_environment_is_named(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text(textwrap.dedent(POISON).replace("WHAT", "pass"))
    words = [sys.executable, "-m", "sinew", "eval", "expert", "--env", "only_here:Poison-v0", "--episodes", 2]
    places = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [*map(str, words), "--shards", "1", "--hosts", "ray"],
        check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": places}, timeout=PATIENCE,
    )  # fmt: skip
    assert run.returncode == 1
    assert re.search(r"no host can play: \S+ .*no module 'only_here'", " ".join(run.stderr.split()))
