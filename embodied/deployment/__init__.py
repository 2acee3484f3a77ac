"""Out of the simulator: bundles, their runner, and robots.

    export ──► bundle ──► PolicyRunner ──► Schedule ──► ArmController ──► Safety ──► Robot

All but ``onnx`` need numpy and onnxruntime alone: no torch, no simulator.
"""
