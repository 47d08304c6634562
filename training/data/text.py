"""Review classification: built-in reviews or a data set of the same schema, random weights or a pretrained model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from training.config import RunConfig
from training.data import hub
from training.data.reviews import STARS, make_reviews
from training.data.sampling import Collate
from training.data.workload import Workload
from training.distributed import from_rank0, node_leader_first
from training.errors import UserError

SAMPLE_VOCABULARY = 2048
MAX_TOKENS = 512
TRAIN_SAMPLES, EVAL_SAMPLES = 2400, 256


def build(config: RunConfig) -> Workload:
    """Workload `sample`, `smollm2-360m` or `yelp`. Collective.

    Raises:
        UserError: model or data set cannot be loaded or do not fit; on every rank.
    """
    train_samples, eval_samples = config.train_samples or TRAIN_SAMPLES, config.eval_samples or EVAL_SAMPLES
    if config.workload == "yelp":

        def load() -> tuple[nn.Module, Any, tuple[Sequence[Any], Sequence[Any]]]:
            tokenizer = hub.load_tokenizer(config.model or hub.MODEL)
            data = hub.load_reviews(config.dataset or hub.DATASET, train_samples, eval_samples, config.seed)
            tokenized = hub.tokenize(data[0], tokenizer, MAX_TOKENS), hub.tokenize(data[1], tokenizer, MAX_TOKENS)
            return hub.load_classifier(config.model or hub.MODEL, tokenizer, STARS), tokenizer, tokenized

        model, tokenizer, (train, evaluation) = node_leader_first(load)
    else:
        if config.model or config.dataset:
            raise UserError(f"--model and --dataset go with --workload yelp, not {config.workload}")
        reviews = make_reviews(train_samples, 2 * config.seed), make_reviews(eval_samples, 2 * config.seed + 1)
        tokenizer = load_trained_tokenizer(from_rank0(lambda: train_tokenizer([r["text"] for r in reviews[0]])))
        train, evaluation = ([_tokenized(review, tokenizer) for review in part] for part in reviews)
        model = random_llama_classifier(config.workload, tokenizer.pad_token_id)
    pretrained = config.workload == "yelp"
    return Workload(
        model,
        train,
        evaluation,
        padding_collate(tokenizer),
        learning_rate=5e-5 if pretrained else 3e-4,
        classifies=True,
    )


def train_tokenizer(texts: list[str]) -> str:
    """A byte-level BPE tokenizer trained on `texts`, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SAMPLE_VOCABULARY,
        special_tokens=["<pad>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def load_trained_tokenizer(as_json: str) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(as_json), pad_token="<pad>")


def random_llama_classifier(workload: str, pad_token_id: int) -> nn.Module:
    """SmolLM2's architecture with a head for five stars: whole (362 M parameters), or shrunk to 13 M."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    if workload == "smollm2-360m":
        shape = {
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "vocab_size": 49152,
        }
    else:
        shape = {
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": SAMPLE_VOCABULARY,
        }
    config = LlamaConfig.from_dict(
        {
            **shape,
            "num_labels": STARS,
            "pad_token_id": pad_token_id,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "tie_word_embeddings": True,
            "use_cache": False,
        }
    )
    model = LlamaForSequenceClassification(config)
    nn.init.normal_(model.model.embed_tokens.weight)  # torch's default, not 0.02: it learns within tens of steps
    return model


def padding_collate(tokenizer: Any) -> Collate:
    """Pads the samples of a batch to the longest among them."""

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        padded = tokenizer.pad([{"input_ids": s["input_ids"]} for s in samples], padding=True, return_tensors="pt")
        return {
            "input_ids": padded["input_ids"],
            "attention_mask": padded["attention_mask"],
            "labels": torch.tensor([s["label"] for s in samples]),
        }

    return collate


def _tokenized(review: Any, tokenizer: Any) -> dict[str, Any]:
    return {"label": review["label"], "input_ids": tokenizer(review["text"])["input_ids"]}
