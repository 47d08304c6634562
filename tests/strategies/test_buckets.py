"""How large buckets are where their user does not say."""

import torch
from torch import nn

from ddp.buckets import FEWEST_BUCKETS, MOST_WAITING, Bucket, fill_buckets, moves_at, usual_cap_bytes
from ddp_lab.strategy.gradient_watch import GradientWatch


def layers(width, depth):
    return [nn.Linear(width, width, bias=False, device="meta").weight for _ in range(depth)]


def test_the_last_bucket_is_small_beside_the_rest():
    """Each bucket has a tenth of 40 equal layers. It has one layer of 16 MiB, since two would pass 25 MiB. It has all
    layers of 16 KiB, since these have less than 1 MiB together."""
    for width, expected in ((512, [4] * FEWEST_BUCKETS), (2048, [1] * 40), (64, [40])):
        model = layers(width, 40)
        assert [len(bucket) for bucket in fill_buckets(model, usual_cap_bytes(model))] == expected


def test_large_gradients_move_as_they_come():
    """So hardly any gradient is held twice. Small gradients wait until there are enough to copy them together."""
    parameters = [nn.Linear(1, rows, bias=False).weight for rows in (100, 300_000, 200_000, 90_000, 10)]
    bucket = Bucket(parameters)
    assert bucket.moves_at == {parameters[1], parameters[3]} == moves_at(parameters, MOST_WAITING)
    for slot, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(slot))
        if parameter in bucket.moves_at:
            bucket.collect()
            assert all(p.grad is view for p, view in zip(parameters[: slot + 1], bucket.views, strict=False))
    bucket.complete()
    assert bucket.flat.tolist() == [slot for slot, p in enumerate(parameters) for _ in range(len(p))]


def test_a_bucket_is_seen_when_its_last_gradient_has_come():
    """In the first backward pass it is seen at the end; later, before backward comes to the layers in front of it."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    watch = GradientWatch(dict(model.named_parameters()))
    halves, gradients = [[model[3].weight, model[2].weight], [model[1].weight, model[0].weight]], []
    for half in halves:
        watch.on_arrival(
            half, lambda count, _: gradients.append(sum(p.grad is not None for p in model.parameters())) or count == 2
        )
    for _ in range(2):
        model.zero_grad()
        watch.begin_step()
        model(torch.ones(1, 4)).sum().backward()
        watch.look()
    assert gradients == [4, 4, 2, 4] and all(watch.received())
