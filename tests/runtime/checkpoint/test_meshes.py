"""Checkpoints go from any mesh to any other: parameters and optimizer states stay the same bit for bit."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddp_lab.runtime.checkpoint.state import persistent_buffers
from ddp_lab.runtime.errors import UserError
from tests.mesh_checkpoints import PLACES, run_leg, straight
from tests.models import build
from tests.parity import message_of
from tests.ranks import RankPool
from tests.runtime.checkpoint.test_files import rewrite

OVER_LAYERS = ["zero3 on tp=2", "zero3 on shard=2,tp=2", "one rank", "tp=4, whose ranks share keys", "plain"]
OVER_LAYERS += ["zero1 on dp=2,tp=2"]
OVER_STAGES = ["pp=4", "one rank", "zero3 on dp=2,pp=2", "zero3 on tp=2", "two stages a rank", "plain"]
OVER_STAGES += ["zero1 on pp=2,tp=2", "zero2 on dp=2,pp=2", "another split"]
OVER_EXPERTS = ["zero3 on dp=2,ep=2", "one rank", "zero1 on ep=4", "zero2 on ep=2,tp=2", "zero3 on dp=2,ep=2"]


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]):
    assert actual.keys() == expected.keys() and expected
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def elements_in(folder: Path) -> dict[str, int]:
    """How many elements are stored of parameters, and of optimizer states."""
    stored = Counter[str]()
    for file in folder.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            stored[key.split("/")[0]] += tensor.numel()
    return dict(stored)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        pytest.param("lm, gpt2", OVER_LAYERS, marks=pytest.mark.exhaustive),
        pytest.param("lm, gqa", OVER_LAYERS, marks=pytest.mark.slow),
        ("lm, gqa", ["zero3 on tp=2", "plain", "zero1 on dp=2,tp=2"]),
        pytest.param("lm, mixtral, no term", OVER_EXPERTS, marks=pytest.mark.slow),
        ("lm, mixtral, no term", ["zero3 on dp=2,ep=2", "one rank"]),
        pytest.param("lm, long, tied", OVER_STAGES, marks=pytest.mark.slow),
        ("deep, normed", ["two stages a rank", "one rank", "two stages a rank"]),
        pytest.param("lm, long, gpt2", OVER_STAGES, marks=pytest.mark.exhaustive),
    ],
)
def test_a_relay_over_meshes(ranks: RankPool, tmp_path, model, names):
    """Each leg loads what the one before has saved, and goes on as if there had been one rank and no stop."""
    ((straight_state, losses),) = ranks.run(1, straight, model, len(names))
    legs = []
    for leg, name in enumerate(names):
        before, after = tmp_path / str(leg - 1) if leg else None, tmp_path / str(leg)
        legs.append(ranks.run(PLACES[name].ranks, run_leg, PLACES[name], model, leg, before, after)[0])
        elements = [value.numel() for key, value in legs[-1].saved.items() if key.startswith("parameter ")]
        total, count = sum(elements), len(elements)
        wanted_elements = {"parameter": total, "optimizer": 2 * total, "optimizer_count": count}
        buffers = sum(buffer.numel() for buffer in persistent_buffers(build(model)).values())
        assert elements_in(after) == wanted_elements | ({"buffer": buffers} if buffers else {}), name
    for earlier, later in pairwise(legs):
        assert_equal(later.loaded, earlier.saved)
    assert [loss for leg in legs for loss in leg.losses] == pytest.approx(losses, rel=1e-5)
    for name, tensor in straight_state.items():
        torch.testing.assert_close(legs[-1].state_dict[name], tensor, rtol=1e-4, atol=1e-5)


WRONG_CUTS: dict[str, dict[str, object]] = {
    "saved is damaged: manifest.json cannot be understood": {"dim": 0},
    "is cut wrongly there": {"dim": 0, "length": 20, "ranges": [[[0, 20]]]},
    "element 480 of 984 is in no": {"dim": 0, "length": 41, "ranges": [[[0, 41]]]},
    "parameter/transformer.wte.weight: not stored": {},
}


def test_a_wrong_cut_is_one_line(ranks: RankPool, tmp_path):
    ranks.run(2, run_leg, PLACES["zero3 on tp=2"], "lm, gpt2", 0, None, tmp_path / "saved")
    for expected, cut in WRONG_CUTS.items():
        rewrite(tmp_path / "saved", cuts={"transformer.wte.weight": cut} if cut else {})
        leg = PLACES["one rank"], "lm, gpt2", 1, tmp_path / "saved", None
        (message,) = ranks.run(1, message_of, UserError, run_leg, *leg)
        assert expected in message and "\n" not in message, cut
