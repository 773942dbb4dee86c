"""Defaults of a robot that was told nothing: how it takes over late chunks, and when it asks for the next one.

The one place that says so, for :class:`~sinew_client.control.settings.Settings` and everybody who makes some: ``sinew
run``, ``sinew eval``, ``sinew demo``, the ROS bridge, the LeRobot plugin. The tables behind it are in
docs/late-answers.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from sinew_client.control.handover import parse_handover
from sinew_client.control.replan import parse_rule

AUTO = "auto"
HANDOVER = AUTO
# A quarter of a chunk: 8 rows of 32, 6 of 24. Longer open loops fail more often, on blocks and shove from 16 of 32
# on, on the pen from 8 of 24 on.
REPLAN = "queue:0.75"

AS_IS: Mapping[str, Any] = {"kind": "as is"}  # rows as they come, whatever the policy states
WAITS, GOES_ON = "freeze", "aligned"


@dataclass(frozen=True)
class Choice:
    """How chunks are merged and requested.

    Attributes:
        handover: How a late chunk takes over.
        motion: What actions are measured from; None sends rows out as they come.
        reason: Why this hand-over.
        replan: When the next chunk is requested.
        replan_reason: Why, where the checkpoint has a setting for it; else "".
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
    """Return the hand-over and the motion to play with. Raises ValueError for a hand-over that is none.

    motion: what the user says of the actions; policy: what a server says about its policy, whose ``motion`` counts
    where the user says nothing. refined: an edge adapter makes the rows of every step anew. robot: what its driver says
    of the commands that it takes, which counts where neither does.

    ``auto`` lets the robot go on while a chunk is under way where rows are targets (absolute, or relative to the state
    of the chunk's frame), because those stay right when they are entered late; it lets the robot wait where they are
    offsets from the present pose, or where nobody says what they are. A checkpoint that was made for temporal
    ensembling gets it, with a chunk of every step; replan is the rule for all others.
    """
    said = stated(policy)
    given = motion if motion is not None else said or robot
    kind = str((given or AS_IS).get("kind", "as is"))
    who = "--motion says" if motion is not None else "the policy says" if said else "the robot's driver says"
    blend = ensemble_of(policy)
    if handover != AUTO:
        name, reason = handover, "asked for"
        if blend is not None and parse_handover(name).method != "ensemble":
            reason += f"; the checkpoint was made for ensemble:{blend:g} (temporal_ensemble_coeff)"
    elif refined:
        name, reason = GOES_ON, "the edge adapter has a row for every step, however late the chunk is"
    elif blend is not None:
        name = f"ensemble:{blend:g}"
        reason = f"the checkpoint was made for temporal ensembling (temporal_ensemble_coeff {blend:g})"
    elif kind in ("absolute", "relative"):
        name, reason = (
            GOES_ON,
            f"{who} that actions are {kind} targets, so a late row still leads to its place",
        )
    elif kind == "offsets":
        name, reason = (
            WAITS,
            f"{who} that actions are offsets, which do not add up when a chunk is entered late",
        )
    else:
        name, reason = WAITS, "nothing says what actions are measured from; waiting is right for all kinds"
        reason += ", and --motion lets the robot go on"
    timed = parse_handover(name).timed
    if motion is None and kind == "offsets" and (refined or not timed):
        given = None  # a chunk that is executed from its first row adds up as it comes, and an adapter knows its own
    if blend is not None and handover == AUTO and not refined and replan == REPLAN:
        return Choice(
            name, given, reason, "1", "every step, as temporal ensembling averages the chunks of all steps"
        )
    return Choice(name, given, reason, replan, _unlike_checkpoint(replan, policy))


def ensemble_of(policy: Mapping[str, Any] | None) -> float | None:
    """Return the coefficient of temporal ensembling that a policy states; None where it states none."""
    found = (policy or {}).get("temporal_ensemble")
    return None if found is None else float(found)


def _unlike_checkpoint(replan: str, policy: Mapping[str, Any] | None) -> str:
    """Return how a rule differs from the checkpoint's own setting; "" where it does not, or there is none."""
    rows, size = int((policy or {}).get("n_action_steps") or 0), int((policy or {}).get("chunk_size") or 0)
    try:
        same = not 0 < rows <= size or parse_rule(replan).horizon(size) == rows
    except ValueError:  # the settings of the loop name what is wrong
        same = True
    if same:
        return ""
    return f"the checkpoint was evaluated with n_action_steps {rows}, and --replan {rows} follows that"


def stated(policy: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a policy says that its actions are measured from, as settings take it; None where it says nothing."""
    found = (policy or {}).get("motion")
    if not found:
        return None
    values = {name: list(v) if isinstance(v, (list, tuple)) else v for name, v in found.items()}
    kept = (
        values if values["kind"] == "offsets" else ("kind", "action", "state")
    )  # scale and range are an offset's
    return {name: value for name, value in values.items() if name in kept and value not in (None, [])}


def usual_guidance(policy: Mapping[str, Any]) -> tuple[str, str]:
    """Return how the whole chunks of a stream continue what runs where nobody says it, and why. policy: what it says
    of itself. A head with a time per row continues by itself, whatever is said here."""
    kind = str((policy.get("solver") or {}).get("kind", "euler"))
    if kind != "euler":
        return "none", f"its head ({kind}) makes a chunk that nothing can guide"
    return (
        "none",
        "a newer window replaces the old one at once: of 20 pens 18 were caught so, 10 guided (docs/stream.md)",
    )
