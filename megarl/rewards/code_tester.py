"""Runs the tests in their sandbox and exits with the verdict.

The sandbox's Python runs the source of code_channel.py, followed by this file. The program runs in another sandbox.
Proxies stand for its functions and objects. Calling a proxy returns plain data or other proxies. None of the program's
code runs here, and the program never receives the tests or the expected values:

- A proxy never equals plain data, whatever the program defines. Operators work between two objects of the program, but
  not between an object and plain data, because the object's method would receive the expected value and could return
  whatever passes the test.
- Names that the tests use but do not define come from the program, except builtins and well-known modules. This also
  applies to `from solution import *`.
- A StopIteration from the program becomes a RuntimeError, because it would end the loops of the tests early.
- Containers are passed by value. If the program modifies an argument in place, the tests see the change. Instances of
  the tests' own classes are passed with their attributes. Functions are called back.
"""

import ast
import builtins
import functools
import importlib
import json
import os
import sys
import types

from megarl.rewards.code_channel import Peer, UnsendableError

PASSED, WRONG, INVALID = 0, 1, 2
"""Exit statuses. INVALID means that the tests themselves are at fault, regardless of the program."""

NEEDS_MODULE = "the tests need a module"
"""Prefix of the message for tests whose imports fail."""

TESTS = "tests"

MODULE_ALIASES = {"np": "numpy", "pd": "pandas"}
MODULES = {*sys.stdlib_module_names, *MODULE_ALIASES, *MODULE_ALIASES.values(), "pytest", "scipy", "sympy", "torch"}
"""Modules that tests use without importing them. The program cannot define these names."""

UNARY = (
    *("len", "iter", "next", "str", "repr", "bool", "hash", "reversed", "float", "int", "index", "abs", "neg"),
    *("getitem", "setitem", "delitem"),
)
BINARY = (
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
)

ADDRESSES = ("__array_interface__", "__array_struct__", "__cuda_array_interface__")
"""Attributes through which a program could pass addresses, and make NumPy and torch read the tests' own memory."""

RESUMING = ("send", "throw", "next")
"""Methods of iterators that may raise StopIteration."""


class InvalidTests(BaseException):
    """Raised if the tests cannot run with any program. The tests' own `except Exception` does not catch it."""


class Proxy:
    """Stands for an object in the program's process."""

    def __init__(self, tester, number):
        object.__setattr__(self, "_Proxy__tester", tester)
        object.__setattr__(self, "_Proxy__number", number)

    def __call__(self, *positional, **named):
        return self.__tester.request("call", self, positional, named)

    def __getattr__(self, name):
        if name in ADDRESSES:
            raise AttributeError(name)
        return self.__tester.request("get", self, name)

    def __setattr__(self, name, value):
        self.__tester.request("set", self, name, value)

    def __delattr__(self, name):
        self.__tester.request("delete", self, name)

    def __instancecheck__(self, value):
        return isinstance(value, Proxy) and self.__tester.request("is_instance", value, self)

    def __contains__(self, value):
        return any(item is value or item == value for item in self)  # pyright: ignore[reportGeneralTypeIssues]

    def __enter__(self):
        return self.__getattr__("__enter__")()

    def __exit__(self, *_):
        return self.__getattr__("__exit__")(None, None, None)

    def __copy__(self):
        return self

    def __deepcopy__(self, _):
        return self


def number_of(proxy):
    return object.__getattribute__(proxy, "_Proxy__number")


def request_on(proxy, *values):
    return object.__getattribute__(proxy, "_Proxy__tester").request(*values)


def add_operations():
    def unary(name):
        return lambda self, *values: request_on(self, "operate", name, self, *values)

    def binary(name):
        def operate(self, other):
            return request_on(self, "operate", name, self, other) if isinstance(other, Proxy) else NotImplemented

        return operate

    for method, names in ((unary, UNARY), (binary, BINARY)):
        for name in names:
            setattr(Proxy, f"__{name}__", method(f"__{name}__"))


