"""Open what gives ``sinew run`` its chunks: a server, a policy here, its head here, or a second opinion."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sinew_client import Client, ClientError
from sinew_client.control import Assist, AssistRule, Servers, Settings, parse_assist
from sinew_client.control.requester import Call
from sinew_client.control.settings import LARGEST_CHUNK
from sinew_client.policy import is_address
from sinew_client.protocol import MAX_ROWS

from sinew import progress
from sinew.auth import key_from_environment
from sinew.cli.infer import running
from sinew.cli.options import RUNS, Runs
from sinew.core import RTC, SinewError

if TYPE_CHECKING:
    from sinew.policy import Policy

log = logging.getLogger(__name__)

ASSIST_WHEN = "every:5"
Connection = tuple[dict[str, Any], dict[str, Any], Callable[[], Call]]


def open_connection(target: str, runs: Runs, split: str | None = None) -> Connection:
    """Return what the policy says about itself, what is said about what runs it, and what opens a connection to it.
    split: the server of the first half of a policy whose head runs here."""
    if is_address(target):
        if split is not None:
            raise SinewError(
                f"--split: expected the bundle here, whose head runs here, got the server {target}"
            )
        if runs != RUNS:
            raise SinewError("engine, provider, device and dtype belong to the server; start it with them")
        served = _served(target)
        opener = Servers(target.split(","), key_from_environment(), max_rows=_most_rows(served["policy"]))
        return served["policy"], served["server"], opener
    from sinew.policy import load
    from sinew.serve.safety import Safety

    with progress.task(f"loading {target}"):
        local = load(target, **runs.keywords())
    log.info("%s", running(local))
    policy = local.spec.to_dict()
    policy["action"]["limits"] = Safety(local.processor).limits()
    if split is not None:
        return policy, {"unguided": "a policy in two places does not continue chunks"}, _split(local, split)
    local.warm_up()
    return policy, local.describe(), lambda: lambda observation, _: local.infer(observation).actions


def check_guidance(handover: str, policy: dict[str, Any], about: dict[str, Any]) -> None:
    """Raise :class:`SinewError` for real-time chunking that this policy, or what runs it, does not do: before the robot
    moves. A server that does not say is asked as it comes."""
    method, _, settings = handover.partition(":")
    if method != "rtc":
        return
    if reason := about.get("unguided"):
        raise SinewError(f"--handover rtc: {reason}")
    trained = bool(policy.get("committed_rows"))
    kind = settings.partition(":")[0] or ("trained" if trained else "guided")
    if kind == "trained" and not trained:
        raise SinewError("--handover rtc:trained: this policy was not trained to continue committed rows")
    known = about.get("guidance", RTC)
    if kind in RTC and kind not in known:
        offers = " or ".join(f"rtc:{name}" for name in known)
        raise SinewError(
            f"--handover: expected {offers} on engine {about.get('engine')}, got rtc:{kind}; engines eager and plan"
            " take all"
        )


def assist_rule(target: str, address: str | None, when: str) -> AssistRule | None:
    """Return when the far policy is asked; None where there is none."""
    if address is None:
        return None
    if is_address(target):
        raise SinewError(
            f"--assist: expected a policy here, which the far one assists, got the server {target}"
        )
    try:
        return parse_assist(when)
    except ValueError as error:
        raise SinewError(f"--assist-when: {error}") from error


def open_assist(
    address: str,
    rule: AssistRule,
    deadline: float,
    near: Callable[[], Call],
    policy: dict[str, Any],
    settings: Settings,
) -> Assist:
    """Return what opens connections to ``near`` with the policy at ``address`` beside it."""
    try:
        far = _served(address)["policy"]
    except ClientError as error:  # the robot can do without, and asks again later
        log.warning("--assist %s: %s", address, error)
    else:
        for name in ("state", "action"):
            if far[name]["dim"] != policy[name]["dim"]:
                raise SinewError(
                    f"--assist: expected {policy[name]['dim']} numbers of {name}, got {far[name]['dim']}"
                )
    servers = Servers(address.split(","), key_from_environment(), without=("time",))
    return Assist(near, servers, rule, settings.hz, deadline, settings.parse_motion())


def _served(target: str) -> dict[str, Any]:
    with Client(target.split(","), timeout=10.0, api_key=key_from_environment()) as client:
        return client.metadata()


def _most_rows(policy: dict[str, Any]) -> int:
    """Return how many rows an answer may have."""
    return max(MAX_ROWS, min(int(policy.get("chunk_size") or 0), LARGEST_CHUNK))


def _split(local: Policy, address: str) -> Callable[[], Call]:
    """Return what opens connections to the other half, which has to be there and of the same file."""
    from sinew.stream.split import SplitCalls

    opener = SplitCalls(local, address, key_from_environment())
    opener().close()
    return opener
