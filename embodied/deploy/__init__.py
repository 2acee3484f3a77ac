"""Out of the simulator: bundles, their runner, servers and robots.

    export ──► bundle ──► PolicyRunner ──► scheduler ──► ArmController ──► safety ──► Robot
                              └──────────► server ──► client ┘

All but ``export`` and the server need numpy and onnxruntime alone: no torch, no simulator.
"""
