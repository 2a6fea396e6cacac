"""The standard library as data: signature and docstring, then the body; nothing twice, and always the same."""

import ast
from itertools import islice

from megabatch.train.data.stdlib import (
    MAX_BYTES,
    MIN_BYTES,
    Function,
    functions_of,
    stdlib_functions,
    stdlib_root,
)

MODULE = '''
import os

def undocumented(x):
    return x

class Thing:
    @property
    async def method(
        self,
    ):
        """Says é.

        Twice."""
        def inner():
            return 1
        return inner()

def only_documented():
    """Nothing else."""

def on_one_line(): return 1
'''


def test_signature_and_docstring_are_the_prompt_and_the_body_is_the_response() -> None:
    undocumented, method = functions_of(MODULE, "module.py")
    assert undocumented == Function("module.py:4", "def undocumented(x):\n", "    return x\n")
    assert method.prompt == 'async def method(\n    self,\n):\n    """Says é.\n\n    Twice."""\n'
    assert method.response == "    def inner():\n        return 1\n    return inner()\n"


def test_only_newlines_end_a_line_as_they_do_for_ast() -> None:
    source = "\f\ntext = 'a\u2028b\x0bc'\ndef f():\n    '''One\x0c.'''\n    return '\x85'"
    assert list(functions_of(source, "m.py")) == [
        Function("m.py:3", "def f():\n    '''One\x0c.'''\n", "    return '\x85'")
    ]


def test_what_is_not_python_has_no_functions() -> None:
    assert list(functions_of("print 'python 2'", "old.py")) == []
    assert list(functions_of("a\0b", "binary.py")) == []


def test_the_standard_library_gives_functions_of_the_size_that_is_asked_for() -> None:
    functions = list(islice(stdlib_functions(stdlib_root()), 500))
    assert functions == list(islice(stdlib_functions(stdlib_root()), 500))
    texts = [function.prompt + function.response for function in functions]
    assert len(set(texts)) == 500
    assert all(MIN_BYTES <= len(text.encode()) <= MAX_BYTES for text in texts)
    assert all(function.response.strip() for function in functions)
    assert not any("/test/" in function.name or "/tests/" in function.name for function in functions)
    assert sum(isinstance(ast.parse(text).body[0], ast.FunctionDef | ast.AsyncFunctionDef) for text in texts) > 490
