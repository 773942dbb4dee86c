"""Steps that change a robot's vectors, one step per file, and the rotations that they share."""
