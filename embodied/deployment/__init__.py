"""Out of the simulator: bundles, their runner, and robots.

    export ──► bundle ──► PolicyRunner ──► Schedule ──► ArmController ──► Safety ──► Robot
                               └─► PolicyServer ──► RemotePlanner ─┘

All but ``onnx`` need numpy and onnxruntime alone, server and client also websockets and msgpack: no torch and no
simulator.
"""
