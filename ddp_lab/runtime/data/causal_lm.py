"""Causal language modelling: a model of any architecture, and text as packed sequences of tokens
(docs/own-workload.md)."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data import hub
from ddp_lab.runtime.data import samples as built_in
from ddp_lab.runtime.data.documents import Source
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.data.packing import Documents, TokenSequences, collate_sequences, target_count
from ddp_lab.runtime.data.text import load_trained_tokenizer, train_tokenizer
from ddp_lab.runtime.data.workload import Language, Workload
from ddp_lab.runtime.distributed import node_leader_first
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import from_rank0, on_every_rank
from ddp_lab.runtime.settings.data import SAMPLE_EXPERTS
from ddp_lab.runtime.watch.phases import BUILDING, during
from ddp_lab.strategy.batches import IGNORED

SAMPLE_VOCABULARY, SAMPLE_LENGTH = 1024, 128
LONGEST_BY_DEFAULT = 1024
STREAMED_SAMPLES, EVAL_SAMPLES = 2400, 256
PROMPT_TOKENS = 16
END_OF_TEXT = "<|endoftext|>"
TEXTS_FOR_TOKENIZER = 10_000


class LanguageSamples(NamedTuple):
    """Training and held-out sequences, and what the user should read of them."""

    train: TokenSequences
    evaluation: TokenSequences
    notes: tuple[str, ...] = ()


def build(config: RunConfig) -> Workload:
    """Workload `sample-lm` or `sample-moe`, or `hub` with task causal-lm. Collective."""
    read_no_masks()
    return _from_hub(config) if config.workload == "hub" else _built_in(config)


def _built_in(config: RunConfig) -> Workload:
    tokenizer = load_trained_tokenizer(built_in.tokenizer_json("prose"), END_OF_TEXT)
    length = sample_length(config)
    train, held_out = (
        TokenSequences(Documents.of([*ids, tokenizer.eos_token_id] for ids in tokenizer(part)["input_ids"]), length)
        for part in built_in.prose()
    )
    samples = LanguageSamples(train.without_short_last(), held_out[: config.eval_samples or EVAL_SAMPLES])
    return _workload(config, sample_model(config), tokenizer, samples, length, learning_rate=3e-3)


def sample_length(config: RunConfig) -> int:
    return config.sequence_length or SAMPLE_LENGTH


@during(BUILDING)
def sample_model(config: RunConfig) -> nn.Module:
    """The model of `sample-lm`, a Llama of 1.9 M parameters, or of `sample-moe`, a Mixtral; with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": SAMPLE_VOCABULARY,
        "max_position_embeddings": max(sample_length(config), LONGEST_BY_DEFAULT),
        "initializer_range": 0.06,  # not 0.02: so it learns within tens of steps
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    if config.workload != "sample-moe":
        return LlamaForCausalLM(LlamaConfig(intermediate_size=704, **shape))
    shape |= {"num_local_experts": SAMPLE_EXPERTS, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    shape |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    return MixtralForCausalLM(MixtralConfig(intermediate_size=320, **shape))


def _from_hub(config: RunConfig) -> Workload:
    name, dataset = str(config.model), str(config.dataset)
    source = Source(dataset, config.text_column, config.streaming)
    is_here = Path(name).expanduser().is_dir()  # there is nothing to download, and none need wait
    loaded = (on_every_rank if is_here else node_leader_first)(lambda: hub.load_causal_lm(name))
    model, tokenizer = loaded.model, loaded.tokenizer
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if tokenizer is None:
        as_json = from_rank0(lambda: train_tokenizer(source.texts(TEXTS_FOR_TOKENIZER), vocabulary, END_OF_TEXT))
        tokenizer = load_trained_tokenizer(as_json, END_OF_TEXT)
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"--model {name}: its tokenizer has {len(tokenizer)} tokens and its embedding {vocabulary} rows"
        )
    length = sequence_length(config, model)
    packs = keeps_documents_apart(model)
    read = from_rank0 if config.streaming else node_leader_first  # a stream is read once
    samples = read(lambda: _samples(config, source, tokenizer, length, packs))
    if not packs:
        note = f"{type(model).__name__} does not keep packed documents apart: a sequence holds tokens of one document"
        samples = samples._replace(notes=(note, *samples.notes))
    return _workload(config, model, tokenizer, samples, length, learning_rate=1e-3 if loaded.is_new else 5e-5)


