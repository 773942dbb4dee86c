"""How the parts of an environment's observations and actions are called, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from sinew.core import SinewError

from sinew_eval.suites.conventions import ACTIONS, STATES


@dataclass(frozen=True)
class Mapping:
    """How an environment names things. Keys of nested dicts are joined with "/"; "" is the whole observation.

    images: camera of the policy -> key of a uint8 frame. known_as: key -> further camera names, by which
        an environment finds the frame for a policy that calls it otherwise. unseen: cameras of policies that this
        environment has no frame for, and that they do without.
    turned: the frames are upside down, and are turned by 180 degrees.
    state: keys whose values are concatenated; "key|name" passes one through a function of ``conventions.STATES``.
    action: a function of ``conventions.ACTIONS``, for all policies, or by a unit of their actions or by architecture,
        of which the first that fits counts ("" for the others; without it they are refused).
    clip: actions are cut to the action space. False where that says less than the environment takes.
    prompt: the instruction; empty takes the environment's ``task_description``.
    hold: "last" repeats the last action (absolute actions), "zero" sends zeros (relative ones), "rest" sends
        ``rest`` with the gripper (the last number) of the last action.
    success: key of ``info``. control_hz, max_steps: where the environment does not say.
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
