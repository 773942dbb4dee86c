"""LeRobot's remote inference (LeRobot 0.7): Zenoh and MessagePack."""
