"""How the commands of data/ end: 0 done, 2 bad input, 3 damaged data, 6 storage, 130 Ctrl-C."""

import sys
from collections.abc import Callable


def exit_code(program: str, act: Callable[[], object]) -> int:
    """Do it; what a user can mend is one line on standard error."""
    try:
        act()
        return 0
    except ValueError as error:
        code = getattr(error, "exit_code", 2)
        words = str(error)
    except OSError as error:
        code = 6
        words = (
            f"cannot read or write: {error}: check the free space and the permissions, then run "
            "the same command again"
        )
    except KeyboardInterrupt:
        code = 130
        words = "interrupted: run the same command again"
    print(f"{program}: {words}", file=sys.stderr)
    return code
