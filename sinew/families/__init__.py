"""The supported policies, one folder per family. :mod:`sinew.core.registry` has a line for each family."""
