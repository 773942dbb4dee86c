"""A reader for the pickles of LeRobot's clients. It imports no modules and calls only its own functions."""
