"""The queue of episodes: whatever is killed, and whoever plays, every episode counts once and is the same one."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the pen task needs the sim extra")

from eval.tests.test_eval import PEN, children, content, needs_pen
from sinew.cli import main
from sinew.core import SinewError
from sinew.policy import Policy
from sinew.serve.batching import Batcher
from tests.shape_rounding import VARIABLE

from sinew_eval.episodes import campaign, episode_log
from sinew_eval.episodes.player import groups, key
from sinew_eval.episodes.settings import Latency, Task, Variant
from sinew_eval.farm import files, hosts, shards
from tests import processes

pytestmark = pytest.mark.usefixtures("rounded_by_shape", "forked")

PATIENCE = 300.0  # seconds until a test that waits gives up
TASK, SEEDS = Task("sinew/Pen-v0"), range(5000, 5030)
FEW = SEEDS[:12]  # where nothing has to be killed three times before the end
# Who is killed plays the expert's episodes, which need no seconds of imports in each process; slow tests, the policy's.
EXPERT, MANY = Variant("expert", 8, Latency("uniform:0-3"), "aligned"), range(5000, 5040)
CLOCKS = ("key", "latency_ms", "wall_s", "peak_bytes")  # what differs between two runs


def pen(**more: Any) -> Variant:
    return Variant(str(PEN), 8, Latency("uniform:0-3"), "aligned", solver_steps=2, **more)


def command(out: Path, *more: object, seeds: range = SEEDS, target: Path | str = PEN) -> list[object]:
    steps = () if target == EXPERT.target else ("--solver-steps", 2)
    return [
        *(sys.executable, "-m", "sinew", "eval", target, "--env", TASK.env, "--episodes", len(seeds)),
        *("--replan", 8, "--latency", "uniform:0-3", *steps, "--out", out, *more),
    ]


def wait_for(what: Callable[[], Any], process: processes.Process | None = None) -> Any:
    """Return what is true in the end."""
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert process is None or process.poll() is None, "the run has ended"
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.02)
    return found


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / campaign.LOG).read_text().splitlines()]


def outcomes(out: Path) -> dict[int, dict[str, Any]]:
    """Return the episodes of a log by seed, without what the clock and the memory say. Each is there once."""
    found: dict[int, dict[str, Any]] = {}
    for values in lines(out):
        assert values["seed"] not in found, f"seed {values['seed']} is there twice"
        found[values["seed"]] = {k: v for k, v in values.items() if k not in CLOCKS}
    return found


@pytest.fixture(scope="module")
def few() -> list[dict[str, Any]]:
    """The first episodes as this process plays them, one after the other."""
    return content(campaign.run(TASK, [pen()], FEW)[0])


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    """All of them, for tests that are slow."""
    return content(campaign.run(TASK, [pen()], SEEDS)[0])


@pytest.fixture(scope="module")
def unrounded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All of them without rounding by shape, for tests whose shards are new interpreters.

    Such a shard starts without the rounding that forked processes have, so the references of forked shards do not
    hold for it.
    """
    out = tmp_path_factory.mktemp("unrounded")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        assert processes.run(command(out)).returncode == 0
    found = outcomes(out)
    return [found[seed] for seed in SEEDS]


@pytest.fixture(scope="module")
def experts() -> list[dict[str, Any]]:
    """The expert's, of many seeds."""
    return content(campaign.run(TASK, [EXPERT], MANY)[0])


# ----------------------------------------------------------------------------- the same episodes


@needs_pen
@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_play_the_same_episodes(shards: int, few: list[dict[str, Any]], tmp_path: Path) -> None:
    found = campaign.run(TASK, [pen()], FEW, workers=shards, out=tmp_path)
    assert content(found[0]) == few
    assert sorted(outcomes(tmp_path)) == list(FEW)
    assert not (tmp_path / files.FOLDER).exists()


@needs_pen
@pytest.mark.slow
def test_batches_are_the_same_in_any_number_of_shards(alone: list[dict[str, Any]]) -> None:
    """In batches of any size an answer is within 1e-5 of the one alone; here every episode ends as it does alone."""
    one, two = (content(campaign.run(TASK, [pen(batch=4)], SEEDS, workers=n)[0]) for n in (1, 2))
    assert one == two
    assert [e["success"] for e in one] == [e["success"] for e in alone]


