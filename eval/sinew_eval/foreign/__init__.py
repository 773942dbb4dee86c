"""Play episodes in other environments: simulators in their own Python interpreters, and hosts of a Ray cluster."""
