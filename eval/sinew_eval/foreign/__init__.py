"""Episodes that are played elsewhere: simulators in interpreters of their own, hosts of a Ray cluster."""
