"""``sinew serve``: one bundle on one or more wires, until a signal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal
from weakref import WeakSet

from cyclopts import Parameter, validators

from sinew import hints
from sinew.auth import api_key_of
from sinew.cli import terminal
from sinew.cli.options import CAMERAS, RUNS, Cameras, Runs
from sinew.cli.serve_policy import Change, changer, loader, parse_policies, preparation, replayer
from sinew.core import SinewError, VectorSpec
from sinew.serve.process import (
    GRACE_S,
    HOPELESS,
    Process,
    connections_within,
    raise_descriptor_limit,
    tell_of_crashes,
)
from sinew.serve.supervise import STUCK_S, Supervisor
from sinew.serve.transport.listen import ARRIVAL_S, Listen, reachable
from sinew.serve.wires import open_wires, parse, servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sinew.policy import Policy
    from sinew.records.background_writer import BackgroundWriter
    from sinew.serve.fleet.remote import RemotePolicy
    from sinew.serve.prepare import Preparation
    from sinew.serve.replay import Replay
    from sinew.serve.scheduler import Scheduler
    from sinew.serve.wire import Listener

logger = logging.getLogger(__name__)

TOLD_S = 60.0  # between two lines that tell of an access log that cannot be written


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may make the server hold and do.

    Args:
        queue: requests that may wait for the running one, of one client two of them; more are refused as busy.
        max_batch: requests of several robots that are computed at once where they fit together (docs/fleet.md): a
            number, or auto, which measures at the start what pays. With 1 no answer depends on who else asks.
        memory_gib: of all policies in memory together, by `sinew perf fit`'s model; one that does not fit beside the
            others is not loaded. The machine's memory if absent (docs/fleet.md).
        max_connections: open at once, for each wire.
        arrival_s: seconds from a request's first byte to its last; then the connection ends (lerobot: 10 of its own).
        max_megapixels: of one request, all frames together; 16 times the policy's cameras, at least 16, if absent.
        stuck_s: a request that computes for longer makes the server unhealthy, and after twice the time it exits
            with code 70; 0: never.
        action_limits: what happens to actions far outside of the policy's statistics: refuse, clamp or off.
        action_margin: how far that is, in half widths of the statistics' range from its middle.
        state_margin: the same for states, which are refused.
        max_age: seconds; observations whose `time` (Unix seconds) is longer ago are refused, and so are their answers.
        allow_origin: of web pages that may send requests, as browsers write it (https://host:port); repeatable.
        allow_host: a name of this server beside the machine's own, for the browsers that open its page; repeatable.
    """

    queue: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 64
    max_batch: Annotated[int, Parameter(validator=validators.Number(gte=1))] | Literal["auto"] = 1
    memory_gib: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None
    max_connections: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 256
    arrival_s: Annotated[float, Parameter(validator=validators.Number(gt=0))] = ARRIVAL_S
    max_megapixels: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None
    stuck_s: Annotated[float, Parameter(validator=validators.Number(gte=0))] = STUCK_S
    action_limits: Literal["refuse", "clamp", "off"] = "refuse"
    action_margin: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 10.0
    state_margin: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 20.0
    max_age: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None
    allow_origin: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    allow_host: Annotated[tuple[str, ...], Parameter(negative="")] = ()


