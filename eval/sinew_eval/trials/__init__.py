"""Trials of policies on one robot: the session and its plan, a trial and its verdict, the report."""
