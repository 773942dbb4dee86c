"""Listeners that extend a control loop, one module for each. A program imports only the listeners that it uses."""
