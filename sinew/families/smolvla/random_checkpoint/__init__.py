"""A SmolVLA of random weights in LeRobot's layout, at any size: for the demo, the measurements and the tests."""
