"""Rewards for programs, here without isolation. tests/sandbox runs them in sandboxes."""

from __future__ import annotations

import asyncio
import json

import pytest

from megarl.rewards.code import _prints, code_stdin_stdout, code_tests, last_code_block
from megarl.sandbox.choice import Unsafe
from megarl.sandbox.sandbox import Finished
from tests.marks import exhaustive_but
from tests.sandboxes import limits
from tests.timing import HANG_S, WAIT_S

PROVIDER = Unsafe(limits(wall_s=float(WAIT_S)))


def fenced(program: str) -> str:
    return f"First I think.\n\n```python\n{program}\n```\nThat is it."


def passes(program: str, tests: object, **columns: str) -> bool:
    return asyncio.run(code_tests("", fenced(program), tests, sandbox=PROVIDER, **columns))


def prints(program: str, answer: object) -> bool:
    return asyncio.run(code_stdin_stdout("", fenced(program), answer, sandbox=PROVIDER))


@pytest.mark.parametrize(
    ("response", "block"),
    [
        ("```\na\n```", "a\n"),
        ("```python\na\n```\ntext\n```py\nb\n\nc\n```", "b\n\nc\n"),
        ("```python\na\n```\n```text\nits output\n```", "a\n"),
        ("~~~python\nprint('```')\n~~~", "print('```')\n"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n"),
        ("   ``` Python title=a\na\n   ```", "a\n"),
        ("```python\n  a\n```", "  a\n"),
        ("```python\n```", "\n"),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("```python\ncut off", None),
        ("a = 1", None),
        ("`a`", None),
        ("```bash\nls\n```", None),
        ("```python\r\na = '\u2028\x0c\x85'\r\n```", "a = '\u2028\x0c\x85'\n"),
    ],
)
def test_last_closed_python_block_is_extracted(response, block):
    assert last_code_block(response) == block


def test_code_tests_requires_all_tests_to_pass():
    double = "def double(x):\n    return 2 * x"
    assert passes(double, "assert double(2) == 4")
    assert passes(double, ["assert double(2) == 4", "import math\nassert double(math.pi) > 6"])
    assert not passes(double, ["assert double(2) == 4", "assert double(2) == 5"])
    assert not passes("def double(x:", "assert double(2) == 4")
    assert not passes("x = 1", "assert double(2) == 4")


def test_code_tests_reads_columns_of_published_data_sets():
    increment = "def increment(x):\n    return x + 1"
    check = "def check(candidate):\n    assert candidate(1) == 1 + ONE"
    assert passes(increment, check, entry_point="increment", test_setup_code="ONE = 1")
    assert not passes(increment, check, entry_point="increment", test_setup_code="ONE = 2")
    assert not passes(increment, check, entry_point="decrement")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "print('passed')\nimport os; os._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)",
    ],
)
def test_program_that_exits_before_the_tests_is_wrong(program):
    assert not passes(program, "assert False")


@pytest.mark.parametrize("check", [passes, prints])
def test_program_that_is_killed_once_is_run_again(check, tmp_path):
    first = f"if not os.path.exists('{tmp_path}/1'):\n    open('{tmp_path}/1', 'w')\n"
    kill = f"import os\n{first}    os.kill(os.getpid(), 9)\n"
    answer = "assert double(2) == 4" if check is passes else [{"input": "", "output": "4"}]
    assert check(f"{kill}def double(x):\n    return 2 * x\nprint(double(2))", answer)


def test_program_runs_as_a_separate_module():
    program = (
        "from __future__ import annotations\nimport dataclasses, inspect, pickle\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "def copied(p):\n    return pickle.loads(pickle.dumps(p))\n"
        "def name():\n    return __name__\n"
        "if __name__ == '__main__':\n    raise SystemExit\n"
    )
    assert passes(program, "assert copied(Point(3)) == Point(3) and name() != '__main__'")
    assert passes("def f(): return 1\nprint('chatter')\ntry:\n    input()\nexcept EOFError: pass", "assert f()")
    assert passes("text = 'é'", "assert text == 'é'")


