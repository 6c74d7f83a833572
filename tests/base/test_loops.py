"""Loops in `with` and `try`: an interrupt that arrives in them runs their end.

Python 3.12 and 3.13 compile a condition at the end of a loop, as in `while condition:`, to a jump
that no `with` or `try` around the loop covers. A Ctrl-C that arrives there skips their end: a lock
stays locked. A loop that is called, or whose last statement is not a condition, is covered.
"""

import ast
import dis
import sys
import types

from tests.support.import_graph import modules

UNINTERRUPTED = {
    "base.interrupts": "in a thread, where Python raises no interrupts",
    "data.prefetch": "in a thread",
    "ps.work": "in a worker, whose function has ended",
    "ps.server": "ends the process",
    "tools.doctor.distributed": "ends the process",
    "training.loop": "raises interrupts between two steps",
}


def codes(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def inside(node):
    """Yields the nodes of a function, without those of functions inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from inside(child)


def is_needed(node):
    """Whether an interrupt must run the end of a `with` or `try`."""
    if isinstance(node, ast.With):
        return "suppress" not in ast.unparse(node.items[0])
    if not isinstance(node, ast.Try):
        return False
    kinds = [ast.unparse(handler.type or ast.Constant(None)) for handler in node.handlers]
    broad = [kind for kind in kinds if "BaseException" in kind or "Interrupt" in kind]
    return bool(node.finalbody or broad or "None" in kinds)


def blocks(tree):
    """Returns the lines of these blocks, by name and first line of their function."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    return {
        (fn.name, min([fn.lineno, *(each.lineno for each in fn.decorator_list)])): [
            range(node.body[0].lineno, node.body[-1].end_lineno + 1)
            for node in inside(fn)
            if is_needed(node)
        ]
        for fn in functions
    }


def uncovered(tree):
    """Yields function and line of jumps in a `with` or `try` that does not cover them."""
    lines = blocks(tree)
    for code in codes(compile(tree, "module", "exec")):
        bytecode = dis.Bytecode(code)
        for jump in bytecode:
            is_covered = any(e.start <= jump.offset < e.end for e in bytecode.exception_entries)
            if jump.opname.startswith("JUMP_BACKWARD") and not is_covered:
                at = jump.positions.lineno
                is_inside = any(at in block for block in lines.get(key_of(code), []))
                if is_inside and jump.opname != "JUMP_BACKWARD_NO_INTERRUPT":
                    yield f"{code.co_qualname}:{at}"


def key_of(code):
    return code.co_name, code.co_firstlineno


def test_interrupts_in_loops_run_the_end_of_the_blocks_around(subtests):
    for name, tree in modules().items():
        if name.removeprefix("_src.") not in UNINTERRUPTED:
            with subtests.test(msg=name):
                assert not set(uncovered(tree))


def test_the_law_finds_what_this_python_does_not_cover():
    """If a newer Python covers it, this file can go."""
    condition = "def f():\n    with lock:\n        while condition():\n            g()\n"
    assert set(uncovered(ast.parse(condition))) == (
        {"f:3"} if sys.version_info >= (3, 12) else set()
    )
    rest = "def f():\n    with lock:\n        for _ in h():\n            g()\n"
    assert not set(uncovered(ast.parse(rest)))
