"""Listeners that add to a control loop, one file for each. A loop imports only the listeners that it is given."""
