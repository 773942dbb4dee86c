"""Runs a Sinew policy on a robot with ROS 2 topics. One node contains the control loop of ``sinew_client.control``, and
a contract (a YAML file) configures the node.
"""
