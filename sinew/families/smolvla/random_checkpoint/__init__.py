"""Random SmolVLA checkpoints in LeRobot's layout, of any size, for the demo, measurements and tests."""
