"""Built-in reviews with one to five stars, in the schema of Yelp/yelp_review_full (`label` 0-4, `text`).

A seeded generator writes them. A review is a few clauses about aspects of a business. The mood of each clause lies
around the rating, and its words fit the mood. Neighbouring ratings share words, a negation reverses some of them, and
neutral clauses have no mood. So a model can do far better than chance, and needs more than one word to tell 3 stars
from 4.
"""

import random
from typing import TypedDict

STARS = 5


class Review(TypedDict):
    """`label`: stars less one, 0 to 4. `text`: one paragraph."""

    label: int
    text: str


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


MOODS = (
    _words("terrible, rude, filthy, disgusting, awful, a disaster, insulting, the worst ever, a rip-off"),
    _words("disappointing, slow, bland, careless, overpriced, below par, sloppy, tired, forgettable"),
    _words("okay, average, decent enough, nothing special, acceptable, middling, ordinary, so-so, fair"),
    _words("good, friendly, tasty, solid, pleasant, reliable, well made, quick, welcoming"),
    _words("amazing, outstanding, perfect, delightful, superb, flawless, the best ever, wonderful, stellar"),
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
    "place": _words(
        "diner, bakery, hotel, garage, salon, clinic, bookshop, taqueria, brewery, gym, florist, pharmacy, noodle bar, "
        "steakhouse, cafe, pet store, hardware store, spa, cinema, car wash"
    ),
    "aspect": _words(
        "service, staff, owner, food, coffee, room, parking, price, waiting time, atmosphere, music, menu, location, "
        "manager, cashier, dessert, lunch, bathroom, bill, portion, patio, front desk"
    ),
    "day": _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "person": _words("wife, husband, sister, boss, neighbour, son, friend, mother, colleague"),
    "month": _words("January, March, May, July, September, November"),
    "number": _words("two, three, four, five, six, seven, eight, nine"),
}


def make_reviews(count: int, seed: int) -> list[Review]:
    """`count` reviews in random order, as many of each rating; the same ones for the same seed."""
    source = random.Random(seed)
    labels = [index % STARS for index in range(count)]
    source.shuffle(labels)
    return [{"label": label, "text": _write(label, source)} for label in labels]


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
    shift = source.choices((-1, 0, 1), weights=(1, 6, 1))[0]
    mood = min(max(label + shift, 0), STARS - 1)
    if mood in (1, 3) and source.random() < 0.15:  # "not amazing" is closer to 2 stars than to 1
        template, words = source.choice(NEGATED), MOODS[4 if mood == 1 else 0]
    else:
        template, words = source.choice(CLAUSES), MOODS[mood]
    text = _fill(template.replace("{mood}", source.choice(words)), source)
    return text[0].upper() + text[1:]


def _fill(template: str, source: random.Random) -> str:
    for name, words in FILLERS.items():
        if "{" + name + "}" in template:
            template = template.replace("{" + name + "}", source.choice(words))
    return template