class Tester(Peer):
    """The tests' end of the channel. The tests' functions and iterators stay here and are sent as numbers."""

    sends_views_as_lists = True

    def __init__(self, end):
        super().__init__(end)
        self.proxies, self.callables, self.resuming = {}, [], set()
        self.has_results = False  # whether the tests have received values that the program computed

    def request(self, kind, *values):
        try:
            value = super().request(kind, *values)
            self.has_results |= kind != "load" and not (kind == "get" and isinstance(value, Proxy))
            if kind == "get" and values[1] in RESUMING:
                self.resuming.add(id(value))
            return value
        except StopIteration as error:
            if (kind, values[0]) == ("operate", "__next__") or (kind == "call" and id(values[0]) in self.resuming):
                raise
            raise RuntimeError("the program raised StopIteration") from error
        except ImportError as error:  # also if a value's type is in a missing module
            error.is_of_program = True  # pyright: ignore[reportAttributeAccessIssue]
            raise
        except UnsendableError as error:
            if self.has_results:  # the value may come from the program, as in `f(np.array(g()))`
                raise
            raise InvalidTests(str(error)) from None

    def handle(self, kind, *values):
        number, positional, named = values
        return self.callables[number](*positional, **named)

    def error(self, kind, arguments, text):
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            kind = RuntimeError
        try:
            error = kind(*arguments)
        except Exception:
            error = RuntimeError(text)
        return error

    def is_record(self, value):
        return type(value).__module__ == TESTS and hasattr(value, "__dict__")

    def to_node(self, value):
        if isinstance(value, Proxy):
            return ["own", number_of(value)]
        if isinstance(value, types.BuiltinFunctionType) and getattr(builtins, value.__name__, None) is value:
            return ["function", value.__name__]
        if isinstance(value, Solution):
            return ["module"]
        if hasattr(value, "__next__"):
            return ["iterator", self.register(functools.partial(next, value))]  # pyright: ignore[reportCallIssue]
        if callable(value):
            return ["callback", self.register(value)]
        # Values of other built-in types, such as `int | str`, may result from values that the program chose.
        if type(value).__module__ in ("builtins", "types") and type(value) not in (object, types.ModuleType):
            raise TypeError("values of this type cannot be sent to the program")
        raise UnsendableError(
            f"the tests pass an object of type {type(value).__name__}, which cannot be sent to the program"
        )

    def register(self, function):
        self.callables.append(function)
        return len(self.callables) - 1

    def from_node(self, kind, number, *arguments):
        if kind == "own":
            return self.callables[number]
        if number not in self.proxies:
            if kind == "error":
                self.proxies[number] = exception_class(*arguments)
            elif kind == "coroutine":
                self.proxies[number] = awaited(self, Proxy(self, number))
            else:
                self.proxies[number] = Proxy(self, number)
        return self.proxies[number]


def exception_class(name, bases):
    found = [getattr(builtins, base, None) for base in bases]
    base = next((base for base in found if isinstance(base, type) and issubclass(base, Exception)), RuntimeError)
    return type(name, (base,), {"__init__": lambda self, *_: None})


async def awaited(tester, coroutine):
    return tester.request("await", coroutine)


class Solution(types.ModuleType):
    """The module `solution`. Tests can import the program's names from it."""

    def __init__(self, tester):
        super().__init__("solution")
        self.__dict__["tester"] = tester

    def __getattr__(self, name):
        if name == "__all__":  # the tests' namespace resolves the program's names itself
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["tester"].request("get", self, name)

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self.__dict__["tester"].request("set", self, name, value)

    def __delattr__(self, name):
        self.__dict__["tester"].request("delete", self, name)