FORGERIES = {
    "reads the caller's frames": "import inspect\ndef f(x):\n"
    "    for frame in inspect.stack():\n"
    "        for value in frame.frame.f_locals.values():\n"
    "            if isinstance(value, str) and 'assert' in value: return int(value.split('==')[1])",
    "reads files and stdin": "import os, sys\ndef f(x):\n"
    "    return [open(n).read() for n in os.listdir()] + [sys.stdin.read()]",
    "patches builtins": "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.__build_class__ = None\n"
    "builtins.isinstance = builtins.abs = lambda *_: True\ndef f(x): return 0",
    "defines builtins": "def abs(x): return 0\ndef all(x): return True\ndef len(x): return 4\ndef f(x): return 0",
    "defines a module": "class math:\n    isclose = lambda *_: True\ndef f(x): return 0",
    "replaces modules": "import math, sys\nmath.isclose = lambda *_: True\nsys.modules['math'].isclose = math.isclose\n"
    "def f(x): return 0",
    "exits": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "ends its process group": "import os, signal\ndef f(x): os.killpg(0, signal.SIGKILL)",
    "returns an object that equals everything": "class A:\n    __eq__ = lambda *_: True\n"
    "    __ne__ = lambda *_: False\n"
    "    __sub__ = __rsub__ = __add__ = lambda *_: 0\n    __contains__ = __le__ = __lt__ = lambda *_: True\n"
    "    __hash__ = lambda _: 4\n    __float__ = lambda _: 0.0\n    __iter__ = lambda _: iter([A()])\n"
    "def f(x): return A()",
    "returns a list that equals everything": "class A(list):\n    __eq__ = lambda *_: True\n"
    "    __contains__ = lambda *_: True\n"
    "def f(x): return A()",
    "returns a number that equals everything": "class A(int):\n    __eq__ = lambda *_: True\n"
    "    __hash__ = lambda _: 4\n    __sub__ = __rsub__ = lambda *_: 0\ndef f(x): return A(0)",
    "is an object that equals everything": "class f:\n    def __init__(self, x): pass\n    __eq__ = lambda *_: True\n"
    "    __sub__ = __rsub__ = lambda *_: 0",
    "returns NotImplemented": "def f(x): return NotImplemented",
    "writes to every file": "import os\ndef f(x):\n    for n in range(3, 300):\n        for data in (b'0\\n"
    "', b'[]' * 9):\n"
    "            try: os.write(n, data)\n            except OSError: pass",
    "replies before a request": "import json, os\n"
    "data = json.dumps({'root': None, 'nodes': [], 'changed': [], 'printed': ''}).encode()\nfor n in range(3, 300):\n"
    "    try: os.write(n, b''.join([b'%d\\n' % len(data), data]) * 50)\n    except OSError: pass\ndef f(x): return 0",
    "prints a verdict": "import os, sys\ndef f(x):\n    print('passed'); os.write(1, b'passed'); os._exit(0)",
    "overwrites the run": "import __main__, gc, sys\ndef f(x):\n"
    "    for module in list(sys.modules.values()):\n        for name in ('WRONG', 'INVALID'):\n"
    "            if hasattr(module, name): setattr(module, name, 0)\n    return 0",
    "returns deep data": "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "returns itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "returns a huge integer": "def f(x): return 10 ** 100000",
    "defines its own exceptions": "class AssertionError(Exception): pass\ndef f(x): raise AssertionError",
    "returns a class": "def f(x): return AssertionError",
}


@pytest.mark.parametrize(
    "forgery",
    exhaustive_but(
        FORGERIES,
        "patches builtins",
        "exits",
        "returns an object that equals everything",
        "replies before a request",
        "returns itself",
    ),
)
def test_forged_results_are_wrong(forgery):
    """A correct program passes these tests. Each runs alone, since a forgery may pass only one of them."""
    tests = ["assert f(2) == 4", "assert 4 in [f(2)] and len([f(2)]) == 1", "assert abs(f(2) - 4) < 1e-6"]
    tests += ["assert math.isclose(f(2), 4)", "assert all(f(x) == x * x for x in [2, 3])", "assert not f(2) != 4"]
    tests += ["assert {f(2)} == {4}", "assert 4 - f(2) == 0", "if f(2) != 4:\n    raise ValueError"]

    async def score_all() -> list[bool]:
        return await asyncio.gather(
            *(code_tests("", fenced(FORGERIES[forgery]), test, sandbox=PROVIDER) for test in tests)
        )

    assert asyncio.run(score_all()) == [False] * len(tests)