@needs_pen
def test_a_group_of_which_an_episode_is_missing_is_played_whole(tmp_path: Path) -> None:
    """In a smaller batch that episode would round differently from the run that was not interrupted."""
    seeds, todo = range(5000, 5004), list[int]()
    (whole,) = campaign.run(TASK, [pen(batch=4)], seeds, out=tmp_path)
    log = tmp_path / campaign.LOG
    before = log.read_text().splitlines(keepends=True)
    log.write_text("".join(before[:2]) + before[3][:40])  # one line is lost, and one breaks off
    played: list[int] = []
    (found,) = campaign.run(
        TASK, [pen(batch=4)], seeds, out=tmp_path, on_todo=todo.append,
        on_episode=lambda _variant, episode: played.append(episode.seed),
    )  # fmt: skip
    assert content(found) == content(whole)
    assert todo == [2]
    assert sorted(played) == list(seeds)
    complete = [line for line in log.read_text().splitlines() if line.endswith("}")]
    assert sorted(json.loads(line)["seed"] for line in complete) == list(seeds)


@needs_pen
def test_batches_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose episode is over makes room for the next one before the others are answered."""
    sizes: list[int] = []
    run_batch = Policy.run_batch

    def counted(policy: Policy, members: Any, **options: Any) -> Any:
        sizes.append(len(members))
        return run_batch(policy, members, **options)

    monkeypatch.setattr(Policy, "run_batch", counted)
    seeds = range(5008, 5024)  # one block of numbers
    campaign.run(TASK, [pen(batch=4)], seeds)
    sizes = sizes[sizes.index(4) :]  # behind the policy's warm-up
    full = sizes.index(next(size for size in sizes if size < 4))
    assert set(sizes[:full]) == {4}
    assert sizes[full:] == sorted(sizes[full:], reverse=True)  # the last ones have nobody beside them
    assert 4 * full > sum(sizes) / 2


@pytest.mark.slow
@needs_pen
def test_the_batch_that_is_fastest_is_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def calibrate(batcher: Batcher, policy: Policy) -> None:
        assert not policy.unbatched
        batcher.limit, batcher.reason = 4, "measured, as it were"

    monkeypatch.setattr(Batcher, "calibrate", calibrate)
    arguments = [
        "eval",
        str(PEN),
        "--env",
        TASK.env,
        "--workers",
        "1",
        "--batch",
        "auto",
        "--out",
        str(tmp_path),
    ]
    assert main([*arguments, "--episodes", "3"]) == 0
    assert "pen.gguf: batches of 4: measured, as it were" in capfd.readouterr().err
    monkeypatch.setattr(Batcher, "calibrate", None)
    assert main([*arguments, "--episodes", "5"]) == 0
    said = capfd.readouterr().err
    assert f"batches of 4, as in {tmp_path}" in " ".join(said.split())
    assert "3 of 5 episodes are already in the log" in said
    assert {json.loads(values["key"])["batch"] for values in lines(tmp_path)} == {4}
    assert len(outcomes(tmp_path)) == 5


@pytest.mark.slow
@needs_pen
def test_a_terminal_shows_how_fast_and_how_long(tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    words = command(tmp_path, "--shards", 1, seeds=FEW)
    with processes.Process(words, stdout=subprocess.DEVNULL, stderr=theirs, forking=True) as run:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        assert run.wait(PATIENCE) == 0
    os.close(ours)
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode(errors="replace")
    assert re.search(r"pen\.gguf: \d+/\d+ \[\d+, \d+\] %.* \d+/12 \d+\.\d/s \d:\d\d:\d\d", text), text[-2000:]


def test_groups_follow_from_seeds_and_variant() -> None:
    assert groups(pen(), [3, 1]) == [(3,), (1,)]
    found = groups(pen(batch=2), range(5, 20))
    assert found == [(5, 6, 7), tuple(range(8, 16)), (16, 17, 18, 19)]
    assert groups(pen(batch=2), range(8, 12)) == [(8, 9, 10, 11)]


# ----------------------------------------------------------------------------- kills


@needs_pen
def test_killed_shards_lose_nothing(tmp_path: Path, experts: list[dict[str, Any]]) -> None:
    _kill_shards(tmp_path, experts, kills=1, shards=2, seeds=MANY, target=EXPERT.target)


@pytest.mark.slow  # a head is killed below, whose hosts go on
@needs_pen
def test_killed_heads_lose_nothing(tmp_path: Path, experts: list[dict[str, Any]]) -> None:
    _kill_heads(tmp_path, experts, kills=1, seeds=MANY, target=EXPERT.target)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_pen
@pytest.mark.parametrize("kill", ["shards", "heads"])
def test_thirty_kills_lose_nothing(
    kill: str, tmp_path: Path, unrounded: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    (_kill_shards if kill == "shards" else _kill_heads)(tmp_path, unrounded, kills=15)


def _kill_shards(
    out: Path,
    alone: list[dict[str, Any]],
    kills: int,
    shards: int = 3,
    seeds: range = SEEDS,
    target: Path | str = PEN,
) -> None:
    """Kill a shard at a random moment after something more has been played, so often."""
    rng = random.Random(0)
    killed = 0
    words = command(out, "--shards", shards, seeds=seeds, target=target)
    with processes.Process(words, stdout=subprocess.PIPE) as process:
        while killed < kills and process.poll() is None:
            before = len(_played(out))
            wait_for(lambda before=before: len(_played(out)) > before or process.poll() is not None)
            time.sleep(rng.uniform(0, 0.3))
            if found := [pid for pid in children(process.pid) if _is_shard(pid)]:
                os.kill(rng.choice(found), signal.SIGKILL)
                killed += 1
        assert process.wait(PATIENCE) == 0
    assert killed >= min(kills, 3)
    assert [outcomes(out)[seed] for seed in seeds] == alone
    assert not (out / files.FOLDER).exists()


def _kill_heads(
    out: Path, alone: list[dict[str, Any]], kills: int, seeds: range = SEEDS, target: Path | str = PEN
) -> None:
    """Kill the run and some of its shards at random moments; the same command goes on each time."""
    rng = random.Random(1)
    words = command(out, "--shards", 2, seeds=seeds, target=target)
    for _ in range(kills):
        with processes.Process(words, stdout=subprocess.DEVNULL) as process:
            before = len(_played(out))
            wait_for(lambda p=process, n=before: len(_played(out)) > n or p.poll() is not None)
            time.sleep(rng.uniform(0, 0.2))
            for pid in children(process.pid):
                if rng.random() < 0.3:
                    os.kill(pid, signal.SIGKILL)
            process.send_signal(signal.SIGKILL)
            process.wait()
    with processes.Process(words, stdout=subprocess.DEVNULL) as process:
        assert process.wait(PATIENCE) == 0
    assert [outcomes(out)[seed] for seed in seeds] == alone
    assert not (out / files.FOLDER).exists()


def _played(out: Path) -> set[str]:
    """Return what has been played: names of groups, and lines of the log of a run that has ended."""
    folder = out / files.FOLDER / files.PLAYED
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    log = out / campaign.LOG
    count = log.read_bytes().count(b"\n") if log.is_file() else 0
    return {*names, *map(str, range(count))}


def _is_shard(pid: int) -> bool:
    try:
        return b"sinew_eval.farm.shards" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# ----------------------------------------------------------------------------- others who join


@pytest.mark.slow  # hosts join by address, and heads and shards are killed, in make test
@needs_pen
def test_another_process_joins_and_its_loss_is_made_up_for(
    tmp_path: Path, unrounded: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever joins is no child of the run, which sees only that its leases age."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(files, "LEASE_S", 1.0)
    queue = tmp_path / files.FOLDER
    queue.mkdir()
    plan = files.FarmPlan.of(TASK, [pen()], [(0, seed) for seed in FEW])
    files.EpisodeQueue(queue, "test").make()
    plan.write(queue)
    join = [sys.executable, "-m", "sinew", "eval", "--join", tmp_path, "--shards", 1]
    with processes.Process(join, stdout=subprocess.DEVNULL) as helper:  # before there is a head
        wait_for(lambda: _leases(queue) and len(_played(tmp_path)) > 2, helper)
        helper.send_signal(signal.SIGKILL)
        helper.wait()
    wait_for(lambda: not list(_shards_of(queue)))
    played = len(_played(tmp_path))
    assert played < len(FEW)

    with processes.Process(join, stdout=subprocess.PIPE) as helper:
        found = campaign.run(TASK, [pen()], FEW, workers=2, out=tmp_path)
        assert helper.wait(PATIENCE) == 0
    assert content(found[0]) == unrounded[: len(FEW)]
    assert sorted(outcomes(tmp_path)) == list(FEW)


@needs_pen
def test_a_shard_that_stood_still_counts_once(
    tmp_path: Path, few: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: its lease ages, another one plays the episode, and then it wakes and stores it as well."""
    now = [100.0]  # the test moves this clock
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now[0]))
    queue = files.EpisodeQueue(tmp_path, "first", lease_s=0.1)
    queue.make()
    plan = files.FarmPlan.of(TASK, [pen()], [(0, SEEDS[0])])
    (job,) = plan.jobs
    assert queue.claim(job)
    other = files.EpisodeQueue(tmp_path, "second", lease_s=0.1)
    assert not other.claim(job)
    other.expire(job)
    now[0] += 0.15
    before = files._state(tmp_path / files.LEASES / job.name)
    wait_for(lambda: queue.beat() or files._state(tmp_path / files.LEASES / job.name) != before)
    other.expire(job)  # it lives
    assert not other.claim(job)
    now[0] += 0.15
    other.expire(job)
    assert other.claim(job)
    episode = campaign.run(TASK, [pen()], SEEDS[:1])[0][0]
    other.store(job, plan.keys[0], [episode])
    queue.beat()
    queue.store(job, plan.keys[0], [episode])
    assert content(queue.read(job, plan.keys[0]) or []) == few[:1]
    assert not queue.claim(job)
    assert not _leases(tmp_path)


