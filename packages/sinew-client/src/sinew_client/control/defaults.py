"""The default method of chunk merging, and the default rule for the next request.

``sinew run``, ``sinew eval``, ``sinew demo``, the ROS bridge and the LeRobot plugin all use these defaults.
docs/late-answers.md has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from sinew_client.control.handover import parse_handover
from sinew_client.control.replan import parse_rule

AUTO = "auto"
HANDOVER = AUTO
# By default the next chunk is requested when a quarter of the chunk has been executed, such as 8 of 32 actions. If the
# robot executes more actions before the next request, it fails more often. In the simulated tasks "blocks" and "shove"
# this begins at 16 of 32 actions, in the task "pen" at 8 of 24 actions.
REPLAN = "queue:0.75"

# With this motion, the loop sends actions unchanged, even if the policy states another motion.
AS_IS: Mapping[str, Any] = {"kind": "as is"}
WAITS, GOES_ON = "freeze", "aligned"


@dataclass(frozen=True)
class Choice:
    """The chosen method of chunk merging and the chosen rule for the next request, with the reasons.

    Attributes:
        handover: The method of chunk merging, in the form that ``parse_handover`` reads.
        motion: What actions are relative to, as ``Settings.motion``; None sends the actions unchanged.
        reason: Why this method was chosen, for the log.
        replan: The rule for the next request, in the form that ``parse_rule`` reads.
        replan_reason: Why this rule was chosen, or how it differs from the checkpoint's own setting; "" otherwise.
    """

    handover: str
    motion: Mapping[str, Any] | None
    reason: str
    replan: str = REPLAN
    replan_reason: str = ""

    def __str__(self) -> str:
        return f"hand-over {self.handover}: {self.reason}"


def choose(
    handover: str = AUTO,
    motion: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
    refined: bool = False,
    robot: Mapping[str, Any] | None = None,
    replan: str = REPLAN,
) -> Choice:
    """Choose the method of chunk merging and the motion for a policy and a robot.

    ``auto`` chooses by the motion:

    * If actions are targets (absolute, or relative to the observed state), the robot continues during a request,
    because a late target is still right.
    * If actions are delta actions, or if the motion is unknown, the robot waits for the next chunk.
    * If the checkpoint was trained for temporal ensembling, the method is ``ensemble``, with a request in every step.

    Args:
        handover: The user's method, or "auto".
        motion: The user's motion; None takes the policy's motion, or else the robot's motion.
        policy: The policy's description, with its own ``motion``.
        refined: True with an edge adapter, which computes the actions of every control step.
        robot: The motion that the robot's driver states.
        replan: The user's rule for the next request.

    Returns:
        The choice with its reasons.

    Raises:
        ValueError: The method is unknown.
    """
    policy_motion = stated(policy)
    effective = motion if motion is not None else policy_motion or robot
    kind = str((effective or AS_IS).get("kind", "as is"))
    who = (
        "--motion states"
        if motion is not None
        else "the policy states"
        if policy_motion
        else "the robot's driver states"
    )
    blend = ensemble_of(policy)
    if handover != AUTO:
        name, reason = handover, "chosen by the user"
        if blend is not None and parse_handover(name).method != "ensemble":
            reason += f"; the checkpoint was trained for ensemble:{blend:g} (temporal_ensemble_coeff)"
    elif refined:
        name, reason = (
            GOES_ON,
            "the edge adapter computes an action for every step, however late the chunk is",
        )
    elif blend is not None:
        name = f"ensemble:{blend:g}"
        reason = f"the checkpoint was trained for temporal ensembling (temporal_ensemble_coeff {blend:g})"
    elif kind in ("absolute", "relative"):
        name, reason = (
            GOES_ON,
            f"{who} that actions are {kind} targets, so a late action still leads to the right position",
        )
    elif kind == "offsets":
        name, reason = (
            WAITS,
            f"{who} that actions are delta actions, which add up wrongly if a chunk is entered late",
        )
    else:
        name, reason = WAITS, "the reference of the actions is unknown, and waiting is right for all kinds"
        reason += "; set --motion to let the robot continue during a request"
    timed = parse_handover(name).timed
    if motion is None and kind == "offsets" and (refined or not timed):
        # Without a motion the loop sends the actions unchanged. That is right for delta actions here, because the chunk
        # is executed from its first action on, or an edge adapter converts the actions itself.
        effective = None
    if blend is not None and handover == AUTO and not refined and replan == REPLAN:
        return Choice(
            name,
            effective,
            reason,
            "1",
            "every step, because temporal ensembling averages the chunks of all steps",
        )
    if chunking := unlike_chunking(name, policy):
        reason += f"; {chunking}"
    return Choice(name, effective, reason, replan, _unlike_checkpoint(replan, policy))


def ensemble_of(policy: Mapping[str, Any] | None) -> float | None:
    """Return the coefficient of temporal ensembling in a policy's description; None if there is none."""
    coefficient = (policy or {}).get("temporal_ensemble")
    return None if coefficient is None else float(coefficient)


