"""Out of the simulator: bundles, their runner, and robots.

    export ──► bundle ──► PolicyRunner ──► Schedule ──► ArmController ──► Safety ──► Robot
                               └─► PolicyServer ──► RemotePlanner ─┘

bundle/    write, read and check the directory that holds a policy     serving/   policy server and its client
control/   loop, schedule, controller, safety                         robots/    their protocol, mappings, robot=sim
report     records of episodes, page

The modules that write bundles (``bundle/write.py``, ``torch_policy.py``) need torch. All others need numpy
and onnxruntime alone, server and client also websockets and msgpack.
"""
