"""What this process asks of the machine, and tells people while it works."""
