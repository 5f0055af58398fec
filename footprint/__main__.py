"""`footprint train.py --its flags`: will a training script fit, unchanged, and where is its peak?

    footprint [flags] SCRIPT.py [its flags]
    footprint [flags] -m MODULE [its flags]
    footprint --step FILE.py [flags]    a step as two functions, build() and step(state)
    footprint --hf MODEL [flags]        a model of Hugging Face, by its folder or its name

The flags of footprint stand before the script; what follows is the script's. The flags of --step
and --hf: `footprint --hf --help`. The report goes to standard output, all else to standard error.
Exit codes: 0 it fits, or no card was named; 2 it fits after a change that is printed; 3 it does not
fit; 4 it cannot be predicted, and the line and what to do are printed; 1 an error of the script.
"""

import argparse
import itertools
import json
import os
import sys
import traceback
from pathlib import Path

from footprint.cards.allocator import GIB
from footprint.cards.device import Placement, target_card
from footprint.python import users_file
from footprint.python.refusal import HERE, Refused
from footprint.scripts.answer import ScriptReport
from footprint.scripts.longest import read_lengths
from footprint.scripts.script import ALLOCATOR, EXPANDABLE, LIMIT, Failed, Script, predict_script
from footprint.steps.flags import (
    Parser,
    answers,
    between,
    is_about_step,
    is_answer,
    number,
    shell_words,
)
from footprint.steps.search import VERDICTS

FAILED = 1
REFUSED = 4
MOST_RANKS = 2**16
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3")
LAUNCHERS += ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
RUNNERS = ("<frozen runpy>", "runpy.py")


def parser() -> Parser:
    """The flags of the command in front of a script."""
    lines = __doc__.splitlines()
    made = Parser(
        prog="footprint",
        usage="\n       ".join(line.strip() for line in lines[2:6]),
        description=lines[0],
        epilog="\n".join(lines[7:]),
    )
    add = made.add_argument
    add("--gpu", default="", metavar="NAME", help="card that shall hold it, such as H100; or cpu")
    add(
        "--nproc",
        type=between(0, MOST_RANKS),
        default=0,
        metavar="N",
        help="predict it as under torchrun, N ranks",
    )
    add("--json", default="", metavar="FILE", help="file to write: every result")
    add("--html", default="", metavar="FILE", help="file to write: the timeline and the tables")
    add("--snapshot", default="", metavar="FILE", help="file for docs.pytorch.org/memory_viz")
    add(
        "--answer",
        action="append",
        default=[],
        metavar="FILE:LINE=VALUE",
        help="value that is read from a tensor in a line, such as train.py:12=False",
    )
    add(
        "--lengths",
        default="",
        metavar="FILE",
        help="lengths of the rows of your data, or a number: predict the batch of the longest rows",
    )
    add("--limit", type=number, default=LIMIT, metavar="SECONDS", help="default: %(default)s")
    add("-m", dest="is_module", action="store_true", help="the script is a module")
    add("script", nargs="?", metavar="SCRIPT.py", help="the script, and behind it its own flags")
    add("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def in_front(words: list[str]) -> list[str]:
    """The words in front of a script: flags of footprint and their values."""
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in itertools.takewhile(_is_ours, pairs)]


def _is_ours(pair: tuple[str, str]) -> bool:
    """Whether the second of two neighbouring words is a flag, or may be the value of the first."""
    before, word = pair
    takes_value = before.startswith("--") and "=" not in before
    return word.startswith("-") or takes_value or is_answer(word)


def parse(words: list[str]) -> argparse.Namespace:
    """The flags of a command line; Refused for what is wrong with them."""
    flags = parser().parse_args(words)
    if flags.script is None:
        raise Refused("name a script, such as `footprint train.py --its flags`")
    if not flags.limit > 0:
        raise Refused(f"--limit {flags.limit:g} is out of range: give seconds above 0")
    if flags.script in LAUNCHERS:
        raise Refused(f"{flags.script} is left out: give the script, and --nproc for processes")
    if not flags.is_module and not Path(flags.script).is_file():
        raise Refused(f"{flags.script}: there is no such file: name the script behind the flags")
    if flags.snapshot and flags.gpu == "cpu":
        raise Refused("--snapshot is what a GPU's allocator records: drop --gpu cpu")
    return flags


def main(words: list[str] | None = None) -> int:
    """Answer a command line; the exit code."""
    words = sys.argv[1:] if words is None else words
    try:
        if is_about_step(in_front(words)):
            return about_step(words)
        return about_script(parse(words))
    except Refused as refusal:
        say(f"footprint: {shell_words(refusal)}")
        return REFUSED
    except (users_file.Failed, Failed) as failure:
        traced = "" if isinstance(failure, users_file.Failed) else told(failure.__cause__)
        say(f"{traced}footprint: {failure}")
        return FAILED
    except ValueError as error:
        say(f"footprint: {' '.join(str(error).split())}")
        return REFUSED
    except OSError as error:  # of a file that is written for the user
        say(f"footprint: {error}: name another file")
        return REFUSED


def about_step(words: list[str]) -> int:
    """Answer the flags of a step; the exit code. What it needs takes 0.8 s to load."""
    from footprint.steps import door

    return door.main(words)


def about_script(flags: argparse.Namespace) -> int:
    """Predict a script; the exit code."""
    script = Script(
        name=flags.script,
        args=tuple(flags.args),
        is_module=flags.is_module,
        target=flags.gpu or "cuda",
        nproc=flags.nproc,
        answers=answers(flags.answer),
        limit=flags.limit,
        lengths=read_lengths(flags.lengths),
    )
    return tell(predict_script(script, say), flags)


def tell(report: ScriptReport, flags: argparse.Namespace) -> int:
    """Print and write the report; the exit code."""
    print(report)
    placement = Placement.FITS
    card = target_card(flags.gpu or "cpu")
    if card:
        placement = report.placement(int(card.gib * GIB))
        print(f"on {card.name} ({card.gib:g} GiB): {placement}")
    if placement is Placement.EXPANDABLE:
        print(f"set {ALLOCATOR}={EXPANDABLE}")
    sys.stdout.flush()
    code = VERDICTS[placement].exit_code
    title = " ".join([flags.script, *flags.args])
    if flags.json:
        found = report.json() | {"script": title, "exit_code": code}
        Path(flags.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if flags.html:
        report.html(flags.html, title)
    if flags.snapshot:
        report.snapshot(flags.snapshot)
    return code


def told(error: BaseException | None) -> str:
    """The traceback of the script's error as Python prints it, without what runs the script; ""
    if it has only ended.
    """
    if error is None or isinstance(error, SystemExit):
        return ""
    told = traceback.TracebackException.from_exception(error)
    _cut(told)
    return "".join(told.format())


def _cut(told: traceback.TracebackException | None) -> None:
    if told is None:
        return
    kept = [frame for frame in told.stack if not frame.filename.startswith((HERE, *RUNNERS))]
    kept = [frame for frame in kept if not frame.filename.endswith(RUNNERS)]
    told.stack = traceback.StackSummary.from_list(kept)
    _cut(told.__cause__)
    _cut(told.__context__)


def say(line: str) -> None:
    """Print to standard error, at once."""
    print(line, file=sys.stderr, flush=True)


def command() -> None:
    """The console command. What other programs print that the script starts goes to standard error,
    and threads that it has started end with it.
    """
    sys.stdout = sys.__stdout__ = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
