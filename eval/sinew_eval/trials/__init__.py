"""Trials of policies on one robot: a sitting and its plan, one trial and its verdict, the report."""
