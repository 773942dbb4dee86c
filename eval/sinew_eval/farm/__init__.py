"""Episodes that several processes and machines play, of one queue."""
