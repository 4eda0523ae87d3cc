"""The shapes of an agent's answers. A host may be broken or hostile: what it says is looked at before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ddtree_deploy.agent.objects import valid_digest

Shape = Callable[[Any], bool]

#: Numbers of a host fit into 64 bits, so that no arithmetic on them can surprise.
_LIMIT = 1 << 63


def text(value: Any) -> bool:
    return type(value) is str


def number(value: Any) -> bool:
    return type(value) is int and -_LIMIT <= value < _LIMIT


def count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


def seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def truth(value: Any) -> bool:
    return type(value) is bool


def anything(_value: Any) -> bool:
    return True


def mapping(value: Any) -> bool:
    return type(value) is dict


def digest(value: Any) -> bool:
    """Match a sha256, or nothing: it may become the name of a file of ours."""
    return type(value) is str and (not value or valid_digest(value))


def nothing(value: Any) -> bool:
    return value is None


def maybe(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def each(shape: Shape) -> Shape:
    return lambda value: type(value) is list and all(map(shape, value))


def named(shape: Shape) -> Shape:
    """Match an object whose keys may be anything and whose values have a shape."""
    return lambda value: type(value) is dict and all(map(shape, value.values()))


def row(*shapes: Shape) -> Shape:
    return lambda value: type(value) is list and len(value) == len(shapes) and all(f(v) for f, v in zip(shapes, value, strict=True))


def fields(optional: Mapping[str, Shape] | None = None, /, **required: Shape) -> Shape:
    """Match an object that has the fields `required`, and those of `optional` in their shape when they are there."""
    more = (optional or {}).items()
    return lambda value: (
        type(value) is dict
        and all(name in value and shape(value[name]) for name, shape in required.items())
        and all(shape(value[name]) for name, shape in more if name in value)
    )


#: A file's digest as the host knows it may be missing.
_FILE_TYPES = {(str, str, int, int, int, int, int, int, str, known) for known in (str, type(None))}


def _files(value: Any) -> bool:
    """Match the rows of a walk; there are tens of thousands, so their types are compared in one step."""
    return type(value) is list and all(
        type(entry) is list and tuple(map(type, entry)) in _FILE_TYPES and entry[1] in ("f", "l", "?") and 0 <= entry[3] < 1 << 50
        for entry in value
    )


_PYTHON = fields(
    version=text, implementation=text, cache_tag=text, ext_suffix=text, abiflags=text, debug=truth, free_threaded=truth, machine=text,
    libc=text, executable=text, purelib=text,
)  # fmt: skip
_DISTRIBUTION = fields(
    dir=text, name=text, version=text, requires=each(text), installer=text, record=maybe(each(row(text, maybe(text)))),
    editable=maybe(text), direct_url=maybe(text), scripts=each(row(text, text)),
)  # fmt: skip
_INFO = fields(
    {
        "snapshot": digest, "result": digest, "created": text, "as_found": truth, "files": count, "bytes": count, "moved": each(text),
        "shape": text, "asked": each(anything), "packages": each(row(text, text)),
    }
)  # fmt: skip
_SPACE = fields({"mount": text}, free_bytes=count, free_inodes=count)
_LEDGER = each(fields({"event": text, "time": text, "tx": maybe(text), "generation": maybe(number), "previous": maybe(number)}))
_IMPORTS = each(
    fields(
        {"error": text, "traceback": text, "signal": text, "foreign_libraries": each(text)}, module=text, ok=truth, seconds=seconds
    )
)
_USERS = fields(users=each(fields(pid=count, root=count, command=text, how=text, path=text)))
_FAULTS = each(row(text, text))
_OUTCOME = fields(outcome=maybe(text), live=maybe(number))

_FACTS = fields(
    python=_PYTHON, facts=mapping, servers=each(fields(argv=each(text), env=named(text), cwd=text)),
    torch=fields(version=maybe(text), cuda=maybe(text)),
)  # fmt: skip
_TREE = fields(files=_files, distributions=each(_DISTRIBUTION), pth=each(row(text, each(text), each(text))))


def _scanned(value: Any) -> bool:
    """Match what a scan found: facts, and all of the tree's lists or none."""
    return _FACTS(value) and (not {"files", "distributions", "pth"} & value.keys() or _TREE(value))


def _scan(header: Any) -> bool:
    plain = fields(same=truth, venv=text, site=text, generation=maybe(count), now_ns=count, info=_INFO, clean=truth, unfinished=text)
    looked = fields(fingerprint=text, space=_SPACE, writable=truth)
    return plain(header) and (header["same"] or looked(header))


_LOOK = fields(
    {"generation": maybe(count), "info": maybe(_INFO), "unfinished": text, "lock": maybe(mapping), "launched": truth},
    venv=text, managed=truth, inspect=fields({"generation": maybe(number)}, exists=truth),
)  # fmt: skip
_LOOKED = fields(generations=each(row(count, _INFO)), partials=each(text), ledger=_LEDGER)
_PROVED = fields(
    hashed=count, vouched=count, bad=each(anything), compiled=count, syntax_errors=_FAULTS, imports=_IMPORTS
)

#: Of each request: the shape of the answer's header, and of its structured value.
SHAPES: Mapping[str, tuple[Shape, Shape]] = {
    "scan": (_scan, maybe(_scanned)),
    "hash": (mapping, named(maybe(digest))),
    "fetch": (fields({"changed": each(text)}), nothing),
    "users": (mapping, _USERS),
    "look": (_LOOK, maybe(_LOOKED)),
    "drift": (mapping, fields(changed=each(text), added=each(text), removed=each(text), unknown=truth)),
    "probe": (mapping, _IMPORTS),
    "hashes": (fields(hashed=count, vouched=count, generation=count), each(anything)),
    "syntax": (fields(compiled=count), _FAULTS),
    "prunable": (fields(generations=each(count)), nothing),
    "abi": (mapping, mapping),
    "gpu": (mapping, mapping),
    "create": (mapping, _PYTHON),
    "begin": (fields(tx=text, generation=maybe(count), recovered=text, stirred=truth), nothing),
    "stage": (fields(generation=count, zstd=truth), each(row(digest, count))),
    "received": (fields(objects=count, bytes=count, bad=each(text)), nothing),
    "build": (fields(generation=count, root=text), each(text)),
    "prove": (mapping, _PROVED),
    "commit": (fields(generation=count), nothing),
    "choose": (fields(generation=count, previous=count), nothing),
    "switch": (fields(generation=count, previous=count, tx=text), nothing),
    "probe-live": (mapping, maybe(_IMPORTS)),
    "revert": (_OUTCOME, nothing),
    "confirm": (_OUTCOME, nothing),
    "prune": (fields(removed=each(count), in_use=mapping), nothing),
    "release": (fields(generation=count), nothing),
    "abort": (mapping, nothing),
}
_ANY = (mapping, anything)


def matches(op: str, header: Any, value: Any) -> bool:
    """Tell whether an answer to the request `op` has the shape that this version of the agent gives it."""
    head, body = SHAPES.get(op, _ANY)
    return head(header) and body(value)
