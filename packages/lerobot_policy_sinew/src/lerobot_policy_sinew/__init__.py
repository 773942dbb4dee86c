"""The LeRobot policy type ``sinew`` and the environment type ``sinew``.

LeRobot imports this package at its start, because the distribution's name begins with ``lerobot_policy_``. So the
package imports only the two configurations here.
"""

from lerobot_policy_sinew.configuration_sinew import SinewConfig
from lerobot_policy_sinew.environment import SinewEnvConfig

__all__ = ["SinewConfig", "SinewEnvConfig"]
