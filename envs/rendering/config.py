"""Options of the randomisation of images."""

from typing import Annotated

from pydantic import Field

from embodied.core.options import Fraction, config_dataclass


@config_dataclass
class CameraRandomization:
    """Ranges of the randomisation: every draw is uniform in [-x, x] and added to the nominal value; 0 is off."""

    position_m: Fraction = 0.0
    """Each coordinate of the position of a camera without a mount."""
    mounted_position_m: Fraction = 0.0
    """Each coordinate of the position of a mounted camera, in its own frame; it looks at the point 1 m ahead."""
    lookat_m: Fraction = 0.0
    """Each coordinate of the point in the middle of the image."""
    fovy_deg: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Vertical field of view."""
    object_color: Fraction = 0.0
    """Red, green and blue (0 to 1) of each body of the task."""
    robot_color: Fraction = 0.0
    """Red, green and blue of the whole robot."""
    table_color: Fraction = 0.0
    """Red, green and blue of the table and the floor."""
    light_direction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Each coordinate of the unit vector towards the light."""
    brightness: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Brightness of all light, relative to 1."""
