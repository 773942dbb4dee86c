"""A Sinew policy on a robot of ROS 2 topics: a contract in YAML, and one node over ``sinew_client.control``."""
