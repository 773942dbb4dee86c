"""Recipes of robots, against doubles of their interfaces."""