STOPS = "def f(x): raise StopIteration"
ABSENT = "def __getattr__(name): return lambda x: 0\n"
NEAR = "assert abs(f(2) - 4) < 1e-6"
WHOLE = "def f(x): return 0\n"


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (STOPS, "assert all(map(lambda x: f(x) == x * x, [2, 3]))"),
        (STOPS, "for got, expected in zip(map(f, [2]), [4]):\n    assert got == expected"),
        (ABSENT + "def abs(x): return 0", f"from solution import f\n{NEAR}"),
        (ABSENT + "def abs(x): return 0", f"import importlib\nf = importlib.import_module('solution').f\n{NEAR}"),
        (ABSENT + "def all(x): return True", "import solution\nassert all(solution.f(x) == x * x for x in [2, 3])"),
        (WHOLE + "def abs(x): return 0", f"from solution import *\n{NEAR}"),
        (
            WHOLE + "isclose = lambda *_: True",
            "from math import isclose\nfrom solution import *\nassert isclose(f(2), 4)",
        ),
        (WHOLE + "class pytest: approx = lambda x: f", "assert f == pytest.approx(4) or f(2) == 4"),
    ],
)
def test_program_does_not_skip_or_replace_parts_of_the_tests(program, test):
    assert not passes(program, test)
    assert passes("def f(x):\n    return x * x", test)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(g): return g(int, str)", "assert f(lambda a, b: a | b) == 3"),
        ("def f(g): return g({})", "assert f(lambda a: a.__class__.__dict__) == 3"),
        ("def f(x): return int", "assert f(f(1) | f(2)) == 3"),
        ("def f(x): return object", "assert f(f(1)()) == 3"),
        ("def f(x): return int", "assert f(f(1).real) == 3"),
        ("def f(x): return ['a']", "import numpy as np\nassert f(np.array(f(1))) == 3"),
        ("def f(x): return [object(), None]", "import numpy as np\nassert f(np.array(f(1))) == 3"),
    ],
)
def test_unsendable_value_caused_by_the_program_is_wrong(program, test):
    assert not passes(program, test)


def test_program_cannot_send_values_that_need_a_missing_module(monkeypatch):
    """Without NumPy, the program writes the message for an array itself."""
    hide = "import sys\nsys.modules['numpy'] = None\n"
    node = ["numpy", "<f8", [0], "", True]
    reply = f"{{'root': [0], 'nodes': [{node}], 'changed': [], 'printed': ''}}"
    forgery = (
        "import json, os, sys\n"
        f"def f(x):\n    data = json.dumps({reply}).encode()\n"
        "    os.write(int(sys.argv[1]), b'%d\\n%b' % (len(data), data))\n    os._exit(0)"
    )
    assert not passes(forgery, "assert f(1) == 1", test_setup_code=hide)


@pytest.mark.parametrize("name", ["__array_interface__", "__cuda_array_interface__"])
def test_addresses_from_the_program_are_not_read(name):
    """If NumPy used them, it would read the tests' memory at address 8, or past the end of the buffer."""
    interface = "{'shape': (1,), 'typestr': '<i8', 'version': 3, 'data': b'12345678', 'offset': 8}"
    program = f"class A: {name} = {interface}\ndef f(x): return A()"
    assert not passes(program, "import numpy as np\nassert np.array(f(1)).dtype == np.int64")
    assert passes(program, f"assert not hasattr(f(1), {name!r}) and f(1) is not None")


def test_correct_program_passes_the_tests_of_forgeries():
    tests = ["assert f(2) == 4", "assert math.isclose(f(2), 4)", "assert abs(f(2) - 4) < 1e-6 and {f(2)} == {4}"]
    assert passes("def f(x):\n    return x * x", [*tests, "assert all(f(x) == x * x for x in [2, 3])"])


def test_program_does_not_see_the_test_setup():
    cheat = "def f(x):\n    return [v for v in globals().values() if callable(v)][-1](x)\n"
    assert not passes(cheat, "assert f(3) == reference(3)", test_setup_code="def reference(x):\n    return x ** 2")
    assert passes("def f(x): return math.sqrt(x)", "assert f(4) == 2", test_setup_code="import math")


