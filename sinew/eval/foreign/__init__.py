"""Simulators that live in an interpreter of their own."""
