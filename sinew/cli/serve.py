"""``sinew serve``: serve a bundle with one or more protocols, until a signal."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from sinew.cli import terminal
from sinew.cli.options import (
    CAMERAS,
    RUNS,
    Cameras,
    Count,
    CountIfAny,
    Flag,
    NotNegative,
    Positive,
    PositiveIfAny,
    Runs,
    Texts,
)
from sinew.cli.serve_listen import LISTENING, REMOTE, Listening, Remote, set_up_logs, warn_of_exposure
from sinew.core import SinewError, hints, providers
from sinew.memory import counts_activations, memory_need
from sinew.serve.access_log import access_logging
from sinew.serve.launch import ServerLaunch, loader, recorders, swapper
from sinew.serve.limits import ServingLimits
from sinew.serve.policies import DEFAULT, check_name
from sinew.serve.process import HOPELESS, Process
from sinew.serve.supervise import STUCK_S
from sinew.serve.transport.greeting import ready_text
from sinew.serve.transport.listen import ARRIVAL_S
from sinew.serve.wires import open_wires

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sinew.policy import Policy
    from sinew.serve.prepare import Preparation
    from sinew.serve.replay import Replay

logger = logging.getLogger(__name__)


@Parameter(name="*", group="Limits")
@dataclass(frozen=True, slots=True)
class Bounds(ServingLimits):
    """Limits for the work and the memory that clients can cause.

    Args:
        queue: Maximum number of waiting requests. One client may have two of them. The server rejects
            further requests as busy.
        max_batch: Maximum number of requests of different robots that are computed together: a number, or
            auto, which measures at the start. With 1, no answer depends on other clients.
        keep_warm_s: If no request arrives for this many seconds, compute one inference of grey frames, again and
            again, so that clocks and caches stay warm. Costs the time of one inference per period, on the device and
            in power. A request cancels it between two stages. It clears what --reuse kept. Default: off.
        memory_gib: Memory budget for all loaded policies, in GiB. A policy that would exceed it is not
            loaded. Without the package sinew-perf, only weights count. Default: the memory of this machine.
        max_connections: Maximum number of open connections per protocol.
        arrival_s: Maximum time from a request's first byte to its last, in seconds. Then the server
            closes the connection. LeRobot's protocol has its own limit of 10 s.
        max_megapixels: Maximum size of all frames of one request together, in megapixels. Default: 16 for
            each camera of the policy.
        stuck_s: A request that computes for longer makes the server unhealthy. After twice this time the
            server exits with code 70. 0 disables this.
        action_limits: Treatment of actions far outside of the training statistics: refuse (reject), clamp
            or off.
        action_margin: Distance that counts as far outside, in half ranges of the training statistics,
            measured from their middle.
        state_margin: The same distance for states. The server rejects states outside of it.
        max_age: Maximum age of an observation by its `time` (Unix seconds), in seconds. The server
            rejects older ones and their answers.
        allow_origin: Origin of a web page that may send requests, as browsers write it
            (https://host:port). Repeatable.
    """

    queue: Count = 64
    max_batch: Count | Literal["auto"] = 1
    keep_warm_s: PositiveIfAny = None
    memory_gib: PositiveIfAny = None
    max_connections: Count = 256
    arrival_s: Positive = ARRIVAL_S
    max_megapixels: PositiveIfAny = None
    stuck_s: NotNegative = STUCK_S
    action_limits: Literal["refuse", "clamp", "off"] = "refuse"
    action_margin: Positive = 10.0
    state_margin: Positive = 20.0
    max_age: PositiveIfAny = None
    allow_origin: Texts = ()


def serve(
    bundle: Path | None = None,
    /,
    *,
    replay: Path | None = None,
    replay_latency: Literal["recorded", "none"] = "recorded",
    policy: Texts = (),
    adapter: Texts = (),
    context: Annotated[tuple[Literal["fp32", "bf16", "int8"], ...], Parameter(negative="")] = (),
    on: Listening = LISTENING,
    remote: Remote = REMOTE,
    cameras: Cameras = CAMERAS,
    runs: Runs = RUNS,
    threads: CountIfAny = None,
    record: Path | None = None,
    rerun: str | None = None,
    dashboard: Literal["auto", "on", "off"] = "auto",
    prepare: bool = True,
    reuse: Flag = False,
    bounds: Bounds = Bounds(),
) -> int:
    """Serve a policy to robot clients with one or more protocols, until SIGINT or SIGTERM.

    The server opens its ports before it loads the model. Requests that arrive early are answered after the warm-up.
    The first signal stops the server between two stages of the running inference, the second one immediately. If
    SIGINT was ignored at the start (`sinew serve ... &` in a script), it stays ignored. SIGTERM, which `kill`
    sends, always works.

    Args:
        bundle: Policy to serve: a bundle, a folder of `sinew export`, a checkpoint or training run, or a hub
            name.
        replay: Folder of --record. The server answers with its recorded chunks, session by session, and
            computes nothing. Every reply states this. An additional bundle provides names, units and checks.
        replay_latency: Latency of --replay: recorded (as long as the original inference took) or none.
        policy: Further policy, as NAME=SOURCE. Repeatable. Clients choose it by name (HOST:PORT/NAME).
        adapter: Adapter of the bundle, as NAME=FILE, made by `sinew convert --no-merge`. Repeatable. Requests
            choose an adapter by name. Requests without a name get the bundle itself.
        context: Also serve context.FORM: the data that the head needs, with floats in this form. Robots then
            compute the head themselves. Repeatable.
        threads: Compute threads. Default: chosen from the cores of this process.
        record: Folder in which requests and replies are recorded, for `sinew recording replay`.
        rerun: Send requests and replies to Rerun: a file NAME.rrd, or the address of a running viewer,
            rerun+http://HOST:9876/proxy (unencrypted). Needs the extra `rerun`.
        dashboard: Show the dashboard at / of the openpi and http ports: auto (on loopback, or if a key is
            required), on or off.
        prepare: Time the engines in the background, and export and verify those that need it. Switch to the
            fastest one between two chunks. Also compile the code that resizes frames. --no-prepare keeps the
            first engine.
        reuse: Keep image tokens and prefixes of observations that repeat byte for byte. The actions are the
            same, and take less time while cameras and state do not change.
    """
    set_up_logs(on.verbose)
    with access_logging(on.access_log):
        ports, listen, api_key = on.prepared(
            dashboard,
            max_connections=bounds.max_connections,
            arrival_s=bounds.arrival_s,
            origins=bounds.allow_origin,
            remote=remote.settings(),
        )
        viewer = None
        if rerun is not None:
            from sinew.records.viewers.rerun_log import target_of

            viewer = target_of(rerun)
        options = runs.keywords() | cameras.keywords() | {"prepared": prepare, "reuse": reuse}
        adapters, more = hints.pairs("--adapter", "NAME=FILE", adapter), named_policies(policy)
        if replay is not None:
            for flag, value in (
                ("--adapter", adapters),
                ("--policy", more),
                ("--context", context),
                ("--reuse", reuse),
            ):
                if value:
                    raise SinewError(f"{flag}: cannot be combined with --replay; omit one of the two")
            make: Callable[[], Policy | Replay] = _replayer(
                replay, bundle, cameras, runs, replay_latency == "recorded"
            )
        elif bundle is None:
            raise SinewError("expected a bundle or --replay RECORDS; pass one of them")
        else:
            make = loader(bundle, options, threads, adapters)
            for source in more.values():
                loader(Path(source), options, threads)
        launch = ServerLaunch(
            make,
            bounds,
            bounds.stuck_s,
            api_key,
            on.deadline_ms,
            policies=more,
            contexts=context,
            answering=partial(hints.read_by, "client"),
        )
        if bounds.memory_gib is not None and not counts_activations():
            logger.warning(
                "--memory-gib: only weights are counted. To count activations too, install torch and the package"
                " sinew-perf: %s",
                providers.how_to_install("sinew-perf"),
            )
        if replay is None and bundle is not None:
            change = partial(
                swapper,
                bundle=bundle,
                options=options,
                threads=threads,
                bounds=bounds,
                memory_gib=bounds.memory_gib,
                need=partial(memory_need, apart=True),
            )
            launch = replace(launch, change=change)
            if prepare and not context and not adapters:
                launch = replace(launch, faster=partial(_faster, bundle, options, threads))
        wires = open_wires(ports, listen)
        process = Process(wires)
        try:
            if not listen.is_loopback:
                warn_of_exposure(on.host, wires, bool(api_key), on.tls_cert is not None)
            launch = replace(launch, recorders=recorders(record, viewer))
            with process.signals():
                finished = launch.run(
                    process,
                    lambda policy: partial(
                        say,
                        ready_text(
                            policy.spec,
                            policy.describe(),
                            tuple(process.wires),
                            more,
                            bool(api_key),
                            on.verbose,
                        ),
                    ),
                )
        finally:
            process.close()
        if not finished:
            # Exit at once. A stage of a large model may take seconds and cannot be interrupted, nothing must be saved,
            # and a thread that computes in torch would crash while the interpreter shuts down.
            logger.info("exiting while an inference stage is still running")
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0 if process.hopeless is None else HOPELESS)
        return 0 if process.hopeless is None else HOPELESS


def _faster(
    bundle: Path, options: dict[str, Any], threads: int | None, budget: int | None
) -> Preparation | None:
    # This import loads the service, which must not happen before the ports are open.
    from sinew.serve.prepare import preparation

    return preparation(bundle, options, threads, budget)


def _replayer(
    records: Path, bundle: Path | None, cameras: Cameras, runs: Runs, latency: bool
) -> Callable[[], Replay]:
    """Read the recording, without importing torch. Return a function that returns the recording.

    Args:
        records: The folder of the recording.
        bundle: A bundle that provides names, units and checks; None for none.
        cameras: Names of the cameras.
        runs: Options of engines, which a replay rejects.
        latency: True to answer with the recorded latency.
    """
    from sinew.bundle.rename import rename_cameras
    from sinew.policy import open_bundle
    from sinew.serve.replay import Replay

    if runs != RUNS:
        raise SinewError(
            "--replay: omit --engine, --provider, --device and --dtype, because a replay computes nothing"
        )
    if bundle is None and cameras.rename:
        raise SinewError(
            "--rename: pass the bundle together with --replay, because a recording does not name its cameras"
        )
    manifest = None
    if bundle is not None:
        manifest = open_bundle(bundle).manifest
        manifest = replace(manifest, spec=rename_cameras(manifest.spec, cameras.keywords()["rename"]))
    recording = Replay(records, manifest, latency=latency, **cameras.allowed)
    return lambda: recording


def named_policies(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``--policy`` into name -> source. Raises :class:`SinewError` for an invalid or repeated name."""
    sources = hints.pairs("--policy", "NAME=SOURCE", texts)
    for name in sources:
        check_name(name)
        if name == DEFAULT:
            raise SinewError(f"--policy: {name} is the name of the first policy; choose another name")
    return sources


def say(text: str) -> None:
    """Print to standard output. If the reading program has ended, the server continues."""
    try:
        # Write text and line end at once. With PYTHONUNBUFFERED, print would write them separately.
        sys.stdout.write(f"{terminal.shown(text)}\n")
        sys.stdout.flush()
    except OSError as error:
        logger.warning("standard output is closed, and further lines are discarded: %s", error)
        # Python flushes standard output once more at its end, so give it a file that accepts all output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