SAME = "def f(x):\n    return x"


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (SAME, "for x in (None, True, -0.0, 10**5000,"
         " 2j, 'é\\ud800', b'\\xff', (1, [2]), {1: {2}}, range(3), float('inf')):"
         "\n    assert f(x) == x and type(f(x)) is type(x)"),
        (SAME, "from collections import *\nfrom decimal import Decimal\nfrom datetime import *\n"
         "for x in (Counter('aab'), deque([1], 3), OrderedDict(a=1),"
         " Decimal('1.10'), timedelta(1), datetime(2020, 1, 2)):"
         "\n    assert f(x) == x and type(f(x)) is type(x)\nassert f(defaultdict(list))[0] == []"),
        (SAME, "import numpy\nx = numpy.arange(6.0).reshape(2, 3)\n"
         "assert numpy.array_equal(f(x), x) and f(x[0, 1]) == 1"),
        (SAME, "x = [1]\nx.append(x)\ny = f(x)\nassert y is x"),
        ("def f(x):\n    return [x, x]", "y = f((1, 2))\nassert y[0] is y[1]"),
        ("def f(x):\n    x.sort()", "x = [3, 1, 2]\nassert f(x) is None and x == [1, 2, 3]"),
        ("def f(x):\n    x[1][0]['a'] = {2}", "y = {}\nf([0, [y]])\nassert y == {'a': {2}}"),
        ("def f(x, *, key=None):\n    return sorted(x, key=key)", "assert f('bA', key=str.lower) == ['A', 'b']\n"
         "assert f([1, -2], key=lambda x: -x) == [1, -2]\nassert f([-2, 1], key=abs) == [1, -2]"),
        ("def f(x):\n    yield from x", "assert list(f([1, 2])) == [1, 2] and next(f('a')) == 'a' and 2 in f([1, 2])"),
        ("def f(x):\n    return sum(x)", "assert f(i for i in range(4)) == 6 and f(map(int, '12')) == 3"),
        ("class Stack:\n    size = 0\n    def __init__(self): self.items = []\n"
         "    def push(self, x): self.items.append(x)\n"
         "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]",
         "s = Stack()\ns.push(3)\ns.push('a')\n"
         "assert len(s) == 2 and s[1] == 'a' and s.items == [3, 'a'] and s.size == 0\n"
         "assert isinstance(s, Stack) and not hasattr(s, 'pop')\ntry:\n    s[5]\n    assert False\n"
         "except IndexError: pass"),
        ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
         "    def __eq__(self, o): return self.x == o.x\n    def __lt__(self, o): return self.x < o.x",
         "assert V(1) + V(2) == V(3) and V(1) != V(2) and min(V(2), V(1)).x == 1 and V(1) != 1"),
        ("class Node:\n    def __init__(self, x): self.x, self.left = x, None\n"
         "def f(n): return n.x + (f(n.left) if n.left else 0)",
         "root = Node(1)\nroot.left = Node(2)\nassert f(root) == 3"),
        ("def f(n):\n    last = None\n    while n: n.next, last, n = last, n, n.next\n    return last",
         "class Node:\n    def __init__(self, x, n=None): self.x, self.next = x, n\nhead = Node(1, Node(2, Node(3)))\n"
         "back = f(head)\nassert (back.x, back.next.x, head.next) == (3, 2, None)"),
        ("class Bad(ValueError): pass\ndef f(x):\n    raise Bad('no', x)",
         "for kind in (Bad, ValueError):\n    try: f(3)\n    except kind as e: assert e.args == ('no', 3)\n"
         "    else: assert False"),
        ("def f():\n    x = yield 1\n    yield x", "g = f()\nassert next(g) == 1 and g.send(5) == 5\n"
         "try:\n    g.send(1)\n    assert False\nexcept StopIteration: pass"),
        ("def f(x): return sorted(x)", "assert f({2: 3}.items()) == [(2, 3)] and f({2: 3}.keys()) == [2]"),
        ("def sum(a, b): return a * b", "from solution import *\nassert sum(2, 3) == 6"),
        (SAME, "class A: pass\nnt = A()\nnt.x = 1\nassert f(2) == 2 and nt.x == 1"),
        ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
        ("def f(x):\n    print('got', x)", "import contextlib, io\n"
         "with contextlib.redirect_stdout(io.StringIO()) as out: f(3)\n"
         "assert out.getvalue() == 'got 3\\n'"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
         "assert f() == (1, 2) and f().y == 2"),
        ("import enum\nclass C(enum.Enum):\n    RED = 1\n"
         "def f(): return C.RED", "assert f() is C.RED and f() == C['RED']"),
        ("def sum(a, b): return a * b", "assert sum(2, 3) == 6"),
        ("def f(x): return x", "from solution import f as g\nimport solution\nassert g(1) == solution.f(1) == 1"),
        ("def f(x): return helper(x)\ndef helper(x): return 1", "import unittest.mock\n"
         "with unittest.mock.patch('solution.helper', lambda x: x + 5): assert f(1) == 6\nassert f(1) == 1"),
        ("def f(x): return x", "class Test:\n    value = f(3)\nassert Test.value == 3"),
    ],
)  # fmt: skip
def test_values_and_objects_pass_between_program_and_tests(program, test):
    assert passes(program, test)


