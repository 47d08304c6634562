"""Built-in five-star reviews in the schema of Yelp/yelp_review_full (`label` 0-4, `text`), from a seeded generator.

A review is a few clauses about aspects of a business. Each clause has a mood drawn around the star rating and words
that fit the mood; neighbouring ratings share words, negation turns some of them round, and neutral clauses carry no
mood at all. So a model can do far better than chance, and needs more than one word to tell 3 stars from 4.
"""

import random
from typing import TypedDict

STARS = 5


class Review(TypedDict):
    """`label`: stars less one, 0 to 4. `text`: one paragraph."""

    label: int
    text: str


PLACES = (
    "diner",
    "bakery",
    "hotel",
    "garage",
    "salon",
    "clinic",
    "bookshop",
    "taqueria",
    "brewery",
    "gym",
    "florist",
    "pharmacy",
    "noodle bar",
    "steakhouse",
    "cafe",
    "pet store",
    "hardware store",
    "spa",
    "cinema",
    "car wash",
)
ASPECTS = (
    "service",
    "staff",
    "owner",
    "food",
    "coffee",
    "room",
    "parking",
    "price",
    "waiting time",
    "atmosphere",
    "music",
    "menu",
    "location",
    "manager",
    "cashier",
    "dessert",
    "lunch",
    "bathroom",
    "bill",
    "portion",
    "patio",
    "front desk",
)
MOODS = (
    ("terrible", "rude", "filthy", "disgusting", "awful", "a disaster", "insulting", "the worst ever", "a rip-off"),
    ("disappointing", "slow", "bland", "careless", "overpriced", "below par", "sloppy", "tired", "forgettable"),
    ("okay", "average", "decent enough", "nothing special", "acceptable", "middling", "ordinary", "so-so", "fair"),
    ("good", "friendly", "tasty", "solid", "pleasant", "reliable", "well made", "quick", "welcoming"),
    ("amazing", "outstanding", "perfect", "delightful", "superb", "flawless", "the best ever", "wonderful", "stellar"),
)
CLOSINGS = (
    ("Never again.", "Stay away.", "I want my money back."),
    ("I doubt that I will return.", "There are better options nearby.", "I expected more."),
    ("It does the job.", "Maybe I will try it once more.", "Neither here nor there."),
    ("I will probably be back.", "Worth a visit.", "Happy overall."),
    ("I cannot recommend it enough!", "Five stars, no question.", "We will be back every week!"),
)
OPENINGS = (
    "Went to this {place} on a {day}.",
    "Second visit to the {place} with my {person}.",
    "My {person} picked this {place}.",
    "Found this {place} by accident.",
    "Stopped at the {place} after work.",
    "Been coming to this {place} since {month}.",
)
NEUTRAL = (
    "We were a party of {number}.",
    "It was a {day} evening.",
    "They open at {number}.",
    "It sits next to a {place}.",
    "I ordered for {number}.",
    "My {person} came along.",
    "We paid by card.",
)
CLAUSES = (
    "The {aspect} was {mood}.",
    "I found the {aspect} {mood}.",
    "Sadly or not, the {aspect} is {mood}.",
    "The {aspect}? {mood}.",
    "My {person} called the {aspect} {mood}.",
    "Again the {aspect} was {mood}.",
)
NEGATED = (
    "The {aspect} was not {mood}.",
    "I would not call the {aspect} {mood}.",
    "Nobody can say the {aspect} is {mood}.",
)
FILLERS = {
    "place": PLACES,
    "aspect": ASPECTS,
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "person": ("wife", "husband", "sister", "boss", "neighbour", "son", "friend", "mother", "colleague"),
    "month": ("January", "March", "May", "July", "September", "November"),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine"),
}


def make_reviews(count: int, seed: int) -> list[Review]:
    """`count` reviews, their ratings in equal shares and random order; the same ones for the same seed."""
    random_source = random.Random(seed)
    labels = [index % STARS for index in range(count)]
    random_source.shuffle(labels)
    return [{"label": label, "text": _write(label, random_source)} for label in labels]


def _write(label: int, source: random.Random) -> str:
    sentences = [_fill(source.choice(OPENINGS), source)]
    for _ in range(source.randint(2, 4)):
        sentences.append(_clause(label, source))
    if source.random() < 0.5:
        sentences.insert(source.randint(1, len(sentences)), _fill(source.choice(NEUTRAL), source))
    if source.random() < 0.6:
        sentences.append(source.choice(CLOSINGS[label]))
    return " ".join(sentences)


def _clause(label: int, source: random.Random) -> str:
    drift = source.choices((-1, 0, 1), weights=(1, 6, 1))[0]
    mood = min(max(label + drift, 0), STARS - 1)
    opposite = STARS - 1 - mood
    negate = mood in (1, 3) and source.random() < 0.15  # "not amazing" is closer to 2 stars than to 1
    template = source.choice(NEGATED if negate else CLAUSES)
    word = source.choice(MOODS[4 if opposite == 3 else 0] if negate else MOODS[mood])
    text = _fill(template.replace("{mood}", word), source)
    return text[0].upper() + text[1:]


def _fill(template: str, source: random.Random) -> str:
    for name, words in FILLERS.items():
        template = (
            template.replace("{" + name + "}", source.choice(words)) if "{" + name + "}" in template else template
        )
    return template
