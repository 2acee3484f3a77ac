"""The actor server with a policy of which a part is frozen: who computes that part, and what the learner then gets."""

from __future__ import annotations

import pytest
import torch

from embodied.policies.vla.policy import VLAPolicy
from embodied.runtime.channel import WeightStore
from embodied.runtime.collecting.actor_server import ActorServer, ActReply, ActRequest
from tests.policies.vla_builders import FROZEN, build, observe


def serve(policy: VLAPolicy, sizes: tuple[int, ...]) -> list[ActReply]:
    store = WeightStore()
    store.publish(0, policy.state_dict())
    server = ActorServer(policy, store, torch.device("cpu"), merge=True)
    generator = torch.Generator().manual_seed(0)
    requests = [
        ActRequest(0, group, observe(num, seed=group), torch.randn(num, *policy.noise_shape, generator=generator))
        for group, num in enumerate(sizes)
    ]
    return server.act(requests)


def test_the_actor_hands_on_what_it_computed_of_each_decision() -> None:
    policy = build(freeze=FROZEN, prefix_from_actor=True)
    for group, reply in enumerate(serve(policy, (2, 5))):
        assert reply.obs is not None
        assert reply.sample is not None
        assert not [key for key in reply.obs if key.startswith("images.") or key == "instruction"]
        assert torch.equal(reply.obs["state"], observe((2, 5)[group], seed=group)["state"])
        again = policy.evaluate(reply.obs, reply.sample.chain)
        torch.testing.assert_close(again.log_prob_B, reply.sample.log_prob_N, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"freeze": FROZEN}, {"prefix_from_actor": True}], ids=["not asked", "not frozen"])
def test_otherwise_the_learner_gets_the_observation_itself(options: dict[str, object]) -> None:
    assert all(reply.obs is None for reply in serve(build(**options), (2,)))


def test_frozen_weights_are_copied_once_and_the_rest_is_followed() -> None:
    learning, acting, store = build(freeze=FROZEN), build(freeze=FROZEN), WeightStore()
    frozen = {name for name, parameter in learning.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert len(frozen) < len(dict(learning.named_parameters()))
    with torch.no_grad():
        for parameter in acting.parameters():
            parameter.zero_()
    server = ActorServer(acting, store, torch.device("cpu"), merge=True)
    request = ActRequest(
        0, 0, observe(2), torch.randn(2, *learning.noise_shape, generator=torch.Generator().manual_seed(0))
    )
    snapshots = []
    for version in range(2):
        with torch.no_grad():
            for parameter in learning.parameters():
                parameter.add_(0.01 * parameter.requires_grad)
        store.publish(version, learning.state_dict(), frozen)
        snapshots.append(store.latest().tensors)
        (reply,) = server.act([request])
        assert reply.sample is not None
        assert reply.sample.version_N.tolist() == [version] * 2
        for name, tensor in learning.state_dict().items():
            assert torch.equal(acting.state_dict()[name], tensor), name
    assert {name for name, tensor in snapshots[1].items() if tensor is snapshots[0][name]} == frozen
