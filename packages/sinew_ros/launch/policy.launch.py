"""Launch file that starts the policy node.

Usage: ``ros2 launch sinew_ros policy.launch.py contract:=/path/to/robot.yaml [server:=tcp://gpu:5555]``.
"""

from launch.actions import DeclareLaunchArgument
from launch.conditions import LaunchConfigurationEquals, LaunchConfigurationNotEquals
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from launch import LaunchDescription


def generate_launch_description():
    contract, server = LaunchConfiguration("contract"), LaunchConfiguration("server")
    node = {"package": "sinew_ros", "executable": "sinew-ros", "output": "screen"}
    return LaunchDescription(
        [
            DeclareLaunchArgument("contract"),
            DeclareLaunchArgument("server", default_value=""),
            Node(**node, arguments=["run", contract], condition=LaunchConfigurationEquals("server", "")),
            Node(
                **node,
                arguments=["run", contract, "--server", server],
                condition=LaunchConfigurationNotEquals("server", ""),
            ),
        ]
    )
