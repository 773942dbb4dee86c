"""How the demo policies were made: demonstrations, training, export. See docs/sim.md."""
