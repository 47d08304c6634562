"""Classification of texts with any labels, in columns of any name: what is found, and what is refused in one line."""

from datasets import Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from ddp_lab.runtime.data import hub
from ddp_lab.runtime.errors import UserError
from tests.parity import message_of
from tests.tables import each_row


def load(path, text="text", train=100):
    return hub.load_labelled_text(str(path), hub.Columns(text), train, 100, seed=0)


def rows(*labels, text="fine"):
    return Dataset.from_list([{"text": f"{text} {label}", "label": label} for label in labels])


@each_row(
    "labels, names",
    [
        ((7, -2, 40, 7), ("-2", "7", "40")),
        (("spam", "ham", "spam"), ("ham", "spam")),
        ((True, False, True), ("False", "True")),
        ((2.0, 1.0, 2.0), ("1", "2")),
    ],
)
def test_labels_are_found_in_the_training_data(tmp_path, labels, names):
    rows(*labels).to_json(tmp_path / "train.jsonl")
    rows(labels[0]).to_json(tmp_path / "test.jsonl")
    data = load(tmp_path, train=1)  # the label of a row that is not used counts too
    assert (*data.labels.values(),) == names and len(data.train) == 1
    tokenized = hub.tokenize(data.evaluation, hub.Columns(), data.labels, lambda texts, **_: {"input_ids": texts}, 9)
    assert tokenized[0]["label"] == names.index(str(labels[0]).removesuffix(".0"))


def test_the_head_of_a_trained_model_keeps_its_order(tmp_path):
    """Sorted, the names have another order than in the head, which would then answer with the wrong one."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(vocab_size=9, id2label={0: "spam", 1: "ham"}, label2id={"spam": 0, "ham": 1}, **shape)
    saved = BertForSequenceClassification(config)
    saved.save_pretrained(tmp_path)
    labels = hub.in_order_of({"ham": "ham", "spam": "spam"}, hub.label_numbers(str(tmp_path)))
    assert [*labels] == ["spam", "ham"]

    class Tokenizer:
        pad_token_id = 0

    model = hub.load_classifier(str(tmp_path), Tokenizer(), [*labels])
    assert (model.classifier.weight == saved.classifier.weight).all()
    relabelled = hub.load_classifier(str(tmp_path), Tokenizer(), ("a", "b", "c"))
    relabelled.save_pretrained(tmp_path / "other")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "other")
    assert again.config.id2label == {0: "a", 1: "b", 2: "c"} and again.classifier.out_features == 3


def test_what_cannot_be_used_is_named(tmp_path):
    def refusal(train, test=None, *columns):
        folder = tmp_path / "data"
        splits = {"train": Dataset.from_list(train), "test": Dataset.from_list(test or train)}
        DatasetDict(splits).save_to_disk(folder)
        message = message_of(UserError, load, folder, *columns)
        assert "\n" not in message
        return message.removeprefix(f"--dataset {folder}: ")

    good = [{"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}]
    assert "no column body (it has text, label); name yours by --text-column" in refusal(good, None, "body")
    message = refusal(good, [*good, {"text": "so so", "label": "maybe"}])
    assert message == "row 3 of split test has label 'maybe' in column label; training data have 'no', 'yes'"
    for row, expected in (
        ({"text": None, "label": "no"}, "row 3 of split train has None in column text; every row needs a text"),
        ({"text": "what", "label": None}, "row 3 of split train has label None"),
    ):
        assert expected in refusal([*good, row])
    for rows, expected in (
        (good[:1], "split train: column label has 'yes'; classification needs two labels or more"),
        ([{"text": "a", "label": 0.5}, {"text": "b", "label": 1.0}], "a label is a name or a whole number"),
    ):
        assert expected in refusal(rows)
