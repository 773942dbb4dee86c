"""One folder per family of policies; :mod:`sinew.registry` has a line for each."""
