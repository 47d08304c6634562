"""The originals of sharding: what they refuse, and what is said where they are not installed."""

import pytest
import torch
from torch import Tensor, nn

import sharding
from ddp_lab.runtime.errors import UnsupportedError, UserError
from ddp_lab.runtime.flags import build_parser, parse_config
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.registry import Registry
from tests.models import batch, build
from tests.parity import OPTIMIZERS, check_messages, message_of
from tests.ranks import RankPool
from tests.tables import each_row

FSDP2 = ["pytorch_zero2", "pytorch_zero3"]


def make(name: str, module: nn.Module, optimizer=OPTIMIZERS["adam"]):
    return sharding.load(name)(module, optimizer, StrategyOptions())


def with_extra(values: Tensor) -> nn.Module:
    module = build("deep")
    module.extra = nn.Parameter(values)
    return module


def refusals(name: str) -> dict[str, str]:
    """This rank's messages by what they must contain."""
    extras = {
        "uniform original parameter dtype": torch.ones(6, dtype=torch.float64),
        "scalar parameters": torch.tensor(1.0),
        "extra, which has no elements": torch.ones(0, 3),
        "non-contiguous parameters": torch.ones(4, 6).t(),
    }
    messages = {text: message_of(UnsupportedError, make, name, with_extra(extra)) for text, extra in extras.items()}
    # Without the check, FSDP2 fails in the first step, at placements. `pytorch_zero1` can do it.
    adafactor = message_of(UnsupportedError, make, name, build("deep"), torch.optim.Adafactor)
    return messages | {"is not known to work on each element": adafactor}


@each_row("name", FSDP2)
def test_fsdp2_refuses_what_it_cannot_train(ranks: RankPool, name):
    check_messages(ranks, 2, refusals, name)


def with_hook(module: nn.Module, kind: str, hook=lambda _: None) -> nn.Module:
    getattr(next(module.parameters()), f"register_{kind}hook")(hook)
    return module


def hook_gradients(name: str) -> tuple[list[str], int]:
    """The messages for hooks that FSDP2 does not call, and how often the hook that it calls has run."""
    messages = [
        message_of(UnsupportedError, make, name, with_hook(build("deep"), kind))
        for kind in ("", "post_accumulate_grad_")
    ]
    strategy, called = make(name, build("deep")), []
    with_hook(strategy.module, "post_accumulate_grad_", called.append)
    strategy.forward_backward([batch(2, 0)])
    with_hook(strategy.module, "")
    return [*messages, message_of(UnsupportedError, strategy.forward_backward, [batch(2, 0)])], len(called)


@each_row("name", FSDP2)
def test_fsdp2_refuses_hooks_that_it_never_calls(ranks: RankPool, name):
    for messages, calls in ranks.run(2, hook_gradients, name):
        assert calls == 1
        assert all("has a gradient hook, which FSDP2 never calls" in message for message in messages), messages


# Originals that are not installed ------------------------------------------------------------------------------------

ENTRIES = {"near": ("ddp.simple_ddp:SimpleDDP", "is here"), "far": ("elsewhere.far:Far", "is not")}
REGISTRY = Registry(ENTRIES, extras={"far": "no_such_package"})
COMMAND = "uv sync --extra no_such_package"


def test_what_is_not_installed_is_listed_but_not_swept():
    assert REGISTRY.names == ("near",)
    listing = build_parser("", REGISTRY.sentences).format_help()
    assert "near  is here\n" in listing and f"far   is not (not installed: {COMMAND})" in listing
    assert Registry(ENTRIES, extras={"far": "pytest"}).names == ("near", "far")


def test_choosing_what_is_not_installed_names_the_command(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config("", REGISTRY, arguments=["--ddp-choice", "far"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: strategy 'far' is not installed; run: {COMMAND}\n"
    with pytest.raises(UserError, match=COMMAND):
        REGISTRY.load("far")
    assert REGISTRY.load("near").__name__ == "SimpleDDP"
