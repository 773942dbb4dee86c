"""Write recordings for viewers of other projects: MCAP, which Foxglove and PlotJuggler open, and Rerun."""
