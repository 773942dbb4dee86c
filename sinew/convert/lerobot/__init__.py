"""The directories that LeRobot writes, whichever family is in them."""
