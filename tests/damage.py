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


def damaged(whole, chance):
    """The content of a file, packed or not, with damage to its bytes; or, if it is JSON, to a field."""
    if chance.random() < 0.3:
        return damaged_bytes(whole, chance)
    content = gzip.decompress(whole) if whole.startswith(GZIP) else whole
    try:
        found = json.loads(content)
    except ValueError:
        content = damaged_bytes(content, chance)
    else:
        damage_field(found, chance)
        content = json.dumps(found).encode()
    return gzip.compress(content, 1) if whole.startswith(GZIP) else content


def damaged_bytes(whole, chance):
    at = chance.randrange(len(whole))
    end = min(len(whole), at + chance.choice((1, 1, 40, 10_000)))
    how = chance.choice(("cut", "bit", "filled", "lost", "twice", "other"))
    if how == "cut":
        return whole[:at]
    part = {
        "bit": bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 : end],
        "filled": bytes([chance.choice((0, 32, 255))]) * (end - at),
        "lost": b"",
        "twice": whole[at:end] * 2,
        "other": chance.randbytes(end - at),
    }
    return whole[:at] + part[how] + whole[end:]


def places(value, path=()):
    """The ways to all that is within JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way for key, one in inner for way in ((*path, key), *places(one, (*path, key)))]


def damage_field(
    content,
    chance,
    hows=("gone", "renamed", "in all", "of each", "odd", "odd"),
    odd=lambda value: ODD,
):
    """Damage one value within JSON, each field as often as those with many entries. What was done, and where.

    Args:
        hows: Ways to do it, of these. A list of which something is renamed has it twice.
        odd: Values in place of one.
    """
    by_field = {}
    for path in places(content):
        by_field.setdefault((len(path), *(key for key in path if isinstance(key, str))), []).append(path)
    if not by_field:
        return "nothing"
    path = chance.choice(by_field[chance.choice(sorted(by_field, key=str))])
    holder, key, how = at(content, path[:-1]), path[-1], chance.choice(hows)
    value = holder[key]
    if how == "gone":
        del holder[key]
    elif how == "renamed" and isinstance(holder, dict):
        holder[f"{key}\nx"] = holder.pop(key)
    elif how == "renamed":
        holder.append(value)
    elif how == "in all" and isinstance(value, list):
        holder[key] = [chance.choice(IN_ALL)] * len(value)
    else:
        value = chance.choice(odd(value))
        together = at(content, path[:-2]) if how == "of each" and isinstance(path[-2:][0], int) else [holder]
        for one in together:
            if one is holder or isinstance(one, dict):
                one[key] = value
    return f"{how} {path}"


def at(content, path):
    for key in path:
        content = content[key]
    return content


SAME_SIZE = {"F32": "I32", "I32": "F32", "I64": "F64", "U8": "I8"}
OF_ANOTHER_KIND = ("gone", "renamed", "odd", "odd")


def another(value):
    """Of another kind: that a number is another number, only a checksum can show. A time may be unknown."""
    if value in (*SAME_SIZE,):
        return [SAME_SIZE[value]]
    numbers = [int, float, type(None)]
    kinds = numbers if type(value) in numbers else [type(value)]
    return [odd for odd in ("x", 1, None, True, [1], {"x": 1}) if type(odd) not in kinds]


def damaged_tensors(whole, chance):
    """A safetensors file with damage to its header, or cut; and what was done."""
    length = 8 + int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8:length]), whole[length:]
    if chance.random() < 0.1:
        what, data = "cut", data[: chance.randrange(len(data))]
    else:
        what = damage_field(header, chance, OF_ANOTHER_KIND, another)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + data, what
