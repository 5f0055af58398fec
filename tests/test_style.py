"""One language: statements that hide a second idea are banned, and a line holds about eight tokens.

`python tests/test_style.py FILES` lists what these tests would refuse, with line numbers.
CONTRIBUTING.md says what to write instead.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
ELSEWHERE = {".venv", ".venv-cpu", "runs", "build"}
# pip may be writing into .venv-cpu, so it is not even looked into
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in ELSEWHERE]
SOURCES = sorted([*ROOT.glob("*.py"), *(path for one in FOLDERS for path in one.rglob("*.py"))])
NOT_THE_PRODUCT = {"tests", "benchmarks"}
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in NOT_THE_PRODUCT]
TOKENS_PER_LINE = 8.5
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
TRUTH = (ast.Compare, ast.BoolOp)


def holds(node: ast.AST, kind) -> bool:
    """Whether a node of the kind is anywhere below, or is the node itself."""
    return any(isinstance(child, kind) for child in ast.walk(node))


def is_truth(node: ast.AST) -> bool:
    """Whether the expression can only be a boolean."""
    negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"
    return isinstance(node, TRUTH) or negation or call


def is_optional_list(list_node: ast.AST, times: ast.AST) -> bool:
    """`[f"..."] * flag`: a list with computed elements, repeated by a name."""
    if not isinstance(list_node, ast.List) or not isinstance(times, ast.Name | ast.Attribute):
        return False
    return any(holds(element, (ast.JoinedStr, ast.Call)) for element in list_node.elts)


def condition_table(node: ast.AST) -> bool:
    """A loop over a literal table of (condition, message) whose body raises."""
    if not isinstance(node, ast.For) or not isinstance(node.iter, ast.List | ast.Tuple):
        return False
    return holds(node.iter, ast.JoinedStr) and any(holds(part, ast.Raise) for part in node.body)


def times_boolean(node: ast.AST) -> bool:
    """A number, text or list multiplied by a truth value."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    left, right = node.left, node.right
    if is_truth(left) or is_truth(right):
        return True
    return is_optional_list(left, right) or is_optional_list(right, left)


def walrus_in_a_call(node: ast.AST) -> bool:
    """A name bound inside the arguments of a call."""
    if not isinstance(node, ast.Call):
        return False
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(holds(argument, ast.NamedExpr) for argument in arguments)


def tuple_as_statements(node: ast.AST) -> bool:
    """`a.mul_(x), b.mul_(y)` on a line."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple)


def nested_condition(node: ast.AST) -> bool:
    """A conditional expression inside another."""
    if not isinstance(node, ast.IfExp):
        return False
    return any(holds(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def many_names_at_once(node: ast.AST) -> bool:
    """`a, b, c = x, y, z`: three statements in one."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(one, ast.Tuple) and len(one.elts) > 2 for one in node.targets)


def positional_launch(node: ast.AST) -> bool:
    """`kernel[grid](a, b, c, d)`: more than three arguments that only their order names."""
    launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    return launch and len(node.args) > 3


BANNED = {
    "a table of conditions and messages: write one `if` for each": condition_table,
    "multiplied by a truth value: write a conditional": times_boolean,
    "a walrus inside a call's argument: assign before the call": walrus_in_a_call,
    "a tuple used as two statements: write two lines": tuple_as_statements,
    "a conditional expression inside another: write `if` statements": nested_condition,
    "three or more names assigned in one statement: write one line each": many_names_at_once,
    "more than three positional arguments in a kernel launch: name them": positional_launch,
}


def violations(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what is wrong) of everything that is banned."""
    found = set()
    for node in ast.walk(tree):
        for words, holds_for in BANNED.items():
            if holds_for(node):
                found.add((node.lineno, words))
    return sorted(found)


def docstrings(tree: ast.AST) -> set[tuple[int, int]]:
    """Where the docstrings begin."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            found.add((node.body[0].lineno, node.body[0].col_offset))
    return found


def tokens_and_lines(path: Path) -> tuple[int, int]:
    """Tokens of code, and the lines on which such tokens start."""
    text = path.read_text(encoding="utf-8")
    skipped = docstrings(ast.parse(text))
    tokens = whole_strings(tokenize.generate_tokens(io.StringIO(text).readline))
    starts = [one.start for one in tokens if one.type not in LAYOUT and one.start not in skipped]
    return len(starts), len({line for line, _ in starts})


def whole_strings(tokens):
    """The tokens with each f-string as one, as it is before Python 3.12, which cuts it up."""
    depth = 0
    for token in tokens:
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_END":
            depth -= 1
            continue
        if depth == 0:
            yield token
        if name == "FSTRING_START":
            depth += 1


def test_no_statement_hides_a_second_idea():
    found = {path: violations(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert not {path: wrong for path, wrong in found.items() if wrong}


def test_a_line_of_the_product_holds_about_eight_tokens():
    counts = [tokens_and_lines(path) for path in PRODUCT]
    tokens = sum(count for count, _ in counts)
    lines = sum(count for _, count in counts)
    assert tokens / lines <= TOKENS_PER_LINE


if __name__ == "__main__":
    for name in sys.argv[1:] or map(str, PRODUCT):
        for line, words in violations(ast.parse(Path(name).read_text(encoding="utf-8"))):
            print(f"{name}:{line}: {words}")
        tokens, lines = tokens_and_lines(Path(name))
        if lines and tokens / lines > TOKENS_PER_LINE:
            print(f"{name}: {tokens / lines:.1f} tokens a line")
