"""Tests of streams (their sessions, control loops and windows) with a policy in the test's process."""
