"""Things that tests, benchmarks and the demo share and that no running policy needs."""
