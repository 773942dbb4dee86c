"""Train the demo policies: demonstrations, training, export. See docs/sim.md."""
