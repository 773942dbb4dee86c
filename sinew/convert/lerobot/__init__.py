"""Read the checkpoint directories and data sets that LeRobot writes, for all model families."""
