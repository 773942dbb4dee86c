"""Data sets in LeRobot's layout: of episodes that a policy or an expert plays, and of what a server recorded."""
