"""A Sinew policy on a robot with ROS 2 topics: one node over ``sinew_client.control``, configured by a contract in
YAML.
"""