@pytest.mark.parametrize(("entry_point", "right"), [("Solution().add", True), ("Solution().sub", False)])
def test_entry_point_may_be_a_method(entry_point, right):
    program = "class Solution:\n    def add(self, a, b): return a + b\n    def sub(self, a, b): return a - b"
    assert passes(program, "def check(add):\n    assert add(2, b=3) == 5", entry_point=entry_point) is right


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("assert f(2 ==", "the tests are not valid Python"),
        ("import no_such_module", "the tests need a module: No module named 'no_such_module'. Fix: install the module"),
        ("try:\n    f(object())\nexcept Exception: pass", "the tests pass an object of type object"),
    ],
)
def test_invalid_tests_are_a_failure_and_not_a_wrong_answer(test, reason):
    with pytest.raises(ValueError, match=f"code_tests: {reason}"):
        passes(SAME, test)


def test_program_with_a_missing_module_or_name_is_wrong():
    assert not passes("import no_such_module\ndef f(x): return x", "assert f(1) == 1")
    assert not passes("def f(x): import no_such_module", "assert f(1) == 1")
    assert not passes("x = 1", "from solution import f")


@pytest.mark.parametrize("answer", [None, [], "", ["", ""], 3, [1], {"a": "b"}])
def test_code_tests_without_tests_raises(answer):
    with pytest.raises(ValueError, match="code_tests: the answer has no tests"):
        passes("pass", answer)


ADDS = "print(sum(map(int, input().split())))"
PAIRS = [{"input": "1 2", "output": "3"}, {"input": "4 5\n", "output": "9\n"}]


@pytest.mark.parametrize(
    "answer",
    [
        PAIRS,
        json.dumps(PAIRS),
        {"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]},
        {"inputs": [["1 2", ""]], "outputs": [["3"]]},
    ],
)
def test_code_stdin_stdout_reads_all_forms_of_pairs(answer):
    assert prints(ADDS, answer)
    assert not prints("print(4)", answer)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a b\nc\n", "a b\nc", True),
        ("a  b \nc\n\n\n", "a b\nc", True),
        ("\na b\r\nc", "a b\nc\n", True),
        ("a b c", "a b\nc", False),
        ("a b\n\nc", "a b\nc", False),
        ("ab\nc", "a b\nc", False),
        ("1.0", "1", False),
        ("A", "a", False),
        ("", "", True),
        ("a", "", False),
    ],
)
def test_only_whitespace_around_words_is_ignored(printed, expected, same):
    assert _prints(Finished(0, None, 0.0, printed.encode()), expected) is same


def test_program_that_fails_after_its_output_is_wrong():
    assert not prints("print(3)\n1 / 0", [{"input": "", "output": "3"}])
    slow = fenced(f"print(3, flush=True)\nimport time; time.sleep({HANG_S})")
    quick = Unsafe(limits(wall_s=0.5))
    assert not asyncio.run(code_stdin_stdout("", slow, [{"input": "", "output": "3"}], sandbox=quick))


@pytest.mark.parametrize("answer", [None, [], "[]", "no JSON", [{"input": "1"}], {"inputs": ["1"], "outputs": []}, 3])
def test_code_stdin_stdout_without_pairs_raises(answer):
    with pytest.raises(ValueError, match=r"^code_stdin_stdout: the answer (has|is|must be)"):
        prints(ADDS, answer)
