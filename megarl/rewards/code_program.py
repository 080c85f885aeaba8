"""Runs the program under test in its sandbox and handles the tests' calls.

The sandbox's Python runs the source of this file after that of code_channel.py. The program can access everything here,
but nothing here decides the verdict.
"""

import builtins
import contextlib
import io
import operator
import os
import sys
import types

from megarl.rewards.code_channel import ChannelError, Peer

MAX_PRINTED = 1 << 20

FUNCTIONS = {
    **{f"__{kind.__name__}__": kind for kind in (len, iter, next, str, repr, bool, hash, reversed, float, int, abs)},
    **{
        f"__{name}__": getattr(operator, name) for name in ("getitem", "setitem", "delitem", "index", "neg", "eq", "ne")
    },
    **{f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "matmul")},
    **{f"__{name}__": getattr(operator, name) for name in ("truediv", "floordiv", "mod", "pow")},
    **{f"__{name}__": getattr(operator, f"{name}_") for name in ("and", "or")},
    "__xor__": operator.xor,
}
"""Operations that the tests may request on an object, by method name."""


class Program(Peer):
    """The program's end of the channel. Objects that are not plain data stay here and are sent as numbers."""

    def __init__(self, end, path):
        super().__init__(end)
        self.path, self.module = path, types.ModuleType("solution")
        self.objects, self.numbers, self.callbacks = [], {}, {}
        self.output = io.BytesIO()
        sys.stdout = io.TextIOWrapper(self.output, encoding="utf-8", errors="replace", write_through=True)

    def load(self, imports):
        """Run the import statements, skipping those that raise ImportError, and then the program. Return the names in
        its module."""
        module = sys.modules["solution"] = self.module
        module.__file__ = self.path
        for line in imports:
            with contextlib.suppress(ImportError):
                exec(line, module.__dict__)
        with open(self.path, encoding="utf-8") as file:
            exec(compile(file.read(), self.path, "exec"), module.__dict__)
        return [name for name in module.__dict__ if isinstance(name, str)]

    def handle(self, kind, *values):
        if kind == "load":
            return self.load(*values)
        if kind == "call":
            function, positional, named = values
            return function(*positional, **named)
        if kind == "operate":
            return FUNCTIONS[values[0]](*values[1:])
        if kind == "await":
            import asyncio

            return asyncio.run(values[0])
        return {"get": getattr, "set": setattr, "delete": delattr, "is_instance": isinstance}[kind](*values)

    def printed(self):
        text = self.output.getvalue()[:MAX_PRINTED].decode(errors="replace")
        self.output.seek(0)
        self.output.truncate()
        return text

    def to_node(self, value):
        if id(value) in self.callbacks:
            return ["own", self.callbacks[id(value)][0]]
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins"]
            return ["error", number, value.__name__, bases]
        return ["coroutine" if isinstance(value, types.CoroutineType) else "object", number]

    def from_node(self, kind, *arguments):
        if kind == "own":
            return self.objects[arguments[0]]
        if kind == "function":
            return getattr(builtins, arguments[0])
        if kind == "record":
            found = self.module.__dict__.get(arguments[1])
            record = found if isinstance(found, type) else type(arguments[1], (), {})
            return record.__new__(record)  # pyright: ignore[reportCallIssue]  # a class found at run time
        if kind == "module":
            return self.module
        assert kind in ("callback", "iterator")
        number = arguments[0]

        def callback(*positional, **named):
            return self.request("call", number, positional, named)

        def iterate():
            while True:
                try:
                    yield callback()
                except StopIteration:
                    return

        value = callback if kind == "callback" else iterate()
        self.callbacks[id(value)] = number, value
        return value


def main(file, path):
    program = Program(int(file), path)
    try:
        while True:
            program.answer(program.receive())
    except ChannelError:
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
