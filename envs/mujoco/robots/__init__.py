"""Robots, one a file."""
