"""Whole runs on real ranks: files, record, evaluation, local models and data, and what bad input is answered with."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

import ddp
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.record_format import FlightRecord, RunRecord
from ddp_lab.runtime.build import seed_everything
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.samples import reviews
from ddp_lab.runtime.data.workloads import build_workload
from ddp_lab.runtime.distributed import choose_device_and_backend
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import from_rank0, on_every_rank
from ddp_lab.runtime.loop import PHASES
from ddp_lab.runtime.run import run, train_and_record
from scripts.print_docs import fields_of, record_page
from tests.analysis.windows import analysis_of
from tests.checkpoints import here
from tests.parity import load
from tests.ranks import RankPool
from tests.tables import each_row

TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 40, "eval_samples": 13, "profile_wait": 1}
DOCS = Path(__file__).parents[2] / "docs"


def run_here(settings: dict[str, Any]) -> str | None:
    """Train on this rank, a part of a whole run; the error that a user would see, if any."""
    try:
        train_and_record(RunConfig.of(**settings), here(), load)
    except UserError as error:
        return str(error)
    return None


def batches_of_evaluation(config: RunConfig) -> list[dict[str, torch.Tensor]]:
    workload = build_workload(config)
    return [workload.collate([sample]) for sample in workload.evaluation]


def record_of(folder: Path, choice: str) -> dict[str, Any]:
    (path,) = (folder / "profile" / choice).glob("*.run.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("choice", ["bucket_ddp_async", "pytorch_ddp"])
def test_a_run_leaves_its_record_and_traces(ranks: RankPool, tmp_path, choice):
    settings = {**TINY, "choice": choice, "output_dir": str(tmp_path), "profile_repeat": 1}
    assert ranks.run(2, run_here, settings) == [None, None]
    record = record_of(tmp_path, choice)
    assert record["world_size"] == 2 and record["choice"] == choice and record["backend"] == "gloo"
    assert record["backend_class"] == "ProcessGroupGloo"
    assert len(record["step_time_s"]) == len(record["train_loss"]) == 5  # 40 samples in batches of 8
    assert [seconds is None for seconds in record["step_time_s"]] == [False, True, True, True, True]
    assert record["eval"]["samples"] == 13 and record["eval"]["accuracy"] is None
    assert [row["rank"] for row in record["memory"]] == [0, 1]
    for row in record["memory"]:
        states = sum(row[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer_state", "buffers"))
        assert states <= row["peak_model_states_bytes"] <= row["peak_bytes"] < 2 * states
        uncounted = row["timeline"]["allocated_bytes"][-1] - states  # what a communication thread holds for a moment
        assert abs(uncounted) < 512, "something is counted wrong, or was never freed"
    analysis = analysis_of(tmp_path / "profile" / choice)
    assert analysis.record == record
    assert analysis.summary["steps"].tolist() == [2, 2]
    announced = sum(collective["payload_bytes"] for collective in record["expected_traffic"])
    assert analysis.summary["collective_bytes_per_step"].tolist() == [announced, announced]
    assert record.keys() == {field.name for field in msgspec.structs.fields(RunRecord)}
    events = read_trace(analysis.timelines[0].path).events  # every name that is not torch's is documented
    rows = documented("profiling.md")
    patterns = [re.compile(re.escape(row).replace("NAME", r"\S+").replace("<n>", r"\d+") + "$") for row in rows]
    names = set(events.loc[events["cat"] == "user_annotation", "name"])
    assert {name for name in names if not any(pattern.match(name) for pattern in patterns)} == set()
    assert set(PHASES) <= set(rows)


def test_every_field_of_a_record_is_documented():
    page = (DOCS / "run-record.md").read_text()
    assert all(fields_of(RunRecord).values())
    assert record_page(page) == page, "python -m scripts.print_docs prints it anew"
    section = page.split("## The flight record")[1]
    rows = re.findall(r"^\| ([\w\[\].,_ ]+) \|", section, re.MULTILINE)[1:]
    assert ", ".join(rows).split(", ") == [name for name in fields_of(FlightRecord) if name != "entries"]


def documented(page: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", (DOCS / page).read_text(), re.MULTILINE)


def test_evaluation_and_losses_do_not_depend_on_the_number_of_ranks(ranks: RankPool, tmp_path):
    records = []
    for world_size in (1, 3):
        settings = {
            **TINY,
            "choice": "bucket_ddp_async",
            "output_dir": str(tmp_path / str(world_size)),
            "train_samples": 43,
            "no_profile": True,
            "global_batch_size": 6,
            "clip_grad_norm": 1.0,
        }  # the last window holds 1 sample
        assert set(ranks.run(world_size, run_here, settings)) == {None}
        records.append(record_of(tmp_path / str(world_size), "bucket_ddp_async"))
    alone, record = records
    assert record["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)
    assert record["eval"]["loss"] == pytest.approx(alone["eval"]["loss"], rel=1e-5)
    assert record["eval"]["samples"] == 13


# Local models and data -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved classifier, and reviews by save_to_disk and as CSV with names for labels."""
    from datasets import Dataset, DatasetDict
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from ddp_lab.runtime.data.text import load_trained_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("local")
    train, test = reviews(60, 20)
    tokenizer = load_trained_tokenizer(train_tokenizer([review["text"] for review in train], 512, "<end>"))
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    splits = {"train": Dataset.from_list(list(train)), "test": Dataset.from_list(list(test))}
    DatasetDict(splits).save_to_disk(folder / "saved")
    names = ["terrible", "poor", "fair", "good", "superb"]
    named = [{"body": review["text"], "stars": names[review["label"]]} for review in train]
    Dataset.from_list(named).to_csv(folder / "named.csv")
    (folder / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    return folder


def yelp_settings(local: Path, output: Path, dataset: str) -> dict[str, Any]:
    return {
        "choice": "flat_ddp",
        "workload": "yelp",
        "model": str(local / "model"),
        "dataset": str(local / dataset),
        "train_samples": 24,
        "eval_samples": 10,
        "no_profile": True,
        "output_dir": str(output),
    }


def test_local_model_and_data(ranks: RankPool, local, tmp_path):
    """Through the code that loads `yelp` from the hub; the saved model is bf16 and trains in fp32."""
    assert ranks.run(2, run_here, yelp_settings(local, tmp_path, "saved")) == [None, None]
    record = record_of(tmp_path, "flat_ddp")
    assert len(record["train_loss"]) == 3 and record["eval"]["samples"] == 10
    assert record["memory"][0]["parameters_bytes"] == 4 * record["parameters"]


def test_named_labels_and_adapters_of_a_local_model(ranks: RankPool, local, tmp_path):
    """The adapter that the run leaves, on the saved model, gives the loss that the run found on held-out samples."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    settings = yelp_settings(local, tmp_path, "named.csv") | {"text_column": "body", "label_column": "stars"}
    settings |= {"lora_rank": 4, "lr": 0.01, "choice": "zero3"}
    assert ranks.run(2, run_here, settings) == [None, None]
    record = record_of(tmp_path, "zero3")
    (adapter,) = (tmp_path / "profile" / "zero3").glob("*.adapter")
    assert sorted(path.name for path in adapter.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert adapter.name == f"{record['run_id']}.adapter"
    for row in record["memory"]:
        assert row["parameters_bytes"] < 4 * record["parameters"] * 0.6, "the frozen base is not sharded"
    base = AutoModelForSequenceClassification.from_pretrained(
        local / "model", num_labels=5, dtype=torch.float32, ignore_mismatched_sizes=True
    )
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    assert model.peft_config["default"].base_model_name_or_path == str(local / "model")
    config = RunConfig.of(**{**settings, "lora_rank": None})
    workload = ranks.run(1, batches_of_evaluation, config)[0]
    with torch.no_grad():
        loss = sum(model(**batch).loss.item() * len(batch["labels"]) for batch in workload) / 10
    assert loss == pytest.approx(record["eval"]["loss"], rel=1e-5)


def test_what_is_wrong_is_said_on_every_rank(ranks: RankPool, local, tmp_path):
    """What is found once torch is there; before: `tests/mistakes.toml`."""
    tiny = {**TINY, "choice": "flat_ddp", "output_dir": str(tmp_path)}
    for settings, expected in (
        (tiny | {"train_samples": 1, "no_profile": True}, "1 training samples for 2 ranks"),
        (tiny | {"lora_rank": 2}, "--lora-rank: the model of workload mlp is of class MLP; adapters are"),
        (yelp_settings(local, tmp_path, "broken.parquet"), "broken.parquet: cannot be read"),
    ):
        messages = ranks.run(2, run_here, settings)
        assert messages[0] == messages[1] and expected in messages[0], messages
    assert not list(tmp_path.rglob("*.run.json"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file that is always full")
def test_a_full_disk_is_said_and_leaves_earlier_results(ranks: RankPool, tmp_path):
    settings = {**TINY, "choice": "flat_ddp", "output_dir": str(tmp_path), "profile_repeat": 1}
    ranks.run(2, run_here, settings)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    messages = ranks.run(2, run_on_full_disk, settings)
    assert all("rank 1: cannot write" in message and "No space left" in message for message in messages), messages
    assert {path: path.read_bytes() for path in before} == before
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")], "temporary files were left behind"


def run_on_full_disk(settings: dict[str, Any]) -> str | None:
    """Rank 1's traces go to a device that is full."""
    import gzip

    real_open = gzip.open
    if dist.get_rank() == 1:
        gzip.open = lambda path, *args, **kwargs: real_open("/dev/full", *args, **kwargs)  # type: ignore[assignment]
    try:
        return run_here(settings)
    finally:
        gzip.open = real_open


def fail_on_one_rank(failing: int) -> str:
    def make() -> int:
        if dist.get_rank() == failing:
            raise KeyError("planted")
        return 1

    with pytest.raises((UserError, KeyError), match="planted") as caught:
        from_rank0(make) if failing == 0 else on_every_rank(make)
    return caught.typename


def test_no_rank_waits_for_one_that_failed(ranks: RankPool):
    assert ranks.run(2, fail_on_one_rank, 0) == ["KeyError", "UserError"]
    assert ranks.run(2, fail_on_one_rank, 1) == ["UserError", "KeyError"]


# Settings ------------------------------------------------------------------------------------------------------------


def on_machine(monkeypatch: pytest.MonkeyPatch, gpus: int, local_ranks: int):
    """Pretend to be rank 1 of `local_ranks` under torchrun on a machine with `gpus` GPUs."""
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(local_ranks))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@each_row(
    "gpus, flags, expected",
    [
        (0, {}, ("cpu", "gloo")),
        (2, {}, ("cuda:1", "nccl")),
        (1, {"backend": "gloo"}, ("cuda:0", "gloo")),
        (1, {}, ("cuda:0", "nccl")),  # perhaps another GPU than that of the other rank: see `require_own_gpus`
        (0, {"device": "cuda"}, "torch sees no CUDA device"),
        (0, {"backend": "nccl"}, "--backend nccl needs CUDA"),
        (2, {"backend": "nccl-legacy"}, ("cuda:1", "nccl-legacy")),
        (2, {"link": "1gbit"}, "--link 1gbit slows down Gloo between CPUs, and this run is on GPUs"),
        (2, {"link": "1gbit", "device": "cpu"}, ("cpu", "gloo")),
    ],
)
def test_device_and_backend(monkeypatch, gpus, flags, expected):
    on_machine(monkeypatch, gpus, local_ranks=2)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            choose_device_and_backend(RunConfig.of(**flags))
    else:
        device, backend = choose_device_and_backend(RunConfig.of(**flags))
        assert (str(device), backend) == expected


def test_a_run_without_torchrun_says_how_to_start_it(monkeypatch, capfd):
    on_machine(monkeypatch, gpus=0, local_ranks=1)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("sys.argv", ["main_ddp.py", "--lr", "1"])
    monkeypatch.setattr("ddp_lab.runtime.run.silence_libraries", lambda: None)
    assert run(RunConfig(choice="flat_ddp"), ddp.load) == 1
    line = capfd.readouterr().err
    assert line.startswith("error: flat_ddp: RANK, LOCAL_RANK not set") and "OMPI_COMM_WORLD_RANK" in line
    assert line.endswith("torchrun --standalone --nproc_per_node=2 main_ddp.py --lr 1\n") and line.count("\n") == 1


def test_dropout_differs_between_ranks_and_is_repeatable():
    masks = []
    for rank in (0, 1, 0):
        seed_everything(3, rank)
        masks.append(torch.nn.functional.dropout(torch.ones(64)))
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])
