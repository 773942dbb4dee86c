"""Processing steps for camera frames, one step per file, and the arithmetic of libraries that the steps share."""
