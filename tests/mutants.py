"""What the tests miss: faults put one at a time into the files that decide numbers, bytes or order.

    python -m tests.mutants --seed 1 --count 60

A fault goes into a clone of HEAD, where the test files that import its module run, nearest first,
until one fails or the CPU time of a mutant is spent. A run that was stopped goes on.
"""

import argparse
import ast
import contextlib
import fnmatch
import functools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, zip_longest
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

DECIDE = re.compile(
    r"model\.py|base/(durable|tensors).*|longhaul/(step|optim|sparse|vocab|parallel|checkpoint).*"
    r"|data/(order|sampler|mixture|packing|pipeline|writer|dataset|manifest).*"
    r"|footprint/(.*/)?(allocator|tracker|prediction|workspace|copies|operators).*"
    r"|lab/posttrain/(polic|grade\.|rollout).*"
)
SIGNS = dict(Lt="GtE LtE", GtE="Lt Gt", Gt="LtE GtE", LtE="Gt Lt", Eq="NotEq", NotEq="Eq")
SIGNS |= dict(In="NotIn", NotIn="In", Is="IsNot", IsNot="Is")  # the opposite, off by one
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult)
TELLING = re.compile(r"print|say|tell|report|notice|log\.\w+|warnings\.\w+|\w*Error")  # calls
TIERS = {"fast": "not slow and not gpu", "all": "not gpu"}
SECONDS = 90  # of CPU time for a mutant


class Mutant(NamedTuple):
    """Bytes of a file that are replaced."""

    file: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str

    def text(self) -> bytes | None:
        """The file with the fault; None if it does not compile, or to the same."""
        right = Path(self.file).read_bytes()
        wrong = right[: self.start] + self.after.encode() + right[self.stop :]
        with contextlib.suppress(SyntaxError):
            return wrong if bytecode(wrong) != bytecode(right) else None


