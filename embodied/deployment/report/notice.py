"""The notice before a robot moves: which policy it will execute, within which limits."""

from __future__ import annotations

from pathlib import Path

from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.files import sha256
from embodied.deployment.bundle.format import BUNDLE_FILE
from embodied.deployment.control.safety import Limits


def notice(path: Path, bundle: Bundle, limits: Limits) -> str:
    """Return the hash of a bundle's description and the limits of its deployment, as a table."""
    arm, origin = bundle.arm, bundle.origin
    lines = [
        f"{origin.policy} policy for {origin.task} on {bundle.robot}",
        f"{path / BUNDLE_FILE} has SHA-256 {sha256(path / BUNDLE_FILE)}",
        "limits (rad, m, s)      low       high      largest speed   largest lead",
    ]
    columns = zip(limits.low_J, limits.high_J, limits.max_velocity_J, limits.max_lead_J, strict=True)
    for joint, (low, high, speed, lead) in zip(arm.joints, columns, strict=True):
        lines.append(f"{joint.name:20} {low:+9.4f}  {high:+9.4f}  {speed:15.4f} {lead:14.4f}")
    lines.append(f"{'each finger':20} {limits.finger_low_m:+9.4f}  {limits.finger_high_m:+9.4f}")
    for axis, low, high in zip("xyz", limits.workspace_low_m, limits.workspace_high_m, strict=True):
        lines.append(f"{'tool, ' + axis:20} {low:+9.4f}  {high:+9.4f}")
    return "\n".join(lines)
