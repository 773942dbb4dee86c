"""``sinew.run``: drive a robot with a policy from Python."""

from __future__ import annotations

from typing import Any

from sinew_client.control import Cadence, Robot
from sinew_client.control.run import Run
from sinew_client.policy import Policy
from sinew_client.target import ADDRESS, Target


def run(
    policy: str | Policy,
    robot: Robot,
    *,
    prompt: str = "",
    seconds: float | None = None,
    api_key: str = "",
    **settings: Any,
) -> Cadence:
    """Drive a robot with a policy, with the same settings and limits as ``sinew run``.

    Args:
        policy: An address, a bundle, a checkpoint, a hub name (:func:`sinew.connect`), or an open policy, which stays
            open after the run.
        robot: An object with the methods ``observe``, ``act`` and ``hold`` (:class:`sinew_client.control.Robot`).
        prompt: The instruction. "" selects the robot's instruction, or the policy's instruction if the robot has none.
        seconds: Duration of the run. None runs until the robot ends the run, or until Ctrl-C.
        api_key: API key of the server.
        **settings: Fields of :class:`sinew_client.control.Settings` that you choose, such as ``hz``, ``limits``,
            ``handover`` and ``replan``. Other fields get their defaults from the policy and the robot.

    Returns:
        The report of the run. The robot holds its position when this function returns, whatever ended the run.

    Raises:
        SettingsError: A setting is missing, unknown, or does not fit the policy.
        SinewError: The policy cannot be opened.

    Example:
        >>> report = sinew.run("blocks", Arm(), prompt="pick up the red cube", seconds=10)
        >>> report.executed
    """
    is_local = isinstance(policy, str) and Target.parse(policy).kind != ADDRESS
    opened: Any = Target.parse(policy).open() if is_local else policy
    try:
        with Run.open(opened, robot, settings, prompt=prompt, api_key=api_key) as driving:
            hz = driving.plan.settings.hz
            return driving.run(None if seconds is None else max(1, round(seconds * hz)))
    finally:
        if opened is not policy:
            opened.close()
