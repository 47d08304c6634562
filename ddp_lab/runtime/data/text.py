"""Text classification: built-in reviews or a data set of your own, random weights or a pretrained model."""

from typing import Any

from torch import nn

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data import hub, samples
from ddp_lab.runtime.data.masks import read_no_masks, without_useless_mask
from ddp_lab.runtime.data.workload import Collate, Workload
from ddp_lab.runtime.distributed import node_leader_first
from ddp_lab.runtime.watch.phases import BUILDING, during

SAMPLE_VOCABULARY = 2048
MAX_TOKENS = 512
TRAIN_SAMPLES, EVAL_SAMPLES = 2400, 256
LLAMA_SHAPES = {
    "smollm2-360m": (960, 2560, 32, 15, 5, 49152),
    "sample": (384, 1024, 8, 6, 2, SAMPLE_VOCABULARY),
}
"""Hidden size, intermediate size, layers, attention heads, key-value heads, vocabulary."""


def build(config: RunConfig) -> Workload:
    """Workload `sample`, `smollm2-360m` or `yelp`. Collective."""
    read_no_masks()
    counts = (config.train_samples or TRAIN_SAMPLES, config.eval_samples or EVAL_SAMPLES)
    return _from_hub(config, *counts) if config.workload in ("yelp", "hub") else _built_in(config, *counts)


def _from_hub(config: RunConfig, train_samples: int, eval_samples: int) -> Workload:
    name, columns = config.model or hub.MODEL, hub.Columns(config.text_column, config.label_column)

    def load() -> Workload:
        tokenizer = hub.load_tokenizer(name)
        dataset = config.dataset or hub.DATASET
        data = hub.load_labelled_text(dataset, columns, train_samples, eval_samples, config.seed)
        labels = hub.in_order_of(data.labels, hub.label_numbers(name))
        train, evaluation = (
            hub.tokenize(part, columns, labels, tokenizer, MAX_TOKENS) for part in (data.train, data.evaluation)
        )
        model = hub.load_classifier(name, tokenizer, [*labels.values()])
        return Workload(model, train, evaluation, padding_collate(tokenizer), learning_rate=5e-5, classifies=True)

    return node_leader_first(load)


def _built_in(config: RunConfig, train_samples: int, eval_samples: int) -> Workload:
    tokenizer = load_trained_tokenizer(samples.tokenizer_json("reviews"))

    def tokenized(reviews: list[samples.Review]) -> list[dict[str, Any]]:
        ids = tokenizer([review["text"] for review in reviews])["input_ids"]
        return [{"label": review["label"], "input_ids": tokens} for review, tokens in zip(reviews, ids, strict=True)]

    train, evaluation = map(tokenized, samples.reviews(train_samples, eval_samples))
    model = random_llama_classifier(config.workload, tokenizer.pad_token_id)
    return Workload(model, train, evaluation, padding_collate(tokenizer), learning_rate=3e-4, classifies=True)


def train_tokenizer(texts: list[str], vocabulary: int, end: str) -> str:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, trained on `texts` that `end` ends, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", end],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def load_trained_tokenizer(as_json: str, end: str | None = None) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(as_json), pad_token="<pad>", eos_token=end)


@during(BUILDING)
def random_llama_classifier(workload: str, pad_token_id: int) -> nn.Module:
    """SmolLM2's architecture with a head for five stars: the whole of it (362 M parameters), or a small one (13 M)."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    hidden, intermediate, layers, heads, key_value_heads, vocabulary = LLAMA_SHAPES[workload]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        pad_token_id=pad_token_id,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        use_cache=False,
    )
    config.num_labels = samples.STARS
    model = LlamaForSequenceClassification(config)
    nn.init.normal_(model.model.embed_tokens.weight)  # torch's default, not 0.02: so it learns within tens of steps
    return model


def padding_collate(tokenizer: Any) -> Collate:
    """Pads the samples of a batch to the longest among them."""
    from transformers import DataCollatorWithPadding

    pad = DataCollatorWithPadding(tokenizer)
    return lambda rows: without_useless_mask(dict(pad(rows)))