@functools.lru_cache(2)
def bytecode(source: bytes | CodeType) -> tuple:
    code = source if isinstance(source, CodeType) else compile(source, "", "exec")
    constants = [bytecode(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


def mutants(file: str) -> Iterator[Mutant]:
    """Every fault of a file."""
    text = Path(file).read_bytes()
    begins = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    for node in visible(ast.parse(text)):
        for kind, after in faults(node):
            start = begins[node.lineno - 1] + node.col_offset
            stop = begins[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(file, node.lineno, kind, start, stop, ast.unparse(node), after)


def visible(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that decide what is computed: no types, no texts, nothing that is only said."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign):
        return
    if isinstance(node, ast.Call) and TELLING.fullmatch(ast.unparse(node.func)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from visible(child)


def faults(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, what stands there instead) of a node."""
    match node:
        case ast.Compare(left=left, ops=[sign], comparators=right):
            others = SIGNS[type(sign).__name__].split()
            for kind, other in zip(("negated", "off by one"), others):
                yield kind, ast.unparse(ast.Compare(left, [getattr(ast, other)()], right))
        case ast.Constant(value=int(value)) if type(value) is int and value <= 8:  # no sizes
            yield "off by one", str(value + 1)
        case ast.BinOp(left, op, right) if isinstance(op, ORDERED):
            yield "swapped", f"({ast.unparse(ast.BinOp(right, op, left))})"
        case ast.Call(func=ast.Attribute(value=value, attr="sum" | "mean" | "logsumexp" as name)):
            coarse = ast.Call(ast.Attribute(value, "bfloat16"), [], [])
            total = ast.Call(ast.Attribute(coarse, name), node.args, node.keywords)
            if ast.unparse(value) not in ("torch", "tl", "np"):
                yield "bf16", f"{ast.unparse(total)}.float()"
        case ast.Attribute(value=ast.Name(id="torch" | "tl" as room), attr="float32"):
            yield "bf16", f"{room}.bfloat16"
        case ast.Call(func=ast.Attribute(value=value, attr="detach")):
            yield "undone", ast.unparse(value)
        case ast.Call(func=ast.Attribute(attr="no_grad")):
            yield "undone", "torch.enable_grad()"
        case ast.Expr(value=ast.Call(func=called)) if not TELLING.fullmatch(ast.unparse(called)):
            kept = re.search("barrier|fsync", ast.unparse(called))
            yield "undone" if kept else "dropped", "pass"
        case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped", "pass"


def sample(files: list[str], seed: int, count: int) -> list[Mutant]:
    """As many mutants of each kind, if there are."""
    found = [mutant for file in filter(DECIDE.fullmatch, files) for mutant in mutants(file)]
    random.Random(seed).shuffle(found)
    kinds = sorted({mutant.kind for mutant in found})
    groups = [[mutant for mutant in found if mutant.kind == kind] for kind in kinds]
    rounds = zip_longest(*(filter(Mutant.text, group) for group in groups))
    return list(islice((mutant for group in rounds for mutant in group if mutant), count))


@functools.cache
def imports(file: str) -> set[str]:
    """Modules that a file imports, or names in a text as a command does."""
    found = set()
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
            case ast.Constant(value=str(text)):
                found |= set(text.split())
    return found


def nearest_tests(file: str, files: list[str]) -> list[str]:
    """Test files by the imports between them and a file; those of its name, then small ones."""
    distance = {file: 0}
    reached = [file]
    for name in reached:
        names = {name, name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")}
        users = [user for user in files if names & imports(user) and user not in distance]
        distance |= dict.fromkeys(users, distance[name] + 1)
        reached += users
    own = set(re.findall("[a-z]{4,5}", file))  # "optim" of optimizers

    def place(name: str) -> tuple:
        shared = own.intersection(re.findall("[a-z]{4,5}", name))
        return distance[name], -len(shared), len(imports(name))

    return sorted((name for name in reached if "/test_" in name), key=place)


def catch(mutant: Mutant, tests: list[str], tier: str) -> str | None:
    """The test that fails with the fault and passes without; None if none does in time."""
    right, wrong = Path(mutant.file).read_bytes(), mutant.text()
    size = 4  # files of the first process; twice as many of the next
    end = os.times().children_user + SECONDS
    while tests and os.times().children_user < end:
        write(mutant.file, wrong)
        failed = failure(tests[:size], tier)
        write(mutant.file, right)
        if failed and failure_without_fault((failed,), tier) is None:
            return failed
        tests = tests[size:]
        size *= 2
    return None


def write(file: str, text: bytes):
    """In a second of its own, by which Python knows that what it compiled is old."""
    Path(file).write_bytes(text)
    os.utime(file, times=2 * (random.randrange(1 << 31),))


def failure(tests: Sequence[str], tier: str) -> str | None:
    """The first test that fails, hangs or crashes."""
    process = multiprocessing.get_context("fork").Process(target=run, args=(tests, tier))
    process.start()
    process.join(10 * SECONDS)  # a test may wait for ever
    silent = time.time() - os.stat("../log").st_mtime
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()

    text = Path("../log").read_text(errors="replace")
    started = re.findall(r"^(tests/.+?::.+?)(?: PASSED| SKIPPED| Fatal| $)", text, re.M)
    found = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", text, re.M)
    if silent > SECONDS / 2 or process.exitcode in (-signal.SIGSEGV, -signal.SIGABRT):
        found += started[-1:]
    return found[0] if found else None


failure_without_fault = functools.cache(failure)


def run(tests: Sequence[str], tier: str):
    """What pytest says, into a log."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with open("../log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    pytest.main(["-xv", *tests, "--no-header", "--basetemp=../temporary", "-m", TIERS[tier]])


def warm():
    """Import what takes half of a small test's time; no fault goes into it."""
    sys.path[0] = os.getcwd()
    del sys.modules["tests"]  # of the folder before
    sys.dont_write_bytecode = False
    for name in ("base.with_torch", "torch.distributed.fsdp"):
        __import__(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="mutants")
    parser.add_argument("--tier", choices=TIERS, default="fast", help="tests that run")
    parser.add_argument("--files", default="*", help="glob of the files to change")
    parser.add_argument("--output", type=Path, default="runs/mutants.jsonl", help="JSON lines")
    options = parser.parse_args()

    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open(options.output, "a+") as output:
        output.seek(0)
        rows = list(map(json.loads, output))
        done = [row["mutant"] for row in rows]
        subprocess.run(["git", "clone", "-q", "--shared", ".", f"{folder}/clone"], check=True)
        os.chdir(f"{folder}/clone")
        warm()

        files = subprocess.check_output(["git", "ls-files", "*.py"], text=True).split()
        for mutant in sample(fnmatch.filter(files, options.files), options.seed, options.count):
            if mutant._asdict() in done:
                continue
            begun = os.times().children_user
            test = catch(mutant, nearest_tests(mutant.file, files), options.tier)
            seconds = round(os.times().children_user - begun)
            rows.append(dict(mutant=mutant._asdict(), test=test, seconds=seconds))
            print(json.dumps(rows[-1]), file=output, flush=True)
            change = f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.before} -> {mutant.after}"
            print(change, f"caught by {test}" if test else "SURVIVED", f"{seconds} s", flush=True)
    print(f"{sum(row['test'] is not None for row in rows)} of {len(rows)} mutants were caught")


if __name__ == "__main__":
    main()
