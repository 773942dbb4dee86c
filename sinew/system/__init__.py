"""Small helpers that know no policy: the machine, locks, progress, signals, keys, logs, numpy's files, figures."""