def _leases(queue: Path) -> list[str]:
    return [path.name for path in (queue / files.LEASES).iterdir()]


def _shards_of(queue: Path) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(queue).encode() in words:
            yield int(path.parent.name)


@needs_pen
def test_a_run_on_another_machine_is_not_sent_the_key_unencrypted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SINEW_API_KEY", "the key")
    monkeypatch.delenv("SINEW_ALLOW_UNENCRYPTED_KEY", raising=False)
    with socket.create_server(("", 0)) as server:
        # Only 127.0.0.0/8, ::1 and localhost count as this machine.
        address = f"http://{socket.gethostname()}:{server.getsockname()[1]}"
        assert main(["eval", "--join", address, "--shards", "1"]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "expected encryption for the API key" in said
        assert "ssh -N -L" in said
        assert "SINEW_ALLOW_UNENCRYPTED_KEY=1" in said
        assert "--tls-cert" not in said  # a run has none
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    monkeypatch.setenv("SINEW_ALLOW_UNENCRYPTED_KEY", "1")
    hosts.RemoteQueue(address, "worker", 1.0)
    monkeypatch.delenv("SINEW_ALLOW_UNENCRYPTED_KEY")
    hosts.RemoteQueue("http://127.0.0.1:1", "worker", 1.0)


def test_hosts_that_see_no_folder_join_by_address(
    tmp_path: Path, few: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle comes with the plan; the head is killed; nothing is lost, nothing is there twice."""
    _kill_heads_and_hosts(tmp_path, few, monkeypatch, kills=1, seeds=FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_pen
def test_thirty_kills_of_heads_and_hosts_lose_nothing(
    tmp_path: Path, alone: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _kill_heads_and_hosts(tmp_path, alone, monkeypatch, kills=30)


def _kill_heads_and_hosts(
    tmp_path: Path,
    alone: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
    seeds: range = SEEDS,
) -> None:
    """Kill the run and one that helps it in turn; each begins again with the same command."""
    monkeypatch.setenv("SINEW_API_KEY", "a key")
    there, here, out = tmp_path / "there", tmp_path / "here", tmp_path / "out"
    there.mkdir(), here.mkdir()
    shutil.copy(PEN, there / "own.gguf")
    address = f"127.0.0.1:{processes.free_port()}"
    head = [*command(out, "--shards", 1, "--listen", address, seeds=seeds)]
    head[head.index(PEN)] = "own.gguf"
    join = [sys.executable, "-m", "sinew", "eval", "--join", f"http://{address}", "--shards", 1]
    rng = random.Random(2)

    def begin(words: list[Any], folder: Path) -> processes.Process:
        return processes.Process(
            words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, forking=True
        )

    run, helper = begin(head, there), begin(join, here)
    for turn in range(kills):
        before = len(_played(out))
        wait_for(lambda p=run, n=before: len(_played(out)) > n or p.poll() is not None)
        time.sleep(rng.uniform(0, 0.2))
        killed = helper if turn % 2 else run
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        if turn % 2:
            helper = begin(join, here)
        else:
            run = begin(head, there)
    assert run.wait(PATIENCE) == 0, run.stderr.read()
    if kills == 1:
        assert helper.wait(PATIENCE) == 0, helper.stderr.read()
    helper.kill()
    helper.wait()
    assert [outcomes(out)[seed] for seed in seeds] == alone[: len(seeds)]
    assert not (out / files.FOLDER).exists()


def test_a_queue_answers_whoever_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim whose answer was lost is answered again, also by a new head; names are those of the plan."""
    monkeypatch.setenv("SINEW_API_KEY", "a key")
    expert = Variant("expert", handover="aligned")
    plan = files.FarmPlan.of(TASK, [expert], [(0, seed) for seed in range(2)])
    files.EpisodeQueue(tmp_path, "").make()
    plan.write(tmp_path)
    server = hosts.QueueServer(tmp_path, plan, "127.0.0.1:0")
    one, two = (hosts.RemoteQueue(server.address, name, 1.0) for name in ("one.", "two."))
    job = one.take(list(plan.jobs))
    assert job is not None
    assert one.take(list(plan.jobs)) == job
    other = two.take(list(plan.jobs))
    assert other not in (None, job)
    server.close()
    server = hosts.QueueServer(tmp_path, plan, server.address.removeprefix("http://"))
    assert one.take(list(plan.jobs)) == job
    one.beat()
    episodes = campaign.run(TASK, [expert], range(2))[0]
    for queue, each in ((one, job), (two, other)):
        queue.store(each, plan.keys[0], [next(e for e in episodes if e.seed == each.seeds[0])])
        queue.store(each, plan.keys[0], [next(e for e in episodes if e.seed == each.seeds[0])])
    assert one.take(list(plan.jobs)) is None
    assert not one.goes_on
    assert set(shards.left_over(tmp_path)) == {(plan.keys[0], 0), (plan.keys[0], 1)}
    for path in ("/bundle/7", "/bundle/x", "/leases", f"/store/{job.name}?worker=../x"):
        with pytest.raises(SinewError, match="404 not found"):
            one.ask("POST" if "store" in path else "GET", path, b"{}")
    monkeypatch.setenv("SINEW_API_KEY", "another")
    with pytest.raises(SinewError, match="401 set the key of the run in SINEW_API_KEY"):
        one.beat()
    server.close()
    monkeypatch.setattr(hosts, "AWAY_S", 0.1)
    with pytest.raises(SinewError, match=r"no answer for 0.1 s .*if the run was killed, start it again"):
        one.beat()


def test_whoever_has_no_key_is_not_read_and_a_bundle_is_never_whole_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINEW_API_KEY", "a key")
    bundle = tmp_path / "large.gguf"
    with bundle.open("wb") as file:
        file.truncate(64 << 20)
    plan = files.FarmPlan.of(TASK, [Variant("expert", handover="aligned")], [(0, seed) for seed in range(9)])
    files.EpisodeQueue(tmp_path, "").make()
    plan.write(tmp_path)
    server = hosts.QueueServer(
        tmp_path, replace(plan, variants=(replace(plan.variants[0], target=str(bundle)),)), "127.0.0.1:0"
    )
    queue = hosts.RemoteQueue(server.address, "one", 1.0)
    place = urlsplit(server.address)
    with socket.create_connection((str(place.hostname), place.port or 0), 60.0) as stranger:
        stranger.sendall(b"POST /claim HTTP/1.1\r\nContent-Length: 60000000\r\n\r\n")
        assert stranger.recv(100).startswith(b"HTTP/1.1 401")  # before anything of it is there
    queue.beat()
    tracemalloc.start()
    queue.ask("GET", "/bundle/0", into=tmp_path / "copy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert (tmp_path / "copy").stat().st_size == 64 << 20
    with pytest.raises(SinewError, match="404 not found"):
        queue.ask("POST", "/claim", b"[]")

    # All is played, and a worker hears so while the run looks whether it has: neither disturbs the other.
    for job in plan.jobs:
        (tmp_path / files.PLAYED / job.name).touch()
    heard, played = threading.Event(), files.EpisodeQueue.played

    def hears() -> None:
        server._claimed("one")
        heard.set()

    def looks(queue: files.EpisodeQueue, job: files.SeedBatch) -> bool:
        if threading.current_thread() is threading.main_thread() and not heard.is_set():
            threading.Thread(target=hears).start()
            heard.wait(0.2)
        return played(queue, job)

    monkeypatch.setattr(files.EpisodeQueue, "played", looks)
    server.close()
    assert heard.wait(60.0)


@needs_pen
def test_another_bundle_under_the_same_name_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "policy.gguf"
    shutil.copy(PEN, bundle)
    queue = tmp_path / files.FOLDER
    files.EpisodeQueue(queue, "test").make()
    files.FarmPlan.of(TASK, [Variant(str(bundle), 8)], [(0, 1)]).write(queue)
    with bundle.open("ab") as file:
        file.write(b"\0")
    assert main(["eval", str(bundle), "--join", str(tmp_path), "--shards", "1"]) == 1
    assert "this bundle differs from the run's bundle" in capfd.readouterr().err


# ----------------------------------------------------------------------------- refusals


def test_one_head_for_a_folder(tmp_path: Path) -> None:
    with episode_log.sole(tmp_path), pytest.raises(SinewError, match=f"--join {tmp_path}` to help it"):
        campaign.run(TASK, [Variant("expert")], range(1), out=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--join", "nowhere"), "no run is active here; pass the folder of a running"),
        (("expert", "--join", "nowhere", "--episodes", "2"), "cannot be combined with --join"),
        (
            ("expert", "--batch", "4"),
            "batch: expected a bundle or a server that answers with chunks, got expert",
        ),
        (("vla-eval://127.0.0.1:1", "--batch", "4"), "batch: expected a bundle or a server"),
        (("pen", "--batch", "4", "--stream", "10:2"), "got a stream"),
        (("pen", "--batch", "4", "--realtime"), "--batch: expected simulated time"),
        (("pen", "--batch", "0"), "batch"),
        (("expert", "--env", "sinew/Pen-v0", "--listen", "7777"), "--listen: expected HOST:PORT, got '7777'"),
        (("expert", "--env", "sinew/Pen-v0", "--listen", "0.0.0.0:0"), "set a key in SINEW_API_KEY"),
        (("expert", "--listen", "127.0.0.1:0", "--realtime"), "--listen: expected simulated time"),
    ],
)
def test_mistakes_are_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_plan_that_is_none(tmp_path: Path) -> None:
    for text in ("", "[]", '{"format": 2}', '{"format": 1, "variants": 3}', "\0" * 100):
        (tmp_path / files.PLAN).write_text(text)
        with pytest.raises(SinewError, match="plan"):
            files.FarmPlan.read(tmp_path)
    good = files.FarmPlan.of(TASK, [Variant("expert")], [(0, 1), (0, 2)])
    good.write(tmp_path)
    assert files.FarmPlan.read(tmp_path) == good


def test_what_is_not_whole_is_played_again(tmp_path: Path) -> None:
    expert = Variant("expert", handover="aligned")
    plan = files.FarmPlan.of(TASK, [expert], [(0, seed) for seed in range(3)])
    queue = files.EpisodeQueue(tmp_path / files.FOLDER, "test")
    queue.make()
    good = campaign.run(TASK, [expert], range(3))[0]
    for job, episode in zip(plan.jobs, good, strict=True):
        queue.store(job, plan.keys[0], [episode])
    torn, empty, _ = (queue.folder / files.PLAYED / job.name for job in plan.jobs)
    torn.write_text(torn.read_text()[:100])
    empty.write_text("")
    assert queue.read(plan.jobs[0], plan.keys[0]) is None
    assert not torn.exists()
    assert set(shards.left_over(queue.folder)) == {(plan.keys[0], 2)}
    found = campaign.run(TASK, [expert], range(3), workers=2, out=tmp_path)
    assert content(found[0]) == content(good)
    assert sorted(outcomes(tmp_path)) == [0, 1, 2]


POISON = """
    import os
    import gymnasium
    from sinew_eval.sim.pen import PenEnv

    class Poison(PenEnv):
        def reset(self, *, seed=None, options=None):
            if seed == 2:
                WHAT
            return super().reset(seed=seed, options=options)

    gymnasium.register("Poison-v0", Poison, max_episode_steps=120)
"""


@needs_pen
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("os.kill(os.getpid(), 9)", "a shard died 2 times at seed 2, with exit code -9"),
        (
            "raise RuntimeError('the gripper is gone')",
            "(?s)a shard ended with an error:.*the gripper is gone",
        ),
    ],
)
def test_an_episode_that_always_ends_its_process_is_named(
    what: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poison.py").write_text(textwrap.dedent(POISON).replace("WHAT", what))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shards, "DEATHS", 2)
    task, out = Task("poison:Poison-v0"), tmp_path / "out"
    with pytest.raises(SinewError, match=message):
        campaign.run(task, [pen()], range(5), workers=2, out=out)
    assert 2 not in outcomes(out)


def test_a_key_without_batch_is_what_it_was() -> None:
    """Logs of runs before there were batches go on."""
    assert "batch" not in json.loads(key(TASK, Variant("expert")))
    assert Variant.from_dict(pen(batch=4, rename=("a=b",)).to_dict()) == pen(batch=4, rename=("a=b",))
