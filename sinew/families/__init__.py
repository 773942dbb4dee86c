"""One folder per family of policies; :mod:`sinew.core.registry` has a line for each."""
