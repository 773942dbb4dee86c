"""A reader for the pickles of LeRobot's clients. The reader imports no modules for a pickle, and calls only its own
functions.
"""