class Names(dict):
    """The tests' namespace. Names that they do not define are looked up in the program."""

    def __init__(self, solution, from_program):
        super().__init__(__name__=TESTS, __builtins__=builtins)
        self.solution, self.from_program = solution, from_program

    def __missing__(self, name):
        if name not in self.from_program:
            raise KeyError(name)
        value = getattr(self.solution, name)
        if isinstance(value, Proxy | type):  # do not cache other values, which may change
            self[name] = value
        return value


class UsedNames:
    """The names that the tests use, grouped by how they are used."""

    def __init__(self, tree, entry_point):
        nodes = list(ast.walk(tree))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        others = {node.id for node in names if id(node) not in bases}
        self.loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        self.modules = (self.loaded - others) & MODULES - {root_name(entry_point)}
        self.bound = {name for node in nodes for name in bound_names(node)}
        self.names_solution = any(map(names_solution, nodes))
        self.entry_point = entry_point

    def of_program(self, defined):
        """Return the names that the tests look up in the program. `defined` contains all names that it defines."""
        defined = defined - self.modules
        plain, shadowing = defined - set(dir(builtins)), defined & set(dir(builtins))
        if self.entry_point:
            return plain | (shadowing & {root_name(self.entry_point)})
        # The function under test may shadow a builtin, but only if it is the only program name that the tests use.
        shadowing &= self.loaded
        is_only_name = len(shadowing) == 1 and not self.loaded & plain and not self.names_solution
        return plain | (shadowing if is_only_name else set())


def bound_names(node):
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(part.asname or part.name).split(".")[0] for part in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def names_solution(node):
    """Return whether a node refers to the program's module, except for `from solution import *`."""
    if isinstance(node, ast.Import):
        return any(part.name == "solution" for part in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module == "solution" and node.names[0].name != "*"
    return isinstance(node, ast.Constant) and node.value == "solution"


def root_name(expression):
    """Return the first name in an expression such as `Solution().add`."""
    nodes = ast.walk(ast.parse(expression or "None", mode="eval"))
    return next((node.id for node in nodes if isinstance(node, ast.Name)), None)


def parse_tests(setup, tests, entry_point):
    """Return the tests' code, the import statements of the setup, and the names that the tests use. Raise InvalidTests
    if the tests are not valid Python."""
    try:
        source = "\n".join([setup, *tests, f"check({entry_point})" if entry_point else ""])
        tree = ast.parse(source)
        code = compile(tree, "tests.py", "exec")
        imports = [ast.unparse(part) for part in ast.parse(setup).body if isinstance(part, ast.Import | ast.ImportFrom)]
        return code, imports, UsedNames(tree, entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidTests(f"the tests are not valid Python: {error}") from None


def run(tester, setup, tests, entry_point):
    """Run the tests. Raise InvalidTests if they cannot run with any program, and any other exception if they fail."""
    code, imports, used = parse_tests(setup, tests, entry_point)
    sys.modules[TESTS] = types.ModuleType(TESTS)
    solution = sys.modules["solution"] = Solution(tester)
    namespace = Names(solution, used.of_program(set(tester.request("load", imports))))
    for name in used.modules:
        try:
            namespace[name] = importlib.import_module(MODULE_ALIASES.get(name, name))
        except ImportError:
            if name not in used.bound:  # otherwise the tests bind the name themselves
                raise
    for name in used.loaded & namespace.from_program:
        namespace[name]  # resolves the name now, because class bodies bypass __missing__
    exec(code, namespace)


def main(file):
    tester, arguments = Tester(int(file)), json.load(sys.stdin)
    add_operations()
    message = ""
    try:
        run(tester, **arguments)
        status = PASSED
    except InvalidTests as error:
        status, message = INVALID, str(error)
    except ImportError as error:
        is_of_program = hasattr(error, "is_of_program") or error.name in (None, "solution")
        status, message = WRONG if is_of_program else INVALID, f"{NEEDS_MODULE}: {error}"
    except BaseException:
        status = WRONG
    if status == INVALID:
        os.write(2, message.encode(errors="replace"))
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
