"""Describe the names and conventions of an environment's observations and actions as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from sinew.core import SinewError

from sinew_eval.suites.conventions import ACTIONS, STATES


@dataclass(frozen=True)
class Mapping:
    """Names and conventions of an environment. "/" joins the keys of nested dicts, and "" is the whole observation.

    Attributes:
        images: For each camera of the policy, the key of its uint8 frame in the observation.
        state: Keys whose values are concatenated. "key|name" converts a value with a function of
            ``conventions.STATES``.
        prompt: Instruction. "" to use the environment's ``task_description``.
        task: Name of the task in reports. "" to use the environment's name.
        hold: "last" repeats the last action (absolute actions), "zero" sends zeros (relative actions), and "rest"
            sends ``rest`` with the gripper (last number) of the last action.
        success: Key of ``info`` that states success.
        control_hz: Control steps per second. None if the environment states the rate.
        max_steps: Maximum number of control steps. None if the environment states it.
        known_as: For each key of a frame, the other names that published policies use for the same camera.
        unseen: Names of policies' cameras for which this environment has no frame. The policies run without them.
        turned: True to turn frames by 180 degrees, because they are upside down.
        action: A function of ``conventions.ACTIONS``. Or a map from a unit of the policy's actions, or an
            architecture, to such a function. The first match counts, and "" matches all other policies. A policy
            without a match is rejected.
        clip: True to clip actions to the action space. False if the environment accepts more than its action space
            declares.
        rest: Action for ``hold`` "rest".
    """

    images: dict[str, str]
    state: tuple[str, ...]
    prompt: str = ""
    task: str = ""
    hold: str = "last"
    success: str = "is_success"
    control_hz: float | None = None
    max_steps: int | None = None
    known_as: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    turned: bool = False
    action: str | dict[str, str] = "as_is"
    clip: bool = True
    rest: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.hold not in ("last", "zero", "rest"):
            raise SinewError(f"hold: expected last, zero or rest, got {self.hold!r}")
        for name in [self.action] if isinstance(self.action, str) else self.action.values():
            if name not in ACTIONS:
                raise SinewError(f"action: expected one of {', '.join(ACTIONS)}, got {name!r}")
        for name in (key.partition("|")[2] for key in self.state):
            if name and name not in STATES:
                raise SinewError(
                    f"state: expected KEY or KEY|NAME with one of {', '.join(STATES)}, got {name!r}"
                )
