"""What ``python -m embodied.bench`` can measure, one module for each subject."""
