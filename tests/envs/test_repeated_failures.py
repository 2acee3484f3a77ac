"""Episodes of training that begin as one that failed (``SamplerSetup.repeat_failures``)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.core.episodes import EpisodePlans, EpisodeStats, Ints
from embodied.core.spec import EnvSpec, Instruction, StartStage
from embodied.envs import SamplerSetup, UniformConfig
from embodied.envs.episodes.sampler import UniformSampler
from embodied.envs.episodes.seeding import EpisodeRng

NUM_ENVS = 400
SPEC = EnvSpec.of_sizes("circus", state=1, action=1)


def build(share: float) -> UniformSampler:
    return UniformSampler(SPEC, UniformConfig(), SamplerSetup(NUM_ENVS, repeat_failures=share))


def step(sampler: UniformSampler, plans: EpisodePlans, failed: np.ndarray) -> EpisodePlans:
    """End all episodes, some of them without success."""
    ids, zeros, success = torch.arange(NUM_ENVS), torch.zeros(NUM_ENVS), {"success": torch.from_numpy(~failed)}
    return sampler.next(EpisodeStats(ids, zeros, zeros.long(), plans, success, success), zeros.long())


def names(plans: EpisodePlans) -> list[tuple[int, int]]:
    return list(zip(plans.seed_n.tolist(), plans.number_n.tolist(), strict=True))


def test_a_share_of_the_episodes_begins_as_the_last_failures_did() -> None:
    sampler = build(0.5)
    plans = sampler.start()
    assert names(plans) == [(i, 0) for i in range(NUM_ENVS)]
    then = step(sampler, plans, np.arange(NUM_ENVS) >= 100)
    kept = {(i, 0) for i in range(200, NUM_ENVS)}  # the newest, half as many as envs
    again = [name for name in names(then) if name in kept]
    assert 0.08 * NUM_ENVS < len(again) < 0.18 * NUM_ENVS, "a quarter succeeded, so a quarter of the share"
    assert len(set(again)) > 0.8 * len(again), "not the same one each time"
    assert sum(name == (i, 1) for i, name in enumerate(names(then))) == NUM_ENVS - len(again)


def test_nothing_is_repeated_where_all_fail_or_none_has_or_few_have() -> None:
    sampler, all_of_them = build(0.5), np.ones(NUM_ENVS, dtype=bool)
    plans = step(sampler, sampler.start(), all_of_them)
    assert names(plans) == [(i, 1) for i in range(NUM_ENVS)]
    sampler = build(0.5)
    plans = step(sampler, sampler.start(), ~all_of_them)
    assert names(plans) == [(i, 1) for i in range(NUM_ENVS)]
    few = np.isin(np.arange(NUM_ENVS), range(7, 17))  # a twentieth of those that are kept at most
    plans = step(sampler, plans, few)
    assert 0 < sum(name in {(i, 1) for i in range(7, 17)} for name in names(plans)) < 0.06 * NUM_ENVS
    unchanged = build(0.0)
    plans = step(unchanged, unchanged.start(), few)
    assert names(plans) == [(i, 1) for i in range(NUM_ENVS)]


def test_starts_that_are_never_solved_do_not_take_over() -> None:
    sampler, draw = build(0.5), np.random.default_rng(0)
    plans, hopeless_shares = sampler.start(), []
    for _ in range(100):
        hopeless = (plans.seed_n + plans.number_n) % 50 == 0  # one ordinary start of fifty
        hopeless_shares.append(hopeless.mean())
        plans = step(sampler, plans, hopeless | (draw.random(NUM_ENVS) < 0.02))
    assert 0.04 < np.mean(hopeless_shares[50:]) < 0.2, "repeated, but most episodes still teach something"


@pytest.mark.parametrize(("outcomes", "forgotten"), [("solved", True), ("failed", True), ("in turns", False)])
def test_a_start_is_forgotten_once_its_repetitions_end_alike(outcomes: str, forgotten: bool) -> None:
    sampler, few = build(1.0), np.arange(NUM_ENVS) < 200  # as many as are kept
    first = {(i, 0) for i in range(200)}
    plans = step(sampler, sampler.start(), few)
    shares = []
    for turn in range(100):
        again = np.array([name in first for name in names(plans)])
        shares.append(again.mean())
        failed = {"solved": False, "failed": True, "in turns": turn % 2 == 0}[outcomes]
        plans = step(sampler, plans, again & failed)
    assert shares[0] > 0.4
    assert (shares[-1] == 0) == forgotten


def test_a_later_start_is_neither_repeated_nor_given_up_for_a_repetition() -> None:
    stages = (StartStage("held", 0.4),)
    sampler = UniformSampler(
        replace(SPEC, stages=stages), UniformConfig(), SamplerSetup(NUM_ENVS, stages=True, repeat_failures=1.0)
    )
    plans = sampler.start()
    later = plans.stage_n == 1
    assert 0.3 < later.mean() < 0.5
    plans = step(sampler, plans, later | (np.arange(NUM_ENVS) % 2 == 0))
    assert 0.3 < (plans.stage_n == 1).mean() < 0.5
    again = plans.number_n == 0
    assert again.any()
    assert not (later[plans.seed_n[again]] | (plans.stage_n[again] == 1)).any()


class Curriculum(UniformSampler):
    """Gives in each turn the next of two instructions to all."""

    turn = 0

    def draw_instructions(self, rng: EpisodeRng) -> Ints:
        return np.full(len(rng), self.turn % 2)

    def on_episodes_end(self, ended: EpisodeStats) -> None:
        self.turn += 1


def test_a_start_is_repeated_with_the_instruction_that_failed() -> None:
    spec = replace(SPEC, instructions=(Instruction("go", "go"), Instruction("stay", "stay")))
    setup = SamplerSetup(NUM_ENVS, repeat_failures=1.0)
    sampler, again = Curriculum(spec, UniformConfig(), setup), Curriculum(spec, UniformConfig(), setup)
    plans = step(sampler, sampler.start(), np.arange(NUM_ENVS) % 2 == 0)
    repeated = plans.number_n == 0
    assert 0.3 < repeated.mean() < 0.7
    assert (plans.instruction_n == ~repeated).all(), "the others have the next one"
    again.load_state_dict(sampler.state_dict())
    again.turn = 2
    plans = step(again, plans, np.zeros(NUM_ENVS, dtype=bool))
    told = plans.instruction_n[plans.number_n == 0]
    assert len(told)
    assert not told.any()
    assert (plans.instruction_n[plans.number_n == 2] == 1).all()


@pytest.mark.parametrize("earlier", [False, True])
def test_a_sampler_goes_on_from_its_state(earlier: bool) -> None:
    sampler, third, nobody = build(0.5), np.arange(NUM_ENVS) % 3 == 0, np.zeros(NUM_ENVS, dtype=bool)
    plans = step(sampler, sampler.start(), third)
    again, state = build(0.5), sampler.state_dict()
    if earlier:
        state["repeat/failures"] = state["repeat/failures"][:, [0, 1, 3]]  # without the instruction
    again.load_state_dict(state)
    assert torch.equal(again.state_dict()["repeat/success"], sampler.state_dict()["repeat/success"])
    for failed in (nobody, third):
        expected, found = step(sampler, plans, failed), step(again, plans, failed)
        assert names(found) == names(expected)
        plans = expected
    assert set(names(plans)) & {(i, 0) for i in range(0, NUM_ENVS, 3)}
