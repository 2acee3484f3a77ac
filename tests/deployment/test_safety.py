"""Safety: whatever is commanded, nothing beyond a limit leaves."""

from __future__ import annotations

import numpy as np
import pytest

from embodied.core.errors import UserError
from embodied.core.spec import joints_of
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.control.safety import Limits, Safety
from tests.deployment.exports import flow_bundle

ARMS = read_bundle(flow_bundle()).arms
HOME = np.array([joint.home for joint in joints_of(ARMS).values()])
OPEN = np.array([0.04])
REST = np.zeros(7)
ELBOW = np.eye(7)[3]


def started(**tighter: float) -> Safety:
    safety = Safety(ARMS, **tighter)
    safety.start(HOME, OPEN, 0.0, "episode 1")
    return safety


@pytest.mark.parametrize("seed", range(5))
def test_nothing_beyond_a_limit_leaves(seed: int) -> None:
    random = np.random.default_rng(seed)
    safety, limits = started(), Limits.of(ARMS)
    qpos, now_s = HOME.copy(), 0.0
    extremes = [np.nan, np.inf, -np.inf, 1e9, -1e9, 1e300]
    for _ in range(400):
        now_s += 0.05
        targets = qpos + random.normal(size=7) * random.choice([0.01, 0.3, 10.0])
        if random.random() < 0.2:
            targets[random.integers(7)] = random.choice(extremes)
        finger = random.choice([0.02, *extremes])
        qvel = random.normal(size=7) * random.choice([0.1, 5.0])
        age_s = random.choice([0.0, 0.1, 1.0])
        sent, sent_finger = safety.filter(targets, np.array([finger]), qpos, qvel, now_s, age_s)
        assert np.isfinite(sent).all()
        assert ((sent >= limits.low_J) & (sent <= limits.high_J)).all()
        assert (np.abs(sent - qpos) <= limits.max_lead_J + 1e-9).all()
        assert limits.finger_low_m <= sent_finger <= limits.finger_high_m
        tool = safety.chains[0].tool(sent)[0]
        assert ((tool >= limits.workspace_low_m - 1e-6) & (tool <= limits.workspace_high_m + 1e-6)).all()
        qpos = qpos + 0.5 * (sent - qpos)
    assert {"not finite", "lead", "velocity", "stale", "gripper", "workspace"} <= set(safety.counts)


def test_measurements_that_are_not_finite_hold_the_last_targets() -> None:
    safety = started()
    sent, _ = safety.filter(HOME + 0.01, OPEN, HOME, REST, 1.0)
    held, _ = safety.filter(HOME + 0.5, OPEN, np.full(7, np.nan), REST, 1.05)
    np.testing.assert_array_equal(held, sent)
    assert safety.counts == {"not finite": 1}


def test_joints_may_be_measured_less_often_than_they_are_asked_for() -> None:
    """At 100 Hz, of a driver that measures at 10 Hz while a joint moves at its largest speed."""
    safety, fastest = started(), 2.175 * ELBOW
    for tick in range(100):
        safety.check_moves(HOME + tick // 10 * 0.1 * fastest, 0.01 * tick)
    with pytest.raises(UserError, match="joint4 moved by"):
        safety.check_moves(HOME + 1.95 * fastest, 1.01)
    with pytest.raises(UserError, match="joint4 moved by"):
        safety.check_moves(HOME + 1.95 * fastest, 1.5)


def test_a_lasting_intervention_counts_once_and_is_logged_with_its_joint() -> None:
    safety = started()
    for tick in range(5):
        safety.filter(HOME + 0.5 * ELBOW, OPEN, HOME, REST, 1.0 + tick)
    assert safety.counts == {"lead": 1}
    assert safety.log[0].detail == "joint4 by +0.2825 rad"
    assert (safety.log[0].during, safety.log[0].time_s) == ("episode 1", 1.0)
    safety.filter(HOME, OPEN, HOME, REST, 7.0)
    safety.filter(HOME + 0.5, OPEN, HOME, REST, 8.0)
    assert safety.counts["lead"] == 2
    safety.start(HOME, OPEN, 100.0, "the way home")
    safety.filter(HOME + 0.5, OPEN, HOME, REST, 101.0)
    assert (safety.log[-1].during, safety.log[-1].time_s) == ("the way home", 1.0)


def test_it_begins_slowly() -> None:
    safety, limits = started(), Limits.of(ARMS)
    first, _ = safety.filter(HOME + 0.2, OPEN, HOME, REST, 0.0)
    np.testing.assert_allclose(first - HOME, 0.1 * limits.max_lead_J)
    later, _ = safety.filter(HOME + 0.2, OPEN, HOME, REST, 0.25)
    assert (later - HOME > first - HOME).all()


def test_it_begins_slowly_however_long_a_person_was_asked() -> None:
    safety, limits = started(), Limits.of(ARMS)
    safety.paused(30.0)
    first, _ = safety.filter(HOME + 0.2, OPEN, HOME, REST, 30.0)
    np.testing.assert_allclose(first - HOME, 0.1 * limits.max_lead_J)
    safety.start(HOME, OPEN, 40.0)
    later, _ = safety.filter(HOME + 0.2, OPEN, HOME, REST, 40.0 + limits.ramp_s)
    np.testing.assert_allclose(later - HOME, np.minimum(0.2, limits.max_lead_J))


def test_the_lead_keeps_the_joints_below_their_largest_speed() -> None:
    limits = Limits.of(ARMS)
    speed = limits.max_lead_J * [joint.stiffness / joint.damping for joint in joints_of(ARMS).values()]
    np.testing.assert_allclose(speed, [joint.max_velocity for joint in joints_of(ARMS).values()])


def test_an_arm_outside_of_the_workspace_may_come_back() -> None:
    safety = Safety(ARMS)
    low = HOME - 0.8 * ELBOW
    safety.start(low, OPEN, 0.0)
    assert safety._outside_m(low) > 0
    towards = low + 0.1 * ELBOW
    sent, _ = safety.filter(towards, OPEN, low, REST, 5.0)
    np.testing.assert_allclose(sent, towards)
    away = low - 0.1 * ELBOW
    sent, _ = safety.filter(away, OPEN, low, REST, 5.1)
    assert safety._outside_m(sent) <= safety._outside_m(low) + 1e-9
    assert safety.counts["workspace"] == 1


@pytest.mark.parametrize(
    ("tighter", "message"),
    [
        ({"speed": 1.5}, "speed: got 1.5, .* can only be tightened"),
        ({"speed": 0.0}, "speed: got 0"),
    ],
)
def test_limits_cannot_be_loosened(tighter: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Limits.of(ARMS, **tighter)


def test_a_pose_in_degrees_is_refused() -> None:
    with pytest.raises(UserError, match=r"joint2 is at 22.5, outside of its limits .* are these degrees"):
        Safety(ARMS).start(np.rad2deg(HOME), OPEN, 0.0)
