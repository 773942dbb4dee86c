"""Listeners that extend a control loop, one file for each. A loop imports only the listeners that it uses."""
