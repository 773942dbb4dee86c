"""LeRobot policy type ``sinew``. LeRobot imports this module by its distribution's name; nothing heavy happens here."""

from lerobot_policy_sinew.configuration_sinew import SinewConfig
from lerobot_policy_sinew.environment import SinewEnvConfig

__all__ = ["SinewConfig", "SinewEnvConfig"]
