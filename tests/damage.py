"""Damage to files: any byte cut, altered or filled; any field gone, renamed, doubled, odd or of another type."""

import gzip
import json

from hypothesis import strategies as st

DAMAGE = st.randoms(use_true_random=False)
"""What `damaged` draws from."""
ODD = (None, True, -1, 0, 1.5, 2**70, 1e300, 1e-300, "", "x", "a\nb", [], [None], [[1]], {})
ODD += ([1], {"x": 1}, {"a": [-1]}, "<script>alert(1)</script>")
IN_ALL = (0, 0.0, -1, None, 1e300, 1e-9)
"""Instead of every entry of a list."""
GZIP = b"\x1f\x8b"


def damaged(data, chance):
    """The content of a file, gzipped or not, with damage to its bytes or, if it is JSON, to a field."""
    if chance.random() < 0.3:
        return damaged_bytes(data, chance)
    content = gzip.decompress(data) if data.startswith(GZIP) else data
    try:
        document = json.loads(content)
    except ValueError:
        content = damaged_bytes(content, chance)
    else:
        damage_field(document, chance)
        content = json.dumps(document).encode()
    return gzip.compress(content, 1) if data.startswith(GZIP) else content


def damaged_bytes(data, chance):
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.choice((1, 1, 40, 10_000)))
    how = chance.choice(("cut", "bit", "filled", "lost", "twice", "other"))
    if how == "cut":
        return data[:start]
    part = {
        "bit": bytes([data[start] ^ 1 << chance.randrange(8)]) + data[start + 1 : end],
        "filled": bytes([chance.choice((0, 32, 255))]) * (end - start),
        "lost": b"",
        "twice": data[start:end] * 2,
        "other": chance.randbytes(end - start),
    }
    return data[:start] + part[how] + data[end:]


def places(value, path=()):
    """The path to every value within JSON: keys and indices."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in ((*path, key), *places(item, (*path, key)))]


def damage_field(
    content,
    chance,
    kinds=("gone", "renamed", "in all", "of each", "odd", "odd"),
    odd=lambda value: ODD,
):
    """Damage one value within JSON, in place, and return what was done and where.

    A field with many entries is as likely as one with few.

    Args:
        kinds: The kinds of damage to choose from. In a list, "renamed" doubles an entry.
        odd: Returns the values to put in place of a value.
    """
    by_field = {}
    for path in places(content):
        by_field.setdefault((len(path), *(key for key in path if isinstance(key, str))), []).append(path)
    if not by_field:
        return "nothing"
    path = chance.choice(by_field[chance.choice(sorted(by_field, key=str))])
    holder, key, kind = at(content, path[:-1]), path[-1], chance.choice(kinds)
    value = holder[key]
    if kind == "gone":
        del holder[key]
    elif kind == "renamed" and isinstance(holder, dict):
        holder[f"{key}\nx"] = holder.pop(key)
    elif kind == "renamed":
        holder.append(value)
    elif kind == "in all" and isinstance(value, list):
        holder[key] = [chance.choice(IN_ALL)] * len(value)
    else:
        value = chance.choice(odd(value))
        together = at(content, path[:-2]) if kind == "of each" and isinstance(path[-2:][0], int) else [holder]
        for entry in together:
            if entry is holder or isinstance(entry, dict):
                entry[key] = value
    return f"{kind} {path}"


def at(content, path):
    for key in path:
        content = content[key]
    return content


SAME_SIZE = {"F32": "I32", "I32": "F32", "I64": "F64", "U8": "I8"}
OF_ANOTHER_KIND = ("gone", "renamed", "odd", "odd")


def of_another_type(value):
    """Values of another type than `value`'s. Only a checksum can show another number. None may stand for a number."""
    if value in (*SAME_SIZE,):
        return [SAME_SIZE[value]]
    numbers = [int, float, type(None)]
    kinds = numbers if type(value) in numbers else [type(value)]
    return [odd for odd in ("x", 1, None, True, [1], {"x": 1}) if type(odd) not in kinds]


def damaged_tensors(content, chance):
    """A safetensors file with damage to its header, or cut; and what was done."""
    length = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:length]), content[length:]
    if chance.random() < 0.1:
        damage, data = "cut", data[: chance.randrange(len(data))]
    else:
        damage = damage_field(header, chance, OF_ANOTHER_KIND, of_another_type)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + data, damage
