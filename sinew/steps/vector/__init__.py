"""Changes of a robot's vectors: a step a file, and the rotations that they share."""
