"""What is done to a camera's frame: a step a file, and the arithmetic of libraries that steps share."""
