"""Dropout around a ring: one process that drops the same has the same outputs and gradients.

Which probabilities a rank has dropped is read from its outputs: where values are the rows of an identity, outputs are
probabilities, and the generators' state alone says which of them are 0.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from context_parallel.blocks import Mask
from context_parallel.dropout import Dropped
from context_parallel.ring import Ring, RingAttention
from ddp_lab.runtime.build import seed_everything
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.strategy.recompute.by_torch import KEPT
from tests.context_parallel.test_attention import SCALE, Case, inputs, layout_of
from tests.models import build, make_batch
from tests.parity import one_step
from tests.pipeline_parallel.pipelines import CPU, strategy_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row

PROBABILITY = 0.3
MODEL = "lm, gpt2, dropout"


def kept_by(ring: Ring, q: Tensor, k: Tensor, documents: Tensor | None) -> Tensor:
    """Which of this rank's probabilities are not 0, (batch, heads, tokens of this rank, all tokens), in the next
    attention of such queries and keys. The generators are as they were."""
    state, size = torch.get_rng_state(), q.shape[2] * ring.size
    zeros = [torch.zeros(*one.shape[:3], size) for one in (q, k)]
    values = ring.layout.part(torch.eye(size).expand(*k.shape[:2], size, size), ring.rank, 2)
    with torch.no_grad():
        kept = RingAttention.apply(*zeros, values, documents, ring, 1.0, PROBABILITY) > 0
    torch.set_rng_state(state)
    return kept


def seen_by(length: int, documents: Tensor | None) -> Tensor:
    seen = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    return seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])


def attend(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, documents: Tensor | None = None, scale: float = SCALE) -> Any:
    """Attention in one process that drops all but these."""
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen_by(q.shape[2], documents), -torch.inf)
    return scores.softmax(-1) * kept / (1 - PROBABILITY) @ v


def on_rank(case: Case) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    ring, (given, documents) = Ring(group, zigzag=layout_of(case).zigzag), inputs(case)
    *qkv, gradient = (ring.layout.part(tensor, ring.rank, 2) for tensor in given)
    torch.manual_seed(ring.rank)
    kept = kept_by(ring, qkv[0], qkv[1], documents)
    for tensor in qkv:
        tensor.requires_grad_()
    out = RingAttention.apply(*qkv, documents, ring, SCALE, PROBABILITY)
    state = torch.get_rng_state()
    gradients = torch.autograd.grad(out, qkv, gradient, retain_graph=True)
    again = torch.autograd.grad(out, qkv, gradient)
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))
    assert torch.equal(torch.get_rng_state(), state), "backward draws anew"
    return [out.detach(), *gradients, kept]


CASES = [
    *(Case(ranks, way, torch.float64) for ranks in (2, 3) for way in ("ring", "zigzag")),
    Case(4, "zigzag", heads=(4, 2), unit=5, documents=True),
    Case(2, "ring", torch.bfloat16, heads=(4, 1), unit=16),
]


@each_row("case", CASES)
def test_attention_with_dropout(ranks: RankPool, case: Case) -> None:
    parts = list(zip(*ranks.run(case.ranks, on_rank, case), strict=True))
    *found, kept = (layout_of(case).whole(part, 2) for part in parts)
    (*given, gradient), documents = inputs(case)
    exact = [tensor.double().requires_grad_() for tensor in given]
    out = attend(*exact, kept, documents)
    wanted = [out.detach(), *torch.autograd.grad(out, exact, gradient.double())]
    for name, one, right in zip(("out", "q", "k", "v"), found, wanted, strict=True):
        assert one.dtype == case.dtype
        assert (one.double() - right).norm() / right.norm() < 4 * torch.finfo(case.dtype).eps, name
    pairs = seen_by(kept.shape[2], documents).expand_as(kept).sum().item()
    expected, spread = pairs * (1 - PROBABILITY), (pairs * PROBABILITY * (1 - PROBABILITY)) ** 0.5
    assert abs(kept.sum().item() - expected) < 4 * spread
    chunks = [kept.split(case.unit, 2)[rank].split(case.unit, 3)[rank].tril() for rank in range(case.ranks)]
    assert not any(torch.equal(one, chunks[0]) for one in chunks[1:]), "ranks draw the same masks"


class Seen(TorchDispatchMode):
    """The operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(operator)
        return operator(*args, **(kwargs or {}))


