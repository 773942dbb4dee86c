"""Times a bundle on this machine: `measure.py` stage by stage, `ladder.py` every engine side by side."""
