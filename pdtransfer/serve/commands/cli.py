"""The command pdtransfer: binds flags, environment and file to a config, and runs the command.

A command imports its implementation when it runs, and commands of workers import their flags then as well. So --help
and the router neither wait for torch nor load a worker's modules. Exit status: 0 done, 1 failed, 2 misused, 130
interrupted. An error is one line on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError
from cyclopts.config import Env

from ... import __version__
from ...environment import PREFIX
from ...errors import ConfigError, PDTransferError, missing_extra
from ..process import logs
from ..settings.node import FLAT
from ..settings.router import RouterConfig
from .installed import add_installed
from .settings_sources import COMMANDS, check_tokens, nearest, settings_of, sources, warn_of_unknown

FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
SERVED_AT = "--listen", "--http", "--host", "--port"  # where HTTP is served: here, here until 0.3, other servers
SAME = (  # names of one thing, here and in `vllm serve` and SGLang's servers
    SERVED_AT, ("--tp-size", "--prefill-tp", "--decode-tp", "--tp", "--tensor-parallel-size"),
    ("--pp-size", "--prefill-pp", "--pp", "--pipeline-parallel-size"), ("--router", "--url"),
    ("--model", "--model-path", "--served-model-name"),
)  # fmt: skip
PLAIN = ("Unused Tokens", "Unexpected words"), ("requires an argument", "needs a value")  # of cyclopts, and ours

app = App(
    name="pdtransfer",
    help="Hands a prompt's KV cache from prefill to decode, written straight into the memory that decode reads.",
    help_epilogue="Any flag may be set in the environment (PDTRANSFER_FLAG_NAME), or in the file that --config names. "
    "A flag wins over the environment, and the environment over the file. Below all of them, torchrun's RANK, "
    "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set the rank flags. For errors see docs/troubleshooting.md.",
    version=__version__,
    default_parameter=Parameter(
        negative=(), show_default=lambda value: None if value is False or value in (None, "", ()) else str(value)
    ),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.meta.suppress_keyboard_interrupt = False


@app.command
def router(config: Annotated[RouterConfig | None, FLAT] = None) -> int:
    """Runs the router: the HTTP API in front of prefill and decode daemons, or of vLLM or SGLang servers."""
    from ..router.process import run

    config = config or RouterConfig()
    logs.start(config)
    warn_of_unknown(config)
    return run(config)


# The others: the modules of their functions are imported when they run.
_HELP = {
    "daemons:prefill": "Runs a prefill daemon: computes prompts and writes their KV into decode's memory.",
    "daemons:decode": "Runs a decode daemon: receives KV in its memory, and generates from it.",
    "daemons:demo": "Starts a fleet on this host, sends prompts, and checks each answer against a single process.",
    "workers:workers": "Lists, adds, drains and removes the workers of a running router.",
    "top:top": "Shows a fleet in the terminal, live: workers, rooms, rates, arenas and the last failures. q ends it.",
    "tool_commands:timeline": "Breaks down the time to each room's first token, by timelines of all processes.",
    "doctor:doctor": "Lists what this host has and lacks, with a command to fix each problem; status 1 if something "
    "required is missing. With two URLs compares the engines there; status 1 if they do not fit.",
    "tool_commands:keygen": "Writes NAME.key, which stays secret, and NAME.pub, a line for every peer's allow-list.",
    "kernels_build:kernels": "Compiles the kernels that run on a GPU.",
}
for _function, _text in _HELP.items():
    app.command(f"pdtransfer.serve.commands.{_function}", name=_function.partition(":")[2], help=_text)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(help="A TOML file of settings.")] = None,
    debug: Annotated[bool, Parameter(help="Show the traceback of a failure.")] = False,
) -> int:
    """Loads environment and file, runs the command, and returns its status."""
    try:
        app.config = sources(config)
        return app(tokens, exit_on_error=False, print_error=False, verbose=False) or 0
    except (CycloptsError, ConfigError, BrokenPipeError):
        raise
    except Exception as error:  # the last place that can turn an error into one line
        if debug:
            raise
        if missing := missing_extra(error):
            raise missing from error
        return _print_error(_line(error), FAILED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit status; raises only under --debug."""
    app.meta.config = [Env(PREFIX, command=False, show=False), check_tokens]
    try:
        tokens = sys.argv[1:] if arguments is None else list(arguments)
        add_installed(app, tokens)
        return app.meta(tokens, exit_on_error=False, print_error=False, verbose=False) or 0
    except (CycloptsError, ConfigError) as error:
        text = _unknown(error) if isinstance(error, UnknownOptionError) else str(error)
        for theirs, ours in PLAIN:
            text = text.replace(theirs, ours)
        return _print_error(text, MISUSED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        if BrokenPipeError not in (type(error), type(error.__context__)):  # rich makes an exit with status 1 of it
            raise
        # The reader has closed our output: print nothing more, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _line(error: Exception) -> str:
    if isinstance(error, PDTransferError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or type(error).__name__}: {error.strerror or error}"
    return f"a bug, not a misuse: {type(error).__name__}: {error}; --debug shows where"


def _unknown(error: UnknownOptionError) -> str:
    """Names the option that is meant: the command's own for the same thing or the nearest, and who else has one."""
    option = (error.token.keyword or error.token.value).partition("=")[0]
    words = next((words for words in SAME if option in words), (option,))
    names = [name for argument in error.argument_collection if argument.show for name in argument.names]
    same = " or ".join(name for name in names if name in words)
    near = f"{same} HOST:PORT" if same in SERVED_AT else same or nearest(option, names if len(words) == 1 else ())
    owners = [(name, _owners(name)) for name in ((option,) if same else (option, *words))]
    siblings = [f" {'It' if name == option else name} is a flag of {others}." for name, others in owners if others]
    return f"Unknown option: {option}.{''.join(siblings[:1])}" + (f" Did you mean {near}?" if near else "")


def _owners(option: str) -> str:
    names = {command: {field.name.replace("_", "-") for field in fields(settings_of(command))} for command in COMMANDS}
    return ", ".join(command for command in COMMANDS if option.removeprefix("--") in names[command])


def _print_error(text: str, status: int) -> int:
    print("pdtransfer: " + logs.printable(" ".join(text.split())), file=sys.stderr)
    return status
