"""The protocol of LeRobot's remote inference (LeRobot 0.7): Zenoh and MessagePack."""
