"""Ask a server by the real openpi-client, in LeRobot's environment: ``openpi_robot.py <port> <parity.npz>``."""

from __future__ import annotations

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy  # type: ignore[import-not-found]

policy = WebsocketClientPolicy(host="127.0.0.1", port=int(sys.argv[1]))
arrays = np.load(sys.argv[2], allow_pickle=False)
found = []
for row in range(3):
    reply = policy.infer({"state": arrays["state"][row], "noise": arrays["noise"][row]})
    found.append(float(np.abs(reply["actions"] - arrays["output/actions"][row]).max()))
try:
    policy.infer({"state": arrays["state"][0][:3]})
    error = ""
except RuntimeError as refused:
    error = str(refused)
after = policy.infer({"state": arrays["state"][0]})
timing = sorted(after["server_timing"])
task = policy.get_server_metadata()["origin"]["task"]
print(json.dumps({"difference": max(found), "error": error, "timing": timing, "task": task}))
