"""A `python` whose commands begin in a process that has imported torch, as half of a small one's
time is that import. A command is a process of its own, with its folder, environment and files.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "triton",
)
# What reads its program from a text, and data/, which needs no torch, begin in a new Python.
CLIENT = """#!{python} -IS
import json, os, socket, sys

words = [word for word in sys.argv[1:] if word != "-u"]
own = words[0] == "-m" or words[0].endswith(".py")
if not own or " ".join(words).startswith("-m data."):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    request = json.dumps([words, os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [request.encode()], [0, 1, 2])
    sys.exit(int(server.recv(10)))
"""


@contextlib.contextmanager
def warm_python(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `python`, also of the ranks of torchrun, is the one in `folder`."""
    program = folder / "python"
    address = str(folder / "server")
    program.write_text(CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(address)
        server.listen()
        words = [sys.executable, "-m", __name__, str(server.fileno())]
        process = subprocess.Popen(
            words, cwd=ROOT, pass_fds=[server.fileno()], stdin=subprocess.PIPE
        )
    path = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    try:
        yield os.environ | {"PATH": os.pathsep.join(path), "PYTHON_EXEC": str(program)}
    finally:
        process.communicate()


def serve(server: socket.socket):
    """Start a process for each request, until the test that made this one has ended."""
    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # or each command looks for garbage among all of torch's objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
        client, _ = server.accept()
        if os.fork() == 0:
            server.close()
            begin(client)
            return
        client.close()


def begin(client: socket.socket):
    """Run a command in a process that another one watches."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, *_ = socket.recv_fds(client, 1 << 20, 3)
    command = os.fork()
    if command:
        watch(command, client)
        os._exit(0)  # to tear torch down takes 0.4 s
    client.close()
    run(*json.loads(request), files)


def watch(command: int, client: socket.socket):
    """Tell the command's exit code; kill it if the client has been killed."""
    ended = 0
    while not ended:
        ended, status = os.waitpid(command, os.WNOHANG)
        if not ended and select.select([client], [], [], 0.02)[0]:
            os.kill(command, signal.SIGKILL)
            return
    code = os.waitstatus_to_exitcode(status)
    client.send(str(code % 256).encode())


def run(words: list[str], folder: str, environment: dict[str, str], files: list[int]):
    """What `python` does with its arguments."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = folder
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)
