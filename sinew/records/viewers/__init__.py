"""Recordings for the viewers of other projects: MCAP, which Foxglove and PlotJuggler open, and Rerun."""
