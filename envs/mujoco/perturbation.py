"""How the arm of ``embodied.deploy robot=sim`` differs from the one of training. Imports no simulator."""

from typing import Any

from embodied.core.options import NonNegative, Positive, config_dataclass


@config_dataclass
class Perturbation:
    """Differences of a simulated arm from the one of training; the defaults are none."""

    gains: Positive = 1.0
    """Factor of the stiffness of every position controller of the arm."""
    joint_damping: Positive = 1.0
    """Factor of the joints' viscous damping."""
    joint_friction: NonNegative = 0.0
    """Dry friction of every joint of the arm, N m."""
    object_mass: Positive = 1.0
    """Factor of the mass of every object."""
    object_friction: Positive = 1.0
    """Factor of the sliding friction of the fingers."""
    action_delay_s: NonNegative = 0.0
    """Time from a command to its effect."""
    backlash_rad: NonNegative = 0.0
    """Play between motor and joint: the joint follows once the motor is half of it ahead."""
    encoder_offset_rad: NonNegative = 0.0
    """Largest constant error of each encoder; drawn per episode."""
    joint_noise_rad: NonNegative = 0.0
    """Standard deviation of measured joint positions."""
    velocity_noise_rad_s: NonNegative = 0.0
    """Standard deviation of measured joint velocities."""
    object_noise_m: NonNegative = 0.0
    """Standard deviation of the external quantities in metres."""

    def terms(self) -> dict[str, dict[str, Any]]:
        """Return the constant differences as terms of randomisation with one value each.

        Encoders, noise and backlash act where ``robots.robot_process`` meets the robot's computer, at any of its ticks.
        """
        fields: dict[str, tuple[float, dict[str, Any]]] = {
            "actuator_gainprm": (self.gains, {"names": ["arm"], "column": 0}),
            "dof_damping": (self.joint_damping, {"names": ["arm"]}),
            "dof_frictionloss": (self.joint_friction, {"names": ["arm"], "operation": "add"}),
            "body_mass": (self.object_mass, {"names": ["objects"]}),
            "geom_friction": (self.object_friction, {"names": ["fingers"], "column": 0}),
            "action_delay": (self.action_delay_s, {}),
        }
        return {name: {"field": name, "range": [value, value], **options} for name, (value, options) in fields.items()}


REAL = Perturbation(
    gains=0.8, joint_damping=1.5, joint_friction=0.3, object_mass=1.3, object_friction=0.8, action_delay_s=0.02,
    backlash_rad=0.004, encoder_offset_rad=0.003, joint_noise_rad=0.0005, velocity_noise_rad_s=0.01,
    object_noise_m=0.002,
)  # fmt: skip
"""That of the Panda, and of robots whose file has none."""
