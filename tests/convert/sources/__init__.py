"""Tests of what verbs take as a policy."""
