"""The kernel that paints images of policies' cameras, as ``envs.rendering`` does on the CPU; see there.

``cameras.py`` imports it when a pool has cameras, because it needs Warp. Suffixes: N envs, G geoms, B bodies, C mounts.
Rays have depth 1 along the optical axis; those that hits take are in the geom's frame, as are the hits.
"""

import mujoco
import warp as wp

from embodied.envs.rendering import layers, vision
from embodied.envs.rendering.cameras import EXTENT_M

SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX = (
    wp.constant(int(getattr(mujoco.mjtGeom, f"mjGEOM_{kind}")))
    for kind in ("SPHERE", "CAPSULE", "ELLIPSOID", "CYLINDER", "BOX")
)
AMBIENT, FROM_ABOVE, FACING, FROM_SUN, TILE_M, FAR_M = (
    wp.constant(float(x))
    for x in (layers.AMBIENT, layers.FROM_ABOVE, layers.FACING, layers.FROM_SUN, vision.TILE_M, EXTENT_M)
)
SKY_LOW, SKY_HIGH = (wp.constant(wp.vec3(*map(float, color))) for color in (vision.SKY_LOW, vision.SKY_HIGH))
MISSED = wp.constant(-1.0)  # depth of a ray that hits nothing
wp.set_module_options({"enable_backward": False})


@wp.func
def ball(radius: float, origin: wp.vec3, ray: wp.vec3) -> tuple[float, wp.vec3]:
    """Return depth and normal of the hit of a sphere."""
    square = wp.dot(ray, ray)
    middle = -wp.dot(origin, ray) / square
    nearest = origin + middle * ray
    inside = radius * radius - wp.dot(nearest, nearest)
    back = wp.sqrt(wp.max(inside, 0.0) / square)
    return wp.where(inside >= 0.0, middle - back, MISSED), (nearest - back * ray) / radius


@wp.func
def tube(radius: float, half: float, round: bool, origin: wp.vec3, ray: wp.vec3) -> tuple[float, wp.vec3]:
    """Return depth and normal of the hit of a capsule (``round``) or a cylinder."""
    square = wp.max(ray[0] * ray[0] + ray[1] * ray[1], 1.0e-20)
    middle = -(origin[0] * ray[0] + origin[1] * ray[1]) / square
    x, y = origin[0] + middle * ray[0], origin[1] + middle * ray[1]
    inside = radius * radius - (x * x + y * y)
    if inside < 0.0:
        return MISSED, ray
    depth = middle - wp.sqrt(inside / square)
    hit = origin + depth * ray
    if wp.abs(hit[2]) <= half:
        return depth, wp.vec3(hit[0] / radius, hit[1] / radius, 0.0)
    end = wp.where(hit[2] < 0.0, -half, half)
    if round:
        return ball(radius, origin - wp.vec3(0.0, 0.0, end), ray)
    disc = (end - origin[2]) / ray[2]
    x, y = origin[0] + disc * ray[0], origin[1] + disc * ray[1]
    return wp.where(x * x + y * y <= radius * radius, disc, MISSED), wp.vec3(0.0, 0.0, wp.sign(end))


@wp.func
def cuboid(size: wp.vec3, origin: wp.vec3, ray: wp.vec3) -> tuple[float, wp.vec3]:
    """Return depth and normal of the hit of a box."""
    entry, leave, side = float(-wp.inf), float(wp.inf), 0
    for k in range(3):
        low, high = (-size[k] - origin[k]) / ray[k], (size[k] - origin[k]) / ray[k]
        if wp.min(low, high) > entry:
            entry, side = wp.min(low, high), k
        leave = wp.min(leave, wp.max(low, high))
    normal = wp.vec3()
    normal[side] = -wp.sign(ray[side])
    return wp.where(entry <= leave, entry, MISSED), normal


@wp.func
def hit_of(kind: int, size: wp.vec3, origin: wp.vec3, ray: wp.vec3) -> tuple[float, wp.vec3]:
    """Return depth and normal of the nearest hit of a geom; the depth is not positive where there is none."""
    if kind == BOX:
        return cuboid(size, origin, ray)
    if kind == SPHERE:
        return ball(size[0], origin, ray)
    if kind == ELLIPSOID:
        depth, normal = ball(1.0, wp.cw_div(origin, size), wp.cw_div(ray, size))
        return depth, wp.normalize(wp.cw_div(normal, size))
    return tube(size[0], size[1], kind == CAPSULE, origin, ray)


@wp.func
def lit(normal: wp.vec3, way: wp.vec3, sun: wp.vec3) -> float:
    """Return the light that a white surface reflects along ``way``, a unit vector from the camera."""
    facing = -wp.dot(normal, way)
    outward = wp.where(facing < 0.0, -normal, normal)
    ambient = AMBIENT + FROM_ABOVE * outward[2] + FACING * wp.abs(facing)
    return ambient + FROM_SUN * wp.max(wp.dot(outward, sun), 0.0)


