"""Robots that a bundle can drive, behind LeRobot's protocol."""
