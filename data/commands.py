"""How the commands of data/ end: 0 done, 2 bad input, 3 damaged data, 6 storage, 130 Ctrl-C."""

import sys
from collections.abc import Callable

from base.flags import line_and_code


def exit_code(program: str, act: Callable[[], object]) -> int:
    """Do it; what a user can mend is one line on standard error."""
    try:
        act()
        return 0
    except (ValueError, OSError) as error:
        words, code = line_and_code(error)
        code = getattr(error, "exit_code", code)
    except KeyboardInterrupt:
        code = 130
        words = "interrupted: run the same command again"
    print(f"{program}: {words}", file=sys.stderr)
    return code
