"""Results of a run for other people: pages with films and records, repetitions of runs, and leaderboards."""
