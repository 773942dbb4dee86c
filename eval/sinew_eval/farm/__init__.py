"""Share the episodes of one run between several processes and machines."""