def serve(
    bundle: Path | None = None,
    /,
    *,
    replay: Path | None = None,
    replay_latency: Literal["recorded", "none"] = "recorded",
    policy: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    context: Annotated[tuple[Literal["fp32", "bf16", "int8"], ...], Parameter(negative="")] = (),
    wire: Annotated[list[str] | None, Parameter(negative="")] = None,
    host: str = "127.0.0.1",
    cameras: Cameras = CAMERAS,
    runs: Runs = RUNS,
    threads: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    deadline_ms: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    api_key_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    record: Path | None = None,
    rerun: str | None = None,
    access_log: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    dashboard: Literal["auto", "on", "off"] = "auto",
    prepare: bool = True,
    verbose: Annotated[bool, Parameter(negative="")] = False,
    bounds: Bounds = Bounds(),
) -> int:
    """Serve a bundle to robot clients over one or more wires, until SIGINT or SIGTERM.

    The ports are taken before the model is loaded; requests that come early are answered once it is warm. The
    first signal stops the server between two stages of the running inference, the second one at once. Where SIGINT was
    ignored at the start (`sinew serve ... &` in a script) it stays ignored; SIGTERM, which `kill` sends, always counts.

    Args:
        bundle: a bundle, a folder of `sinew export`, a checkpoint or training run, or a name of the hub.
        replay: folder that --record wrote: answer with its chunks, session by session, in order. Nothing is computed,
            and every reply says so. A bundle beside it gives names, units and checks; its weights are not read.
        replay_latency: recorded: take as long as the recorded inferences did; none: answer at once.
        policy: NAME=SOURCE, repeatable: further policies, which clients ask by name (HOST:PORT/NAME, or docs/fleet.md).
        context: repeatable: answer under the name context.FORM with what the head needs, floats in this form; robots
            run the head themselves (docs/fleet.md).
        wire: NAME or NAME:PORT, repeatable: native (5555), openpi (8000), evo1 (9000), http (8000), groot (5555),
            lerobot (8080); native and openpi if absent. Port 0 picks a free one.
        host: address to listen on; anything but loopback is open to every machine that can reach it.
        threads: for compute; chosen from the cores of this process if absent.
        deadline_ms: refuse requests that would begin later than this after their arrival.
        api_key_file: a file with the key that clients must send; SINEW_API_KEY in the environment if absent.
        tls_cert: PEM file; encrypts openpi, http and lerobot.
        tls_key: PEM file.
        record: folder for requests and replies, for `sinew client --replay`.
        rerun: requests and replies for Rerun's viewer: a file NAME.rrd, or the address of a viewer that is running,
            rerun+http://HOST:9876/proxy (unencrypted). Needs the extra `rerun`.
        access_log: file for one JSON line per request, or - for standard error.
        dashboard: a page at / of the openpi and http ports; auto: on loopback, or where a key is wanted.
        prepare: where an engine may be faster than the one that auto could start at once, export it in the background,
            prove and measure it, and let it take over between two chunks if it is (docs/engines.md); --no-prepare stays
            with what starts at once.
        verbose: log more.
    """
    set_up_logs(verbose)
    with access_logging(access_log):
        raise_descriptor_limit()
        tell_of_crashes()
        ports = parse(wire or ())
        listen = Listen(
            host=host,
            max_connections=connections_within(bounds.max_connections, servers(ports)),
            arrival_s=bounds.arrival_s,
            tls_cert=tls_cert,
            tls_key=tls_key,
            origins=bounds.allow_origin,
            hosts=bounds.allow_host,
        )
        listen.tls()  # refuses unusable files before anything is loaded
        viewer = None
        if rerun is not None:
            from sinew.records.rerun_log import target_of

            viewer = target_of(rerun)
        api_key = api_key_of(api_key_file)
        # Elsewhere anybody who reaches the port would see the robot's cameras.
        shown = dashboard == "on" or (dashboard == "auto" and (listen.is_loopback or bool(api_key)))
        listen = replaced(listen, dashboard=shown)
        options = runs.keywords() | cameras.keywords() | {"prepared": prepare}
        make = (
            loader(bundle, options, threads)
            if replay is None
            else replayer(replay, bundle, cameras, runs, replay_latency == "recorded")
        )
        more = parse_policies(policy)
        if (more or context) and replay is not None:
            raise SinewError("--policy, --context: a recording is replayed alone")
        for source in more.values():
            loader(Path(source), options, threads)
        change = (
            None
            if replay is not None or bundle is None
            else changer(bundle, options, threads, bounds, bounds.memory_gib)
        )
        wires = open_wires(ports, listen)
        process = Process(wires)
        finished = True
        try:
            if not listen.is_loopback:
                warn_of_exposure(host, wires, bool(api_key), tls_cert is not None)
            recorders = _recorders(record, viewer)
            with process.signals():
                finished = _load_and_run(
                    process,
                    make,
                    bounds,
                    api_key,
                    deadline_ms,
                    recorders,
                    change,
                    more,
                    context,
                    partial(preparation, bundle, options, threads)
                    if prepare and bundle is not None and replay is None and not context
                    else None,
                )
            for recorder in recorders.values():
                recorder.close()
        finally:
            process.close()
        if not finished:
            # A stage of a big model may take seconds and nothing can interrupt it. There is nothing to save,
            # and a thread inside torch while the interpreter is taken down would crash it.
            logger.info("leaving while a stage is still running")
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0 if process.hopeless is None else HOPELESS)
        return 0 if process.hopeless is None else HOPELESS


def _recorders(record: Path | None, viewer: Path | str | None) -> dict[str, BackgroundWriter]:
    """Return what takes requests and answers, by the service's names of them."""
    from sinew.records.recorder import Recorder
    from sinew.records.rerun_records import RerunRecorder

    found: dict[str, BackgroundWriter] = {}
    if viewer is not None:
        found["rerun"] = RerunRecorder(viewer)
    if record is not None:
        found["recorder"] = Recorder(record)
    return found


