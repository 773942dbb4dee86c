"""A reader of the pickles that LeRobot's clients send; it imports and calls nothing."""
