"""The policies that Sinew supports, one folder for each family of policies. :mod:`sinew.core.registry` lists the
families."""
