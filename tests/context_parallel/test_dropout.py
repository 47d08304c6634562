"""Dropout between layers that see a part of the tokens: one process that drops the same trains the same."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.build import seed_everything
from ddp_lab.runtime.mesh import Mesh
from tests.checkpoints import here
from tests.context_parallel.test_attention import AttentionCase, layout_of
from tests.models import build, make_batch
from tests.parity import Case, one_step, strategy_of
from tests.ranks import RankPool
from tests.tables import each_row

MODEL = "lm, gpt2, dropout"
PROBABILITY = 0.3


def drops(module: nn.Module) -> dict[str, nn.Dropout]:
    """Its dropouts by name; that of attention is set to 0."""
    dropouts = {name: part for name, part in module.named_modules() if isinstance(part, nn.Dropout)}
    for name in [name for name in dropouts if name.endswith("attn_dropout")]:
        dropouts.pop(name).p = 0.0
    return dropouts


def a_step(mesh: str, choice: str, options: dict[str, Any]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The loss of a step, the state after it, and this rank's masks by the name of the dropout."""
    masks: dict[str, Tensor] = {}

    def keep(name: str, part: nn.Module, inputs: tuple[Tensor, ...], out: Tensor):
        assert torch.equal(masks.setdefault(name, out != 0), out != 0), f"{name} drops others where it runs again"

    with strategy_of(Case(choice, MODEL, mesh, options)) as strategy:
        for name, part in drops(strategy.module).items():
            part.register_forward_hook(partial(keep, name))
        seed_everything(7, here(Mesh.parse(mesh)).drawing_rank)
        loss = one_step(strategy, [make_batch(MODEL, 2, 0)]).item()
        return loss, strategy.full_state_dict(), masks


@each_row(
    "mesh, choice, options",
    [
        ("cp=3", "simple_ddp", {"context_parallel": "ring"}),
        ("cp=2,tp=2", "zero2", {"activation_checkpointing": "selective"}),
    ],
)
def test_a_model_with_dropout(ranks: RankPool, mesh, choice, options):
    sizes = Mesh.parse(mesh)
    results = ranks.run(sizes.size, a_step, mesh, choice, options)
    layout = layout_of(AttentionCase(sizes.degree("cp"), options.get("context_parallel", "zigzag")))
    module, batch = build(MODEL), make_batch(MODEL, 2, 0)
    for name, part in drops(module).items():
        parts = [masks[name] for _, _, masks in results][:: sizes.degree("tp")]
        assert not any(torch.equal(parts[0], mask) for mask in parts[1:]), "ranks draw the same masks"
        mask = layout.whole(parts, 1)[:, : batch["input_ids"].shape[1]]
        part.register_forward_hook(lambda _, inputs, out, mask=mask: inputs[0] * mask / (1 - PROBABILITY))
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    loss = module(**batch).loss
    loss.backward()
    assert abs(results[0][0] - loss.item()) < 1e-5
    for name, parameter in module.named_parameters():
        moved, expected = results[0][1][name] - before[name], -0.1 * parameter.grad
        torch.testing.assert_close(moved, expected, atol=2e-6, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
