"""Runs that train a language model: built-in text, the user's own, generated text, and what bad input is answered
with."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ddp_lab.runtime.build import seed_everything
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.samples import prose
from ddp_lab.runtime.data.workloads import build_workload, resolve_workload
from tests.ranks import RankPool
from tests.runtime.test_run import record_of, run_here
from tests.tables import each_row

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 400}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, a saved model with its tokenizer, and the same documents in all formats."""
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel

    from ddp_lab.runtime.data.causal_lm import END_OF_TEXT
    from ddp_lab.runtime.data.text import load_trained_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("language")
    texts = prose()[1]
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(GPT2))
    tokenizer = load_trained_tokenizer(train_tokenizer(texts, 400, END_OF_TEXT), END_OF_TEXT)
    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = Dataset.from_list([{"text": text, "number": number} for number, text in enumerate(texts)])
    data.to_parquet(folder / "text.parquet")
    data.to_csv(folder / "text.csv")
    data.to_json(folder / "text.jsonl")
    (folder / "text.json").write_text(json.dumps([{"body": text} for text in texts]))
    data.save_to_disk(folder / "saved")
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number}.txt").write_text(text)
    (folder / "text.txt").write_text("\n\n".join(texts))
    (folder / "short.txt").write_text("Only a few words.")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in [*texts, None])
    (folder / "number.jsonl").write_text(rows)
    prompts = [{"prompt": text[:90], "completion": text[90 : 90 + 5 * n]} for n, text in enumerate(texts * 3)]
    prompts[4]["prompt"] *= 9
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


def settings_of(local: Path, output: Path, **changes) -> dict[str, Any]:
    settings = {
        "choice": "flat_ddp",
        "task": "causal-lm",
        "model": "model",
        "dataset": "text.jsonl",
        "sequence_length": 32,
        "train_samples": 8,
        "eval_samples": 3,
        "no_profile": True,
        "output_dir": str(output),
    } | changes
    return settings | {name: str(local / settings[name]) for name in ("model", "dataset")}


DATA = ["text.csv", "text.json", "saved", "text.txt"]


@each_row("dataset, streaming", [*((name, False) for name in DATA), ("text.parquet", True), ("texts", True)])
def test_text_in_every_format(ranks: RankPool, local, dataset, streaming):
    column = "body" if dataset == "text.json" else "text"
    settings = settings_of(local, Path("unused"), dataset=dataset, streaming=streaming, text_column=column)
    shapes = ranks.run(2, workload_here, settings)
    assert shapes[0] == shapes[1] and shapes[0]["samples"] == (8, 3)
    assert set(map(len, shapes[0]["ids"])) == {32}


def workload_here(settings: dict[str, Any]) -> dict[str, Any]:
    workload = build_workload(resolve_workload(RunConfig.of(**settings), has_gpu=False))
    return {
        "samples": (len(workload.train), len(workload.evaluation)),
        "ids": [sample["input_ids"].tolist() for sample in workload.train],
    }


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = [
    GPT2,
    {"model_type": "llama", **SMALL, "vocab_size": 400, "max_position_embeddings": 64},
]


@each_row("family", FAMILIES)
def test_new_weights_are_those_of_the_seed_on_every_rank(ranks: RankPool, local, family):
    """Ranks build at the same time, each on its own; what `transformers` builds alone has the same bits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (local / family["model_type"]).mkdir()
    (local / family["model_type"] / "config.json").write_text(json.dumps(family))
    seed_everything(5, rank=0)
    alone = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(local / family["model_type"]))
    settings = settings_of(local, Path("unused"), model=family["model_type"], seed=5)
    for world_size in (1, 2):
        assert ranks.run(world_size, weights_here, settings) == [bits_of(alone)] * world_size


def weights_here(settings: dict[str, Any]) -> dict[str, bytes]:
    seed_everything(settings["seed"], rank=0)
    return bits_of(build_workload(resolve_workload(RunConfig.of(**settings), has_gpu=False)).model)


def bits_of(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def test_text_in_files_is_held_out_and_counted_by_tokens(ranks: RankPool, local, tmp_path):
    """With a config alone: random weights, and a tokenizer made from the text."""
    settings = settings_of(local, tmp_path, model="config", dataset="text.txt", sequence_length=None, generate=6)
    assert ranks.run(2, run_here, settings) == [None, None]
    record = record_of(tmp_path, "flat_ddp")
    assert record["config"]["workload"] == "hub" and record["train_samples"] == 8 and record["eval_samples"] == 3
    assert record["eval"]["perplexity"] == pytest.approx(math.exp(record["eval"]["loss"]))
    assert 2 * 63 < record["eval"]["tokens"] <= 3 * 63  # of one document; GPT-2's configuration has 64 positions
    assert record["generated"].keys() == {"prompt", "text", "tokens"} and record["generated"]["tokens"] <= 6


def test_prompts_and_completions(ranks: RankPool, local, tmp_path):
    settings = settings_of(local, tmp_path, dataset="prompts.jsonl", sequence_length=64, train_samples=None)
    assert ranks.run(2, run_here, settings) == [None, None]
    record = record_of(tmp_path, "flat_ddp")
    (note,) = record["notes"]
    assert "samples left out: nothing of their completion is within 64 tokens" in note
    left_out = int(note.split()[0])
    assert left_out >= 1 and record["train_samples"] + record["eval_samples"] == 3 * len(prose()[1]) - left_out


def test_sharded_models_generate_what_whole_ones_do(ranks: RankPool, local, tmp_path):
    """GPT-2's embeddings are tied."""
    texts = []
    for name in ("baseline", "zero3"):
        settings = settings_of(local, tmp_path, choice=name, generate=4, prompt="The value of", max_steps=1)
        if name == "baseline":
            settings["bucket_cap_mb"] = 25.0
        ranks.run(2, run_here, settings)
        texts.append(record_of(tmp_path, name)["generated"])
    assert texts[0] == texts[1] and texts[0]["tokens"] == 4 and texts[0]["prompt"] == "The value of"


BAD = {
    "a text is missing": ({"dataset": "number.jsonl"}, "column text: None is not text"),
    "no text column": ({"dataset": "text.json"}, "no column text (it has body); give --text-column"),
    "too little text": ({"dataset": "short.txt"}, "needs one for each of 2 ranks"),
    "more than the model takes": ({"sequence_length": 65}, "takes at most 64 tokens"),
}


@each_row("case", BAD)
def test_bad_text(ranks: RankPool, local, tmp_path, case):
    changes, expected = BAD[case]
    messages = ranks.run(2, run_here, settings_of(local, tmp_path, **changes))
    assert messages[0] == messages[1] and messages[0] and expected in messages[0], messages
    assert "\n" not in messages[0]