def sequence_length(config: RunConfig, model: nn.Module) -> int:
    """Tokens in a sequence: what the user asks for, or 1024, or what the model takes if that is less."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr, operator]
    if config.sequence_length and most and config.sequence_length > most:
        raise UserError(f"--sequence-length {config.sequence_length}: {config.model} takes at most {most} tokens")
    return config.sequence_length or min(LONGEST_BY_DEFAULT, most or LONGEST_BY_DEFAULT)


@during(BUILDING)
@torch.no_grad()
def keeps_documents_apart(model: nn.Module) -> bool:
    """Whether a document has the same logits after another one, in one sequence, as alone.

    Models without positions or with a recurrent state do not, nor do those that make their masks in ways of their own.
    """
    was_training = model.training
    model.eval()
    collate, documents = collate_sequences(0), [[1, 2, 3], [4, 1, 2, 3]]
    try:
        packed = model(**collate(list(TokenSequences(Documents.of(documents), 7)))).logits[0, 3:]
        alone = model(input_ids=torch.tensor([documents[1]], device="cpu")).logits[0]
    except (TypeError, ValueError):  # it takes no positions
        return False
    finally:
        model.train(was_training)
    return bool((packed - alone).abs().max() <= 1e-4 * alone.abs().max())


def _samples(config: RunConfig, source: Source, tokenizer: Any, length: int, packs: bool) -> LanguageSamples:
    count, held_out = config.train_samples, config.eval_samples or EVAL_SAMPLES
    count = count or (STREAMED_SAMPLES if config.streaming else None)
    text = source.tokenized(tokenizer, config.seed, length, (count, held_out))
    cuts = not text.has_prompts
    packs = packs and cuts
    sequences = TokenSequences(text.train, length, packs, cuts)
    if text.held_out:
        train, evaluation = sequences, TokenSequences(text.held_out[0], length, packs, cuts)
        left_out = train.left_out + evaluation.left_out
        if packs:
            train = train.without_short_last()
    else:
        left_out, total = sequences.left_out, len(sequences)
        at = max(0, total - min(held_out, max(1, total // 10, total - count if count else 0)))
        train, evaluation = sequences[:at], sequences[at:]
    if not len(evaluation) or len(train) < dist.get_world_size():
        ranks = dist.get_world_size()
        raise UserError(
            f"--dataset {source.name}: its text makes {len(train)} training and {len(evaluation)} held-out sequences "
            f"of {length} tokens; needs one for each of {ranks} ranks, and one held out: give more text, or a smaller "
            "--sequence-length"
        )
    notes = (f"{left_out} samples left out: nothing of their completion is within {length} tokens",)
    return LanguageSamples(train[:count], evaluation[:held_out], notes if left_out and not cuts else ())


def _workload(
    config: RunConfig, model: nn.Module, tokenizer: Any, samples: LanguageSamples, length: int, learning_rate: float
) -> Workload:
    # the prompt of the first held-out sample, or its first words if it has none
    first = samples.evaluation[0]
    prompt_length = int((first["labels"] != IGNORED).int().argmax())
    ids = first["input_ids"][: prompt_length if prompt_length > 1 else PROMPT_TOKENS]
    prompt = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return Workload(
        model=model,
        train=samples.train[: config.train_samples],
        evaluation=samples.evaluation,
        collate=collate_sequences(tokenizer.pad_token_id),
        learning_rate=learning_rate,
        count=target_count,
        language=Language(tokenizer, prompt, length),
        notes=samples.notes,
    )
