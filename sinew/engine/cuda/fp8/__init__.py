"""FP8 (e4m3) linear layers of the CUDA engine, their scales and their calibration."""
