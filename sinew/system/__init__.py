"""Small helpers that know no policy: the machine, locks and scratch folders, progress, bounded logs, figures."""
