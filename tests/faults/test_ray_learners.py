"""Several learner processes on Ray: the updates of one, and one of them that dies or hangs in mid-update."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from embodied.algos.config import PPOConfig
from embodied.algos.losses import MinibatchLoss
from embodied.algos.ppo import PPO
from embodied.core.errors import UserError
from embodied.runtime.loop import LearnerLost
from embodied.runtime.ray.cluster import Cluster
from tests.faults.test_ray_faults import check_credits, ends
from tests.runtime.builders import build, iterate
from tests.runtime.test_ray import LAYOUT

pytestmark = [
    pytest.mark.slow(reason="starts Ray and processes that import torch, and waits for deadlines"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class FatalPPO(PPO):
    """Process 1 dies or is stopped in mid-update, once, where a file in ``flags`` says it; the other waits for it."""

    flags: Path

    def loss(self, batch: Any) -> MinibatchLoss:
        for how, fault in FAULTS.items():
            if self.learners.rank == 1 and (self.flags / how).exists():
                (self.flags / how).unlink()
                os.kill(os.getpid(), fault)
        return super().loss(batch)


def make_fatal(flags: Path, policy: Any) -> FatalPPO:
    """Build it with one minibatch per epoch: two processes then take the steps of one."""
    algorithm = FatalPPO(policy, PPOConfig(epochs=4, num_minibatches=1), seed=3, device=torch.device("cpu"))
    algorithm.flags = flags
    return algorithm


def learner_pids() -> set[int]:
    """Processes of learners that can run, on this machine."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "LearnerHost" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def test_the_update_of_two_goes_on_after_one_is_lost(ray_cluster: Cluster, tmp_path: Path) -> None:
    make_algorithm: Any = partial(make_fatal, tmp_path)
    with build(name="sync", make_algorithm=make_algorithm, **LAYOUT) as runtime:
        iterate(runtime, 2)
        expected = runtime.state_dict()
    options = {**LAYOUT, "num_learners": 2, "answer_timeout_s": 6.0}
    before = learner_pids()
    runtime: Any
    with build(name="ray", make_algorithm=make_algorithm, **options) as runtime:
        assert runtime.layout_note == "processes: env workers 2, actor servers 1, learner 2"
        iterate(runtime, 2)
        state = runtime.state_dict()
        torch.testing.assert_close(state["policy"], expected["policy"], rtol=1e-4, atol=1e-5)
        assert state["runtime"]["counters"] == expected["runtime"]["counters"]
        addresses = {
            connection.laddr.ip
            for pid in learner_pids() - before
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
        for how in FAULTS:
            pids = learner_pids() - before
            assert len(pids) == 2
            (tmp_path / how).touch()
            with pytest.raises(LearnerLost) as caught:
                iterate(runtime, 1)
            caught.value.recover(state)
            assert runtime.iteration == 2
            assert [iteration.index for iteration in iterate(runtime, 2)] == [3, 4]
            assert all(map(ends, pids)), "one that is lost takes the others along"
            check_credits(runtime)
        pids = learner_pids() - before
    assert all(map(ends, pids))


@pytest.mark.parametrize(
    ("num", "options", "words"),
    [
        (13, {"num_env_workers": 2}, "a batch has 4 fragments.*allowed: 1 to 4"),
        (2, {"learner": {"resources": {"unicorn": 1}}}, "learner needs unicorn"),
    ],
)
def test_learners_that_cannot_work_together_are_refused(
    ray_cluster: Cluster, num: int, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        build(name="ray", num_learners=num, **options)