def test_no_policy_of_recomputation_keeps_scores() -> None:
    q = torch.randn(1, 2, 4, 8)
    with Seen() as seen:
        Dropped(PROBABILITY).forward(q, q, q, Mask(causal=True), SCALE)
    assert not seen.operators & KEPT


# A whole model -------------------------------------------------------------------------------------------------------


def record(module: Any, ring: Ring) -> dict[str, Tensor]:
    """What the next forward pass drops, by the name of the module; a second one must drop the same."""
    found: dict[str, Tensor] = {}

    def keep(name: str, kept: Tensor) -> None:
        assert torch.equal(found.setdefault(name, kept), kept), f"{name} drops others where it runs again"

    def after_dropout(name: str, part: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        assert part.p == PROBABILITY
        keep(name, out != 0)

    def before_attention(name: str, layer: Any) -> None:
        plain = layer.context.attend

        def attended(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
            assert rest[-1] == PROBABILITY
            keep(name, kept_by(ring, q, k, rest[1]))
            return plain(q, k, *rest)

        layer.context = SimpleNamespace(attend=attended)

    for name, part in module.named_modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(partial(after_dropout, name))
        elif getattr(part, "is_causal", False):
            before_attention(name, part)
    return found


def a_step(mesh: str, choice: str, options: dict[str, Any]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The loss of a step, the state after it, and what this rank has dropped."""
    with strategy_in_pipeline(mesh, choice, MODEL, **options) as strategy:
        module: Any = strategy.module
        kept = record(module, module.transformer.h[0].attn.context.ring)
        groups: Any = SimpleNamespace(mesh=Mesh.parse(mesh))
        seed_everything(7, Ranks(dist.get_rank(), dist.get_world_size(), CPU, "gloo", groups).drawing_rank)
        loss = one_step(strategy, [make_batch(MODEL, 2, 0)]).item()
        return loss, strategy.full_state_dict(), kept


def replay(module: Any, kept: dict[str, Tensor]) -> None:
    """Let a model in one process drop just this."""
    from transformers import AttentionInterface

    def attended(part: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **told: Any) -> tuple[Tensor, None]:
        return attend(q, k, v, kept[part.name], scale=q.shape[-1] ** -0.5).transpose(1, 2), None

    AttentionInterface.register("replay", attended)
    module.config._attn_implementation = "replay"
    for name, part in module.named_modules():
        if isinstance(part, nn.Dropout) and name in kept:
            part.register_forward_hook(lambda _, given, out, name=name: given[0] * kept[name] / (1 - PROBABILITY))
        part.name = name


@each_row(
    "mesh, choice, options",
    [
        ("cp=2", "zero1", {}),
        ("cp=3", "simple_ddp", {"context_parallel": "ring"}),
        ("cp=2", "zero3", {"activation_checkpointing": "block"}),
        ("cp=2", "tp", {"activation_checkpointing": "selective"}),
        ("cp=2,tp=2", "zero2", {"activation_checkpointing": "torch:block"}),
    ],
)
def test_a_model_with_dropout(ranks: RankPool, mesh: str, choice: str, options: dict[str, Any]) -> None:
    sizes = Mesh.parse(mesh)
    results = ranks.run(sizes.size, a_step, mesh, choice, options)
    layout = layout_of(Case(sizes.degree("cp"), options.get("context_parallel", "zigzag")))
    tensor, length = sizes.degree("tp"), make_batch(MODEL, 2, 0)["input_ids"].shape[1]
    kept = {}
    for name in results[0][2]:
        parts = [result[2][name] for result in results]
        if parts[0].ndim == 4:  # heads of each rank of tp
            of_cp = [torch.cat(parts[first : first + tensor], 1) for first in range(0, len(parts), tensor)]
            kept[name] = layout.whole(of_cp, 2)[:, :, :length, :length]
        else:
            kept[name] = layout.whole(parts[::tensor], 1)[:, :length]
    module = build(MODEL)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    replay(module, kept)
    loss = module(**make_batch(MODEL, 2, 0)).loss
    loss.backward()
    assert abs(results[0][0] - loss.item()) < 1e-5
    for name, one in module.named_parameters():
        moved, wanted = results[0][1][name] - before[name], -0.1 * one.grad
        torch.testing.assert_close(moved, wanted, atol=2e-6, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
