"""Type each command line and program of each documentation page exactly as it is printed, and check the outcome."""
