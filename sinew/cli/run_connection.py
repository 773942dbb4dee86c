"""Opens the source of action chunks for ``sinew run``: a server, a policy in this process, the action head of a
policy in this process, or a second policy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sinew_client import Client, ClientError, ServerError
from sinew_client.control import Frames, Servers, Settings
from sinew_client.control.requester import Call
from sinew_client.form import COMMANDS
from sinew_client.target import addresses_of

from sinew.cli.infer import running
from sinew.cli.options import RUNS, Runs, changed
from sinew.core import RTC, SinewError, progress
from sinew.engine.backend import either, engines_that
from sinew.processing.conditioning import MAX_SCALE

if TYPE_CHECKING:
    from sinew.policy import Policy

if TYPE_CHECKING:
    from sinew_client.arm.assist import Assist, AssistRule

log = logging.getLogger(__name__)

ASSIST_WHEN = "every:5"
ASSIST_TIMEOUT = 5.0
TIMEOUT = 2.0  # seconds to wait for an answer, unless the user sets another time
FIRST_TIMEOUT = 10.0  # seconds to wait for a server's first answer, because the server may be starting
Connection = tuple[dict[str, Any], dict[str, Any], Callable[[], Call]]


def open_connection(
    target: str,
    runs: Runs,
    split: str | None = None,
    key: str = "",
    frames: str = "raw",
    timeout: float = TIMEOUT,
) -> Connection:
    """Prepare the connection to a policy.

    Args:
        target: The policy: the address of a server, or a bundle that runs in this process.
        runs: Options of an engine, for a policy in this process.
        split: Address of a server that computes vision and prefix, while the action head runs in this process.
        key: Key of the server.
        frames: Encoding of the frames for the server.
        timeout: Seconds to wait for the server's first answer. With :data:`TIMEOUT`, the default, it is
            :data:`FIRST_TIMEOUT`.

    Returns:
        The policy's description, the server's or engine's description, and a function that opens a connection.
    """
    try:
        travelling = Frames(frames)
    except ValueError as error:
        raise SinewError(str(error).replace("frames", "frames_as", 1)) from error
    if addresses := addresses_of(target):
        if split is not None:
            raise SinewError(
                f"split: expected a bundle, because the action head runs in this process, got the server {target}"
            )
        served = ask_server(target, runs, key, FIRST_TIMEOUT if timeout == TIMEOUT else timeout)
        policy = served["policy"]
        return policy, served["server"], Servers(addresses, key, frames=travelling, policy=policy)
    if frames != "raw":
        raise SinewError(
            f"frames_as: expected a server, to which frames are sent, got the policy in this process {target}"
        )
    local, policy = load_here(target, runs)
    if split is not None:
        about = local.describe() | {
            "unguided": "a policy that is split between two machines cannot continue a running chunk",
            "unscaled": "a policy that is split between two machines reads only one prompt",
        }
        return policy, about, _split(local, split, key)
    local.warm_up()
    return policy, local.describe(), lambda: lambda observation, _: local.infer(observation).actions


def check_guidance(handover: str, policy: dict[str, Any], about: dict[str, Any]) -> None:
    """Check, before the robot moves, that the policy and its engine support the requested real-time chunking.

    If a server does not state whether it supports real-time chunking, the requests are sent to it anyway.

    Raises:
        SinewError: The policy or its engine does not support it.
    """
    method, _, settings = handover.partition(":")
    if method != "rtc":
        return
    if reason := about.get("unguided"):
        raise SinewError(
            f"--handover rtc: {reason}; aligned, ensemble and aggregate merge chunks of any policy"
        )
    trained = bool(policy.get("committed_rows"))
    kind = settings.partition(":")[0] or ("trained" if trained else "guided")
    if kind == "trained" and not trained:
        raise SinewError(
            "--handover rtc:trained: this policy was not trained to continue an action prefix; "
            "aligned, ensemble and aggregate merge chunks of any policy"
        )
    supported = about.get("guidance", RTC)
    if kind in RTC and kind not in supported:
        offers = " or ".join(f"rtc:{name}" for name in supported)
        raise SinewError(
            f"--handover: expected {offers} on engine {about.get('engine')}, got rtc:{kind}; engine"
            f" {either(engines_that(guides=RTC))} takes all"
        )


def conditioned(
    connect: Callable[[], Call], about: dict[str, Any], advantage: str | None, scale: float | None
) -> Callable[[], Call]:
    """Return a function that opens connections like ``connect``, and adds an advantage and a guidance scale to each
    request.

    If a server does not state whether it supports them, the requests are sent to it anyway.

    Raises:
        SinewError: The policy or its engine does not support them. The error is raised before the robot moves.
    """
    fields = {"advantage": advantage, "guidance_scale": scale}
    fields = {name: value for name, value in fields.items() if value is not None}
    if not fields:
        return connect
    if scale is not None and not 0 <= scale <= MAX_SCALE:
        raise SinewError(f"guidance_scale: expected a number from 0 to {MAX_SCALE:g}, got {scale:g}")
    labels = about.get("advantages")
    if labels is not None:
        if not labels:
            raise SinewError(
                f"{next(iter(fields))}: expected none for this policy, whose prompt has no place for an advantage"
            )
        if advantage and advantage not in labels:
            raise SinewError(f"advantage: expected one of {', '.join(labels)}, got {advantage!r}")
        if scale is not None and not (about.get("usual_advantage") if advantage is None else advantage):
            raise SinewError(
                f"guidance_scale needs advantage; also pass --set advantage=LABEL with one of {', '.join(labels)}"
            )
    if scale not in (None, 0, 1) and (reason := about.get("unscaled")):
        raise SinewError(f"guidance_scale: {reason}")
    return asking(connect, lambda: fields)


def asking(
    connect: Callable[[], Call], more: Callable[[], dict[str, Any]], latencies: list[float] | None = None
) -> Callable[[], Call]:
    """Return a function that opens connections like ``connect``, and adds further fields to each request.

    ``latencies`` is a list to which the milliseconds of each answer are appended.
    """

    def opened() -> Call:
        call = connect()

        def ask(observation: Mapping[str, Any], seconds: float) -> Any:
            begun = time.perf_counter()
            answer = call({**observation, **more()}, seconds)
            if latencies is not None:
                latencies.append(round(1e3 * (time.perf_counter() - begun), 3))
            return answer

        ask.close = getattr(call, "close", lambda: None)  # type: ignore[attr-defined]
        return ask

    return opened


def assist_rule(target: str, address: str | None, when: str, deadline: float) -> AssistRule | None:
    """Return the rule that decides when the larger policy on a server (option assist) gets a request; None without
    such a policy.

    Raises:
        SinewError: There are settings of assist without assist, or the rule is not valid.
    """
    if address is None:
        for flag, changed_value in (("when", when != ASSIST_WHEN), ("timeout", deadline != ASSIST_TIMEOUT)):
            if changed_value:
                raise SinewError(f"assist_{flag} needs assist")
        return None
    if addresses_of(target):
        raise SinewError(
            f"assist: expected a policy in this process, which the server's policy assists, got the server {target}"
        )
    from sinew_client.arm.assist import parse_assist

    with SinewError.at("assist_when", ValueError):
        return parse_assist(when)


def open_assist(
    address: str,
    rule: AssistRule,
    deadline: float,
    near: Callable[[], Call],
    policy: Mapping[str, Any],
    settings: Settings,
    key: str = "",
) -> Assist:
    """Return a function that opens connections to two policies: ``near`` in this process, and the larger policy at
    ``address``, which assists it.

    ``key`` is the key of the server of the larger policy.
    """
    from sinew_client.arm.assist import Assist

    try:
        far = ask_server(address, key=key)["policy"]
    # The robot also works without the larger policy on the server, and sends requests to it later.
    except ClientError as error:
        log.warning("assist %s: %s", address, error)
    else:
        for name in ("state", "action"):
            if far[name]["dim"] != policy[name]["dim"]:
                raise SinewError(
                    f"assist: expected {policy[name]['dim']} numbers of {name}, got {far[name]['dim']}"
                )
    # The larger policy on the server may have other cameras, but its actions must be commands of the same robot.
    servers = Servers(address, key, without=("time",), policy=policy, parts=COMMANDS)
    return Assist(near, servers, rule, settings.hz, deadline, settings.parse_motion())


def load_here(target: str, runs: Runs, **options: Any) -> tuple[Policy, dict[str, Any]]:
    """Load a policy in this process. Return it and its description, with its limits.

    ``options`` are further options of ``sinew.load``.
    """
    from sinew.policy import load

    with progress.task(f"loading {target}"):
        local = load(target, **runs.keywords(), **options)
    log.info("%s", running(local))
    return local, local.metadata()["policy"]


def ask_server(
    target: str, runs: Runs = RUNS, key: str = "", timeout: float = FIRST_TIMEOUT
) -> dict[str, Any]:
    """Request a server's description of itself and its policy, and return it. Wait at most ``timeout`` seconds.

    Raises:
        SinewError: There are options of an engine. Only the server itself can have such options.
    """
    if (flag := changed(runs)) is not None:
        raise SinewError(f"{flag}: expected a policy that is run here, got the server {target}")
    with Client(target, timeout=timeout, api_key=key) as client:
        return client.metadata()


def _split(local: Policy, address: str, key: str) -> Callable[[], Call]:
    """Return a function that opens connections to the server that computes vision and prefix. The server must be
    reachable and have the same bundle.
    """
    from sinew.stream.split import SplitCalls

    opener = SplitCalls(local, address, key)
    try:
        opener().close()
    except ServerError as error:
        if error.code != "unknown_policy":
            raise
        raise SinewError(
            f"split {address}: {error.message} (a server has contexts where it is started with --context)"
        ) from error
    return opener