def _load_and_run(
    process: Process,
    make: Callable[[], Policy | Replay],
    bounds: Bounds,
    api_key: str,
    deadline_ms: float | None,
    recorders: dict[str, BackgroundWriter],
    change: Change | None,
    more: dict[str, str],
    contexts: Sequence[str],
    faster: Callable[[int | None], Preparation | None] | None = None,
) -> bool:
    """Returns False when a thread is still inside the model."""
    supervisor = Supervisor(bounds.stuck_s)
    begun: WeakSet[Scheduler] = WeakSet()  # an exchanged policy is not kept by it
    try:
        from sinew.serve.deploy import deploy
        from sinew.serve.device_lock import DeviceLock
        from sinew.serve.service import Service

        addresses = ", ".join(wire.address for wire in process.wires)
        logger.info("listening on %s", addresses)
        policy = make()
        for recorder in recorders.values():
            recorder.describe(policy.spec)
        device_lock = DeviceLock()
        deployment = deploy(policy, bounds, supervisor, device_lock, begun)
        service = Service(
            deployment,
            api_key=api_key,
            deadline_ms=deadline_ms,
            **recorders,
        )
        if change is not None:
            service.swapper = change(service, supervisor, device_lock, begun)
            for name, source in more.items():
                service.swapper.load(name, source)
        if contexts:
            from sinew.serve.contexts import add

            add(service, contexts, device_lock, begun)
        work = None if faster is None or service.swapper is None else faster(service.swapper.budget)
        if work is not None:
            from sinew.serve.prepare import Preparer

            service.preparing = Preparer(service, work)
        ready = ready_text(policy, tuple(process.wires), more)
        del policy, deployment  # the service has them, until they are exchanged
        with hints.read_by("client"):
            return process.run(service, lambda: say(ready))
    except KeyboardInterrupt:
        logger.info("stopped before the server was ready")
        for scheduler in begun:
            scheduler.stop()
        return all(scheduler.join(GRACE_S) for scheduler in begun)


def ready_text(
    policy: Policy | Replay | RemotePolicy,
    wires: Sequence[Listener],
    more: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The addresses, what the bundle expects, and for each wire a program that asks for one chunk."""
    spec, about = policy.spec, policy.describe()
    sizes = "other sizes are resized" if spec.resizes_frames else "exactly this size"
    cameras = [
        f"{camera.name}: uint8 [{camera.height}, {camera.width}, 3] RGB, {sizes}" for camera in spec.cameras
    ]
    lines = [
        f"ready on {' '.join(reachable(wire.address) for wire in wires)}",
        f"  policy   {spec.name} ({spec.architecture}), {about['dtype']} on {about['device']}",
        f"  engine   {about['engine']}: {about['engine_reason']}",
        *(f"  {'cameras' if index == 0 else '':7}  {camera}" for index, camera in enumerate(cameras)),
        f"  state    {_vector(spec.state)}",
        f"  action   {_vector(spec.action)}; chunks of {spec.chunk_size}",
        *(f"  also     {name}: {source}; asked at HOST:PORT/{name}" for name, source in more.items()),
    ]
    pages = [page for wire in wires if (page := wire.dashboard)]
    lines += [f"  page     {reachable(page)} shows what it does" for page in pages]
    for wire in wires:
        program = [f"    {line}" for line in wire.guide(spec)]
        lines += [f"  {wire.name} at {reachable(wire.address)}; ask it with", "", *program, ""]
    return "\n".join(lines)


def _vector(spec: VectorSpec) -> str:
    return f"{spec.dim} numbers" + (f": {', '.join(spec.labels)}" if spec.labels else "")


def say(text: str) -> None:
    """Print to standard output; whoever read it may have gone, which is no reason to stop serving."""
    try:
        sys.stdout.write(
            f"{terminal.shown(text)}\n"
        )  # at once: PYTHONUNBUFFERED makes two of what print writes
        sys.stdout.flush()
    except OSError as error:
        logger.warning("nobody reads what this server prints: %s", error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's end flushes once more


def warn_of_exposure(host: str, wires: Sequence[Listener], key: bool, tls: bool) -> None:
    if not key:
        logger.warning("%s is reachable from other machines, and requests are not authenticated", host)
    plain = [wire.name for wire in wires if not tls or wire.address.startswith("tcp://")]
    if plain:
        logger.warning("frames, actions and keys travel unencrypted on %s", ", ".join(plain))


def set_up_logs(verbose: bool) -> None:
    terminal.log(
        logging.DEBUG if verbose else logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("aiohttp.access", "grpc._cython.cygrpc", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


class _Lossy(logging.Handler):
    """Tells of lines that could not be written, a full disk's as a rule, once in ``TOLD_S``: by itself logging prints a
    traceback for each."""

    lost, told = 0, float("-inf")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        self.lost += 1
        if (now := time.monotonic()) - self.told >= TOLD_S:
            self.told = now
            logger.warning("--access-log: %d lines could not be written: %s", self.lost, sys.exc_info()[1])


class _AccessFile(_Lossy, logging.FileHandler): ...


class _AccessStream(_Lossy, logging.StreamHandler): ...


@contextlib.contextmanager
def access_logging(path: str | None) -> Iterator[None]:
    """Write the access log to ``path`` (- is standard error, None is nowhere) inside, and leave its logger as it was:
    loggers belong to the process, which may do other things after this."""
    access = logging.getLogger("sinew.access")
    before = access.propagate, access.disabled, access.level
    handler: logging.Handler = logging.NullHandler()
    if path is not None:
        try:
            handler = _AccessStream() if path == "-" else _AccessFile(path)
        except OSError as error:
            raise SinewError(f"--access-log {path}: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)
    access.propagate, access.disabled = False, path is None
    access.setLevel(logging.INFO)
    try:
        yield
    finally:
        access.removeHandler(handler)
        with contextlib.suppress(OSError):  # the disk is full still; it was told
            handler.close()
        access.propagate, access.disabled = before[:2]
        access.setLevel(before[2])