@wp.func
def rounded(color: wp.vec3) -> wp.vec3:
    """Return a colour of whole numbers, at most 255."""
    r, g, b = wp.min(color[0], 255.0), wp.min(color[1], 255.0), wp.min(color[2], 255.0)
    return wp.vec3(wp.floor(r + 0.5), wp.floor(g + 0.5), wp.floor(b + 0.5))


@wp.kernel
def paint(
    shown_N: wp.array[bool],
    mount: int,
    mount_xpos_NC: wp.array2d[wp.vec3],
    mount_xmat_NC: wp.array2d[wp.mat33],
    lens_pos_N: wp.array[wp.vec3],
    lens_rotation_N: wp.array[wp.mat33],
    step_N: wp.array[float],
    sun_N: wp.array[wp.vec3],
    brightness_N: wp.array[float],
    xpos_NB: wp.array2d[wp.vec3],
    xmat_NB: wp.array2d[wp.mat33],
    body_G: wp.array[int],
    rotation_G: wp.array[wp.mat33],
    pos_NG: wp.array2d[wp.vec3],
    kind_NG: wp.array2d[int],
    size_NG: wp.array2d[wp.vec4],
    rgba_NG: wp.array2d[wp.vec4],
    table: int,
    floor: int,
    image: wp.array4d[wp.uint8],
) -> None:
    """Paint a pixel of a camera in the envs that are shown. mount: what moves it, of C bodies or cameras of the MJCF.

    size: of each geom, and its radius about its centre, 0 for the horizontal planes ``table`` and ``floor``.
    """
    n, row, column = wp.tid()
    if not shown_N[n]:
        return
    origin = mount_xpos_NC[n, mount] + mount_xmat_NC[n, mount] @ lens_pos_N[n]
    step = step_N[n]
    x = (float(column) - 0.5 * float(image.shape[2] - 1)) * step
    y = (0.5 * float(image.shape[1] - 1) - float(row)) * step
    ray = mount_xmat_NC[n, mount] @ (lens_rotation_N[n] @ wp.vec3(x, y, -1.0))
    way, sun, brightness = ray / wp.sqrt(1.0 + x * x + y * y), sun_N[n], brightness_N[n]

    # table, floor and sky
    light = lit(wp.vec3(0.0, 0.0, 1.0), wp.vec3(way[0], way[1], wp.min(way[2], 0.0)), sun) * brightness
    depth = (pos_NG[n, table][2] - origin[2]) / ray[2]
    beside, half = wp.abs(origin + depth * ray - pos_NG[n, table]), size_NG[n, table]
    if depth > 0.0 and ray[2] < 0.0 and beside[0] <= half[0] and beside[1] <= half[1]:
        color = light * wp.vec3(rgba_NG[n, table][0], rgba_NG[n, table][1], rgba_NG[n, table][2])
    else:
        color = (SKY_LOW + wp.sqrt(wp.max(way[2], 0.0)) * (SKY_HIGH - SKY_LOW)) * brightness
        depth = (pos_NG[n, floor][2] - origin[2]) / ray[2]
        if depth > 0.0 and ray[2] < 0.0:
            tiles = wp.floor((origin[0] + depth * ray[0]) / TILE_M) + wp.floor((origin[1] + depth * ray[1]) / TILE_M)
            share = 1.0 - wp.pow(wp.min(depth * wp.length(ray) / FAR_M, 1.0), 2.0)
            tile = light * (0.92 + 0.08 * wp.abs(tiles - 2.0 * wp.floor(0.5 * tiles)))
            rgba = rgba_NG[n, floor]
            color = share * tile * wp.vec3(rgba[0], rgba[1], rgba[2]) + (1.0 - share) * color
        else:
            depth = float(wp.inf)

    # the nearest opaque geom, and the nearest translucent one in front of it
    glass_depth, glass = float(wp.inf), wp.vec4()
    for g in range(body_G.shape[0]):
        body, extent = body_G[g], size_NG[n, g]
        offset = origin - xpos_NB[n, body] - xmat_NB[n, body] @ pos_NG[n, g]
        near = offset - wp.dot(offset, way) * way
        if wp.length(near) >= 1.001 * extent[3]:
            continue
        turn = xmat_NB[n, body] @ rotation_G[g]
        back = wp.transpose(turn)
        hit, normal = hit_of(kind_NG[n, g], wp.vec3(extent[0], extent[1], extent[2]), back @ offset, back @ ray)
        rgba = rgba_NG[n, g]
        if hit > 0.0 and hit < wp.where(rgba[3] == 1.0, depth, glass_depth):
            shade = lit(turn @ normal, way, sun) * brightness * wp.vec3(rgba[0], rgba[1], rgba[2])
            if rgba[3] == 1.0:
                depth, color = hit, shade
            else:
                glass_depth, glass = hit, wp.vec4(shade[0], shade[1], shade[2], rgba[3])
    color = rounded(color)
    if glass_depth < depth:
        front = wp.vec3(wp.min(glass[0], 255.0), wp.min(glass[1], 255.0), wp.min(glass[2], 255.0))
        color = rounded(glass[3] * front + (1.0 - glass[3]) * color)
    for k in range(3):
        image[n, row, column, k] = wp.uint8(color[k])
