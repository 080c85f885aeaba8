"""The channel between the tests and the program under test. It carries calls and plain data.

The tests and the program run in separate sandboxes. The Python in each sandbox runs the source of this file, which
therefore imports only the standard library and nothing from megarl. Messages are JSON, so reading one never runs the
sender's code. Nested containers are flattened into a list of nodes, which preserves shared and cyclic references.
"""

import builtins
import importlib
import json
import operator
import os
import re
import sys
import threading

MAX_MESSAGE_BYTES = 64 << 20
RECURSION_LIMIT = 20_000

ARGUMENTS = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.time": lambda value: (value.hour, value.minute, value.second, value.microsecond, value.tzinfo),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
}
"""Types whose values are sent as constructor arguments."""

ITEMS = {
    "builtins.list": list,
    "builtins.set": list,
    "builtins.bytearray": list,
    "builtins.dict": lambda value: [part for pair in value.items() for part in pair],
    "collections.deque": list,
    "collections.Counter": lambda value: [part for pair in value.items() for part in pair],
    "collections.OrderedDict": lambda value: [part for pair in value.items() for part in pair],
    "collections.defaultdict": lambda value: [part for pair in value.items() for part in pair],
}
"""Mutable types, each with a function that returns the items to send."""

VIEWS = ("builtins.dict_keys", "builtins.dict_values", "builtins.dict_items")

BASES = (int, float, str, bytes, tuple, list, dict, set, frozenset)
"""Types to which instances of their subclasses are converted."""

CLASSES = (*BASES, bool, bytearray, complex, range, slice, enumerate, filter, map, reversed, zip)
"""Classes that are sent by name, as exception classes are. Their instances can also be sent."""


class ChannelError(Exception):
    """Raised if the other process has closed the channel or sent an unreadable message."""


class UnsendableError(TypeError):
    """Raised for a value that cannot be sent to the other process."""


def full_name(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def is_sent_by_name(value):
    if not isinstance(value, type) or getattr(builtins, value.__name__, None) is not value:
        return False
    return value in CLASSES or issubclass(value, BaseException)


def items_of(value):
    """Return the items of a mutable value. Its type is in ITEMS, or it is a record with attributes."""
    items = ITEMS.get(full_name(type(value)))
    return [part for pair in vars(value).items() for part in pair] if items is None else items(value)


def fill(value, items):
    """Replace the contents of a mutable value with items as returned by `items_of`."""
    if isinstance(value, dict):
        value.clear()
        for key, item in zip(items[::2], items[1::2], strict=True):
            value[key] = item
    elif isinstance(value, list | bytearray):
        value[:] = items
    elif hasattr(value, "clear"):  # a set or a deque
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(items)
    else:
        for name, attribute in zip(items[::2], items[1::2], strict=True):
            if not name.startswith("__"):
                setattr(value, name, attribute)


class Peer:
    """One end of the channel. Subclasses define how to send references to objects that exist only on one side."""

    sends_views_as_lists = False

    def __init__(self, end):
        """end: file descriptor of this end."""
        self.end, self.file = end, os.fdopen(end, "rb", closefd=False)
        self.lock = threading.RLock()
        sys.setrecursionlimit(RECURSION_LIMIT)

    def send(self, message):
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"the values exceed {MAX_MESSAGE_BYTES >> 20} MiB")
        data = memoryview(b"%d\n%b" % (len(data), data))
        try:
            while data:
                data = data[os.write(self.end, data) :]
        except OSError:
            raise ChannelError("the other process has closed the channel") from None

    def receive(self):
        try:
            length = int(self.file.readline(20))
            data = self.file.read(length) if 0 < length <= MAX_MESSAGE_BYTES else b""
            if len(data) == length:
                return json.loads(data)
        except (OSError, ValueError, RecursionError):
            pass
        raise ChannelError("the other process has closed the channel or sent an unreadable message")

    def request(self, kind, *values):
        """Send a request, handle the other process's requests in the meantime, and return the result."""
        with self.lock:
            writer = Writer(self)
            self.send({"request": kind, "root": writer.reference(list(values)), "nodes": writer.nodes})
            while "request" in (message := self.receive()):
                self.answer(message)
            return self.result(message, writer.mutable)

    def answer(self, message):
        """Handle a request and send the reply: its result or error, and the mutable arguments that it has changed."""
        reader = Reader(self, message["nodes"])
        before = {i: items_of(value) for i, value in reader.mutable.items()}
        try:
            key, value = "root", self.handle(message["request"], *reader.dereference(message["root"]))
        except ChannelError:
            raise
        except BaseException as error:
            key, value = "error", [type(error), error.args, str(error)]
        writer = Writer(self, {id(value): [-i - 1] for i, value in reader.mutable.items()})
        changed = []
        try:
            reply = {key: writer.reference(value)}
            for i, value in reader.mutable.items():
                items = items_of(value)
                if len(items) != len(before[i]) or any(map(operator.is_not, items, before[i])):
                    changed.append([i, writer.references(items)])
        except Exception as error:
            reply = {"error": writer.reference([type(error), (), str(error)])}
        self.send({**reply, "changed": changed, "nodes": writer.nodes, "printed": self.printed()})

    def result(self, message, sent):
        """Return the value of a reply, or raise its error. `sent` maps indices to the request's mutable values."""
        reader = Reader(self, message["nodes"], sent)
        for index, items in message["changed"]:
            fill(sent[index], reader.dereferenced(items))
        sys.stdout.write(message["printed"])
        if "error" not in message:
            return reader.dereference(message["root"])
        kind, arguments, text = reader.dereference(message["error"])
        raise self.error(kind, arguments, text)

    def handle(self, kind, *values):
        """Handle a request and return its result."""
        raise NotImplementedError

    def printed(self) -> str:
        """Return the output to sys.stdout since the last reply."""
        return ""

    def error(self, kind, arguments, text):
        """Return the exception to raise for an exception in the other process."""
        return kind(*arguments) if isinstance(kind, type) else RuntimeError(text)

    def is_record(self, value) -> bool:
        """Return whether an object is sent with its attributes."""
        return False