def unlike_chunking(handover: str, policy: Mapping[str, Any] | None) -> str:
    """Write a note if a checkpoint was made for real-time chunking but is used with another method.

    Args:
        handover: The chosen method of chunk merging.
        policy: The policy's description.

    Returns:
        A sentence with the options for real-time chunking; "" if no note is necessary.
    """
    stated = (policy or {}).get("real_time_chunking")
    if not stated or parse_handover(handover).method == "rtc":
        return ""
    size, horizon = int((policy or {}).get("chunk_size") or 0), int(stated["execution_horizon"])
    trained = stated.get("mode") == "trained"
    follows = f"--handover rtc:no-jacobian:{stated['schedule']}:{stated['max_guidance_weight']:g}"
    if trained:
        follows = "--handover rtc:trained"
    elif 0 < horizon < size:
        # The loop guides all actions except the last N, where N is the number of actions it executes per chunk. So
        # this N gives the checkpoint's execution horizon.
        follows += f" --replan {size - horizon}"
    return (
        f"the checkpoint was made for real-time chunking (rtc_config: {stated.get('mode', 'guided')}, {horizon}"
        f" rows, {stated['schedule']}, {stated['max_guidance_weight']:g}), and {follows} does so"
    )


def _unlike_checkpoint(replan: str, policy: Mapping[str, Any] | None) -> str:
    """Return a note for the user if the rule ``replan`` differs from the checkpoint's ``n_action_steps`` (executed
    actions per chunk); "" if they are equal.
    """
    rows, size = int((policy or {}).get("n_action_steps") or 0), int((policy or {}).get("chunk_size") or 0)
    try:
        same = not 0 < rows <= size or parse_rule(replan).horizon(size) == rows
    except ValueError:  # `Settings` rejects the invalid rule later, with a message
        same = True
    if same:
        return ""
    return f"the checkpoint was evaluated with n_action_steps {rows}; --replan {rows} does the same"


def stated(policy: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the motion in a policy's description, in the form of ``Settings.motion``; None if there is none."""
    motion = (policy or {}).get("motion")
    if not motion:
        return None
    values = {name: list(v) if isinstance(v, (list, tuple)) else v for name, v in motion.items()}
    # Only delta actions have a scale and a range.
    names = values if values["kind"] == "offsets" else ("kind", "action", "state")
    return {name: value for name, value in values.items() if name in names and value not in (None, [])}


def usual_guidance(policy: Mapping[str, Any]) -> tuple[str, str]:
    """Choose the default guidance (the method by which a new chunk continues the running chunk) for a stream whose
    policy computes whole chunks.

    The choice has no effect on a head with a separate time for each action, which always continues the running chunk.

    Args:
        policy: The policy's description.

    Returns:
        The guidance, and the reason for the log.
    """
    kind = str((policy.get("solver") or {}).get("kind", "euler"))
    if kind != "euler":
        return "none", f"its head ({kind}) does not support guidance"
    return (
        "none",
        "a newer window replaces the old one at once: in a test, 18 of 20 pens were caught so, and 10 with guidance",
    )
