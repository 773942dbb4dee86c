"""Tests of the robot examples (examples/robots) with programs that stand in for the robots' interfaces."""