class Writer:
    """Converts values to nodes. A reference is a JSON scalar, or a list that contains the index of a node."""

    def __init__(self, peer, known=None):
        """known: references to the objects that the other process has sent, by object id."""
        self.peer, self.nodes, self.indices, self.known = peer, [], {}, known or {}
        self.mutable, self.kept = {}, []

    def reference(self, value):
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 1 << 62):
            return value
        if id(value) in self.known:
            return self.known[id(value)]
        if id(value) not in self.indices:
            self.kept.append(value)  # keep it alive, so that its id is not reused
            self.add(value)
        return [self.indices[id(value)]]

    def add(self, value):
        name = full_name(type(value))
        if name in ITEMS:
            self.add_mutable(value, [name])
        elif self.peer.is_record(value):
            self.add_mutable(value, ["record", type(value).__name__])
        else:
            self.append(value, self.node(value, name))

    def append(self, value, node):
        self.indices[id(value)] = len(self.nodes)
        self.nodes.append(node)

    def add_mutable(self, value, node):
        """Add a node before its items, which may refer to it."""
        self.append(value, node)
        self.mutable[len(self.nodes) - 1] = value
        if node[0] == "collections.defaultdict":
            node.append(self.reference(value.default_factory))
        elif node[0] == "collections.deque":
            node.append(value.maxlen)
        node.insert(1, self.references(items_of(value)))

    def references(self, values):
        return [self.reference(value) for value in values]

    def node(self, value, name):
        if name == "builtins.int":
            return ["int", hex(value)]
        if name == "builtins.bytes":
            return ["bytes", value.decode("latin-1")]
        if name in ("builtins.tuple", "builtins.frozenset"):
            return [name, self.references(value)]
        if name in VIEWS and self.peer.sends_views_as_lists:
            return ["same", self.reference(list(value))]
        if name in ARGUMENTS:
            return ["new", name, self.references(ARGUMENTS[name](value))]
        if name.startswith("numpy.") and getattr(getattr(value, "dtype", None), "kind", "") in "biufc":
            return [
                "numpy",
                value.dtype.str,
                list(value.shape),
                value.tobytes().decode("latin-1"),
                name == "numpy.ndarray",
            ]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["namedtuple", type(value).__name__, list(value._fields), self.references(value)]  # pyright: ignore
        if is_sent_by_name(value):
            return ["builtin", value.__name__]  # pyright: ignore  # `value` is a class
        base = next((base for base in BASES if isinstance(value, base) and type(value) is not base), None)
        if base is not None:
            plain = str.__str__(value) if base is str else base(value)  # pyright: ignore  # `value` is an instance of `base`
            return ["same", self.reference(plain)]
        return self.peer.to_node(value)


class Reader:
    """Converts the nodes of a message to values."""

    def __init__(self, peer, nodes, sent=None):
        """sent: mutable values that this process has sent, by index i. The other process refers to them as −i − 1."""
        self.peer, self.sent = peer, sent or {}
        self.values, self.mutable = [], {}
        for i, (kind, *arguments) in enumerate(nodes):
            self.values.append(self.value(kind, *arguments))
            if kind in ITEMS or kind == "record":
                self.mutable[i] = self.values[i]
        for i, value in self.mutable.items():
            fill(value, self.dereferenced(nodes[i][1]))
            if nodes[i][0] == "collections.defaultdict":
                value.default_factory = self.dereference(nodes[i][2])

    def dereference(self, reference):
        if not isinstance(reference, list):
            return reference
        [index] = reference
        return self.values[index] if index >= 0 else self.sent[-index - 1]

    def dereferenced(self, references):
        return [self.dereference(reference) for reference in references]

    def value(self, kind, *arguments):
        if kind in ITEMS:
            value = getattr(importlib.import_module(kind.split(".")[0]), kind.split(".")[1])()
            if kind == "collections.deque":
                value = type(value)((), arguments[1])
            return value
        if kind == "int":
            return int(arguments[0], 16)
        if kind == "bytes":
            return arguments[0].encode("latin-1")
        if kind in ("builtins.tuple", "builtins.frozenset"):
            return (tuple if kind == "builtins.tuple" else frozenset)(self.dereferenced(arguments[0]))
        if kind == "new" and arguments[0] in ARGUMENTS:
            module, name = arguments[0].split(".")
            return getattr(importlib.import_module(module), name)(*self.dereferenced(arguments[1]))
        if kind == "numpy" and re.fullmatch(r"[<>|=][biufc]\d{1,2}", arguments[0]):
            numpy = importlib.import_module("numpy")
            array = numpy.frombuffer(arguments[2].encode("latin-1"), arguments[0]).reshape(arguments[1]).copy()
            return array if arguments[3] else array[()]
        if kind == "namedtuple":
            from collections import namedtuple

            return namedtuple(arguments[0], arguments[1])(*self.dereferenced(arguments[2]))
        if kind == "same":
            return self.dereference(arguments[0])
        if kind == "builtin" and is_sent_by_name(builtins_type := getattr(builtins, arguments[0])):
            return builtins_type
        return self.peer.from_node(kind, *arguments)
